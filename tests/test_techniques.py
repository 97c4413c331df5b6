"""Each technique changes its seam and nothing else; those that fight over one are refused."""

from __future__ import annotations

import copy

import pytest
import torch

from callbacks.techniques.base import Technique
from callbacks.techniques.clip_higher import ClipHigher
from callbacks.techniques.dynamic_sampling import DynamicSampling
from callbacks.techniques.overlong_filtering import OverlongFiltering
from callbacks.techniques.soft_overlong_punishment import SoftOverlongPunishment
from callbacks.techniques.token_level_loss import TokenLevelLoss
from dapo_pl.data.collate import collate
from dapo_pl.errors import UserError
from dapo_pl.rewards import total_rewards
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


@pytest.mark.parametrize("seam", ALL)
def test_a_technique_changes_its_seam_alone(seam: str) -> None:
    naive, changed = Seams(), applied(ALL[seam])
    for name in (*Seams.NAMES, "reward_terms"):
        assert (getattr(naive, name) != getattr(changed, name)) == (name == seam)


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
        for response, reward in zip(
            g.responses, total_rewards(g.responses, seams.reward_terms).tolist(), strict=True
        ):
            response.reward = reward
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
    with pytest.raises(UserError, match="did you mean 'clip_high'"):
        Seams().change("clip_hihg", 0.3, "test")
