"""Verdicts on two commits where some cases vary and others do not, and where a number is 0."""

from __future__ import annotations

import math

import pytest

from lab.report import changes, page, texts
from lab.report.data import Commit, Key, Machine, Measured, Question, Results

MACHINE = Machine("made-up", "CPU")
BEFORE, AFTER = Commit("a" * 40, "before", ("a",)), Commit("b" * 40, "after", ("b",), fix=1)
# Nine rounds of three processes.
VARYING = (0.95, 0.96, 0.97, 0.96, 0.97, 0.98, 0.97, 0.98, 0.99)

Number = float | tuple[float, ...]


def measured(number: Number) -> Measured:
    if isinstance(number, tuple):
        return Measured(sorted(number)[len(number) // 2], number)
    return Measured(number)


def make(unit: str, **cases: tuple[Number, Number]) -> Results:
    """A metric of these cases, each before and after."""
    question = Question("overlap", "?", dict.fromkeys(cases, True), {"count": unit})
    return Results(
        [MACHINE],
        [BEFORE, AFTER],
        {"overlap": question},
        {
            Key(MACHINE.key, commit.sha, "overlap", "count", case): measured(number)
            for case, numbers in cases.items()
            for commit, number in zip((BEFORE, AFTER), numbers, strict=True)
        },
        processes=3,
    )


def change(results: Results, case: str, family: int = 1) -> changes.Change:
    found = changes.compare(results, (BEFORE, AFTER), MACHINE, "overlap", "count", case, family)
    assert found is not None
    return found


def test_a_case_that_varies_does_not_make_the_others_vary() -> None:
    results = make("stalls", varying=(VARYING, VARYING), gone=(1.0, 0.0), half=(2.0, 1.0))
    gone, half = change(results, "gone"), change(results, "half")
    assert (gone.ratio, gone.low, gone.high, gone.verdict) == (0.0, 0.0, 0.0, changes.BETTER)
    assert (half.ratio, half.low, half.high, half.verdict) == (0.5, 0.5, 0.5, changes.BETTER)
    assert gone.before.is_exact and gone.after.is_exact
    varying = change(results, "varying")
    assert varying.before.has_band and not varying.before.is_exact
    assert (varying.ratio, varying.verdict) == (pytest.approx(1.0), changes.WITHIN_NOISE)
    assert varying.low < 1 < varying.high


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (VARYING, 0.0, changes.BETTER),
        (0.0, VARYING, changes.WORSE),
        (1.0, 0.0, changes.BETTER),
        (0.0, 1.0, changes.WORSE),
        (0.0, 0.0, changes.SAME),
    ],
)
def test_nothing_is_between_0_and_what_is_always_more(
    before: Number, after: Number, verdict: str
) -> None:
    results = make("stalls", case=(before, after), varying=(VARYING, VARYING))
    found = change(results, "case", family=1000)
    assert found.verdict == verdict
    expected = {changes.BETTER: 0.0, changes.SAME: 1.0}.get(verdict, math.nan)
    assert found.ratio == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "mostly_0", [(0.0,) * 8 + (0.01,), (0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)]
)
def test_processes_without_a_logarithm_have_no_noise_that_is_known(
    mostly_0: tuple[float, ...],
) -> None:
    results = make("stalls", case=(mostly_0, 0.0), other=(1.0, mostly_0))
    for case in ("case", "other"):
        assert change(results, case).verdict == changes.NO_INTERVAL
    page.render(results)


def test_an_exact_number_is_held_against_one_that_varies() -> None:
    results = make("stalls", near=(0.97, VARYING), far=(VARYING, 2.0))
    near, far = change(results, "near"), change(results, "far")
    assert near.verdict == changes.WITHIN_NOISE
    assert far.verdict == changes.WORSE
    assert far.low < far.ratio < far.high
    assert far.ratio == pytest.approx(2 / 0.97, rel=1e-3)


def test_times_without_samples_are_not_exact() -> None:
    results = make("us", varying=(VARYING, VARYING), alone=(2.0, 1.0))
    assert change(results, "alone").verdict == changes.NO_INTERVAL
    assert math.isnan(change(results, "alone").low)


def test_a_noisier_case_is_judged_by_its_own_noise() -> None:
    """Three processes 40% apart, among cases that agree within 2%."""
    wide = (1.0, 1.0, 1.0, 1.4, 1.4, 1.4, 1.9, 1.9, 1.9)
    calm = {f"calm{i}": (VARYING, VARYING) for i in range(8)}
    results = make("us", wide=(wide, tuple(0.7 * x for x in wide)), **calm)
    assert change(results, "wide").verdict == changes.WITHIN_NOISE
    assert results.noise(MACHINE, "overlap", "count", "wide").dof == 4
    assert results.noise(MACHINE, "overlap", "count", "calm0").dof == 9 * 4
    wide_reading, calm_reading = (change(results, case).before for case in ("wide", "calm0"))
    assert wide_reading.high / wide_reading.value > 1.5
    assert calm_reading.high / calm_reading.value < 1.25


def test_the_page_says_which_numbers_are_exact() -> None:
    results = make("stalls", varying=(VARYING, VARYING), gone=(1.0, 0.0), new=(0.0, 1.0))
    text = page.render(results)
    assert "A number without them was the same in every round" in text
    assert text.count("exact</td>") == 1
    assert "0 → 1 stalls from before to after, no ratio: worse." in texts.sentence(
        results, MACHINE, "overlap", "count", "new"
    )
    exact = make("stalls", gone=(1.0, 0.0))
    assert "Exact: the same in every run" in page.render(exact)
