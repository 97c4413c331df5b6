"""Token-Level Policy Gradient Loss, paper section 3.3."""

from __future__ import annotations

from dapo_pl.seams import Seams

from .base import Technique


class TokenLevelLoss(Technique):
    """Averages over the tokens of the whole mini-batch instead of over each response first (Eq. 12).

    In a sample mean a token of a long response weighs less than one of a short response: good long
    reasoning is learned slowly, and gibberish of great length goes unpunished (Figure 4).
    """

    def apply(self, seams: Seams) -> None:
        seams.change("aggregation", "token_mean", self.name)
