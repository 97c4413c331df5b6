"""The objective against figures of an independent implementation, closed forms and invariances."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from dapo_pl.objective import aggregate, group_advantages, loss_denominator, policy_loss

ORACLE = Path(__file__).parents[2] / "shared" / "oracles" / "policy_loss.json"


def oracle_cases() -> list[dict]:
    return json.loads(ORACLE.read_text())["cases"] if ORACLE.exists() else []


needs_oracle = pytest.mark.skipif(not ORACLE.exists(), reason="the oracle file is not here")


@needs_oracle
@pytest.mark.parametrize("case", oracle_cases(), ids=lambda case: f"seed{case['seed']}")
def test_advantages_and_losses_match_the_oracle(case: dict) -> None:
    rewards = torch.tensor(case["reward"], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor(case["group"]))
    torch.testing.assert_close(
        advantages, torch.tensor(case["advantage"], dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    compared = 0
    for expected in case["losses"]:
        aggregation = expected["aggregation"]
        if aggregation not in ("token_mean", "sample_mean"):
            continue
        log_probs = torch.tensor(case["log_prob"], dtype=torch.float64, requires_grad=True)
        loss, statistics = policy_loss(
            log_probs,
            torch.tensor(case["old_log_prob"], dtype=torch.float64),
            advantages,
            mask,
            clip_low=expected["clip_low"],
            clip_high=expected["clip_high"],
            aggregation=aggregation,
        )
        loss.backward()
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-9)
        gradient = torch.tensor(expected["grad_log_prob"], dtype=torch.float64)
        torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-9, atol=1e-12)
        share = (statistics["clip_high"] + statistics["clip_low"]) / statistics["tokens"]
        assert share.item() == pytest.approx(expected["clip_fraction"], abs=1e-6)
        assert (statistics["kl"] / statistics["tokens"]).item() == pytest.approx(expected["approx_kl"], rel=1e-9)
        compared += 1
    assert compared


def random_batch(seed: int, responses: int, tokens: int) -> dict[str, torch.Tensor]:
    """Mixed lengths, some responses masked whole, large ratios among small ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, tokens + 1, (responses,), generator=generator)
    old = normal(responses, tokens) - 2
    return {
        "log_probs": old + 0.4 * normal(responses, tokens),
        "old_log_probs": old,
        "advantages": normal(responses),
        "response_mask": torch.arange(tokens) < lengths[:, None],
    }


