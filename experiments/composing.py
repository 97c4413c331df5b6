"""Configs outside a Hydra job: composed for checks, named for directories, compared with saved ones."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).resolve().parents[1] / "conf"
CONFIG_NAME = "config"
LAST = "last.ckpt"


def slug(name: str) -> str:
    """A directory's name for overrides, in characters that Hydra takes unquoted on a command line."""
    text = re.sub(r"[^\w+.-]", "-", name.replace(",", "_").replace("=", "-"))
    if len(text) > 120:
        text = f"{text[:110]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return text or "default"


def as_mapping(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides by key; of one given twice the last counts."""
    return {key: text for key, _, text in (override.partition("=") for override in overrides)}


def search_path(overrides: Sequence[str]) -> list[str]:
    """Those that say where else Hydra looks for configs."""
    return [text for text in overrides if text.lstrip("+").startswith("hydra.searchpath")]


def run_directory(output_dir: str, job: str, name: str, ckpt_path: str | None) -> str:
    """`output_dir/<job>s/<name>/<time>`: a new directory, or for `last` the newest such directory.

    The name is the command's overrides without `ckpt_path` and `output_dir`, so the same command with
    `ckpt_path=last` finds the run it is to go on with.
    """
    home = Path(output_dir) / f"{job}s" / slug(name)
    if ckpt_path == "last":
        earlier = sorted(home.glob(f"*/checkpoints/{LAST}"))
        if earlier:
            return str(earlier[-1].parents[1])
    return str(home / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))


# At import: the workers of a parallel launcher need them too, and do nothing but import this module.
OmegaConf.register_new_resolver("run_dir", run_directory, use_cache=True, replace=True)
OmegaConf.register_new_resolver("slug", slug, replace=True)
OmegaConf.register_new_resolver("fraction", lambda whole, share: max(1, round(whole * share)), replace=True)


@contextmanager
def config_loader(config_dir: str | None = None) -> Iterator[ConfigLoaderImpl]:
    """Hydra's loader over our configs and, as with `--config-dir`, a user's own beside them."""
    path = create_config_search_path(str(CONFIG_DIR))
    if config_dir is not None:
        # as Hydra does it: before its schemas, which must come last
        path.prepend("command-line", f"file://{Path(config_dir).absolute()}", anchor="schema")
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2(task_name="check", config_search_path=path)
    try:
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        yield loader
    finally:
        GlobalHydra.instance().clear()


def compose_run(overrides: Sequence[str], config_dir: str | None = None, *, with_hydra: bool = False) -> DictConfig:
    """The config that these overrides give."""
    with config_loader(config_dir):
        return compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=with_hydra)


def config_differences(one: Any, other: Any, ignore: Sequence[str] = ()) -> list[str]:
    """ "key: this, not that" for every leaf on which two configs differ, top-level keys in `ignore` left out."""
    sides = [_leaves(OmegaConf.to_container(side, resolve=True)) for side in (one, other)]
    return [
        f"{key}: {sides[0].get(key)!r} there, {sides[1].get(key)!r} now"
        for key in sorted(sides[0].keys() | sides[1].keys())
        if key.split(".")[0] not in ignore and sides[0].get(key) != sides[1].get(key)
    ]


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found |= _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    return found
