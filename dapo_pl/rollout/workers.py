"""Functions that may hang, crash or answer nonsense: each call in a worker process, with a time limit.

Nothing heavy is imported here: a worker imports this module and the function's, and is at work within a fraction
of a second. Workers are spawned, never forked, since the parent has threads and perhaps a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import numbers
import os
import pkgutil
import resource
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from dapo_pl.errors import UserError

Key = TypeVar("Key", bound=Hashable)

START_SECONDS = 120.0
"""For a worker to import its functions; not part of any response's time limit."""

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Function:
    """What a worker loads: a dotted path, and the keyword arguments that every call gets."""

    path: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A finite number, or None and the reason why there is none."""

    value: float | None
    reason: str = ""


class WorkerPool:
    """Calls functions in up to `size` reused processes; whatever a call does, it ends in one `Outcome`.

    A worker that overruns, crashes or exits costs the one call it was at; it is killed with everything it has
    started, and replaced. Workers start when they are first needed and end with `close`, with this object, with
    the program, or (on Linux) with its sudden death.

    Args:
        functions: by name.
        size: processes at the same time.
        timeout: seconds a call may take, by the clock.
    """

    def __init__(self, functions: Mapping[str, Function], *, size: int, timeout: float) -> None:
        self.functions = dict(functions)
        self.size = size
        self.timeout = timeout
        self._calls = 0
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _retire_all, self._workers)

    @property
    def pids(self) -> list[int]:
        """Of the living workers."""
        return [worker.pid for worker in self._workers]

    def run(self, calls: Mapping[Key, tuple[str, tuple[Any, ...]]]) -> dict[Key, Outcome]:
        """Call functions by name with positional arguments; exactly one outcome for each key, in their order."""
        outcomes: dict[Key, Outcome] = {}
        waiting = deque(calls)
        try:
            while len(outcomes) < len(calls):
                self._hand_out(waiting, calls, outcomes)
                self._collect(outcomes)
        except BaseException:
            self.close()  # a call may be half done, and its late answer must meet nobody
            raise
        return {key: outcomes[key] for key in calls}

    def close(self) -> None:
        """End the workers; a later `run` starts new ones."""
        _retire_all(self._workers)

    def _hand_out(
        self,
        waiting: deque[Key],
        calls: Mapping[Key, tuple[str, tuple[Any, ...]]],
        outcomes: dict[Key, Outcome],
    ) -> None:
        for worker in [worker for worker in self._workers if worker.idle and worker.dead]:
            self._retire(worker)
        free = sum(worker.starting or worker.idle for worker in self._workers)
        for _ in range(min(self.size - len(self._workers), len(waiting) - free)):
            self._workers.append(_Worker(self.functions))
        for worker in self._workers:
            if waiting and worker.idle:
                key = waiting.popleft()
                self._calls += 1
                if not worker.send(self._calls, key, *calls[key], timeout=self.timeout):
                    outcomes[key] = Outcome(None, "its worker process had died")

    def _collect(self, outcomes: dict[Any, Outcome]) -> None:
        """Wait until something happens, and take note of it."""
        working = [worker for worker in self._workers if not worker.idle]
        if not working:
            return
        left = max(0.0, min(worker.deadline for worker in working) - time.monotonic())
        ready = wait([part for worker in working for part in (worker.connection, worker.process.sentinel)], left)
        for worker in working:
            if worker.connection in ready:
                message = worker.receive()
            elif worker.process.sentinel in ready:
                message = None
            elif time.monotonic() >= worker.deadline:
                overrun = f"took longer than {self.timeout:g} s"
                if worker.starting:
                    overrun = f"could not be loaded within {START_SECONDS:g} s"
                self._lose(worker, overrun, outcomes)
                continue
            else:
                continue
            if message is None:
                self._lose(worker, worker.farewell(), outcomes)
            else:
                worker.take(message, outcomes)

    def _lose(self, worker: _Worker, reason: str, outcomes: dict[Any, Outcome]) -> None:
        starting, key = worker.starting, worker.key
        self._retire(worker)
        if starting:
            raise UserError(f"a worker process for {self._names()} {reason}: check what the module does on import")
        outcomes[key] = Outcome(None, reason)

    def _retire(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.retire()

    def _names(self) -> str:
        return ", ".join(function.path for function in self.functions.values())


class _Worker:
    """One process as the parent sees it: starting, idle, or at one call."""

    def __init__(self, functions: dict[str, Function]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, functions, os.getpid()), daemon=True)
        # Inherited: until the worker has left the terminal's process group, Ctrl-C must not reach it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        except OSError as error:
            raise UserError(f"no worker process for reward functions can be started: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self.process.pid or 0
        self.starting = True
        self.call: int | None = None
        self.key: Any = None
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def idle(self) -> bool:
        return not self.starting and self.call is None

    @property
    def dead(self) -> bool:
        # `is_alive` would reap the process, and with it the right to signal its group.
        return bool(wait([self.process.sentinel], 0))

    def send(self, call: int, key: Any, name: str, arguments: tuple[Any, ...], *, timeout: float) -> bool:
        """Hand over a call; False if nobody is there to take it."""
        try:
            self.connection.send((call, name, arguments))
        except OSError:
            return False
        self.call, self.key, self.deadline = call, key, time.monotonic() + timeout
        return True

    def receive(self) -> Any:
        """The worker's message, or None if it has ended or sends what is none."""
        try:
            return self.connection.recv()
        except Exception:  # whatever a broken pipe's bytes decode to
            return None

    def take(self, message: tuple[int, float | None, str], outcomes: dict[Any, Outcome]) -> None:
        """Note an outcome under its key; an answer to any other call is nobody's."""
        call, value, reason = message
        if self.starting:
            if reason:
                raise UserError(f"a worker process cannot load {reason}")
            self.starting = False
        elif call == self.call:
            outcomes[self.key] = Outcome(value, reason)
            self.call = self.key = None

    def farewell(self) -> str:
        """How the process ended."""
        self.retire()
        code = self.process.exitcode
        if code is None or code == -signal.SIGKILL:  # ours, or that of a kernel out of memory
            return "closed its pipe or was killed"
        return f"ended its process by {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"

    def retire(self) -> None:
        """Kill the process and what it has started, and reap it; after that its number is no longer its own."""
        if self.connection.closed:
            return
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)
        self.process.join(5)
        self.connection.close()


def _retire_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().retire()


def serve(connection: Connection, functions: dict[str, Function], parent: int) -> None:
    """A worker's life: load the functions, then answer calls until the parent closes the pipe."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # An orphan in the middle of an endless call never looks at its pipe again.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    loaded = {}
    for name, function in functions.items():
        try:
            loaded[name] = pkgutil.resolve_name(function.path)
        except BaseException as error:
            connection.send((0, None, f"{function.path}: {type(error).__name__}: {error!s:.200}"))
            return
    connection.send((0, None, ""))
    while True:
        try:
            call, name, arguments = connection.recv()
            connection.send((call, *attempt(loaded[name], arguments, functions[name].arguments)))
        except (EOFError, OSError):
            return


def attempt(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[float | None, str]:
    """A call's finite number, or None and what happened instead."""
    try:
        value = function(*arguments, **keywords)
        if not isinstance(value, numbers.Real):
            return None, f"returned {value!r:.60}, which is no number"
        number = float(value)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are a function's failures like any other
        return None, f"raised {type(error).__name__}: {error!s:.200}"
    return (number, "") if math.isfinite(number) else (None, f"returned {number}")
