"""Eq. 7 and 13 at their corners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_pl.rewards import adaptive_overlong_penalty, correctness, give_rewards, overlong_penalty
from dapo_pl.rollout.types import Response


@pytest.mark.parametrize(
    ("l_max", "l_cache", "length", "expected"),
    [
        # paper text: l_max 16384, l_cache 4096
        (16384, 4096, 0, 0.0),
        (16384, 4096, 12288, 0.0),
        (16384, 4096, 12289, -1 / 4096),
        (16384, 4096, 14336, -0.5),
        (16384, 4096, 14000, -1712 / 4096),
        (16384, 4096, 16384, -1.0),
        (16384, 4096, 16385, -1.0),
        (16384, 4096, 20480, -1.0),
        # released recipe: l_max 20480
        (20480, 4096, 16384, 0.0),
        (20480, 4096, 18432, -0.5),
        (20480, 4096, 20480, -1.0),
        # no ramp at all
        (10, 0, 10, 0.0),
        (10, 0, 11, -1.0),
    ],
)
def test_equation_13(l_max: int, l_cache: int, length: int, expected: float) -> None:
    penalty = overlong_penalty(torch.tensor([length]), l_max=l_max, l_cache=l_cache)
    assert penalty.item() == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 30000), st.data())
def test_the_penalty_is_the_piecewise_definition(l_max: int, data: st.DataObject) -> None:
    l_cache = data.draw(st.integers(1, l_max))
    length = data.draw(st.integers(0, 2 * l_max))
    if length <= l_max - l_cache:
        expected = 0.0
    elif length <= l_max:
        expected = ((l_max - l_cache) - length) / l_cache
    else:
        expected = -1.0
    assert overlong_penalty(torch.tensor([length]), l_max=l_max, l_cache=l_cache).item() == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(("l_max", "l_cache"), [(10, 11), (10, -1)])
def test_an_impossible_ramp_is_refused(l_max: int, l_cache: int) -> None:
    with pytest.raises(ValueError, match="l_cache"):
        overlong_penalty(torch.tensor([5]), l_max=l_max, l_cache=l_cache)


@pytest.mark.parametrize(
    ("history", "percentile", "expected"),
    [
        # 0, 10, ..., 100: start 90, quartiles 25 and 75, width 50.
        (range(0, 101, 10), 90, {0: 0.0, 90: 0.0, 91: -0.02, 115: -0.5, 140: -1.0, 500: -1.0}),
        # The same shuffled by hand, start at the median: 50.
        ((50, 0, 100, 30, 20, 90, 10, 80, 70, 40, 60), 50, {50: 0.0, 75: -0.5, 100: -1.0}),
        # Between two values: of 4 and 8 the 90th percentile is 4 + 0.9 · 4 = 7.6, quartiles 5 and 7, width 2.
        ((8, 4), 90, {7: 0.0, 8: -0.2, 9: -0.7, 10: -1.0}),
        # All alike: the spread is 0 and the width 1 token.
        ((6, 6, 6), 90, {6: 0.0, 7: -1.0}),
        # A single value, and the ends of the scale.
        ((5,), 90, {5: 0.0, 6: -1.0}),
        ((1, 2, 3, 4, 5), 0, {1: 0.0, 2: -0.5, 3: -1.0}),
        ((1, 2, 3, 4, 5), 100, {5: 0.0, 6: -0.5, 7: -1.0}),
        # Nothing seen yet.
        ((), 90, {0: 0.0, 10**6: 0.0}),
    ],
)
def test_the_adaptive_ramp_by_hand(history: Sequence[int], percentile: float, expected: dict[int, float]) -> None:
    penalty = adaptive_overlong_penalty(
        torch.tensor(list(expected)), torch.tensor(list(history)), percentile=percentile
    )
    assert penalty.tolist() == pytest.approx(list(expected.values()), abs=1e-6)
    assert not torch.signbit(penalty[penalty == 0]).any()


@given(
    st.lists(st.integers(0, 20480), min_size=1, max_size=60),
    st.lists(st.integers(0, 30000), min_size=1, max_size=10),
    st.floats(0, 100),
)
def test_the_adaptive_ramp_is_numpys_percentiles(history: list[int], lengths: list[int], percentile: float) -> None:
    start, lower, upper = np.percentile(history, [percentile, 25, 75])
    expected = -np.clip((np.array(lengths) - start) / max(1, upper - lower), 0, 1)
    penalty = adaptive_overlong_penalty(torch.tensor(lengths), torch.tensor(history), percentile=percentile)
    assert penalty.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_percentile_off_the_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="percentile is 101"):
        adaptive_overlong_penalty(torch.tensor([1]), torch.tensor([1]), percentile=101)


def response(length: int, correct: bool) -> Response:
    return Response(token_ids=[0] * length, text="", truncated=False, policy_version=0, correct=correct)


def test_terms_add_up_and_leave_correctness_alone() -> None:
    responses = [response(14336, True), response(14336, False), response(100, True)]
    terms = {
        "correctness": correctness,
        "overlong_penalty": lambda rs: overlong_penalty(
            torch.tensor([r.length for r in rs]), l_max=16384, l_cache=4096
        ),
    }
    give_rewards(responses, terms)
    assert [r.reward for r in responses] == [0.5, -1.5, 1.0]
    assert [r.correct for r in responses] == [True, False, True]


def test_a_term_that_does_not_give_one_number_per_response_is_named() -> None:
    with pytest.raises(ValueError, match="'short'"):
        give_rewards([response(1, True), response(1, True)], {"short": lambda rs: torch.zeros(1)})
