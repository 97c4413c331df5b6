"""Each technique changes its seam and nothing else; those that fight over one are refused."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from training import recorded_groups

from callbacks.techniques.adaptive_overlong import AdaptiveOverlong
from callbacks.techniques.base import Technique
from callbacks.techniques.clip_higher import ClipHigher
from callbacks.techniques.dr_grpo import DrGRPO
from callbacks.techniques.dynamic_sampling import DynamicSampling
from callbacks.techniques.importance_weighting import ImportanceWeighting
from callbacks.techniques.kl_penalty import KLPenalty
from callbacks.techniques.overlong_filtering import OverlongFiltering
from callbacks.techniques.soft_overlong_punishment import SoftOverlongPunishment
from callbacks.techniques.sqrt_length import SqrtLength
from callbacks.techniques.token_level_loss import TokenLevelLoss
from dapo_pl.data.collate import RolloutBatch, collate
from dapo_pl.errors import UserError
from dapo_pl.objective import group_advantages, kl_penalty, policy_loss
from dapo_pl.rewards import give_rewards
from dapo_pl.rollout.sampler import Rollout
from dapo_pl.rollout.types import Group, Prompt, Response
from dapo_pl.seams import Seams

ALL = {
    "clip_high": ClipHigher(),
    "aggregation": TokenLevelLoss(),
    "response_filter": OverlongFiltering(),
    "group_filter": DynamicSampling(),
    "reward_terms": SoftOverlongPunishment(l_max=10, l_cache=5, max_tokens=10),
}


def applied(*techniques: Technique) -> Seams:
    seams = Seams()
    for technique in techniques:
        technique.apply(seams)
    return seams


@pytest.mark.parametrize(
    ("technique", "seams"),
    [
        *((technique, {seam}) for seam, technique in ALL.items()),
        (SqrtLength(), {"aggregation"}),
        (DrGRPO(64), {"aggregation", "constant_length", "std"}),
        (KLPenalty(), {"kl_coef"}),
        (ImportanceWeighting(), {"group_weight"}),
        (AdaptiveOverlong(), {"reward_terms"}),
    ],
    ids=lambda value: value.name if isinstance(value, Technique) else "",
)
def test_a_technique_changes_its_seam_alone(technique: Technique, seams: set[str]) -> None:
    naive, changed = Seams(), applied(technique)
    names = {*Seams.NAMES, "reward_terms"}
    assert {name for name in names if getattr(naive, name) != getattr(changed, name)} == seams


def group(index: int, *responses: tuple[int, bool, bool]) -> Group:
    """Responses as (length, correct, truncated)."""
    made = [Response([7] * n, "", cut, 0, correct=right) for n, right, cut in responses]
    return Group(index, Prompt(str(index), (1, 2), 1), made)


RECORDED = [
    group(0, (4, True, False), (10, False, True), (8, False, False), (6, True, False)),
    group(1, (3, True, False), (3, True, False), (5, True, False), (9, True, False)),
]


def batch_of(seams: Seams):
    groups = copy.deepcopy([g for g in RECORDED if seams.group_filter(g)])
    for g in groups:
        give_rewards(g.responses, seams.reward_terms)
    return collate(1, Rollout(groups, groups, {}, 1.0), seams, mini_batch_size=8).mini_batches[0]


def test_one_recorded_rollout_through_each_toggle() -> None:
    naive = batch_of(Seams())
    assert naive.rewards.tolist() == [1, -1, -1, 1, 1, 1, 1, 1]
    assert naive.response_mask.sum(1).tolist() == [4, 10, 8, 6, 3, 3, 5, 9]
    assert naive.advantages[4:].tolist() == [0, 0, 0, 0]

    # The truncated response is masked, but still in its group's mean and deviation, and reported at its length.
    filtered = batch_of(applied(ALL["response_filter"]))
    assert filtered.response_mask.sum(1).tolist() == [4, 0, 8, 6, 3, 3, 5, 9]
    assert torch.equal(filtered.advantages, naive.advantages)
    assert torch.equal(filtered.lengths, naive.lengths)

    # Ramp from 5 to 10 tokens: -1 at 10, -0.6 at 8, -0.2 at 6, -0.8 at 9. Group 1 now differs within itself,
    # but stays all right: Dynamic Sampling goes by correctness.
    shaped = batch_of(applied(ALL["reward_terms"]))
    assert shaped.rewards.tolist() == pytest.approx([1, -2, -1.6, 0.8, 1, 1, 1, 0.2])
    both = batch_of(applied(ALL["reward_terms"], ALL["group_filter"]))
    assert both.rewards.tolist() == pytest.approx([1, -2, -1.6, 0.8])
    assert torch.equal(both.advantages, shaped.advantages[:4])

    # The loss's own seams leave the batch as it is, bit for bit.
    for seam in ("clip_high", "aggregation"):
        same = batch_of(applied(ALL[seam]))
        for name in ("rewards", "advantages", "response_mask"):
            assert torch.equal(getattr(same, name), getattr(naive, name))


def test_conflicts_are_one_sentence() -> None:
    class Other(Technique):
        def apply(self, seams: Seams) -> None:
            seams.change("clip_high", 0.5, self.name)

    with pytest.raises(UserError, match="ClipHigher and Other both change clip_high"):
        applied(ClipHigher(), Other())
    for pair in (OverlongFiltering(), SoftOverlongPunishment(10, 5, 10)), (ALL["reward_terms"], OverlongFiltering()):
        with pytest.raises(UserError, match="keep_overlong_filtering=true"):
            applied(*pair)
    applied(OverlongFiltering(), SoftOverlongPunishment(10, 5, 10, keep_overlong_filtering=True))
    with pytest.raises(UserError, match="can never act"):
        SoftOverlongPunishment(l_max=20480, l_cache=4096, max_tokens=80)
    with pytest.raises(UserError, match="l_cache"):
        SoftOverlongPunishment(l_max=10, l_cache=11, max_tokens=10)
    with pytest.raises(UserError, match="below clip_low"):
        applied(ClipHigher(0.1))
    for pair in (DrGRPO(64), TokenLevelLoss()), (TokenLevelLoss(), DrGRPO(64)), (SqrtLength(), TokenLevelLoss()):
        with pytest.raises(UserError, match=f"{pair[0].name} and {pair[1].name} both change aggregation: remove one"):
            applied(*pair)
    for pair in (AdaptiveOverlong(), ALL["reward_terms"]), (ALL["reward_terms"], AdaptiveOverlong()):
        with pytest.raises(UserError, match=r"both change reward_terms.overlong_penalty: remove one"):
            applied(*pair)
    applied(AdaptiveOverlong(), OverlongFiltering())
    applied(ImportanceWeighting(), DynamicSampling())
    for length in (0, -64):
        with pytest.raises(UserError, match=f"dr_grpo: length is {length}; it must be at least 1"):
            DrGRPO(length)
    for kl_coef in (0, -0.1, math.nan, math.inf):
        with pytest.raises(UserError, match=f"kl_penalty: kl_coef is {kl_coef}; it must be"):
            KLPenalty(kl_coef)
    for percentile in (-1, 100.5, math.nan):
        with pytest.raises(UserError, match=f"adaptive_overlong: percentile is {percentile}; it must lie"):
            AdaptiveOverlong(percentile=percentile)
    with pytest.raises(UserError, match="adaptive_overlong: window is 0; it must be at least 1"):
        AdaptiveOverlong(window=0)
    with pytest.raises(UserError, match="did you mean 'clip_high'"):
        Seams().change("clip_hihg", 0.3, "test")


def test_the_adaptive_ramp_moves_with_the_lengths_seen_and_survives_a_checkpoint() -> None:
    technique = AdaptiveOverlong(percentile=50, window=2)
    term = applied(technique).reward_terms["overlong_penalty"]
    responses = [Response([7] * n, "", False, 0) for n in (3, 6, 8, 20)]
    assert term(responses).tolist() == [0, 0, 0, 0]

    def end_of_step(*lengths: int) -> None:
        examined = [group(0, *((n, True, False) for n in lengths))]
        # Nothing was accepted: the ramp goes by everything that was examined.
        batch: Any = RolloutBatch(1, Rollout([], examined, {}, 0.0), [])
        technique.on_train_batch_end(None, None, None, batch, 0)  # pyright: ignore[reportArgumentType]

    # Median 4, quartiles 3 and 5, width 2.
    end_of_step(2, 3, 4, 5, 6)
    assert term(responses).tolist() == [0, -1, -1, -1]
    # With 8, 9, 10, 11, 12 beside it: sorted 2 3 4 5 6 | 8 9 10 11 12, median 7, quartiles 4.25 and 9.75.
    end_of_step(8, 9, 10, 11, 12)
    assert term(responses).tolist() == pytest.approx([0, 0, -1 / 5.5, -1])
    # The first step is forgotten: median 10, now of ten values 8 8 9 9 10 10 11 11 12 12, quartiles 9 and 11.
    end_of_step(12, 11, 10, 9, 8)
    assert term(responses).tolist() == [0, 0, 0, -1]

    state = technique.state_dict()
    assert state == {"history": [[8, 9, 10, 11, 12], [12, 11, 10, 9, 8]]}
    assert all(type(step) is list for step in state["history"])
    again = AdaptiveOverlong(percentile=50, window=2)
    again.load_state_dict(state)
    lengths = [Response([7] * n, "", False, 0) for n in range(1, 30)]
    assert torch.equal(again.penalty(lengths), technique.penalty(lengths))
    end_of_step(1, 2, 3)
    assert state == again.state_dict(), "the state is a copy, and the window stays 2"
    shorter = AdaptiveOverlong(window=1)
    shorter.load_state_dict(state)
    assert shorter.state_dict() == {"history": [[12, 11, 10, 9, 8]]}


def seen(technique: AdaptiveOverlong) -> AdaptiveOverlong:
    """With a ramp from 8 tokens on, of width 4: of 4, 4, 8, 8 the 90th percentile is 8, the quartiles 4 and 8."""
    technique.history.append([4, 8, 8, 4])
    return technique


# What differs from naive GRPO, of the steps of a rollout in their order. Everything before is the same, bit for bit.
TOGGLES: dict[str, tuple[Technique, set[str]]] = {
    "overlong_filtering": (OverlongFiltering(), {"mask", "policy_loss", "loss"}),
    "clip_higher": (ClipHigher(0.28), {"policy_loss", "loss"}),
    "soft_overlong_punishment": (
        SoftOverlongPunishment(12, 6, 12),
        {"rewards", "advantages", "policy_loss", "loss"},
    ),
    "token_level_loss": (TokenLevelLoss(), {"policy_loss", "loss"}),
    # Of the groups that are left, masks and advantages are what they were.
    "dynamic_sampling": (DynamicSampling(), {"accepted", "policy_loss", "loss"}),
    "sqrt_length": (SqrtLength(), {"policy_loss", "loss"}),
    "dr_grpo": (DrGRPO(12), {"advantages", "policy_loss", "loss"}),
    "kl_penalty": (KLPenalty(0.3), {"loss"}),
    "importance_weighting": (ImportanceWeighting(), {"advantages", "policy_loss", "loss"}),
    "adaptive_overlong": (seen(AdaptiveOverlong()), {"rewards", "advantages", "policy_loss", "loss"}),
}


def rollout() -> list[Group]:
    """Recorded groups with 2, 4, 1 and 2 of 4 right; the last of each is truncated."""
    groups = recorded_groups()
    for response in groups[1].responses:
        response.correct = True
    groups[2].responses[2].correct = False
    return groups


def tables() -> dict[tuple[int, int], torch.Tensor]:
    """(group, response) -> log-probs under the policy, the old one and the start, [3, 12]; ratios up to e^±0.9."""
    generator = torch.Generator().manual_seed(5)
    new = -3 * torch.rand(4, 4, 12, generator=generator, dtype=torch.float64)
    apart = [0.3 * torch.randn(4, 4, 12, generator=generator, dtype=torch.float64) for _ in range(2)]
    stacked = torch.stack([new, new + apart[0], new + apart[1]], dim=2)
    return {(g, r): stacked[g, r] for g in range(4) for r in range(4)}


def measured(seams: Seams) -> dict[str, Any]:
    """One recorded rollout through the platform, step by step."""
    groups = rollout()
    for one in groups:
        give_rewards(one.responses, seams.reward_terms)
    accepted = [one for one in groups if seams.group_filter(one)]
    (batch,) = collate(1, Rollout(accepted, groups, {}, 0.0), seams, mini_batch_size=16).mini_batches
    keys = [(one.index, place) for one in accepted for place in range(4)]
    width = batch.response_mask.shape[1]
    log_probs, old, start = torch.stack([tables()[key] for key in keys], dim=1)[:, :, :width]
    weighting: dict[str, Any] = {"aggregation": seams.aggregation, "constant_length": seams.constant_length}
    loss, _ = policy_loss(
        log_probs,
        old,
        batch.advantages,
        batch.response_mask,
        clip_low=seams.clip_low,
        clip_high=seams.clip_high,
        **weighting,
    )
    penalty, _ = kl_penalty(log_probs, start, batch.response_mask, **weighting)
    return {
        "generated": [(r.token_ids, r.correct, r.truncated) for one in groups for r in one.responses],
        "rewards": [r.reward for one in groups for r in one.responses],
        "accepted": [one.index for one in accepted],
        "mask": dict(zip(keys, batch.response_mask.sum(1).tolist(), strict=True)),
        "advantages": dict(zip(keys, batch.advantages.tolist(), strict=True)),
        "policy_loss": loss.item(),
        "loss": (loss + seams.kl_coef * penalty).item(),
    }


def by_definition(name: str) -> float:
    """The loss of naive GRPO with the technique `name`, token by token from its description."""
    rows: list[tuple[float, int, torch.Tensor]] = []
    variances: list[float] = []
    for one in rollout():
        right = sum(response.correct for response in one.responses)
        if name == "dynamic_sampling" and not 0 < right < 4:
            continue
        rewards = []
        for response in one.responses:
            reward, n = (1.0 if response.correct else -1.0), len(response.token_ids)
            if name == "soft_overlong_punishment":
                reward -= max(0, n - 6) / 6
            if name == "adaptive_overlong":
                reward -= min(1, max(0, n - 8) / 4)
            rewards.append(reward)
        mean = sum(rewards) / 4
        spread = 1.0 if name == "dr_grpo" else statistics.stdev(rewards) + 1e-6
        variances.append(sum((reward - mean) ** 2 for reward in rewards) / 4)
        for place, (response, reward) in enumerate(zip(one.responses, rewards, strict=True)):
            n = 0 if name == "overlong_filtering" and response.truncated else len(response.token_ids)
            rows.append(((reward - mean) / spread, n, tables()[one.index, place]))
    if name == "importance_weighting":
        mean = sum(variances) / len(variances)
        rows = [(advantage * variances[i // 4] / mean, n, table) for i, (advantage, n, table) in enumerate(rows)]
    counts = [n for _, n, _ in rows if n]
    total = 0.0
    for advantage, n, (log_probs, old, start) in rows:
        for t in range(n):
            ratio = math.exp(log_probs[t] - old[t])
            top = 1.28 if name == "clip_higher" else 1.2
            term = -min(ratio * advantage, max(0.8, min(top, ratio)) * advantage)
            if name == "kl_penalty":
                away = math.exp(start[t] - log_probs[t])
                term += 0.3 * (away - math.log(away) - 1)
            total += term * {"token_level_loss": 1, "sqrt_length": n**-0.5, "dr_grpo": 1 / 12}.get(name, 1 / n)
    if name == "token_level_loss":
        return total / sum(counts)
    if name == "sqrt_length":
        return total / sum(math.sqrt(n) for n in counts)
    return total / len(counts)


@pytest.mark.parametrize("name", TOGGLES)
def test_a_toggle_changes_what_it_says_and_nothing_else(name: str) -> None:
    technique, changed = TOGGLES[name]
    naive, toggled = measured(Seams()), measured(applied(technique))
    assert naive["loss"] == pytest.approx(by_definition("naive_grpo"), rel=1e-6)
    assert toggled["loss"] == pytest.approx(by_definition(name), rel=1e-6)

    def differs(step: str) -> bool:
        before, after = naive[step], toggled[step]
        if isinstance(after, dict):
            return any(before[key] != value for key, value in after.items())
        return before != after

    assert {step for step in naive if differs(step)} == changed


def test_weights_have_mean_one_over_the_whole_step_and_not_each_mini_batch() -> None:
    # Variances 1, 0, 3/4, 1, mean 11/16. Mini-batches of two groups: their own means would be 1/2 and 7/8.
    groups = rollout()
    for one in groups:
        for response in one.responses:
            response.reward = 1.0 if response.correct else -1.0
    plain = collate(1, Rollout(groups, groups, {}, 0.0), Seams(), mini_batch_size=8).mini_batches
    weighted = collate(1, Rollout(groups, groups, {}, 0.0), applied(ImportanceWeighting()), mini_batch_size=8)
    factors = torch.tensor([[16 / 11, 0], [12 / 11, 16 / 11]]).repeat_interleave(4, dim=1)
    for before, after, factor in zip(plain, weighted.mini_batches, factors, strict=True):
        torch.testing.assert_close(after.advantages, before.advantages * factor)
        assert torch.equal(after.rewards, before.rewards)


def test_naive_grpo_weighs_nothing_and_keeps_every_bit() -> None:
    groups = recorded_groups(count=7, size=6)
    for number, response in enumerate(response for one in groups for response in one.responses):
        response.reward = math.sin(number)
    batches = collate(1, Rollout(groups, groups, {}, 0.0), Seams(), mini_batch_size=12).mini_batches
    assert [len(batch.groups) for batch in batches] == [2, 2, 2, 1]
    for batch in batches:
        ids = torch.arange(len(batch.groups)).repeat_interleave(6)
        assert torch.equal(batch.advantages, group_advantages(batch.rewards, ids))
