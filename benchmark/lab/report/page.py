"""The page: sections, figures and tables, filled into ``page.html.j2``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.report import changes, plots, texts, wording
from lab.report.changes import Change, Pair, Step
from lab.report.data import (
    MISSING,
    NUMBER,
    STALLED,
    STALLS,
    UNAVAILABLE,
    Commit,
    Key,
    Machine,
    Question,
    Reading,
    Results,
    is_measured,
)

MORE_THAN_ENOUGH = 24
"""Rows of a table of changes that stand open."""


@dataclass(frozen=True)
class Drawn:
    """A panel with its words: what the page shows of a case."""

    case: str
    svg: str
    sentences: tuple[str, ...]
    # For tests: what has to be there.
    num_marks: int
    num_stalls: int


@dataclass(frozen=True)
class Figure:
    """The panels of a metric."""

    title: str
    unit: str
    note: str
    machines: tuple[tuple[int, Machine], ...]
    panels: tuple[Drawn, ...]
    more: tuple[Drawn, ...]
    commands: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Row:
    """A row of the table of all numbers."""

    case: str
    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A question."""

    question: Question
    anchor: str
    figures: tuple[Figure, ...]
    tables: tuple[tuple[Machine, tuple[Row, ...]], ...]


@dataclass(frozen=True)
class Compared:
    """A table of two commits."""

    step: Step
    anchor: str
    # With what has it: a machine, or some of its questions.
    pairs: tuple[tuple[Pair, tuple[str, ...]], ...]
    summaries: tuple[tuple[int, Machine, str, str], ...]
    chance: str
    changed: tuple[Change, ...]
    rest: tuple[Change, ...]
    rest_summary: str


def render(results: Results) -> str:
    """The page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "bare": _bare,
        "label": wording.label,
        "forest": forest,
    }
    environment.globals |= {
        "ratio": _ratio_text,
        "absolute": _absolute_text,
        "interval": wording.interval,
        "counted": wording.counted,
        "title": _title,
    }
    steps = [compared(results, *numbered) for numbered in enumerate(changes.steps(results), 1)]
    text = environment.get_template("page.html.j2").render(
        results=results,
        numbered=list(enumerate(results.machines)),
        measured_on=_measured_on(results),
        sections=[section(results, question) for question in results.questions.values()],
        steps=steps,
        rows_open=MORE_THAN_ENOUGH,
        series=len(plots.SERIES),
        noise_known=any(results.noises.values()),
    )
    return re.sub(r"\s*\n\s*", "\n", text).lstrip()


def _title(commit: Commit) -> str:
    """Its name without the digits that stand beside it."""
    return commit.name.removeprefix(commit.short).strip()


def slug(text: str) -> str:
    """A name for an id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def anchors(questions: Iterable[str]) -> dict[str, str]:
    """The id of each question: its name, or one with a number where the page does not know it."""
    return {
        name: name if name in wording.QUESTION_ORDER else f"question-{number}-{slug(name)}"
        for number, name in enumerate(questions, 1)
    }


def _measured_on(results: Results) -> dict[str, list[Machine]]:
    """Machines by commit."""
    pairs = {(key.sha, key.machine) for key in results.measured}
    return {
        commit.sha: [m for m in results.machines if (commit.sha, m.key) in pairs]
        for commit in results.commits
    }


# --- Questions --------------------------------------------------------------------------------


def section(results: Results, question: Question) -> Section:
    """Figures and tables of a question."""
    metrics = wording.compared(question)
    plotted = [
        m for m in metrics if wording.base_name(m) in wording.HEADLINES.get(question.name, ())
    ]
    return Section(
        question,
        anchors(results.questions)[question.name],
        tuple(figure(results, question, metric) for metric in plotted or metrics[:1]),
        tuple(
            (machine, rows(results, question, machine))
            for machine in results.machines_with(question.name)
        ),
    )


