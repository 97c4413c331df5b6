"""Every option of every group composes, and every technique option is the row it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from experiments.assembly import load_techniques, prepare_warm_start
from experiments.composing import CONFIG_DIR, compose_run

GROUPS = sorted(
    (path.parent.name, path.stem) for path in CONFIG_DIR.glob("*/*.yaml") if path.parent.name not in ("hydra",)
)


def composed(*overrides: str) -> DictConfig:
    return compose_run(overrides)


@pytest.mark.parametrize(("group", "option"), GROUPS)
def test_every_option_composes_and_resolves(group: str, option: str, tmp_path: Path) -> None:
    extra = {
        ("model", "hf"): ["model.path=x"],
        ("data", "file"): ["data.path=x", "data.evaluation_path=x"],
    }.get((group, option), [])
    config = composed(f"{group}={option}", *extra)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    get_class(config.engine._target_)
    load_techniques(config)


CLIP, SOFT, TOKEN, DYNAMIC, FILTER = (
    "ClipHigher",
    "SoftOverlongPunishment",
    "TokenLevelLoss",
    "DynamicSampling",
    "OverlongFiltering",
)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("naive_grpo", set()),
        ("+overlong_filtering", {FILTER}),
        ("+clip_higher", {FILTER, CLIP}),
        ("+soft_overlong_punishment", {CLIP, SOFT}),
        ("+token_level_loss", {CLIP, SOFT, TOKEN}),
        ("+dynamic_sampling", {CLIP, SOFT, TOKEN, DYNAMIC}),
        ("dapo", {CLIP, SOFT, TOKEN, DYNAMIC}),
        ("clip_higher", {CLIP}),
        ("overlong_filtering", {FILTER}),
        ("soft_overlong_punishment", {SOFT}),
        ("token_level_loss", {TOKEN}),
        ("dynamic_sampling", {DYNAMIC}),
        ("-clip_higher", {SOFT, TOKEN, DYNAMIC}),
        ("-soft_overlong_punishment", {CLIP, TOKEN, DYNAMIC}),
        ("-token_level_loss", {CLIP, SOFT, DYNAMIC}),
        ("-dynamic_sampling", {CLIP, SOFT, TOKEN}),
        ("[clip_higher,token_level_loss]", {CLIP, TOKEN}),
    ],
)
def test_technique_options_are_the_rows_of_table_1(option: str, names: set[str]) -> None:
    assert {technique.name for technique in load_techniques(composed(f"technique={option}"))} == names


def test_tiny_brings_its_own_problems_and_an_explicit_choice_wins() -> None:
    config = composed("model=tiny")
    assert config.data.template == "{question}"
    settings, _ = prepare_warm_start(config)
    assert settings is not None
    assert settings.precision == "fp32"
    assert composed("model=tiny", "data=word_problems").data.tasks.chain_sum.min_terms == 3
    assert composed("model=tiny", "rollout.steps=3").rollout.steps == 3
