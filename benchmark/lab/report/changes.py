"""Two commits held against each other, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lab.report import wording
from lab.report.data import NUMBER, STALLS, Commit, Key, Machine, Reading, Results
from lab.report.noise import CONFIDENCE, Noise
from lab.verdicts import TOLERANCE, is_alike

BETTER, WORSE, WITHIN_NOISE = "better", "worse", "within noise"
PERHAPS_BETTER, PERHAPS_WORSE = "perhaps better", "perhaps worse"
SAME, ALIKE = "the same", f"the same to {TOLERANCE:.0%}"
NO_INTERVAL, NOT_COMPARABLE = "noise not known", "not comparable"
RUNS_NOW, STALLS_NOW, STILL_STALLS = "runs now", "stalls now", "still stalls"

# Verdicts in the order of a table; better and worse stand among each other, by their size.
_ORDER: Final = (
    (STALLS_NOW,),
    (RUNS_NOW,),
    (WORSE, BETTER),
    (PERHAPS_WORSE, PERHAPS_BETTER),
    (STILL_STALLS,),
    (NO_INTERVAL,),
    (WITHIN_NOISE,),
    (ALIKE,),
    (SAME,),
    (NOT_COMPARABLE,),
)
CHANGED: Final = (STALLS_NOW, RUNS_NOW, WORSE, BETTER)


@dataclass(frozen=True)
class Change:
    """A number before and after.

    Attributes
    ----------
    machine : Machine
    question, metric, case, unit : str
    before, after : Reading
    absolute : tuple of Reading, optional
        The same as absolute numbers, where the metric is a ratio to an anchor.
    absolute_unit : str
    ratio, low, high : float
        After by before with its interval at 95%; NaN where there is none.
    verdict : str
    """

    machine: Machine
    question: str
    metric: str
    case: str
    unit: str
    before: Reading
    after: Reading
    absolute: tuple[Reading, Reading] | None
    absolute_unit: str
    ratio: float
    low: float
    high: float
    verdict: str

    @property
    def changed(self) -> bool:
        """Whether the table shows it first."""
        return self.verdict in CHANGED

    @property
    def order(self) -> tuple[int, float]:
        """Changes first, of each kind the largest first."""
        kind = next(i for i, verdicts in enumerate(_ORDER) if self.verdict in verdicts)
        size = abs(math.log(self.ratio)) if self.ratio > 0 and math.isfinite(self.ratio) else 0.0
        return kind, -size


@dataclass(frozen=True)
class Pair:
    """Two commits that a machine has numbers of, to a question.

    Attributes
    ----------
    before, after : Commit
    between : tuple of Commit
        What lies between them and has other numbers only: the difference is its too.
    """

    before: Commit
    after: Commit
    between: tuple[Commit, ...] = ()


@dataclass(frozen=True)
class Step:
    """What a table holds against each other: two commits for each machine and question.

    Attributes
    ----------
    title : str
    pairs : mapping of (str, str) to Pair
        By the machine's key and the question's name.
    """

    title: str
    pairs: Mapping[tuple[str, str], Pair]


def steps(results: Results) -> list[Step]:
    """Each fix against the commit before it, and the newest against the last fix.

    Each machine has its own of them for each question: its numbers say nothing of commits that only
    others have measured, or of which it was asked something else. A commit that history does not have is
    nowhere before or after another, whatever its date.
    """
    known = [commit for commit in results.commits if commit.known]
    own = {
        (machine.key, question): [c for c in known if results.has_numbers(machine, c, question)]
        for machine in results.machines
        for question in results.questions
    }
    fixes = [commit for commit in known if commit.fix is not None]
    found = [
        Step(
            f"Fix {fix.name}",
            {
                key: _to_fix(known, commits[commits.index(fix) - 1], fix)
                for key, commits in own.items()
                if fix in commits[1:]
            },
        )
        for fix in fixes
        if fix != known[0]
    ]
    if fixes:
        # Where the last fix was not measured, the difference from an earlier commit would be its too.
        since = {
            key: Pair(fixes[-1], commits[-1])
            for key, commits in own.items()
            if fixes[-1] in commits[:-1]
        }
        found += [Step("Since the last fix", since)] if since else []
    return found


def _to_fix(known: Sequence[Commit], before: Commit, fix: Commit) -> Pair:
    return Pair(before, fix, tuple(known[known.index(before) + 1 : known.index(fix)]))


def changes(results: Results, step: Step) -> list[Change]:
    """All numbers of two commits, what has changed first."""
    tested = sum(math.isfinite(c.low) and c.low != c.high for c in _changes(results, step, 1))
    return sorted(_changes(results, step, max(tested, 1)), key=lambda change: change.order)


def _changes(results: Results, step: Step, family: int) -> Iterator[Change]:
    for question in results.questions.values():
        for machine in results.machines_with(question.name):
            pair = step.pairs.get((machine.key, question.name))
            if pair is None:
                continue
            for case in question.cases:
                found = [
                    compare(
                        results,
                        (pair.before, pair.after),
                        machine,
                        question.name,
                        metric,
                        case,
                        family,
                    )
                    for metric in wording.compared(question)
                ]
                yield from _without_repetition([change for change in found if change is not None])


def _without_repetition(found: list[Change]) -> Iterator[Change]:
    """That a case stalls is said once and not of each metric."""
    said = set()
    for change in found:
        if change.verdict in (RUNS_NOW, STALLS_NOW, STILL_STALLS):
            if change.verdict in said:
                continue
            said.add(change.verdict)
        yield change


def compare(
    results: Results,
    commits: tuple[Commit, Commit],
    machine: Machine,
    question: str,
    metric: str,
    case: str,
    family: int = 1,
) -> Change | None:
    """One number on two commits; None where neither has it.

    Parameters
    ----------
    results : Results
    commits : tuple of Commit
        Before and after.
    machine : Machine
    question, metric, case : str
    family : int
        How many intervals are looked at together. The chance of an error is shared among all of them
        (Bonferroni) before a difference is called more than "perhaps".
    """
    first, second = _readings(results, commits, machine, question, metric, case)
    if not {first.status, second.status} & {NUMBER, STALLS}:
        return None
    units = results.questions[question].units
    beside = wording.absolute(results.questions[question], metric)
    noise = results.noise(machine, question, metric, case)
    return Change(
        machine,
        question,
        metric,
        case,
        units.get(metric, ""),
        first,
        second,
        _readings(results, commits, machine, question, beside, case) if beside else None,
        units.get(beside, "") if beside else "",
        *_ratio(first, second, noise),
        _verdict(first, second, noise, family),
    )


def _readings(
    results: Results,
    commits: tuple[Commit, Commit],
    machine: Machine,
    question: str,
    metric: str,
    case: str,
) -> tuple[Reading, Reading]:
    before, after = commits
    return (
        results.reading(Key(machine.key, before.sha, question, metric, case)),
        results.reading(Key(machine.key, after.sha, question, metric, case)),
    )


def _is_certain(first: Reading, second: Reading) -> bool:
    """Whether no noise is between two numbers.

    A 0 without spread has no logarithm, and needs none: whatever has a band lies above it.
    """
    if not (first.has_band and second.has_band):
        return False
    return (first.is_exact and second.is_exact) or 0 in (first.value, second.value)


def _is_same(first: Reading, second: Reading) -> bool:
    # asv gets five digits.
    return math.isclose(first.value, second.value, rel_tol=1e-9)


def _ratio(first: Reading, second: Reading, noise: Noise | None) -> tuple[float, float, float]:
    """After by before with its interval at 95%, as far as there are such."""
    if not first.status == second.status == NUMBER:
        return math.nan, math.nan, math.nan
    ratio = second.value / first.value if first.value else math.nan
    if _is_certain(first, second):
        ratio = 1.0 if _is_same(first, second) else ratio
        return ratio, ratio, ratio
    if noise is not None and first.logs and second.logs:
        return noise.ratio(first.logs, second.logs)
    return ratio, math.nan, math.nan


def _verdict(first: Reading, second: Reading, noise: Noise | None, family: int) -> str:
    """In words. Smaller is better in everything that asv tracks here."""
    if STALLS in (first.status, second.status):
        return _stalling(first, second)
    if not first.status == second.status == NUMBER:
        return NOT_COMPARABLE
    if _is_certain(first, second):
        if _is_same(first, second):
            return SAME
        # A page of memory more or less is not what anybody looks for, nor what the gate calls a change.
        if is_alike(first.value, second.value):
            return ALIKE
        return BETTER if second.value < first.value else WORSE
    if noise is None or not (first.logs and second.logs):
        return NO_INTERVAL
    verdict = _side_of_one(noise.ratio(first.logs, second.logs))
    confidence = 1 - (1 - CONFIDENCE) / family
    sure = _side_of_one(noise.ratio(first.logs, second.logs, confidence=confidence))
    return verdict if verdict == sure else f"perhaps {verdict}"


def _stalling(first: Reading, second: Reading) -> str:
    if first.status == second.status:
        return STILL_STALLS
    if second.status == STALLS:
        return STALLS_NOW
    return RUNS_NOW if second.status == NUMBER else NOT_COMPARABLE


def _side_of_one(interval: tuple[float, float, float]) -> str:
    _, low, high = interval
    if high < 1:
        return BETTER
    return WORSE if low > 1 else WITHIN_NOISE
