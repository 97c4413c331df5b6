"""Training curves of runs, read from their plain logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo_pl.errors import UserError
from dapo_pl.logs import read_metrics

PANEL = {
    "rollout/accuracy_mean": "accuracy of what was generated",
    "rollout/response_length_mean": "response length, tokens",
    "rollout/entropy_mean": "entropy, nats per token",
    "rollout/generation_probability_mean": "mean probability of generated tokens",
}
"""The paper's Figure 7, with accuracy in place of the reward it determines."""


def read_curve(run: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rollout steps and values of one metric of a run directory; `UserError` if it logged none."""
    log = run / "metrics.jsonl"
    if not log.is_file():
        raise UserError(f"{run} holds no metrics.jsonl, so it is no run directory")
    points = [(row["step"], row[name]) for row in read_metrics(log) if row.get(name) is not None]
    if not points:
        raise UserError(f"{run} logged no {name}")
    steps, values = zip(*points, strict=True)
    return np.array(steps), np.array(values)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values up to each place (fewer at the beginning)."""
    return np.array([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)])


def health_panel(runs: Sequence[Path], window: int = 5) -> Any:
    """A matplotlib figure: each run's curves faint, and smoothed over `window` steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 5.4), sharex=True)
    for axis, (name, title) in zip(axes.flat, PANEL.items(), strict=True):
        for number, run in enumerate(runs):
            steps, values = read_curve(run, name)
            color = f"C{number}"
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axis.plot(steps, smoothed(values, window), color=color, linewidth=1.8, label=run.parent.name)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("rollout step")
    if len(runs) > 1:
        axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    return figure
