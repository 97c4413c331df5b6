"""Soft Overlong Punishment, paper section 3.4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dapo_pl.errors import UserError
from dapo_pl.rewards import overlong_penalty
from dapo_pl.rollout.types import Response
from dapo_pl.seams import Seams

from .base import Technique


class SoftOverlongPunishment(Technique):
    """Adds a length penalty that grows from 0 to -1 over the last `l_cache` tokens before `l_max` (Eq. 13).

    A hard limit punishes a response for its last token alone; the ramp tells the model beforehand. It shapes
    the reward and never what counts as correct.

    Args:
        l_max: tokens at which the penalty reaches -1.
        l_cache: width of the ramp in tokens.
        max_tokens: the generation limit, to refuse a ramp that no response can reach.
        keep_overlong_filtering: allow Overlong Filtering beside it; from this row of Table 1 on the ramp
            replaces the filter.
    """

    def __init__(self, l_max: int, l_cache: int, max_tokens: int, keep_overlong_filtering: bool = False) -> None:
        if not 0 <= l_cache <= l_max:
            raise UserError(
                f"technique soft_overlong_punishment: l_cache is {l_cache} and l_max {l_max}; "
                "the ramp needs 0 <= l_cache <= l_max"
            )
        if l_max - l_cache >= max_tokens:
            raise UserError(
                f"technique soft_overlong_punishment: the ramp starts at {l_max - l_cache} tokens and "
                f"generation stops at {max_tokens}, so it can never act: lower l_max or raise sampling.max_tokens"
            )
        self.l_max = l_max
        self.l_cache = l_cache
        self.keep_overlong_filtering = keep_overlong_filtering

    def penalty(self, responses: Sequence[Response]) -> Tensor:
        """Eq. 13 for each response, [responses]."""
        lengths = torch.tensor([response.length for response in responses])
        return overlong_penalty(lengths, l_max=self.l_max, l_cache=self.l_cache)

    def apply(self, seams: Seams) -> None:
        if not self.keep_overlong_filtering:
            seams.forbid(
                "response_filter",
                "technique soft_overlong_punishment replaces overlong_filtering: remove the latter, or set "
                "technique.soft_overlong_punishment.keep_overlong_filtering=true to keep both",
                self.name,
            )
        seams.add_reward("overlong_penalty", self.penalty, self.name)
