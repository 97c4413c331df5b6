"""What every entry point shares: resolvers, checks of the command line, and how errors end a program."""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from dapo_pl.errors import UserError, nearest

CONFIG_DIR = Path(__file__).resolve().parents[1] / "conf"
LAST = "last.ckpt"


def run_directory(output_dir: str, job: str, name: str, ckpt_path: str | None) -> str:
    """`output_dir/<job>s/<name>/<time>`: a new directory, or for `last` the newest such directory.

    The name is the command's overrides without `ckpt_path` and `output_dir`, so the same command with
    `ckpt_path=last` finds the run it is to go on with.
    """
    home = Path(output_dir) / f"{job}s" / (name.replace("/", "_")[:150] or "default")
    if ckpt_path == "last":
        earlier = sorted(home.glob(f"*/checkpoints/{LAST}"))
        if earlier:
            return str(earlier[-1].parents[1])
    return str(home / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))


def register_resolvers() -> None:
    """The interpolations that the configs use."""
    OmegaConf.register_new_resolver("run_dir", run_directory, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("fraction", lambda whole, share: max(1, round(whole * share)), replace=True)


def check_overrides(arguments: list[str], config_name: str = "config") -> None:
    """Refuse an unknown key or option of the command line with the nearest known one."""
    overrides = [a for a in arguments if not a.startswith("-") or "=" in a]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(f"cannot read the command line: {str(error).splitlines()[0]}") from error
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        plain = compose(config_name, return_hydra_config=True)
        repository = GlobalHydra.instance().config_loader()
        groups = repository.list_groups("")
        chosen = []
        for text, override in zip(overrides, parsed, strict=True):
            key = (override.key_or_group or "").lstrip("/")
            if override.is_add() or override.is_delete() or key.startswith("hydra"):
                continue
            if key in groups and "." not in key:
                options = repository.get_group_options(key)
                for option in _options(override):
                    if option not in options and option not in (None, "null"):
                        raise UserError(f"{key}={option} is not an option: {nearest(str(option), options)}")
                if not override.is_sweep_override():
                    chosen.append(text)
        # Keys are judged in the config that the chosen options give: each option has keys of its own.
        full = compose(config_name, overrides=chosen, return_hydra_config=True) if chosen else plain
        for override in parsed:
            key = (override.key_or_group or "").lstrip("/")
            if override.is_add() or override.is_delete() or key in groups or key.startswith("hydra"):
                continue
            _check_key(full, key, groups)


def _options(override: Any) -> list[Any]:
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


def _check_key(config: DictConfig, key: str, groups: list[str]) -> None:
    node: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            known = [name for name in node if name != "hydra"] if isinstance(node, DictConfig) else []
            if depth == 0:
                known = sorted({*known, *groups} - {"hydra"})
            prefix = "".join(f"{name}." for name in parts[:depth])
            raise UserError(
                f"unknown config key {key!r}: {nearest(prefix + part, [prefix + str(name) for name in known])}"
            )
        if OmegaConf.is_interpolation(node, part):
            return
        node = node._get_node(part)


def entry_point(main: Callable[[], object], config_name: str = "config") -> None:
    """Run a Hydra main: mistakes a user can cure end as one sentence and status 2."""
    register_resolvers()
    try:
        if not {"--help", "-h", "--hydra-help", "--version"} & set(sys.argv[1:]):
            check_overrides(sys.argv[1:], config_name)
        main()
    except UserError as error:
        fail(error)


def fail(error: UserError) -> None:
    """One sentence on standard error, status 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def reports_user_errors(task: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Inside a Hydra job: Hydra would print a traceback for a mistake that a sentence explains."""

    @functools.wraps(task)
    def wrapped(config: DictConfig) -> Any:
        try:
            return task(config)
        except UserError as error:
            return fail(error)

    return wrapped
