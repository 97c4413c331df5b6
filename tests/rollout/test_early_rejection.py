"""Early rejection and the prompt history, against scipy, enumeration and what the script really holds."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import betabinom
from scripted_engine import ScriptedEngine
from test_sampler import make_sampler

from dapo_pl.errors import UserError
from dapo_pl.rollout.early_rejection import EarlyRejectionSettings, threshold
from dapo_pl.rollout.engine import request_seed
from dapo_pl.rollout.history import STRENGTHS, PromptHistory, fit_prior, probability_mixed
from dapo_pl.rollout.types import Group, Prompt, Response

positive = st.floats(0.05, 20)


def group(index: int, rights: list[bool], prompt: str = "p", rejected: bool = False, source: str = "s") -> Group:
    responses = [Response([1], "", False, 0, correct=right) for right in rights]
    return Group(index, Prompt(prompt, (1,), 1, source), responses, rejected=rejected)


@settings(deadline=None)
@given(a=positive, b=positive, size=st.integers(2, 24), data=st.data())
def test_the_chance_of_a_mixed_group_is_the_beta_binomial_one(
    a: float, b: float, size: int, data: st.DataObject
) -> None:
    answered = data.draw(st.integers(0, size))
    correct = data.draw(st.integers(0, answered))
    rest = size - answered
    expected = sum(
        betabinom.pmf(more, rest, a + correct, b + answered - correct)
        for more in range(rest + 1)
        if 0 < correct + more < size
    )
    assert probability_mixed((a, b), correct, answered, size) == pytest.approx(expected, abs=1e-9)


def test_the_prior_is_the_likeliest_of_its_mean() -> None:
    draw = random.Random(0)
    outcomes = []
    for _ in range(400):
        accuracy = draw.betavariate(0.5 * 0.3, 0.5 * 0.7)
        size = draw.choice([4, 8])
        outcomes.append((sum(draw.random() < accuracy for _ in range(size)), size))
    mean = (sum(right for right, _ in outcomes) + 0.5) / (sum(size for _, size in outcomes) + 1)

    def unlikelihood(log_strength: float) -> float:
        strength = 2**log_strength
        return -float(
            sum(
                number * betabinom.logpmf(right, size, strength * mean, strength * (1 - mean))
                for (right, size), number in Counter(outcomes).items()
            )
        )

    best = 2 ** float(minimize_scalar(unlikelihood, bounds=(-3, 5), method="bounded").x)  # pyright: ignore
    a, b = fit_prior(outcomes)
    assert a / (a + b) == pytest.approx(mean)
    assert a + b == min(STRENGTHS, key=lambda strength: abs(strength - best))


@given(
    predictions=st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.1, 0.1, 0.5, 1.0]), min_size=1),
    allowed=st.floats(-0.5, 3),
)
def test_below_the_threshold_lies_what_is_allowed_and_no_more(predictions: list[float], allowed: float) -> None:
    found = threshold(predictions, allowed)
    below = sum(value for value in predictions if value < found)
    assert below <= max(0.0, allowed) + 1e-9
    if found < 1:
        assert below + sum(value for value in predictions if value == found) > allowed


def test_history_counts_decays_and_survives_json() -> None:
    history = PromptHistory(decay=0.5)
    history.add([group(0, [True, False, False, False]), group(1, [True] * 4, "q", source="t")], {0}, [0, 0])
    history.add([group(2, [True, True]), group(3, [False, False], "q", rejected=True, source="t")], set(), [1, 1])
    p, q = history.prompts["p"], history.prompts["q"]
    assert (p.drawn, p.accepted, p.rejected, p.correct, p.answered) == (2, 1, 0, 2.5, 4.0)
    assert (q.drawn, q.accepted, q.rejected, q.correct, q.answered) == (2, 0, 1, 2.0, 4.0)
    assert history.outcomes[0, "s"]["mixed"] == history.outcomes[0, "s"]["accepted"] == 1
    assert history.outcomes[0, "t"]["all_correct"] == 1
    assert history.outcomes[1, "t"]["rejected"] == 1
    a, b = history.prior
    assert history.posterior("p") == (a + 2.5, b + 1.5)
    assert history.posterior("unknown") == (a, b)
    again = PromptHistory(decay=0.5)
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert again.state_dict() == history.state_dict()
    assert again.posterior("q") == history.posterior("q")


HARD = 10
"""Of 13 prompts; the others are right half of the time."""


def bimodal(prompt: int, seed: int) -> tuple[int, int]:
    draw = random.Random(f"{prompt}/{seed}")
    return int(prompt >= HARD and draw.random() < 0.5), draw.randint(3, 9)


def early_sampler(engine: ScriptedEngine, seed: int = 0, in_flight: int = 64, **options: float):
    early = EarlyRejectionSettings(enabled=True, first=2, **{"keep": 0.9, "audit_share": 0.2, **options})
    return make_sampler(
        engine, seed, in_flight, group_size=8, mini_batch_size=8, max_prompts_per_step=200, early_rejection=early
    )


def test_rejects_what_is_unmixed_and_counts_rightly_what_it_did() -> None:
    engine = ScriptedEngine(bimodal)
    sampler = early_sampler(engine)
    rejected, lost, mixed, early_tokens = 0, 0, 0, 0
    for _ in range(25):
        before = engine.tokens_generated
        rollout = sampler.sample()
        assert len(rollout.accepted) == 3
        assert [each.index for each in rollout.examined] == list(range(rollout.examined[0].index, sampler.cursor))
        assert sum(v for k, v in rollout.fates.items() if k.startswith("tokens_")) == engine.tokens_generated - before
        for each in rollout.examined:
            seeds = (request_seed(0, "train", each.index, number) for number in range(8))
            truth = 0 < sum(bimodal(each.prompt.token_ids[0], seed)[0] for seed in seeds) < 8
            mixed += truth
            assert len(each.responses) == (2 if each.rejected else 8)
            assert each.mixed == (truth and not each.rejected)
            if each.rejected:
                rejected += 1
                lost += truth
                early_tokens += each.tokens
        early_tokens -= int(rollout.fates.get("tokens_early_rejected", 0))
    assert early_tokens == 0
    metrics = sampler.early.metrics()
    assert metrics["early_rejection/groups_rejected"] == rejected > 50
    assert lost <= 0.15 * mixed  # keep = 0.9, and chance
    assert metrics["early_rejection/precision"] > 0.9
    counts = sampler.early.counts
    audited = sum(counts[kind] for kind in ("hits", "false_alarms", "mixed_kept", "unmixed_kept"))
    assert 0.1 < audited / sampler.cursor < 0.3
    # What the spared responses would have taken: 6 for each rejected group, 6 tokens each on average.
    assert metrics["early_rejection/tokens_saved"] == pytest.approx(rejected * 6 * 6, rel=0.15)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100), in_flight=st.sampled_from([8, 32, 400]))
def test_decisions_do_not_depend_on_what_is_in_flight(seed: int, in_flight: int) -> None:
    one = early_sampler(ScriptedEngine(bimodal), seed, 8)
    other = early_sampler(ScriptedEngine(bimodal), seed, in_flight)
    for _ in range(10):
        first, second = one.sample(), other.sample()
        assert [(g.index, g.rejected) for g in first.examined] == [(g.index, g.rejected) for g in second.examined]
    assert one.state_dict() == other.state_dict()


def test_a_resumed_sampler_decides_as_the_one_that_went_on() -> None:
    whole = early_sampler(ScriptedEngine(bimodal))
    for _ in range(9):
        whole.sample()
    resumed = early_sampler(ScriptedEngine(bimodal))
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(6):
        first, second = whole.sample(), resumed.sample()
        assert [(g.index, g.rejected) for g in first.examined] == [(g.index, g.rejected) for g in second.examined]
    assert any(each.rejected for each in first.examined)
    assert whole.state_dict() == resumed.state_dict()


def test_off_means_off() -> None:
    sampler = make_sampler(ScriptedEngine(bimodal), group_size=8, mini_batch_size=8, max_prompts_per_step=200)
    for _ in range(12):
        assert not any(each.rejected for each in sampler.sample().examined)
    assert sampler.early.metrics() == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"early_rejection": EarlyRejectionSettings(enabled=True, first=4)}, "nothing to save"),
        ({"early_rejection": EarlyRejectionSettings(enabled=True, first=2), "refill": "rounds"}, "rounds"),
        (
            {"early_rejection": EarlyRejectionSettings(enabled=True, first=2), "on_shortfall": "keep_unmixed"},
            "keep_unmixed",
        ),
    ],
)
def test_impossible_combinations(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_sampler(ScriptedEngine(bimodal), **options)


@pytest.mark.parametrize("options", [{"first": 0}, {"keep": 1.5}, {"audit_share": 0.0}])
def test_impossible_values_name_the_key(options: dict) -> None:
    with pytest.raises(UserError, match=f"rollout.early_rejection.{next(iter(options))}"):
        EarlyRejectionSettings(enabled=True, **options)
