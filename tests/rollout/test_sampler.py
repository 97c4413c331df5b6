"""The refill against a slow reference that handles one group at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from callbacks.techniques.dynamic_sampling import mixed
from dapo_pl.errors import UserError
from dapo_pl.rollout.engine import Sampling, request_seed
from dapo_pl.rollout.sampler import PromptOrder, RolloutInterrupted, RolloutSettings, Sampler
from dapo_pl.rollout.types import Prompt
from dapo_pl.seams import Seams

PROMPTS = [Prompt(str(number), (number,), answer=1) for number in range(13)]


def script(difficulty: int):
    """Long answers are the right ones more often: keeping whichever finish first would bias the batch."""

    def outcome(prompt: int, seed: int) -> tuple[int, int]:
        draw = random.Random(f"{prompt}/{seed}")
        right = draw.random() < (prompt % difficulty) / difficulty
        return (1 if right else 0), (draw.randint(6, 20) if right else draw.randint(1, 8))

    return outcome


def make_sampler(engine: ScriptedEngine, seed: int = 0, max_in_flight: int = 64, **options) -> Sampler:
    seams = Seams()
    seams.change("group_filter", mixed, "test")
    defaults = {"steps": 5, "groups_per_step": 3, "group_size": 4, "mini_batch_size": 4, "max_prompts_per_step": 60}
    return Sampler(
        engine=engine,
        order=PromptOrder(PROMPTS, seed),
        seams=seams,
        settings=RolloutSettings(**{**defaults, **options}),
        sampling=Sampling(max_tokens=64),
        seed=seed,
        max_in_flight=max_in_flight,
    )


def reference(seed: int, outcome, groups: int, steps: int) -> list[list[int]]:
    """Draw numbers accepted per step, by the definition."""
    order = PromptOrder(PROMPTS, seed)
    draws = itertools.count()
    batches = []
    for _ in range(steps):
        batch = []
        while len(batch) < groups:
            draw = next(draws)
            right = [outcome(order[draw].token_ids[0], request_seed(seed, "train", draw, n))[0] for n in range(4)]
            if 0 < sum(right) < 4:
                batch.append(draw)
        batches.append(batch)
    return batches


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), in_flight=st.sampled_from([4, 8, 24, 400]), difficulty=st.integers(2, 6))
def test_accepts_what_a_sampler_of_one_group_at_a_time_accepts(seed: int, in_flight: int, difficulty: int) -> None:
    engine = ScriptedEngine(script(difficulty))
    sampler = make_sampler(engine, seed, in_flight)
    found = []
    for _ in range(3):
        before = engine.tokens_generated
        rollout = sampler.sample()
        found.append([group.index for group in rollout.accepted])
        # Every token the engine made has exactly one fate.
        fates = sum(value for name, value in rollout.fates.items() if name.startswith("tokens_"))
        assert fates == engine.tokens_generated - before
        assert engine.busiest <= max(4, in_flight)
    assert found == reference(seed, engine.script, groups=3, steps=3)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), oversampling=st.sampled_from([0.3, 1.0, 3.0]), margin=st.sampled_from([0.0, 2.0]))
def test_refill_changes_cost_and_not_what_is_accepted(seed: int, oversampling: float, margin: float) -> None:
    rounds = make_sampler(ScriptedEngine(script(4)), seed, refill="rounds", oversampling=oversampling)
    continuous = make_sampler(ScriptedEngine(script(4)), seed, margin=margin)
    expected = reference(seed, script(4), groups=3, steps=3)
    for sampler in (rounds, continuous):
        assert [[group.index for group in sampler.sample().accepted] for _ in range(3)] == expected


def test_a_round_is_finished_whole_before_the_next_one() -> None:
    submitted: list[list[int]] = []

    class Watched(ScriptedEngine):
        def submit(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
            if not self._running:
                submitted.append([])
            submitted[-1].append(int(request.split(":")[0]))
            super().submit(request, prompt, sampling, seed)

    rollout = make_sampler(Watched(script(4)), refill="rounds", oversampling=2.0).sample()
    assert [sorted(set(indices)) for indices in submitted] == [
        list(range(start, start + 6)) for start in range(0, 6 * len(submitted), 6)
    ]
    assert sum(value for name, value in rollout.fates.items() if name == "tokens_cut_off") == 0


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), in_flight=st.sampled_from([4, 24, 400]), limit=st.integers(30, 400))
def test_the_token_budget_is_counted_in_draw_order(seed: int, in_flight: int, limit: int) -> None:
    sampler = make_sampler(ScriptedEngine(script(6)), seed, in_flight, max_tokens_per_step=limit, min_groups=1)
    alone = make_sampler(ScriptedEngine(script(6)), seed, 4, max_tokens_per_step=limit, min_groups=1)
    # A budget that leaves no group at all is an error, for both alike.
    try:
        rollout = alone.sample()
    except UserError:
        rollout = None
    if rollout is None:
        with pytest.raises(UserError, match="0 of 3 groups"):
            sampler.sample()
        return
    again = sampler.sample()
    assert [group.index for group in again.examined] == [group.index for group in rollout.examined]
    assert sum(group.tokens for group in rollout.examined[:-1]) < limit
    if rollout.shortfall:
        assert f"max_tokens_per_step={limit} tokens" in rollout.shortfall
        assert sum(group.tokens for group in rollout.examined) >= limit


def test_what_was_ready_beyond_need_serves_only_the_policy_that_made_it() -> None:
    engine = ScriptedEngine(script(4))
    sampler = make_sampler(engine, margin=3.0)
    sampler.sample()
    carried = dict(sampler.carried)
    assert carried
    before = engine.tokens_generated
    second = sampler.sample()
    assert [group.index for group in second.accepted] == reference(0, script(4), groups=3, steps=2)[1]
    assert any(group is carried.get(group.index) for group in second.examined)
    assert sum(v for k, v in second.fates.items() if k.startswith("tokens_")) == engine.tokens_generated - before
    other = make_sampler(ScriptedEngine(script(4)), margin=3.0)
    other.sample()
    stale = dict(other.carried)
    other.engine.sync(iter(()), 1)
    fresh = other.sample()
    assert not any(group is stale.get(group.index) for group in fresh.examined)
    assert {response.policy_version for group in fresh.examined for response in group.responses} == {1}
    assert [group.index for group in fresh.accepted] == [group.index for group in second.accepted]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_every_token_is_booked_by_what_became_of_its_group(seed: int) -> None:
    rollout = make_sampler(ScriptedEngine(script(5)), seed).sample()
    expected = dict.fromkeys(("used", "filtered_all_correct", "filtered_all_wrong"), 0)
    for group in rollout.examined:
        right = sum(response.correct for response in group.responses)
        fate = "filtered_all_wrong" if right == 0 else "filtered_all_correct" if right == 4 else "used"
        expected[fate] += sum(response.length for response in group.responses)
    for fate, tokens in expected.items():
        assert rollout.fates.get(f"tokens_{fate}", 0) == tokens


def test_prompts_are_drawn_once_per_epoch_in_an_order_of_seed_and_epoch() -> None:
    order = PromptOrder(PROMPTS, seed=3)
    epochs = [[order[epoch * 13 + place].id for place in range(13)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(prompt.id for prompt in PROMPTS)
    assert epochs[0] != epochs[1]
    again = PromptOrder(PROMPTS, seed=3)
    assert [again[place].id for place in range(26, 39)] == epochs[2]
    assert [PromptOrder(PROMPTS, seed=4)[place].id for place in range(13)] != epochs[0]


def test_a_resumed_sampler_goes_on_where_it_was() -> None:
    whole = make_sampler(ScriptedEngine(script(4)))
    batches = [[group.index for group in whole.sample().accepted] for _ in range(4)]
    first = make_sampler(ScriptedEngine(script(4)))
    assert [[group.index for group in first.sample().accepted] for _ in range(2)] == batches[:2]
    second = make_sampler(ScriptedEngine(script(4)))
    second.load_state_dict(first.state_dict())
    assert [[group.index for group in second.sample().accepted] for _ in range(2)] == batches[2:]


def test_naive_grpo_draws_exactly_what_it_needs() -> None:
    sampler = make_sampler(ScriptedEngine(script(4)))
    sampler.seams = Seams()
    rollout = sampler.sample()
    assert [group.index for group in rollout.accepted] == [0, 1, 2]
    assert rollout.fates["tokens_used"] == sum(value for name, value in rollout.fates.items() if "tokens" in name)


@pytest.mark.parametrize(("stated", "words"), [(0, "too hard"), (1, "too easy")])
def test_a_data_set_without_mixed_groups_ends_with_a_sentence(stated: int, words: str) -> None:
    sampler = make_sampler(ScriptedEngine(lambda prompt, seed: (stated, 3)), max_prompts_per_step=20)
    with pytest.raises(UserError, match=words):
        sampler.sample()


def some_mixed(prompt: int, seed: int) -> tuple[int, int]:
    """Prompt 0 alone is mixed (right on even seeds), every other one all wrong."""
    return (int(prompt == 0 and seed % 2 == 0)), 3


def test_shortfall_outcomes() -> None:
    small = make_sampler(ScriptedEngine(some_mixed), max_prompts_per_step=13).sample()
    assert [group.prompt.id for group in small.accepted] == ["0"]
    assert "1 of 3 groups" in small.shortfall
    assert len(small.examined) == 13

    kept = make_sampler(ScriptedEngine(some_mixed), max_prompts_per_step=13, on_shortfall="keep_unmixed").sample()
    assert len(kept.accepted) == 3
    assert sorted(group.index for group in kept.accepted) == [group.index for group in kept.accepted]
    assert kept.fates["responses_used"] == 12

    with pytest.raises(UserError, match="max_prompts_per_step=13"):
        make_sampler(ScriptedEngine(some_mixed), max_prompts_per_step=13, on_shortfall="stop").sample()
    with pytest.raises(UserError, match="1 of 3"):
        make_sampler(ScriptedEngine(some_mixed), max_prompts_per_step=13, min_groups=2).sample()


def test_interrupting_changes_nothing_the_next_step_depends_on() -> None:
    engine = ScriptedEngine(script(4))
    sampler = make_sampler(engine)
    calls = itertools.count()
    sampler.should_stop = lambda: next(calls) == 12
    with pytest.raises(RolloutInterrupted):
        sampler.sample()
    assert sampler.state_dict() == make_sampler(ScriptedEngine(script(4))).state_dict()
    assert engine.step() == []
    expected = make_sampler(ScriptedEngine(script(4))).sample()
    assert [group.index for group in sampler.sample().accepted] == [group.index for group in expected.accepted]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_size": 1}, "group_size"),
        ({"mini_batch_size": 16}, "more than the 12 of a rollout step"),
        ({"mini_batch_size": 6}, "cuts a group"),
        ({"max_prompts_per_step": 2}, "max_prompts_per_step"),
        ({"min_groups": 4}, "min_groups"),
        ({"on_shortfall": "wait"}, "on_shortfall"),
        ({"refill": "round"}, "did you mean 'rounds'|rounds"),
        ({"max_tokens_per_step": 0}, "max_tokens_per_step"),
        ({"margin": -1.0}, "rollout.margin"),
        ({"oversampling": 0.0}, "rollout.oversampling"),
        ({"history_decay": 0.0}, "rollout.history_decay"),
        ({"steps": 0}, "rollout.steps"),
    ],
)
def test_impossible_settings_name_the_key(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_sampler(ScriptedEngine(script(4)), **options)
