"""Dr. GRPO, "Understanding R1-Zero-Like Training" (Liu et al. 2025); not in the paper."""

from __future__ import annotations

from dapo_pl.errors import UserError
from dapo_pl.seams import Seams

from .base import Technique


class DrGRPO(Technique):
    """Takes both divisions out of GRPO that depend on the data: by the reward's deviation, and by the length.

    Dividing by the deviation gives groups that are nearly all right or nearly all wrong more weight than mixed
    ones; dividing by the response's own length makes a wrong answer cheaper the longer it is. Advantages are
    `r - mean`, and every token weighs 1 / `length`, a constant.

    It owns three seams, `std`, `aggregation` and `constant_length`, since each half alone is no Dr. GRPO.

    Args:
        length: L in tokens, usually the generation limit. It scales the gradient and nothing else.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise UserError(
                f"technique dr_grpo: length is {length}; it must be at least 1 token, such as sampling.max_tokens"
            )
        self.length = length

    def apply(self, seams: Seams) -> None:
        seams.change("aggregation", "constant_length", self.name)
        seams.change("constant_length", self.length, self.name)
        seams.change("std", "none", self.name)
