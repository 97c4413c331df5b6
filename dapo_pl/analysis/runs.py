"""Run directories as records, and tables that compare them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dapo_pl.errors import UserError
from dapo_pl.evaluation import (
    EvaluationResult,
    Interval,
    PairedDifference,
    bootstrap_interval,
    paired_difference,
)
from dapo_pl.logs import read_metrics

SEED = "seed"


@dataclass(frozen=True)
class RunRecord:
    """A finished run, read from its directory."""

    directory: Path
    overrides: dict[str, str]
    summary: dict[str, Any]
    versions: dict[str, Any]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.summary["seed"]

    @cached_property
    def after(self) -> EvaluationResult:
        """The evaluation after the last step."""
        return EvaluationResult.from_json(self.directory / "evaluations" / f"step_{self.summary['steps']:06}.json")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged rows of training steps, in order."""
        return [row for row in read_metrics(self.directory / "metrics.jsonl") if "rollout/reward_mean" in row]

    def final(self, name: str) -> float:
        """Mean of a metric over the last tenth of the steps (at least one); NaN where it was not logged."""
        tail = self.metrics[-max(1, round(len(self.metrics) / 10)) :]
        values = [row[name] for row in tail if row.get(name) is not None]
        return float(np.mean(values)) if values else math.nan

    @property
    def training_seconds(self) -> float:
        """Generation, update and weight sync; neither warm start nor evaluation."""
        return sum(self.summary["seconds"][phase] for phase in ("generation", "update", "sync"))


def load_run(directory: Path) -> RunRecord:
    """Read a finished run's directory.

    Raises:
        UserError: it is none, or a file in it is damaged.
    """
    found = {}
    for name in ("run.json", "summary.json"):
        path = directory / name
        try:
            found[name] = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{directory} is no finished run: {name} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): run it again") from error
    run, summary = found["run.json"], found["summary.json"]
    overrides = {key: text for key, _, text in (one.partition("=") for one in run.get("overrides", []))}
    return RunRecord(directory, overrides, summary, {**run["versions"], "git": run.get("git", {})})


def find_runs(home: Path) -> list[Path]:
    """Directories of finished runs at or under `home`, by name."""
    if not home.is_dir():
        raise UserError(f"{home}: there is no such directory")
    return sorted(path.parent for path in home.rglob("summary.json") if (path.parent / "run.json").exists())


@dataclass
class Row:
    """Runs that differ in their seed alone, and their comparison with other rows.

    `accuracy`: avg@k after training over problems, seeds averaged per problem. `differences`: against other
    rows, by their labels, problem by problem. `per_seed`: each seed's avg@k.
    """

    label: str
    runs: list[RunRecord]
    accuracy: Interval
    differences: dict[str, PairedDifference] = field(default_factory=dict)

    @property
    def per_seed(self) -> dict[int, float]:
        return {run.seed: float(np.mean(run.after.correct)) for run in self.runs}

    def mean(self, value: Any) -> float:
        """Mean over the runs of what `value` gives for each."""
        return float(np.mean([value(run) for run in self.runs]))


def labels(runs: Sequence[RunRecord], ignore: Sequence[str] = (SEED, "output_dir", "ckpt_path")) -> list[str]:
    """What sets each run apart from the others: its overrides, those that all share and `ignore` left out.

    A single key's values stand alone ("+clip_higher"); several are written as "key=value key=value".
    """
    keys = dict.fromkeys(
        key for run in runs for key in run.overrides if key not in ignore and not key.lstrip("+").startswith("hydra")
    )
    varying = [key for key in keys if len({run.overrides.get(key) for run in runs}) > 1] or list(keys)[:1]
    texts = []
    for run in runs:
        parts = [(key, run.overrides[key]) for key in varying if key in run.overrides]
        alone = len(varying) == 1
        texts.append(" ".join(value if alone else f"{key}={value}" for key, value in parts) or "default")
    return texts


