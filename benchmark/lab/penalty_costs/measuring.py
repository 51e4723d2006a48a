"""How a cell is measured: blocks of steps, subject by subject, round by round, and what they come to."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from lab import penalty_model
from lab.penalty_costs.subjects import OTHERS, OnePass, Overlap, Sparse, Subject, Touch, Upstream
from lab.penalty_costs.truth import check, check_joined
from lab.penalty_costs.workload import (
    CELL_BYTES,
    NUM_TURNS,
    OVERLAP_BYTES,
    Cell,
    Logits,
    Workload,
)
from lab.upstream_penalties import Penaltylib

SWEEP_BYTES: Final = 128 << 20
"""What is swept through the caches before each step, where they shall be cold."""

_SLEEP_CYCLES: Final = 12_000_000
"""For which a stream is kept waiting: about 7 ms."""


@dataclass
class Block:
    """Some steps of one subject.

    Attributes
    ----------
    steps : int
    host, device : float
        Seconds of all of them. On CUDA, `device` is filled in by `settle`.
    events : list of pairs of event
    is_late : bool
        Whether the device began with it before all of it had been launched, and may have waited.
    """

    steps: int
    host: float = 0.0
    device: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)
    is_late: bool = False

    def settle(self) -> None:
        """Read the events, which have to have come."""
        self.device += sum(start.elapsed_time(end) for start, end in self.events) / 1e3
        self.events = []

    @property
    def host_us(self) -> float:
        """Microseconds of a step."""
        return 1e6 * self.host / self.steps

    @property
    def device_us(self) -> float:
        """Microseconds of a step."""
        return 1e6 * self.device / self.steps


class Stepper:
    """Does steps of one subject and times them.

    Parameters
    ----------
    subject : Subject
    logits : list of Tensor
        Of which each step takes the next.
    sweep : Tensor, optional
        What goes through the caches before each step.
    """

    def __init__(
        self, subject: Subject, logits: list[torch.Tensor], sweep: torch.Tensor | None = None
    ) -> None:
        self.subject = subject
        self._logits = logits
        self._sweep = sweep
        self._next = 0

    def __call__(self, steps: int) -> Block:
        """Do a step, and so many more, which are timed; one alone is so long that it needs none."""
        if steps != 1:
            self._steps(1)
        return self._steps(steps)

    def _steps(self, steps: int) -> Block:
        subject, block = self.subject, Block(steps)
        is_cuda = self._logits[0].is_cuda
        # Two events around all steps: around each, they would cost as much as a short one. Only where
        # memory is swept between steps, each needs its own.
        by_step = self._sweep is not None
        if is_cuda:
            torch.cuda._sleep(_SLEEP_CYCLES)
            slept = _record()
        for _ in range(steps):
            number = self._next % NUM_TURNS
            turn = subject.work.turns[number]
            logits = self._logits[self._next % len(self._logits)]
            self._next += 1
            if self._sweep is not None:
                self._sweep.add_(1)
            started = time.perf_counter()
            planned = subject.before(turn)
            prepared = time.perf_counter()
            begun = _record() if is_cuda and by_step else None
            subject.run(planned, turn, logits)
            if begun is not None:
                block.events.append((begun, _record()))
            ran = time.perf_counter()
            subject.after(planned, turn)
            block.host += time.perf_counter() - ran + prepared - started
            if not is_cuda:
                block.device += ran - prepared
            subject.taken[number] += 1
            subject.note(turn)
        if is_cuda and steps > 0:
            if not by_step:
                block.events = [(slept, _record())]
            block.is_late = slept.query()
        return block


class Joiner(Stepper):
    """Does finishes plus joins, of each row in turn.

    Parameters
    ----------
    subject : Subject
    device : torch.device
    """

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject = subject
        self._device = device
        self._next = 0

    def _steps(self, steps: int) -> Block:
        # Host and device work are one here: a scheduler waits for neither, but does both.
        block = Block(steps)
        for _ in range(steps):
            row = self._next % self.subject.work.cell.batch_size
            self._next += 1
            _synchronize(self._device)
            started = time.perf_counter()
            self.subject.join(row)
            _synchronize(self._device)
            block.device += time.perf_counter() - started
            self.subject.note_join(row)
        return block


def _record() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class CellResult:
    """What was found of a cell.

    Attributes
    ----------
    cell : Cell
    us : dict of str to float
        Median microseconds of a step, by subject: on the CPU of all of it, on CUDA of the device's part,
        but of a join all of it. That of ``floor`` is there too, where it could be measured.
    host_us, device_us : float
        The parts of ours.
    ratios : dict of str to float
        Median over rounds of another subject's time by ours; that of ``floor`` is below 1, as far as
        ours is above it.
    rounds : int
    state_bytes, temporary_bytes : dict of str to int
        What a subject holds between steps, and at most besides within one; -1 where it was not seen.
    predicted_us : dict of str to float
        By `lab.penalty_model`, for a GPU.
    late : bool
        Whether the device may have waited in all blocks of ours, so that its part holds launching too.
    error : str
        Why there are no numbers; empty where there are.
    notes : list of str
    """

    cell: Cell
    us: dict[str, float] = field(default_factory=dict)
    host_us: float = math.nan
    device_us: float = math.nan
    ratios: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    state_bytes: dict[str, int] = field(default_factory=dict)
    temporary_bytes: dict[str, int] = field(default_factory=dict)
    predicted_us: dict[str, float] = field(default_factory=dict)
    late: bool = False
    error: str = ""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For a file. What was not measured is None, since JSON has no NaN."""
        values = {k: v for k, v in vars(self).items() if k != "cell"}
        for name in ("host_us", "device_us"):
            values[name] = None if math.isnan(values[name]) else values[name]
        return {"cell": self.cell.name, **values}


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes
    ----------
    device : torch.device
    backend : str
        Of our state.
    dense_backend : str
        Of `DenseOnePass`.
    library : Penaltylib or None
        Upstream's penalizers; None leaves them out.
    seconds : float
        For the rounds of a cell; warm-up and checks come on top.
    min_rounds, max_rounds : int
    cold : bool
        Whether memory is swept through the caches before each step.
    """

    device: torch.device
    backend: str = "auto"
    dense_backend: str = "auto"
    library: Penaltylib | None = None
    seconds: float = 2.0
    min_rounds: int = 3
    max_rounds: int = 41
    cold: bool = False


def measure(cell: Cell, options: Options, logits: Logits) -> CellResult:
    """Measure one cell.

    Raises
    ------
    WorkNotDone
        If a subject's logits are not what they should be.
    """
    result = CellResult(cell)
    if cell.kind != "join":
        result.predicted_us = {
            name: penalty_model.floor_us(model(cell))
            for name, model in penalty_model.MODELS.items()
        }
    subjects = _make_subjects(cell, options, result)
    sweep = torch.zeros(SWEEP_BYTES // 4, device=options.device) if options.cold else None
    steppers: dict[str, Stepper] = {
        name: Joiner(subject, options.device)
        if cell.kind == "join"
        else Stepper(subject, logits.of(cell), sweep)
        for name, subject in subjects.items()
    }
    steps = {name: _warm_up(stepper, options.device) for name, stepper in steppers.items()}
    for name, subject in subjects.items():
        result.state_bytes[name] = subject.nbytes
        result.temporary_bytes[name] = temporaries(steppers[name], options.device)
    _sum_up(result, _rounds(steppers, steps, options), options.device)
    for name, subject in subjects.items():
        if cell.kind == "join":
            check_joined(name, subject)
        elif subject.is_checked:
            check(name, subject, logits)
    return result


def _make_subjects(cell: Cell, options: Options, result: CellResult) -> dict[str, Subject]:
    work = Workload(cell, options.device)
    subjects: dict[str, Subject] = {"sparse": Sparse(work, options.backend)}
    if cell.kind != "join":  # where no logits are touched
        why_not = Touch.why_not(options.device)
        # Not last: ours mostly follows the last one, and would find the very logits that it needs in the
        # caches.
        if why_not is None:
            subjects["floor"] = Touch(work)
        else:
            result.notes.append(f"floor left out: {why_not}")
    for name in OTHERS:
        is_upstream = name != "one_pass"
        if cell.kind == "join" and name != "upstream":
            continue  # one_pass knows no such thing, and with overlap it is the same
        if is_upstream and options.library is None:
            continue
        if cell.dense_bytes(name) > CELL_BYTES:
            size = cell.dense_bytes(name) / 2**30
            result.notes.append(f"{name} left out: it would take {size:.1f} GiB")
        elif name == "overlap" and cell.is_draft and cell.logits_bytes > OVERLAP_BYTES:
            result.notes.append("overlap left out: with drafts it does what upstream does without")
        elif name == "one_pass":
            subjects[name] = OnePass(work, options.dense_backend)
        elif name == "upstream":
            subjects[name] = Upstream(work, options.library)
        else:
            subjects[name] = Overlap(subjects["upstream"])
    return subjects


def _warm_up(stepper: Stepper, device: torch.device) -> int:
    """Do some steps; return how many make a block: of four milliseconds, 2 to 16, or one long one."""
    block = stepper(1)
    if block.host + block.device < 0.5:
        block = stepper(1)
    _synchronize(device)
    if device.type == "cuda":
        # Short enough for the host to run ahead.
        return 8
    seconds = max(block.host + block.device, 1e-7)
    return 1 if seconds > 0.05 else int(min(max(0.004 / seconds, 2), 16))


def _rounds(
    steppers: Mapping[str, Stepper], steps: Mapping[str, int], options: Options
) -> list[dict[str, Block]]:
    """Blocks by subject, round by round; each round begins with another subject."""
    names, rounds = list(steppers), []
    limit = time.perf_counter() + options.seconds
    while len(rounds) < options.max_rounds and (
        len(rounds) < options.min_rounds or time.perf_counter() < limit
    ):
        turned = len(rounds) % len(names)
        order = names[turned:] + names[:turned]
        rounds.append({name: steppers[name](steps[name]) for name in order})
    _synchronize(options.device)
    for blocks in rounds:
        for block in blocks.values():
            block.settle()
    return rounds


def _sum_up(result: CellResult, rounds: list[dict[str, Block]], device: torch.device) -> None:
    def total(block: Block) -> float:
        return block.device_us if device.type == "cuda" else block.host_us + block.device_us

    def timely(*names: str) -> list[dict[str, Block]]:
        """The rounds in which the device was kept waiting, if there are some."""
        return [r for r in rounds if not any(r[name].is_late for name in names)] or rounds

    result.rounds = len(rounds)
    ours = timely("sparse")
    result.late = ours[0]["sparse"].is_late
    late = [name for name in rounds[0] if timely(name)[0][name].is_late]
    if late:
        result.notes.append(
            f"all blocks of {', '.join(late)} began before all was launched: the device may have waited"
        )
    result.host_us = statistics.median(r["sparse"].host_us for r in ours)
    result.device_us = statistics.median(r["sparse"].device_us for r in ours)
    for name in rounds[0]:
        result.us[name] = statistics.median(total(r[name]) for r in timely(name))
        if name != "sparse":
            ratios = [total(r[name]) / total(r["sparse"]) for r in timely(name, "sparse")]
            result.ratios[name] = statistics.median(ratios)


def temporaries(stepper: Stepper, device: torch.device) -> int:
    """Most bytes that one more step has allocated at a time, by the allocator's own account."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        stepper(0)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        stepper(0)
    try:
        events = seen.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    except AttributeError:  # the profiler's inside, which another torch may have elsewhere
        return -1
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most
