"""Groups weighted by their reward variance; not in the paper."""

from __future__ import annotations

from statistics import pvariance

from dapo_pl.rollout.types import Group
from dapo_pl.seams import Seams

from .base import Technique


def reward_variance(group: Group) -> float:
    """Population variance of the group's rewards; computed exactly, so equal rewards give exactly 0."""
    return float(pvariance([response.reward for response in group.responses]))


class ImportanceWeighting(Technique):
    """Keeps every group and scales its advantages by its reward variance over the step's mean variance.

    Dynamic Sampling asks a yes-or-no question before the batch is full: a group without right and wrong
    responses is thrown away and another one generated (it owns `group_filter`). This generates nothing more
    and throws nothing away: it owns `group_weight`, which comes after acceptance and is a matter of degree. A
    group of equal rewards weighs 0, one that is half right weighs most, and as the weights have mean 1 the
    informative groups take over the say of the others. It goes by the reward as shaped, not by correctness,
    because the advantages that it scales are made of that. With both, the weights are spread over the groups
    that the filter has accepted.
    """

    def apply(self, seams: Seams) -> None:
        seams.change("group_weight", reward_variance, self.name)
