"""An engine without a model: gives back the responses that a run has recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dapo_pl.errors import UserError
from dapo_pl.rollout.engine import Sampling
from dapo_pl.rollout.records import read_steps
from dapo_pl.rollout.types import Response


class ReplayEngine:
    """Answers a request with the response that was recorded for that prompt at that draw.

    A request is known by its prompt's tokens and its name, `DRAW:NUMBER` as the sampler gives it; the seed plays no
    part. Responses bear the policy version that made them, whatever weights were synchronised since, so
    `engine/policy_lag_max` shows a replay that has left the recorded run's way.

    A prompt that was not recorded cannot be answered. The sampler asks for more prompts than it may need, as any
    run does; it is an error only when nothing else is left to go on with.

    Args:
        path: folder of `step_*.parquet`, see `dapo_pl.rollout.records`.
        max_model_len: window in tokens; longer requests are refused.
        model, end_ids, pad_id, decode, dtype, max_num_seqs: unused, nothing is generated.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        max_model_len: int,
        model: str = "",
        end_ids: Sequence[int] = (),
        pad_id: int = 0,
        decode: Callable[[list[int]], str] = lambda token_ids: "",
        dtype: str = "",
        max_num_seqs: int = 0,
    ) -> None:
        self.policy_version = 0
        self.tokens_generated = 0
        self._path = Path(path)
        self._max_model_len = max_model_len
        rows, self._samplings = read_steps(self._path)
        self._rows = {(tuple(row["prompt_token_ids"]), f"{row['group_index']}:{row['number']}"): row for row in rows}
        self._waiting: dict[str, tuple[tuple[int, ...], Sampling]] = {}

    def submit(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        if len(prompt) + sampling.max_tokens > self._max_model_len:
            raise ValueError(f"{len(prompt)} + {sampling.max_tokens} tokens exceed the window {self._max_model_len}")
        self._waiting[request] = (tuple(prompt), sampling)

    def step(self) -> list[tuple[str, Response]]:
        """Everything that was asked for and recorded; an error if there is nothing of the kind."""
        if not self._waiting:
            return []
        found = []
        for request, (prompt, sampling) in list(self._waiting.items()):
            row = self._rows.get((prompt, request))
            if row is not None:
                del self._waiting[request]
                found.append((request, self._response(row, sampling)))
        if not found:
            request, (prompt, _) = next(iter(self._waiting.items()))
            raise UserError(
                f"engine=replay: request {request} (draw:number) with its prompt of {len(prompt)} tokens was not "
                f"recorded in {self._path}: replay with the config of the recorded run, no longer than it was, or "
                "choose an engine that generates"
            )
        self.tokens_generated += sum(response.length for _, response in found)
        return found

    def _response(self, row: dict[str, Any], sampling: Sampling) -> Response:
        recorded = self._samplings.get(row["step"], sampling)
        if replace(recorded, log_probs=sampling.log_probs) != sampling:
            raise UserError(
                f"engine=replay: step {row['step']} was recorded with temperature={recorded.temperature}, "
                f"top_p={recorded.top_p}, max_tokens={recorded.max_tokens}, and asked for are "
                f"temperature={sampling.temperature}, top_p={sampling.top_p}, max_tokens={sampling.max_tokens}: "
                "set the group sampling to what was recorded"
            )
        return Response(
            token_ids=list(row["token_ids"]),
            text=row["text"],
            truncated=row["truncated"],
            policy_version=row["policy_version"],
            log_probs=row["log_probs"] if sampling.log_probs else None,
        )

    def abort(self, requests: Iterable[str]) -> int:
        """Nothing was generated for what still waits: always 0."""
        for request in requests:
            self._waiting.pop(request, None)
        return 0

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes note of the version; the weights would change nothing."""
        if self._waiting:
            raise RuntimeError("weights cannot change while requests are in flight")
        self.policy_version = version

    def close(self) -> None:
        self._rows.clear()

    @staticmethod
    def require() -> None:
        """Needs nothing that the platform does not need itself."""
