"""From a config to the objects of a run: first everything that can be checked cheaply, then the models."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from callbacks.checkpoint import AtomicCheckpointIO, BestCheckpoint, RolloutCheckpoint, StopRequest
from callbacks.monitors.evaluation import EvaluationMonitor, EvaluationSettings
from callbacks.monitors.health import CostMonitor, HealthMonitor
from callbacks.monitors.prompts import PromptMonitor
from callbacks.monitors.rewards import RewardMonitor
from callbacks.monitors.rollouts import RolloutRecorder
from callbacks.monitors.samples import SampleLog
from callbacks.progress import ProgressReport, StatusLine
from callbacks.techniques.base import Technique
from dapo_pl.data.prompts import tokenize_prompts
from dapo_pl.data.rollout import RolloutDataModule
from dapo_pl.data.sources import Split
from dapo_pl.data.worked_examples import warm_start_examples
from dapo_pl.errors import UserError
from dapo_pl.logs import JsonLinesLogger
from dapo_pl.models.directory import ModelFacts, check_model, default_cache_dir, load_tokenizer
from dapo_pl.module import CHECKPOINT_FORMAT, DAPOModule
from dapo_pl.policy import CausalPolicy
from dapo_pl.rewards import task_reward
from dapo_pl.rollout.early_rejection import EarlyRejectionSettings
from dapo_pl.rollout.engine import Engine, Sampling
from dapo_pl.rollout.ledger import CostLedger
from dapo_pl.rollout.records import read_steps
from dapo_pl.rollout.replay_engine import ReplayEngine
from dapo_pl.rollout.sampler import PromptOrder, RolloutInterrupted, RolloutSettings, Sampler
from dapo_pl.rollout.task_reward import TOTAL, RewardSettings, TaskReward
from dapo_pl.rollout.types import Prompt
from dapo_pl.seams import Seams
from dapo_pl.warm_start import Example, WarmStartSettings, warm_start

log = logging.getLogger(__name__)


@dataclass
class Settings:
    """What a config says before any file is read."""

    techniques: list[Technique]
    rollout: RolloutSettings
    sampling: Sampling
    evaluation: EvaluationSettings
    reward: RewardSettings


@dataclass
class Plan(Settings):
    """A checked run: nothing in it has loaded a model yet."""

    config: DictConfig
    directory: Path
    warm_start: WarmStartSettings | None
    examples: Sequence[Example]
    model: str
    facts: ModelFacts
    tokenizer: PreTrainedTokenizerBase
    train_prompts: list[Prompt]
    evaluation_prompts: list[Prompt]
    checkpoint: Path | None


def check_settings(config: DictConfig) -> Settings:
    """Refuse values that are wrong in themselves or against each other; nothing is read or loaded."""
    rollout = OmegaConf.to_container(config.rollout, resolve=True)
    assert isinstance(rollout, dict)
    rollout.pop("warmup_steps")
    early = EarlyRejectionSettings(**rollout.pop("early_rejection"))
    settings = RolloutSettings(**rollout, early_rejection=early)  # pyright: ignore[reportCallIssue]
    sampling = Sampling(**config.sampling)
    if sampling.top_p != 1:
        raise UserError(
            f"sampling.top_p is {sampling.top_p}: the ratio would compare two distributions; "
            "it must be 1 in training (evaluation.top_p is free)"
        )
    evaluation = EvaluationSettings(**config.evaluation)
    reward = load_reward(config)
    techniques, seams = load_techniques(config, reward)
    if early.enabled:
        check_early_rejection(seams, reward)
    check_logger(config.logger.name)
    get_class(config.engine._target_).require()
    return Settings(techniques, settings, sampling, evaluation, reward)


def plan(config: DictConfig, directory: Path) -> Plan:
    """Check a config from the cheapest to the dearest; raises `UserError` at the first thing that is wrong."""
    settings = check_settings(config)
    checkpoint = find_checkpoint(config, directory)
    if replays(config):
        read_steps(Path(config.engine.path))

    problems = [load_problems(config, split) for split in ("train", "evaluation")]
    warm, examples = prepare_warm_start(config)
    model, facts, tokenizer = prepare_model(config)
    if checkpoint is not None:
        check_checkpoint(checkpoint, facts, model)
    if warm is not None and not Path(model).is_dir():
        raise UserError(
            f"the warm start needs a local directory and model.path is the hub name {model!r}: "
            "download it first, or set warm_start=none"
        )
    train_prompts, evaluation_prompts = (prepare_prompts(config, split, tokenizer) for split in problems)
    return Plan(
        **vars(settings),
        config=config,
        directory=directory,
        warm_start=warm,
        examples=examples,
        model=model,
        facts=facts,
        tokenizer=tokenizer,
        train_prompts=train_prompts,
        evaluation_prompts=evaluation_prompts,
        checkpoint=checkpoint,
    )


def made(options: DictConfig, **arguments: Any) -> Any:
    """What a `_target_` of the config makes; whatever its constructor refuses is the user's to read."""
    try:
        return instantiate(options, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        reason = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"{options._get_full_key(None)}: cannot make {options._target_}: {reason}") from error


