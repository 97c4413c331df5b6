"""Shared fixtures: the tiny model, prepared once, and the real data directory where it is present."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# The shapes in signatures are checked on every call; the modules must not have been imported before.
install_import_hook(["dapo_pl.objective", "dapo_pl.policy", "dapo_pl.rewards"], "beartype.beartype")

# Two engines and a trainer share two cores in these tests; more threads only wait for each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of oracles and real data; tests that need it skip where it is not."""
    if not SHARED.exists():
        pytest.skip("the folder of oracles and real data is not here")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A randomly initialised tiny model's directory."""
    from dapo_pl.models.tiny import TinyModel

    return str(TinyModel(cache_dir=tmp_path_factory.mktemp("models")).prepare())
