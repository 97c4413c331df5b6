"""The update: what it must not depend on, checked against one plain backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import lightning as L
import pytest
import torch
from training import Recorded, make_module, make_trainer, recorded_groups, train_on
from transformers import AutoModelForCausalLM

from dapo_pl.data.collate import collate
from dapo_pl.module import DAPOModule
from dapo_pl.objective import group_advantages
from dapo_pl.rollout.sampler import Rollout
from dapo_pl.seams import Seams


def weights(module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.policy_weights()}


def shake(parameters: Iterable[torch.Tensor]) -> None:
    """Move weights by noise, the same every time."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


class Shaken(L.Callback):
    """Moves the policy once training starts, as restoring a checkpoint does."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DAPOModule)
        shake(pl_module.policy.model.parameters())


def plain_gradient_step(
    model: str, groups, aggregation: str, keep, rate: float = 0.1, kl_coef: float = 0.0
) -> dict[str, torch.Tensor]:
    """SGD on the definition: unpadded rows one by one, ratio 1, so the loss's gradient is that of -A log π.

    With a `kl_coef` the policy is shaken first, and k3 against the model as it was is added. L is 9.
    """
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if kl_coef:
        shake(network.parameters())
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

        def token_log_probs(model, prompt=prompt, response=response) -> torch.Tensor:
            logits = model(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1]
            return logits.log_softmax(-1).gather(-1, torch.tensor(response.token_ids)[:, None]).squeeze(-1)

        log_probs = token_log_probs(network)
        share = {
            "token_mean": 1 / tokens,
            "sample_mean": 1 / (response.length * len(counted)),
            "sqrt_length": response.length**-0.5 / sum(other.length**0.5 for other in counted),
            "constant_length": 1 / (9 * len(counted)),
        }[aggregation]
        loss = -advantage * log_probs.sum() * share
        if kl_coef:
            away = token_log_probs(start).detach() - log_probs
            loss = loss + kl_coef * share * (away.exp() - away - 1).sum()
        loss.backward()
    with torch.no_grad():
        return {name: p - rate * p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "sqrt_length", "constant_length"])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("budget", "share_prompts"), [(32, True), (100, False), (4000, True)])
def test_the_step_is_that_of_the_definition_whatever_the_micro_batches(
    tiny_model: str, tmp_path: Path, aggregation: str, filtered: bool, budget: int, share_prompts: bool
) -> None:
    seams = Seams()
    seams.aggregation = aggregation  # pyright: ignore[reportAttributeAccessIssue]
    seams.constant_length = 9
    keep = (lambda response: not response.truncated) if filtered else (lambda response: True)
    seams.response_filter = keep
    groups = recorded_groups()
    module = make_module(tiny_model, seams, max_tokens_per_micro_batch=budget, share_prompts=share_prompts)
    train_on(module, groups, tmp_path)
    expected = plain_gradient_step(tiny_model, groups, aggregation, keep)
    for name, tensor in module.policy_weights():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "sqrt_length", "constant_length"])
@pytest.mark.parametrize(("budget", "share_prompts"), [(32, True), (100, False)])
def test_the_kl_penalty_pulls_toward_the_policy_from_before_anything_was_restored(
    tiny_model: str, tmp_path: Path, aggregation: str, budget: int, share_prompts: bool
) -> None:
    seams = Seams(kl_coef=0.7, constant_length=9, response_filter=lambda response: not response.truncated)
    seams.aggregation = aggregation  # pyright: ignore[reportAttributeAccessIssue]
    groups = recorded_groups()
    module = make_module(tiny_model, seams, max_tokens_per_micro_batch=budget, share_prompts=share_prompts)
    trainer = train_on(module, groups, tmp_path, callbacks=[Shaken()])
    assert trainer.callback_metrics["objective/kl_to_start"] > 0
    expected = plain_gradient_step(tiny_model, groups, aggregation, seams.response_filter, kl_coef=0.7)
    without = plain_gradient_step(tiny_model, groups, aggregation, seams.response_filter, kl_coef=1e-9)
    gaps = [(expected[name] - without[name]).abs().max().item() for name in expected]
    assert max(gaps) > 1e-3, "the penalty is seen in this comparison"
    for name, tensor in module.policy_weights():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)


def test_the_start_is_kept_out_of_checkpoint_and_optimizer_and_never_moves(tiny_model: str, tmp_path: Path) -> None:
    module = make_module(tiny_model, Seams(kl_coef=0.1))
    names, before = set(module.state_dict()), weights(module)
    metrics = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
            metrics.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    batches = [
        collate(step, Rollout(recorded_groups(seed=step), [], {}, 1.0), module.seams, mini_batch_size=16)
        for step in (1, 2)
    ]
    trainer = make_trainer(tmp_path, callbacks=[Watch()])
    trainer.fit(module, datamodule=Recorded(batches))
    # One mini-batch a step: the first is measured at the start itself.
    assert metrics[0]["objective/kl_to_start"] == 0
    assert metrics[1]["objective/kl_to_start"] > 0

    (start,) = module.start_policy
    for name, parameter in start.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert not parameter.requires_grad
        assert parameter.grad is None
    assert any(not torch.equal(tensor, before[name]) for name, tensor in module.policy_weights())
    assert set(module.state_dict()) == names
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == names
    mine = {id(parameter) for parameter in start.parameters()}
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(parameter) for parameter in module.parameters()}
    assert not mine & trained


def test_without_a_penalty_nothing_is_copied_or_logged(tiny_model: str, tmp_path: Path) -> None:
    module = make_module(tiny_model, Seams())
    trainer = train_on(module, recorded_groups(), tmp_path)
    assert module.start_policy == ()
    assert "objective/kl_to_start" not in trainer.callback_metrics


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
