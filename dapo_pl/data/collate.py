"""From accepted groups to the tensors of a policy update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dapo_pl.objective import group_advantages
from dapo_pl.policy import MicroBatch, micro_batches
from dapo_pl.rollout.sampler import Rollout
from dapo_pl.rollout.types import Group
from dapo_pl.seams import Seams


@dataclass
class MiniBatch:
    """Whole groups, one optimizer step.

    `rewards`, `advantages`: [responses]. `response_mask`: [responses, tokens], 1 on tokens that count.
    `engine_log_probs`: [responses, tokens], those the engine reported, NaN where it reported none.
    """

    groups: list[Group]
    rewards: Float[Tensor, " responses"]
    advantages: Float[Tensor, " responses"]
    response_mask: Bool[Tensor, "responses tokens"]
    engine_log_probs: Float[Tensor, "responses tokens"]

    @property
    def lengths(self) -> Int[Tensor, " responses"]:
        """Generated tokens per response, whatever the mask."""
        return torch.tensor([response.length for group in self.groups for response in group.responses])

    def micro_batches(self, *, max_tokens: int, share_prompts: bool, pad_id: int) -> Iterator[MicroBatch]:
        """Rows for the policy, see `dapo_pl.policy.micro_batches`."""
        return micro_batches(
            [group.prompt.token_ids for group in self.groups for _ in group.responses],
            [response.token_ids for group in self.groups for response in group.responses],
            max_tokens=max_tokens,
            share_prompts=share_prompts,
            pad_id=pad_id,
        )


@dataclass
class RolloutBatch:
    """What one rollout step hands to the LightningModule: its mini-batches in order, and the rollout itself.

    `step` counts rollout steps from 1.
    """

    step: int
    rollout: Rollout
    mini_batches: list[MiniBatch]
    sync_seconds: float = 0.0


def collate(step: int, rollout: Rollout, seams: Seams, mini_batch_size: int) -> RolloutBatch:
    """Advantages (Eq. 9) and masks of the accepted groups, cut into mini-batches of whole groups.

    Responses the filter masks still count in their group's mean and standard deviation. Group weights are
    scaled to mean 1 over the step's accepted groups, so that they shift the gradient between groups and leave
    its size alone; where all are 0 the advantages are 0.
    """
    weights = [seams.group_weight(group) for group in rollout.accepted]
    total = sum(weights)
    factors = [weight * len(weights) / total if total > 0 else 0.0 for weight in weights]
    mini_batches = []
    per_batch = max(1, mini_batch_size // max(len(group.responses) for group in rollout.accepted))
    for start in range(0, len(rollout.accepted), per_batch):
        groups = rollout.accepted[start : start + per_batch]
        responses = [response for group in groups for response in group.responses]
        group_ids = torch.tensor([i for i, group in enumerate(groups) for _ in group.responses])
        rewards = torch.tensor([response.reward for response in responses])
        shape = (len(responses), max(response.length for response in responses))
        response_mask = torch.zeros(shape, dtype=torch.bool)
        engine_log_probs = torch.full(shape, torch.nan)
        for row, response in enumerate(responses):
            response_mask[row, : response.length] = seams.response_filter(response)
            if response.log_probs is not None:
                engine_log_probs[row, : response.length] = torch.tensor(response.log_probs)
        group_factors = torch.tensor(factors[start : start + per_batch], dtype=rewards.dtype)
        advantages = group_advantages(rewards, group_ids, seams.std) * group_factors[group_ids]
        mini_batches.append(MiniBatch(groups, rewards, advantages, response_mask, engine_log_probs))
    return RolloutBatch(step, rollout, mini_batches)
