"""What the tests share that run the entry points as a user does."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

SMALL = [
    "model=tiny",
    "warm_start.steps=30",
    "warm_start.batch_size=16",
    "rollout.groups_per_step=3",
    "rollout.group_size=4",
    "rollout.mini_batch_size=4",
    "rollout.max_prompts_per_step=6",
    "rollout.on_shortfall=keep_unmixed",
    "data.train_size=60",
    "evaluation.samples=2",
    "optimizer.lr=1e-3",
]
"""A run of seconds, which learns nothing; the number of steps is each test's."""


def command(script: str, *arguments: str) -> list[str]:
    """The command line of an entry point."""
    return [sys.executable, str(ROOT / "experiments" / script), *arguments]
