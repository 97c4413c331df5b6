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

from dapo_pl.objective import aggregate, group_advantages, kl_penalty, loss_denominator, policy_loss

AGGREGATIONS = ("token_mean", "sample_mean", "sqrt_length", "constant_length")
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
        # A sum over each response's tokens, averaged over responses, is a constant length of 1.
        aggregation = expected["aggregation"].replace("sample_mean_token_sum", "constant_length")
        log_probs = torch.tensor(case["log_prob"], dtype=torch.float64, requires_grad=True)
        loss, statistics = policy_loss(
            log_probs,
            torch.tensor(case["old_log_prob"], dtype=torch.float64),
            advantages,
            mask,
            clip_low=expected["clip_low"],
            clip_high=expected["clip_high"],
            aggregation=aggregation,
            constant_length=1,
        )
        loss.backward()
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-9)
        gradient = torch.tensor(expected["grad_log_prob"], dtype=torch.float64)
        torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-9, atol=1e-12)
        share = (statistics["clip_high"] + statistics["clip_low"]) / statistics["tokens"]
        assert share.item() == pytest.approx(expected["clip_fraction"], abs=1e-6)
        assert (statistics["kl"] / statistics["tokens"]).item() == pytest.approx(expected["approx_kl"], rel=1e-9)
        compared += 1
    assert compared == 6


def random_batch(seed: int, responses: int, tokens: int) -> dict[str, torch.Tensor]:
    """Mixed lengths, the first two responses and by chance others masked whole, large ratios among small ones.

    What is masked holds NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, tokens + 1, (responses,), generator=generator)
    lengths[:2] = 0
    mask = torch.arange(tokens) < lengths[:, None]
    old = normal(responses, tokens) - 2
    return {
        "log_probs": (old + 0.4 * normal(responses, tokens)).where(mask, torch.nan),
        "old_log_probs": old,
        "start_log_probs": old + 0.7 * normal(responses, tokens),
        "advantages": normal(responses),
        "response_mask": mask,
    }


def loss_and_gradient(
    batch: dict[str, torch.Tensor], parts: list[list[int]], aggregation: str, kl_coef: float = 0.0
) -> tuple[float, torch.Tensor]:
    """Accumulated over `parts` (row indices), each divided by the whole batch's denominator; L is 6."""
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
            constant_length=6,
        )
        if kl_coef:
            penalty, _ = kl_penalty(
                log_probs[rows],
                batch["start_log_probs"][rows],
                batch["response_mask"][rows],
                aggregation=aggregation,  # pyright: ignore[reportArgumentType]
                denominator=denominator,
                constant_length=6,
            )
            loss = loss + kl_coef * penalty
        loss.backward()
        total += loss.item()
    assert log_probs.grad is not None
    return total, log_probs.grad


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=st.integers(0, 10**6), cut=st.data())
def test_loss_and_gradient_do_not_depend_on_the_cut_or_the_order(
    aggregation: str, kl_coef: float, seed: int, cut: st.DataObject
) -> None:
    batch = random_batch(seed, responses=7, tokens=5)
    whole, gradient = loss_and_gradient(batch, [list(range(7))], aggregation, kl_coef)
    # Rows 0 and 1 are masked whole: by chance among the others, or a micro-batch of their own.
    apart = cut.draw(st.booleans())
    order = cut.draw(st.permutations(range(2 if apart else 0, 7)))
    places = sorted(cut.draw(st.sets(st.integers(1, len(order) - 1))))
    parts = [list(order[a:b]) for a, b in zip([0, *places], [*places, len(order)], strict=True)]
    if apart:
        parts.insert(cut.draw(st.integers(0, len(parts))), [1, 0])
    pieced, pieced_gradient = loss_and_gradient(batch, parts, aggregation, kl_coef)
    assert math.isfinite(whole)
    assert gradient.isfinite().all()
    assert pieced == pytest.approx(whole, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(pieced_gradient, gradient, rtol=1e-12, atol=1e-14)


@given(seed=st.integers(0, 10**6))
def test_loss_is_what_a_loop_over_tokens_gives(seed: int) -> None:
    batch = random_batch(seed, responses=6, tokens=4)
    total, tokens, per_response, summed, by_root, roots = 0.0, 0, [], [], 0.0, 0.0
    for r in range(6):
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
            summed.append(sum(terms) / 6)
            by_root += sum(terms) / math.sqrt(len(terms))
            roots += math.sqrt(len(terms))
    expected = {
        "token_mean": -total / max(1, tokens),
        "sample_mean": -sum(per_response) / max(1, len(per_response)),
        "sqrt_length": -by_root / max(1, roots),
        "constant_length": -sum(summed) / max(1, len(summed)),
    }
    for aggregation, value in expected.items():
        loss, _ = loss_and_gradient(batch, [list(range(6))], aggregation)
        # The oracle's sample mean divides by n + 1e-8, and so does ours; Σ √n is a float32.
        exact = aggregation in ("token_mean", "constant_length")
        assert loss == pytest.approx(value, rel=1e-12 if exact else 1e-6, abs=1e-12 if exact else 1e-8)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from(AGGREGATIONS))
