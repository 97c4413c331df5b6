"""What is known of each prompt from earlier draws: how often it was right, drawn and trained on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dapo_pl.rollout.types import OUTCOMES, Group

WINDOW = 512
"""Groups that the prior over prompts is fitted to."""

STRENGTHS = tuple(2.0**power for power in range(-3, 6))
"""Pseudo-responses that the fitted prior may weigh as much as."""


@dataclass
class PromptRecord:
    """One prompt's past.

    `drawn`, `accepted`, `rejected` count groups over the whole run. `correct` of `answered` responses were right,
    each older draw counting `decay` times as much as the next.
    """

    drawn: int = 0
    accepted: int = 0
    rejected: int = 0
    correct: float = 0.0
    answered: float = 0.0


class PromptHistory:
    """Records by prompt, outcomes by epoch and source, and a Beta posterior over each prompt's accuracy.

    Args:
        decay: what a draw's responses still count for at the prompt's next draw, in (0, 1]: the policy has moved on.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.prompts: dict[str, PromptRecord] = {}
        self.outcomes: dict[tuple[int, str], dict[str, int]] = {}
        self.recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self.prior = (0.5, 0.5)

    def add(self, groups: Sequence[Group], accepted: set[int], epochs: Sequence[int]) -> None:
        """Book a step's groups, in draw order; `accepted` holds the indices that are trained on."""
        for group, epoch in zip(groups, epochs, strict=True):
            record = self.prompts.setdefault(group.prompt.id, PromptRecord())
            record.drawn += 1
            record.accepted += group.index in accepted
            record.rejected += group.rejected
            record.correct = self.decay * record.correct + group.correct
            record.answered = self.decay * record.answered + len(group.responses)
            counts = self.outcomes.setdefault((epoch, group.prompt.source), dict.fromkeys(("accepted", *OUTCOMES), 0))
            counts["accepted"] += group.index in accepted
            counts[group.outcome] += 1
            self.recent.append((group.correct, len(group.responses)))
        self.prior = fit_prior(self.recent)

    def posterior(self, prompt_id: str) -> tuple[float, float]:
        """(a, b) of the Beta distribution over the prompt's accuracy."""
        a, b = self.prior
        record = self.prompts.get(prompt_id)
        if record is None:
            return a, b
        return a + record.correct, b + record.answered - record.correct

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "prompts": {name: list(asdict(record).values()) for name, record in self.prompts.items()},
            "outcomes": [[epoch, source, counts] for (epoch, source), counts in self.outcomes.items()],
            "recent": [list(pair) for pair in self.recent],
            "prior": list(self.prior),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.prompts = {name: PromptRecord(*values) for name, values in state["prompts"].items()}
        self.outcomes = {(epoch, source): dict(counts) for epoch, source, counts in state["outcomes"]}
        self.recent = deque((tuple(pair) for pair in state["recent"]), maxlen=WINDOW)
        self.prior = (state["prior"][0], state["prior"][1])


def fit_prior(outcomes: Sequence[tuple[int, int]] | deque[tuple[int, int]]) -> tuple[float, float]:
    """(a, b) of the Beta distribution that prompts' accuracies are drawn from.

    The mean is the pooled accuracy, the strength a + b the one of `STRENGTHS` under which the outcomes, (right,
    answered) by group, are likeliest (a beta-binomial likelihood).
    """
    right, answered = torch.tensor(list(outcomes), dtype=torch.float64).reshape(-1, 2).T
    mean = (float(right.sum()) + 0.5) / (float(answered.sum()) + 1)
    a = torch.tensor(STRENGTHS, dtype=torch.float64)[:, None] * mean
    b = torch.tensor(STRENGTHS, dtype=torch.float64)[:, None] * (1 - mean)
    likelihood = _log_beta(a + right, b + answered - right).sum(-1) - _log_beta(a, b)[:, 0] * len(right)
    strength = STRENGTHS[int(likelihood.argmax())]
    return strength * mean, strength * (1 - mean)


def probability_mixed(posterior: tuple[float, float], correct: int, answered: int, group_size: int) -> float:
    """Chance that a group ends with both right and wrong responses, after `answered` of them.

    With accuracy ~ Beta(a, b) beforehand, r responses to come and none of the first k right, all r are wrong with
    probability B(a, b + k + r) / B(a, b + k); likewise for all right. Before any response both can happen.

    Args:
        posterior: (a, b) before these responses.
        correct: right ones among them.
        answered: k.
        group_size: responses of the whole group.
    """
    if 0 < correct < answered:
        return 1.0
    a, b = posterior
    wrong = _none_right(a, b + answered, group_size - answered) if correct == 0 else 0.0
    right = _none_right(b, a + answered, group_size - answered) if correct == answered else 0.0
    return max(0.0, 1.0 - wrong - right)


def _none_right(a: float, b: float, draws: int) -> float:
    """B(a, b + draws) / B(a, b): no success in so many draws of an accuracy ~ Beta(a, b)."""
    return math.exp(math.lgamma(b + draws) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + draws))


def _log_beta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
