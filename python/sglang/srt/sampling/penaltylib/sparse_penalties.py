"""Exact penalties that cost what a request has said, not what the vocabulary could say.

For a request with output tokens ``o_1 .. o_n``, of which ``c(t)`` are t, a row of logits x becomes, in
this order and in float32, whatever type the logits have:

1. ``x(t) -= frequency_penalty * c(t) + presence_penalty`` where ``c(t) > 0``
2. ``x(t) = x(t) * repetition_penalty if x(t) < 0 else x(t) / repetition_penalty`` where ``c(t) > 0``
3. ``x(t) += logit_bias(t)``
4. ``x(t) = -inf`` for stop tokens while ``n < min_new_tokens``

The prompt is not counted. At a node of a draft tree, c and n count the node and its ancestors too,
without the root, which is the last committed token and counted already.

Only tokens that were seen, biased or may stop can change, so a request is a list of these
(`sparse_layout` has its picture), found by the request's slot. Two classes share the work:

- `PenaltyPlanner`, on the scheduler's thread, knows what is asked and bounds what may be written. For
  each forward it makes one `PenaltyStep`, in at most one asynchronous copy, and touches no other tensor.
- `PenaltyState` owns the tensors. It is used on the forward stream alone, in the order in which the
  steps were planned, so that nothing here can race::

    scheduler thread                         forward stream
    plan(A in slot 3, page 8)  -- step 1 ->  begin 1  apply  sample  commit: A writes page 8
    plan(A again)              -- step 2 ->  begin 2  apply  sample  commit: A writes page 8
    A has ended at step 1:                      :
    release(3), admit(B in 3)                   :
    plan(B, page 8 again)      -- step 3 ->  begin 3: B's header, pages and entries   apply ...

  Step 2 still has A, who is gone, and may write what was A's: it was planned, and so runs, before
  the step that gives slot and page to B. What B's step finds of A it overwrites, or it lies behind the
  end of B's list. In `merge_batch` and `filter_batch` nothing moves but slot numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib.repetition_penalty import MIN_SCALING
from sglang.srt.sampling.penaltylib.sparse_layout import FIRST_PAGE, PAGE, PenaltyTables
from sglang.srt.sampling.penaltylib.torch_ops import TorchPenaltyOps
from sglang.srt.sampling.penaltylib.triton_ops import is_triton_available
from sglang.srt.utils.common import ceil_div, to_device_async

_INT32_MAX: Final = (1 << 31) - 1


class PenaltyCapacityError(RuntimeError):
    """A request needs more entries than there are. Nothing was planned, and no other request is hurt.

    Attributes
    ----------
    rid : str
        The request. The caller releases its slot and plans again without it.
    """

    def __init__(self, rid: str, message: str) -> None:
        super().__init__(f"request {rid!r}: {message}")
        self.rid = rid


class PenaltyStepError(RuntimeError):
    """A step was begun out of the order of planning, or one that was planned was left out."""


@dataclass(frozen=True)
class PenaltyRequest:
    """What penalties need to know of a request.

    Attributes
    ----------
    rid : str
        Its name, for errors.
    slot : int
        Its place in the pool (``req_pool_idx``).
    frequency_penalty, presence_penalty, repetition_penalty : float
        As in `SamplingParams`.
    min_new_tokens : int
        Output tokens before which no stop token is allowed.
    stop_token_ids : collection of int
        All tokens that may end the output. Ids outside the vocabulary are passed over, here as below.
    logit_bias : mapping of int to float
        What to add to the logits of tokens.
    output_ids : sequence of int
        The output so far, all of which counts as if it had been committed here. If it is the request's
        own list, which grows, the planner looks into it again when the request needs a page, and
        finds out how few distinct tokens there are.
    """

    rid: str
    slot: int
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: Collection[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    output_ids: Sequence[int] = ()

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters which tokens the output has."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def masks_stops(self) -> bool:
        """Whether the output is too short to stop, and there is something to stop it."""
        return len(self.output_ids) < self.min_new_tokens and len(self.stop_token_ids) > 0

    @property
    def is_required(self) -> bool:
        """Whether any of its logits can change."""
        return self.counts_tokens or self.masks_stops or len(self.logit_bias) > 0


@dataclass(frozen=True)
class PenaltyPool:
    """How large a pool is and may become. Planner and state are made of the same one.

    A pool starts small and grows by half with what its requests need. It never shrinks.

    Attributes
    ----------
    num_slots : int
        Slots of requests.
    vocab_size : int
        Columns of the logits.
    max_draft_tokens : int
        Most nodes of a draft tree, the root included; 0 without speculation.
    max_entries_per_request : int, optional
        Most distinct tokens of a request, staged ones included. The vocabulary by default, so that no
        request ever has too many.
    max_entries : int, optional
        Most entries of all requests. By default what all slots may need, or what int32 can number.
    initial_entries : int
        What is there from the beginning. With `max_entries` the tensors never move, which a captured
        CUDA graph needs.
    """

    num_slots: int
    vocab_size: int
    max_draft_tokens: int = 0
    max_entries_per_request: int | None = None
    max_entries: int | None = None
    initial_entries: int = 4 * PAGE

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.vocab_size < 1:
            raise ValueError(f"a pool needs slots and a vocabulary, got {self}")
        if self.max_draft_tokens > layout.MAX_TOKENS:
            raise ValueError(f"trees may have {layout.MAX_TOKENS} nodes at most, got {self}")
        if self.max_entries is not None and self.max_pages * PAGE > _INT32_MAX:
            raise ValueError(f"a pool may have {_INT32_MAX} entries at most, got {self}")

    @cached_property
    def pages_per_slot(self) -> int:
        """Most pages of a request."""
        most = self.max_entries_per_request
        most = self.vocab_size if most is None else min(most, self.vocab_size)
        return max(1, ceil_div(most, PAGE))

    @cached_property
    def max_pages(self) -> int:
        """Most pages of the pool, the two that nobody has included."""
        if self.max_entries is None:
            most = FIRST_PAGE + self.num_slots * self.pages_per_slot
            return min(most, _INT32_MAX // PAGE)  # places are int32
        return FIRST_PAGE + ceil_div(self.max_entries, PAGE)

    @property
    def initial_pages(self) -> int:
        """Pages from the beginning, likewise."""
        return min(self.max_pages, FIRST_PAGE + ceil_div(self.initial_entries, PAGE))


class _Rows(NamedTuple):
    """The rows of a batch that have penalties, on the host; each array has shape (P,).

    Attributes
    ----------
    rows, slots, generations : ndarray of int
        Row of the batch, its slot, and which of the slot's owners is meant.
    limits : ndarray of int
        Most tokens to commit.
    reserves, extras : ndarray of int
        New entries that are left when the step is done, and that there are meanwhile, at most.
    """

    rows: np.ndarray
    slots: np.ndarray
    generations: np.ndarray
    limits: np.ndarray
    reserves: np.ndarray
    extras: np.ndarray


class UpdateParts(NamedTuple):
    """What an update writes; int32 tensors on the device.

    Attributes
    ----------
    table_places, table_pages : Tensor, shape (U,)
        Places in the flat page table, and the pages to put there.
    slots, headers : Tensor, shapes (A,) and (A, HEADER)
        Headers of the requests that come in.
    entry_places, tokens, metas, biases : Tensor, shape (E,)
        Their entries, and where in the pool they go. Biases are the bits of float32.
    """

    table_places: torch.Tensor
    table_pages: torch.Tensor
    slots: torch.Tensor
    headers: torch.Tensor
    entry_places: torch.Tensor
    tokens: torch.Tensor
    metas: torch.Tensor
    biases: torch.Tensor


class PenaltyUpdate(NamedTuple):
    """What a step changes in the pool before anything reads it.

    Attributes
    ----------
    number : int
        Updates are applied in the order 1, 2, ...
    num_pages : int
        Pages that the pool has to have.
    packed : Tensor, shape (N,), int32
        On the device: from `start` on the parts, flat, one behind the other.
    start : int
    num_given, num_admitted, num_entries : int
        Pages that are given, requests that come in, and entries of these: U, A and E of `UpdateParts`.
    """

    number: int
    num_pages: int
    packed: torch.Tensor
    start: int
    num_given: int
    num_admitted: int
    num_entries: int

    def parts(self) -> UpdateParts:
        """Views of `packed`."""
        given, admitted, entries = self.num_given, self.num_admitted, self.num_entries
        sizes = [given, given, admitted, layout.HEADER * admitted, *[entries] * 4]
        parts = UpdateParts(*self.packed[self.start :].split(sizes))
        return parts._replace(headers=parts.headers.view(-1, layout.HEADER))


class PenaltyStep(NamedTuple):
    """The penalties' part of one forward of ``B`` requests, ``P`` of which have any.

    Its tensors are not written after it is made, but for those of `PenaltyState.static_step`. They are
    made on the stream that is current when it is planned, ahead of the forward that is submitted with
    it.

    Attributes
    ----------
    batch_size, num_rows : int
        B and P.
    max_tokens : int
        Most tokens that a request commits.
    num_draft_tokens : int
        Nodes of a draft tree, 0 without.
    index : Tensor, shape (4, P), int32
        Row of the batch, slot, most tokens to commit and number of pages of each row.
    total_pages : int
        Sum of the last.
    update : PenaltyUpdate or None
        What changes in the pool.
    has_flags : bool
        Whether any request has a bias or masked stop tokens.
    commits : bool
        Whether any row's tokens become output.
    fed_tokens : Tensor, shape (B,), int64, or None
        The rows' tokens where the host knew them: committed when the step begins, and what it samples
        is left to the next one.
    is_padded : bool
        Whether slots of -1 occur, whose columns mean nothing.
    host : _Rows or None
        The planner's own note of the rows, for `PenaltyPlanner.settle`.
    """

    batch_size: int
    num_rows: int
    max_tokens: int
    num_draft_tokens: int
    index: torch.Tensor
    total_pages: int
    update: PenaltyUpdate | None = None
    has_flags: bool = True
    commits: bool = True
    fed_tokens: torch.Tensor | None = None
    is_padded: bool = False
    host: _Rows | None = None


class _Record:
    """One request, as the planner knows it."""

    def __init__(self, request: PenaltyRequest, vocab_size: int) -> None:
        self.request = request
        self.pages: list[int] = []
        self.is_admitted = False
        # The list may grow before the first step takes the request to the device.
        self.num_output = self.num_read = len(request.output_ids)
        metas = dict(Counter(request.output_ids)) if request.counts_tokens else {}
        if request.masks_stops:
            for token in sorted(request.stop_token_ids):
                metas[token] = metas.get(token, 0) | layout.STOP
        for token in request.logit_bias:
            metas[token] = metas.get(token, 0) | layout.BIAS
        if metas and not (min(metas) >= 0 and max(metas) < vocab_size):
            metas = {t: meta for t, meta in metas.items() if 0 <= t < vocab_size}
        self.metas = metas
        self.known = set(metas)

    def count_entries(self, num_output: int) -> int:
        """Most entries that `num_output` output tokens make, by what the request's list tells."""
        request = self.request
        if not request.counts_tokens:
            return len(self.known)
        self.known.update(request.output_ids[self.num_read :])
        self.num_read = len(request.output_ids)
        return len(self.known) + max(0, num_output - self.num_read)

    def write_header(self, header: np.ndarray) -> None:
        """Put what the slot's header becomes into `header`, shape (HEADER,), int32."""
        request, size = self.request, len(self.metas)
        header[layout.NUM_ENTRIES] = header[layout.NUM_STAGED] = size
        header[layout.NUM_OUTPUT] = self.num_output
        header[layout.MIN_NEW] = min(request.min_new_tokens, _INT32_MAX)
        header[layout.COUNTING] = request.counts_tokens
        params = header.view(np.float32)
        params[layout.FREQUENCY] = request.frequency_penalty
        params[layout.PRESENCE] = request.presence_penalty
        params[layout.REPETITION] = max(request.repetition_penalty, MIN_SCALING)

    def write_entries(self, entries: np.ndarray) -> None:
        """Put each entry's place in the pool, token, meta and bias into `entries`, (4, E), int32."""
        size = len(self.metas)
        for start, page in zip(range(0, size, PAGE), self.pages):
            num = min(PAGE, size - start)
            entries[0, start : start + num] = np.arange(page * PAGE, page * PAGE + num)
        entries[1] = np.fromiter(self.metas, np.int32, size)
        entries[2] = np.fromiter(self.metas.values(), np.int32, size)
        if bias := self.request.logit_bias:
            entries[3].view(np.float32)[:] = [bias.get(token, 0.0) for token in self.metas]


