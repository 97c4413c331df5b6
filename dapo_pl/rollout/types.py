"""What travels from the sampler to the policy update."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prompt:
    """One problem, ready for an engine."""

    id: str
    token_ids: tuple[int, ...]
    answer: int
    source: str = ""


@dataclass
class Response:
    """One generated response and what became of it.

    `token_ids` includes the end token; `log_probs` are those of the sampled tokens under the distribution
    they were drawn from, nats, None where the engine was not asked for them. `truncated` means that the
    generation stopped at its limit without an end token; what is graded is `text`, whatever the flag.
    """

    token_ids: list[int]
    text: str
    truncated: bool
    policy_version: int
    log_probs: list[float] | None = None
    correct: bool = False
    stated_answer: int | None = None
    reward: float = 0.0

    @property
    def length(self) -> int:
        """Generated tokens, end token included."""
        return len(self.token_ids)


@dataclass
class Group:
    """A prompt and its G responses; `index` is its place in the order in which prompts were drawn."""

    index: int
    prompt: Prompt
    responses: list[Response] = field(default_factory=list)

    @property
    def correct(self) -> int:
        """Number of correct responses, what Dynamic Sampling filters on (Eq. 11)."""
        return sum(response.correct for response in self.responses)

    @property
    def mixed(self) -> bool:
        """0 < correct < G."""
        return 0 < self.correct < len(self.responses)
