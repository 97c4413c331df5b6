"""Statistics against closed forms, enumeration, scipy and simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_pl.errors import UserError
from dapo_pl.evaluation import (
    EvaluationResult,
    avg_at_k,
    bootstrap_interval,
    cons_at_k,
    paired_difference,
    pass_at_k,
    per_problem_avg_at_k,
    per_problem_cons_at_k,
    per_problem_pass_at_k,
)

unhurried = settings(deadline=None)  # a busy machine is no failure


def rows_of(entries: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[list[list[Any]]]:
    """[problems][samples], as many samples in every row."""
    return st.integers(1, most).flatmap(
        lambda samples: st.lists(st.lists(entries, min_size=samples, max_size=samples), min_size=1, max_size=5)
    )


tables = rows_of(st.booleans())
answer_tables = rows_of(st.sampled_from([None, 1, 2, 3, -4]))


def vote(row: tuple[int | None, ...], truth: int) -> float:
    """Majority with ties shared, the obvious way."""
    stated = [answer for answer in row if answer is not None]
    leaders = {answer for answer in stated if stated.count(answer) == max(map(stated.count, stated))}
    return 1 / len(leaders) if truth in leaders else 0.0


# avg, pass and cons


@unhurried
@given(tables, st.data())
def test_avg_is_the_mean_of_all_samples(table: list[list[bool]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(table[0])))
    draws = [np.mean(draw) for row in table for draw in itertools.combinations(row, k)]
    assert avg_at_k(table) == pytest.approx(sum(map(sum, table)) / (len(table) * len(table[0])))
    assert avg_at_k(table, k) == pytest.approx(np.mean(draws))


@unhurried
@given(tables, st.data())
def test_pass_is_the_share_of_subsets_with_a_right_sample(table: list[list[bool]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(table[0])))
    shares = [np.mean([any(subset) for subset in itertools.combinations(row, k)]) for row in table]
    assert pass_at_k(table, k) == pytest.approx(np.mean(shares))


@pytest.mark.parametrize(("right", "n", "k"), [(3, 1000, 100), (1, 1000, 1), (500, 1000, 999), (1, 4000, 2000)])
def test_pass_with_large_counts(right: int, n: int, k: int) -> None:
    exact = 1 - comb(n - right, k) / comb(n, k)
    found = per_problem_pass_at_k([[True] * right + [False] * (n - right)], k)
    assert found[0] == pytest.approx(exact, rel=1e-10)


@unhurried
@given(answer_tables, st.sampled_from([1, 2, 9]), st.data())
def test_cons_is_the_vote_of_every_subset(table: list[list[int | None]], truth: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(table[0])))
    expected = [np.mean([vote(draw, truth) for draw in itertools.combinations(row, k)]) for row in table]
    assert per_problem_cons_at_k(table, [truth] * len(table), k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([7, 7, 5], 1),
        ([7, 5], 1 / 2),
        ([7, 5, 3], 1 / 3),
        ([5, 5, 7], 0),
        ([7, None, None, None], 1),  # nobody else states an answer
        ([None, None], 0),
        ([5, 3, 5, 3], 0),
    ],
)
def test_cons_by_hand(row: list[int | None], expected: float) -> None:
    assert cons_at_k([row], [7]) == pytest.approx(expected)


def test_cons_on_a_table_of_right_and_wrong() -> None:
    assert per_problem_cons_at_k([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0]]).tolist() == [0.5, 1, 0]
    # Two of [right, right, wrong]: both right in 1 of 3 draws, a tie in 2 of 3.
    assert cons_at_k([[True, True, False]], k=2) == pytest.approx(1 / 3 + 2 / 3 / 2)


def test_cons_of_many_samples_is_a_hypergeometric_sum() -> None:
    right, n, k = 130, 256, 65
    tail = scipy.stats.hypergeom(n, right, k).sf(k // 2)
    assert cons_at_k([[True] * right + [False] * (n - right)], k=k) == pytest.approx(tail)


@unhurried
@given(tables)
def test_pass_grows_with_k_from_avg(table: list[list[bool]]) -> None:
    curve = [pass_at_k(table, k) for k in range(1, len(table[0]) + 1)]
    assert curve[0] == pytest.approx(avg_at_k(table))
    assert np.all(np.diff(curve) >= -1e-12)
    assert curve[-1] == pass_at_k(table) == np.mean([any(row) for row in table])


@unhurried
@given(answer_tables, st.sampled_from([1, 2]), st.randoms(use_true_random=False), st.data())
def test_bounds_and_order(table: list[list[int | None]], truth: int, random: Any, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(table[0])))
    truths = [truth] * len(table)
    correct = [[answer == truth for answer in row] for row in table]
    values = np.array([avg_at_k(correct, k), pass_at_k(correct, k), cons_at_k(table, truths, k), cons_at_k(correct)])
    assert np.all((values >= 0) & (values <= 1))
    assert cons_at_k(table, truths, k) <= pass_at_k(correct, k) + 1e-12
    assert cons_at_k(correct, k=k) <= cons_at_k(table, truths, k) + 1e-12
    shuffled = [random.sample(row, len(row)) for row in random.sample(table, len(table))]
    right = [[answer == truth for answer in row] for row in shuffled]
    again = [avg_at_k(right, k), pass_at_k(right, k), cons_at_k(shuffled, truths, k), cons_at_k(right)]
    assert values == pytest.approx(again)


@pytest.mark.parametrize(
    "kind",
    [
        np.array,
        torch.tensor,
        lambda table: torch.tensor(table, dtype=torch.bfloat16).requires_grad_(),
        lambda table: [torch.tensor(row) for row in table],
        lambda table: [np.array(row) for row in table],
        lambda table: tuple(map(tuple, table)),
    ],
)
def test_kinds_of_tables(kind: Callable[[Any], Any]) -> None:
    correct = kind([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert avg_at_k(correct) == 0.5
    assert pass_at_k(correct, 2) == pytest.approx((1 + 2 / 3) / 2)
    assert cons_at_k(correct) == 0.5
    nan = float("nan")
    answers = kind([[7.0, 5.0, 7.0], [nan, nan, 3.0]])
    assert cons_at_k(answers, torch.tensor([7, 3])) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: avg_at_k([]), "at least one problem"),
        (lambda: avg_at_k([[]]), "at least one problem"),
        (lambda: avg_at_k([True, False]), "table"),
        (lambda: avg_at_k([[True], [True, False]]), "as many samples"),
        (lambda: avg_at_k([[0.5, 1]]), "something else"),
        (lambda: pass_at_k([[True, None]]), "something else"),
        (lambda: cons_at_k([[42, 41]]), "something else"),
        (lambda: cons_at_k([[42, 41]], [42, 41]), "2 truths"),
        (lambda: avg_at_k([[True]], 2), "must be 1 to 1"),
        (lambda: pass_at_k([[True]], 0), "must be 1 to 1"),
        (lambda: cons_at_k([[True]], k=2), "must be 1 to 1"),
    ],
)
def test_what_is_no_table_is_refused(call: Callable[[], float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Interval


def avg(easy: float, hard: float, samples: int) -> tuple[Callable[[np.random.Generator, int], np.ndarray], float]:
    """avg@samples of problems whose difficulties are Beta(easy, hard), and its true mean."""
    return lambda rng, problems: rng.binomial(samples, rng.beta(easy, hard, problems)) / samples, easy / (easy + hard)


def right(share: float) -> tuple[Callable[[np.random.Generator, int], np.ndarray], float]:
    """Values of 0 and 1, as of pass@k and cons@k."""
    return lambda rng, problems: rng.binomial(1, share, problems).astype(float), share


def coverage(shape: Any, problems: int, evaluations: int) -> float:
    draw, mean = shape
    rng = np.random.default_rng(problems)
    intervals = [bootstrap_interval(draw(rng, problems), resamples=999, seed=run) for run in range(evaluations)]
    return float(np.mean([interval.low <= mean <= interval.high for interval in intervals]))


ORDINARY = {
    "half way": avg(0.8, 0.8, 8),
    "alike": avg(20, 20, 8),
    "strong": avg(8, 0.5, 8),
    "weak on AIME": avg(0.3, 3, 32),
    "two of three": right(2 / 3),
}
EXTREME = {
    "pass of a strong model": right(0.95),
    "pass of a weak model": right(0.03),
    "all but unsolved": avg(0.1, 2, 32),
}


@pytest.mark.parametrize("shape", ORDINARY.values(), ids=ORDINARY.keys())
def test_interval_of_100_problems_covers_what_it_says(shape: Any) -> None:
    assert 0.93 <= coverage(shape, 100, 1000) <= 0.97


@pytest.mark.parametrize("shape", [*ORDINARY.values(), *EXTREME.values()], ids=[*ORDINARY, *EXTREME])
def test_interval_of_30_problems_covers_no_less(shape: Any) -> None:
    assert coverage(shape, 30, 1000) >= 0.93


@pytest.mark.parametrize("shape", EXTREME.values(), ids=EXTREME.keys())
def test_interval_near_a_bound_covers_no_less(shape: Any) -> None:
    assert coverage(shape, 100, 500) >= 0.94


@pytest.mark.parametrize("values", [[1.0] * 29 + [0.0], [0.0] * 29 + [1.0], [1.0] * 28 + [0.0] * 2])
def test_nearly_all_the_same_gets_scipys_bca(values: list[float]) -> None:
    # A studentised interval would begin or end at the mean here.
    scipys = scipy.stats.bootstrap((values,), np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    interval = bootstrap_interval(values)
    inner = interval.low if np.mean(values) > 0.5 else interval.high
    assert inner == pytest.approx(scipys.low if np.mean(values) > 0.5 else scipys.high, abs=1e-9)


def test_interval_is_the_wider_of_scipys_bca_and_the_studentised() -> None:
    # Skewed: the studentised interval reaches farther on both sides, and far above BCa.
    values = np.random.default_rng(4).beta(0.4, 3, size=30)
    bca = scipy.stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=50_000, rng=np.random.default_rng(0)
    ).confidence_interval
    drawn = np.random.default_rng(99).choice(values, size=(200_000, 30))
    t = (drawn.mean(axis=1) - values.mean()) / scipy.stats.sem(drawn, axis=1)
    low, high = values.mean() - scipy.stats.sem(values) * np.percentile(t, [97.5, 2.5])
    assert low < bca.low < bca.high + 0.01 < high
    # With 10,000 resamples the bounds scatter by 0.0007 and 0.0021 (standard deviation); here by a quarter of it.
    interval = bootstrap_interval(values, resamples=200_000)
    assert interval.low == pytest.approx(low, abs=0.001)
    assert interval.high == pytest.approx(high, abs=0.003)


def test_interval_is_close_to_students_and_scipys_where_those_hold() -> None:
    values = np.random.default_rng(0).uniform(0.2, 0.8, size=200)
    for level in (0.8, 0.95, 0.99):
        interval = bootstrap_interval(values, level=level)
        student = scipy.stats.t.interval(level, 199, loc=values.mean(), scale=scipy.stats.sem(values))
        bca = scipy.stats.bootstrap((values,), np.mean, method="BCa", confidence_level=level).confidence_interval
        for low, high in (student, bca):
            assert interval.low == pytest.approx(low, abs=0.004)
            assert interval.high == pytest.approx(high, abs=0.004)


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ([1.0] * 30, (0.025 ** (1 / 30), 1)),
        ([0.0] * 30, (0, 1 - 0.025 ** (1 / 30))),
        ([1.0], (0.025, 1)),
        ([0.0], (0, 0.975)),
        ([0.5], (0.0125, 0.9875)),
        ([1 / 3, 1 - 2 / 3], (0.025**0.5 / 3, 1 - 2 / 3 * 0.025**0.5)),  # equal but for rounding
    ],
)
def test_no_spread_is_not_certainty(values: list[float], bounds: tuple[float, float]) -> None:
    interval = bootstrap_interval(values)
    assert (interval.low, interval.high) == pytest.approx(bounds)
    if values[0] in (0, 1):
        exact = scipy.stats.binomtest(int(sum(values)), len(values)).proportion_ci(method="exact")
        assert (interval.low, interval.high) == pytest.approx((exact.low, exact.high))


def test_rounding_is_no_spread_of_a_resample() -> None:
    # The mean of thirds differs from a third by rounding; divided by itself that would be a huge t.
    interval = bootstrap_interval([1 / 3] * 30 + [1.0])
    assert 0.3 < interval.low <= 1 / 3 + 1e-9
    assert 0.35 < interval.high < 0.6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.125, 1 / 3, 0.5, 1.0]), min_size=1, max_size=40), st.integers(0, 5))
def test_interval_holds_the_mean_and_keeps_its_promises(values: list[float], seed: int) -> None:
    interval = bootstrap_interval(values, seed=seed, resamples=300)
    assert 0 <= interval.low <= np.mean(values) <= interval.high <= 1
    assert interval.low < interval.high
    assert interval == bootstrap_interval(torch.tensor(values, dtype=torch.float64), seed=seed, resamples=300)
    wider = bootstrap_interval(values, seed=seed, resamples=300, level=0.99)
    assert wider.low <= interval.low + 1e-12
    assert wider.high >= interval.high - 1e-12
    mirrored = bootstrap_interval([1 - value for value in values], seed=seed, resamples=300)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([], {}),
        ([[0.5, 0.5]], {}),
        ([0.5, 1.5], {}),
        ([0.5, float("nan")], {}),
        ([0.5, 0.6], {"level": 95}),
        ([0.5, 0.6], {"resamples": 0}),
    ],
)
def test_what_has_no_interval_is_refused(values: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"values|level"):
        bootstrap_interval(values, **options)


# Paired difference


def enumerated(difference: list[float]) -> float:
    """Two-sided sign-flip p-value over every flip."""
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, difference, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(difference))
    ]
    return float(np.mean([total >= abs(sum(difference)) - 1e-9 for total in sums]))


@unhurried
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_p_value_of_few_problems_is_exact(pairs: list[tuple[int, int]]) -> None:
    before, after = (np.array(values) / 3 for values in zip(*pairs, strict=True))
    found = paired_difference(before, after, resamples=1000)
    assert found.p_value == enumerated((after - before).tolist())
    swapped = paired_difference(after, before, resamples=1000)
    assert swapped.p_value == found.p_value
    assert swapped.mean == pytest.approx(-found.mean)
    assert -1 <= found.low <= found.mean <= found.high <= 1


def test_p_value_of_more_problems_is_close_to_exact() -> None:
    difference = np.array([3, 2, -1, 1, 4, -2, 1, 3, -3, 2, 1, -1, 2, 1, 0, 0]) / 8
    before, after = np.full(16, 0.4), 0.4 + difference
    exact = enumerated(difference[:14].tolist())
    assert paired_difference(before, after, resamples=2**14).p_value == exact
    found = paired_difference(before, after)
    deviation = (exact * (1 - exact) / 10_000) ** 0.5
    assert found.p_value == pytest.approx(exact, abs=4 * deviation)
    many = [paired_difference(before, after, seed=seed).p_value for seed in range(30)]
    assert np.mean(many) == pytest.approx(exact, abs=4 * deviation / 30**0.5)
    assert 0.5 * deviation < np.std(many) < 1.5 * deviation
    scipys = scipy.stats.permutation_test((difference,), np.mean, permutation_type="samples", n_resamples=2**16)
    assert scipys.pvalue == pytest.approx(exact)


def test_p_value_is_never_zero() -> None:
    assert paired_difference([0.0] * 60, [1.0] * 60).p_value == pytest.approx(1 / 10_001)
    assert paired_difference([0.0] * 4, [1.0] * 4).p_value == 2 / 2**4


def test_paired_difference_sees_what_the_problems_share() -> None:
    rng = np.random.default_rng(2)
    before = avg(0.8, 0.8, 8)[0](rng, 100)
    after = np.clip(before + rng.choice([0, 0.125, 0.25], size=100), 0, 1)
    found = paired_difference(before, after)
    assert found.problems == 100
    assert found.mean == pytest.approx((after - before).mean())
    assert 0 < found.low < found.mean < found.high
    assert found.p_value < 0.001
    student = scipy.stats.t.interval(0.95, 99, loc=found.mean, scale=scipy.stats.sem(after - before))
    assert (found.low, found.high) == pytest.approx(student, abs=0.003)
    apart = bootstrap_interval(after)
    assert found.high - found.low < 0.5 * (apart.high - apart.low)


def test_agreement_on_every_problem_is_not_certainty() -> None:
    # Of 30 problems without a change, a share of 1 - 0.025 ** (1 / 30) may change unseen, up or down.
    found = paired_difference([0.0, 1.0, 0.5] * 10, [0.0, 1.0, 0.5] * 10)
    assert (found.mean, found.p_value) == (0, 1)
    assert (found.low, found.high) == pytest.approx((-0.11570, 0.11570), abs=1e-4)


def test_paired_tables_and_values_agree() -> None:
    before, after = [[0, 0, 1, 0], [1, 0, 1, 1], [0, 0, 0, 1]], torch.tensor([[1, 1], [1, 1], [0, 1]])
    assert paired_difference(before, after) == paired_difference([0.25, 0.75, 0.25], [1, 1, 0.5])


@pytest.mark.parametrize("pair", [([0.5], [0.5, 0.5]), ([[1]], [[1], [0]]), (0.5, 0.5)])
def test_other_problems_are_not_paired(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="same problems"):
        paired_difference(*pair)


def test_p_value_and_paired_interval_when_nothing_differs() -> None:
    rng = np.random.default_rng(3)
    rejected, covered = [], []
    for _ in range(1000):
        difficulty = rng.beta(0.8, 0.8, 100)
        before, after = rng.binomial(8, difficulty, size=(2, 100)) / 8
        found = paired_difference(before, after, resamples=499)
        rejected.append(found.p_value <= 0.05)
        covered.append(found.low <= 0 <= found.high)
    assert 0.03 <= np.mean(rejected) <= 0.07
    assert 0.93 <= np.mean(covered) <= 0.97


# EvaluationResult


def example() -> EvaluationResult:
    return EvaluationResult(
        problem_ids=["a", "b"],
        truths=[1, 2],
        answers=[[1, 1, None, 3], [5, 5, 2, None]],
        correct=[[True, True, False, False], [False, False, True, False]],
        lengths=[[1, 2, 3, 4], [5, 6, 7, 8]],
        truncated=[[False] * 4, [False, False, False, True]],
    )


def test_summary() -> None:
    summary = example().summary()
    assert list(summary) == [
        *(f"{name}{end}" for name in ("avg@4", "pass@4", "cons@4") for end in ("", "_low", "_high")),
        "response_length_mean",
        "truncated_share",
    ]
    assert (summary["avg@4"], summary["pass@4"], summary["cons@4"]) == (0.375, 1, 0.5)
    assert (summary["response_length_mean"], summary["truncated_share"]) == (4.5, 0.125)
    for name, values in (("avg@4", [0.5, 0.25]), ("pass@4", [1, 1]), ("cons@4", [1, 0])):
        interval = bootstrap_interval(values)
        assert (summary[f"{name}_low"], summary[f"{name}_high"]) == (interval.low, interval.high)
    assert all(type(value) is float for value in summary.values())


@unhurried
@given(st.data())
def test_result_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    table = data.draw(rows_of(st.none() | st.integers(), most=3))
    zeros = np.zeros((len(table), len(table[0])), dtype=np.int64)
    ids = data.draw(st.lists(st.text(), min_size=len(table), max_size=len(table), unique=True))
    result = EvaluationResult(ids, list(range(len(table))), table, zeros == 0, torch.tensor(zeros), zeros)  # pyright: ignore[reportArgumentType]
    path = tmp_path_factory.mktemp("result") / "step.json"
    result.to_json(path)
    result.to_json(str(path))
    assert EvaluationResult.from_json(path) == result
    assert [path.name for path in path.parent.iterdir()] == ["step.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    example().to_json(path)
    write = Path.write_text

    def disk_full(self: Path, text: str, **options: Any) -> int:
        write(self, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(OSError, match="No space"):
        example().to_json(path)
    assert EvaluationResult.from_json(path) == example()
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"problem_ids": []}', '"text"', "\x00"])
def test_another_file_is_no_result(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"step\.json is not a saved evaluation"):
        EvaluationResult.from_json(path)


def test_tables_that_do_not_fit_are_refused() -> None:
    values = vars(example())
    for name, value in (
        ("problem_ids", ["a", "a"]),
        ("problem_ids", ["a", "b", "c"]),
        ("truths", [1]),
        ("lengths", [[1, 2], [3, 4]]),
        ("truncated", [[False] * 4]),
        ("answers", [[1, 1, 1, 1], [1, 1, 1]]),
    ):
        with pytest.raises(ValueError, match=r"problem|samples"):
            EvaluationResult(**{**values, name: value})


def test_results_are_paired_by_problem() -> None:
    before = example()
    after = EvaluationResult(
        problem_ids=["b", "a"],
        truths=[2, 1],
        answers=[[2, 2], [3, 3]],
        correct=[[True, True], [False, False]],
        lengths=[[1, 2], [3, 4]],
        truncated=[[False] * 2] * 2,
    )
    assert after.ordered_like(before).lengths == [[3, 4], [1, 2]]
    assert paired_difference(before, after) == paired_difference([0.5, 0.25], per_problem_avg_at_k([[0], [1]]))
    assert paired_difference(before, after, statistic="pass").mean == -0.5
    assert paired_difference(before, after, statistic="cons").mean == 0
    other = EvaluationResult(**{**vars(after), "problem_ids": ["b", "c"]})
    with pytest.raises(ValueError, match="'a', 'c'"):
        paired_difference(before, other)
    with pytest.raises(ValueError, match="one truth"):
        paired_difference(before, EvaluationResult(**{**vars(after), "truths": [3, 1]}))
