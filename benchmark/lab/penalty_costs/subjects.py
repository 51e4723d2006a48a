"""What is measured against each other: four ways to penalize, and the floor under them.

Each takes a `Workload` and does its turns. The upstream ones need a release, see
`lab.upstream_penalties`; `Touch` needs numba.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import numpy as np
import torch

from lab.dense_one_pass import DenseOnePass
from lab.penalty_costs.workload import REQUEST, Turn, Workload
from lab.sharing import in_shares
from lab.upstream_penalties import Penaltylib, UpstreamPenalties

OTHERS: Final = ("one_pass", "upstream", "overlap")
"""What ours is compared with. The floor is not among them: it does no penalties' work."""

_SHARE: Final = 65_536
"""Logits that are worth a thread."""

_NEXT_TO_NOTHING: Final = np.float32(1e-30)
"""Not 0, which a compiler might leave out together with the reading and the writing."""


_PARAMS: Final = vars(REQUEST)


class Subject:
    """Something that penalizes. A step is `before`, `run` and `after`; only `run` is the device's.

    Attributes
    ----------
    taken : Counter
        How often the state has had each turn, by its number, since the last join that was noted.
    counts_first : bool
        Whether a step's tokens count before it penalizes, and not behind.
    is_exact : bool
        Whether each node of a draft has penalties of its own, and all accepted tokens count.
    joins_last : bool
        Whether a request that joins comes behind the last row, and not where one has gone.
    is_checked : bool
        Whether it makes logits that can be held against the truth.
    """

    counts_first: ClassVar[bool] = False
    joins_last: ClassVar[bool] = False
    is_checked: ClassVar[bool] = True
    is_exact = True

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.taken: Counter[int] = Counter()
        # What the request of each row had said when one joined last; until one does, see the workload.
        self._said: list[Counter[int]] | None = None

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
        """The request at `row` goes and another one comes, which has said nothing."""
        raise NotImplementedError

    def note_join(self, row: int) -> None:
        """Remember a `join`, for the truth; no part of the cost.

        Each join has to be noted, behind the steps before it and before those behind it.
        """
        if self._said is None or self.taken:
            self._said = [self.said_so_far(i) for i in range(self.work.cell.batch_size)]
            self.taken.clear()
        del self._said[row]
        self._said.insert(len(self._said) if self.joins_last else row, Counter())

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        raise NotImplementedError

    def said(self, turn: Turn, row: int) -> list[int]:
        """Tokens of a row that a step counts."""
        return turn.host_tokens[row] if self.is_exact else [turn.host_tokens[row][-1]]

    def said_so_far(self, row: int) -> Counter[int]:
        """How often the request that is now at `row` has said each token, all turns taken."""
        said = Counter(self.work.outputs[row] if self._said is None else self._said[row])
        for number, times in self.taken.items():
            for token in self.said(self.work.turns[number], row):
                said[token] += times
        return said


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
        request = self._package.PenaltyRequest("", slot, output_ids=output, **_PARAMS)
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
    """Upstream's penalizers, as without overlap.

    Attributes
    ----------
    repeat : int or None
        Rows of logits of each request, where it verifies drafts.
    """

    counts_first = True
    joins_last = True

    def __init__(self, work: Workload, library: Penaltylib) -> None:
        super().__init__(work)
        cell = work.cell
        self.is_exact = not cell.is_draft
        self.repeat = cell.num_nodes if cell.is_draft else None
        requests = [REQUEST] * cell.batch_size
        self.state = UpstreamPenalties(library, requests, cell.vocab_size, work.device)
        for ids in torch.tensor(work.outputs, device=work.device).t().contiguous():
            self.state.cumulate(ids)

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        self.state.cumulate(turn.latest)
        self.state.apply(logits, self.repeat)

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
        self._repeat = other.repeat
        self.state, self.taken = other.state, other.taken

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        self.state.cumulate(turn.latest)
        self.state.accumulate()
        self.state.apply_accumulated(logits, self._repeat)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class Touch(Subject):
    """The floor: what any penalties in place would have to read and write at least, on this machine.

    Each row of logits has a list of tokens, of which each logit is read, changed by next to nothing and
    written. These are the tokens that the request has said, the stop tokens, and at a node of a draft
    the drafted tokens on its way from the root that are new. The lists are made beforehand: nothing is
    counted and nothing is looked up. They are in ascending order, which is the kindest one for the
    memory; only the few new tokens of a node come behind the others, in an order of their own, so that
    the nodes of a request can share the rest. The loop asks for no logit ahead of its turn. As `Sparse`
    does, it gives torch's other threads their share where there is much.

    It penalizes nothing, and is checked against nothing. Its logits may still lie in a cache where
    `Sparse` has just had them, so it is kinder to the memory than an engine is.
    """

    is_checked = False

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        cell = work.cell
        known = [{*output, *REQUEST.stop_token_ids} for output in work.outputs]
        self._tokens = np.array([sorted(tokens) for tokens in known], np.uint32)
        ways = [[inner for inner in way if inner != 0] for way in cell.ways]
        # By the turn itself, which all subjects share: a turn does not know its number.
        self._new: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for turn in work.turns:
            new = [
                sorted({drafts[inner] for inner in way} - tokens)
                for drafts, tokens in zip(turn.host_drafts, known)
                for way in ways
            ]
            lens = np.array([len(tokens) for tokens in new], np.int32)
            padded = np.zeros((len(new), max(lens)), np.uint32)
            for row, tokens in zip(padded, new):
                row[: len(tokens)] = tokens
            self._new[id(turn)] = padded, lens
        self._kernel = _touch_kernel()

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Why it can not be measured; None where it can."""
        if device.type != "cpu":
            return "it is one of the CPU"
        return None if find_spec("numba") else "numba is not installed"

    def run(self, planned: Any, turn: Turn, logits: torch.Tensor) -> None:
        rows, tokens, (new, num_new) = logits.numpy(), self._tokens, self._new[id(turn)]
        nodes = self.work.cell.num_nodes

        def touch(begin: int, end: int) -> None:
            part = slice(begin * nodes, end * nodes)
            self._kernel(rows[part], tokens[begin:end], new[part], num_new[part])

        num_shares = min(len(rows) * tokens.shape[1] // _SHARE, torch.get_num_threads())
        in_shares(touch, len(tokens), num_shares)

    @property
    def nbytes(self) -> int:
        new = sum(padded.nbytes + lens.nbytes for padded, lens in self._new.values())
        return self._tokens.nbytes + new


def _touch(rows, tokens, new, num_new):
    """Read and write the logits of each row's tokens; each request has equally many rows."""
    num_nodes = len(rows) // len(tokens)
    for row in range(len(rows)):
        values = rows[row]
        for token in tokens[row // num_nodes]:
            values[token] -= _NEXT_TO_NOTHING
        for i in range(num_new[row]):
            values[new[row, i]] -= _NEXT_TO_NOTHING


@lru_cache
def _touch_kernel() -> Callable[..., None]:
    import numba

    signature = "void(f4[:, ::1], u4[:, ::1], u4[:, ::1], i4[::1])"
    try:
        return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(_touch)
    except RuntimeError:  # no folder that the code could be kept in
        return numba.njit(signature, nogil=True, error_model="numpy")(_touch)
