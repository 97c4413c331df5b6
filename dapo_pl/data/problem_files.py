"""Problems from a file: parquet or JSON-lines, in the schema of DAPO-Math-17K or with mapped columns."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from dapo_pl.data.sources import (
    DEFAULT_TEMPLATE,
    Message,
    Problem,
    Split,
    check_split,
    check_template,
    fill_template,
    fits_int64,
    make_dataset,
    make_problem,
)
from dapo_pl.errors import UserError, nearest
from dapo_pl.grading import parse_integer_answer

log = logging.getLogger(__name__)

RAW_PROBLEM_COLUMN = "extra_info.raw_problem"
"""Where the DAPO-Math-17K schema keeps the problem without its instructions; optional."""

SHOWN = 3
"""Bad rows that a message quotes; the report has them all."""


class _BadRow(Exception):
    """Why a row cannot be used, and the value that is at fault."""

    def __init__(self, reason: str, value: object = None):
        super().__init__(reason)
        self.value = value


@dataclass
class ProblemFile:
    """Problems in a parquet or JSON-lines file (told apart by content).

    The default columns are those of DAPO-Math-17K, whose rows bring their own chat prompt, used as it is.
    For other files name the columns (`prompt_column="question"`, `answer_column="answer"`); a prompt that is
    a plain string goes through `template`. Dots lead into nested columns.

    Rows with the same question and the same integer answer are one problem ("33" and "033" are equal); the
    published DAPO files repeat each problem many times.

    Args:
        path: file of the training problems.
        evaluation_path: file of the evaluation problems, same columns.
        max_bad_share: share of rows in [0, 1) that may be unusable; above it, `load` raises `UserError`.
        report_dir: folder for `<file>.bad_rows.jsonl`, which lists every unusable row. None: no report.
    """

    path: str | Path
    template: str = DEFAULT_TEMPLATE
    prompt_column: str = "prompt"
    answer_column: str = "reward_model.ground_truth"
    evaluation_path: str | Path | None = None
    max_bad_share: float = 0.0
    report_dir: str | Path | None = None

    def __post_init__(self) -> None:
        check_template(self.template)
        if not 0 <= self.max_bad_share < 1:
            raise UserError(f"data.max_bad_share is {self.max_bad_share}, must be at least 0 and less than 1.")

    def load(self, split: Split) -> Dataset:
        """The distinct problems of the split's file, in file order; see `PromptSource.load`.

        Raises:
            UserError: the file is missing, empty, of another format, lacks a column, or has too many rows
                that are no JSON, have an empty prompt, or an answer that is no (64-bit) integer.
        """
        check_split(split)
        if split == "train":
            return self._load(Path(self.path))
        if self.evaluation_path is None:
            raise UserError("data.evaluation_path is not set: name the file of the evaluation problems.")
        return self._load(Path(self.evaluation_path))

    def _load(self, path: Path) -> Dataset:
        unit, rows = self._rows(path)
        problems: dict[tuple[str, int], Problem] = {}
        answers: defaultdict[str, set[int]] = defaultdict(set)
        bad: list[dict[str, Any]] = []
        total = 0
        for number, row in rows:
            total += 1
            try:
                if isinstance(row, _BadRow):
                    raise row
                problem = self._problem(row, path.name)
            except _BadRow as reason:
                bad.append({unit: number, "reason": str(reason), "value": reason.value})
                continue
            key = problem["question"].strip(), problem["answer"]
            problems.setdefault(key, problem)
            answers[key[0]].add(key[1])
        if total == 0:
            raise UserError(f"{path} is empty: a problem file needs at least one row.")
        if bad:
            self._report(path, unit, bad, total, usable=len(problems))
        log.info(
            "%s: %d problems from %d rows (%d repeats)", path, len(problems), total, total - len(bad) - len(problems)
        )
        torn = [question for question, found in answers.items() if len(found) > 1]
        if torn:
            log.warning(
                "%s: %d questions come with more than one answer; each is kept as a problem (first: %.80r)",
                path,
                len(torn),
                torn[0],
            )
        return make_dataset(problems.values())

    def _rows(self, path: Path) -> tuple[str, Iterator[tuple[int, Any]]]:
        """What a row is called in this format, and the numbered rows (from 1); unreadable ones as `_BadRow`."""
        if not path.exists():
            raise UserError(f"{path} does not exist; {_neighbour(path)}")
        if path.is_dir():
            raise UserError(f"{path} is a folder: name the parquet or JSON-lines file in it.")
        try:
            with path.open("rb") as file:
                start = file.read(4096)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error
        if not start.strip():
            raise UserError(f"{path} is empty: a problem file needs at least one row.")
        if start.startswith(b"PAR1"):
            return "row", self._parquet_rows(path)
        first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if first == b"[":
            raise UserError(f"{path} is one JSON array: write JSON-lines, one object on each line.")
        # a file that calls itself JSON-lines gets the fault of its line rather than of its format
        if first == b"{" or path.suffix in {".jsonl", ".ndjson"}:
            return "line", _json_rows(path)
        raise UserError(f"{path} is neither parquet nor JSON-lines (by its content, whatever its name says).")

    def _parquet_rows(self, path: Path) -> Iterator[tuple[int, Any]]:
        try:
            file = pq.ParquetFile(path)
            names = file.schema_arrow.names
            wanted = [self.prompt_column, self.answer_column]
            for column in wanted:
                if column not in names and column.split(".")[0] not in names:
                    raise UserError(f"{path}, row 1: no column {column!r}; {nearest(column.split('.')[0], names)}")
            tops = {column.split(".")[0] for column in [*wanted, RAW_PROBLEM_COLUMN]}
            number = 0
            for batch in file.iter_batches(columns=[name for name in names if name in tops or name in wanted]):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} begins like a parquet file but cannot be read as one: {error}") from error

    def _problem(self, row: Any, source: str) -> Problem:
        """The problem in one row, or `_BadRow`."""
        prompt = _column(row, self.prompt_column)
        value = _column(row, self.answer_column)
        if isinstance(prompt, str):
            question, messages = prompt, fill_template(self.template, prompt)
        else:
            messages = _messages(prompt, self.prompt_column)
            question = messages[-1]["content"]
            try:
                raw = _column(row, RAW_PROBLEM_COLUMN)
            except _BadRow:
                raw = None
            if isinstance(raw, str) and raw.strip():
                question = raw
        if not question.strip():
            raise _BadRow(f"column {self.prompt_column!r} is an empty prompt", prompt)
        answer = parse_integer_answer(value)
        if answer is None:
            raise _BadRow(f"column {self.answer_column!r} is {value!r:.60}, no integer", value)
        if not fits_int64(answer):
            raise _BadRow(f"column {self.answer_column!r} is {value!r:.60}, too large for 64 bits", value)
        return make_problem(question, answer, source, messages)

    def _report(self, path: Path, unit: str, bad: list[dict[str, Any]], total: int, usable: int) -> None:
        """Write the report, then warn or raise, as `max_bad_share` says."""
        where = "set data.report_dir to have all of them in a file"
        if self.report_dir is not None:
            report = Path(self.report_dir) / f"{path.name}.bad_rows.jsonl"
            try:
                report.parent.mkdir(parents=True, exist_ok=True)
                with report.open("w", encoding="utf-8") as file:
                    file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in bad)
            except OSError as error:
                raise UserError(f"data.report_dir: {report} cannot be written: {error.strerror}.") from error
            where = f"all are in {report}"
        first = "; ".join(f"{unit} {row[unit]}: {row['reason']}" for row in bad[:SHOWN])
        more = "" if len(bad) <= SHOWN else "; …"
        text = f"{path}: {len(bad)} of {total} {unit}s cannot be used: {first}{more} ({where})"
        if usable == 0 or len(bad) > self.max_bad_share * total:
            raise UserError(f"{text}; correct them, or allow a share with data.max_bad_share.")
        log.warning("%s", text)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                yield number, _BadRow("is no JSON", line[:200].decode(errors="replace").rstrip())
                continue
            yield number, row if isinstance(row, dict) else _BadRow("is JSON, but no object with columns", row)


def _column(row: dict[str, Any], column: str) -> Any:
    """The value of a column, dots leading into nested ones; `_BadRow` if the row lacks it."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            known = nearest(name, value) if isinstance(value, dict) and value else "there are none"
            raise _BadRow(f"no column {column!r} ({known})")
        value = value[name]
    return value


def _messages(prompt: Any, column: str) -> list[Message]:
    """The chat messages of a row, only role and content; `_BadRow` if they are no prompt."""
    if not isinstance(prompt, list):
        raise _BadRow(f"column {column!r} is {prompt!r:.60}, neither text nor a list of messages", prompt)
    messages: list[Message] = []
    for message in prompt:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise _BadRow(f"column {column!r} has a message without role and content", prompt)
        messages.append({"role": role, "content": content})
    if not messages or not messages[-1]["content"].strip():
        raise _BadRow(f"column {column!r} is an empty prompt", prompt)
    return messages


def _neighbour(path: Path) -> str:
    """A closing half-sentence for a missing file: the nearest name in its folder."""
    if not path.parent.is_dir():
        return f"neither does its folder {path.parent}."
    names = [file.name for file in path.parent.iterdir() if file.suffix in {".parquet", ".jsonl", ".json"}]
    return nearest(path.name, names) if names else "its folder holds no parquet or JSON-lines file."
