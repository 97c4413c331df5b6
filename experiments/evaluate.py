"""Evaluate a model as it is: `python experiments/evaluate.py model=DIRECTORY [data=...]`.

Takes the same config as a run and reads the groups model, data, engine, sampling.max_tokens and evaluation. The model
that a run has left (`RUN/model`) is evaluated on that run's problems and with its engine, where the command line does
not say otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.command_line import entry_point, reports_user_errors
from experiments.composing import CONFIG_DIR
from experiments.quiet import quieten

SECTIONS = ("data", "engine", "sampling", "evaluation")
"""What of a run's config an evaluation of its model depends on."""


@hydra.main(config_path=str(CONFIG_DIR), config_name="config", version_base="1.3")
@reports_user_errors
def main(config: DictConfig) -> None:
    quieten()
    from callbacks.monitors.evaluation import EvaluationSettings, evaluate_and_keep
    from callbacks.progress import StatusLine
    from experiments.assembly import load_problems, make_engine, prepare_model, prepare_prompts
    from experiments.records import claim, record_run

    directory = Path(HydraConfig.get().runtime.output_dir)
    lock = claim(directory)
    status = StatusLine()
    run = run_of(config)
    if run is not None:
        status.say(f"taking {', '.join(SECTIONS)} from {run}/config.yaml where the command line does not say")
        take_from_run(config, run, list(HydraConfig.get().overrides.task))
    record_run(directory, config)
    settings = EvaluationSettings(**config.evaluation)
    problems = load_problems(config, "evaluation")
    model, facts, tokenizer = prepare_model(config)
    prompts = prepare_prompts(config, problems, tokenizer)
    status.say(f"evaluating {model} on {len(prompts)} problems, {settings.samples} samples each")
    engine = make_engine(config.engine, model, facts, tokenizer)
    try:
        result, _, _ = evaluate_and_keep(
            engine, prompts, settings, config.sampling.max_tokens, directory, "evaluation", status
        )
    finally:
        engine.close()
    (directory / "summary.json").write_text(json.dumps(result.summary(), indent=2) + "\n", encoding="utf-8")
    status.say(f"tables and responses: {directory}")
    lock.close()


def run_of(config: DictConfig) -> Path | None:
    """The run that left the model, if a run did."""
    home = Path(str(config.model.get("path", ""))).parent
    return home if (home / "run.json").exists() and (home / "config.yaml").exists() else None


def take_from_run(config: DictConfig, run: Path, overrides: Sequence[str]) -> None:
    """Put a run's sections into `config`, and what the command line says of them on top."""
    saved = OmegaConf.load(run / "config.yaml")
    assert isinstance(saved, DictConfig)
    keys = [text.lstrip("+~").partition("=")[0] for text in overrides]
    OmegaConf.set_struct(config, False)
    for section in SECTIONS:
        if section in keys:
            continue
        said = {key: OmegaConf.select(config, key) for key in keys if key.startswith(f"{section}.")}
        config[section] = saved[section]
        for key, value in said.items():
            OmegaConf.update(config, key, value)


if __name__ == "__main__":
    entry_point(main)
