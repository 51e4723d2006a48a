"""Is one side slower than the other? Verdicts on many metrics at once, with one error rate for all.

A contest (`lab.contest`) has ``n`` pairs of processes, one of each side, and from each pair the
logarithm of a ratio for each of ``m`` metrics. If the sides are the same, each pair could as well have
been the other way round: the signs of its row of ``m`` numbers are then as likely plus as minus. So
flipping the signs of rows at random gives samples of what chance alone does, whatever the distribution
of noise is and however the metrics hang together. A metric's absolute t-statistics are divided by the
value ``u`` that they exceed in a share ``alpha`` of the samples. Of each sample the largest of the ``m``
quotients is kept; in all but a share ``alpha`` of the samples it is below a value ``q``, and

    mean +- q * u * standard deviation / sqrt(n)

has 0 in it for all metrics that have not changed, but with a chance of ``alpha``. (Westfall and Young
1993, "Resampling-Based Multiple Testing", single-step maxT, for changes of sign.) A pair need not have
all metrics: each is judged by those pairs that have it, which flip as one. That is about false alarms.
Of a metric that has changed the interval holds its ratio, of cut numbers, with a chance of about
``1 - alpha`` taken alone.

Now and then a neighbour slows one side of a pair by a third. So a number that is larger than `CLIP`
times what is usual among the sizes of its column is cut to that, and what is said of ratios is said of
cut numbers. It depends on sizes alone and not on signs, so what was said of false alarms holds of the
cut numbers too. But a head that is slower in each third process is cut as well; so nothing is called
"same" that is not within the margin uncut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

ALPHA: Final = 0.01
NUM_FLIPS: Final = 20_000
MIN_PAIRS: Final = 8
"""Seven pairs have 128 ways of signs, of which two are alike: too few for an error rate of 1%."""

CLIP: Final = 2 * 1.4826
"""By the median of sizes: two standard deviations of a normal distribution around 0."""

TOLERANCE: Final = 0.01
"""A difference up to this is none, even where it is certain: moving a function does as much."""

MARGIN: Final = 0.03
"""What is within this of 1 for certain is the same."""

FASTER, SLOWER, SAME, CANNOT_TELL = "faster", "slower", "same", "cannot tell"
FAILS = "fails"


@dataclass(frozen=True)
class Verdict:
    """What is known of one metric.

    Attributes
    ----------
    metric : str
    verdict : {"faster", "slower", "same", "cannot tell", "fails"}
        Of the head, compared with the base. Of what is counted, "slower" is more, and "faster" less.
        What "fails" is a case that the base can do; its ratio is NaN, as is that of a case which there
        was no time for.
    ratio : float
        Head by base; above 1 is slower.
    low, high : float
        Bounds of the ratio.
    base, head : float, optional
        What was counted of each; None where it was timed, as times of two sides are never looked at
        but in pairs.
    """

    metric: str
    verdict: str
    ratio: float
    low: float
    high: float
    base: float | None = None
    head: float | None = None

    def within(self, tolerance: float) -> Verdict:
        """The same where a difference of what was counted is allowed that is no larger than that."""
        if self.base is None or self.head is None or not is_alike(self.base, self.head, tolerance):
            return self
        return dataclasses.replace(self, verdict=SAME)


def failure(case: str) -> Verdict:
    """Say that the head cannot do a case that the base can."""
    return Verdict(case, FAILS, math.nan, math.nan, math.nan)


def not_reached(case: str) -> Verdict:
    """Say that there was no time for a case."""
    return Verdict(case, CANNOT_TELL, math.nan, math.nan, math.nan)


def is_alike(base: float, head: float, tolerance: float = TOLERANCE) -> bool:
    """Whether two numbers differ by no more than a share of the first.

    Examples
    --------
    >>> is_alike(1000, 990), is_alike(1000, 1010), is_alike(1000, 989.9), is_alike(0, 1)
    (True, True, False, False)
    """
    return abs(head - base) <= tolerance * abs(base)


def count(metric: str, base: float, head: float) -> Verdict:
    """The verdict on something counted, which is the same each time: any difference is certain."""
    ratio = 1.0 if base == head else head / base if base else math.inf
    verdict = SAME if ratio == 1 else SLOWER if ratio > 1 else FASTER
    return Verdict(metric, verdict, ratio, ratio, ratio, base, head)


def intervals(
    logs: np.ndarray, alpha: float = ALPHA, num_flips: int = NUM_FLIPS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Means of columns and how far they may be off.

    Parameters
    ----------
    logs : ndarray, shape (n, m)
        Logarithms of ratios, a pair each row and a metric each column; NaN where a pair has none.
    alpha : float
        Chance that the interval of any column misses 0 whose numbers are as likely as their negatives.
    num_flips : int
        Samples of signs.
    seed : int

    Returns
    -------
    mean, half : ndarray, shape (m,)
        The intervals are ``mean - half`` to ``mean + half``. A column without any variation has 0.

    Raises
    ------
    ValueError
        If a metric has fewer pairs than `MIN_PAIRS`.
    """
    known = ~np.isnan(logs)
    n = known.sum(0)
    if n.min() < MIN_PAIRS:
        raise ValueError(f"{n.min()} pairs are too few for intervals, {MIN_PAIRS} are needed")
    mean = np.nanmean(logs, 0)
    error = np.nanstd(logs, 0, ddof=1) / np.sqrt(n)
    varies = error > 1e-12
    half = np.zeros_like(mean)
    if not varies.any():
        return mean, half
    # Signs are flipped of the logarithms as they are. That is exact where the sides are the same; where
    # they differ, a t-statistic of flipped rows still has nearly the same distribution, being divided by
    # its own standard error. But then all such columns flip together, and are as one to the largest.
    rows, n = np.where(known, logs, 0.0)[:, varies], n[varies]
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (num_flips, len(rows)))
    flipped = signs @ rows / n
    squares = (rows**2).sum(0)
    errors = np.sqrt(np.maximum(squares - n * flipped**2, 1e-300) / (n - 1) / n)
    sizes = np.abs(flipped / errors)
    # Of few pairs, or noise with long tails, some are large by chance alone. By what is usual of its own
    # column, none of them makes the intervals of the others wide.
    usual = np.quantile(sizes, 1 - alpha, axis=0)
    largest = (sizes / usual).max(1)
    # Of 8 pairs the observed signs may be those at the quantile: rounding is to make no alarm of them.
    half[varies] = (1 + 1e-9) * np.quantile(largest, 1 - alpha) * usual * error[varies]
    return mean, half


