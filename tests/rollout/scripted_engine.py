"""An engine without a model: outcome and length follow from prompt and seed, and long answers finish last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from dapo_pl.rollout.engine import Sampling
from dapo_pl.rollout.types import Response


class ScriptedEngine:
    """Each response takes as many steps as it has tokens, so that long answers finish last.

    `script(prompt token, seed)` -> (stated answer, length).
    """

    def __init__(self, script: Callable[[int, int], tuple[int, int]]) -> None:
        self.script = script
        self.policy_version = 0
        self.tokens_generated = 0
        self.busiest = 0
        self._running: dict[str, tuple[Response, int]] = {}

    def submit(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        answer, length = self.script(prompt[0], seed)
        response = Response([1] * length, f"Answer: {answer}", length >= sampling.max_tokens, self.policy_version)
        self._running[request] = (response, 0)
        self.busiest = max(self.busiest, len(self._running))

    def step(self) -> list[tuple[str, Response]]:
        finished = []
        for request, (response, done) in list(self._running.items()):
            self.tokens_generated += 1
            if done + 1 == response.length:
                finished.append((request, response))
                del self._running[request]
            else:
                self._running[request] = (response, done + 1)
        return finished

    def abort(self, requests: Iterable[str]) -> int:
        return sum(self._running.pop(request)[1] for request in list(requests) if request in self._running)

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not self._running
        self.policy_version = version

    def close(self) -> None:
        self._running.clear()

    @staticmethod
    def require() -> None:
        pass