def figure(results: Results, question: Question, metric: str) -> Figure:
    """A panel a case, a line a machine."""
    relative = _is_relative(results, question.name, metric)
    machines = results.machines_with(question.name, metric)
    numbered = tuple((results.machines.index(machine), machine) for machine in machines)
    drawn = {case: _draw(results, question, metric, case, relative) for case in question.cases}
    more = tuple(panel for case, panel in drawn.items() if panel and not question.cases[case])
    return Figure(
        wording.label(metric),
        question.units.get(metric, ""),
        _figure_note(results, question, metric, relative),
        numbered,
        tuple(panel for case, panel in drawn.items() if panel and question.cases[case]),
        more,
        tuple(wording.commands(question.name, machines, more=bool(more))),
    )


def _is_relative(results: Results, question: str, metric: str) -> bool:
    """Whether values are shown as multiples of the first, which needs a clock behind all of them."""
    values = [
        found.value
        for key, found in results.measured.items()
        if (key.question, key.metric) == (question, metric)
        and found.value is not None
        and not math.isnan(found.value)
    ]
    return (
        results.varies(question, metric)
        and metric not in wording.SHARES
        and all(value > 0 for value in values)
    )


def _figure_note(results: Results, question: Question, metric: str, relative: bool) -> str:
    unit = question.units.get(metric, "")
    if relative:
        text = "Each case as a multiple of its first number"
        text += f"; its unit is {unit}. " if unit else ". "
    else:
        text = f"In {unit}. " if unit else ""
    return text + _noise_note(results, question, metric)


def _noise_note(results: Results, question: Question, metric: str) -> str:
    if not results.varies(question.name, metric):
        return "Exact: the same in every run, so there is no noise band."
    # On a machine where no round differs, what is counted is exact.
    machines = [
        machine
        for machine in results.machines_with(question.name, metric)
        if results.varies(question.name, metric, machine)
    ]
    known = {
        place[0]
        for place, noise in results.noises.items()
        if noise is not None and place[1:3] == (question.name, metric)
    }
    if not known:
        return "No noise band: these results have no samples of several processes."
    note = "Bars and ribbon: noise between processes, 95%."
    if not is_measured(question.units.get(metric, "")):
        note += " A number without them was the same in every round, or its noise is not known."
    without = [m.label for m in machines if m.key not in known]
    if without:
        note += f" None for {wording.listed(without)}: no samples of several processes."
    return note


def _draw(
    results: Results, question: Question, metric: str, case: str, relative: bool
) -> Drawn | None:
    """The panel of a case; None where nothing of it was measured."""
    lines, sentences = [], []
    for number, machine in enumerate(results.machines):
        line = _line(results, machine, number, question.name, metric, case, relative)
        if line is not None:
            lines.append(line)
            sentences.append(
                texts.sentence(results, machine, question.name, metric, case)
                + _not_drawn(results, line, machine, question.name, metric, case)
            )
    if not lines:
        return None
    anchor = anchors(results.questions)[question.name]
    panel = plots.Panel(
        name=f"{anchor}-{list(question.units).index(metric)}-{list(question.cases).index(case)}",
        title=f"{question.name}, {case}: {wording.label(metric)} along the commits",
        text=" ".join(sentences),
        ticks=tuple("\n".join(commit.axis) for commit in results.commits),
        lines=tuple(lines),
        relative=relative,
    )
    return Drawn(
        case,
        plots.svg(panel),
        tuple(sentences),
        sum(len(line.marks) for line in lines),
        len({x for line in lines for x in line.stalls}),
    )


def _line(
    results: Results,
    machine: Machine,
    number: int,
    question: str,
    metric: str,
    case: str,
    relative: bool,
) -> plots.Line | None:
    readings = [found for _, found in results.line(machine, question, metric, case)]
    numbers = results.numbers(machine, question, metric, case)
    unit = numbers[0][1].value if numbers and relative else 1.0
    marks = []
    for x, found in enumerate(readings):
        if found.status != NUMBER:
            continue
        y, *band = (value / unit for value in (found.value, found.low, found.high))
        if plots.can_draw(y):
            marks.append(plots.Mark(x, y, *(band if plots.can_draw(*band) else ())))
    stalls = tuple(x for x, found in enumerate(readings) if found.status == STALLS)
    return plots.Line(number, machine.label, tuple(marks), stalls) if numbers or stalls else None


