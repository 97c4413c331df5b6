"""The main job as a user runs it: real processes, the real engine, tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from commands import ROOT, command

from dapo_pl.logs import read_metrics
from dapo_pl.rollout.types import OUTCOMES

SMALL = [*commands.SMALL, "rollout.steps=4", "data.evaluation_size=6"]


def run(script: str, *arguments: str) -> str:
    result = subprocess.run(
        command(script, *arguments), capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def only(pattern: str, home: Path) -> Path:
    (path,) = home.glob(pattern)
    return path


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """`experiment=smoke` from start to end with vLLM and Aim; its directory and what it printed."""
    out = tmp_path_factory.mktemp("smoke")
    start = time.perf_counter()
    printed = run("run.py", "experiment=smoke", f"output_dir={out}")
    assert time.perf_counter() - start < 170  # the promise is 90 s on an idle machine; a test has company
    return only("runs/*/*", out), printed


def test_smoke_goes_the_whole_way(smoke: tuple[Path, str]) -> None:
    directory, printed = smoke
    for word in ("warm start", "step 1/2", "step 2/2", "paired difference", "tokens:", "aim up --repo", "next"):
        assert word in printed
    rows = [row for row in read_metrics(directory / "metrics.jsonl") if row["step"] in (1, 2)]
    for row in rows:
        assert row["engine/policy_lag_max"] == 0
        assert row["engine/log_prob_gap_mean"] < 1e-3
        assert row["policy/optimizer_step"] == 2 * row["step"]
        for name in (
            "rollout/reward_mean",
            "rollout/entropy_mean",
            "rollout/response_length_mean",
            "policy/grad_norm",
        ):
            assert isinstance(row[name], float)
    summary = json.loads((directory / "summary.json").read_text())
    cost = summary["cost"]
    assert (
        cost["tokens_used"] + cost["tokens_filtered"] + cost["tokens_beyond_need"] + cost["tokens_cut_off"]
        == (cost["tokens_generated"])
    )
    assert rows[-1]["cost/tokens_generated"] == cost["tokens_generated"]
    assert cost["responses_used"] == 2 * 4 * 8
    prompts = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    judged = sum(row["rollout/groups_examined"] for row in rows)
    assert sum(prompt["drawn"] for prompt in prompts) == judged
    assert sum(prompt["accepted"] for prompt in prompts) == sum(group["accepted"] for group in summary["groups"]) == 8
    assert sum(group[name] for group in summary["groups"] for name in OUTCOMES) == judged
    record = json.loads((directory / "run.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert "clip_high: 0.28" in (directory / "config.yaml").read_text()


def test_the_checkpoint_is_also_a_model_anyone_can_load(smoke: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    directory, _ = smoke
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    saved = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved["state_dict"][f"policy.model.{name}"])


def test_evaluate_takes_the_directory_and_agrees_with_the_run(smoke: tuple[Path, str], tmp_path: Path) -> None:
    directory, _ = smoke
    printed = run("evaluate.py", f"model={directory / 'model'}", f"output_dir={tmp_path}")
    assert f"from {directory}/config.yaml" in printed
    after = json.loads((directory / "evaluations" / "step_000002.json").read_text())
    again = json.loads(only("evaluates/*/*/evaluation.json", tmp_path).read_text())
    assert again == after


def test_aim_holds_the_curves_and_the_samples(smoke: tuple[Path, str]) -> None:
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager
    from aim.storage.context import Context

    directory, _ = smoke
    kept = json.loads((directory / "aim.json").read_text())
    repo = Repo(kept["repo"])
    RepoIndexManager.get_index_manager(repo).index(kept["run_hash"])
    run_ = repo.get_run(kept["run_hash"])
    assert run_ is not None
    assert run_["hparams", "config", "rollout", "steps"] == 2
    curves: dict[str, Any] = {metric.name: metric for metric in run_.metrics()}
    logged = {row["step"]: row["rollout/reward_mean"] for row in read_metrics(directory / "metrics.jsonl")[1:3]}
    frame = curves["rollout/reward_mean"].dataframe()
    assert dict(zip(frame["step"].tolist(), frame["value"].tolist(), strict=True)) == pytest.approx(logged)
    assert any(name.startswith("eval/heldout/avg@2") for name in curves)
    for label in ("best", "worst", "longest"):
        assert run_.get_text_sequence("samples", Context({"label": label})) is not None


@pytest.mark.parametrize("moment", ["step 2/4", "step_000000"])
def test_ctrl_c_and_last_give_the_uninterrupted_run(tmp_path: Path, moment: str) -> None:
    """With transformers' engine on a CPU bit for bit; interrupted in the middle of the run."""
    options = [*SMALL, "engine=transformers", "logger=none", "checkpoint.every_n_steps=100"]
    run("run.py", *options, f"output_dir={tmp_path / 'whole'}")
    whole = only("runs/*/*", tmp_path / "whole")

    arguments = command("run.py", *options, f"output_dir={tmp_path / 'cut'}")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith(moment):
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130, printed
    assert "Traceback" not in printed
    assert "ckpt_path=last" in printed
    run("run.py", *options, f"output_dir={tmp_path / 'cut'}", "ckpt_path=last")
    cut = only("runs/*/*", tmp_path / "cut")

    timing = ("seconds", "cost/step")
    for mine, theirs in zip(read_metrics(cut / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl"), strict=True):
        # what the interrupted step had generated is the only thing that may differ
        if "cost/tokens_generated" in mine:
            mine["cost/tokens_generated"] -= mine.pop("cost/tokens_interrupted")
        for name, value in theirs.items():
            if not any(word in name for word in (*timing, "interrupted")):
                assert mine[name] == value, (theirs["step"], name)
    for name in ("step_000000.json", "step_000004.json"):
        assert (cut / "evaluations" / name).read_text() == (whole / "evaluations" / name).read_text()
    assert (cut / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()


def refused(checkpoint: Path, out: Path, *overrides: str) -> str:
    """What a run prints that does not start from the checkpoint."""
    result = subprocess.run(
        command("run.py", *SMALL, *overrides, f"ckpt_path={checkpoint}", f"output_dir={out}"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=dict(os.environ),
    )
    assert result.returncode == 2
    return result.stderr


def test_a_checkpoint_of_another_model_is_refused(smoke: tuple[Path, str], tmp_path: Path) -> None:
    directory, _ = smoke
    printed = refused(directory / "checkpoints" / "last.ckpt", tmp_path, "model.intermediate_size=256")
    assert "from another model" in printed


def test_a_checkpoint_of_an_older_version_is_refused(smoke: tuple[Path, str], tmp_path: Path) -> None:
    directory, _ = smoke
    saved = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)
    del saved["dapo"]["format"]
    torch.save(saved, tmp_path / "old.ckpt")
    assert "has format 1" in refused(tmp_path / "old.ckpt", tmp_path)