def clipped(logs: np.ndarray) -> np.ndarray:
    """Each column with what is far larger than usual cut; one that is 0 as a rule is left as it is."""
    usual = np.nanmedian(np.abs(logs), axis=0)
    most = np.where(usual > 0, CLIP * usual, np.inf)
    return np.clip(logs, -most, most)


def judge(
    metrics: Sequence[str],
    logs: np.ndarray,
    *,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
    margin: float = MARGIN,
) -> list[Verdict]:
    """Verdicts on all metrics, of which each is better the smaller it is.

    Parameters
    ----------
    metrics : sequence of str
        Names, in the order of the columns.
    logs : ndarray, shape (n, m)
        Logarithms of head by base, a pair each row; NaN where a pair has none.
    alpha : float
        Chance of a false "faster" or "slower" among all of them.
    tolerance : float
        A difference up to this is neither, even where it is certain.
    margin : float
        "same" means that the interval lies within this, or the tolerance, up and down, and that it would
        if nothing had been cut. What is neither cannot be told, and from fewer pairs than `MIN_PAIRS`
        nothing can: their intervals have no bounds.
    """
    if not metrics:
        return []
    enough = (~np.isnan(logs)).sum(0) >= MIN_PAIRS
    if not enough.all():
        ratios = np.exp(np.nanmean(clipped(logs), 0)).tolist()
        told = [name for name, is_enough in zip(metrics, enough, strict=True) if is_enough]
        rest = judge(told, logs[:, enough], alpha=alpha, tolerance=tolerance, margin=margin)
        judged = {verdict.metric: verdict for verdict in rest}
        return [
            judged.get(name, Verdict(name, CANNOT_TELL, ratio, 0.0, math.inf))
            for name, ratio in zip(metrics, ratios, strict=True)
        ]
    mean, half = intervals(clipped(logs), alpha)
    uncut = intervals(logs, alpha)
    # How far from 1 it may be, cut or not.
    farthest = np.maximum(np.abs(mean) + half, np.abs(uncut[0]) + uncut[1])
    is_same = farthest < math.log1p(max(margin, tolerance))
    found = []
    columns = (mean.tolist(), half.tolist(), is_same.tolist())
    for name, middle, width, same in zip(metrics, *columns, strict=True):
        low, high = middle - width, middle + width
        if abs(middle) > max(width, math.log1p(tolerance)):
            verdict = SLOWER if middle > 0 else FASTER
        else:
            verdict = SAME if same else CANNOT_TELL
        found.append(
            Verdict(name, verdict, *(math.exp(min(x, 700.0)) for x in (middle, low, high)))
        )
    return found


def log_ratios(
    base: Sequence[Mapping[str, float]], head: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Of one pair of processes: for each metric the median over rounds of log(head by base).

    Parameters
    ----------
    base, head : sequence of dict
        Metrics of each round; rounds of the same number were neighbours in time.

    Raises
    ------
    ValueError
        If a metric is not above 0; says which and what it is.
    """
    names = [name for name in base[0] if all(name in r for r in (*base, *head))]
    for name in names:
        for value in (r[name] for r in (*base, *head)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0 for a ratio, got {value}")
    return {
        name: float(
            np.median([math.log(h[name] / b[name]) for b, h in zip(base, head, strict=True)])
        )
        for name in names
    }
