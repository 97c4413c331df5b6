"""Curves are what the logs say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dapo_pl.analysis.curves import PANEL, health_panel, read_curve, smoothed
from dapo_pl.errors import UserError


def test_smoothing_is_the_mean_of_the_last_values() -> None:
    assert smoothed(np.array([1.0, 3.0, 5.0, 9.0]), 2).tolist() == [1, 2, 4, 7]


def test_panel_of_two_runs(tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        run = tmp_path / f"seed-{number}" / "time"
        run.mkdir(parents=True)
        rows = [{"step": step, **dict.fromkeys(PANEL, step / 10 + number)} for step in range(1, 6)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(run)
    steps, values = read_curve(runs[1], "rollout/entropy_mean")
    assert steps.tolist() == [1, 2, 3, 4, 5]
    assert values.tolist() == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5])
    figure = health_panel(runs)
    assert [axis.get_title() for axis in figure.axes] == list(PANEL.values())
    drawn = figure.axes[2].get_lines()[2].get_ydata()
    assert drawn.tolist() == pytest.approx(values.tolist())
    figure.savefig(tmp_path / "panel.png")
    assert (tmp_path / "panel.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no run directory"):
        read_curve(tmp_path, "rollout/entropy_mean")
    with pytest.raises(UserError, match="logged no"):
        read_curve(runs[0], "rollout/lenght")
