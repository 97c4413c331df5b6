"""The user's reward through the sampler: what is trained on, what is filtered, and what a failure becomes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from callbacks.monitors.health import rollout_metrics
from callbacks.monitors.rewards import reward_metrics
from callbacks.monitors.samples import pick
from callbacks.techniques.dynamic_sampling import DynamicSampling
from dapo_pl.errors import UserError
from dapo_pl.rewards import task_reward
from dapo_pl.rollout.engine import Sampling
from dapo_pl.rollout.sampler import PromptOrder, RolloutSettings, Sampler
from dapo_pl.rollout.task_reward import CORRECTNESS, TOTAL, RewardSettings, TaskReward
from dapo_pl.rollout.types import Group, Prompt, Response, differ
from dapo_pl.seams import Seams


def settings(**options: Any) -> RewardSettings:
    return RewardSettings.from_options(options)


def one(function: str, **options: Any) -> RewardSettings:
    return settings(
        **{"_target_": f"reward_functions.{function}", "minimum": -1.0, "timeout_seconds": 2.0, **options}
    )


@pytest.fixture
def score() -> Iterator[Any]:
    """Makes a `TaskReward` and ends its workers after the test."""
    made: list[TaskReward] = []

    def make(settings: RewardSettings) -> TaskReward:
        made.append(TaskReward(settings))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def group(*texts: str, index: int = 0) -> Group:
    responses = [Response([1] * len(text), text, False, 0, correct=text == "1") for text in texts]
    return Group(index, Prompt(f"p{index}", (index,), 1, "test", "how many?"), responses)


def test_weighted_functions_add_up_and_every_part_is_kept(score: Any) -> None:
    components = {
        "correctness": {"_target_": CORRECTNESS, "weight": 2.0, "minimum": -1.0},
        "short": {"_target_": "reward_functions.short", "weight": 0.5, "minimum": 0, "longest": 3},
        "vowels": {"_target_": "reward_functions.vowels", "weight": 0.0, "minimum": 0.0},
    }
    it = group("1", "e", "eeee")
    score(settings(components=components))(it)
    assert [response.reward_components for response in it.responses] == [
        {"correctness": 1.0, "short": 1.0, "vowels": 0.0},
        {"correctness": -1.0, "short": 1.0, "vowels": 1.0},
        {"correctness": -1.0, "short": 0.0, "vowels": 1.0},
    ]
    assert [response.task_reward for response in it.responses] == [2.5, -1.5, -2.0]
    metrics = reward_metrics([it], list(components))
    assert metrics["reward/short_mean"] == pytest.approx(2 / 3)
    assert metrics["reward/correctness_mean"] == pytest.approx(-1 / 3)
    assert metrics["reward/short_failures"] == metrics["reward/groups_dropped"] == 0


FAULTS = ["raise", "0.5", "exit", "nan", "1", "endless", "recursion"]


def test_worst_gives_the_stated_minimum_and_counts(score: Any, caplog: pytest.LogCaptureFixture) -> None:
    it = group(*FAULTS)
    reward = score(one("faulty", minimum=-0.25))
    with caplog.at_level(logging.WARNING):
        reward(it)
    assert [response.task_reward for response in it.responses] == [-0.25, 0.5, -0.25, -0.25, 1.0, -0.25, -0.25]
    assert [bool(response.reward_failures) for response in it.responses] == [text.isalpha() for text in FAULTS]
    assert not it.dropped
    assert reward_metrics([it], ["faulty"])["reward/faulty_failures"] == reward.failures["faulty"] == 5
    assert len(caplog.records) == 3
    assert "response 0: it raised ValueError: no such answer" in caplog.messages[0]
    assert "only counted" in caplog.messages[2]


def test_less_than_the_stated_minimum_is_a_failure(score: Any) -> None:
    it = group("-0.25", "-3", "-0.25000000001")
    score(one("number", minimum=-0.25))(it)
    assert [response.task_reward for response in it.responses] == [-0.25, -0.25, -0.25000000001]
    assert it.responses[1].reward_failures == {"number": "returned -3, below its stated minimum -0.25"}


def test_stop_ends_the_run_with_the_reason(score: Any) -> None:
    with pytest.raises(UserError, match=r"draw 4 \(prompt p4\), response 1: it returned nan; .*reward.on_failure"):
        score(one("faulty", on_failure="stop"))(group("1", "nan", index=4))


class Saying(ScriptedEngine):
    """States texts by prompt: the first place of `texts` for prompt 0, one text for each response in turn."""

    def __init__(self, texts: list[list[str]]) -> None:
        super().__init__(lambda prompt, seed: (0, 1))
        self.texts = texts

    def submit(self, request: str, prompt: Any, sampling: Sampling, seed: int) -> None:
        super().submit(request, prompt, sampling, seed)
        self._running[request][0].text = self.texts[prompt[0]][int(request.split(":")[1])]


def sampler(texts: list[list[str]], reward: TaskReward, *, filtered: bool, **options: Any) -> Sampler:
    seams = Seams(reward_terms={TOTAL: task_reward})
    if filtered:
        DynamicSampling().apply(seams)
    shape = {
        "steps": 1,
        "groups_per_step": 2,
        "group_size": 3,
        "mini_batch_size": 3,
        "max_prompts_per_step": len(texts),
    }
    return Sampler(
        engine=Saying(texts),
        order=PromptOrder([Prompt(str(number), (number,), 1) for number in range(len(texts))], seed=0),
        seams=seams,
        settings=RolloutSettings(**{**shape, **options}),
        sampling=Sampling(max_tokens=4),
        seed=0,
        task_reward=reward,
    )


def test_continuous_rewards_are_filtered_by_difference_and_not_by_correctness(score: Any) -> None:
    """None of these is right, or all are; 0.1 + 0.2 in floats is 0.30000000000000004."""
    texts = [["0.3", "0.30000000000000004", "0.3"], ["0.3", "0.31", "0.3"], ["2", "2", "2"], ["5", "-0.5", "0"]]
    rollout = sampler(texts, score(one("number")), filtered=True).sample()
    assert {group.prompt.id for group in rollout.accepted} == {"1", "3"}
    for accepted in rollout.accepted:
        assert [response.reward for response in accepted.responses] == pytest.approx(
            list(map(float, texts[int(accepted.prompt.id)]))
        )
        assert accepted.responses[0].reward_components[TOTAL] == accepted.responses[0].reward
    mixed = sum(group.prompt.id in "13" for group in rollout.examined)
    assert rollout_metrics(rollout.examined)["rollout/mixed_share"] == mixed / len(rollout.examined)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("on_shortfall", ["smaller_batch", "keep_unmixed"])
def test_a_dropped_group_is_never_trained_on(score: Any, filtered: bool, on_shortfall: str) -> None:
    texts = [["1", "raise", "3"], ["1", "2", "3"], ["nan", "nan", "nan"]]
    rollout = sampler(
        texts, score(one("faulty", on_failure="drop_group")), filtered=filtered, on_shortfall=on_shortfall
    ).sample()
    assert [group.prompt.id for group in rollout.accepted] == ["1"]
    assert "2 were dropped because a reward function failed" in rollout.shortfall
    metrics = reward_metrics(rollout.examined, ["faulty"])
    assert metrics["reward/groups_dropped"] == 2
    assert metrics["reward/faulty_failures"] == 4
    assert metrics["reward/faulty_mean"] == rollout_metrics(rollout.examined)["rollout/reward_mean"] == 2
    assert all(group.prompt.id == "1" for group, _ in pick(rollout.examined).values())
    assert math.isnan(reward_metrics([g for g in rollout.examined if g.dropped], ["faulty"])["reward/faulty_mean"])


def test_when_every_group_is_dropped_the_run_ends_with_a_sentence(score: Any) -> None:
    texts = [["nan", "1", "2"]] * 3
    for on_shortfall in ("smaller_batch", "keep_unmixed"):
        it = sampler(texts, score(one("faulty", on_failure="drop_group")), filtered=False, on_shortfall=on_shortfall)
        with pytest.raises(UserError, match="3 were dropped"):
            it.sample()


def test_the_plain_correctness_needs_no_worker_and_filters_as_ever(score: Any) -> None:
    assert settings(_target_=CORRECTNESS, minimum=-1.0).plain
    assert RewardSettings().plain
    assert not settings(_target_=CORRECTNESS, weight=2.0).plain
    reward = score(settings(_target_=CORRECTNESS, weight=2.0))
    it = group("1", "2")
    reward(it)
    assert [response.task_reward for response in it.responses] == [2.0, -2.0]
    assert reward.pool.pids == []
    assert group("1", "2").mixed
    assert not group("1", "1").mixed
    assert not group("2", "3").mixed


noise = st.floats(-1e-12, 1e-12)


@given(st.floats(-1e6, 1e6), st.lists(noise, min_size=1, max_size=16))
def test_rewards_that_differ_by_float_noise_are_equal(value: float, errors: list[float]) -> None:
    assert not differ([value * (1 + error) + error for error in errors])


@given(st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=16), st.randoms())
def test_rewards_that_differ_are_told_apart_in_any_order(values: list[float], random: Any) -> None:
    """Against the definition with a thousandfold margin on either side of the tolerance."""
    spread, size = max(values) - min(values), max(1.0, *map(abs, values))
    shuffled = random.sample(values, len(values))
    assert differ(values) == differ(shuffled) == differ([-value for value in values])
    if spread > 1e-3 * size:
        assert differ(values)
    if spread < 1e-9 * size:
        assert not differ(values)


@given(st.lists(st.booleans(), min_size=1, max_size=16))
def test_on_plus_and_minus_one_the_filter_is_equation_11(verdicts: list[bool]) -> None:
    responses = [Response([1], "", False, 0, correct=right, task_reward=1.0 if right else -1.0) for right in verdicts]
    assert Group(0, Prompt("", (), 1), responses).mixed == (0 < sum(verdicts) < len(verdicts))


def test_float_sums() -> None:
    assert not differ([0.1 + 0.2, 0.3])
    assert not differ([sum([0.1] * 10), 1.0])
    assert differ([0.3, 0.3001])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"_target_": "no_such_module.fn"}, "no_such_module.fn cannot be loaded"),
        ({"_target_": "reward_functions.nmber"}, "reward_functions.nmber cannot be loaded"),
        ({"_target_": "not a path"}, "check the dotted path"),
        ({"_target_": None}, "reward names no function"),
        ({"_target_": 3}, "reward names no function"),
        ({"_target_": "reward_functions.not_a_function"}, "is a int, not a function"),
        ({"_target_": "reward_functions.Judge"}, "is a class, not a function"),
        ({"_target_": "reward_functions.short"}, "missing a required argument: 'longest'"),
        ({"_target_": "reward_functions.number", "scale": 2}, "unexpected keyword argument 'scale'"),
        ({"_target_": CORRECTNESS, "scale": 2}, "takes no argument 'scale'"),
        ({"timeout_seconds": 0}, "reward.timeout_seconds is 0"),
        ({"timeout_seconds": -1.5}, "reward.timeout_seconds is -1.5"),
        ({"timeout_seconds": "soon"}, "reward.timeout_seconds is soon"),
        ({"on_failure": "wrost"}, "did you mean 'worst'"),
        ({"on_failure": None}, "known are drop_group, stop, worst"),
        ({"workers": 0}, "reward.workers is 0"),
        ({"weight": -1.0}, "let the function return negative numbers"),
        ({"weight": "big"}, "reward.weight is 'big'"),
        ({"minimum": math.nan}, "reward.minimum is nan"),
        ({"minimum": None}, "states no minimum"),
        ({"components": {"a": {"_target_": CORRECTNESS}}}, "stands beside reward.components"),
    ],
)
def test_what_is_wrong_is_said_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        one("number", **options)


def test_components_are_named_in_messages() -> None:
    with pytest.raises(UserError, match=r"reward\.components\.brief names no function"):
        settings(components={"brief": {"weight": 1.0}})
    with pytest.raises(UserError, match="cannot be called 'task'"):
        settings(components={"task": {"_target_": "reward_functions.number", "minimum": 0}})
    assert settings(components={"a": {"_target_": "reward_functions.number"}}, on_failure="drop_group").components
