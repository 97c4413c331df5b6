"""The plain log: one line a step, and no step twice after a resume."""

from __future__ import annotations

from pathlib import Path

from dapo_pl.logs import JsonLinesLogger, read_metrics


def test_one_line_a_step_and_a_resume_leaves_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(path)
    for step in (1, 2, 3):
        logger.log_metrics({"a": step * 1.5, "epoch": 0}, step)
        logger.log_metrics({"b": float("nan")}, step)
    logger.finalize("success")
    assert read_metrics(path) == [{"step": step, "a": step * 1.5, "b": None} for step in (1, 2, 3)]

    with path.open("a") as file:
        file.write('{"step": 4, "a"')  # what a crash leaves
    resumed = JsonLinesLogger(path)
    resumed.drop_after(2)
    resumed.log_metrics({"a": 7.0}, 3)
    resumed.save()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(1, 1.5), (2, 3.0), (3, 7.0)]
