"""`kill -9` at random moments: what the same command makes of it afterwards is the run that was never killed."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from commands import ROOT, SMALL, command

from dapo_pl.logs import read_metrics

COMMAND = command(
    "run.py",
    *SMALL,
    "engine=transformers",
    "logger=none",
    "rollout.steps=5",
    "data.evaluation_size=12",
    "evaluation.every_n_steps=2",
    "checkpoint.every_n_steps=1",
    "callbacks.sample_log_every_n_steps=1",
    "technique=[dapo,overlong_filtering]",
    "technique.soft_overlong_punishment.keep_overlong_filtering=true",
)
TRIALS = 20


def row_of(out: Path) -> Path:
    return out / "sweeps" / next((out / "sweeps").iterdir()).name / "default"


def finish(out: Path) -> Path:
    """Give the command until it ends well; the run's directory."""
    result = subprocess.run(
        [*COMMAND, f"output_dir={out}", "-m"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return row_of(out)


def killed_after(out: Path, seconds: float) -> str:
    """Start the command, kill the row's process so long after it began to load the model; the last line it said."""
    process = subprocess.Popen(
        [*COMMAND, f"output_dir={out}", "-m"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("loading the model"):
            break
    time.sleep(seconds)
    subprocess.run(["kill", "-9", (row_of(out) / ".lock").read_text().strip()], check=False)
    rest = process.stdout.read().splitlines()
    process.wait(timeout=60)
    said = [line for line in rest if line.startswith(("step", "starting", "accuracy"))]
    return said[-1] if said else "loading the model"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_run_given_again_is_the_run_that_was_never_killed(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole")
    start = time.perf_counter()
    moments = []
    draw = random.Random(0)
    span = json.loads((whole / "summary.json").read_text())["seconds"]["total"]
    for trial in range(TRIALS):
        out = tmp_path / str(trial)
        moments.append(killed_after(out, draw.uniform(0, span)))
        cut = finish(out)
        for mine, theirs in zip(
            read_metrics(cut / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl"), strict=True
        ):
            for name, value in theirs.items():
                if "seconds" not in name and not name.startswith("cost/step"):
                    assert mine[name] == value, (trial, moments[-1], theirs["step"], name)
        for path in ("samples.jsonl", "model/model.safetensors"):
            assert (cut / path).read_bytes() == (whole / path).read_bytes(), (trial, moments[-1], path)
        for path in whole.glob("evaluations/step_*"):
            assert (cut / "evaluations" / path.name).read_bytes() == path.read_bytes(), (trial, moments[-1], path)
    print(f"{TRIALS} trials in {time.perf_counter() - start:.0f} s, killed after: {moments}")
    assert len({moment.split()[1] for moment in moments}) > 3  # in several steps, not always at one place
