"""One contract, every engine: what the sampler and the objective rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_pl.data.prompts import encode_prompt
from dapo_pl.models.directory import check_model, load_tokenizer
from dapo_pl.rollout.engine import Engine, Sampling
from dapo_pl.rollout.transformers_engine import TransformersEngine
from dapo_pl.rollout.types import Response
from dapo_pl.rollout.vllm_engine import VLLMEngine

TOLERANCE = {"float32": 2e-4, "bfloat16": 0.15}
"""Largest difference in nats, engine against a teacher-forced fp32 pass of the same weights, on the tiny model."""

QUESTIONS = ["3 + 4 =", "12 - 5 + 1 =", "7 + 7 + 7 - 2 ="]


@pytest.fixture(scope="module")
def prompts(tiny_model: str) -> list[list[int]]:
    tokenizer = load_tokenizer(tiny_model)
    return [encode_prompt(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


def make(kind: type, model: str, dtype: str) -> Any:
    facts = check_model(model)
    tokenizer = load_tokenizer(model)
    return kind(
        model=model,
        end_ids=list(facts.end_ids),
        pad_id=facts.pad_id,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=64,
    )


@pytest.fixture(scope="module", params=[VLLMEngine, TransformersEngine], ids=["vllm", "transformers"])
def engine(request: pytest.FixtureRequest, tiny_model: str) -> Iterator[Engine]:
    engine = make(request.param, tiny_model, "float32")
    yield engine
    engine.close()


def weights_of(model: str, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [(name, parameter.detach() * scale) for name, parameter in network.named_parameters()]


def generate(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, seeds: list[int] | None = None
) -> list[Response]:
    """All prompts at once; results in the order of the prompts."""
    for number, prompt in enumerate(prompts):
        engine.submit(str(number), prompt, sampling, (seeds or list(range(len(prompts))))[number])
    found: dict[str, Response] = {}
    while len(found) < len(prompts):
        for name, response in engine.step():
            assert name not in found
            found[name] = response
    return [found[str(number)] for number in range(len(prompts))]


def teacher_forced(model: str, prompt: list[int], response: Response, temperature: float) -> torch.Tensor:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(response.token_ids)[:, None]).squeeze(-1)


def test_every_request_is_answered_and_truncation_is_flagged(
    engine: Engine, prompts: list[list[int]], tiny_model: str
) -> None:
    end_ids = check_model(tiny_model).end_ids
    before = engine.tokens_generated
    responses = generate(engine, prompts * 20, Sampling(max_tokens=100))
    assert engine.step() == []
    assert engine.tokens_generated - before == sum(response.length for response in responses)
    truncated = [response for response in responses if response.truncated]
    ended = [response for response in responses if not response.truncated]
    assert truncated
    assert ended
    for response in truncated:
        assert response.length == 100
        assert response.token_ids[-1] not in end_ids
    for response in ended:
        assert response.token_ids[-1] in end_ids
        assert not set(response.token_ids[:-1]) & set(end_ids)
    # An end token on the very last place is an end, not a cut.
    shortest = min(responses, key=lambda response: response.length)
    index = responses.index(shortest)
    (again,) = generate(engine, [(prompts * 20)[index]], Sampling(max_tokens=shortest.length), [index])
    assert again.token_ids == shortest.token_ids
    assert not again.truncated


def test_more_prompt_tokens_than_one_step_takes(engine: Engine, prompts: list[list[int]]) -> None:
    """64 different prompts of 120 tokens: more than vLLM schedules in a step, with seeds of their own."""
    long = [[*prompts[0][:-1], *[5 + (i * 7 + j) % 90 for j in range(110)], prompts[0][-1]] for i in range(64)]
    responses = generate(engine, long, Sampling(max_tokens=4))
    assert all(1 <= response.length <= 4 for response in responses)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0)])
def test_log_probs_are_those_of_a_teacher_forced_pass(
    engine: Engine, prompts: list[list[int]], tiny_model: str, temperature: float, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=24)
    for prompt, response in zip(prompts, generate(engine, prompts, sampling), strict=True):
        expected = teacher_forced(tiny_model, prompt, response, temperature)
        assert response.log_probs is not None
        assert (torch.tensor(response.log_probs) - expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("kind", [VLLMEngine, TransformersEngine], ids=["vllm", "transformers"])
def test_log_probs_in_bfloat16(kind: type, prompts: list[list[int]], tiny_model: str) -> None:
    engine = make(kind, tiny_model, "bfloat16")
    try:
        for prompt, response in zip(prompts, generate(engine, prompts, Sampling(max_tokens=24)), strict=True):
            gap = torch.tensor(response.log_probs) - teacher_forced(tiny_model, prompt, response, 1.0)
            assert gap.abs().max() < TOLERANCE["bfloat16"]
    finally:
        engine.close()


def test_top_p_renormalises(engine: Engine, prompts: list[list[int]]) -> None:
    """Under top-p the reported log-probs are of the truncated distribution: a tiny nucleus is certain."""
    for response in generate(engine, prompts, Sampling(top_p=1e-6, max_tokens=8)):
        assert response.log_probs == pytest.approx([0.0] * response.length, abs=1e-5)


def test_seeds_reproduce_whatever_else_is_in_the_batch(engine: Engine, prompts: list[list[int]]) -> None:
    sampling = Sampling(max_tokens=32)
    seeds = [11, 12, 13]
    together = generate(engine, prompts, sampling, seeds)
    alone = [generate(engine, [prompt], sampling, [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    other = generate(engine, prompts, sampling, [21, 22, 23])
    assert [r.token_ids for r in together] != [r.token_ids for r in other]


def test_samples_follow_the_distribution(engine: Engine, prompts: list[list[int]], tiny_model: str) -> None:
    """First tokens of 2,000 draws against the model's own probabilities (chi-square, seeds fixed)."""
    from scipy.stats import chisquare

    prompt = prompts[0]
    draws = generate(engine, [prompt] * 2000, Sampling(max_tokens=1))
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        probabilities = network(torch.tensor([prompt])).logits[0, -1].softmax(-1).double()
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in draws]), minlength=len(probabilities))
    common = probabilities * 2000 >= 5
    observed = [*counts[common].tolist(), counts[~common].sum().item()]
    expected = [*(probabilities[common] * 2000).tolist(), (probabilities[~common] * 2000).sum().item()]
    scale = sum(observed) / sum(expected)
    assert chisquare(observed, [value * scale for value in expected]).pvalue > 1e-3


