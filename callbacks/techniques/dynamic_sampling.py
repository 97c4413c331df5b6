"""Dynamic Sampling, paper section 3.2."""

from __future__ import annotations

from dapo_pl.rollout.types import Group
from dapo_pl.seams import Seams

from .base import Technique


def mixed(group: Group) -> bool:
    """0 < correct < G (Eq. 11), on correctness and never on the shaped reward."""
    return group.mixed


class DynamicSampling(Technique):
    """Keeps only groups with both right and wrong responses, and refills until the batch is full (Eq. 11).

    A group that is all right or all wrong has advantage 0. Without the filter the share of such groups grows
    as the model improves (Figure 3b), and the gradient rests on ever fewer groups, with ever more variance.
    """

    def apply(self, seams: Seams) -> None:
        seams.change("group_filter", mixed, self.name)
