"""Rewards: correctness (paper Eq. 7), the overlong penalty (Eq. 13) and its adaptive form, and how they add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from dapo_pl.rollout.types import Response

RewardTerm = Callable[[Sequence["Response"]], Float[Tensor, " responses"]]
"""Graded responses -> one number each, [responses], in reward units."""


def correctness(responses: Sequence[Response]) -> Float[Tensor, " responses"]:
    """Eq. 7: +1 for a response whose final answer is right, -1 otherwise."""
    return torch.tensor([1.0 if response.correct else -1.0 for response in responses])


def overlong_penalty(
    lengths: Int[Tensor, " responses"] | Float[Tensor, " responses"], *, l_max: int, l_cache: int
) -> Float[Tensor, " responses"]:
    """Soft Overlong Punishment, Eq. 13.

    0 up to `l_max - l_cache` tokens, then falling linearly to -1 at `l_max`, and -1 beyond.

    Args:
        lengths: [responses], generated tokens, end token included.
        l_max: tokens at which the penalty reaches -1.
        l_cache: width of the ramp in tokens; 0 makes it a step.

    Returns:
        [responses], in [-1, 0].
    """
    if not 0 <= l_cache <= l_max:
        raise ValueError(f"l_cache is {l_cache} and l_max {l_max}; the ramp needs 0 <= l_cache <= l_max")
    lengths = torch.as_tensor(lengths)
    overrun = lengths.to(torch.get_default_dtype()) - (l_max - l_cache)
    if l_cache == 0:
        return -(overrun > 0).to(torch.get_default_dtype())
    return -(overrun / l_cache).clamp(0, 1) + 0.0  # + 0.0 turns -0 into 0


def adaptive_overlong_penalty(
    lengths: Int[Tensor, " responses"] | Float[Tensor, " responses"],
    history: Int[Tensor, " past"] | Float[Tensor, " past"],
    *,
    percentile: int | float,
) -> Float[Tensor, " responses"]:
    """A ramp like Eq. 13's, placed by the lengths seen before instead of by a limit.

    `-clip((length - start) / width, 0, 1)`, where `start` is the percentile of `history` (linear between its
    neighbours) and `width` the history's interquartile range, at least 1 token.

    Args:
        lengths: [responses], generated tokens, end token included.
        history: [past], the same of earlier responses; without any there is no penalty.
        percentile: 0 to 100, where in the history the ramp starts.

    Returns:
        [responses], in [-1, 0].
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile is {percentile}; it must lie between 0 and 100")
    dtype = torch.get_default_dtype()
    if len(history) == 0:
        return torch.zeros(len(lengths), dtype=dtype)
    # Not torch.quantile, which refuses more than 2^24 values; in float64, so that whole tokens stay whole.
    marks = torch.tensor([percentile / 100, 0.25, 0.75], dtype=torch.float64)
    ordered = history.double().sort().values
    place = marks * (len(ordered) - 1)
    below = place.floor().long()
    above = place.ceil().long()
    start, lower, upper = torch.lerp(ordered[below], ordered[above], place - below)
    width = (upper - lower).clamp(min=1)
    return -((lengths.double() - start) / width).clamp(0, 1).to(dtype) + 0.0  # + 0.0 turns -0 into 0


def task_reward(responses: Sequence[Response]) -> Float[Tensor, " responses"]:
    """The configured reward in the place of Eq. 7, see `dapo_pl.rollout.task_reward`."""
    return torch.tensor([response.task_reward for response in responses], dtype=torch.get_default_dtype())


def give_rewards(responses: Sequence[Response], terms: dict[str, RewardTerm]) -> None:
    """Write each response's reward, the sum of all terms, and its parts by the terms' names.

    Each term must give exactly one number per response.
    """
    total = torch.zeros(len(responses))
    for name, term in terms.items():
        values = term(responses)
        if values.shape != (len(responses),):
            raise ValueError(f"reward term {name!r} gave {tuple(values.shape)} for {len(responses)} responses")
        total = total + values
        for response, value in zip(responses, values.tolist(), strict=True):
            response.reward_components[name] = value
    for response, reward in zip(responses, total.tolist(), strict=True):
        response.reward = reward
