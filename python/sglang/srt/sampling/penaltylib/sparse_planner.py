"""The scheduler's side of the sparse penalties: what is asked, and what each forward may write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib.repetition_penalty import MIN_SCALING
from sglang.srt.sampling.penaltylib.sparse_layout import FIRST_PAGE, PAGE
from sglang.srt.sampling.penaltylib.sparse_step import (
    INT32_MAX,
    PenaltyCapacityError,
    PenaltyPool,
    PenaltyRequest,
    PenaltyRows,
    PenaltyStep,
    PenaltyStepError,
    PenaltyUpdate,
    check_shape,
)
from sglang.srt.utils.common import ceil_div, to_device_async


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
        header[layout.MIN_NEW] = min(request.min_new_tokens, INT32_MAX)
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
        self._num_steps = self._num_settled = self._num_updates = 0
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
        self._last_rows: PenaltyRows | None = None
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
            If the trees are larger than the pool was made for, `max_tokens` or a slot is out of range,
            or a slot occurs twice.
        """
        if not self._records:
            return None
        if fed_tokens is not None:
            check_shape(fed_tokens, (len(slots),), "fed_tokens")
        key = (list(slots), max_tokens, num_draft_tokens, list(uncommitted))
        is_same = key == self._last_key
        rows = self._last_rows if is_same else self._select_rows(*key)
        if rows is None:
            return None
        grown = self._reserve(rows)
        step = self._last_step
        if grown or not is_same:
            admitted = [self._records[slot] for slot in rows.slots.tolist()]
            admitted = [record for record in admitted if not record.is_admitted]
            step = self._make_step(key, rows, grown, admitted)
            for record in admitted:
                record.is_admitted = True
                record.metas = {}  # the device has them now
            self._last_key, self._last_rows = key, rows
            self._last_step = step._replace(update=None)
        self._num_steps += 1
        return step._replace(number=self._num_steps, fed_tokens=fed_tokens)

    def settle(
        self, step: PenaltyStep | None, lens: Sequence[int] | torch.Tensor | None = None
    ) -> None:
        """Note what a forward has committed, so that no more than that keeps its room.

        Parameters
        ----------
        step : PenaltyStep or None
            The forward's step. Each is settled once, in the order of planning. Requests that are gone
            are left out.
        lens : sequence of int, or Tensor on the host, shape (B,), optional
            Tokens of each row of the batch that were committed; by default as many as could be.

        Raises
        ------
        PenaltyStepError
            If the step, or one behind it, was settled before.
        """
        if step is None:
            return
        if step.number <= self._num_settled:
            raise PenaltyStepError(
                f"step {step.number} of the penalties is settled behind step {self._num_settled}"
            )
        self._num_settled = step.number
        rows = step.rows
        slots, lengths, reserves = rows.slots, rows.limits, rows.reserves
        if lens is not None:
            lengths = np.minimum(np.asarray(lens)[rows.rows], lengths)
        is_here = self._generations[slots] == rows.generations
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
    ) -> PenaltyRows | None:
        if not 0 < max_tokens <= layout.MAX_TOKENS:
            raise ValueError(f"max_tokens must be in [1, {layout.MAX_TOKENS}], got {max_tokens}")
        if num_draft_tokens > self.pool.max_draft_tokens:
            raise ValueError(
                f"trees of {num_draft_tokens} nodes in a pool for {self.pool.max_draft_tokens}"
            )
        all_slots = np.asarray(slots, np.int64)
        if slots and max(slots) >= self.pool.num_slots:
            raise ValueError(f"slot {max(slots)} is outside the penalty pool")
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
        return PenaltyRows(rows, taken, self._generations[taken], limits, reserves, extras)

    # ---- pages

    def _reserve(self, rows: PenaltyRows) -> list[tuple[int, int, int]]:
        """Make room for a step; returns slot, ordinal and page of each page that is given."""
        slots = rows.slots
        needed = self._settled[slots] + self._in_flight[slots] + rows.extras
        short = (needed > self._capacity[slots]).nonzero()[0]
        grown = self._grow(rows, short.tolist()) if len(short) > 0 else []
        self._in_flight[slots] += rows.reserves
        return grown

    def _grow(self, rows: PenaltyRows, short: list[int]) -> list[tuple[int, int, int]]:
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
        self._capacity[slot] = size if size < self.pool.vocab_size else INT32_MAX
        return given

    # ---- what goes to the device

    def _make_step(
        self,
        key: tuple[list[int], int, int, list[int]],
        rows: PenaltyRows,
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
            rows=rows,
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
