"""Recorded rollouts: every response of a step as one row of a parquet file that `datasets` loads.

`step_000001.parquet` holds every response of every group that step 1 judged, accepted or not, in draw order. Groups
still being made, or beyond need, when the batch was full are not judged and not recorded: the ledger counts them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_pl.errors import UserError
from dapo_pl.files import whole_file
from dapo_pl.rollout.engine import Sampling
from dapo_pl.rollout.sampler import Rollout
from dapo_pl.rollout.types import Group, Response

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        # The prompt's place in the order of draws, and the response's in its group.
        pa.field("group_index", pa.int64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("answer", pa.int64(), nullable=False),
        pa.field("stated_answer", pa.int64()),
        pa.field("correct", pa.bool_(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        # What was trained on; null in a group that was dropped because a reward function failed, or rejected early.
        pa.field("reward", pa.float64()),
        pa.field("reward_components", pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()}))),
        pa.field("reward_failures", pa.list_(pa.struct({"name": pa.string(), "reason": pa.string()}))),
        pa.field("accepted", pa.bool_(), nullable=False),
        # Given up after these responses, its first ones.
        pa.field("rejected", pa.bool_(), nullable=False),
        pa.field("policy_version", pa.int64(), nullable=False),
        # Nats, of the sampled tokens; null where the engine was not asked for them.
        pa.field("log_probs", pa.list_(pa.float32())),
    ]
)

SAMPLING = b"sampling"
"""Key of the file's metadata under which the sampling settings stand."""


def step_path(directory: Path, step: int) -> Path:
    """The file of a rollout step."""
    return directory / f"step_{step:06}.parquet"


def step_of(path: Path) -> int | None:
    """The rollout step a file is of, or None if its name is no such file's."""
    number = path.name.removeprefix("step_").removesuffix(".parquet")
    return int(number) if number.isdecimal() and path == step_path(path.parent, int(number)) else None


def step_files(directory: Path) -> dict[int, Path]:
    """The recorded steps in a directory, in order."""
    found = {step_of(path): path for path in directory.glob("step_*.parquet")}
    return dict(sorted((step, path) for step, path in found.items() if step is not None))


def to_table(step: int, rollout: Rollout, sampling: Sampling) -> pa.Table:
    """A step's responses; the same rollout always gives the same table."""
    accepted = {group.index for group in rollout.accepted}
    rows = [
        _row(step, group, number, response, group.index in accepted)
        for group in rollout.examined
        for number, response in enumerate(group.responses)
    ]
    metadata = {SAMPLING: json.dumps(asdict(sampling), sort_keys=True).encode()}
    return pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata(metadata))


def _row(step: int, group: Group, number: int, response: Response, accepted: bool) -> dict[str, Any]:
    return {
        "step": step,
        "group_index": group.index,
        "number": number,
        "prompt_id": group.prompt.id,
        "source": group.prompt.source,
        "prompt_token_ids": group.prompt.token_ids,
        "token_ids": response.token_ids,
        # A lone surrogate can stand in no file.
        "text": response.text.encode("utf-8", "replace").decode("utf-8"),
        "answer": group.prompt.answer,
        "stated_answer": response.stated_answer,
        "correct": response.correct,
        "truncated": response.truncated,
        "reward": response.reward if group.scored else None,
        "reward_components": [{"name": name, "value": value} for name, value in response.reward_components.items()],
        "reward_failures": [{"name": name, "reason": reason} for name, reason in response.reward_failures.items()],
        "accepted": accepted,
        "rejected": group.rejected,
        "policy_version": response.policy_version,
        "log_probs": response.log_probs,
    }


def write_step(directory: Path, step: int, rollout: Rollout, sampling: Sampling) -> Path:
    """Write a step's file beside its place and rename it: it is there whole or not at all."""
    path = step_path(directory, step)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as draft, draft.open("wb") as file:
            pq.write_table(to_table(step, rollout, sampling), file, compression="zstd", write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"cannot write the recorded rollout {path}: {error.strerror or error}; free space or set "
            "record_rollouts=false, then resume with ckpt_path=last"
        ) from error
    return path


