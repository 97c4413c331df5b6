"""The direction in which each technique pushes each token, on examples small enough to work out by hand.

The example, unless a test says otherwise: one prompt with two responses, A right with one token, B wrong with
three. Rewards +1 and -1 have mean 0 and sample deviation √2, so the advantages are ±a with a = 1/√2. Where the
ratio is 1, the gradient of the loss with respect to a token's log-prob is -advantage × w / D, with the weight w
and the denominator D of the aggregation: negative means that a step makes the token likelier.

Naive GRPO: w = 1 / length, D = 2 responses. A's token gets -a/2, each of B's a/6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

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
from dapo_pl.data.collate import collate
from dapo_pl.objective import kl_penalty, policy_loss
from dapo_pl.rewards import give_rewards
from dapo_pl.rollout.sampler import Rollout
from dapo_pl.rollout.types import Group, Prompt, Response
from dapo_pl.seams import Seams

a = 1 / math.sqrt(2)


def group(*responses: tuple[int, bool], truncated: Sequence[int] = ()) -> Group:
    """Responses as (length, correct); `truncated` are places."""
    made = [Response([7] * n, "", place in truncated, 0, correct=right) for place, (n, right) in enumerate(responses)]
    return Group(0, Prompt("", (1,), 1), made)


RIGHT_SHORT_WRONG_LONG = ((1, True), (3, False))


def gradient(
    groups: list[Group], technique: Technique | None = None, ratio: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """Of the loss with respect to each token's log-prob, [responses, tokens], after filter, rewards and advantages.

    `ratio`: π_θ / π_old, 1 when None. `start`: log π_start - log π_θ, 0 when None.
    """
    seams = Seams()
    if technique is not None:
        technique.apply(seams)
    for one in groups:
        give_rewards(one.responses, seams.reward_terms)
    accepted = [one for one in groups if seams.group_filter(one)]
    (batch,) = collate(1, Rollout(accepted, groups, {}, 0.0), seams, mini_batch_size=100).mini_batches
    shape = batch.response_mask.shape
    log_probs = torch.full(shape, -2.0, requires_grad=True)
    old = log_probs.detach() - (torch.zeros(shape) if ratio is None else ratio.log())
    loss, _ = policy_loss(
        log_probs,
        old,
        batch.advantages,
        batch.response_mask,
        clip_low=seams.clip_low,
        clip_high=seams.clip_high,
        aggregation=seams.aggregation,
        constant_length=seams.constant_length,
    )
    penalty, _ = kl_penalty(
        log_probs,
        log_probs.detach() + (torch.zeros(shape) if start is None else start),
        batch.response_mask,
        aggregation=seams.aggregation,
        constant_length=seams.constant_length,
    )
    (loss + seams.kl_coef * penalty).backward()
    assert log_probs.grad is not None
    return log_probs.grad


def close(actual: Tensor, expected: list[list[float]]) -> None:
    """Up to the 1e-6 that is added to a deviation."""
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-7)


def test_naive_grpo() -> None:
    close(gradient([group(*RIGHT_SHORT_WRONG_LONG)]), [[-a / 2, 0, 0], [a / 6, a / 6, a / 6]])


def test_token_level_loss_weighs_tokens_alike() -> None:
    # w = 1, D = 4 tokens: the long wrong response is pushed down with three times the force of the short one.
    close(gradient([group(*RIGHT_SHORT_WRONG_LONG)], TokenLevelLoss()), [[-a / 4, 0, 0], [a / 4, a / 4, a / 4]])


def test_sqrt_length_lies_between() -> None:
    # w = 1 and 1/√3, D = 1 + √3: A's token -a / (1 + √3), each of B's a / (√3 + 3). B's whole push over A's is
    # √3, between the sample mean's 1 and the token mean's 3.
    up, down = -a / (1 + math.sqrt(3)), a / (math.sqrt(3) + 3)
    close(gradient([group(*RIGHT_SHORT_WRONG_LONG)], SqrtLength()), [[up, 0, 0], [down, down, down]])


def test_dr_grpo_divides_by_constants_alone() -> None:
    # No deviation: advantages ±1. L = 10, D = 2 responses: every token 1/20, up or down.
    close(gradient([group(*RIGHT_SHORT_WRONG_LONG)], DrGRPO(10)), [[-0.05, 0, 0], [0.05, 0.05, 0.05]])


def test_clip_higher_lets_a_token_go_on_rising() -> None:
    # A's ratio is 1.25. Above 1.2 the symmetric clip gives it no gradient; below 1.28 it gets -1.25 a / 2. B's
    # side of the clip is as it was: ratio 0.75 is clipped at 0.8, 1.25 is not, since for a negative advantage
    # the unclipped term is the smaller.
    ratio = torch.tensor([[1.25, 1, 1], [1, 0.75, 1.25]])
    low = [a / 6, 0, 1.25 * a / 6]
    close(gradient([group(*RIGHT_SHORT_WRONG_LONG)], None, ratio), [[0, 0, 0], low])
    close(gradient([group(*RIGHT_SHORT_WRONG_LONG)], ClipHigher(0.28), ratio), [[-1.25 * a / 2, 0, 0], low])


def test_overlong_filtering_masks_a_truncated_response_and_keeps_its_verdict() -> None:
    # B was cut off: no gradient, and D = 1 response. A's advantage is still a, since B counts in the mean.
    cut = group(*RIGHT_SHORT_WRONG_LONG, truncated=[1])
    close(gradient([cut], OverlongFiltering()), [[-a, 0, 0], [0, 0, 0]])


def test_soft_overlong_punishment_tells_right_answers_apart_by_length() -> None:
    # Both are right: naive GRPO has nothing to learn. A ramp from 2 to 4 tokens takes 1/2 from the one of 3
    # tokens: rewards 1 and 0.5, so the advantages are ±a again; short goes up, long goes down.
    both_right = ((1, True), (3, True))
    close(gradient([group(*both_right)]), [[0, 0, 0], [0, 0, 0]])
    ramp = SoftOverlongPunishment(l_max=4, l_cache=2, max_tokens=4)
    close(gradient([group(*both_right)], ramp), [[-a / 2, 0, 0], [a / 6, a / 6, a / 6]])


def test_adaptive_overlong_does_so_where_the_lengths_seen_say() -> None:
    # Seen: ten responses of 2 tokens, so the ramp starts at 2 and its width is the least, 1: the response of 3
    # tokens loses 1. Before anything was seen nobody loses anything.
    both_right = ((1, True), (3, True))
    technique = AdaptiveOverlong()
    close(gradient([group(*both_right)], technique), [[0, 0, 0], [0, 0, 0]])
    technique.history.append([2] * 10)
    close(gradient([group(*both_right)], technique), [[-a / 2, 0, 0], [a / 6, a / 6, a / 6]])


def test_dynamic_sampling_takes_out_what_has_no_gradient() -> None:
    # Beside the example an all-right group: its advantages are 0, so it pushes nothing, but it makes D = 4 and
    # halves the example's gradient. Without it the example has its own gradient back.
    groups = [group(*RIGHT_SHORT_WRONG_LONG), group((2, True), (2, True))]
    close(gradient(groups), [[-a / 4, 0, 0], [a / 12, a / 12, a / 12], [0, 0, 0], [0, 0, 0]])
    close(gradient(groups, DynamicSampling()), [[-a / 2, 0, 0], [a / 6, a / 6, a / 6]])


def test_importance_weighting_shifts_the_gradient_to_the_most_mixed_group() -> None:
    # Three prompts, four responses of one token each, 2, 1 and 4 of them right. Reward variances: 1, 3/4, 0,
    # mean 7/12, so the weights are 12/7, 9/7 and 0. Naive advantages: ±1/√(4/3) = ±√3/2 in the first; in the
    # second, mean -1/2 and deviation √((2.25 + 3 · 0.25) / 3) = 1, so 3/2 and -1/2. D = 12.
    groups = [group(*((1, place < right) for place in range(4))) for right in (2, 1, 4)]
    h = math.sqrt(3) / 2
    naive = [-h, -h, h, h, -1.5, 0.5, 0.5, 0.5, 0, 0, 0, 0]
    weights = [12 / 7] * 4 + [9 / 7] * 4 + [0] * 4
    close(gradient(groups), [[value / 12] for value in naive])
    close(
        gradient(groups, ImportanceWeighting()),
        [[value / 12 * weight] for value, weight in zip(naive, weights, strict=True)],
    )


def test_kl_penalty_pulls_each_token_back_to_the_start() -> None:
    # d k3 / d log π = 1 - π_start / π. A's token was twice as likely at the start: 1 - 2 = -1, up. B's first
    # was half as likely: 1 - 1/2, down; its others have not moved: 0. With w / D of the sample mean (1/2 for A,
    # 1/6 for B) and kl_coef 0.5 that adds -1/4 to A and 1/24 to B's first token.
    start = torch.tensor([[2, 1, 1], [0.5, 1, 1]]).log()
    moved = gradient([group(*RIGHT_SHORT_WRONG_LONG)], KLPenalty(0.5), start=start)
    close(moved, [[-a / 2 - 1 / 4, 0, 0], [a / 6 + 1 / 24, a / 6, a / 6]])
    # At the start it adds nothing at all.
    still = gradient([group(*RIGHT_SHORT_WRONG_LONG)], KLPenalty(0.5))
    assert torch.equal(still, gradient([group(*RIGHT_SHORT_WRONG_LONG)]))


@pytest.mark.parametrize("right", [0, 3])
def test_groups_that_are_all_alike_weigh_nothing_and_are_never_nan(right: int) -> None:
    groups = [group(*((2, place < right) for place in range(3))) for _ in range(2)]
    assert torch.equal(gradient(groups, ImportanceWeighting()), torch.zeros(6, 2))
