"""Held-out accuracy before, during and after training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from callbacks.progress import StatusLine, duration
from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import rollout_data
from dapo_pl.errors import UserError
from dapo_pl.evaluation import EvaluationResult
from dapo_pl.rollout.engine import Engine, Sampling
from dapo_pl.rollout.evaluate import evaluate
from dapo_pl.rollout.sampler import RolloutInterrupted
from dapo_pl.rollout.types import Prompt


@dataclass(frozen=True)
class EvaluationSettings:
    """k samples of each problem; `every_n_steps` 0 evaluates only before and after training."""

    name: str
    samples: int
    temperature: float
    top_p: float
    every_n_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"evaluation.samples is {self.samples}; it must be at least 1")
        if self.every_n_steps < 0:
            raise UserError(f"evaluation.every_n_steps is {self.every_n_steps}; 0 means before and after only")


class EvaluationMonitor(L.Callback):
    """Evaluates with the training engine and keeps every table in `directory`.

    A table that is already there is not made again, so a resumed run keeps its "before".

    Args:
        settings: what to draw.
        prompts: the held-out problems.
        max_tokens: generation limit.
        directory: of the tables, `step_000000.json` and so on.
        status: where progress goes.
        recorded: the tables of a run that is being replayed, which are taken over instead of made.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        prompts: Sequence[Prompt],
        max_tokens: int,
        directory: Path,
        status: StatusLine,
        recorded: Path | None = None,
    ) -> None:
        self.settings = settings
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.directory = directory
        self.status = status
        self.recorded = recorded
        self.results: dict[int, EvaluationResult] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = rollout_data(trainer)
        for path in sorted(self.directory.glob("step_*.json")):
            step = int(path.stem.removeprefix("step_"))
            if step <= data.step:
                self.results[step] = EvaluationResult.from_json(path)
                self._log(trainer, step)  # again: a run may have been killed between the table and the log
            else:  # of steps that will be trained again
                path.unlink()
        if self.recorded is None:
            # What these cost is known from themselves, whether or not the checkpoint was written after them.
            kept = [length for result in self.results.values() for row in result.lengths for length in row]
            booked = data.ledger.compute()
            data.ledger.update(
                responses_evaluation=max(0, len(kept) - booked["responses_evaluation"]),
                tokens_evaluation=max(0, sum(kept) - booked["tokens_evaluation"]),
            )
        # A run stopped during an evaluation makes it up here; one that starts from another run's checkpoint
        # takes that for its "before".
        if self.results:
            self._evaluate_if_due(trainer, data.step)
        else:
            self.evaluate(trainer, data.step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        self._evaluate_if_due(trainer, batch.step)

    def _evaluate_if_due(self, trainer: L.Trainer, step: int) -> None:
        every = self.settings.every_n_steps
        last = len(trainer.train_dataloader)  # pyright: ignore[reportArgumentType]
        if step in (0, last) or (every and step % every == 0):
            self.evaluate(trainer, step)

    def evaluate(self, trainer: L.Trainer, step: int) -> None:
        """Evaluate the policy as it is after `step` rollout steps, unless that table exists."""
        if step in self.results:
            return
        if self.recorded is not None:
            self._keep(trainer, step, self._take_over(self.recorded / f"step_{step:06}.json"))
            return
        data = rollout_data(trainer)
        data.sync()
        engine = data.sampler.engine
        before = engine.tokens_generated
        try:
            result, tokens, seconds = evaluate_and_keep(
                engine,
                self.prompts,
                self.settings,
                self.max_tokens,
                self.directory,
                f"step_{step:06}",
                self.status,
                data.sampler.should_stop,
            )
        except RolloutInterrupted:
            data.ledger.update(tokens_interrupted=engine.tokens_generated - before)
            raise
        data.account(engine.tokens_generated - before - tokens)
        data.ledger.update(
            responses_evaluation=len(self.prompts) * self.settings.samples,
            tokens_evaluation=tokens,
            evaluation_seconds=seconds,
        )
        self._keep(trainer, step, result)

    def _take_over(self, path: Path) -> EvaluationResult:
        if not path.exists():
            raise UserError(
                f"engine=replay generates nothing, and the recorded run has no evaluation {path}: replay as many "
                "steps as it had, with its evaluation.every_n_steps"
            )
        result = EvaluationResult.from_json(path)
        if result.problem_ids != [prompt.id for prompt in self.prompts]:
            raise UserError(f"{path} evaluates other problems than this config: set the group data to what it was")
        self.directory.mkdir(parents=True, exist_ok=True)
        result.to_json(self.directory / path.name)
        return result

    def _keep(self, trainer: L.Trainer, step: int, result: EvaluationResult) -> None:
        self.results[step] = result
        self._log(trainer, step)

    def _log(self, trainer: L.Trainer, step: int) -> None:
        summary = self.results[step].summary()
        metrics = {f"eval/{self.settings.name}/{name}": value for name, value in summary.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)


def evaluate_and_keep(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    max_tokens: int,
    directory: Path,
    name: str,
    status: StatusLine,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[EvaluationResult, int, float]:
    """Evaluate, write `NAME.responses.jsonl` and `NAME.json` (last, so that it stands for a whole evaluation).

    Returns:
        The result, the tokens generated and the seconds taken.
    """
    start = time.perf_counter()

    def on_progress(done: int, total: int) -> None:
        left = (time.perf_counter() - start) / max(done, 1) * (total - done)
        ahead = f"  | about {duration(left)} left" if done else ""
        status.update(f"{name}: {done}/{total} responses{ahead}")

    result, responses = evaluate(
        engine,
        prompts,
        Sampling(settings.temperature, settings.top_p, max_tokens, log_probs=False),
        samples=settings.samples,
        seed=settings.seed,
        should_stop=should_stop,
        on_progress=on_progress,
    )
    seconds = time.perf_counter() - start
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.responses.jsonl").open("w", encoding="utf-8") as file:
        for prompt, row in zip(prompts, responses, strict=True):
            for response in row:
                record = {
                    "problem": prompt.id,
                    "source": prompt.source,
                    "answer": prompt.answer,
                    "text": response.text,
                    "stated_answer": response.stated_answer,
                    "correct": response.correct,
                    "length": response.length,
                    "truncated": response.truncated,
                    "policy_version": response.policy_version,
                }
                file.write(json.dumps(record) + "\n")
    result.to_json(directory / f"{name}.json")
    summary = result.summary()
    k = settings.samples
    status.say(
        f"{name}: avg@{k} {summary[f'avg@{k}']:.1%} "
        f"[{summary[f'avg@{k}_low']:.1%}, {summary[f'avg@{k}_high']:.1%}], pass@{k} {summary[f'pass@{k}']:.1%}, "
        f"cons@{k} {summary[f'cons@{k}']:.1%} on {len(prompts)} problems ({seconds:.0f} s)"
    )
    return result, sum(response.length for row in responses for response in row), seconds
