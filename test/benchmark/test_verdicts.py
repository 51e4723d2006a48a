"""Verdicts on made-up contests: their error rates, and what they call faster, slower and the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab import verdicts
from lab.verdicts import CANNOT_TELL, FASTER, SAME, SLOWER, judge


def contest(
    seed: int, pairs: int, shifts: list[float], noise: float = 0.03, tails: bool = False
) -> np.ndarray:
    """Logarithms of ratios that hang together, as those of one process do."""
    rng = np.random.default_rng(seed)
    draw = rng.standard_t if tails else lambda _, size: rng.normal(size=size)
    common, own = draw(3, (pairs, 1)), draw(3, (pairs, len(shifts)))
    return np.array(shifts) + noise * (common + own)


def names(count: int) -> list[str]:
    return [f"metric {i}" for i in range(count)]


@pytest.mark.parametrize("tails", [False, True], ids=["normal", "heavy_tails"])
@pytest.mark.parametrize("pairs", [8, 20])
def test_false_alarms_are_as_rare_as_stated(pairs: int, tails: bool) -> None:
    """With 20 metrics, in 600 contests between equal sides, of which 6 should raise one."""
    alarms = 0
    for seed in range(600):
        logs = contest(seed, pairs, [0.0] * 20, tails=tails)
        mean, half = verdicts.intervals(logs, num_flips=2000)
        alarms += bool((np.abs(mean) > half).any())
    # Of Binomial(600, 0.01), 15 and more have a chance of 0.1%, and none at all one of 0.2%.
    assert 1 <= alarms <= 14, alarms


def test_what_changed_raises_no_alarm_about_what_did_not() -> None:
    """Ten metrics of twenty are slower by a fifth; of 600 contests 6 should raise one."""
    alarms, misses = 0, 0
    for seed in range(600):
        logs = contest(seed, 12, [0.2] * 10 + [0.0] * 10, noise=0.02)
        mean, half = verdicts.intervals(logs, num_flips=2000)
        alarms += bool((np.abs(mean) > half)[10:].any())
        misses += int((np.abs(mean - 0.2) > half)[:10].sum())
    assert alarms <= 14, alarms
    # Of those that did change, each interval alone misses the change in one of a hundred, if any more.
    assert misses <= 0.015 * 6000, misses


@pytest.mark.parametrize(
    ("pairs", "slower", "shift"), [(9, 4, 0.35), (18, 6, 0.5), (18, 8, 0.3), (16, 2, 0.3)]
)
def test_slower_in_some_processes_is_not_the_same(pairs: int, slower: int, shift: float) -> None:
    """Numbers that are cut are no reason to call the rest the same."""
    for seed in range(20):
        logs = contest(seed, pairs, [0.0, 0.0], noise=0.001)
        logs[:slower, 1] += shift
        same, unknown = judge(names(2), logs)
        assert (same.verdict, unknown.verdict) == (SAME, CANNOT_TELL)


def test_a_difference_is_found_as_often_as_its_size_says() -> None:
    found = {0.02: 0, 0.05: 0, 0.1: 0}
    for shift in found:
        for seed in range(100):
            logs = contest(seed, 16, [0.0] * 9 + [shift])
            judged = judge(names(10), logs)
            found[shift] += judged[-1].verdict == SLOWER
    # A standard error of 1.06%; the bound of ten metrics lies at some 4.2 of them.
    assert found[0.02] < 20
    assert found[0.05] > 55
    assert found[0.1] == 100


def test_a_neighbour_in_one_pair_hides_nothing() -> None:
    """A side that was slowed by a third in one pair of sixteen."""
    logs = contest(3, 16, [0.1, 0.0], noise=0.01)
    logs[5] += 0.3
    slow, same = judge(names(2), logs)
    # What is usual in the first column is some 0.1, and the pair is cut to three times that; in the
    # second, to far less.
    assert slow.verdict == SLOWER and slow.ratio == pytest.approx(math.exp(0.1), rel=0.03)
    # But whether a pair in sixteen is the neighbour's or the head's own cannot be told.
    assert same.ratio == pytest.approx(1, abs=0.01) and same.verdict == CANNOT_TELL
    usual = np.median(np.abs(logs), axis=0)
    assert np.abs(verdicts.clipped(logs)).max(0) == pytest.approx(
        np.minimum(np.abs(logs).max(0), 2.9652 * usual)
    )
    # Signs do not matter to it, and a column that is 0 as a rule stays.
    signs = np.where(np.arange(16) % 3 == 0, -1.0, 1.0)[:, None]
    assert (verdicts.clipped(signs * logs) == signs * verdicts.clipped(logs)).all()
    rare = np.zeros((9, 1))
    rare[4] = 0.5
    assert (verdicts.clipped(rare) == rare).all()


def test_the_four_verdicts() -> None:
    flat = np.array([-1.0, 1.0] * 8)[:, None]
    shifts = {"much": 0.2, "less": -0.2, "hardly": 0.004, "nothing": 0.0, "noise": 0.02}
    widths = {"much": 0.01, "less": 0.01, "hardly": 0.001, "nothing": 0.01, "noise": 0.2}
    logs = np.hstack([shifts[name] + widths[name] * flat for name in shifts])
    found = {v.metric: v for v in judge(list(shifts), logs)}
    assert [v.verdict for v in found.values()] == [SLOWER, FASTER, SAME, SAME, CANNOT_TELL]
    assert found["much"].ratio == pytest.approx(math.exp(0.2))
    assert found["much"].low < found["much"].ratio < found["much"].high
    # Certain, but smaller than what counts; with another tolerance it counts.
    assert found["hardly"].low > 1
    strict = {v.metric: v.verdict for v in judge(list(shifts), logs, tolerance=0.001)}
    assert strict["hardly"] == SLOWER and strict["nothing"] == SAME
    # A tolerance that all of an interval lies within; one that only its middle does.
    lax = {v.metric: v.verdict for v in judge(list(shifts), logs, tolerance=0.25)}
    assert lax["much"] == SAME and found["much"].high < 1.25
    lax = {v.metric: v.verdict for v in judge(list(shifts), logs, tolerance=0.222)}
    assert lax["much"] == CANNOT_TELL and found["much"].high > 1.222


def test_what_never_varies_is_judged_as_it_is() -> None:
    logs = np.column_stack([np.zeros(9), np.full(9, math.log(1.2)), np.linspace(-0.1, 0.1, 9)])
    same, slower, unknown = judge(names(3), logs)
    assert (same.verdict, same.low, same.high) == (SAME, 1.0, 1.0)
    assert (slower.verdict, slower.ratio) == (SLOWER, pytest.approx(1.2))
    assert unknown.verdict == CANNOT_TELL


def test_swapping_the_sides_swaps_the_verdicts() -> None:
    logs = contest(5, 12, [0.0, 0.1, -0.1, 0.02])
    one, other = judge(names(4), logs), judge(names(4), -logs)
    swapped = {SLOWER: FASTER, FASTER: SLOWER}
    for a, b in zip(one, other):
        assert b.verdict == swapped.get(a.verdict, a.verdict)
        assert b.ratio == pytest.approx(1 / a.ratio)
        assert (b.low, b.high) == (pytest.approx(1 / a.high), pytest.approx(1 / a.low))


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="7 pairs are too few for intervals, 8 are needed"):
        verdicts.intervals(np.zeros((7, 2)))
    # A verdict is possible: none.
    same, slower = judge(names(2), np.tile([0.0, 0.5], (7, 1)))
    assert same == verdicts.Verdict("metric 0", CANNOT_TELL, 1.0, 0.0, math.inf)
    assert slower.verdict == CANNOT_TELL and slower.ratio == pytest.approx(math.exp(0.5))


def without_some(logs: np.ndarray, pairs: int, columns: int) -> np.ndarray:
    """As if all pairs but so many had only so many of the metrics."""
    logs = logs.copy()
    logs[pairs:, columns:] = np.nan
    return logs


def test_a_metric_is_judged_by_the_pairs_that_have_it() -> None:
    logs = without_some(contest(0, 40, [0.05, 0.0, 0.0]), 10, 1)
    mean, half = verdicts.intervals(logs)
    assert mean == pytest.approx([logs[:, 0].mean(), logs[:10, 1].mean(), logs[:10, 2].mean()])
    # A factor that is common to all, times what each alone would need.
    alone = [verdicts.intervals(logs[:, :1])[1][0]]
    alone += [verdicts.intervals(logs[:10, i : i + 1])[1][0] for i in (1, 2)]
    assert half / alone == pytest.approx([half[0] / alone[0]] * 3, rel=0.1)
    assert 1 < half[0] / alone[0] < 1.4
    # And where all have all, nothing is changed by how it is counted.
    whole = contest(1, 12, [0.0, 0.1])
    mean, half = verdicts.intervals(whole)
    assert mean == pytest.approx(whole.mean(0))


@pytest.mark.parametrize("tails", [False, True], ids=["normal", "heavy_tails"])
def test_false_alarms_are_as_rare_where_pairs_lack_metrics(tails: bool) -> None:
    """Twelve pairs with 20 metrics and 36 with 8 of them, in 600 contests between equal sides."""
    alarms = 0
    for seed in range(600):
        logs = without_some(contest(seed, 48, [0.0] * 20, tails=tails), 12, 8)
        mean, half = verdicts.intervals(logs, num_flips=2000)
        alarms += bool((np.abs(mean) > half).any())
    assert 1 <= alarms <= 14, alarms


def test_a_small_difference_is_found_by_the_many_pairs_that_have_the_metric() -> None:
    """By 3%, under noise of 4% a pair: from 48 pairs mostly, from 12 of them seldom."""
    found = {12: 0, 48: 0}
    for seed in range(100):
        logs = without_some(contest(seed, 48, [math.log(1.03)] + [0.0] * 19, noise=0.03), 12, 1)
        for pairs in found:
            found[pairs] += judge(names(20), logs[:pairs])[0].verdict == SLOWER
    assert found[48] >= 75 and found[12] <= 20, found


def test_too_few_pairs_of_one_metric_are_too_few() -> None:
    logs = without_some(np.tile([0.5, 0.0], (20, 1)), 7, 1)
    with pytest.raises(ValueError, match="7 pairs are too few"):
        verdicts.intervals(logs)
    # Of the other one they are no reason to say nothing.
    assert [v.verdict for v in judge(names(2), logs)] == [SLOWER, CANNOT_TELL]
    assert judge([], np.empty((9, 0))) == []


def test_a_pair_is_summed_up_by_its_median_round() -> None:
    base = [{"a": 10.0, "b": 1.0}, {"a": 10.0, "b": 1.0}, {"a": 10.0, "b": 1.0}]
    head = [{"a": 11.0, "b": 1.0}, {"a": 99.0, "b": 1.0}, {"a": 12.0, "c": 1.0}]
    assert verdicts.log_ratios(base, head) == {"a": pytest.approx(math.log(1.2))}
