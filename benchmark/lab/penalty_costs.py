"""What penalties cost a step: a grid of cells, four subjects, and the targets that they are held to.

========  ==========================================================================================
sparse    the package's planner and state. Its time has a part on the host (plan, settle) and one on
          the device's side (begin, stage, apply, commit)
one_pass  dense penalties in one pass, see `lab.dense_one_pass`
upstream  the penalizers of a real release, see `lab.upstream_penalties`, without overlap
overlap   the same with overlap: what a forward takes along is copied each step
========  ==========================================================================================

Each request has all penalties, two stop tokens and a minimum length that it does not reach. It has said
``seen`` distinct tokens, some of them twice, and goes on saying these, so that a cell stays what it is.
``plain`` decodes one token. ``chain`` verifies 4 nodes, root included, and ``tree`` 16 in a binary tree;
every other drafted token is new. ``join`` is a finish plus a join: one request of the batch goes and a
new one comes.

All subjects get the same logits and tokens and take turns, block of steps by block; a ratio is the
median over rounds of the other's time by ours. The first step of a block is not timed: behind another
subject's it would find its threads asleep and none of its code or state in a cache. With ``cold`` it is
the other way round: before each step memory is swept through the caches, as a forward's weights are.

Logits are penalized again and again, which no operation's time depends on. At last each subject does one
step on fresh logits, and rows of it are compared with penalties in float64 that know only which steps
were done: the state of all steps has to be right.

On the CPU a step's time is the wall time of all its parts. On CUDA it is the time between two events
around the device's part, of a stream that is kept waiting until all steps of a block have been launched;
so gaps of launching are not in it, as they are not where the host runs ahead. The host's part is shown
beside it. Nothing waits for the device until a cell has been measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from lab import penalty_model
from lab.dense_one_pass import DenseOnePass
from lab.metrics import WorkNotDone
from lab.upstream_penalties import Penaltylib, UpstreamPenalties

KINDS: Final = ("plain", "chain", "tree", "join")
BATCH_SIZES: Final = (1, 8, 64, 256)
VOCAB_SIZES: Final = (32_000, 128_256, 152_064)
SEEN: Final = (16, 256, 2048)
OTHERS: Final = ("one_pass", "upstream", "overlap")
SUBJECTS: Final = ("sparse", *OTHERS)

NUM_TURNS: Final = 8
LOGITS_BYTES: Final = 3 << 30
"""For the logits of one cell in as many copies as fit, one at least."""

OVERLAP_BYTES: Final = 256 << 20
"""With drafts upstream does the same operations with overlap as without. Above so many bytes of logits
it is measured once, for time's sake."""

CELL_BYTES: Final = 8 << 30
"""A subject whose tensors, with the logits of one step, would take more is left out."""

SWEEP_BYTES: Final = 128 << 20
CHECKED_ROWS: Final = 3
JOIN_SEEN: Final = 256
_SLEEP_CYCLES: Final = 12_000_000
"""For which a stream is kept waiting: about 7 ms."""


@dataclass(frozen=True)
class Request:
    """What the subjects are told of a request."""

    frequency_penalty: float = 0.2
    presence_penalty: float = 0.1
    repetition_penalty: float = 1.1
    min_new_tokens: int = 1_000_000_000
    stop_token_ids: Collection[int] = (2, 5)


