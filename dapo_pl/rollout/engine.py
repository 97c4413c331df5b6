"""What an engine is: something that turns prompts into responses, one request per response."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dapo_pl.errors import UserError
from dapo_pl.rollout.types import Response


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    `max_tokens` is the generation limit (end token included), `log_probs` whether the engine reports those of
    the sampled tokens, under the distribution they were drawn from (after temperature and top-p).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    log_probs: bool = True

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UserError(f"temperature is {self.temperature}; sampling needs it above 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; a response has at least one token")


class EngineFailed(Exception):
    """The engine broke down in the middle of a step; nothing of the step has been trained on."""


class Engine(Protocol):
    """Generation with continuous admission: requests may be submitted between steps.

    Every response is stamped with `policy_version`, the version of the weights that made it; weights can
    only change while no request is in flight.
    """

    policy_version: int
    tokens_generated: int

    def submit(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        """Queue one response; `seed` determines it, whatever else is in the batch (as far as the dtype allows)."""
        ...

    def step(self) -> list[tuple[str, Response]]:
        """Advance, and return what finished. Never blocks when nothing is in flight."""
        ...

    def abort(self, requests: Iterable[str]) -> int:
        """Drop requests; returns the tokens that were already generated for them."""
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights (transformers names), stamp them `version`, forget everything cached of the old."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...

    @staticmethod
    def require() -> None:
        """Raise `UserError` if something the engine needs is not installed; called before any model loads."""
        ...


def request_seed(*parts: int | str) -> int:
    """A seed in [0, 2³¹) from what identifies a response: run seed, purpose, prompt draw, number in the group."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31
