"""vLLM in this process."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dapo_pl.errors import UserError
from dapo_pl.rollout.engine import Sampling
from dapo_pl.rollout.types import Response

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Binding would pin the trainer's threads of the same process as well.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class VLLMEngine:
    """An engine on vLLM's step loop, colocated with the trainer.

    Args:
        model: transformers directory or hub name.
        max_model_len: window in tokens, prompt and response together.
        end_ids: tokens that end a response.
        pad_id: unused, vLLM never pads.
        decode: token ids -> text, special tokens left out.
        dtype: of the weights, `bfloat16` or `float32`.
        kv_cache_gib: memory for the key-value cache on a CPU.
        gpu_memory_utilization: share of a GPU's memory that vLLM may take.
        max_num_seqs: responses generated at the same time.
        compile: compile the model (slower start, faster generation on a GPU).
    """

    def __init__(
        self,
        *,
        model: str,
        max_model_len: int,
        end_ids: Sequence[int],
        pad_id: int,
        decode: Callable[[list[int]], str],
        dtype: str = "bfloat16",
        kv_cache_gib: float = 1.0,
        gpu_memory_utilization: float = 0.4,
        max_num_seqs: int = 256,
        compile: bool = False,
    ) -> None:
        self.require()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib)))
        from vllm import LLM
        from vllm.platforms import current_platform

        threads = torch.get_num_threads()
        self.policy_version = 0
        self.tokens_generated = 0
        self._decode = decode
        self._end_ids = list(end_ids)
        self._in_flight: set[str] = set()
        self._llm = LLM(
            model=model,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_model_len, 4096),
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=not compile,
            enable_prefix_caching=True,
            # A seeded request whose prompt is cut in two rewinds its random generator, which a CPU's cannot do.
            enable_chunked_prefill=not current_platform.is_cpu(),
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,
            generation_config="vllm",  # the model's own sampling defaults must not leak in
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        torch.set_num_threads(threads)

    def submit(self, request: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop_token_ids=self._end_ids,
            logprobs=0 if sampling.log_probs else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._llm.llm_engine.add_request(request, {"prompt_token_ids": list(prompt)}, parameters)
        self._in_flight.add(request)

    def step(self) -> list[tuple[str, Response]]:
        if not self._in_flight:
            return []
        finished: list[tuple[str, Response]] = []
        outputs: list[Any] = self._llm.llm_engine.step()
        for output in outputs:
            if not output.finished:
                continue
            completion = output.outputs[0]
            token_ids = list(completion.token_ids)
            self.tokens_generated += len(token_ids)
            self._in_flight.discard(output.request_id)
            log_probs = completion.logprobs
            if log_probs is not None:
                log_probs = [entry[token].logprob for entry, token in zip(log_probs, token_ids, strict=True)]
            response = Response(
                token_ids=token_ids,
                text=self._decode(token_ids),
                truncated=completion.finish_reason == "length",
                policy_version=self.policy_version,
                log_probs=log_probs,
            )
            finished.append((output.request_id, response))
        return finished

    def abort(self, requests: Iterable[str]) -> int:
        wanted = self._in_flight & set(requests)
        states = self._llm.llm_engine.output_processor.request_states.values()
        dropped = sum(
            state.detokenizer.num_output_tokens()
            for state in states
            if state.external_req_id in wanted and state.detokenizer is not None
        )
        if wanted:
            self._llm.llm_engine.abort_request(sorted(wanted))
            self._in_flight -= wanted
        self.tokens_generated += dropped
        return dropped

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._in_flight:
            raise RuntimeError("weights cannot change while requests are in flight")
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.apply_model(_repack_output_layer)
        self._llm.reset_prefix_cache()
        self.policy_version = version

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    @staticmethod
    def require() -> None:
        """Say which extra to install when vLLM is missing."""
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "engine=vllm needs vLLM, which is not installed: install the extra 'cpu' or 'gpu' "
                "(pip install -e '.[cpu]'), or choose engine=transformers"
            )


def _repack_output_layer(model: torch.nn.Module) -> None:
    """On a CPU the output layer multiplies with a packed copy of its weight, made once after loading.

    A reload makes that copy anew for the layers it names. An output layer tied to the embedding is not named,
    and would go on with the first weights for ever.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)  # pyright: ignore
