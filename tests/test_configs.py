"""Every option of every group composes, and every technique option is the row it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from callbacks.techniques.base import Technique
from callbacks.techniques.dr_grpo import DrGRPO
from dapo_pl.errors import UserError
from experiments.assembly import load_reward, load_techniques, make_seams, prepare_warm_start
from experiments.composing import CONFIG_DIR, compose_run

GROUPS = sorted(
    (path.parent.name, path.stem) for path in CONFIG_DIR.glob("*/*.yaml") if path.parent.name not in ("hydra",)
)


def techniques_of(config: DictConfig) -> list[Technique]:
    return load_techniques(config, load_reward(config))[0]


def composed(*overrides: str) -> DictConfig:
    return compose_run(overrides)


@pytest.mark.parametrize(("group", "option"), GROUPS)
def test_every_option_composes_and_resolves(group: str, option: str, tmp_path: Path) -> None:
    extra = {
        ("model", "hf"): ["model.path=x"],
        ("data", "file"): ["data.path=x", "data.evaluation_path=x"],
        ("engine", "replay"): ["engine.path=x"],
    }.get((group, option), [])
    config = composed(f"{group}={option}", *extra)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    get_class(config.engine._target_)
    techniques_of(config)


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
        ("sqrt_length", {"SqrtLength"}),
        ("dr_grpo", {"DrGRPO"}),
        ("kl_penalty", {"KLPenalty"}),
        ("importance_weighting", {"ImportanceWeighting"}),
        ("adaptive_overlong", {"AdaptiveOverlong"}),
        ("[dapo,kl_penalty]", {CLIP, SOFT, TOKEN, DYNAMIC, "KLPenalty"}),
        ("[dapo,importance_weighting]", {CLIP, SOFT, TOKEN, DYNAMIC, "ImportanceWeighting"}),
        ("[overlong_filtering,adaptive_overlong,dr_grpo]", {FILTER, "AdaptiveOverlong", "DrGRPO"}),
    ],
)
def test_technique_options_are_the_rows_of_table_1(option: str, names: set[str]) -> None:
    assert {technique.name for technique in techniques_of(composed(f"technique={option}"))} == names


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["technique=[dr_grpo,token_level_loss]"], "DrGRPO and TokenLevelLoss both change aggregation"),
        (["technique=[dapo,sqrt_length]"], "TokenLevelLoss and SqrtLength both change aggregation"),
        (
            ["technique=[dapo,adaptive_overlong]"],
            "SoftOverlongPunishment and AdaptiveOverlong both change reward_terms.overlong_penalty",
        ),
        (["technique=kl_penalty", "technique.kl_penalty.kl_coef=-1"], "kl_coef is -1"),
        (["technique=dr_grpo", "technique.dr_grpo.length=0"], "length is 0"),
        (["technique=adaptive_overlong", "technique.adaptive_overlong.percentile=101"], "percentile is 101"),
        (["technique=adaptive_overlong", "technique.adaptive_overlong.window=0"], "window is 0"),
    ],
)
def test_techniques_that_cannot_run_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        techniques_of(composed(*overrides))
    assert sentence in str(refused.value)


def test_dr_grpo_divides_by_the_generation_limit() -> None:
    (technique,) = techniques_of(composed("technique=dr_grpo", "sampling.max_tokens=123"))
    assert isinstance(technique, DrGRPO)
    assert technique.length == 123


def test_rewards_are_chosen_by_dotted_path_or_by_name() -> None:
    plain = load_reward(composed())
    assert plain.plain
    assert make_seams(plain).reward_terms.keys() == {"correctness"}
    one = load_reward(composed("reward._target_=reward_functions.vowels", "+reward.scale=2"))
    assert [(part.name, part.arguments) for part in one.components] == [("vowels", {"scale": 2})]
    assert make_seams(one).reward_terms.keys() == {"task"}
    brief = "{_target_: reward_functions.short, weight: 0.2, minimum: 0, longest: 50}"
    several = load_reward(composed("reward=several", f"+reward.components.brief={brief}"))
    assert [(part.name, part.weight) for part in several.components] == [("correctness", 1.0), ("brief", 0.2)]
    with pytest.raises(UserError, match="overlong_penalty has the name of a technique's reward term"):
        techniques_of(composed("reward=several", f"+reward.components.overlong_penalty={brief}"))


def test_tiny_brings_its_own_problems_and_an_explicit_choice_wins() -> None:
    config = composed("model=tiny")
    assert config.data.template == "{question}"
    settings, _ = prepare_warm_start(config)
    assert settings is not None
    assert settings.precision == "fp32"
    assert composed("model=tiny", "data=word_problems").data.tasks.chain_sum.min_terms == 3
    assert composed("model=tiny", "rollout.steps=3").rollout.steps == 3