def prepare_warm_start(config: DictConfig) -> tuple[WarmStartSettings | None, Sequence[Example]]:
    """Settings and worked examples, or None and none of them for `warm_start=none`."""
    options = OmegaConf.to_container(config.warm_start, resolve=True)
    assert isinstance(options, dict)
    if not options.pop("enabled"):
        return None, []
    settings = WarmStartSettings(**options)  # pyright: ignore[reportCallIssue]
    size = settings.steps * settings.batch_size
    source = made(config.data)
    return settings, warm_start_examples(source, size, settings.seed, settings.direct_share)


def prepare_model(config: DictConfig) -> tuple[str, ModelFacts, PreTrainedTokenizerBase]:
    """Directory or hub name, what its config says, and its tokenizer; no weights are loaded."""
    model = str(made(config.model).prepare())
    facts = check_model(model)
    window = config.engine.max_model_len
    if window > facts.max_position_embeddings:
        raise UserError(
            f"engine.max_model_len is {window}, more than the {facts.max_position_embeddings} positions of the "
            "model: lower it"
        )
    return model, facts, load_tokenizer(model)


def load_problems(config: DictConfig, split: Split) -> Dataset:
    """A split of the prompt source; its files are read and checked here, before any model is touched."""
    return made(config.data).load(split)


