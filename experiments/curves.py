"""Draw the health panel of runs: `python experiments/curves.py RUN_DIRECTORY ... --out curves.png`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dapo_pl.analysis.curves import health_panel
from dapo_pl.errors import UserError
from experiments.command_line import fail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="the picture to write")
    parser.add_argument("--window", type=int, default=5, help="rollout steps that the bold lines average over")
    options = parser.parse_args()
    try:
        health_panel(options.runs, options.window).savefig(options.out, dpi=130)
    except UserError as error:
        fail(error)
    print(options.out)


if __name__ == "__main__":
    main()
