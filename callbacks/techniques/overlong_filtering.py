"""Overlong Filtering, paper section 3.4."""

from __future__ import annotations

from dapo_pl.rollout.types import Response
from dapo_pl.seams import Seams

from .base import Technique


def finished(response: Response) -> bool:
    """Whether the response ended by itself."""
    return not response.truncated


class OverlongFiltering(Technique):
    """Masks the loss of truncated responses (section 3.4); they still count in their group's statistics.

    A response cut off at the limit is graded wrong however sound its reasoning was. Without the mask that
    verdict is noise in the reward (Figure 5).
    """

    def apply(self, seams: Seams) -> None:
        seams.change("response_filter", finished, self.name)
