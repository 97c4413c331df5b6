"""Square-root length weighting; not in the paper."""

from __future__ import annotations

from dapo_pl.seams import Seams

from .base import Technique


class SqrtLength(Technique):
    """Weighs a token by one over the square root of its response's length: half way to the token-level loss.

    A response of n tokens has a say of 1 in a sample mean and of n in a token mean (Eq. 5, 12); here it has √n.
    The first makes tokens of long responses count for little, the second lets a few very long responses
    decide the whole step.
    """

    def apply(self, seams: Seams) -> None:
        seams.change("aggregation", "sqrt_length", self.name)
