"""Evaluate a model as it is: `python experiments/evaluate.py model=hf model.path=DIRECTORY [data=...]`.

Takes the same config as a run and reads the groups model, data, engine, sampling.max_tokens and evaluation.
"""

from __future__ import annotations

import json
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.command_line import entry_point, reports_user_errors
from experiments.composing import CONFIG_DIR
from experiments.quiet import quieten


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
    record_run(directory, config)
    status = StatusLine()
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


if __name__ == "__main__":
    entry_point(main)
