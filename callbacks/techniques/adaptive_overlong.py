"""Overlong punishment whose ramp follows the lengths seen; not in the paper."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.errors import UserError
from dapo_pl.rewards import adaptive_overlong_penalty
from dapo_pl.rollout.types import Response
from dapo_pl.seams import Seams

from .base import Technique


class AdaptiveOverlong(Technique):
    """Adds a length penalty that starts where the longest responses of recent steps were.

    Soft Overlong Punishment's ramp (Eq. 13) stands at a fixed length near the limit: it does nothing while
    responses are short, and has to be set anew for another model or limit. This one moves along. Its start is
    a percentile of the lengths of the last `window` rollout steps, its width their interquartile range. The
    first step has no history and no penalty. Where more responses than the percentile leaves are cut off at
    the generation limit, the ramp starts at the limit and punishes nobody: then the limit is too low.

    The history grows after a step's update, so all responses of a step, accepted or not, meet one ramp. It is
    part of the checkpoint.

    Args:
        percentile: 0 to 100, where among the lengths seen the ramp starts.
        window: rollout steps that are remembered.
    """

    def __init__(self, percentile: float = 90, window: int = 5) -> None:
        if not 0 <= percentile <= 100:
            raise UserError(f"technique adaptive_overlong: percentile is {percentile}; it must lie between 0 and 100")
        if window < 1:
            raise UserError(f"technique adaptive_overlong: window is {window}; it must be at least 1 rollout step")
        self.percentile = percentile
        self.history: deque[list[int]] = deque(maxlen=window)

    def penalty(self, responses: Sequence[Response]) -> Tensor:
        """The ramp as it stands, for each response, [responses]."""
        lengths = torch.tensor([response.length for response in responses])
        history = torch.tensor([length for step in self.history for length in step])
        return adaptive_overlong_penalty(lengths, history, percentile=self.percentile)

    def apply(self, seams: Seams) -> None:
        # The name of Soft Overlong Punishment's term: two ramps would punish one length twice.
        seams.add_reward("overlong_penalty", self.penalty, self.name)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Remember the step's lengths, those of groups that were not accepted included."""
        self.history.append([response.length for group in batch.rollout.examined for response in group.responses])

    def state_dict(self) -> dict[str, Any]:
        """Plain lists, which a checkpoint loads without running code."""
        return {"history": [list(step) for step in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint; a shorter window keeps the newest steps."""
        self.history = deque(state_dict["history"], maxlen=self.history.maxlen)