class PenaltyPlanner:
    """Plans the penalties of each forward. Lives on the scheduler's thread.

    Steps have to be begun (`PenaltyState.begin`) in the order in which they are planned, and none that
    carries an update may be left out.

    Parameters
    ----------
    pool : PenaltyPool
    device : torch.device
        Where the state lives.
    """

    def __init__(self, pool: PenaltyPool, device: torch.device) -> None:
        self.pool = pool
        self.device = device
        self._records: dict[int, _Record] = {}
        self._num_pages = pool.initial_pages
        self._free = list(range(pool.initial_pages - 1, FIRST_PAGE - 1, -1))
        self._num_updates = 0
        # Of each slot: whether it has a record, and which of its owners that is.
        self._is_active = np.zeros(pool.num_slots, bool)
        self._generations = np.zeros(pool.num_slots, np.int64)
        # Whether there are biases or stop tokens, and whether tokens are counted.
        self._has_flags = np.zeros(pool.num_slots, bool)
        self._is_counting = np.zeros(pool.num_slots, np.int64)
        # Output tokens and entries, as far as results are known; entries that steps in flight may add;
        # entries that fit.
        self._num_output = np.zeros(pool.num_slots, np.int64)
        self._settled = np.zeros(pool.num_slots, np.int64)
        self._in_flight = np.zeros(pool.num_slots, np.int64)
        self._capacity = np.zeros(pool.num_slots, np.int64)
        self._num_pages_of = np.zeros(pool.num_slots, np.int64)
        # The batch that was planned last, and its step: a batch that stays the same costs no copy.
        self._last_key: object = None
        self._last_rows: _Rows | None = None
        self._last_step: PenaltyStep | None = None

    def __contains__(self, slot: int) -> bool:
        return slot in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_free_entries(self) -> int:
        """Entries in pages that nobody has, those included that the pool may grow by."""
        return (len(self._free) + self.pool.max_pages - self._num_pages) * PAGE

    def admit(self, request: PenaltyRequest) -> bool:
        """Take a request in; the next step that has its slot brings it to the device.

        Parameters
        ----------
        request : PenaltyRequest
            After a retraction, with all of its output.

        Returns
        -------
        bool
            Whether it has any penalties. If not, it is not taken in, and need not be released.

        Raises
        ------
        PenaltyCapacityError
            If it has more distinct tokens than a request may have.
        ValueError
            If its slot is outside the pool or taken.
        """
        slot = request.slot
        if not 0 <= slot < self.pool.num_slots:
            raise ValueError(f"request {request.rid!r}: slot {slot} is outside the penalty pool")
        if slot in self._records:
            raise ValueError(
                f"request {request.rid!r}: slot {slot} still belongs to "
                f"{self._records[slot].request.rid!r}"
            )
        if not request.is_required:
            return False
        record = _Record(request, self.pool.vocab_size)
        self._check_size(record, len(record.known))
        self._records[slot] = record
        self._is_active[slot] = True
        self._is_counting[slot] = request.counts_tokens
        self._has_flags[slot] = request.masks_stops or len(request.logit_bias) > 0
        self._num_output[slot] = len(request.output_ids)
        self._settled[slot] = len(record.known)
        self._in_flight[slot] = self._capacity[slot] = self._num_pages_of[slot] = 0
        self._last_key = None
        return True

    def release(self, slot: int) -> None:
        """Give up a slot and its pages. Does nothing if the slot has no penalties.

        Steps that were planned with it run as planned.
        """
        record = self._records.pop(slot, None)
        if record is None:
            return
        self._free.extend(reversed(record.pages))
        self._is_active[slot] = False
        self._generations[slot] += 1
        self._last_key = None

    def plan(
        self,
        slots: Sequence[int],
        max_tokens: int = 1,
        num_draft_tokens: int = 0,
        uncommitted: Collection[int] = (),
        fed_tokens: torch.Tensor | None = None,
    ) -> PenaltyStep | None:
        """Plan the next forward.

        Parameters
        ----------
        slots : sequence of int
            Slot of each row of the batch; -1 where a row is nobody's.
        max_tokens : int
            Most tokens that the forward commits for a request: 1, or ``num_steps + 1`` when it verifies.
        num_draft_tokens : int
            Nodes of the draft trees that it verifies, 0 if it verifies none.
        uncommitted : collection of int
            Rows whose tokens do not become output, such as prefill chunks before the last.
        fed_tokens : Tensor, shape (B,), int64, optional
            On the device: the rows' latest tokens, which the forward before has sampled. They are
            what this step commits then, one a row, and not what its own forward samples.

        Returns
        -------
        PenaltyStep or None
            None if no row has penalties: nothing is copied and nothing is to be launched.

        Raises
        ------
        PenaltyCapacityError
            If a request may come to need more entries than there are. Nothing has changed then.
        ValueError
            If the trees are larger than the pool was made for, `max_tokens` is out of range, or a slot
            occurs twice.
        """
        if not self._records:
            return None
        key = (list(slots), max_tokens, num_draft_tokens, list(uncommitted))
        is_same = key == self._last_key
        rows = self._last_rows if is_same else self._select_rows(*key)
        if rows is None:
            return None
        grown = self._reserve(rows)
        if is_same and not grown:
            return self._with_tokens(self._last_step, fed_tokens)
        admitted = [self._records[slot] for slot in rows.slots.tolist()]
        admitted = [record for record in admitted if not record.is_admitted]
        step = self._make_step(key, rows, grown, admitted)
        for record in admitted:
            record.is_admitted = True
            record.metas = {}  # the device has them now
        self._last_key, self._last_rows = key, rows
        self._last_step = step._replace(update=None)
        return self._with_tokens(step, fed_tokens)

    @staticmethod
    def _with_tokens(step: PenaltyStep, fed_tokens: torch.Tensor | None) -> PenaltyStep:
        if fed_tokens is None:
            return step
        _check(fed_tokens, (step.batch_size,), "fed_tokens")
        return step._replace(fed_tokens=fed_tokens)

    def settle(
        self, step: PenaltyStep | None, lens: Sequence[int] | torch.Tensor | None = None
    ) -> None:
        """Note what a forward has committed, so that no more than that keeps its room.

        Parameters
        ----------
        step : PenaltyStep or None
            The forward's step. Each planned step is settled once. Requests that are gone are left out.
        lens : sequence of int, or Tensor on the host, shape (B,), optional
            Tokens of each row of the batch that were committed; by default as many as could be.
        """
        if step is None:
            return
        host = step.host
        slots, lengths, reserves = host.slots, host.limits, host.reserves
        if lens is not None:
            lengths = np.minimum(np.asarray(lens)[host.rows], lengths)
        is_here = self._generations[slots] == host.generations
        if np.count_nonzero(is_here) < len(slots):
            slots, lengths, reserves = slots[is_here], lengths[is_here], reserves[is_here]
        self._in_flight[slots] -= reserves
        self._num_output[slots] += lengths
        self._settled[slots] += lengths * self._is_counting[slots]

    def _select_rows(
        self,
        slots: list[int],
        max_tokens: int,
        num_draft_tokens: int,
        uncommitted: list[int],
    ) -> _Rows | None:
        if not 0 < max_tokens <= layout.MAX_TOKENS:
            raise ValueError(f"max_tokens must be in [1, {layout.MAX_TOKENS}], got {max_tokens}")
        if num_draft_tokens > self.pool.max_draft_tokens:
            raise ValueError(
                f"trees of {num_draft_tokens} nodes in a pool for {self.pool.max_draft_tokens}"
            )
        all_slots = np.asarray(slots, np.int64)
        rows = ((all_slots >= 0) & self._is_active[all_slots]).nonzero()[0]
        if len(rows) == 0:
            return None
        taken = all_slots[rows]
        # Rows of nobody may all be -1.
        if len(set(slots)) < len(slots) and len(np.unique(taken)) < len(taken):
            raise ValueError(f"a slot occurs twice among {slots}")
        limits = np.full(len(slots), max_tokens, np.int64)
        if uncommitted:
            limits[uncommitted] = 0
        limits = limits[rows]
        is_counting = self._is_counting[taken]
        extras = reserves = limits * is_counting
        if num_draft_tokens > 0:
            # A commit begins where the tail begins, so the longer of the two counts.
            extras = np.maximum(reserves, (num_draft_tokens - 1) * is_counting)
        return _Rows(rows, taken, self._generations[taken], limits, reserves, extras)

    # ---- pages

    def _reserve(self, rows: _Rows) -> list[tuple[int, int, int]]:
        """Make room for a step; returns slot, ordinal and page of each page that is given."""
        slots = rows.slots
        needed = self._settled[slots] + self._in_flight[slots] + rows.extras
        short = (needed > self._capacity[slots]).nonzero()[0]
        grown = self._grow(rows, short.tolist()) if len(short) > 0 else []
        self._in_flight[slots] += rows.reserves
        return grown

    def _grow(self, rows: _Rows, short: list[int]) -> list[tuple[int, int, int]]:
        wanted: list[tuple[int, int]] = []
        available = self.num_free_entries // PAGE
        for i in short:
            slot = int(rows.slots[i])
            record = self._records[slot]
            # What was settled token by token is counted token by token; now look which are distinct.
            settled = record.count_entries(int(self._num_output[slot]))
            self._settled[slot] = settled
            needed = settled + int(self._in_flight[slot]) + int(rows.extras[i])
            needed = min(needed, self.pool.vocab_size)
            self._check_size(record, needed)
            num = ceil_div(needed, PAGE) - len(record.pages)
            if num > 0:
                wanted.append((slot, num))
                available -= num
            if available < 0:
                raise PenaltyCapacityError(
                    record.request.rid,
                    f"no room for {needed} penalty entries in a pool of "
                    f"{(self.pool.max_pages - FIRST_PAGE) * PAGE}",
                )
        return [page for slot, num in wanted for page in self._give_pages(slot, num)]

    def _check_size(self, record: _Record, needed: int) -> None:
        most = self.pool.pages_per_slot * PAGE
        if needed > most:
            raise PenaltyCapacityError(
                record.request.rid, f"needs {needed} penalty entries, a request may have {most}"
            )

    def _give_pages(self, slot: int, num: int) -> list[tuple[int, int, int]]:
        if num > len(self._free):
            pages = max(self._num_pages + num - len(self._free), self._num_pages * 3 // 2)
            pages = min(pages, self.pool.max_pages)
            self._free[:0] = range(pages - 1, self._num_pages - 1, -1)
            self._num_pages = pages
        pages = self._records[slot].pages
        given = []
        for _ in range(num):
            given.append((slot, len(pages), self._free[-1]))
            pages.append(self._free.pop())
        self._num_pages_of[slot] = len(pages)
        size = len(pages) * PAGE
        # A list as long as the vocabulary has every token there is.
        self._capacity[slot] = size if size < self.pool.vocab_size else _INT32_MAX
        return given

    # ---- what goes to the device

    def _make_step(
        self,
        key: tuple[list[int], int, int, list[int]],
        rows: _Rows,
        grown: list[tuple[int, int, int]],
        admitted: list[_Record],
    ) -> PenaltyStep:
        slots, max_tokens, num_draft_tokens, _ = key
        num_rows, num_given, num_admitted = len(rows.rows), len(grown), len(admitted)
        num_entries = sum([len(record.metas) for record in admitted])
        size = 2 * num_given + (1 + layout.HEADER) * num_admitted + 4 * num_entries
        packed = np.zeros(4 * num_rows + size, np.int32)
        index = packed[: 4 * num_rows].reshape(4, num_rows)
        index[layout.ROW], index[layout.SLOT], index[layout.LIMIT] = (
            rows.rows,
            rows.slots,
            rows.limits,
        )
        index[layout.PAGES] = num_pages = self._num_pages_of[rows.slots]
        self._write_update(packed[4 * num_rows :], grown, admitted)

        device = to_device_async(packed, torch.int32, self.device)
        update = None
        if size > 0:
            self._num_updates += 1
            update = PenaltyUpdate(
                self._num_updates,
                self._num_pages,
                device,
                4 * num_rows,
                num_given,
                num_admitted,
                num_entries,
            )
        return PenaltyStep(
            batch_size=len(slots),
            num_rows=num_rows,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            index=device.as_strided((4, num_rows), (num_rows, 1)),
            total_pages=sum(num_pages.tolist()),
            update=update,
            has_flags=any(self._has_flags[rows.slots].tolist()),
            commits=any(rows.limits.tolist()),
            host=rows,
        )

    def _write_update(
        self, packed: np.ndarray, grown: list[tuple[int, int, int]], admitted: list[_Record]
    ) -> None:
        """Fill what `PenaltyUpdate.parts` takes apart; it is zero so far."""
        start = 2 * len(grown)
        if grown:
            per_slot = self.pool.pages_per_slot
            packed[: len(grown)] = [slot * per_slot + ordinal for slot, ordinal, _ in grown]
            packed[len(grown) : start] = [page for _, _, page in grown]
        if not admitted:
            return
        packed = packed[start:]
        size = len(admitted)
        packed[:size] = [record.request.slot for record in admitted]
        headers = packed[size : (1 + layout.HEADER) * size].reshape(size, layout.HEADER)
        entries = packed[(1 + layout.HEADER) * size :].reshape(4, -1)
        start = 0
        for header, record in zip(headers, admitted):
            record.write_header(header)
            if record.metas:
                record.write_entries(entries[:, start : start + len(record.metas)])
                start += len(record.metas)


class PenaltyState:
    """The penalties of all running requests, on the device.

    All methods run on the forward stream (on the CPU: on the thread that runs forwards), launch work
    and wait for nothing. They take None for a step without penalties and do nothing then. A forward
    calls `begin`, then, if it verifies drafts, `stage`, then `apply`, then `commit`.

    Parameters
    ----------
    pool : PenaltyPool
        The planner's.
    device : torch.device
    backend : {"auto", "torch", "triton", "numba"}
        Chosen if they are installed: Triton on a GPU, numba on the CPU; torch else.

    Attributes
    ----------
    tables : PenaltyTables
    """

    def __init__(self, pool: PenaltyPool, device: torch.device, backend: str = "auto") -> None:
        self.pool = pool
        self._num_updates = 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_entries = pool.initial_pages * PAGE
        self.tables = PenaltyTables(
            vocab_size=pool.vocab_size,
            headers=zeros(pool.num_slots, layout.HEADER),
            page_table=zeros(pool.num_slots, pool.pages_per_slot),
            tokens=zeros(num_entries),
            metas=zeros(num_entries),
            biases=zeros(num_entries, dtype=torch.float32),
            draft_entries=zeros(pool.num_slots, max(pool.max_draft_tokens, 1)),
        )
        self._ops = _make_ops(backend, self.tables)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, those of the backend included."""
        return self.tables.nbytes + self._ops.nbytes

    def begin(self, step: PenaltyStep | None, into: PenaltyStep | None = None) -> None:
        """Bring in what the step's forward finds changed: requests, pages of lists that grew, tokens.

        Parameters
        ----------
        step : PenaltyStep or None
            Of this forward.
        into : PenaltyStep, optional
            From `static_step`; gets the rows of `step`. Then the forward uses this one.

        Raises
        ------
        PenaltyStepError
            If the step is not the next one that changes something.
        ValueError
            If `into` has too few rows.
        """
        if into is not None:
            self._fill(into, step)
        if step is None:
            return
        if step.update is not None:
            self._update(step.update)
        if step.fed_tokens is not None:
            self._ops.ingest(self.tables, step, step.fed_tokens.unsqueeze(1), None, commit=True)

    def _update(self, update: PenaltyUpdate) -> None:
        if update.number != self._num_updates + 1:
            raise PenaltyStepError(
                f"update {update.number} of the penalties follows number {self._num_updates}"
            )
        self._num_updates = update.number
        self._resize(update.num_pages)
        self._ops.update(self.tables, update)

    def commit(
        self, step: PenaltyStep | None, tokens: torch.Tensor, lens: torch.Tensor | None = None
    ) -> None:
        """Count tokens that have become output. What was staged is forgotten.

        Parameters
        ----------
        step : PenaltyStep or None
        tokens : Tensor, shape (B,) or (B, max_tokens), int64 or int32
            What the sampler or the verification has chosen.
        lens : Tensor, shape (B,), int64 or int32, optional
            How many tokens of each row count, from the first. All of them by default. Where the planner
            was told that a row commits nothing, nothing counts.

        Notes
        -----
        Does nothing for a step that was given its tokens, or commits nothing.
        """
        if step is None or step.fed_tokens is not None or not step.commits:
            return
        tokens = tokens.unsqueeze(1) if tokens.dim() == 1 else tokens
        _check(tokens, (step.batch_size, step.max_tokens), "tokens")
        if lens is not None:
            _check(lens, (step.batch_size,), "lens")
            lens = lens.contiguous()
        self._ops.ingest(self.tables, step, _with_unit_stride(tokens), lens, commit=True)

    def stage(self, step: PenaltyStep | None, draft_tokens: torch.Tensor) -> None:
        """Make room for the tokens of draft trees, until they are committed or staged again.

        Parameters
        ----------
        step : PenaltyStep or None
        draft_tokens : Tensor, shape (B, D), int64 or int32
            Tokens of the nodes, the root first.
        """
        if step is None:
            return
        _check(draft_tokens, (step.batch_size, step.num_draft_tokens), "draft_tokens")
        self._ops.ingest(self.tables, step, _with_unit_stride(draft_tokens), None, commit=False)

    def apply(
        self,
        step: PenaltyStep | None,
        logits: torch.Tensor,
        ancestors: torch.Tensor | None = None,
    ) -> None:
        """Penalize, bias and mask logits in place, in one pass over the tokens that matter.

        Parameters
        ----------
        step : PenaltyStep or None
        logits : Tensor, shape (B, V) or (B * D, V), float32, float16 or bfloat16
            Rows of the requests; with `ancestors` D rows for each, which lie together, a node each.
        ancestors : Tensor, shape (B, D, D), bool, optional
            Whether the node of the last axis is the node of the axis before or an ancestor of it
            (`DraftTree.ancestor_mask`). What it says of the root is not looked at.
        """
        if step is None:
            return
        num_nodes = 1
        if ancestors is not None:
            num_nodes = step.num_draft_tokens
            _check(ancestors, (step.batch_size, num_nodes, num_nodes), "ancestors")
            ancestors = ancestors.contiguous()
        _check(logits, (step.batch_size * num_nodes, self.pool.vocab_size), "logits")
        if logits.stride(1) != 1:
            raise ValueError("logits must have their rows' values side by side")
        self._ops.apply(self.tables, step, logits, ancestors)

    def ancestors_from_parents(self, parents: torch.Tensor) -> torch.Tensor:
        """Who is on whose way from the root, for `apply`.

        Parameters
        ----------
        parents : Tensor, shape (B, D), int64 or int32
            Node that each node continues, in any order; negative for roots.

        Returns
        -------
        Tensor, shape (B, D, D), bool
            As ``DraftTree.ancestor_mask``.
        """
        return self._ops.ancestors(parents.contiguous())

    def static_step(
        self, batch_size: int, max_tokens: int = 1, num_draft_tokens: int = 0
    ) -> PenaltyStep:
        """A step whose tensors stay where they are: what a CUDA graph is captured with.

        Before each replay, `begin` puts the rows of the forward's own step into it. Until then, and
        where that has fewer rows, it has rows of nobody, whose programs end at once.
        """
        index = torch.full((4, batch_size), -1, dtype=torch.int32, device=self.tables.tokens.device)
        return PenaltyStep(
            batch_size=batch_size,
            num_rows=batch_size,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            index=index,
            total_pages=0,
            is_padded=True,
        )

    @staticmethod
    def _fill(static: PenaltyStep, step: PenaltyStep | None) -> None:
        static.index.fill_(-1)
        if step is not None:
            if step.num_rows > static.num_rows:
                raise ValueError(f"{step.num_rows} rows for a step of {static.num_rows}")
            static.index[:, : step.num_rows].copy_(step.index)
            if step.fed_tokens is not None:
                # They are what this step commits, and `begin` has done it.
                static.index[layout.LIMIT].zero_()

    def _resize(self, num_pages: int) -> None:
        tables, size = self.tables, num_pages * PAGE
        if size <= len(tables.tokens):
            return
        # One after the other, so that little is there twice.
        for name in ("tokens", "metas", "biases"):
            old = getattr(tables, name)
            new = old.new_zeros(size)
            new[: len(old)] = old
            setattr(tables, name, new)


def _make_ops(backend: str, tables: PenaltyTables) -> TorchPenaltyOps:
    if backend == "auto":
        backend = "torch"
        if tables.tokens.is_cuda and is_triton_available():
            backend = "triton"
        elif tables.tokens.is_cpu and find_spec("numba") is not None:
            backend = "numba"
    if backend == "torch":
        return TorchPenaltyOps()
    if backend == "numba":
        from sglang.srt.sampling.penaltylib.numba_ops import NumbaPenaltyOps

        return NumbaPenaltyOps()
    if backend != "triton":
        raise ValueError(f"backend must be auto, torch, triton or numba, got {backend!r}")
    from sglang.srt.sampling.penaltylib.triton_ops.sparse_penalties import TritonPenaltyOps

    return TritonPenaltyOps()


def _with_unit_stride(tokens: torch.Tensor) -> torch.Tensor:
    return tokens if tokens.stride(1) == 1 or tokens.shape[1] == 1 else tokens.contiguous()


def _check(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {tuple(tensor.shape)}")