def drop_after(directory: Path, step: int) -> None:
    """Remove the files of steps that will be made again, and what a crash left half written."""
    for found, path in step_files(directory).items():
        if found > step:
            path.unlink()
    for draft in directory.glob(".step_*.parquet.*"):
        draft.unlink()


def read_steps(directory: Path) -> tuple[list[dict[str, Any]], dict[int, Sampling]]:
    """All rows in order, proven to be whole, and each step's sampling settings where its file has them.

    Raises:
        UserError: naming the file, and the row (from 1) where one is at fault.
    """
    if not directory.is_dir():
        raise UserError(
            f"engine.path={directory}: there is no such folder; name the `rollouts` folder of a recorded run"
        )
    files = step_files(directory)
    if not files:
        raise UserError(
            f"engine.path={directory}: no step_*.parquet is there; name the `rollouts` folder of a run with "
            "record_rollouts=true"
        )
    rows: list[dict[str, Any]] = []
    samplings: dict[int, Sampling] = {}
    seen: dict[int, Path] = {}
    expected = min(files)
    for step, path in files.items():
        if step != expected:
            raise UserError(f"{step_path(directory, expected)} is missing, though {path.name} is there: restore it")
        expected += 1
        table = _read(path)
        sampling = (table.schema.metadata or {}).get(SAMPLING)
        if sampling is not None:
            samplings[step] = _sampling(path, sampling)
        found = table.to_pylist()
        _check_rows(path, step, found)
        for index in {row["group_index"] for row in found}:
            if index in seen:
                raise UserError(
                    f"{path}: group {index} is already in {seen[index].name}; one of the files is of another run"
                )
            seen[index] = path
        rows += found
    return rows, samplings


def _read(path: Path) -> pa.Table:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        schema = file.schema_arrow
        for field in SCHEMA:
            if field.name not in schema.names:
                raise UserError(f"{path}: no column {field.name!r}; it is no recorded rollout, or of another version")
            given = schema.field(field.name).type
            if given != field.type:
                raise UserError(f"{path}: column {field.name!r} holds {given}, it must hold {field.type}")
        table = file.read(columns=SCHEMA.names)
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read as parquet, it is damaged or cut short: {str(error).splitlines()[0]}; "
            "record it anew"
        ) from error
    return table


def _sampling(path: Path, text: bytes) -> Sampling:
    try:
        return Sampling(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: the sampling settings in its metadata cannot be read: {error}") from error


def _check_rows(path: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        raise UserError(f"{path} holds no rows: record it anew")
    numbers: dict[int, int] = {}
    prompts: dict[int, list[int]] = {}
    for place, row in enumerate(rows, start=1):
        fault = _fault(step, row)
        index = row["group_index"]
        if not fault and row["number"] != numbers.get(index, 0):
            fault = f"response {row['number']} of group {index} stands where {numbers.get(index, 0)} should"
        if not fault and prompts.setdefault(index, row["prompt_token_ids"]) != row["prompt_token_ids"]:
            fault = f"group {index} has another prompt here than in the rows before"
        if fault:
            raise UserError(f"{path}, row {place}: {fault}; record it anew")
        numbers[index] = row["number"] + 1
    rejected = {row["group_index"] for row in rows if row["rejected"]}
    size = max(numbers.values())
    for index, count in numbers.items():
        if count != size and index not in rejected:
            place = max(place for place, row in enumerate(rows, start=1) if row["group_index"] == index)
            raise UserError(
                f"{path}, row {place}: group {index} ends here with {count} of {size} responses; record it anew"
            )


def _fault(step: int, row: dict[str, Any]) -> str:
    """What is wrong with a row by itself; empty if nothing is."""
    for field in SCHEMA:
        if row[field.name] is None and not field.nullable:
            return f"column {field.name!r} is empty"
    for name in ("prompt_token_ids", "token_ids", "log_probs"):
        values = row[name]
        if values is not None and None in values:
            return f"column {name!r} has an empty place"
        if name != "log_probs" and (not values or min(values) < 0):
            return f"column {name!r} holds no token ids"
    if row["step"] != step:
        return f"column 'step' is {row['step']} in the file of step {step}"
    if row["log_probs"] is not None and len(row["log_probs"]) != len(row["token_ids"]):
        return f"{len(row['log_probs'])} log-probs for {len(row['token_ids'])} tokens"
    return ""