def prepare_prompts(config: DictConfig, problems: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Problems as token ids, each proven to fit the engine's window."""
    return tokenize_prompts(
        problems,  # pyright: ignore[reportArgumentType]
        tokenizer,
        max_model_len=config.engine.max_model_len,
        max_tokens=config.sampling.max_tokens,
    )


def load_reward(config: DictConfig) -> RewardSettings:
    """The reward's functions, each imported and proven to take what it will be given."""
    options = OmegaConf.to_container(config.reward, resolve=True)
    assert isinstance(options, dict)
    return RewardSettings.from_options({str(name): value for name, value in options.items()})


def make_seams(reward: RewardSettings) -> Seams:
    """Naive GRPO on the config's reward."""
    return Seams() if reward.plain else Seams(reward_terms={TOTAL: task_reward})


def replays(config: DictConfig) -> bool:
    """Whether the responses are recorded ones."""
    return issubclass(get_class(config.engine._target_), ReplayEngine)


def load_techniques(config: DictConfig, reward: RewardSettings) -> tuple[list[Technique], Seams]:
    """The technique callbacks, and scratch seams that prove them not to be in each other's way or the reward's."""
    techniques = []
    seams = make_seams(reward)
    for name, options in config.technique.items():
        technique = made(options)
        if not isinstance(technique, Technique):
            raise UserError(f"technique.{name} is a {type(technique).__name__}, which is no Technique")
        technique.apply(seams)
        techniques.append(technique)
    for component in reward.components:
        if not reward.plain and component.name in seams.reward_terms:
            raise UserError(f"reward {component.name} has the name of a technique's reward term: rename it")
    return techniques, seams


def check_early_rejection(seams: Seams, reward: RewardSettings) -> None:
    """Refuse early rejection where no group is filtered, or filtered by something else than correctness."""
    off = "set rollout.early_rejection.enabled=false"
    if "group_filter" not in seams.owners:
        raise UserError(
            "rollout.early_rejection gives up groups that a filter would, and no technique filters groups: add "
            f"dynamic_sampling, or {off}"
        )
    if not reward.plain:
        raise UserError(
            f"rollout.early_rejection goes by correctness, and the reward is not correctness alone: {off}"
        )


def check_logger(name: str) -> None:
    """Refuse a logger that is unknown or not installed."""
    if name not in ("aim", "csv", "none"):
        raise UserError(f"logger.name is {name!r}; known are aim, csv, none")
    if name == "aim" and importlib.util.find_spec("aim") is None:
        raise UserError("logger=aim needs Aim, which is not installed: pip install aim, or choose logger=csv")


def find_checkpoint(config: DictConfig, directory: Path) -> Path | None:
    """The checkpoint named by `ckpt_path`, or None."""
    if config.ckpt_path is None:
        return None
    path = directory / "checkpoints" / "last.ckpt" if config.ckpt_path == "last" else Path(config.ckpt_path)
    if not path.is_file():
        raise UserError(
            f"ckpt_path={config.ckpt_path}: there is no checkpoint "
            + (
                f"of an earlier run of this command under {directory.parent}"
                if config.ckpt_path == "last"
                else "there"
            )
            + "; leave ckpt_path out to start a new run"
        )
    return path


def check_checkpoint(checkpoint: Path, facts: ModelFacts, model: str) -> None:
    """Refuse the checkpoint of another model or version before weights that do not fit are loaded."""
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["dapo"]
        fingerprint, written = saved["fingerprint"], saved.get("format", 1)
    except Exception as error:
        raise UserError(
            f"ckpt_path: {checkpoint} is not a checkpoint of this platform ({type(error).__name__})"
        ) from error
    if written != CHECKPOINT_FORMAT:
        raise UserError(
            f"ckpt_path: {checkpoint} has format {written} and this version goes on from format {CHECKPOINT_FORMAT}: "
            "finish that run with the version that began it (git.commit in its run.json), or start a new one"
        )
    if fingerprint != facts.fingerprint:
        raise UserError(
            f"ckpt_path: {checkpoint} is from another model than {model}: choose the model it was trained with"
        )


@dataclass
class Run:
    """What `trainer.fit` needs, and what is looked at afterwards."""

    trainer: L.Trainer
    module: DAPOModule
    data: RolloutDataModule
    evaluation: EvaluationMonitor
    aim_hash: str | None
    warm_start_seconds: float


def build(plan: Plan, stop: StopRequest, status: StatusLine, record: dict[str, Any]) -> Run:
    """Warm start (unless cached), load policy and engine, and put the Trainer together."""
    config = plan.config
    L.seed_everything(config.seed, verbose=False)
    start = time.perf_counter()
    model = plan.model
    if plan.warm_start is not None:
        model = run_warm_start(model, plan.examples, plan.warm_start, config, status, stop)
    warm_start_seconds = time.perf_counter() - start

    status.say("loading the model")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = CausalPolicy(
        network,
        temperature=plan.sampling.temperature,
        share_prompts=config.policy.share_prompts,
        chunk=config.policy.chunk,
    )
    policy.check_layout()
    ledger = CostLedger()
    seams = make_seams(plan.reward)
    reward = None if plan.reward.plain else TaskReward(plan.reward)
    module = DAPOModule(
        policy,
        seams,
        ledger,
        optimizer=made(config.optimizer),
        warmup_rollout_steps=config.rollout.warmup_steps,
        gradient_clip=config.policy.gradient_clip,
        max_tokens_per_micro_batch=config.policy.max_tokens_per_micro_batch,
        pad_id=plan.facts.pad_id,
        fingerprint=plan.facts.fingerprint,
    )
    status.say(f"starting {get_class(config.engine._target_).__name__}")

    def new_engine() -> Engine:
        return make_engine(config.engine, model, plan.facts, plan.tokenizer)

    sampler = Sampler(
        engine=new_engine(),
        order=PromptOrder(plan.train_prompts, config.seed),
        seams=seams,
        settings=plan.rollout,
        sampling=plan.sampling,
        seed=config.seed,
        max_in_flight=config.engine.max_num_seqs,
        should_stop=stop,
    )
    if reward is not None:
        sampler.task_reward = reward
    data = RolloutDataModule(sampler, ledger, new_engine)
    evaluation = EvaluationMonitor(
        plan.evaluation,
        plan.evaluation_prompts,
        plan.sampling.max_tokens,
        plan.directory / "evaluations",
        status,
        recorded=Path(config.engine.path).parent / "evaluations" if replays(config) else None,
    )
    options = config.checkpoint
    checkpoint = RolloutCheckpoint(
        plan.directory / "checkpoints", options.every_n_steps, stop, options.keep_every_n_steps
    )
    loggers, aim_hash = make_loggers(plan, record)
    trainer = L.Trainer(
        **config.trainer,
        strategy=config.strategy.name,
        max_epochs=1,
        logger=loggers,
        callbacks=[
            *plan.techniques,
            HealthMonitor(),
            RewardMonitor(reward),
            CostMonitor(),
            PromptMonitor(plan.directory / "prompts.jsonl"),
            SampleLog(
                plan.directory / "samples.jsonl", config.callbacks.sample_log_every_n_steps, plan.tokenizer.decode
            ),
            ProgressReport(status),
            *([RolloutRecorder(plan.directory / "rollouts")] if config.record_rollouts else []),
            checkpoint,
            evaluation,
            *([BestCheckpoint(checkpoint, evaluation.results)] if options.keep_best else []),
            *made(config.callbacks.extra).values(),
        ],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=plan.directory,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    return Run(trainer, module, data, evaluation, aim_hash, warm_start_seconds)


def run_warm_start(
    model: str,
    examples: Sequence[Example],
    settings: WarmStartSettings,
    config: DictConfig,
    status: StatusLine,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """The warm-started model's directory, made now or found in the cache."""
    start = time.perf_counter()

    def on_step(step: int, loss: float) -> None:
        if should_stop():
            raise RolloutInterrupted
        left = (time.perf_counter() - start) / step * (settings.steps - step)
        text = f"warm start {step}/{settings.steps}  loss {loss:.3f}  | about {left:.0f} s left"
        if step % max(1, settings.steps // 5) == 0:
            status.say(text)
        else:
            status.update(text)

    cache = Path(config.model.get("cache_dir") or default_cache_dir())
    result = warm_start(Path(model), examples, settings, cache, on_step)
    status.say(f"warm start: {result}")
    return str(result)


def make_engine(options: DictConfig, model: str, facts: ModelFacts, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine the config names; another one is never substituted."""

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=True)  # pyright: ignore[reportReturnType]

    return made(options, model=model, end_ids=list(facts.end_ids), pad_id=facts.pad_id, decode=decode)


def make_loggers(plan: Plan, record: dict[str, Any]) -> tuple[list[Logger], str | None]:
    """The plain log, and the tracker the config names. A resumed run goes on with its own Aim run."""
    config = plan.config
    lines = JsonLinesLogger(plan.directory / "metrics.jsonl")
    # A row of a sweep that died before its first checkpoint begins again in the same directory.
    done = -1
    if plan.checkpoint is not None:
        done = torch.load(plan.checkpoint, map_location="cpu", weights_only=True, mmap=True)["dapo"]["step"]
    lines.drop_after(done)
    if config.logger.name == "csv":
        return [lines, CSVLogger(plan.directory, name="csv", version="")], None
    if config.logger.name == "none":
        return [lines], None
    from aim.pytorch_lightning import AimLogger

    home = Path(config.output_dir)
    saved_hash = plan.directory / "aim.json"
    run_hash = json.loads(saved_hash.read_text())["run_hash"] if saved_hash.exists() else None
    aim = AimLogger(
        repo=str(home),
        experiment=plan.directory.parent.name,
        run_name=plan.directory.name,
        run_hash=run_hash,
        system_tracking_interval=None,
        log_system_params=False,
        capture_terminal_logs=False,
        context_prefixes={},
    )
    aim.log_hyperparams({"config": OmegaConf.to_container(config, resolve=True), **record, "pid": os.getpid()})
    saved_hash.write_text(json.dumps({"repo": str(home), "run_hash": aim.version}) + "\n")
    return [lines, aim], aim.version
