"""Sweeps as a user runs them: real rows in processes of their own, cut short and gone on with, then compared."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import commands
import numpy as np
import pytest
from commands import ROOT, command

from dapo_pl.analysis.runs import compare, load_run
from dapo_pl.errors import UserError
from dapo_pl.evaluation import EvaluationResult
from dapo_pl.logs import read_metrics

SMALL = [*commands.SMALL, "engine=transformers", "rollout.steps=2", "data.evaluation_size=6"]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation's technique of a user's own: a Python file and a yaml, both outside the repository."""
    home = tmp_path_factory.mktemp("outside")
    text = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
    (python,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (home / "wide_clip.py").write_text(python)
    folder = home / "conf" / "technique"
    folder.mkdir(parents=True)
    (folder / "wide_clip.yaml").write_text(yaml)
    return home


def environment(outside: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{outside}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(scope="module")
def sweep(outside: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two rows × two seeds; Ctrl-C in the second row, then the same command again. Its directory and last output."""
    out = tmp_path_factory.mktemp("sweep")
    words = [*SMALL, "technique=wide_clip,dapo", "seed=1,2", f"output_dir={out}"]
    again = command("run.py", f"--config-dir={outside / 'conf'}", *words, "-m")
    process = subprocess.Popen(
        again, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(outside)
    )
    assert process.stdout is not None
    printed, row = "", 0
    for line in process.stdout:
        printed += line
        row += line.startswith("row ")
        if row == 2 and line.startswith("step 1/2"):
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, printed
    assert "the same command goes on with it" in printed
    assert "Traceback" not in printed
    (home,) = (out / "sweeps").iterdir()
    assert sorted(path.parent.name for path in home.glob("*/summary.json")) == ["seed-1_technique-wide_clip"]
    kept = (home / "seed-1_technique-wide_clip" / "summary.json").stat().st_mtime_ns
    result = subprocess.run(
        again, capture_output=True, text=True, cwd=ROOT, env=environment(outside), timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (home / "seed-1_technique-wide_clip" / "summary.json").stat().st_mtime_ns == kept
    assert "row 1 of 4: seed-1_technique-wide_clip: finished before, skipped" in result.stdout
    return home, result.stdout


def test_a_row_cut_short_goes_on_from_its_checkpoint(sweep: tuple[Path, str]) -> None:
    home, _ = sweep
    rows = read_metrics(home / "seed-2_technique-wide_clip" / "metrics.jsonl")
    assert [row["step"] for row in rows if "rollout/reward_mean" in row] == [1, 2]
    record = json.loads((home / "seed-2_technique-wide_clip" / "run.json").read_text())
    assert "ckpt_path=last" in record["command"]


def test_the_outside_technique_is_what_ran(sweep: tuple[Path, str]) -> None:
    home, _ = sweep
    summary = json.loads((home / "seed-1_technique-wide_clip" / "summary.json").read_text())
    assert summary["techniques"] == ["WideClip"]
    assert "width: 0.4" in (home / "seed-1_technique-wide_clip" / "config.yaml").read_text()


def test_the_table_says_what_the_runs_logged(sweep: tuple[Path, str]) -> None:
    home, printed = sweep
    with (home / "comparison.csv").open() as file:
        table = {row["row"]: row for row in csv.DictReader(file)}
    assert list(table) == ["wide_clip", "dapo"]
    accuracy = {}
    for label, row in table.items():
        runs = [home / f"seed-{seed}_technique-{label}" for seed in (1, 2)]
        results = [json.loads((run / "evaluations" / "step_000002.json").read_text()) for run in runs]
        accuracy[label] = np.mean([result["correct"] for result in results])
        last = [
            [one for one in read_metrics(run / "metrics.jsonl") if "rollout/reward_mean" in one][-1] for run in runs
        ]
        for column, names in {
            "tokens_generated": ["cost/tokens_generated"],
            "tokens_used": ["cost/tokens_used"],
            "training_seconds": ["cost/generation_seconds", "cost/update_seconds", "cost/sync_seconds"],
            "entropy": ["rollout/entropy_mean"],
            "response_length": ["rollout/response_length_mean"],
        }.items():
            logged = np.mean([sum(one[name] for name in names) for one in last])
            # the weights go to the engine once more before the last evaluation, after the last logged step
            assert float(row[column]) == pytest.approx(logged, abs=0.5 if column == "training_seconds" else 1e-9)
        assert float(row["accuracy"]) == pytest.approx(accuracy[label])
        assert float(row["accuracy_low"]) <= accuracy[label] <= float(row["accuracy_high"])
        assert row["seeds"] == "1 2"
    difference = float(table["dapo"]["difference_first_mean"])
    assert difference == pytest.approx(accuracy["dapo"] - accuracy["wide_clip"])
    assert f"{100 * accuracy['dapo']:.1f}" in printed
    assert (home / "comparison.txt").read_text() in printed


def test_compare_makes_the_same_table_from_disk_and_from_aim(sweep: tuple[Path, str], tmp_path: Path) -> None:
    home, _ = sweep

    def compared(*arguments: str) -> str:
        result = subprocess.run(
            command("compare.py", *arguments), capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert compared(str(home)) == (home / "comparison.txt").read_text()
    assert compared(str(home), "--format=markdown") == (home / "comparison.md").read_text()
    compared(str(home), "--format=csv", f"--out={tmp_path / 'table.csv'}")
    assert (tmp_path / "table.csv").read_text() == (home / "comparison.csv").read_text()
    repo = home.parents[1]
    query = f'run.experiment == "{home.name}" and run.hparams.config.seed == 1'
    from_aim = compared(query, f"--repo={repo}")
    assert from_aim.splitlines()[1].split()[0] == "wide_clip"
    assert from_aim.splitlines()[2].split()[0] == "dapo"


def test_a_comparison_across_other_problems_is_refused(sweep: tuple[Path, str]) -> None:
    home, _ = sweep
    runs = [load_run(path) for path in sorted(home.glob("seed-1_*"))]
    other = runs[1].after
    runs[1].__dict__["after"] = EvaluationResult(
        ["elsewhere", *other.problem_ids[1:]],
        other.truths,
        other.answers,
        other.correct,
        other.lengths,
        other.truncated,
    )
    with pytest.raises(UserError, match="on other problems"):
        compare(runs)


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command("run.py", *arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_row_that_cannot_run_is_refused_before_the_first_one_starts(tmp_path: Path) -> None:
    technique = "technique=dapo,[soft_overlong_punishment,overlong_filtering]"
    # an override behind the flag, where argparse by itself takes none
    message = refused(*SMALL, technique, "logger=none", "-m", f"output_dir={tmp_path}")
    assert not list(tmp_path.rglob("run.json"))
    assert "row " in message
    assert "replaces overlong_filtering" in message


def test_rows_of_another_config_are_not_taken_for_this_sweeps(sweep: tuple[Path, str], outside: Path) -> None:
    home, _ = sweep
    yaml = outside / "conf" / "technique" / "wide_clip.yaml"
    before = yaml.read_text()
    try:
        yaml.write_text(before.replace("0.4", "0.1"))
        words = [*SMALL, "technique=wide_clip,dapo", "seed=1,2", f"output_dir={home.parents[1]}"]
        message = refused(f"--config-dir={outside / 'conf'}", *words, "-m", environment=environment(outside))
    finally:
        yaml.write_text(before)
    assert "technique.wide_clip.width: 0.4 there, 0.1 now" in message


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_rows_side_by_side(tmp_path: Path, launcher: str) -> None:
    result = subprocess.run(
        command(
            "run.py",
            *SMALL,
            "technique=naive_grpo,dapo",
            "logger=none",
            f"hydra/launcher={launcher}",
            *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []),
            f"output_dir={tmp_path}",
            "-m",
        ),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (home,) = (tmp_path / "sweeps").iterdir()
    assert (home / "comparison.txt").read_text() in result.stdout
    for row in ("technique-naive_grpo", "technique-dapo"):
        assert "paired difference" in (home / row / "output.txt").read_text()
