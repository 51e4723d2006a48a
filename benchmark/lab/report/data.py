"""What the page is made of: machines, commits, questions, and a measurement of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lab.devices import OFF_GPU
from lab.report.noise import Noise, by_case, process_logs

STALLED = "stalled"
"""The metric that is 1 where a commit cannot do the work of a case at all."""

NUMBER, STALLS, UNAVAILABLE, FAILED, MISSING = "number", "stalls", "n/a", "failed", "not measured"


@dataclass(frozen=True)
class Machine:
    """Where something was measured: a machine as it was then, whose numbers make a series.

    Attributes
    ----------
    name : str
        As asv calls it.
    label : str
        What stands beside its numbers, such as "CPU, 2 cores".
    is_gpu : bool
    facts : mapping of str to str
        What is known of hardware and software, in the order to show it.
    state : tuple of str
        Where a machine has several, what tells them apart: driver, torch and the like. What was measured
        behind another driver is another measurement.
    """

    name: str
    label: str
    is_gpu: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()

    @property
    def is_off_gpu(self) -> bool:
        """Whether it has a GPU that was not used, as its name says (see ``scripts/asv_machine.py``)."""
        return not self.is_gpu and self.name.endswith(OFF_GPU)

    @property
    def key(self) -> str:
        """What its numbers are kept under (`Key.machine`)."""
        return ", ".join((self.name, *self.state))


@dataclass(frozen=True)
class Commit:
    """A commit that was measured.

    Attributes
    ----------
    sha : str
    name : str
        What it is called: the name of its fix, or its subject.
    axis : tuple of str
        The same in few letters, a line each.
    fix : int, optional
        The pull request whose fix it is.
    subject, date : str
    known : bool
        Whether the checkout's history holds it.
    """

    sha: str
    name: str
    axis: tuple[str, ...]
    fix: int | None = None
    subject: str = ""
    date: str = ""
    known: bool = True

    @property
    def short(self) -> str:
        """The first eight digits."""
        return self.sha[:8]

    @property
    def brief(self) -> str:
        """Its name if that is one of its own, else its first digits."""
        return self.short if self.name.startswith(self.short) else self.name


@dataclass
class Question:
    """One file of ``benchmark/asv``.

    Attributes
    ----------
    name : str
    heading : str
        The question.
    cases : dict of str to bool
        Whether each belongs to the quick set.
    units : dict of str to str
        By metric.
    """

    name: str
    heading: str
    cases: dict[str, bool] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What asv keeps of a case: a number, NaN where it was skipped or stalls, None where it failed."""

    value: float | None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Key:
    """Which number; `machine` is the `key` of a `Machine`."""

    machine: str
    sha: str
    question: str
    metric: str
    case: str


@dataclass(frozen=True)
class Reading:
    """A number with its noise.

    Attributes
    ----------
    status : {"number", "stalls", "n/a", "failed", "not measured"}
    value : float
        NaN without a number. Where there are processes, the geometric mean of their medians.
    low, high : float
        Bounds of the noise band; equal to `value` for an exact number, NaN where noise is not known.
    logs : tuple of float
        Logarithms of the processes' medians. Empty for 0, which has none.
    """

    status: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    logs: tuple[float, ...] = ()

    @property
    def has_band(self) -> bool:
        """Whether its noise is known."""
        return math.isfinite(self.high)

    @property
    def is_exact(self) -> bool:
        """Whether it is known to have none."""
        return self.has_band and self.low == self.high