REQUEST: Final = Request()


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes
    ----------
    kind : {"plain", "chain", "tree", "join"}
    batch_size, vocab_size : int
    seen : int
        Distinct tokens that each request has said.
    """

    kind: str
    batch_size: int
    vocab_size: int
    seen: int = JOIN_SEEN

    @property
    def name(self) -> str:
        """For people, and for a filter."""
        return f"{self.kind}-b{self.batch_size}-v{self.vocab_size}-s{self.seen}"

    @property
    def is_draft(self) -> bool:
        """Whether a step verifies drafts."""
        return self.kind in ("chain", "tree")

    @property
    def parents(self) -> list[int]:
        """Of each node, its parent; a binary tree fills up level by level."""
        if self.kind == "chain":
            return [-1, 0, 1, 2]
        return [(node - 1) // 2 if node else -1 for node in range(16 if self.kind == "tree" else 1)]

    @property
    def num_nodes(self) -> int:
        """Rows of logits of a request."""
        return len(self.parents)

    @property
    def max_tokens(self) -> int:
        """Most tokens that a step commits for a request: the longest way, and one."""
        return max(len(way) for way in self.ways)

    @property
    def ways(self) -> list[list[int]]:
        """Of each node, the nodes from the root to it."""
        ways: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            ways.append([*(ways[parent] if parent >= 0 else []), node])
        return ways

    @property
    def logits_bytes(self) -> int:
        """Of one step."""
        return 4 * self.batch_size * self.num_nodes * self.vocab_size

    def dense_bytes(self, subject: str) -> int:
        """What a dense subject needs for a step, logits included; 0 for sparse."""
        columns = self.batch_size * self.vocab_size
        rows = self.logits_bytes
        if subject == "one_pass":
            return 9 * columns + rows
        if subject in ("upstream", "overlap"):
            # Four tensors; beside the logits two more for a moment, and one repeated for drafts. A
            # finish plus a join holds everything twice, and a third time what is being gathered.
            held = 16 * columns
            if self.kind == "join":
                return 3 * held
            return held + 8 * columns + rows + (rows if self.is_draft else 0)
        return 0


def grid(
    kinds: Iterable[str] = KINDS,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    vocab_sizes: Iterable[int] = VOCAB_SIZES,
    seen: Iterable[int] = SEEN,
) -> list[Cell]:
    """All cells, a finish plus a join once for each size."""
    return [
        Cell(kind, size, vocab, count)
        for kind in kinds
        for size in batch_sizes
        for vocab in vocab_sizes
        for count in ([JOIN_SEEN] if kind == "join" else seen)
    ]


QUICK: Final = (
    Cell("plain", 1, 32_000, 16),
    Cell("plain", 8, 32_000, 256),
    Cell("plain", 64, 128_256, 256),
    Cell("plain", 64, 128_256, 2048),
    Cell("chain", 8, 32_000, 256),
    Cell("chain", 8, 128_256, 256),
    Cell("tree", 8, 32_000, 256),
    Cell("join", 64, 128_256),
)


# --- What all subjects get ----------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """The input of one step.

    Attributes
    ----------
    tokens : Tensor, shape (B, max_tokens), int64
        What is committed.
    latest : Tensor, shape (B,), int64
        Of these, the last of each row that counts.
    host_tokens : list of list of int
        Those of each row that count.
    lens : Tensor, shape (B,), int64, or None
        How many count; all without drafts.
    host_lens : list of int
    drafts : Tensor, shape (B, D), int64
    host_drafts : list of list of int
    """

    tokens: torch.Tensor
    latest: torch.Tensor
    host_tokens: list[list[int]]
    lens: torch.Tensor | None
    host_lens: list[int]
    drafts: torch.Tensor
    host_drafts: list[list[int]]


class Workload:
    """The requests and turns of a cell, the same each time it is made.

    Attributes
    ----------
    outputs : list of list of int
        What each request has said before the first step.
    turns : list of Turn
    ancestors : Tensor, shape (B, D, D), bool, or None
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        rng = np.random.default_rng([cell.batch_size, cell.vocab_size, cell.seen, cell.num_nodes])
        size = cell.batch_size
        self.cell, self.device = cell, device
        # No stop tokens among them: what is masked stays masked.
        first = max(REQUEST.stop_token_ids) + 1
        seen = np.stack(
            [
                first + rng.choice(cell.vocab_size - first, cell.seen, replace=False, shuffle=False)
                for _ in range(size)
            ]
        )
        twice = seen[:, : cell.seen // 4]
        self.outputs: list[list[int]] = np.concatenate((seen, twice), axis=1).tolist()
        self.turns = [self._turn(rng, seen) for _ in range(NUM_TURNS)]
        self.ancestors = None
        if cell.is_draft:
            mask = torch.zeros(cell.num_nodes, cell.num_nodes, dtype=torch.bool)
            for node, way in enumerate(cell.ways):
                mask[node, way] = True
            self.ancestors = mask.expand(size, -1, -1).contiguous().to(device)

    def _turn(self, rng: np.random.Generator, seen: np.ndarray) -> Turn:
        cell = self.cell
        size = len(seen)
        picks = rng.integers(cell.seen, size=(size, cell.max_tokens))
        tokens = np.take_along_axis(seen, picks, 1)
        lens = np.full(size, 1)
        if cell.is_draft:
            lens = rng.integers(1, cell.max_tokens + 1, size=size)
        drafts = np.take_along_axis(seen, rng.integers(cell.seen, size=(size, cell.num_nodes)), 1)
        first = max(REQUEST.stop_token_ids) + 1
        drafts[:, 1::2] = rng.integers(first, cell.vocab_size, size=drafts[:, 1::2].shape)
        latest = np.take_along_axis(tokens, lens[:, None] - 1, 1)[:, 0]
        return Turn(
            tokens=torch.from_numpy(tokens).to(self.device),
            latest=torch.from_numpy(latest).to(self.device),
            host_tokens=[row[:n] for row, n in zip(tokens.tolist(), lens.tolist())],
            lens=torch.from_numpy(lens).to(self.device) if cell.is_draft else None,
            host_lens=lens.tolist(),
            drafts=torch.from_numpy(drafts).to(self.device),
            host_drafts=drafts.tolist(),
        )


class Logits:
    """One piece of memory that all cells have their logits in.

    Parameters
    ----------
    cells : sequence of Cell
        For the largest of which there is room once, and for others up to `NUM_TURNS` times.
    device : torch.device
    budget : int
        Bytes.
    """

    def __init__(
        self, cells: Sequence[Cell], device: torch.device, budget: int = LOGITS_BYTES
    ) -> None:
        self._budget = budget
        sizes = [cell.logits_bytes * self.copies(cell) for cell in cells if cell.kind != "join"]
        generator = torch.Generator().manual_seed(0)
        # Of a length that no row's is a multiple of.
        self._values = torch.randn(1_000_003, generator=generator).mul_(5).to(device)
        self._memory = torch.empty(max(sizes, default=0) // 4, device=device)
        self._fill(self._memory)

    def copies(self, cell: Cell) -> int:
        """How many steps' logits a cell has."""
        return min(NUM_TURNS, max(1, self._budget // cell.logits_bytes))

    def of(self, cell: Cell) -> list[torch.Tensor]:
        """Logits for steps of `cell`, each of shape (B * D, V)."""
        count, size = self.copies(cell), cell.logits_bytes // 4
        return list(self._memory[: count * size].view(count, -1, cell.vocab_size))

    def refresh(self, logits: torch.Tensor) -> None:
        """Make one step's logits those of an untouched model's output again."""
        self._fill(logits.view(-1))

    def _fill(self, flat: torch.Tensor) -> None:
        for part in flat.split(len(self._values)):
            part.copy_(self._values[: len(part)])


# --- Subjects -----------------------------------------------------------------------------------


class Subject:
    """Something that penalizes. A step is `before`, `run` and `after`; only `run` is the device's.

    Attributes
    ----------
    taken : Counter
        How often the state has had each turn, by its number.
    counts_first : bool
        Whether a step's tokens count before it penalizes, and not behind.
    is_exact : bool
        Whether each node of a draft has penalties of its own, and all accepted tokens count.
    """

    counts_first = False
    is_exact = True

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.taken: Counter[int] = Counter()

    def before(self, turn: Turn) -> Any:
        """The host's part before."""

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        """The device's part; `planned` is what `before` returned."""
        raise NotImplementedError

    def after(self, planned: Any, turn: Turn) -> None:
        """The host's part behind."""

    def note(self, turn: Turn) -> None:
        """What an engine does anyway with the tokens; no part of the cost."""

    def join(self, row: int) -> None:
        """The request at `row` goes and another one comes."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        raise NotImplementedError

    def said(self, turn: Turn, row: int) -> list[int]:
        """Tokens of a row that a step counts."""
        return turn.host_tokens[row] if self.is_exact else [turn.host_tokens[row][-1]]


class Sparse(Subject):
    """The package's sparse penalties."""

    def __init__(self, work: Workload, backend: str = "auto") -> None:
        from sglang.srt.sampling.penaltylib import sparse_penalties as package

        super().__init__(work)
        cell = work.cell
        self._package = package
        pool = package.PenaltyPool(
            num_slots=cell.batch_size,
            vocab_size=cell.vocab_size,
            max_draft_tokens=cell.num_nodes if cell.is_draft else 0,
        )
        self.planner = package.PenaltyPlanner(pool, work.device)
        self.state = package.PenaltyState(pool, work.device, backend)
        self._slots = list(range(cell.batch_size))
        self._outputs = [list(output) for output in work.outputs]
        for slot, output in enumerate(self._outputs):
            self._admit(slot, output)
        self._how = {
            "max_tokens": cell.max_tokens,
            "num_draft_tokens": cell.num_nodes if cell.is_draft else 0,
        }

    def _admit(self, slot: int, output: list[int]) -> None:
        params = {name: getattr(REQUEST, name) for name in REQUEST.__dataclass_fields__}
        request = self._package.PenaltyRequest(f"r{slot}", slot, output_ids=output, **params)
        self.planner.admit(request)

    def before(self, turn: Turn) -> Any:
        return self.planner.plan(self._slots, **self._how)

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        state = self.state
        state.begin(planned)
        if self.work.ancestors is not None:
            state.stage(planned, turn.drafts)
        state.apply(planned, logits, self.work.ancestors)
        state.commit(planned, turn.tokens, turn.lens)

    def after(self, planned: Any, turn: Turn) -> None:
        self.planner.settle(planned, turn.host_lens)

    def note(self, turn: Turn) -> None:
        for output, tokens in zip(self._outputs, turn.host_tokens):
            output.extend(tokens)

    def join(self, row: int) -> None:
        self.planner.release(row)
        self._outputs[row] = []
        self._admit(row, self._outputs[row])
        step = self.planner.plan(self._slots, **self._how)
        self.state.begin(step)
        self.planner.settle(step, [0] * len(self._slots))

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class OnePass(Subject):
    """Dense penalties in one pass."""

    def __init__(self, work: Workload, backend: str = "auto") -> None:
        super().__init__(work)
        cell = work.cell
        requests = [REQUEST] * cell.batch_size
        self._state = DenseOnePass(requests, cell.vocab_size, work.device, backend)
        self._state.commit(torch.tensor(work.outputs, device=work.device))

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        drafts = turn.drafts if self.work.ancestors is not None else None
        self._state.apply(logits, drafts, self.work.ancestors)
        self._state.commit(turn.tokens, turn.lens)

    @property
    def nbytes(self) -> int:
        return self._state.nbytes


class Upstream(Subject):
    """Upstream's penalizers, as without overlap."""

    counts_first = True

    def __init__(self, work: Workload, library: Penaltylib) -> None:
        super().__init__(work)
        cell = work.cell
        self.is_exact = not cell.is_draft
        self._repeat = cell.num_nodes if cell.is_draft else None
        requests = [REQUEST] * cell.batch_size
        self.state = UpstreamPenalties(library, requests, cell.vocab_size, work.device)
        for ids in torch.tensor(work.outputs, device=work.device).t().contiguous():
            self.state.cumulate(ids)

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        self.state.cumulate(turn.latest)
        self.state.apply(logits, self._repeat)

    def join(self, row: int) -> None:
        self.state.finish_and_join(row, REQUEST)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class Overlap(Subject):
    """Upstream's penalizers, as with overlap. Shares the state of the other and continues its steps."""

    counts_first = True

    def __init__(self, other: Upstream) -> None:
        super().__init__(other.work)
        self.is_exact = other.is_exact
        self._repeat = other._repeat
        self.state, self.taken = other.state, other.taken

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        self.state.cumulate(turn.latest)
        self.state.accumulate()
        self.state.apply_accumulated(logits, self._repeat)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


# --- The truth ----------------------------------------------------------------------------------


def true_row(
    row: np.ndarray, counts: Mapping[int, int], num_output: int, request: Request
) -> tuple[np.ndarray, np.ndarray]:
    """A row of logits, float64, penalized; and how far from it float32 may be.

    A frequency penalty may be added up by ``c`` roundings of sums up to ``c`` times itself, as
    upstream's is.
    """
    wanted = row.astype(np.float64)
    allowed = np.zeros_like(wanted)
    tokens = np.fromiter(counts, np.int64, len(counts))
    times = np.fromiter(counts.values(), np.float64, len(counts))
    frequency, ratio = request.frequency_penalty, request.repetition_penalty
    x = wanted[tokens] - (frequency * times + request.presence_penalty)
    size = np.abs(wanted[tokens]) + abs(frequency) * times + abs(request.presence_penalty)
    wanted[tokens] = np.where(x < 0, x * ratio, x / ratio)
    drift = abs(frequency) * times**2 * 2.0**-24
    allowed[tokens] = (1e-6 * size + drift) * max(ratio, 1 / ratio)
    if num_output < request.min_new_tokens:
        wanted[list(request.stop_token_ids)] = -math.inf
    return wanted, allowed


def check(name: str, subject: Subject, logits: Logits) -> None:
    """Do one step on fresh logits, and compare rows of it.

    Raises
    ------
    WorkNotDone
        If a row is not what it should be.
    """
    work = subject.work
    cell, turn = work.cell, work.turns[0]
    rows = logits.of(cell)[0]
    logits.refresh(rows)
    size, nodes = cell.batch_size, cell.num_nodes
    picked = sorted({(0, 0), (size // 2, nodes // 2), (size - 1, nodes - 1)})[:CHECKED_ROWS]
    places = [row * nodes + node for row, node in picked]
    given = rows[places].cpu().numpy()
    _step(subject, turn, rows)
    got = rows[places].cpu().numpy().astype(np.float64)
    for (row, node), before, after in zip(picked, given, got, strict=True):
        said = Counter(work.outputs[row])
        for number, times in subject.taken.items():
            for token in subject.said(work.turns[number], row):
                said[token] += times
        now = subject.said(turn, row) if subject.counts_first else []
        if cell.is_draft and subject.is_exact:
            now = [*now, *(turn.host_drafts[row][n] for n in cell.ways[node] if n != 0)]
        said.update(now)
        wanted, allowed = true_row(before, said, sum(said.values()), REQUEST)
        with np.errstate(invalid="ignore"):
            wrong = ~((np.abs(after - wanted) <= allowed) | (after == wanted))
        if wrong.any():
            token = int(np.flatnonzero(wrong)[0])
            raise WorkNotDone(
                f"{cell.name}: {name} makes {before[token]:.7g} {after[token]:.7g} and not "
                f"{wanted[token]:.7g} at token {token} of row {row}, node {node}; "
                f"{int(wrong.sum())} tokens of this row are wrong"
            )
    subject.taken[0] += 1


def _step(subject: Subject, turn: Turn, logits: torch.Tensor) -> None:
    planned = subject.before(turn)
    subject.run(planned, turn, logits)
    subject.after(planned, turn)
    subject.note(turn)


# --- Time ---------------------------------------------------------------------------------------


@dataclass
class Block:
    """Some steps of one subject.

    Attributes
    ----------
    steps : int
    host, device : float
        Seconds of all of them. On CUDA, `device` is filled in by `settle`.
    events : list of pairs of event
    """

    steps: int
    host: float = 0.0
    device: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)

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
        if is_cuda:
            torch.cuda._sleep(_SLEEP_CYCLES)
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
            if is_cuda:
                block.events.append(_between_events(lambda: subject.run(planned, turn, logits)))  # noqa: B023
            else:
                subject.run(planned, turn, logits)
            ran = time.perf_counter()
            subject.after(planned, turn)
            block.host += time.perf_counter() - ran + prepared - started
            if not is_cuda:
                block.device += ran - prepared
            subject.taken[number] += 1
            subject.note(turn)
        return block


class Joiner(Stepper):
    """Does finishes plus joins."""

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
        return block


def _between_events(run: Callable[[], None]) -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    return start, end


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
        Median microseconds of a step, by subject: on the CPU of all of it, on CUDA of the device's part.
    host_us, device_us : float
        The parts of ours.
    ratios : dict of str to float
        Median over rounds of another subject's time by ours.
    rounds : int
    state_bytes, temporary_bytes : dict of str to int
        What a subject holds between steps, and at most besides within one; -1 where it was not seen.
    predicted_us : dict of str to float
        By `lab.penalty_model`, for a GPU.
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
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {"cell": self.cell.name, **{k: v for k, v in vars(self).items() if k != "cell"}}


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
        result.temporary_bytes[name] = _temporaries(steppers[name], options.device)
    _sum_up(result, _rounds(steppers, steps, options), options.device)
    if cell.kind == "join":
        for subject in subjects.values():
            check_joined(cell, subject)
    else:
        for name, subject in subjects.items():
            check(name, subject, logits)
    return result


def _make_subjects(cell: Cell, options: Options, result: CellResult) -> dict[str, Subject]:
    work = Workload(cell, options.device)
    subjects: dict[str, Subject] = {"sparse": Sparse(work, options.backend)}
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

    result.rounds = len(rounds)
    result.host_us = statistics.median(r["sparse"].host_us for r in rounds)
    result.device_us = statistics.median(r["sparse"].device_us for r in rounds)
    for name in rounds[0]:
        result.us[name] = statistics.median(total(r[name]) for r in rounds)
        if name != "sparse":
            ratios = [total(r[name]) / total(r["sparse"]) for r in rounds]
            result.ratios[name] = statistics.median(ratios)


def _temporaries(stepper: Stepper, device: torch.device) -> int:
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


def check_joined(cell: Cell, subject: Subject) -> None:
    """See that a batch has as many requests as before, and that all their logits are penalized.

    Raises
    ------
    WorkNotDone
        If not.
    """
    size = cell.batch_size * cell.num_nodes
    rows = torch.zeros(size, cell.vocab_size, device=subject.work.device)
    _step(subject, subject.work.turns[0], rows)
    stops = rows[:, list(REQUEST.stop_token_ids)]
    if not bool((stops == -math.inf).all()):
        raise WorkNotDone(f"{cell.name}: a request's stop tokens have been lost")


# --- Targets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Something that has to hold in all cells that it is about.

    Attributes
    ----------
    text : str
    device : {"cpu", "cuda", "any"}
    applies : callable
        Whether a cell belongs to it.
    value : callable
        What is held against `limit`; None where it was not measured.
    limit : float
    at_least : bool
        Whether `limit` is the smallest that will do, and not the largest.
    """

    text: str
    device: str
    applies: Callable[[Cell], bool]
    value: Callable[[CellResult], float | None]
    limit: float
    at_least: bool = True


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met.

    Attributes
    ----------
    target : Target
    met : bool or None
        None where nothing of it was measured.
    worst : CellResult or None
    value : float or None
        The worst cell's.
    cells : int
        How many were looked at.
    """

    target: Target
    met: bool | None
    worst: CellResult | None = None
    value: float | None = None
    cells: int = 0


def _ratio(result: CellResult) -> float | None:
    return result.ratios.get("upstream")


def _smallest_ratio(result: CellResult) -> float | None:
    ratios = [result.ratios[name] for name in ("upstream", "overlap") if name in result.ratios]
    return min(ratios, default=None)


def _by_floor(result: CellResult) -> float | None:
    predicted = result.predicted_us.get("sparse")
    return result.device_us / predicted if predicted else None


def _by_memory_bound(result: CellResult) -> float | None:
    """Bytes beyond the logits, by those that may be."""
    cell = result.cell
    if min(result.temporary_bytes.get("sparse", -1), result.state_bytes.get("sparse", -1)) < 0:
        return None
    held = result.state_bytes["sparse"] + result.temporary_bytes["sparse"]
    return held / (cell.batch_size * (32 * cell.seen + 65_536))


def _is_large(cell: Cell) -> bool:
    return cell.kind == "plain" and cell.batch_size >= 64 and cell.vocab_size >= 128_000


TARGETS: Final = (
    Target("never slower than upstream", "cpu", lambda c: True, _ratio, 1),
    Target(
        "plain, B >= 64, V >= 128k, seen <= 256: >= 15x",
        "cpu",
        lambda c: _is_large(c) and c.seen <= 256,
        _ratio,
        15,
    ),
    Target(
        "plain, B >= 64, V >= 128k, seen 2048: >= 5x",
        "cpu",
        lambda c: _is_large(c) and c.seen == 2048,
        _ratio,
        5,
    ),
    Target(
        "verification, B >= 8: >= 8x", "cpu", lambda c: c.is_draft and c.batch_size >= 8, _ratio, 8
    ),
    Target(
        "finish plus join, B = 64, V = 128k: >= 100x",
        "cpu",
        lambda c: c.kind == "join" and c.batch_size == 64 and c.vocab_size == 128_256,
        _ratio,
        100,
    ),
    Target(
        "extra memory <= 32 B a token seen + 64 KiB, a request",
        "any",
        lambda c: c.kind != "join",
        _by_memory_bound,
        1,
        at_least=False,
    ),
    Target(
        "device time <= 1.5x of the predicted floor",
        "cuda",
        lambda c: c.kind != "join",
        _by_floor,
        1.5,
        at_least=False,
    ),
    Target(">= 5x faster than upstream everywhere", "cuda", lambda c: True, _smallest_ratio, 5),
)


def verdicts(
    results: Sequence[CellResult], device: str, targets: Sequence[Target] = TARGETS
) -> list[Verdict]:
    """Hold results that were measured on `device` against the targets."""
    return [_verdict(results, device, target) for target in targets]


def _verdict(results: Sequence[CellResult], device: str, target: Target) -> Verdict:
    found = [(target.value(r), r) for r in results if target.applies(r.cell)]
    found = [(value, r) for value, r in found if value is not None and not math.isnan(value)]
    if target.device not in (device, "any") or not found:
        return Verdict(target, None)
    pick = min if target.at_least else max
    value, worst = pick(found, key=lambda pair: pair[0])
    met = value >= target.limit if target.at_least else value <= target.limit
    return Verdict(target, met, worst, value, len(found))
