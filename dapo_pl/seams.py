"""The seams of naive GRPO: the named places at which a technique may change it, and nothing else.

| seam | naive GRPO | read by |
| --- | --- | --- |
| `clip_low`, `clip_high` | 0.2, 0.2 | the loss, Eq. 8 |
| `aggregation` | `sample_mean` | the loss, Eq. 5 / 12 |
| `constant_length` | 0, unset | the loss, where the aggregation is `constant_length` |
| `kl_coef` | 0, no penalty and no reference policy | the loss: that many times the KL to the start is added |
| `std` | `sample` | the advantages, Eq. 9 |
| `group_weight` | 1 for every group | the advantages: each group's are scaled by weight / mean weight |
| `response_filter` | every response counts | the response mask |
| `group_filter` | every group is accepted | the sampler, Eq. 11 |
| `reward_terms` | correctness only (or the config's reward) | the rewards, Eq. 7; techniques add terms |

A seam has one owner. Reward terms add up, so there each *name* has one owner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dapo_pl.errors import UserError, nearest
from dapo_pl.objective import Aggregation, Std
from dapo_pl.rewards import RewardTerm, correctness

if TYPE_CHECKING:
    from dapo_pl.rollout.types import Group, Response


def every_response(response: Response) -> bool:
    """Naive GRPO: a truncated response trains like any other."""
    return True


def every_group(group: Group) -> bool:
    """Naive GRPO: no group is filtered, unless it has no rewards to learn from."""
    return group.scored


def _scored(group_filter: Callable[[Group], bool]) -> Callable[[Group], bool]:
    """The filter as it is, for groups that have rewards; one without them is never accepted, whatever it says."""

    @functools.wraps(group_filter)
    def accepts(group: Group) -> bool:
        return group.scored and group_filter(group)

    return accepts


def equal_weight(group: Group) -> float:
    """Naive GRPO: every group weighs the same."""
    return 1.0


@dataclass
class Seams:
    """The method being run. A fresh instance is naive GRPO (Table 1, first row)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "sample_mean"
    constant_length: int = 0
    kl_coef: float = 0.0
    std: Std = "sample"
    response_filter: Callable[[Response], bool] = every_response
    group_filter: Callable[[Group], bool] = every_group
    group_weight: Callable[[Group], float] = equal_weight
    reward_terms: dict[str, RewardTerm] = field(default_factory=lambda: {"correctness": correctness})
    owners: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[str, str]] = field(default_factory=dict)

    NAMES: ClassVar[tuple[str, ...]] = (
        "clip_low",
        "clip_high",
        "aggregation",
        "constant_length",
        "kl_coef",
        "std",
        "response_filter",
        "group_filter",
        "group_weight",
    )

    def change(self, seam: str, value: Any, owner: str) -> None:
        """Give `seam` a new value on behalf of the technique `owner`; a second owner is refused."""
        if seam not in self.NAMES:
            raise UserError(f"technique {owner} changes {seam!r}, which is no seam: {nearest(seam, self.NAMES)}")
        self._own(seam, owner)
        setattr(self, seam, _scored(value) if seam == "group_filter" else value)

    def add_reward(self, name: str, term: RewardTerm, owner: str) -> None:
        """Add a reward term on behalf of the technique `owner`."""
        self._own(f"reward_terms.{name}", owner)
        self.reward_terms[name] = term

    def forbid(self, seam: str, sentence: str, owner: str) -> None:
        """Refuse, on behalf of `owner` and with its sentence, whatever else changes `seam`, before or after."""
        self.refusals[seam] = (owner, sentence)
        if self.owners.get(seam, owner) != owner:
            raise UserError(sentence)

    def _own(self, seam: str, owner: str) -> None:
        refuser, sentence = self.refusals.get(seam, (owner, ""))
        if refuser != owner:
            raise UserError(sentence)
        held = self.owners.setdefault(seam, owner)
        if held != owner:
            raise UserError(
                f"techniques {held} and {owner} both change {seam}: remove one of them from the technique list"
            )
