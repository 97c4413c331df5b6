"""The DAPO objective (paper Eq. 8-12), and aggregations and a penalty beyond it, as pure functions on tensors.

Nothing here knows of models, configs or processes. Two conventions hold throughout:

* losses are minimised, so they carry the opposite sign of the paper's objectives;
* `denominator` is the count over the *whole* mini-batch. A caller that cuts a mini-batch into micro-batches,
  or spreads it over ranks, passes the global count to each part, and the parts' losses simply add up.

An aggregation is a weight per response and a denominator: with n_i counted tokens in response i, each of them
weighs w_i, and the result is Σ w_i x_it / D.

| aggregation | w_i | D | source |
| --- | --- | --- | --- |
| `sample_mean` | 1 / n_i | responses with a counted token | GRPO, Eq. 5 |
| `token_mean` | 1 | counted tokens | DAPO, Eq. 12 |
| `sqrt_length` | 1 / √n_i | Σ √n_i | half way between those two |
| `constant_length` | 1 / L | responses with a counted token | Dr. GRPO, Liu et al. 2025 |
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregation = Literal["sample_mean", "token_mean", "sqrt_length", "constant_length"]
Std = Literal["sample", "population", "none"]


def group_advantages(
    rewards: Float[Tensor, " responses"],
    group_ids: Int[Tensor, " responses"],
    std: Std = "sample",
) -> Float[Tensor, " responses"]:
    """Group-relative advantages, Eq. 9: `(r - mean) / (std + 1e-6)` within each group.

    Args:
        rewards: [responses], one scalar per response, in reward units.
        group_ids: [responses], equal numbers mark responses of one prompt; any order.
        std: `sample` (n - 1, what the released system does), `population`, or `none` (no scaling).

    Returns:
        [responses], dimensionless. A group whose rewards are all equal gets exactly 0, in every dtype: the
        rounding error of a mean must not be blown up by the division.
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f"std is {std!r}; known are sample, population, none")
    _, member = torch.unique(group_ids, return_inverse=True)
    groups = int(member.max()) + 1 if member.numel() else 0
    zeros = torch.zeros(groups, dtype=rewards.dtype, device=rewards.device)
    size = zeros.index_add(0, member, torch.ones_like(rewards))
    mean = zeros.index_add(0, member, rewards) / size
    centred = rewards - mean[member]
    if std != "none":
        squares = zeros.index_add(0, member, centred.square())
        spread = (squares / (size - int(std == "sample")).clamp(min=1)).sqrt()
        centred = centred / (spread[member] + 1e-6)
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(0, member, rewards, "amin")
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, member, rewards, "amax")
    return torch.where((lowest == highest)[member], torch.zeros_like(centred), centred)


def loss_denominator(
    response_mask: Bool[Tensor, "responses tokens"] | Float[Tensor, "responses tokens"],
    aggregation: Aggregation,
) -> Float[Tensor, ""]:
    """What the aggregation divides by: D of this module's table, over the responses given."""
    if aggregation == "token_mean":
        return response_mask.sum().float()
    if aggregation in ("sample_mean", "constant_length"):
        return (response_mask.sum(dim=1) > 0).sum().float()
    if aggregation == "sqrt_length":
        return response_mask.sum(dim=1).float().sqrt().sum()
    raise ValueError(_unknown(aggregation))


def _unknown(aggregation: str) -> str:
    return f"aggregation is {aggregation!r}; known are {', '.join(get_args(Aggregation))}"


def aggregate(
    values: Float[Tensor, "responses tokens"],
    response_mask: Bool[Tensor, "responses tokens"] | Float[Tensor, "responses tokens"],
    aggregation: Aggregation,
    denominator: Float[Tensor, ""] | None = None,
    constant_length: int = 0,
) -> Float[Tensor, ""]:
    """One number from per-token values, Σ w_i x_it / D with the weights of this module's table.

    `constant_length` is L in tokens; the aggregation of that name needs it and no other reads it.

    Masked tokens count in neither numerator nor denominator, and may hold anything, NaN included. With no
    counted token at all the result is 0 with a zero gradient.
    """
    mask = response_mask.bool()
    if denominator is None:
        denominator = loss_denominator(mask, aggregation)
    values = torch.where(mask, values, torch.zeros_like(values))
    if aggregation == "sample_mean":
        # 1e-8, as in the released system, turns 0 / 0 into 0 for a response that is masked whole.
        values = values / (mask.sum(dim=1, keepdim=True).to(values.dtype) + 1e-8)
    elif aggregation == "sqrt_length":
        values = values / mask.sum(dim=1, keepdim=True).to(values.dtype).clamp(min=1).sqrt()
    elif aggregation == "constant_length":
        if constant_length < 1:
            raise ValueError(f"constant_length is {constant_length}; the aggregation needs at least 1 token")
        values = values / constant_length
    elif aggregation != "token_mean":
        raise ValueError(_unknown(aggregation))
    # Over world_size ranks a rank's share of the denominator may lie below 1; only 0 stands for "nothing counted".
    return values.sum() / torch.where(denominator > 0, denominator, torch.ones_like(denominator))


