"""What every entry point shares: resolvers, checks of the command line, and how errors end a program."""

from __future__ import annotations

import datetime
import errno
import functools
import hashlib
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from dapo_pl.errors import UserError, nearest

CONFIG_DIR = Path(__file__).resolve().parents[1] / "conf"
LAST = "last.ckpt"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)


def run_directory(output_dir: str, job: str, name: str, ckpt_path: str | None) -> str:
    """`output_dir/<job>s/<name>/<time>`: a new directory, or for `last` the newest such directory.

    The name is the command's overrides without `ckpt_path` and `output_dir`, so the same command with
    `ckpt_path=last` finds the run it is to go on with.
    """
    # Only characters that Hydra takes unquoted: the directory will be typed after model.path= and ckpt_path=.
    slug = re.sub(r"[^\w+.-]", "-", name.replace(",", "_").replace("=", "-"))
    if len(slug) > 120:
        slug = f"{slug[:110]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    home = Path(output_dir) / f"{job}s" / (slug or "default")
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
    # Hydra's own options: those with a value take the next word, and none of them is an override.
    overrides = get_args_parser().parse_args(arguments).overrides
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(f"cannot read the command line: {str(error).splitlines()[0]}") from error
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        plain = compose(config_name)
        repository = GlobalHydra.instance().config_loader()
        groups = repository.list_groups("")
        chosen = []
        for text, override in zip(overrides, parsed, strict=True):
            key = (override.key_or_group or "").lstrip("/")
            if override.is_add() or override.is_delete() or key.startswith("hydra"):
                continue
            if key in groups:
                options = repository.get_group_options(key)
                for option in _options(override):
                    if option not in options and option not in (None, "null"):
                        raise UserError(f"{key}={option} is not an option: {nearest(str(option), options)}")
                if not override.is_sweep_override():
                    chosen.append(text)
        # Keys are judged in the config that the chosen options give: each option has keys of its own.
        full = compose(config_name, overrides=chosen) if chosen else plain
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
        # `in` is False for a mandatory value that is not given yet; the key is known all the same.
        if not isinstance(node, DictConfig) or part not in list(node):
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
    options = get_args_parser().parse_args(sys.argv[1:])
    try:
        if not (options.help or options.hydra_help or options.info):
            check_overrides(sys.argv[1:], config_name)
            if not options.cfg:
                check_writable(options.overrides)
        main()
    except UserError as error:
        fail(error)


def check_writable(overrides: list[str]) -> None:
    """Hydra makes the run directory before the job starts; say beforehand when it cannot."""
    named = [text.partition("=")[2] for text in overrides if text.startswith("output_dir=")]
    directory = Path(named[-1] if named else "outputs")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b" ")
    except OSError as error:
        raise UserError(
            f"cannot write to output_dir={directory}: {error.strerror}; set output_dir to a writable place with room"
        ) from error


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
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return fail(
                UserError(
                    f"cannot write {error.filename or config.output_dir}: {error.strerror}; free space or set "
                    "output_dir, then go on with ckpt_path=last if a checkpoint was written"
                )
            )

    return wrapped
