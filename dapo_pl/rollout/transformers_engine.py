"""Generation with transformers' own `generate`: slow, available everywhere, the second opinion on vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from dapo_pl.rollout.engine import Sampling
from dapo_pl.rollout.types import Response


class SeededSampler(LogitsProcessor):
    """Draws each row's token from a random number of its own, so that a row does not depend on its batch.

    Used with greedy decoding: every other token's score becomes -inf. Records the log-probs of what it drew.
    """

    def __init__(self, uniforms: Float[Tensor, "rows tokens"], temperature: float, top_p: float) -> None:
        self.uniforms = uniforms
        self.temperature = temperature
        self.top_p = top_p
        self.log_probs: list[Tensor] = []

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocabulary"]
    ) -> Float[Tensor, "rows vocabulary"]:
        log_probs = (scores.float() / self.temperature).log_softmax(-1)
        if self.top_p < 1:
            ordered, order = log_probs.sort(dim=-1, descending=True)
            probability = ordered.exp()
            outside = probability.cumsum(-1) - probability >= self.top_p
            log_probs = log_probs.masked_fill(outside.scatter(-1, order, outside), -torch.inf).log_softmax(-1)
        cumulative = log_probs.double().exp().cumsum(-1)
        uniform = self.uniforms[:, len(self.log_probs), None].double() * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, uniform, right=True).clamp(max=scores.shape[-1] - 1)
        self.log_probs.append(log_probs.gather(-1, token).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


class TransformersEngine:
    """An engine on a transformers model of its own.

    Args:
        model: transformers directory or hub name.
        end_ids: tokens that end a response.
        pad_id: fills prompts up on the left.
        decode: token ids -> text, special tokens left out.
        max_model_len: window in tokens, prompt and response together; longer requests are refused.
        dtype: of the weights, `bfloat16` or `float32`.
        max_num_seqs: responses generated at the same time.
    """

    def __init__(
        self,
        *,
        model: str,
        end_ids: Sequence[int],
        pad_id: int,
        decode: Callable[[list[int]], str],
        max_model_len: int,
        dtype: str = "bfloat16",
        max_num_seqs: int = 256,
    ) -> None:
        self.policy_version = 0
        self.tokens_generated = 0
        self._decode = decode
        self._end_ids = list(end_ids)
        self._pad_id = pad_id
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._queue: dict[str, tuple[Sequence[int], Sampling, int]] = {}
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = network.eval()
        if torch.cuda.is_available():
            self._model = self._model.cuda()

    def submit(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        if len(prompt) + sampling.max_tokens > self._max_model_len:
            raise ValueError(f"{len(prompt)} + {sampling.max_tokens} tokens exceed the window {self._max_model_len}")
        self._queue[request] = (list(prompt), sampling, seed)

    def step(self) -> list[tuple[str, Response]]:
        """Generate for as many queued requests as fit and share their sampling settings, to the end."""
        if not self._queue:
            return []
        sampling = next(iter(self._queue.values()))[1]
        names = [name for name, (_, other, _) in self._queue.items() if other == sampling]
        names = names[: self._max_num_seqs]
        taken = [self._queue.pop(name) for name in names]
        return list(
            zip(
                names,
                self._generate([prompt for prompt, _, _ in taken], sampling, [seed for _, _, seed in taken]),
                strict=True,
            )
        )

    @torch.inference_mode()
    def _generate(self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int]) -> list[Response]:
        width = max(map(len, prompts))
        input_ids = torch.full((len(prompts), width), self._pad_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        uniforms = torch.stack(
            [torch.rand(sampling.max_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )
        device = self._model.device
        sampler = SeededSampler(uniforms.to(device), sampling.temperature, sampling.top_p)
        output = self._model.generate(
            input_ids.to(device),
            attention_mask=attention_mask.to(device),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=self._end_ids,
            pad_token_id=self._pad_id,
            logits_processor=LogitsProcessorList([sampler]),
        )
        tokens = output[:, width:].cpu()
        log_probs = torch.stack(sampler.log_probs, dim=1).cpu()
        ended = torch.isin(tokens, torch.tensor(self._end_ids))
        responses = []
        for row in range(len(prompts)):
            ends = ended[row].nonzero()
            length = int(ends[0]) + 1 if len(ends) else tokens.shape[1]
            token_ids = tokens[row, :length].tolist()
            self.tokens_generated += length
            responses.append(
                Response(
                    token_ids=token_ids,
                    text=self._decode(token_ids),
                    truncated=len(ends) == 0,
                    policy_version=self.policy_version,
                    log_probs=log_probs[row, :length].tolist() if sampling.log_probs else None,
                )
            )
        return responses

    def abort(self, requests: Iterable[str]) -> int:
        """Queued requests have no tokens yet, and `step` finishes all it starts: always 0."""
        for request in requests:
            self._queue.pop(request, None)
        return 0

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._queue:
            raise RuntimeError("weights cannot change while requests are in flight")
        with torch.no_grad():
            own = dict(self._model.named_parameters())
            for name, tensor in weights:
                own.pop(name).copy_(tensor)
        if own:
            raise RuntimeError(f"the sync left out {sorted(own)}")
        self.policy_version = version

    def close(self) -> None:
        del self._model

    @staticmethod
    def require() -> None:
        """Needs nothing that the platform does not need itself."""
