"""Train: `python experiments/run.py [GROUP=OPTION] [KEY=VALUE] ...`."""

from __future__ import annotations

import contextlib
import json
import resource
import shlex
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.command_line import entry_point, reports_user_errors
from experiments.composing import CONFIG_DIR
from experiments.quiet import quieten
from experiments.sweep import STOPPED


@hydra.main(config_path=str(CONFIG_DIR), config_name="config", version_base="1.3")
@reports_user_errors
def main(config: DictConfig) -> None:
    # Imported here: `--help` and a mistyped key should not wait for torch and transformers.
    quieten()
    from callbacks.checkpoint import StopRequest
    from callbacks.progress import StatusLine
    from dapo_pl.errors import UserError
    from dapo_pl.rollout.engine import EngineFailed
    from dapo_pl.rollout.sampler import RolloutInterrupted
    from dapo_pl.warm_start import save_model
    from experiments.assembly import build, plan
    from experiments.records import claim, record_run
    from experiments.report_run import final_table, summarise

    start = time.perf_counter()
    directory = Path(HydraConfig.get().runtime.output_dir)
    lock = claim(directory)
    status = StatusLine()
    status.say(f"run directory: {directory}")
    record = record_run(directory, config)
    status.say("checking config, data and model")
    checked = plan(config, directory)
    stop = StopRequest()
    stop.install()
    run = None
    try:
        run = build(checked, stop, status, record)
        run.trainer.fit(
            run.module,
            datamodule=run.data,
            ckpt_path=None if checked.checkpoint is None else str(checked.checkpoint),
            weights_only=True,
        )
        stopped = stop.requested
    except RolloutInterrupted:
        stopped = True
    except EngineFailed as error:
        raise UserError(
            f"the engine failed twice in one step ({error}): the steps before it are kept, go on with ckpt_path=last"
        ) from error
    finally:
        if run is not None:
            with contextlib.suppress(Exception):  # an engine that has failed may fail at this too
                run.data.sampler.engine.close()
    if stopped or run is None:
        if run is not None and (directory / "checkpoints" / "last.ckpt").exists():
            again = shlex.join(word for word in sys.argv[1:] if not word.startswith("ckpt_path="))
            status.say(
                f"stopped after step {run.data.step} of {checked.rollout.steps}; "
                f"go on with: python {sys.argv[0]} {again} ckpt_path=last"
            )
        else:
            status.say("stopped before there was anything to save")
        raise SystemExit(STOPPED)

    export = directory / "model"
    save_model(run.module.policy.model, checked.tokenizer, export)
    summary = summarise(run, checked, record["overrides"], total_seconds=time.perf_counter() - start)
    summary["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    table = final_table(summary)
    (directory / "summary.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    lock.close()


def check_row(config: DictConfig) -> None:
    """What can be known to be wrong with a sweep's row before the first one starts."""
    from experiments.assembly import check_settings

    check_settings(config)


def end_of_sweep(directory: Path) -> int:
    """One table over the rows; exit status 1 if a row has no result."""
    from experiments.compare import end_of_sweep

    return end_of_sweep(directory)


if __name__ == "__main__":
    entry_point(main, check=check_row, finish=end_of_sweep)
