"""Noise between processes: against tables, against numpy, and by how often its intervals hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from lab.report.noise import CONFIDENCE, Noise, by_case, pool, process_logs, t_quantile


@pytest.mark.parametrize(
    ("dof", "two_sided_95", "two_sided_99"),
    [
        # From printed tables of Student's distribution.
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (3, 3.182, 5.841),
        (7, 2.365, 3.499),
        (12, 2.179, 3.055),
        (29, 2.045, 2.756),
        (120, 1.980, 2.617),
    ],
)
def test_quantiles_are_those_of_the_tables(
    dof: int, two_sided_95: float, two_sided_99: float
) -> None:
    assert t_quantile(dof) == pytest.approx(two_sided_95, abs=6e-4)
    assert t_quantile(dof, 0.99) == pytest.approx(two_sided_99, abs=6e-4)


def test_many_degrees_of_freedom_are_the_normal_distribution() -> None:
    assert t_quantile(100_000) == pytest.approx(1.95996, abs=1e-4)
    with pytest.raises(ValueError, match="0 degrees"):
        t_quantile(0)


def test_samples_are_divided_process_by_process() -> None:
    logs = process_logs([1.0, 1.0, 8.0, 2.0, 2.0, 2.0, 4.0, 1.0, 4.0], 3)
    assert [math.exp(x) for x in logs] == pytest.approx([1.0, 2.0, 4.0])


@pytest.mark.parametrize("samples", [[], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 2.0]])
def test_what_cannot_be_divided_or_has_no_logarithm_has_no_noise(samples: list[float]) -> None:
    assert process_logs(samples, 3) == ()


def test_the_pooled_deviation_is_numpys() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.normal(size=size) for size in (3, 3, 2, 5, 1)]
    squares = sum(group.var(ddof=1) * (len(group) - 1) for group in groups if len(group) > 1)
    noise = pool(group.tolist() for group in groups)
    assert noise is not None
    assert noise.dof == 2 + 2 + 1 + 4
    assert noise.s == pytest.approx(math.sqrt(squares / 9))


def test_one_process_each_says_nothing() -> None:
    assert pool([(0.1,), (0.2,)]) is None
    assert pool([]) is None


def test_band_and_interval_are_as_stated() -> None:
    noise = Noise(s=0.05, dof=12)
    logs = [math.log(x) for x in (10.0, 10.0, 10.0)]
    value, low, high = noise.band(logs)
    half = 2.1788 * 0.05 / math.sqrt(3)
    assert (value, low, high) == pytest.approx(
        (10, 10 * math.exp(-half), 10 * math.exp(half)), rel=1e-5
    )
    ratio, low, high = noise.ratio(logs, [x + math.log(0.7) for x in logs])
    half = 2.1788 * 0.05 * math.sqrt(2 / 3)
    assert (ratio, low, high) == pytest.approx(
        (0.7, 0.7 * math.exp(-half), 0.7 * math.exp(half)), rel=1e-5
    )


@pytest.mark.parametrize("cases", [1, 6])
def test_intervals_hold_as_often_as_stated(cases: int) -> None:
    """Two commits, three processes, rounds that hardly differ within one: 95% of intervals hold 0.8."""
    rng = np.random.default_rng(cases)
    held = bands = tries = 0
    for _ in range(1500):
        levels = np.array([1.0, 0.8])[:, None, None] * np.exp(rng.uniform(-1, 1, cases))[:, None]
        processes = levels * np.exp(rng.normal(0, 0.08, (2, cases, 3)))
        samples = processes[..., None] * np.exp(rng.normal(0, 0.01, (2, cases, 3, 5)))
        logs = [[process_logs(case.ravel().tolist(), 3) for case in commit] for commit in samples]
        noise = pool(one for commit in logs for one in commit)
        assert noise is not None
        _, low, high = noise.ratio(logs[0][0], logs[1][0])
        held += low < 0.8 < high
        _, low, high = noise.band(logs[0][0])
        bands += low < levels[0, 0, 0] < high
        tries += 1
    # Three standard errors of a share of 95% in 1,500 tries are 1.7%.
    assert held / tries == pytest.approx(0.95, abs=0.017)
    assert bands / tries == pytest.approx(0.95, abs=0.017)


def test_a_case_has_the_larger_deviation_with_its_degrees_of_freedom() -> None:
    quiet, noisy = [(0.0, 0.01, 0.02)] * 2, [(0.0, 0.1, 0.2)] * 2
    pooled, own = pool([*quiet, *noisy]), pool(noisy)
    found = by_case({"quiet": quiet, "noisy": noisy, "none": [()]})
    assert found == {"quiet": pooled, "noisy": own, "none": pooled}
    assert pooled is not None and own is not None
    assert (pooled.dof, own.dof) == (8, 4)
    assert own.s == pytest.approx(0.1)
    assert by_case({"none": [(), (0.1,)]}) == {"none": None}


def share_called(
    noises: Sequence[float], commits: int, change: float = 0.0, tables: int = 6000
) -> float:
    """The share of tables of two of these commits in which any case is called better or worse.

    What `by_case` and `Noise.ratio` do, for many tables at once; one of them is held against these.
    """
    family, processes, cases = 90, 3, len(noises)
    rng = np.random.default_rng([cases, commits, round(10 * sum(noises))])
    logs = rng.normal(size=(tables, commits, cases, processes)) * np.array(noises)[:, None]
    logs[:, 1] += change * np.array(noises)[:, None]
    own = logs.var(axis=-1, ddof=1).mean(axis=1)
    pooled = own.mean(axis=1, keepdims=True)
    confidence = 1 - (1 - CONFIDENCE) / family
    dof = commits * (processes - 1)
    quantile = np.where(
        own > pooled, t_quantile(dof, confidence), t_quantile(dof * cases, confidence)
    )
    half = quantile * np.sqrt(np.maximum(own, pooled) * 2 / processes)
    difference = logs[:, 1].mean(axis=-1) - logs[:, 0].mean(axis=-1)
    called = np.abs(difference) > half
    found = by_case({str(case): logs[0, :, case].tolist() for case in range(cases)})
    for case, noise in enumerate(found.values()):
        assert noise is not None
        expected = noise.half_width(processes, processes, confidence=confidence)
        assert half[0, case] == pytest.approx(expected)
    return float(called.any(axis=1).mean())


@pytest.mark.parametrize(
    "noises",
    [
        (1,) * 9,
        (1,) * 8 + (3,),
        (1,) * 8 + (5,),
        (1,) * 7 + (3, 5),
        (1,) * 6 + (3, 3, 3),
        (1, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 4.1, 5),
    ],
)
def test_noisier_cases_are_not_called_different_more_often_than_stated(
    noises: tuple[float, ...],
) -> None:
    """Four equal commits, as the landmarks are; nine of a family of 90 are to err in 0.5%."""
    nominal, tables = 0.05 * 9 / 90, 6000
    # Three standard errors.
    room = 3 * math.sqrt(nominal / tables)
    assert share_called(noises, commits=4, tables=tables) <= nominal + room
    # On two, a case has few degrees of freedom. One deviation for all would make it 8% to 19%.
    assert share_called(noises, commits=2, tables=tables) <= 4 * nominal


def test_what_is_large_is_still_called_different() -> None:
    assert share_called((1,), commits=4, change=8) > 0.98
    assert share_called((1,) * 9, commits=4, change=6) > 0.98
    assert share_called((1,) * 8 + (3,), commits=4, change=6) > 0.98
