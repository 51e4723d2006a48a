"""What plots show, in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.report import changes, wording
from lab.report.data import NUMBER, STALLS, Commit, Machine, Reading, Results


def reading(found: Reading, unit: str = "") -> str:
    """A cell of a table."""
    if found.status != NUMBER:
        return found.status
    text = wording.number(found.value) + (f" {unit}" if unit else "")
    if found.has_band and found.low != found.high:
        half = 100 * (found.high - found.low) / 2 / found.value
        form = ".1f" if half < 10 else ".0f" if half < 1e6 else ".0e"
        text += f" ± {half:{form}}%"
    return text


def sentence(results: Results, machine: Machine, question: str, metric: str, case: str) -> str:
    """From the first number of a case to its last."""
    line = list(results.line(machine, question, metric, case))
    numbers = results.numbers(machine, question, metric, case)
    parts = [f"{machine.label}:"]
    # A figure has as many intervals as this, and its reader looks for the one that stands out.
    family = len(results.questions[question].cases) * len(results.machines)
    if not numbers:
        return f"{machine.label}: no number. {_gaps(line)}".strip()
    (first, before), (last, after) = numbers[0], numbers[-1]
    unit = results.questions[question].units.get(metric, "")
    if first == last:
        parts.append(f"{reading(after)} {unit} on {last.brief}.")
    else:
        parts.append(
            f"{wording.number(before.value)} → {wording.number(after.value)} {unit}"
            f" from {first.brief} to {last.brief}, "
            + _ratio(
                changes.compare(results, (first, last), machine, question, metric, case, family)
            )
        )
    beside = wording.absolute(results.questions[question], metric)
    if beside:
        parts.append(_absolute(results, machine, question, beside, case, (first, last)))
    return " ".join(part for part in (*parts, _gaps(line)) if part)


def _ratio(change: changes.Change | None) -> str:
    if change is None:
        return "no ratio."
    if not math.isfinite(change.ratio):
        return f"no ratio: {change.verdict}."
    if change.ratio == 0:
        return f"{change.verdict}."  # nothing times anything
    text = f"{wording.factor(change.ratio)} times"
    if math.isfinite(change.low) and change.low != change.high:
        text += f" {wording.interval(change.low, change.high)}"
    return f"{text}: {change.verdict}."


def _absolute(
    results: Results,
    machine: Machine,
    question: str,
    metric: str,
    case: str,
    ends: tuple[Commit, Commit],
) -> str:
    found = dict(results.line(machine, question, metric, case))
    values = [found[end].value for end in dict.fromkeys(ends)]
    text = _arrow(values, results.questions[question].units.get(metric, ""))
    if metric == "us_per_token" and all(value > 0 for value in values):
        # What people know it as.
        text += f", {_arrow([1e6 / value for value in values], 'tokens/s')}"
    return f"({text})"


def _arrow(values: Sequence[float], unit: str) -> str:
    return f"{' → '.join(map(wording.number, values))} {unit}"


def _gaps(line: Sequence[tuple[Commit, Reading]]) -> str:
    """What commits without a number have instead of it."""
    verbs = {STALLS: "Stalls", "n/a": "Not to be had", "failed": "Failed"}
    gaps = []
    for status, verb in verbs.items():
        names = [commit.brief for commit, found in line if found.status == status]
        if names:
            gaps.append(f"{verb}: {wording.listed(names)}.")
    return " ".join(gaps)


def summary(found: Sequence[changes.Change]) -> str:
    """One sentence over the table of a step."""
    phrases = {
        (changes.RUNS_NOW,): "that stalled run now",
        (changes.STALLS_NOW,): "stall now",
        (changes.BETTER,): "better",
        (changes.WORSE,): "worse",
        (changes.PERHAPS_BETTER, changes.PERHAPS_WORSE): "perhaps",
        (changes.WITHIN_NOISE,): "within noise",
        (changes.ALIKE,): changes.ALIKE,
        (changes.SAME,): "exactly the same",
        (changes.NO_INTERVAL,): "of unknown noise",
        (changes.STILL_STALLS,): "still stall",
        (changes.NOT_COMPARABLE,): "not comparable",
    }
    counts = {
        phrase: sum(change.verdict in verdicts for change in found)
        for verdicts, phrase in phrases.items()
    }
    return ", ".join(f"{count} {phrase}" for phrase, count in counts.items() if count)


def largest(found: Sequence[changes.Change]) -> str:
    """The first change of a table that has a ratio, in words."""
    change = next((c for c in found if c.changed and math.isfinite(c.ratio)), None)
    if change is None:
        return ""
    text = f"{change.question} {change.case}, {wording.label(change.metric)}: "
    if change.ratio == 0:
        return f"{text}{wording.number(change.before.value)} → 0"
    text += f"{wording.factor(change.ratio)} times"
    if change.low != change.high:
        text += f" {wording.interval(change.low, change.high)}"
    return text


def chance(found: Sequence[changes.Change]) -> str:
    """How many verdicts chance alone may have brought about."""
    tested = sum(math.isfinite(change.low) and change.low != change.high for change in found)
    if not tested:
        return ""
    return (
        f"Of {tested} intervals at 95%, some {max(1, round(0.05 * tested))} miss 1.00 by chance alone. "
        f"What an interval for all {tested} at once leaves open is called “perhaps”."
    )