def policy_loss(
    log_probs: Float[Tensor, "responses tokens"],
    old_log_probs: Float[Tensor, "responses tokens"],
    advantages: Float[Tensor, " responses"],
    response_mask: Bool[Tensor, "responses tokens"] | Float[Tensor, "responses tokens"],
    *,
    clip_low: float,
    clip_high: float,
    aggregation: Aggregation,
    denominator: Float[Tensor, ""] | None = None,
    constant_length: int = 0,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The clipped surrogate, Eq. 8 (with `clip_low == clip_high` and `sample_mean`: GRPO, Eq. 5).

    Args:
        log_probs: [responses, tokens], log π_θ of each token, nats; carries the gradient.
        old_log_probs: [responses, tokens], the same under the policy that generated.
        advantages: [responses], see `group_advantages`.
        response_mask: [responses, tokens], 1 on the tokens that count.
        clip_low, clip_high: ε_low and ε_high; the ratio is clipped to [1 - ε_low, 1 + ε_high].
        aggregation, constant_length: see `aggregate`.
        denominator: the whole mini-batch's `loss_denominator`; this call's own when None.

    Returns:
        The loss to minimise, and detached statistics as *sums over counted tokens*, so that parts of a
        mini-batch add up: `tokens`, `clip_high`, `clip_low` (tokens on which the clipped term is the one
        taken and differs), `up_clipped_probability` (Σ π_θ over `clip_high` tokens, Figure 3a), `ratio`,
        `kl` (Σ of log π_old - log π_θ).
    """
    mask = response_mask.bool()
    zeros = torch.zeros_like(log_probs)
    # Masked positions are cut out before exp(): an inf there would turn into NaN in the backward pass.
    log_ratio = torch.where(mask, log_probs - old_log_probs, zeros)
    ratio = log_ratio.exp()
    advantage = advantages.to(log_probs.dtype)[:, None]
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    objective = torch.minimum(unclipped, clipped)
    loss = -aggregate(objective, mask, aggregation, denominator, constant_length)

    with torch.no_grad():
        active = (clipped < unclipped) & mask
        high = active & (advantage > 0)
        low = active & (advantage < 0)
        statistics = {
            "tokens": mask.sum(),
            "clip_high": high.sum(),
            "clip_low": low.sum(),
            "up_clipped_probability": torch.where(high, log_probs.exp(), zeros).sum(),
            "ratio": torch.where(mask, ratio, zeros).sum(),
            "kl": -log_ratio.sum(),
        }
    return loss, statistics


def kl_penalty(
    log_probs: Float[Tensor, "responses tokens"],
    reference_log_probs: Float[Tensor, "responses tokens"],
    response_mask: Bool[Tensor, "responses tokens"] | Float[Tensor, "responses tokens"],
    *,
    aggregation: Aggregation,
    denominator: Float[Tensor, ""] | None = None,
    constant_length: int = 0,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """How far the policy is from a reference: k3 per token, `exp(r) - r - 1` with `r = log π_ref - log π_θ`.

    k3 (Schulman, "Approximating KL Divergence", 2020; the penalty of GRPO's source, DeepSeekMath 2024) is an
    unbiased estimate of KL(π_θ, π_ref) on tokens drawn from π_θ, never negative, and 0 only where the two agree.

    Args:
        log_probs: [responses, tokens], log π_θ of each token, nats; carries the gradient.
        reference_log_probs: [responses, tokens], the same under the reference; carries none.
        response_mask, aggregation, denominator, constant_length: those of the `policy_loss` it is added to.

    Returns:
        The aggregated penalty, without any coefficient, and detached sums over counted tokens: `kl_to_start`,
        Σ of the per-token values.
    """
    mask = response_mask.bool()
    # Masked positions are cut out before exp(), as in policy_loss.
    log_ratio = torch.where(mask, reference_log_probs.detach() - log_probs, torch.zeros_like(log_probs))
    # expm1, because near the reference exp(r) - 1 would lose in float32 all that the subtraction of r leaves.
    values = torch.expm1(log_ratio) - log_ratio
    penalty = aggregate(values, mask, aggregation, denominator, constant_length)
    return penalty, {"kl_to_start": values.detach().sum()}
