"""Clip-Higher, paper section 3.1."""

from __future__ import annotations

from dapo_pl.errors import UserError
from dapo_pl.seams import Seams

from .base import Technique


class ClipHigher(Technique):
    """Raises the upper clip bound alone: ratios may rise to 1 + ε_high but still fall to 1 - ε_low (Eq. 10).

    Without it a token of probability 0.01 can rise to at most 0.012 in a step while one of 0.9 is hardly
    held back: exploration is what the symmetric bound stops, and entropy collapses (Figure 2b).
    """

    def __init__(self, clip_high: float = 0.28) -> None:
        if clip_high <= 0:
            raise UserError(f"technique clip_higher: clip_high is {clip_high}; it must be above 0")
        self.clip_high = clip_high

    def apply(self, seams: Seams) -> None:
        if self.clip_high < seams.clip_low:
            raise UserError(
                f"technique clip_higher: clip_high {self.clip_high} is below clip_low {seams.clip_low}, "
                "which would lower the bound: raise clip_high"
            )
        seams.change("clip_high", self.clip_high, self.name)