def compare(runs: Sequence[RunRecord]) -> list[Row]:
    """Rows in the order of their first run, each compared with the first row and the row above it.

    Raises:
        UserError: there is no run, two runs of a row have one seed, or the runs were evaluated on different
            problems, which cannot be compared problem by problem.
    """
    if not runs:
        raise UserError("no finished run to compare: give a sweep's directory, or wait for its first row")
    by_label: dict[str, list[RunRecord]] = {}
    for label, run in zip(labels(runs), runs, strict=True):
        by_label.setdefault(label, []).append(run)
    reference = runs[0].after
    per_problem: dict[str, np.ndarray] = {}
    for label, members in by_label.items():
        seeds = [run.seed for run in members]
        if len(set(seeds)) < len(seeds):
            places = ", ".join(str(run.directory) for run in members)
            raise UserError(f"runs of one setting with one seed ({places}): name the one that counts")
        tables = []
        for run in members:
            try:
                tables.append(run.after.ordered_like(reference).per_problem()["avg"])
            except ValueError as error:
                raise UserError(
                    f"{run.directory} was evaluated on other problems than {runs[0].directory} ({error}): "
                    "compare runs with the same data and data.evaluation_seed"
                ) from error
        per_problem[label] = np.mean(tables, axis=0)
    rows = []
    names = list(per_problem)
    for number, (label, members) in enumerate(by_label.items()):
        row = Row(label, members, bootstrap_interval(per_problem[label]))
        for other in dict.fromkeys((names[0], names[number - 1])) if number else ():
            row.differences[other] = paired_difference(per_problem[other], per_problem[label])
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a comparison, as texts for a person."""
    k = rows[0].runs[0].summary["samples"]
    several = any(len(row.runs) > 1 for row in rows)
    above = len(rows) > 2
    header = ["row", f"avg@{k} [95%]", f"against {rows[0].label}"]
    header += ["against the row above"] if above else []
    header += ["seeds"] if several else []
    header += ["tokens generated (used)", "seconds", "entropy", "length"]
    cells = []
    for number, row in enumerate(rows):
        first = row.differences.get(rows[0].label)
        cell = [
            row.label,
            f"{100 * np.mean(list(row.per_seed.values())):.1f} "
            f"[{100 * row.accuracy.low:.1f}, {100 * row.accuracy.high:.1f}]",
            _difference(first),
        ]
        if above:
            cell.append(_difference(row.differences.get(rows[number - 1].label)) if number > 1 else "")
        if several:
            cell.append(", ".join(f"{seed}: {100 * value:.1f}" for seed, value in sorted(row.per_seed.items())))
        tokens = row.mean(lambda run: run.summary["cost"]["tokens_generated"])
        used = row.mean(lambda run: run.summary["cost"]["tokens_used"])
        cell += [
            f"{tokens:,.0f} ({used / max(tokens, 1):.0%})",
            f"{row.mean(lambda run: run.training_seconds):,.0f}",
            f"{row.mean(lambda run: run.final('rollout/entropy_mean')):.3f}",
            f"{row.mean(lambda run: run.final('rollout/response_length_mean')):.1f}",
        ]
        cells.append(cell)
    return header, cells


def _difference(difference: PairedDifference | None) -> str:
    if difference is None:
        return ""
    return (
        f"{100 * difference.mean:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}] "
        f"p={difference.p_value:.2g}"
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table has to know."""
    problems = len(rows[0].runs[0].after.problem_ids)
    found = [
        f"{problems} held-out problems. Intervals are over problems, with the seeds' mean for each; differences are "
        "paired by problem, p by sign flips. Tokens and seconds are means per run, without warm start and "
        "evaluation; entropy (nats) and length (tokens) are means over the last tenth of the steps."
    ]
    if any(len(row.runs) == 1 for row in rows):
        found.append("A row with one seed says nothing of how the result varies from seed to seed.")
    if len({json.dumps(run.versions, sort_keys=True) for row in rows for run in row.runs}) > 1:
        found.append("The runs are not all of one version of the code and its packages: see run.json in each.")
    return found


def as_text(rows: Sequence[Row]) -> str:
    """Aligned columns, and the notes."""
    header, cells = table(rows)
    widths = [max(len(line[column]) for line in (header, *cells)) for column in range(len(header))]
    lines = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *cells)
    ]
    return "\n".join([*lines, *notes(rows)])


def as_markdown(rows: Sequence[Row]) -> str:
    """A Markdown table, and the notes."""
    header, cells = table(rows)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *cells]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *notes(rows)])


def as_csv(rows: Sequence[Row]) -> str:
    """One line a row with plain numbers: shares from 0 to 1, differences against the first row and the row above."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    sides = ("first", "above")
    parts = ("mean", "low", "high", "p_value")
    writer.writerow(
        ["row", "runs", "seeds", "problems", "samples", "accuracy", "accuracy_low", "accuracy_high"]
        + [f"difference_{side}_{part}" for side in sides for part in parts]
        + ["tokens_generated", "tokens_used", "training_seconds", "entropy", "response_length"]
    )
    for number, row in enumerate(rows):
        others = (rows[0].label, rows[number - 1].label) if number else ("", "")
        found = [row.differences.get(other) for other in others]
        writer.writerow(
            [
                row.label,
                len(row.runs),
                " ".join(str(run.seed) for run in row.runs),
                len(row.runs[0].after.problem_ids),
                row.runs[0].summary["samples"],
                np.mean(list(row.per_seed.values())),
                row.accuracy.low,
                row.accuracy.high,
            ]
            + ["" if one is None else getattr(one, part) for one in found for part in parts]
            + [
                row.mean(lambda run: run.summary["cost"]["tokens_generated"]),
                row.mean(lambda run: run.summary["cost"]["tokens_used"]),
                row.mean(lambda run: run.training_seconds),
                row.mean(lambda run: run.final("rollout/entropy_mean")),
                row.mean(lambda run: run.final("rollout/response_length_mean")),
            ]
        )
    return file.getvalue()