def test_the_mean_of_a_constant_is_the_constant(lengths: list[int], aggregation: str) -> None:
    """Three of the aggregations are weighted means; the fourth gives the mean length over L instead."""
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    value = aggregate(torch.full(mask.shape, 1.7), mask, aggregation, constant_length=6)  # pyright: ignore[reportArgumentType]
    counted = [length for length in lengths if length]
    expected = 1.7 if counted else 0.0
    if aggregation == "constant_length" and counted:
        expected *= sum(counted) / len(counted) / 6
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rank_with_less_than_one_response_is_not_scaled_down(aggregation: str) -> None:
    # One response of one token on two ranks: each rank divides by half the global denominator and the mean of
    # the ranks' losses is the loss, (x / 0.5 + 0) / 2 = x.
    value = aggregate(
        torch.tensor([[3.0]]),
        torch.tensor([[True]]),
        aggregation,  # pyright: ignore[reportArgumentType]
        torch.tensor(0.5),
        constant_length=1,
    )
    assert value.item() == pytest.approx(6.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
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
        constant_length=3,
    )
    penalty, distance = kl_penalty(
        log_probs,
        torch.zeros(2, 3),
        torch.zeros(2, 3, dtype=torch.bool),
        aggregation=aggregation,  # pyright: ignore[reportArgumentType]
        constant_length=3,
    )
    (loss + penalty).backward()
    assert loss.item() == 0
    assert penalty.item() == 0
    assert distance["kl_to_start"] == 0
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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=st.integers(0, 10**6))
def test_the_kl_penalty_is_autograd_of_its_formula(aggregation: str, seed: int) -> None:
    """Against the formula token by token, its derivative 1 - π_ref / π_θ, and the four aggregations as loops."""
    batch = random_batch(seed, responses=6, tokens=4)
    mask, start = batch["response_mask"], batch["start_log_probs"]
    log_probs = batch["log_probs"].clone().requires_grad_()
    penalty, distance = kl_penalty(log_probs, start, mask, aggregation=aggregation, constant_length=6)  # pyright: ignore[reportArgumentType]
    penalty.backward()
    assert log_probs.grad is not None

    direct = batch["log_probs"].clone().requires_grad_()
    counts = mask.sum(1).tolist()
    counted = [n for n in counts if n]
    weight = {
        "token_mean": lambda n: 1 / sum(counted),
        "sample_mean": lambda n: 1 / n / len(counted),
        "sqrt_length": lambda n: n**-0.5 / sum(m**0.5 for m in counted),
        "constant_length": lambda n: 1 / 6 / len(counted),
    }[aggregation]
    expected, total = torch.zeros((), dtype=torch.float64), 0.0
    slope = torch.zeros(6, 4, dtype=torch.float64)
    for r, n in enumerate(counts):
        for t in range(n):
            ratio = torch.exp(start[r, t]) / torch.exp(direct[r, t])
            k3 = ratio - torch.log(ratio) - 1
            expected = expected + weight(n) * k3
            total += k3.item()
            slope[r, t] = weight(n) * (1 - math.exp(start[r, t] - batch["log_probs"][r, t]))
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-12)
    assert penalty.item() >= 0
    assert distance["kl_to_start"].item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(log_probs.grad, slope, rtol=1e-6, atol=1e-12)
    if counted:
        expected.backward()
        assert direct.grad is not None
        torch.testing.assert_close(log_probs.grad, direct.grad, rtol=1e-6, atol=1e-12)


def test_the_kl_penalty_is_nothing_at_the_start_and_keeps_its_digits_near_it() -> None:
    log_probs = (-3 * torch.rand(3, 5)).requires_grad_()
    mask = torch.ones(3, 5, dtype=torch.bool)
    penalty, distance = kl_penalty(log_probs, log_probs.detach(), mask, aggregation="token_mean")
    penalty.backward()
    assert penalty.item() == 0
    assert distance["kl_to_start"] == 0
    assert log_probs.grad is not None
    assert (log_probs.grad == 0).all()
    # r = 2^-12 is a float32; k3 = r² / 2 + r³ / 6 = 2.98e-8, half of what 1 + r is rounded to.
    r = 2.0**-12
    near, _ = kl_penalty(
        torch.zeros(1, 1), torch.full((1, 1), r), torch.ones(1, 1, dtype=torch.bool), aggregation="token_mean"
    )
    assert near.item() == pytest.approx(r**2 / 2 + r**3 / 6, rel=1e-3)


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
    with pytest.raises(ValueError, match="constant_length is 0"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "constant_length")
    with pytest.raises((ValueError, TypeCheckError), match="std"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.long), "sd")  # pyright: ignore[reportArgumentType]
