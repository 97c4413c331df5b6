"""Real processes and real faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo_pl.errors import UserError
from dapo_pl.rollout.workers import Function, Outcome, WorkerPool

ROOT = Path(__file__).parents[2]
TIMEOUT = 1.5
"""Seconds; long for an idle worker, short for a test."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool({"faulty": Function("reward_functions.faulty")}, size=2, timeout=TIMEOUT)
    yield pool
    pool.close()


def calls(*texts: str) -> dict[int, tuple[str, tuple[str, int, dict[str, object]]]]:
    return {number: ("faulty", (text, 7, {})) for number, text in enumerate(texts)}


def lives(pid: int) -> bool:
    """Whether a process exists, a zombie counting as one."""
    return Path(f"/proc/{pid}").exists()


def gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(lives, pids))


FAULTS = {
    "raise": "raised ValueError: no such answer",
    "quit": "raised SystemExit: 0",
    "exit": "ended its process by exit status 3",
    "nan": "returned nan",
    "infinite": "returned -inf",
    "huge": "raised OverflowError",
    "word": "returned '1.0', which is no number",
    "none": "returned None, which is no number",
    "recursion": "raised RecursionError",
    "stack": "ended its process by SIGSEGV",
    "pipe": "closed its pipe or was killed",
    "endless": "took longer than 1.5 s",
    "sleep": "took longer than 1.5 s",
    "regex": "took longer than 1.5 s",
}


def test_every_fault_is_one_failure_and_no_answer_moves(pool: WorkerPool) -> None:
    """Between any two faults stand numbers that say where they belong."""
    texts = [text for place, fault in enumerate(FAULTS) for text in (str(place), fault, str(place + 0.5))]
    outcomes = pool.run(calls(*texts))
    assert list(outcomes) == list(range(len(texts)))
    for number, text in enumerate(texts):
        if text in FAULTS:
            assert outcomes[number].value is None
            assert outcomes[number].reason.startswith(FAULTS[text]), text
        else:
            assert outcomes[number] == Outcome(float(text))


def test_an_answer_given_twice_shifts_nothing(pool: WorkerPool) -> None:
    """The copy may also take a call off the pipe and spoil it: that call fails, and no answer meets another's key."""
    texts = ["twice", "1", "twice", "3", "4", "5"] * 3
    outcomes = pool.run(calls(*texts))
    assert len(outcomes) == len(texts)
    for outcome, expected in zip(outcomes.values(), [2, 1, 2, 3, 4, 5] * 3, strict=True):
        assert outcome.value in (expected, None)
        assert outcome.value is not None or outcome.reason


def test_functions_are_told_apart_by_name_and_get_their_arguments() -> None:
    functions = {
        "faulty": Function("reward_functions.faulty"),
        "vowels": Function("reward_functions.vowels", {"scale": 4}),
    }
    pool = WorkerPool(functions, size=2, timeout=60)
    outcomes = pool.run(
        {"a": ("vowels", ("ab", 0, {})), "b": ("faulty", ("9", 0, {})), "c": ("vowels", ("x", 0, {}))}
    )
    assert outcomes == {"a": Outcome(2.0), "b": Outcome(9.0), "c": Outcome(0.0)}
    assert pool.run({}) == {}
    pool.close()


def test_workers_are_reused_and_a_hanging_call_costs_its_time_limit() -> None:
    pool = WorkerPool({"faulty": Function("reward_functions.faulty")}, size=2, timeout=TIMEOUT)
    pool.run(calls("1", "2", "3"))
    pids = pool.pids
    start = time.monotonic()
    assert [outcome.value for outcome in pool.run(calls(*map(str, range(200)))).values()] == list(range(200))
    quick = time.monotonic() - start
    assert pool.pids == pids

    start = time.monotonic()
    outcomes = pool.run(calls("endless", *map(str, range(200))))
    assert TIMEOUT <= time.monotonic() - start < TIMEOUT + quick + 1
    assert outcomes[0].value is None
    assert [outcomes[number].value for number in range(1, 201)] == list(range(200))
    kept = set(pids) & set(pool.pids)
    assert len(kept) == 1
    assert gone(list(set(pids) - kept))

    pids = pool.pids
    pool.close()
    assert not any(map(lives, pids))
    assert pool.run(calls("5")) == {0: Outcome(5.0)}
    pids = pool.pids
    del pool
    assert not any(map(lives, pids))


def test_a_worker_that_died_while_idle_is_replaced_and_blames_nobody() -> None:
    pool = WorkerPool({"faulty": Function("reward_functions.faulty")}, size=1, timeout=TIMEOUT)
    pool.run(calls("1"))
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert pool.run(calls("1", "2")) == {0: Outcome(1.0), 1: Outcome(2.0)}
    pool.close()


def test_a_module_that_only_the_worker_cannot_load_is_named() -> None:
    pool = WorkerPool({"x": Function("reward_functions.no_such")}, size=2, timeout=TIMEOUT)
    with pytest.raises(UserError, match=r"reward_functions\.no_such: AttributeError"):
        pool.run({0: ("x", ())})
    assert pool.pids == []


PROGRAM = """
import sys, threading, time
from dapo_pl.rollout.workers import Function, WorkerPool
if __name__ == "__main__":
    pool = WorkerPool({"faulty": Function("reward_functions.faulty")}, size=2, timeout=600)
    pool.run({0: ("faulty", ("1", 0, {})), 1: ("faulty", ("2", 0, {}))})
    print(*pool.pids, flush=True)
    try:
        pool.run({number: ("faulty", (text, 0, {})) for number, text in enumerate(sys.argv[1:])})
    finally:
        print("over", flush=True)
"""


def program(tmp_path: Path, *texts: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A program in the middle of endless calls, in a process group of its own as a shell would give it."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(path), *texts],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'rollout'}"},
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)  # the endless calls have begun
    return process, pids


def children_of(pids: list[int]) -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if int(line.split()[1]) in pids]


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    process, pids = program(tmp_path, "endless", "child")
    children = children_of(pids)
    assert len(children) == 1
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    out, err = process.communicate(timeout=30)
    assert out == "over\n"
    assert err.count("Traceback") == 1  # the program's own; none of a worker's
    assert gone([*pids, *children])


@pytest.mark.parametrize("text", ["endless", "sleep", "regex"])
def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path, text: str) -> None:
    process, pids = program(tmp_path, text, text)
    process.kill()
    process.communicate(timeout=30)
    assert gone(pids)
