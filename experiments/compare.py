"""Compare finished runs: `python experiments/compare.py WHERE ... [--format text|markdown|csv]`.

WHERE is a sweep's directory, a run's directory, any directory with runs under it, or a query in Aim's language
such as 'run.experiment == "technique-dapo"' (with --repo where the Aim repository is not ./outputs).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo_pl.analysis.runs import RunRecord, as_csv, as_markdown, as_text, compare, find_runs, load_run
from dapo_pl.analysis.tracked import directories
from dapo_pl.errors import UserError
from experiments.command_line import fail
from experiments.composing import as_mapping
from experiments.sweep import read_plan

FORMATS = {"text": (as_text, "txt"), "markdown": (as_markdown, "md"), "csv": (as_csv, "csv")}


def in_order(home: Path, directories: Sequence[Path]) -> tuple[list[RunRecord], list[list[str]]]:
    """A sweep's runs in the order of its rows, and the rows that have no result; else as they are."""
    runs = [load_run(directory) for directory in directories]
    rows = read_plan(home)
    if not rows:
        return runs, []
    found = []
    missing = []
    for row in rows:
        wanted = as_mapping(row)
        matching = [run for run in runs if wanted.items() <= run.overrides.items()]
        found += matching[:1]
        missing += [] if matching else [row]
    return found, missing


def end_of_sweep(home: Path) -> int:
    """Print the comparison of a sweep's rows and keep it beside them; 1 if a row has no result, else 0."""
    runs, missing = in_order(home, find_runs(home))
    if runs:
        rows = compare(runs)
        for render, ending in FORMATS.values():
            (home / f"comparison.{ending}").write_text(render(rows) + "\n", encoding="utf-8")
        print(f"\n{as_text(rows)}\nkept as {home}/comparison.txt, .md and .csv", flush=True)
    for row in missing:
        print(f"no result: {' '.join(row)}", file=sys.stderr, flush=True)
    if missing:
        print("the same command runs the missing rows and skips the others", file=sys.stderr, flush=True)
    return int(bool(missing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="+", help="directories, or one Aim query")
    parser.add_argument("--repo", default="outputs", help="the Aim repository of a query")
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument("--out", type=Path, help="write there and not to the terminal")
    options = parser.parse_args()
    try:
        runs: list[RunRecord] = []
        for where in options.where:
            if Path(where).exists() or not any(sign in where for sign in "=(<>"):
                found, _ = in_order(Path(where), find_runs(Path(where)))
            else:
                found = [load_run(directory) for directory in directories(where, options.repo)]
            runs += found
        text = FORMATS[options.format][0](compare(runs))
    except UserError as error:
        fail(error)
        return
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n", encoding="utf-8")
        print(options.out)


if __name__ == "__main__":
    main()
