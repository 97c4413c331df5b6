"""Sweeps (`-m`): every row is a process of its own, in a directory that its settings name.

Hydra's sweeper makes the rows and its launcher (`basic`, `joblib`, `submitit`) runs them. What a launcher
runs is `run_row`, which starts the entry point again for one row: an engine, a process group or a crash of one
row is then nothing to the next. The sweep's directory follows from the command alone, so the same command goes
on with a sweep that died: finished rows are skipped, and a row with a checkpoint goes on from it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dapo_pl.errors import UserError
from dapo_pl.files import whole_file
from experiments.composing import as_mapping, compose_run, config_differences, search_path, slug

STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""

PLAN = "sweep.json"
"""In a sweep's directory: the command and the rows in order, each as its overrides."""

OUTPUT = "output.txt"
"""In a row's directory, when rows run side by side: what the row printed."""

WHERE_ONLY = ("output_dir", "ckpt_path")
"""Keys that say where a run is kept or goes on, and change nothing of what it computes."""


class Sweep:
    """A `-m` command line, understood before Hydra sees it.

    Args:
        arguments: the command line without the program's name, its overrides last.
        job: the entry point's name, `run` or `evaluate`.
    """

    def __init__(self, arguments: Sequence[str], job: str) -> None:
        self.arguments = list(arguments)
        options = get_args_parser().parse_args(self.arguments)
        self.config_dir: str | None = options.config_dir
        own = [text for text in options.overrides if not text.lstrip("+~").startswith("hydra")]
        self.search = search_path(options.overrides)
        home = Path(as_mapping(own).get("output_dir") or "outputs") / ("sweeps" if job == "run" else f"{job}-sweeps")
        self.directory = home / slug(",".join(text for text in own if text.partition("=")[0] not in WHERE_ONLY))
        base = compose_run(_not_swept(options.overrides), self.config_dir, with_hydra=True)
        sweeper = base.hydra.sweeper
        self.rows: list[list[str]] = []
        """Each row's overrides; empty for a sweeper that invents rows as it goes."""
        if str(sweeper._target_).endswith("BasicSweeper"):
            params = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
            parsed = OverridesParser.create().parse_overrides([*params, *own])
            self.rows = [list(row) for batch in BasicSweeper.split_arguments(parsed, None) for row in batch]
        settings = [as_mapping(row) for row in self.rows]
        keys = {key for row in settings for key in row}
        self.fixed = sorted(key for key in keys if len({row.get(key) for row in settings}) == 1)
        """Keys with one value in all rows: they need not stand in the rows' names."""

    def hydra_arguments(self) -> list[str]:
        """The command line for Hydra: the directory is fixed, so that no worker works out another one."""
        return [
            *self.arguments,
            f"hydra.sweep.dir='{self.directory.absolute()}'",
            self._naming(),
            "hydra.output_subdir=null",
        ]

    def _naming(self) -> str:
        excluded = ",".join(sorted({*self.fixed, *WHERE_ONLY}))
        return f"hydra.job.config.override_dirname.exclude_keys=[{excluded}]"

    def compose_row(self, row: Sequence[str]) -> tuple[Path, DictConfig]:
        """A row's directory and config."""
        config = compose_run([*self.search, self._naming(), *row], self.config_dir, with_hydra=True)
        directory = self.directory / slug(config.hydra.job.override_dirname)
        return directory, OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])

    def prepare(self) -> None:
        """Write the plan, from which the rows' order is known later."""
        self.directory.mkdir(parents=True, exist_ok=True)
        os.environ["DAPO_PL_SWEEP_ROWS"] = str(len(self.rows))
        plan = {"command": [Path(sys.argv[0]).name, *self.arguments], "rows": self.rows}
        with whole_file(self.directory / PLAN) as draft:
            draft.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")


def _not_swept(overrides: Sequence[str]) -> list[str]:
    """Those that are not swept over."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [text for text, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()]


def is_finished(directory: Path, config: DictConfig) -> bool:
    """Whether a row's directory holds the result of exactly this config.

    Raises:
        UserError: it holds a run of another config.
    """
    saved = directory / "config.yaml"
    if not saved.exists():
        return False
    differences = config_differences(OmegaConf.load(saved), config, ignore=WHERE_ONLY)
    if differences:
        raise UserError(
            f"{directory} holds a run of another config ({'; '.join(differences[:3])}): "
            "move it away, or set another output_dir"
        )
    return (directory / "summary.json").exists()


def run_row(config: DictConfig) -> int:
    """Run one row in a process of its own, unless it is finished; its exit status.

    Ctrl-C is passed on to that process once, waits for its checkpoint, and ends the sweep.
    """
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    total = os.environ.get("DAPO_PL_SWEEP_ROWS", "0")
    label = f"row {hydra.job.num + 1}{f' of {total}' if total != '0' else ''}: {directory.name}"
    try:
        if is_finished(directory, config):
            print(f"{label}: finished before, skipped", flush=True)
            return 0
    except UserError as error:
        print(f"{label}: error: {error}", file=sys.stderr, flush=True)
        return 2
    arguments = [*hydra.overrides.task]
    if (directory / "checkpoints" / "last.ckpt").exists():
        arguments = [text for text in arguments if not text.startswith("ckpt_path=")] + ["ckpt_path=last"]
    search = search_path(hydra.overrides.hydra)
    sources = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    extra = [f"--config-dir={path}" for path in sources]
    script = Path(__file__).with_name(f"{hydra.job.name}.py")
    command = [sys.executable, str(script), *extra, *arguments, *search, f"hydra.run.dir='{directory.absolute()}'"]
    side_by_side = not str(hydra.launcher._target_).endswith("BasicLauncher")
    print(f"{label}{f', printing to {directory / OUTPUT}' if side_by_side else ''}", flush=True)
    status = _run(command, directory / OUTPUT if side_by_side else None, _threads(hydra.launcher))
    if status == STOPPED:
        print("the sweep is stopped; the same command goes on with it", flush=True)
        sys.exit(STOPPED)
    if status:
        print(f"{label}: failed with exit status {status}", file=sys.stderr, flush=True)
    elif side_by_side:
        print(f"{label}: done", flush=True)
    return status


def _threads(launcher: Any) -> dict[str, str]:
    """Rows side by side on one machine share its cores: threads that outnumber them wait for each other, spinning."""
    jobs = launcher.get("n_jobs")
    if jobs is None or "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = cores + 1 + jobs if jobs < 0 else jobs
    rows = int(os.environ.get("DAPO_PL_SWEEP_ROWS", "0")) or jobs
    return {"OMP_NUM_THREADS": str(max(1, cores // min(jobs, rows)))}


def _run(command: list[str], output: Path | None, environment: dict[str, str]) -> int:
    """Exit status of the command, which runs outside this process's group: a Ctrl-C reaches it from here alone."""
    stream: Any = None if output is None else output.open("a", encoding="utf-8")
    process = subprocess.Popen(
        command,
        stdout=stream,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **environment},
    )

    def pass_on(number: int, frame: object) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if stream is not None:
            stream.close()
    return 128 - status if status < 0 else status


def read_plan(directory: Path) -> list[list[str]]:
    """The rows of a sweep in order; empty for a directory that is none."""
    plan = directory / PLAN
    return json.loads(plan.read_text(encoding="utf-8"))["rows"] if plan.exists() else []
