"""Bad input as a user gives it: one sentence, exit status 2, before any model loads, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dapo_pl.errors import UserError

ROOT = Path(__file__).parents[1]
TINY = ["model=tiny", "engine=transformers", "logger=none", "warm_start=none"]


def run(*arguments: str, script: str = "run.py", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def refused(tmp_path: Path, *arguments: str, **environment: str) -> str:
    result = run(*arguments, f"output_dir={tmp_path / 'out'}", **environment)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "loading the model" not in result.stdout
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout.group_sise=4"], "did you mean 'rollout.group_size'"),
        (["rolout.steps=4"], "did you mean 'rollout'"),
        (["optimizer.lr.x=4"], "unknown config key"),
        (["technique=clip_hihger"], "did you mean 'clip_higher'"),
        (["technique=+clip_hiher,dapo"], "did you mean '+clip_higher'"),
        (["model=tinny"], "did you mean 'tiny'"),
        (["technique=clip_higher", "technique.clip_higher.clip_hgih=0.3"], "did you mean"),
    ],
)
def test_unknown_keys_and_options_suggest_the_nearest(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in refused(tmp_path, *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout.group_size=1"], "rollout.group_size is 1"),
        (["rollout.mini_batch_size=4096"], "more than the 256 of a rollout step"),
        (["sampling.top_p=0.9"], "sampling.top_p"),
        (["engine.max_model_len=70"], "prompt 0 of"),
        (["engine.max_model_len=100000"], "512 positions"),
        (["technique=[soft_overlong_punishment,overlong_filtering]"], "replaces overlong_filtering"),
        (["ckpt_path=/no/such.ckpt"], "there is no checkpoint"),
        (["ckpt_path=last"], "leave ckpt_path out"),
        (["logger.name=wandb"], "known are aim, csv, none"),
        (["warm_start=tiny", "warm_start.precision=fp8"], "warm_start.precision"),
        (["reward._target_=no_such_module.fn"], "no_such_module.fn cannot be loaded"),
        (["reward._target_=reward_functions.not_a_function"], "not a function"),
        (["reward.timeout_seconds=-1"], "reward.timeout_seconds is -1"),
        (["reward.on_failure=ignore"], "known are drop_group, stop, worst"),
        (["engine=replay", "engine.path=/no/rollouts"], "engine.path=/no/rollouts: there is no such folder"),
    ],
)
def test_impossible_settings(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in planned(tmp_path, *TINY, *arguments)


def planned(tmp_path: Path, *overrides: str) -> str:
    """The sentence with which checking refuses; no weights are loaded on the way."""
    from experiments.assembly import plan
    from experiments.composing import compose_run

    config = compose_run(overrides)
    with pytest.raises(UserError) as refusal:
        plan(config, tmp_path)
    return str(refusal.value)


def problem_line(**changes: object) -> str:
    row = {
        "prompt": [{"role": "user", "content": "3 + 4 ="}],
        "reward_model": {"ground_truth": "7"},
        "data_source": "test",
        "ability": "math",
        "extra_info": {"raw_problem": "3 + 4 ="},
    }
    return json.dumps({name: value for name, value in {**row, **changes}.items() if value is not None})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "problems.jsonl"),
        ("", "empty"),
        ("this is prose\nand more\n", "JSON"),
        (problem_line(prompt=None) + "\n", "prompt"),
        (problem_line() + "\n" + problem_line(reward_model={"ground_truth": "7.5"}) + "\n", "7.5"),
        (problem_line(prompt=[{"role": "user", "content": "3 " * 400}]) + "\n", "prompt 0"),
    ],
    ids=["missing", "empty", "prose", "no column", "no integer", "too long"],
)
def test_data_files_that_cannot_be_used_are_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "problems.jsonl"
    if content is not None:
        path.write_text(content)
    message = planned(tmp_path, *TINY, "data=file", f"data.path={path}", f"data.evaluation_path={path}")
    assert words in message
    assert "problems" in message


def test_model_directory_without_tokenizer(tmp_path: Path, tiny_model: str) -> None:
    import shutil

    broken = tmp_path / "model"
    shutil.copytree(tiny_model, broken)
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer_config.json").unlink()
    message = planned(
        tmp_path, "model=hf", f"model.path={broken}", "data=chain_sum", "engine=transformers", "warm_start=none"
    )
    assert "tokenizer" in message


def test_a_refusal_as_a_user_sees_it(tmp_path: Path) -> None:
    message = refused(
        tmp_path, *TINY, "data=file", "data.path=/no/problems.jsonl", "data.evaluation_path=/no/x.jsonl"
    )
    assert "/no/problems.jsonl" in message


def test_vllm_missing_names_the_extra(tmp_path: Path) -> None:
    """A sitecustomize on the path hides the package, as if it were not installed."""
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'vllm' else real(name, package)\n"
    )
    message = refused(tmp_path, "model=tiny", "logger=none", PYTHONPATH=str(hide))
    assert "extra 'cpu' or 'gpu'" in message


def test_unwritable_output_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(*TINY, f"output_dir={tmp_path / 'file' / 'below'}")
    assert result.returncode == 2
    assert "set output_dir" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_checkpoint_that_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    """A real process under a file size limit, which fails as a full disk does; the one before stays whole."""
    code = """
import resource, signal, sys, torch
from pathlib import Path
from callbacks.checkpoint import AtomicCheckpointIO
from dapo_pl.errors import UserError
path = Path(sys.argv[1])
AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(10)}, path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(1_000_000)}, path)
except UserError as error:
    print(error)
"""
    path = tmp_path / "checkpoints" / "last.ckpt"
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    assert str(path) in result.stdout
    assert "Free space" in result.stdout
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
    assert torch.load(path, weights_only=True)["w"].shape == (10,)


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    from experiments.records import claim

    with claim(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        claim(tmp_path)
    claim(tmp_path).close()
    with (tmp_path / ".lock").open() as lock:  # nobody holds it any more
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_help_and_cfg_say_what_runs() -> None:
    shown = run("technique=+clip_higher", "--cfg", "job")
    assert shown.returncode == 0
    assert "clip_high: 0.28" in shown.stdout
    assert "DynamicSampling" not in shown.stdout
    helped = run("--help")
    assert helped.returncode == 0
    assert "Clip-Higher" in helped.stdout


def test_run_directories_are_named_by_the_command_and_can_be_typed_back(tmp_path: Path) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from experiments.composing import run_directory

    name = "model=tiny,technique=[clip_higher,token_level_loss],model.path=/a b/c,seed=2"
    first = Path(run_directory(str(tmp_path), "run", name, None))
    parsed = OverridesParser.create().parse_override(f"ckpt_path={first}")
    assert parsed.value() == str(first)
    assert not parsed.is_sweep_override()
    assert run_directory(str(tmp_path), "run", name + "0" * 300, None) != str(first)

    # `last` is the newest directory of the same command with a checkpoint in it.
    for time, kept in (("2026-01-01_00-00-00", True), ("2026-01-02_00-00-00", True), ("2026-01-03_00-00-00", False)):
        directory = first.parent / time / "checkpoints"
        directory.mkdir(parents=True)
        if kept:
            (directory / "last.ckpt").touch()
    assert Path(run_directory(str(tmp_path), "run", name, "last")).name == "2026-01-02_00-00-00"
    assert Path(run_directory(str(tmp_path), "run", "seed=3", "last")).parent != first.parent
