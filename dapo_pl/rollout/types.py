"""What travels from the sampler to the policy update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TOLERANCE = 1e-6
"""Rewards no further apart than this, times their size where that is above 1, are equal.

They are float32 in the update, and the advantage divides by their deviation + 1e-6: what is closer is rounding.
"""


@dataclass(frozen=True)
class Prompt:
    """One problem, ready for an engine."""

    id: str
    token_ids: tuple[int, ...]
    answer: int
    source: str = ""
    question: str = ""


@dataclass
class Response:
    """One generated response and what became of it.

    `token_ids` includes the end token; `log_probs` are those of the sampled tokens under the distribution
    they were drawn from, nats, None where the engine was not asked for them. `truncated` means that the
    generation stopped at its limit without an end token; what is graded is `text`, whatever the flag.

    `reward` is what is trained on: the sum of the reward terms. `task_reward` is the configured reward before any
    shaping, None where that is the plain correctness. `reward_components` holds each function's value before its
    weight and each term as it adds up; `reward_failures` why a function gave no value.
    """

    token_ids: list[int]
    text: str
    truncated: bool
    policy_version: int
    log_probs: list[float] | None = None
    correct: bool = False
    stated_answer: int | None = None
    reward: float = 0.0
    task_reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    reward_failures: dict[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Generated tokens, end token included."""
        return len(self.token_ids)


@dataclass
class Group:
    """A prompt and its G responses; `index` is its place in the order in which prompts were drawn.

    `dropped`: a reward function failed on one of them and `reward.on_failure` is `drop_group`. `rejected`: only its
    first responses were generated, see `dapo_pl.rollout.early_rejection`. No filter may accept either, and rewards in
    it mean nothing.
    """

    index: int
    prompt: Prompt
    responses: list[Response] = field(default_factory=list)
    dropped: bool = False
    rejected: bool = False

    @property
    def scored(self) -> bool:
        """Whether its responses have rewards."""
        return not self.dropped and not self.rejected

    @property
    def tokens(self) -> int:
        """Generated tokens of all its responses."""
        return sum(response.length for response in self.responses)

    @property
    def correct(self) -> int:
        """Number of correct responses, what Dynamic Sampling filters on (Eq. 11)."""
        return sum(response.correct for response in self.responses)

    @property
    def mixed(self) -> bool:
        """Whether there is something to learn from: 0 < correct < G, or task rewards that are not all equal."""
        if not self.scored:
            return False
        rewards = [response.task_reward for response in self.responses if response.task_reward is not None]
        if rewards:
            return differ(rewards)
        return 0 < self.correct < len(self.responses)

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`; `equal` has right and wrong responses whose task rewards are all equal."""
        if not self.scored:
            return "dropped" if self.dropped else "rejected"
        if self.mixed:
            return "mixed"
        if self.correct == 0:
            return "all_wrong"
        return "all_correct" if self.correct == len(self.responses) else "equal"


OUTCOMES = ("mixed", "all_correct", "all_wrong", "equal", "dropped", "rejected")
"""What a judged group can turn out to be."""


def differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards are not all equal, float noise aside (0.1 + 0.2 is 0.3)."""
    low, high = min(rewards), max(rewards)
    return high - low > TOLERANCE * max(1.0, abs(low), abs(high))
