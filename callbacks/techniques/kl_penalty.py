"""KL penalty against the starting policy: what the paper leaves out (section 2.3)."""

from __future__ import annotations

import math

from dapo_pl.errors import UserError
from dapo_pl.seams import Seams

from .base import Technique


class KLPenalty(Technique):
    """Adds `kl_coef` × KL(policy, start) to the loss, as GRPO's source does and DAPO does not.

    The paper drops the term because a long reasoning policy should move far from its start, and reports no
    run with it. The estimator is k3 per token (`dapo_pl.objective.kl_penalty`), aggregated like the loss. A
    frozen copy of the starting policy is kept in memory, and each micro-batch costs one forward pass more.

    Args:
        kl_coef: weight of the penalty per nat.
    """

    def __init__(self, kl_coef: float = 0.04) -> None:
        if not 0 < kl_coef < math.inf:
            raise UserError(
                f"technique kl_penalty: kl_coef is {kl_coef}; it must be above 0 (for no penalty leave the "
                "technique out)"
            )
        self.kl_coef = kl_coef

    def apply(self, seams: Seams) -> None:
        seams.change("kl_coef", self.kl_coef, self.name)