def loss_and_gradient(
    batch: dict[str, torch.Tensor], parts: list[list[int]], aggregation: str
) -> tuple[float, torch.Tensor]:
    """Accumulated over `parts` (row indices), each divided by the whole batch's denominator."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    denominator = loss_denominator(batch["response_mask"], aggregation)  # pyright: ignore[reportArgumentType]
    total = 0.0
    for rows in parts:
        loss, _ = policy_loss(
            log_probs[rows],
            batch["old_log_probs"][rows],
            batch["advantages"][rows],
            batch["response_mask"][rows],
            clip_low=0.2,
            clip_high=0.28,
            aggregation=aggregation,  # pyright: ignore[reportArgumentType]
            denominator=denominator,
        )
        loss.backward()
        total += loss.item()
    assert log_probs.grad is not None
    return total, log_probs.grad


@given(seed=st.integers(0, 10**6), cut=st.data(), aggregation=st.sampled_from(["token_mean", "sample_mean"]))
def test_loss_and_gradient_do_not_depend_on_the_cut_or_the_order(
    seed: int, cut: st.DataObject, aggregation: str
) -> None:
    batch = random_batch(seed, responses=7, tokens=5)
    whole, gradient = loss_and_gradient(batch, [list(range(7))], aggregation)
    order = cut.draw(st.permutations(range(7)))
    places = sorted(cut.draw(st.sets(st.integers(1, 6))))
    parts = [list(order[a:b]) for a, b in zip([0, *places], [*places, 7], strict=True)]
    pieced, pieced_gradient = loss_and_gradient(batch, parts, aggregation)
    assert pieced == pytest.approx(whole, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(pieced_gradient, gradient, rtol=1e-12, atol=1e-14)


@given(seed=st.integers(0, 10**6))
def test_loss_is_what_a_loop_over_tokens_gives(seed: int) -> None:
    batch = random_batch(seed, responses=5, tokens=4)
    total, tokens, per_response = 0.0, 0, []
    for r in range(5):
        terms = []
        for t in range(4):
            if batch["response_mask"][r, t]:
                ratio = math.exp(batch["log_probs"][r, t] - batch["old_log_probs"][r, t])
                advantage = batch["advantages"][r].item()
                terms.append(min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage))
        total += sum(terms)
        tokens += len(terms)
        if terms:
            per_response.append(sum(terms) / len(terms))
    expected = {
        "token_mean": -total / max(1, tokens),
        "sample_mean": -sum(per_response) / max(1, len(per_response)),
    }
    for aggregation, value in expected.items():
        loss, _ = loss_and_gradient(batch, [list(range(5))], aggregation)
        # The oracle's sample mean divides by n + 1e-8, and so does ours.
        assert loss == pytest.approx(value, rel=1e-12 if aggregation == "token_mean" else 1e-6, abs=1e-8)


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_all_masked_gives_zero_loss_and_gradient_even_over_nan(aggregation: str) -> None:
    log_probs = torch.full((2, 3), torch.nan, requires_grad=True)
    loss, statistics = policy_loss(
        log_probs,
        torch.zeros(2, 3),
        torch.ones(2),
        torch.zeros(2, 3, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        aggregation=aggregation,  # pyright: ignore[reportArgumentType]
    )
    loss.backward()
    assert loss.item() == 0
    assert log_probs.grad is not None
    assert log_probs.grad.abs().sum() == 0
    assert statistics["tokens"] == 0


def test_masked_tokens_hold_infinities_without_harm() -> None:
    log_probs = torch.tensor([[-1.0, torch.inf], [-1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    loss, _ = policy_loss(
        log_probs,
        torch.full((2, 2), -1.0),
        torch.tensor([1.0, -1.0]),
        mask,
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token_mean",
    )
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_clip_higher_lets_a_rare_token_rise_where_the_symmetric_clip_stops_it() -> None:
    # One token, advantage +1, ratio exp(0.22) = 1.246: above 1.2, where the gradient of Eq. 5 is 0, and below
    # 1.28, where Eq. 10 still gives -ratio.
    for clip_high, expected in ((0.2, 0.0), (0.28, -math.exp(0.22))):
        log_prob = torch.tensor([[0.22]], dtype=torch.float64, requires_grad=True)
        loss, _ = policy_loss(
            log_prob,
            torch.zeros(1, 1, dtype=torch.float64),
            torch.ones(1),
            torch.ones(1, 1, dtype=torch.bool),
            clip_low=0.2,
            clip_high=clip_high,
            aggregation="token_mean",
        )
        loss.backward()
        assert log_prob.grad is not None
        assert log_prob.grad.item() == pytest.approx(expected)


def test_token_mean_weighs_tokens_alike_and_sample_mean_responses() -> None:
    # Lengths 1 and 3, ratio 1, advantages 1. Token mean: each of 4 tokens has gradient -1/4. Sample mean: the
    # short response's token has -1/2, each of the long one's -1/6.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    for aggregation, expected in (
        ("token_mean", [[-1 / 4, 0, 0], [-1 / 4, -1 / 4, -1 / 4]]),
        ("sample_mean", [[-1 / 2, 0, 0], [-1 / 6, -1 / 6, -1 / 6]]),
    ):
        log_probs = torch.zeros(2, 3, requires_grad=True)
        loss, _ = policy_loss(
            log_probs,
            torch.zeros(2, 3),
            torch.ones(2),
            mask,
            clip_low=0.2,
            clip_high=0.2,
            aggregation=aggregation,  # pyright: ignore[reportArgumentType]
        )
        loss.backward()
        torch.testing.assert_close(log_probs.grad, torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("reward", [1.0, -1.0, 0.58, -0.418])
def test_equal_rewards_give_exactly_zero(dtype: torch.dtype, std: str, reward: float) -> None:
    rewards = torch.full((16,), reward, dtype=dtype)
    advantages = group_advantages(rewards, torch.zeros(16, dtype=torch.long), std)  # pyright: ignore[reportArgumentType]
    assert (advantages == 0).all()


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=6), min_size=1, max_size=5), st.randoms())
def test_advantages_are_group_statistics_in_any_order(groups: list[list[float]], random) -> None:
    import statistics

    pairs = [(group, reward) for group, rewards in enumerate(groups) for reward in rewards]
    random.shuffle(pairs)
    ids = torch.tensor([group for group, _ in pairs])
    rewards = torch.tensor([reward for _, reward in pairs], dtype=torch.float64)
    advantages = group_advantages(rewards, ids)
    for (group, reward), advantage in zip(pairs, advantages.tolist(), strict=True):
        members = groups[group]
        if len(set(members)) == 1:
            assert advantage == 0
        else:
            expected = (reward - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6)
            assert advantage == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_unknown_names_are_refused() -> None:
    with pytest.raises((ValueError, TypeCheckError), match="aggregation"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises((ValueError, TypeCheckError), match="std"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.long), "sd")  # pyright: ignore[reportArgumentType]