@dataclass
class Results:
    """Everything that was measured.

    Attributes
    ----------
    machines : list of Machine
    commits : list of Commit
        Oldest first.
    questions : dict of str to Question
    measured : dict of Key to Measured
    processes : int
        Processes that the samples of a case come from, equally many from each, one after the other.
    notes : list of str
        What a reader has to know of gaps.
    """

    machines: list[Machine]
    commits: list[Commit]
    questions: dict[str, Question]
    measured: dict[Key, Measured]
    processes: int
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def noises(self) -> dict[tuple[str, str, str, str], Noise | None]:
        """Noise by machine, question, metric and case, for each case that has samples anywhere."""
        groups: dict[tuple[str, str, str], dict[str, list[tuple[float, ...]]]] = {}
        for key, found in self.measured.items():
            if found.samples:
                place = groups.setdefault((key.machine, key.question, key.metric), {})
                logs = process_logs(found.samples, self.processes)
                place.setdefault(key.case, []).append(logs)
        return {
            (*place, case): noise
            for place, cases in groups.items()
            for case, noise in by_case(cases).items()
        }

    def noise(self, machine: Machine, question: str, metric: str, case: str) -> Noise | None:
        """The noise of a case; None where it has none, or where that is not known."""
        return self.noises.get((machine.key, question, metric, case))

    def varies(self, question: str, metric: str, machine: Machine | None = None) -> bool:
        """Whether the metric differs from run to run: some case has samples, or a clock was read."""
        return self._is_timed(question, metric) or any(
            key[1:3] == (question, metric) and (machine is None or key[0] == machine.key)
            for key in self.noises
        )

    def _is_timed(self, question: str, metric: str) -> bool:
        return is_measured(self.questions[question].units.get(metric, ""))

    def reading(self, key: Key) -> Reading:
        """The number at `key`, with what is known of its noise."""
        found = self.measured.get(key)
        stalled = self.measured.get(Key(key.machine, key.sha, key.question, STALLED, key.case))
        if stalled is not None and stalled.value == 1:
            return Reading(STALLS)
        if found is None:
            return Reading(MISSING)
        if found.value is None:
            return Reading(FAILED)
        if math.isnan(found.value):
            return Reading(UNAVAILABLE)
        if not found.samples and not self._is_timed(key.question, key.metric):
            # What is counted has samples only where rounds differ, case by case: here all were the same.
            logs = process_logs([found.value] * self.processes, self.processes)
            return Reading(NUMBER, found.value, found.value, found.value, logs)
        logs = process_logs(found.samples, self.processes)
        noise = self.noises.get((key.machine, key.question, key.metric, key.case))
        if not logs or noise is None:
            return Reading(NUMBER, found.value, logs=logs)
        return Reading(NUMBER, *noise.band(logs), logs)

    @functools.cached_property
    def _numbered(self) -> set[tuple[str, str, str]]:
        return {
            (key.machine, key.sha, key.question)
            for key, found in self.measured.items()
            if found.value is not None and not math.isnan(found.value)
        }

    def has_numbers(self, machine: Machine, commit: Commit, question: str) -> bool:
        """Whether a question was asked of a commit on a machine, and something of it did not fail."""
        return (machine.key, commit.sha, question) in self._numbered

    def machines_with(self, question: str, metric: str | None = None) -> list[Machine]:
        """The machines that something of a question was measured on."""
        names = {
            key.machine
            for key in self.measured
            if key.question == question and metric in (None, key.metric)
        }
        return [machine for machine in self.machines if machine.key in names]

    def line(
        self, machine: Machine, question: str, metric: str, case: str
    ) -> Iterator[tuple[Commit, Reading]]:
        """A reading for each commit."""
        for commit in self.commits:
            yield commit, self.reading(Key(machine.key, commit.sha, question, metric, case))

    def numbers(
        self, machine: Machine, question: str, metric: str, case: str
    ) -> list[tuple[Commit, Reading]]:
        """What of a line is a number, from the first to the last.

        Commits that history does not have are left out where others are there: nothing but a date says
        which of them was first.
        """
        line = self.line(machine, question, metric, case)
        found = [(commit, reading) for commit, reading in line if reading.status == NUMBER]
        return [(commit, reading) for commit, reading in found if commit.known] or found


def is_measured(unit: str) -> bool:
    """Whether a unit says that a clock was read: a time, a ratio of times, a share of time.

    Examples
    --------
    >>> [is_measured(unit) for unit in ("us/token", "anchors/step", "of the decode phase", "bytes")]
    [True, True, True, False]
    """
    if unit.startswith("of ") or unit.endswith("modelled"):
        return True
    return unit.split(",")[0].split("/")[0].strip() in ("ns", "us", "ms", "s", "anchors")