def _not_drawn(
    results: Results, line: plots.Line, machine: Machine, question: str, metric: str, case: str
) -> str:
    """What a plot has no room for, as the end of its sentence."""
    drawn = {mark.x for mark in line.marks}
    names = [
        commit.brief
        for x, (commit, found) in enumerate(results.line(machine, question, metric, case))
        if found.status == NUMBER and x not in drawn
    ]
    return f" Too large to be drawn: {wording.listed(names)}." if names else ""


def rows(results: Results, question: Question, machine: Machine) -> tuple[Row, ...]:
    """All numbers of a question on a machine."""
    found = []
    for case in question.cases:
        for metric, unit in question.units.items():
            readings = [
                results.reading(Key(machine.key, commit.sha, question.name, metric, case))
                for commit in results.commits
            ]
            if metric == STALLED or {r.status for r in readings} <= {MISSING, UNAVAILABLE}:
                continue
            label = wording.label(metric)
            label += f", {unit}" if unit and unit != label else ""
            found.append(Row(case, label, tuple(texts.reading(r) for r in readings)))
    return tuple(found)


# --- Before and after -------------------------------------------------------------------------


def compared(results: Results, place: int, step: Step) -> Compared:
    """The table of a step."""
    found = changes.changes(results, step)
    rest = tuple(change for change in found if not change.changed)
    own = [_own_pairs(step, machine) for machine in results.machines]
    pairs: dict[Pair, list[str]] = {}
    for machine, questions in zip(results.machines, own, strict=True):
        for pair, names in questions.items():
            of = f", {wording.listed(names)}" if len(questions) > 1 else ""
            pairs.setdefault(pair, []).append(machine.label + of)
    return Compared(
        step,
        f"step-{place}",
        tuple((pair, tuple(of)) for pair, of in pairs.items()),
        tuple(
            (
                number,
                machine,
                _against(own[number]) + texts.summary(of_machine),
                texts.largest(of_machine),
            )
            for number, machine in enumerate(results.machines)
            if (of_machine := [change for change in found if change.machine == machine])
        ),
        texts.chance(found),
        tuple(change for change in found if change.changed),
        rest,
        texts.summary(rest),
    )


def _own_pairs(step: Step, machine: Machine) -> dict[Pair, list[str]]:
    """Pairs of a machine, each with its questions."""
    found: dict[Pair, list[str]] = {}
    for (key, question), pair in step.pairs.items():
        if key == machine.key:
            found.setdefault(pair, []).append(question)
    return found


def _against(pairs: Iterable[Pair]) -> str:
    """The commit before, where it is further off than the heading lets one think."""
    names = dict.fromkeys(pair.before.brief for pair in pairs)
    if not any(pair.between for pair in pairs):
        return ""
    return f"compared with {wording.listed(f'“{name}”' for name in names)}, "


def _ratio_text(change: Change) -> str:
    if not math.isfinite(change.ratio):
        return "–"
    return wording.factor(change.ratio)


def _absolute_text(change: Change) -> str:
    """The absolute numbers beside a ratio to an anchor."""
    if change.absolute is None or not any(r.status == NUMBER for r in change.absolute):
        return ""
    first, second = (_bare(found) for found in change.absolute)
    return f"{first} → {second} {change.absolute_unit}"


def _bare(found: Reading) -> str:
    return wording.number(found.value) if found.status == NUMBER else found.status


def forest(found: Sequence[Change]) -> dict[int, tuple[float, float, float]]:
    """Where intervals lie on a common scale of logarithms, in percent of its width.

    Returns
    -------
    dict of int to tuple of float
        By position: low, ratio, high; 1 is at 50. Without an entry there is nothing to draw.
    """
    shown = {i: c for i, c in enumerate(found) if 0 < c.low < c.high < math.inf}
    ends = [math.log(x) for c in shown.values() for x in (c.low, c.high)]
    # Long ones are cut off: beside a tenfold change, changes of a tenth could not be seen.
    reach = min(max([abs(x) for x in ends] + [math.log(1.1)]), math.log(2.0))

    def place(value: float) -> float:
        return 50 + 48 * max(-1.0, min(1.0, math.log(value) / reach))

    return {i: (place(c.low), place(c.ratio), place(c.high)) for i, c in shown.items()}
