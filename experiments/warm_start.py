"""Only the warm start: `python experiments/warm_start.py [model=...] [data=...] [warm_start.steps=...]`.

The main job does the same when the result is not cached; this prints where it is.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from experiments.command_line import entry_point, reports_user_errors
from experiments.composing import CONFIG_DIR
from experiments.quiet import quieten


@hydra.main(config_path=str(CONFIG_DIR), config_name="config", version_base="1.3")
@reports_user_errors
def main(config: DictConfig) -> None:
    quieten()
    from callbacks.progress import StatusLine
    from dapo_pl.errors import UserError
    from experiments.assembly import prepare_model, prepare_warm_start, run_warm_start

    settings, examples = prepare_warm_start(config)
    if settings is None:
        raise UserError("warm_start=none: there is nothing to do; choose warm_start=default or warm_start=tiny")
    model, _, _ = prepare_model(config)
    run_warm_start(model, examples, settings, config, StatusLine())


if __name__ == "__main__":
    entry_point(main)
