"""Early rejection: stop groups that their first responses show to be almost surely unmixed.

The paper's Limitation 2: Dynamic Sampling generates whole groups to throw them away. Here a group's first responses
are generated and graded before the rest is asked for; with what is known of the prompt from earlier draws they give
the probability that the group is mixed, and a group below the threshold ends there.

The threshold is not a number that somebody sets but follows from what may be lost: the highest one at which, going
by the same probabilities over recent groups, at least `keep` of the mixed groups stay. Whether that is so is
measured, on a random share of groups that are finished whatever their first responses say.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_pl.errors import UserError
from dapo_pl.rollout.engine import request_seed
from dapo_pl.rollout.history import PromptHistory, PromptRecord, probability_mixed
from dapo_pl.rollout.types import Group

WINDOW = 512
"""Groups whose probabilities set the threshold."""

FEWEST = 64
"""Groups before the first one is rejected."""


@dataclass(frozen=True)
class EarlyRejectionSettings:
    """`rollout.early_rejection`: `first` responses are looked at, `keep` of the mixed groups must stay, and
    `audit_share` of all groups are finished anyway."""

    enabled: bool = False
    first: int = 4
    keep: float = 0.95
    audit_share: float = 0.1

    def __post_init__(self) -> None:
        if self.first < 1:
            raise UserError(f"rollout.early_rejection.first is {self.first}; it must be at least 1")
        if not 0 <= self.keep <= 1:
            raise UserError(f"rollout.early_rejection.keep is {self.keep}; it must lie between 0 and 1")
        if not 0 < self.audit_share <= 1:
            raise UserError(
                f"rollout.early_rejection.audit_share is {self.audit_share}; it must be above 0 and at most 1: "
                "without audits nobody knows how many mixed groups are lost"
            )


@dataclass
class EarlyRejection:
    """Decides by what was known when the step began, so that a decision depends on nothing that is in flight.

    `seen`: of recent groups what the decision rests on, (right and answered before, right and answered of the first
    responses). `lost` and `mixed`: the expected numbers of mixed groups rejected and judged so far.

    `counts`: over the run, of the audited groups those rightly and wrongly found unmixed (`hits`, `false_alarms`),
    and the others by what they were (`mixed_kept`, `unmixed_kept`); `rejected` groups, and in `spared` the responses
    they were spared; `audited_tokens` in `audited_responses` that a rejection would have spared.
    """

    settings: EarlyRejectionSettings
    history: PromptHistory
    group_size: int
    seed: int
    seen: deque[tuple[float, float, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lost: float = 0.0
    mixed: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    threshold: float = 0.0

    def first(self, index: int) -> int:
        """Responses to ask for before deciding about the group of this draw."""
        if not self.settings.enabled or self._audited(index):
            return self.group_size
        return self.settings.first

    def probability(self, group: Group) -> float:
        """That the group is mixed, by its first responses and the prompt's history."""
        return self._probability(*self._evidence(group))

    def rejects(self, group: Group) -> bool:
        """Whether the group's first responses suffice to give it up."""
        return self.probability(group) < self.threshold

    def add(self, groups: Sequence[Group]) -> None:
        """Book a step's groups, in draw order, before the history learns of them."""
        if not self.settings.enabled:
            return
        for group in groups:
            probability, rejects = self.probability(group), self.rejects(group)
            self.seen.append(self._evidence(group))
            self.mixed += probability
            if group.rejected:
                self.lost += probability
                self.counts["rejected"] += 1
                self.counts["spared"] += self.group_size - len(group.responses)
            elif self._audited(group.index):
                self.counts[_audit(rejects, group.mixed)] += 1
                if rejects:
                    rest = group.responses[self.settings.first :]
                    self.counts["audited_responses"] += len(rest)
                    self.counts["audited_tokens"] += sum(response.length for response in rest)

    def update(self) -> None:
        """Set the threshold for the next step, once the history has learned of the last one.

        Probabilities of recent groups are computed anew, since the prior has moved; what was lost too much before is
        saved now.
        """
        if not self.settings.enabled or len(self.seen) < FEWEST:
            return
        predictions = [self._probability(*evidence) for evidence in self.seen]
        overspent = max(0.0, self.lost - (1 - self.settings.keep) * self.mixed)
        allowed = (1 - self.settings.keep) * sum(predictions) - overspent
        self.threshold = threshold(predictions, allowed)

    def metrics(self) -> dict[str, float]:
        """Over the run so far; what no audit has shown yet is left out.

        `precision`: unmixed among audited groups that would have been rejected. `recall`: those among the unmixed.
        `mixed_kept_share`: of the mixed, those not rejected. `tokens_saved`: the responses spared, at the mean length
        of audited ones.
        """
        if not self.settings.enabled:
            return {}
        counts = self.counts
        found = {
            "groups_rejected": float(counts["rejected"]),
            "threshold": self.threshold,
            "groups_audited": float(sum(counts[_audit(*kind)] for kind in KINDS)),
        }
        for name, part, whole in (
            ("precision", "hits", ("hits", "false_alarms")),
            ("recall", "hits", ("hits", "unmixed_kept")),
            ("mixed_kept_share", "mixed_kept", ("mixed_kept", "false_alarms")),
        ):
            total = sum(counts[kind] for kind in whole)
            if total:
                found[name] = counts[part] / total
        if counts["audited_responses"]:
            found["tokens_saved"] = counts["spared"] * counts["audited_tokens"] / counts["audited_responses"]
        return {f"early_rejection/{name}": value for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "seen": [list(evidence) for evidence in self.seen],
            "lost": self.lost,
            "mixed": self.mixed,
            "counts": dict(self.counts),
            "threshold": self.threshold,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.seen = deque((tuple(evidence) for evidence in state["seen"]), maxlen=WINDOW)
        self.lost, self.mixed, self.threshold = state["lost"], state["mixed"], state["threshold"]
        self.counts = Counter(state["counts"])

    def _audited(self, index: int) -> bool:
        return request_seed(self.seed, "audit", index) < self.settings.audit_share * 2**31

    def _evidence(self, group: Group) -> tuple[float, float, int, int]:
        record = self.history.prompts.get(group.prompt.id, PromptRecord())
        first = group.responses[: self.settings.first]
        return record.correct, record.answered, sum(response.correct for response in first), len(first)

    def _probability(self, correct: float, answered: float, first_correct: int, first: int) -> float:
        a, b = self.history.prior
        return probability_mixed((a + correct, b + answered - correct), first_correct, first, self.group_size)


def threshold(predictions: Sequence[float], allowed: float) -> float:
    """The highest t such that predictions below t add up to no more than `allowed`; 1 if all do."""
    lost = 0.0
    for value in sorted(predictions):
        lost += value
        if lost > allowed:
            return value
    return 1.0


KINDS = ((True, True), (True, False), (False, True), (False, False))


def _audit(rejects: bool, mixed: bool) -> str:
    if rejects:
        return "false_alarms" if mixed else "hits"
    return "mixed_kept" if mixed else "unmixed_kept"
