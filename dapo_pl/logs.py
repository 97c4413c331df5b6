"""The plain log beside any tracker: one JSON object per rollout step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from dapo_pl.files import whole_file


class JsonLinesLogger(Logger):
    """Writes `metrics.jsonl`: all metrics of a step on one line, flushed when the next step begins.

    A resumed run drops the lines at or after the step it resumes from, so no step stands there twice.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._step: int | None = None
        self._values: dict[str, float | None] = {}

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved config has a file of its own."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step != self._step:
            self.save()
            self._step = step
        for name, value in metrics.items():
            if name != "epoch":
                self._values[name] = value if math.isfinite(value) else None

    @rank_zero_only
    def save(self) -> None:
        if self._values:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self._step, **self._values}) + "\n")
        self._values = {}

    def finalize(self, status: str) -> None:
        self.save()

    @rank_zero_only
    def drop_after(self, step: int) -> None:
        """Forget what was logged after `step`: a run resumed there will log it again."""
        if self.path.exists():
            keep_rows(self.path, lambda row: row["step"] is not None and row["step"] <= step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, one a step: what a resumed run logged once more stands there once.

    A last line cut short by a crash is left out.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for row in _lines(path):
        rows.setdefault(row["step"], {}).update(row)
    return list(rows.values())


def keep_rows(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSON-lines file with the rows that are wanted, whole or not at all."""
    with whole_file(path) as draft:
        draft.write_text("".join(json.dumps(row) + "\n" for row in _lines(path) if wanted(row)), encoding="utf-8")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
