"""What the page is made of: machines, commits, questions, and a measurement of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lab.report.noise import Noise, pool, process_logs

STALLED = "stalled"
"""The metric that is 1 where a commit cannot do the work of a case at all."""

NUMBER, STALLS, UNAVAILABLE, FAILED, MISSING = "number", "stalls", "n/a", "failed", "not measured"


@dataclass(frozen=True)
class Machine:
    """Where something was measured.

    Attributes
    ----------
    name : str
        As asv calls it.
    label : str
        What stands beside its numbers, such as "CPU, 2 cores".
    is_gpu : bool
    facts : mapping of str to str
        What is known of hardware and software, in the order to show it.
    """

    name: str
    label: str
    is_gpu: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)


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
    """Which number."""

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
        Bounds of the noise band; equal to `value` for an exact metric, NaN where noise is not known.
    logs : tuple of float
        Logarithms of the processes' medians.
    """

    status: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    logs: tuple[float, ...] = ()

    @property
    def has_band(self) -> bool:
        """Whether its noise is known."""
        return math.isfinite(self.low)


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
    def noises(self) -> dict[tuple[str, str, str], Noise | None]:
        """Noise by machine, question and metric, for each metric that has samples anywhere."""
        groups: dict[tuple[str, str, str], list[tuple[float, ...]]] = {}
        for key, found in self.measured.items():
            if found.samples:
                place = groups.setdefault((key.machine, key.question, key.metric), [])
                place.append(process_logs(found.samples, self.processes))
        return {key: pool(logs) for key, logs in groups.items()}

    def is_noisy(self, question: str, metric: str) -> bool:
        """Whether numbers of the metric differ from run to run: it has samples, or is measured."""
        if any(key[1:] == (question, metric) for key in self.noises):
            return True
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
        if not self.is_noisy(key.question, key.metric):
            return Reading(NUMBER, found.value, found.value, found.value)
        logs = process_logs(found.samples, self.processes)
        noise = self.noises.get((key.machine, key.question, key.metric))
        if not logs or noise is None:
            return Reading(NUMBER, found.value, logs=logs)
        return Reading(NUMBER, *noise.band(logs), logs)

    def machines_with(self, question: str, metric: str | None = None) -> list[Machine]:
        """The machines that something of a question was measured on."""
        names = {
            key.machine
            for key in self.measured
            if key.question == question and metric in (None, key.metric)
        }
        return [machine for machine in self.machines if machine.name in names]

    def line(
        self, machine: Machine, question: str, metric: str, case: str
    ) -> Iterator[tuple[Commit, Reading]]:
        """A reading for each commit."""
        for commit in self.commits:
            yield commit, self.reading(Key(machine.name, commit.sha, question, metric, case))


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
