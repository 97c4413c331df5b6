"""Token log-probs against the plain full-logits computation, and the row layout against separate rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_pl.errors import UserError
from dapo_pl.policy import CausalPolicy, micro_batches, shared_prompt_mask, token_log_probs


def small_model(kind: str = "qwen2", **options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()


def plain_log_probs(model, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """The definition: all logits of one unpadded row."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_values_and_gradients_in_float64(bias: bool, soft_cap: float | None, temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    hidden, weight, offset = normal(7, 5), normal(11, 5), normal(11) if bias else None
    target = torch.randint(0, 11, (7,), generator=generator)

    def ours(hidden, weight, offset):
        return token_log_probs(
            hidden, weight, target, bias=offset, temperature=temperature, soft_cap=soft_cap, chunk=3
        )

    logits = hidden @ weight.T + (0 if offset is None else offset)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    reference = torch.distributions.Categorical(logits=logits / temperature)
    log_probs, entropies = ours(hidden, weight, offset)
    torch.testing.assert_close(log_probs, reference.log_prob(target), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropies, reference.entropy(), rtol=1e-9, atol=1e-9)
    assert not entropies.requires_grad

    weights = torch.randn(7, generator=generator, dtype=torch.float64)
    inputs = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    expected = torch.autograd.grad((reference.log_prob(target) * weights).sum(), inputs)
    found = torch.autograd.grad((log_probs * weights).sum(), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(lambda *a: ours(*a, *([None] * (3 - len(a))))[0], inputs)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_layout_gives_the_log_probs_and_gradients_of_separate_rows(
    kind: str, share_prompts: bool, tied: bool
) -> None:
    model = small_model(kind, tie_word_embeddings=tied)
    policy = CausalPolicy(model, temperature=0.8, share_prompts=share_prompts, chunk=4)
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [9, 10], [9, 10]]
    responses = [[1, 2, 3], [4], [11, 12, 13, 14, 15, 16], [17, 18], [19, 20, 21, 22]]
    weights = torch.linspace(-1, 1, 5)

    model.zero_grad()
    seen = []
    for micro in micro_batches(prompts, responses, max_tokens=24, share_prompts=share_prompts, pad_id=0):
        log_probs, entropies = policy(micro)
        assert log_probs.shape == entropies.shape
        for slot, index in enumerate(micro.responses):
            expected = plain_log_probs(model, prompts[index], responses[index], 0.8)
            length = len(responses[index])
            torch.testing.assert_close(log_probs[slot, :length], expected, rtol=1e-4, atol=1e-5)
            assert (log_probs[slot, length:] == 0).all()
            seen.append(index)
        (log_probs.sum(1) * weights[micro.responses]).sum().backward()
    assert sorted(seen) == [0, 1, 2, 3, 4]
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    for index in range(5):
        (plain_log_probs(model, prompts[index], responses[index], 0.8).sum() * weights[index]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_response_is_laid_out_once_within_the_budget(data: st.DataObject) -> None:
    prompts, responses = [], []
    for group in range(data.draw(st.integers(1, 4))):
        prompt = [group + 1] * data.draw(st.integers(1, 6))
        for _ in range(data.draw(st.integers(1, 4))):
            prompts.append(prompt)
            responses.append(data.draw(st.lists(st.integers(10, 60), min_size=1, max_size=8)))
    budget = data.draw(st.integers(14, 60))
    share = data.draw(st.booleans())
    found: dict[int, list[int]] = {}
    for micro in micro_batches(prompts, responses, max_tokens=budget, share_prompts=share, pad_id=0):
        assert micro.input_ids.numel() <= budget
        for slot, index in enumerate(micro.responses):
            assert index not in found
            chosen = micro.slot == slot
            order = micro.token[chosen].argsort()
            found[index] = micro.target[chosen][order].tolist()
            # The first token is predicted from the last token of its own prompt.
            row, column = micro.row[chosen][order][0], micro.column[chosen][order][0]
            assert column == len(prompts[index]) - 1
            assert micro.input_ids[row, : len(prompts[index])].tolist() == prompts[index]
    assert [found[index] for index in range(len(responses))] == responses


def test_shared_prompt_mask_by_hand() -> None:
    # Prompt of two, responses of two and one, one padding.
    segments = torch.tensor([[1, 1, 2, 2, 3, 0]])
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert shared_prompt_mask(segments)[0, 0].int().tolist() == expected


def test_a_model_whose_output_differs_is_refused() -> None:
    model = small_model()
    CausalPolicy(model).check_layout()

    class Shifted(torch.nn.Module):
        """Adds to the logits what the output layer does not know of."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.base_model = model.base_model
            self.config = model.config
            self.get_output_embeddings = model.get_output_embeddings
            self.get_input_embeddings = model.get_input_embeddings

        def forward(self, **inputs):
            output = self.inner(**inputs)
            output.logits = output.logits * 2
            return output

    with pytest.raises(UserError, match="share_prompts"):
        CausalPolicy(Shifted()).check_layout()