def test_a_sync_changes_the_weights_and_leaves_nothing_cached(
    engine: Engine, prompts: list[list[int]], tiny_model: str
) -> None:
    """The same long prompt before and after: a prefix cache that survived would keep the old log-probs."""
    long = prompts[0] + prompts[1] * 4
    sampling = Sampling(max_tokens=4)
    (before,) = generate(engine, [long], sampling)
    engine.sync(weights_of(tiny_model, scale=1.5), version=7)
    (changed,) = generate(engine, [long], sampling)
    assert changed.policy_version == 7

    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 1.5
        logits = network(torch.tensor([long + changed.token_ids])).logits[0, len(long) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(changed.token_ids)[:, None]).squeeze(-1)
    assert (torch.tensor(changed.log_probs) - expected).abs().max() < 1e-3

    engine.sync(weights_of(tiny_model), version=0)
    (restored,) = generate(engine, [long], sampling)
    assert restored.token_ids == before.token_ids
    assert restored.log_probs == pytest.approx(before.log_probs, abs=1e-5)


def test_abort_drops_requests_and_weights_wait_for_those_in_flight(
    engine: Engine, prompts: list[list[int]], tiny_model: str
) -> None:
    before = engine.tokens_generated
    for number, prompt in enumerate(prompts):
        engine.submit(f"a{number}", prompt, Sampling(max_tokens=64), number)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.sync(weights_of(tiny_model), version=1)
    if isinstance(engine, VLLMEngine):
        for _ in range(3):
            engine.step()
    dropped = engine.abort(f"a{number}" for number in range(len(prompts)))
    assert engine.tokens_generated - before == dropped
    if isinstance(engine, VLLMEngine):
        assert dropped > 0
    assert engine.step() == []
    (response,) = generate(engine, prompts[:1], Sampling(max_tokens=4))
    assert response.length <= 4
