"""How much a measurement differs from itself, and what that leaves of a difference between two.

A case is measured in ``P`` processes. Two rounds in one process differ less than two processes do, so
rounds say little of how well a number can be had again; what counts is how far the medians of the
processes lie apart. With ``x[g, p]`` the logarithm of the median of process ``p`` in group ``g`` (a
group is one case on one commit), the variance is pooled over groups:

    s**2 = sum over g, p of (x[g, p] - mean of x[g])**2 / dof,    dof = sum over g of (P[g] - 1)

That is done twice: over all groups of a metric on a machine, and over those of a case alone. **A case
has the larger one of the two deviations, with the degrees of freedom of the one that is taken.** The
first tells the noise of all cases well where it is equally large, in percent; and a case that is noisier
than the others is not judged by theirs.

To take the larger one is to choose after the fact, so how often it errs was simulated: equal commits,
nine cases, three processes, intervals for a family of 90, of which nominally 0.5% of such nines hold a
wrong "better" or "worse". With four commits it is 0.3% where noise is equal, and 0.1% to 0.6% where
one to three cases are 1.5 to 5 times as noisy; there, the deviation of all cases alone errs in 1.5% to
19%. With two commits a case has 4 degrees of freedom: 0.1% to 0.7% with one or two such cases, and 1.4%
with three. The price is in changes that go unseen: with equal noise and four commits, 88% of those are
told that are 6 deviations of a process large, and nearly all of 8.

The value of a group is ``exp(mean of x[g])``, the geometric mean of its processes' medians. At 95%, with
``t`` the quantile of Student's distribution of ``dof`` degrees of freedom:

    band of a value       value * exp(+- t * s / sqrt(P))
    interval of a ratio   exp(x[b] - x[a] +- t * s * sqrt(1 / P[a] + 1 / P[b]))

for equally many processes ``t * s * sqrt(2 / P)``. Processes of one commit run at about the same time:
what changes in a machine from one day to another is in neither.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95


def process_logs(samples: Sequence[float], processes: int) -> tuple[float, ...]:
    """Logarithms of the medians of processes.

    Parameters
    ----------
    samples : sequence of float
        Equally many from each process, one process after the other.
    processes : int

    Returns
    -------
    tuple of float
        Empty where there are no samples, where they cannot be so divided, or where a median has no
        logarithm.

    Examples
    --------
    >>> [round(math.exp(x), 6) for x in process_logs([1, 2, 9, 4, 4, 4], 2)]
    [2.0, 4.0]
    """
    rounds, rest = divmod(len(samples), processes)
    if not rounds or rest:
        return ()
    medians = [
        statistics.median(samples[start : start + rounds])
        for start in range(0, len(samples), rounds)
    ]
    if not all(0 < median < math.inf for median in medians):
        return ()
    return tuple(math.log(median) for median in medians)


@dataclass(frozen=True)
class Noise:
    """Noise between processes.

    Attributes
    ----------
    s : float
        Standard deviation of the logarithm of a process's median.
    dof : int
        Degrees of freedom that it was estimated with.
    """

    s: float
    dof: int

    def half_width(self, *processes: int, confidence: float = CONFIDENCE) -> float:
        """Half the width, in logarithms, of the interval of a sum or difference of means.

        Parameters
        ----------
        *processes : int
            How many processes each of them is the mean of.
        confidence : float
        """
        return (
            t_quantile(self.dof, confidence)
            * self.s
            * math.sqrt(sum(1 / count for count in processes))
        )

    def band(self, logs: Sequence[float]) -> tuple[float, float, float]:
        """A value and the bounds of its noise band."""
        return _exponentials(statistics.fmean(logs), self.half_width(len(logs)))

    def ratio(
        self, before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE
    ) -> tuple[float, float, float]:
        """`after` by `before`, and the bounds of that ratio."""
        difference = statistics.fmean(after) - statistics.fmean(before)
        half = self.half_width(len(before), len(after), confidence=confidence)
        return _exponentials(difference, half)


def _exponentials(middle: float, half: float) -> tuple[float, float, float]:
    return _exp(middle), _exp(middle - half), _exp(middle + half)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def pool(groups: Iterable[Sequence[float]]) -> Noise | None:
    """The noise that groups of logarithms have in common; None if no group has two of them."""
    squares, dof = 0.0, 0
    for logs in groups:
        if len(logs) > 1:
            middle = statistics.fmean(logs)
            squares += sum((x - middle) ** 2 for x in logs)
            dof += len(logs) - 1
    return Noise(math.sqrt(squares / dof), dof) if dof else None


def by_case(groups: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Noise | None]:
    """The noise of each case of a metric: that of all of them, or its own where that is larger.

    Parameters
    ----------
    groups : mapping of str to sequence of sequence of float
        By case, the logarithms of each commit.
    """
    pooled = pool(logs for of_case in groups.values() for logs in of_case)

    def larger(own: Noise | None) -> Noise | None:
        return own if own is not None and pooled is not None and own.s > pooled.s else pooled

    return {case: larger(pool(of_case)) for case, of_case in groups.items()}


@functools.cache
def t_quantile(dof: int, confidence: float = CONFIDENCE) -> float:
    """What Student's t exceeds, up or down, with a chance of ``1 - confidence``.

    For whole degrees of freedom the chance is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4);
    it is inverted by bisection.

    Examples
    --------
    >>> round(t_quantile(2), 3), round(t_quantile(30), 3)
    (4.303, 2.042)
    """
    if dof < 1:
        raise ValueError(f"{dof} degrees of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        if _within(theta, dof) < confidence:
            low = theta
        else:
            high = theta
    return math.sqrt(dof) * math.tan(theta)


def _within(theta: float, dof: int) -> float:
    """The chance of ``|t| < sqrt(dof) * tan(theta)``."""
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = dof % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 if odd else 0, dof - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
