"""The update: what it must not depend on, checked against one plain backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import make_module, recorded_groups, train_on
from transformers import AutoModelForCausalLM

from dapo_pl.objective import group_advantages
from dapo_pl.seams import Seams


def weights(module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.policy_weights()}


def plain_gradient_step(model: str, groups, aggregation: str, keep, rate: float = 0.1) -> dict[str, torch.Tensor]:
    """SGD on the definition: unpadded rows one by one, ratio 1, so the loss's gradient is that of -A log π."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    responses = [(group, response) for group in groups for response in group.responses]
    rewards = torch.tensor([response.reward for _, response in responses])
    ids = torch.tensor([group.index for group, _ in responses])
    advantages = group_advantages(rewards, ids)
    counted = [response for _, response in responses if keep(response)]
    tokens = sum(response.length for response in counted)
    for (group, response), advantage in zip(responses, advantages, strict=True):
        if not keep(response):
            continue
        prompt = list(group.prompt.token_ids)
        logits = network(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(response.token_ids)[:, None]).squeeze(-1)
        share = 1 / tokens if aggregation == "token_mean" else 1 / (response.length * len(counted))
        (-advantage * log_probs.sum() * share).backward()
    with torch.no_grad():
        return {name: p - rate * p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("budget", "share_prompts"), [(32, True), (100, False), (4000, True)])
def test_the_step_is_that_of_the_definition_whatever_the_micro_batches(
    tiny_model: str, tmp_path: Path, aggregation: str, filtered: bool, budget: int, share_prompts: bool
) -> None:
    seams = Seams()
    seams.aggregation = aggregation  # pyright: ignore[reportAttributeAccessIssue]
    keep = (lambda response: not response.truncated) if filtered else (lambda response: True)
    seams.response_filter = keep
    groups = recorded_groups()
    module = make_module(tiny_model, seams, max_tokens_per_micro_batch=budget, share_prompts=share_prompts)
    train_on(module, groups, tmp_path)
    expected = plain_gradient_step(tiny_model, groups, aggregation, keep)
    for name, tensor in module.policy_weights():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)


def test_one_optimizer_step_per_mini_batch_and_the_later_ones_are_off_policy(tiny_model: str, tmp_path: Path) -> None:
    module = make_module(tiny_model, Seams())
    trainer = train_on(module, recorded_groups(), tmp_path, mini_batch_size=4)
    assert module.policy_version == trainer.global_step == 4
    # After the first step the policy has moved, so some ratio differs from 1.
    assert trainer.callback_metrics["objective/approximate_kl"] != 0
    again = make_module(tiny_model, Seams())
    single = train_on(again, recorded_groups(), tmp_path, mini_batch_size=16)
    assert single.callback_metrics["objective/approximate_kl"] == 0
    assert single.callback_metrics["objective/ratio_mean"] == 1


def test_a_mini_batch_masked_whole_moves_nothing_and_is_counted(tiny_model: str, tmp_path: Path) -> None:
    seams = Seams()
    seams.response_filter = lambda response: False
    module = make_module(
        tiny_model, seams, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)
    )
    before = weights(module)
    trainer = train_on(module, recorded_groups(), tmp_path, mini_batch_size=8)
    assert module.policy_version == 0
    assert trainer.callback_metrics["policy/skipped_mini_batches"] == 2
    for name, tensor in module.policy_weights():
        assert torch.equal(tensor, before[name])


def test_gradients_are_clipped_and_the_norm_before_is_logged(tiny_model: str, tmp_path: Path) -> None:
    free = make_module(tiny_model, Seams())
    norm = train_on(free, recorded_groups(), tmp_path).callback_metrics["policy/grad_norm"]
    clipped = make_module(tiny_model, Seams(), gradient_clip=float(norm) / 2)
    before = weights(clipped)
    assert train_on(clipped, recorded_groups(), tmp_path).callback_metrics["policy/grad_norm"] == pytest.approx(
        float(norm), rel=1e-5
    )
    changes = [(tensor - before[name]).square().sum() for name, tensor in clipped.policy_weights()]
    moved = torch.stack(changes).sum().sqrt()
    assert moved.item() == pytest.approx(0.1 * float(norm) / 2, rel=1e-3)


def test_entropy_and_probability_are_those_of_full_logits(tiny_model: str, tmp_path: Path) -> None:
    groups = recorded_groups()
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    entropies, probabilities = [], []
    with torch.no_grad():
        for group in groups:
            for response in group.responses:
                prompt = list(group.prompt.token_ids)
                logits = network(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1]
                distribution = torch.distributions.Categorical(logits=logits)
                entropies.append(distribution.entropy())
                probabilities.append(distribution.log_prob(torch.tensor(response.token_ids)).exp())
    metrics = train_on(make_module(tiny_model, Seams()), groups, tmp_path).callback_metrics
    assert metrics["rollout/entropy_mean"].item() == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    assert metrics["rollout/generation_probability_mean"].item() == pytest.approx(
        torch.cat(probabilities).mean().item(), rel=1e-5
    )
