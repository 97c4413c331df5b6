"""What every entry point shares: resolvers, checks of the command line, and how errors end a program."""

from __future__ import annotations

import errno
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dapo_pl.errors import UserError, nearest
from experiments.composing import CONFIG_NAME, as_mapping, config_loader, search_path
from experiments.sweep import Sweep, is_finished, run_row

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)


def check_overrides(arguments: list[str]) -> None:
    """Refuse an unknown key or option of the command line with the nearest known one."""
    # Hydra's own options: those with a value take the next word, and none of them is an override.
    parser = get_args_parser().parse_args(arguments)
    overrides = parser.overrides
    if parser.config_dir is not None and not Path(parser.config_dir).is_dir():
        raise UserError(f"--config-dir {parser.config_dir}: there is no such directory")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        searchpath = search_path(overrides)
        with config_loader(parser.config_dir) as loader:
            plain = compose(CONFIG_NAME, overrides=searchpath)
            groups = loader.list_groups("")
            chosen = searchpath
            for text, override in zip(overrides, parsed, strict=True):
                key = (override.key_or_group or "").lstrip("/")
                if override.is_add() or override.is_delete() or key.startswith("hydra"):
                    continue
                if key in groups:
                    options = loader.get_group_options(key)
                    for option in _options(override):
                        # options on a search path of the command line are known to compose alone
                        if option not in options and option not in (None, "null") and not searchpath:
                            raise UserError(f"{key}={option} is not an option: {nearest(str(option), options)}")
                    if not override.is_sweep_override():
                        chosen = [*chosen, text]
            # Keys are judged in the config that the chosen options give: each option has keys of its own.
            full = compose(CONFIG_NAME, overrides=chosen) if chosen else plain
            for override in parsed:
                key = (override.key_or_group or "").lstrip("/")
                if override.is_add() or override.is_delete() or key in groups or key.startswith("hydra"):
                    continue
                _check_key(full, key, groups)
    except HydraException as error:
        raise UserError(f"cannot read the command line: {str(error).splitlines()[0]}") from error


def _options(override: Any) -> list[Any]:
    values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    return [option for value in values for option in (value if isinstance(value, list) else [value])]


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


def entry_point(
    main: Callable[[], object],
    *,
    check: Callable[[DictConfig], object] = lambda config: None,
    finish: Callable[[Path], int] = lambda directory: 0,
) -> None:
    """Run a Hydra main: mistakes a user can cure end as one sentence and status 2.

    Args:
        main: the decorated task.
        check: what is wrong with a row of a sweep, as a `UserError`, cheaply.
        finish: looks at a sweep's directory when all rows have ended; the exit status.
    """
    try:
        sys.argv[1:] = name_model_directory(flags_first(sys.argv[1:]))
        options = get_args_parser().parse_args(sys.argv[1:])
        if not (options.help or options.hydra_help or options.info):
            check_overrides(sys.argv[1:])
            if options.cfg and options.multirun:
                raise UserError("--cfg shows one config: leave out -m, and name one value for each key")
            if not options.cfg:
                check_writable(options.overrides)
                if options.multirun:
                    sys.exit(run_sweep(main, check, finish))
        main()
    except UserError as error:
        fail(error)


def flags_first(arguments: list[str]) -> list[str]:
    """The same command line in the one order Hydra takes: no overrides on both sides of a flag."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    return [text for text in arguments if text not in overrides] + overrides


def name_model_directory(arguments: list[str]) -> list[str]:
    """`model=DIRECTORY` as short for `model=hf model.path=DIRECTORY`."""
    named = []
    for text in arguments:
        key, _, value = text.partition("=")
        bare = value.strip("'\"")
        if key == "model" and ("/" in bare or Path(bare).is_dir()) and "," not in bare:
            named += ["model=hf", f"model.path='{bare}'"]
        else:
            named.append(text)
    return named


def run_sweep(
    main: Callable[[], object], check: Callable[[DictConfig], object], finish: Callable[[Path], int]
) -> int:
    """Check every row before the first starts, then leave the rows to Hydra's launcher."""
    sweep = Sweep(sys.argv[1:], Path(sys.argv[0]).stem)
    finished = 0
    for row in sweep.rows:
        try:
            directory, config = sweep.compose_row(row)
            finished += is_finished(directory, config)
            check(config)
        except UserError as error:
            raise UserError(f"row {' '.join(row)}: {error}") from error
    sweep.prepare()
    print(f"sweep of {len(sweep.rows) or 'open many'} rows: {sweep.directory}", flush=True)
    if finished:
        print(f"{finished} of them finished before and are skipped", flush=True)
    sys.argv[1:] = sweep.hydra_arguments()
    main()
    return finish(sweep.directory)


def check_writable(overrides: list[str]) -> None:
    """Hydra makes the run directory before the job starts; say beforehand when it cannot."""
    directory = Path(as_mapping(overrides).get("output_dir", "outputs"))
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
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                return run_row(config)
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
