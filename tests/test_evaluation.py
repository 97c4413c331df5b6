"""Statistics against closed forms, enumeration, scipy and simulation."""

from __future__ import annotations

import itertools
from math import comb
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dapo_pl.evaluation import (
    EvaluationResult,
    avg_at_k,
    bootstrap_interval,
    cons_at_k,
    paired_difference,
    pass_at_k,
    per_problem_pass_at_k,
)

tables = st.integers(1, 6).flatmap(
    lambda samples: st.lists(st.lists(st.booleans(), min_size=samples, max_size=samples), min_size=1, max_size=6)
)


@given(tables)
def test_avg_is_the_mean_of_all_samples(table: list[list[bool]]) -> None:
    assert avg_at_k(table) == pytest.approx(sum(map(sum, table)) / (len(table) * len(table[0])))


@given(tables, st.data())
def test_pass_is_the_share_of_subsets_with_a_right_sample(table: list[list[bool]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(table[0])))
    shares = [np.mean([any(subset) for subset in itertools.combinations(row, k)]) for row in table]
    assert pass_at_k(table, k) == pytest.approx(np.mean(shares))


def test_pass_with_large_counts() -> None:
    row = [True] * 3 + [False] * 997
    exact = 1 - comb(997, 100) / comb(1000, 100)
    assert per_problem_pass_at_k([row], 100)[0] == pytest.approx(exact, rel=1e-12)


@given(st.lists(st.sampled_from([None, 1, 2, 3]), min_size=1, max_size=7), st.sampled_from([1, 2, 3, 4]))
def test_cons_is_a_vote_with_ties_broken_at_random(row: list[int | None], truth: int) -> None:
    stated = [answer for answer in row if answer is not None]
    top = max((stated.count(answer) for answer in stated), default=0)
    leaders = {answer for answer in stated if stated.count(answer) == top}
    assert cons_at_k([row], [truth]) == pytest.approx(1 / len(leaders) if truth in leaders else 0)


def test_cons_on_a_table_of_right_and_wrong() -> None:
    assert cons_at_k([[True, True, False], [True, False], [False, False, True]][:1]) == 1
    assert cons_at_k([[True, False]]) == 0.5
    assert cons_at_k([[False, False, True]]) == 0


def test_interval_is_close_to_students_where_that_holds() -> None:
    values = np.random.default_rng(0).uniform(0.2, 0.8, size=200)
    interval = bootstrap_interval(values)
    student = scipy.stats.t.interval(0.95, 199, loc=values.mean(), scale=scipy.stats.sem(values))
    percentile = scipy.stats.bootstrap((values,), np.mean, method="percentile").confidence_interval
    for low, high in (student, percentile):
        assert interval.low == pytest.approx(low, abs=0.004)
        assert interval.high == pytest.approx(high, abs=0.004)


def simulated(rng: np.random.Generator, problems: int) -> np.ndarray:
    """avg@8 of problems whose difficulties are spread like those of a model halfway there."""
    return rng.binomial(8, rng.beta(0.8, 0.8, size=problems)) / 8


@pytest.mark.parametrize("problems", [30, 100])
def test_interval_covers_what_it_says(problems: int) -> None:
    rng = np.random.default_rng(5)
    covered = sum(
        interval.low <= 0.5 <= interval.high
        for interval in (bootstrap_interval(simulated(rng, problems), resamples=999) for _ in range(2000))
    )
    assert 0.93 <= covered / 2000 <= 0.97


@pytest.mark.parametrize(("right", "bounds"), [(1.0, (0.8843, 1.0)), (0.0, (0.0, 0.1157))])
def test_thirty_of_thirty_is_not_certainty(right: float, bounds: tuple[float, float]) -> None:
    # Clopper-Pearson: 0.025 ** (1 / 30) = 0.8843
    interval = bootstrap_interval([right] * 30)
    assert (interval.low, interval.high) == pytest.approx(bounds, abs=1e-4)


def test_paired_difference_sees_what_the_problems_share() -> None:
    rng = np.random.default_rng(2)
    before = simulated(rng, 100)
    after = np.clip(before + rng.choice([0, 0.125, 0.25], size=100), 0, 1)
    found = paired_difference(before, after)
    assert found.mean == pytest.approx((after - before).mean())
    assert 0 < found.low < found.mean < found.high
    assert found.p_value < 0.001
    wilcoxon = scipy.stats.permutation_test(
        (after - before,),
        np.mean,
        permutation_type="samples",
        n_resamples=2000,
        rng=np.random.default_rng(0),
    )
    assert found.p_value == pytest.approx(wilcoxon.pvalue, abs=0.002)
    none = paired_difference(before, before)
    assert (none.mean, none.p_value) == (0, 1)
    with pytest.raises(ValueError, match="same ones"):
        paired_difference(before, after[:-1])


def test_permutation_p_value_is_uniform_when_nothing_differs() -> None:
    rng = np.random.default_rng(3)
    p_values = [paired_difference(simulated(rng, 40), simulated(rng, 40), resamples=499).p_value for _ in range(400)]
    assert 0.02 <= np.mean(np.array(p_values) <= 0.05) <= 0.085


def test_result_round_trip_and_summary(tmp_path: Path) -> None:
    result = EvaluationResult(
        problem_ids=["a", "b"],
        truths=[1, 2],
        answers=[[1, 1, None, 3], [5, 5, 2, None]],
        correct=[[True, True, False, False], [False, False, True, False]],
        lengths=[[1, 2, 3, 4], [5, 6, 7, 8]],
        truncated=[[False] * 4, [False, False, False, True]],
    )
    result.to_json(tmp_path / "e.json")
    assert EvaluationResult.from_json(tmp_path / "e.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
    summary = result.summary()
    assert summary["avg@4"] == 0.375
    assert summary["pass@4"] == 1
    assert summary["cons@4"] == 0.5
    assert summary["response_length_mean"] == 4.5
    assert summary["truncated_share"] == 0.125
    for name in ("avg@4", "pass@4", "cons@4"):
        assert summary[f"{name}_low"] <= summary[name] <= summary[f"{name}_high"]
