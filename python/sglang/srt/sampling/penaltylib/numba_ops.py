"""Sparse penalties as loops over entries, compiled by numba: the backend of the CPU.

A step in torch is some forty operations of a few microseconds each, whatever there is to do. Here a
verb is one call that reads each entry once and leaves Python to the other thread meanwhile.

The compiler may neither fuse nor reorder arithmetic, so the numbers are those of the other backends.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from numba import boolean, float32, int32, int64, uint8, uint64, void

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib.sparse_layout import (
    BIAS,
    COUNT_MASK,
    COUNTING,
    FREQUENCY,
    HEADER,
    LIMIT,
    MIN_NEW,
    NUM_ENTRIES,
    NUM_OUTPUT,
    NUM_STAGED,
    PAGE,
    PAGES,
    PRESENCE,
    REPETITION,
    ROW,
    SLOT,
    STOP,
    PenaltyTables,
)
from sglang.srt.sampling.penaltylib.torch_ops import TorchPenaltyOps

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib.sparse_step import PenaltyStep, PenaltyUpdate

logger = logging.getLogger(__name__)

SHARE = 512
"""Pages of lists that are worth another thread's while. With half as many, two lose some 40 us."""


def _cache_folder() -> str:
    """Where compiled code is kept. It has the layout's constants in it, which numba does not look at."""
    values = {k: v for k, v in vars(layout).items() if k.isupper() and isinstance(v, int)}
    key = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:12]
    root = numba.config.CACHE_DIR
    if not root:
        root = Path(__file__).parent / "__pycache__"
        if not os.access(root if root.is_dir() else root.parent, os.W_OK):
            root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-numba"
    return str(Path(root) / f"layout-{key}")


def _compiled(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile now, when an engine starts, and not at its first token; or read what was compiled."""

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"nogil": True, "error_model": "numpy"}
        kept = numba.config.CACHE_DIR
        try:
            numba.config.CACHE_DIR = _cache_folder()
            return numba.njit(signature, cache=True, **options)(function)
        except Exception as error:
            # No folder, no space in it, half a file. If it is the code, it shows once more.
            logger.debug("compiled code of %s cannot be kept: %s", function.__name__, error)
            return numba.njit(signature, **options)(function)
        finally:
            numba.config.CACHE_DIR = kept

    return compile_


_MATRIX = int32[:, ::1]
_POOL = int32[::1]


@_compiled(int64(_POOL, int64, int64, int64, int64, _MATRIX, _MATRIX, _POOL, _POOL, float32[::1]))
def _update(
    packed,
    start,
    num_given,
    num_admitted,
    num_entries,
    headers,
    page_table,
    stored,
    metas,
    biases,
):
    """Write what `PenaltyUpdate.parts` takes apart to where it belongs.

    Returns how many pages the longest of the lists has that were given any.
    """
    longest = 0
    per_slot = page_table.shape[1]
    table_places = packed[start:]
    pages = table_places[num_given:]
    for i in range(num_given):
        slot, ordinal = table_places[i] // per_slot, table_places[i] % per_slot
        page_table[slot, ordinal] = pages[i]
        longest = max(longest, ordinal + 1)
    slots = pages[num_given:]
    values = slots[num_admitted:]
    for i in range(num_admitted):
        for column in range(HEADER):
            headers[slots[i], column] = values[i * HEADER + column]
    places = values[num_admitted * HEADER :]
    tokens, counts = places[num_entries:], places[2 * num_entries :]
    bits = places[3 * num_entries :].view(np.float32)
    for i in range(num_entries):
        stored[places[i]] = tokens[i]
        metas[places[i]] = counts[i]
        biases[places[i]] = bits[i]
    return longest


@_compiled(int64(_POOL, _MATRIX, int64, int64, int32))
def _find(stored, page_table, slot, length, token):
    """Entry of a token in the first `length` ones of a slot's list, -1 if there is none."""
    for start in range(0, length, PAGE):
        first = page_table[slot, start // PAGE] * PAGE
        page = stored[first : first + min(PAGE, length - start)]
        hit = int32(-1)
        # Without a way out before the end of the page, many entries are compared at once.
        for i in range(int32(len(page))):
            hit = max(hit, int32(i) if page[i] == token else int32(-1))
        if hit >= 0:
            return start + hit
    return -1


@_compiled(
    void(
        _MATRIX,
        int64[:, :],
        int64[:],
        _MATRIX,
        _MATRIX,
        _POOL,
        _POOL,
        _MATRIX,
        int64,
        boolean,
        boolean,
    )
)
def _ingest(
    index,
    tokens,
    lens,
    headers,
    page_table,
    stored,
    metas,
    draft_entries,
    vocab_size,
    has_lens,
    commit,
):
    """Append tokens to the lists, counted (`commit`) or as tails, one after the other."""
    for column in range(index.shape[1]):
        slot = index[SLOT, column]
        if slot < 0:
            continue
        row = index[ROW, column]
        capacity = index[PAGES, column] * PAGE
        is_counting = headers[slot, COUNTING] != 0
        length = headers[slot, NUM_ENTRIES]
        num = tokens.shape[1]
        if commit:
            num = min(num, index[LIMIT, column])
            if has_lens:
                num = max(min(num, lens[row]), 0)
        for k in range(num):
            token = tokens[row, k]
            is_counted = is_counting and 0 <= token < vocab_size
            # The root is counted already.
            is_counted = is_counted and (commit or k > 0)
            entry = -1
            if is_counted:
                entry = _find(stored, page_table, slot, length, int32(token))
                # The planner sees to it that all fit. If it did not, the list would end here.
                if entry < 0 and length < capacity:
                    entry = length
                    place = page_table[slot, entry // PAGE] * PAGE + entry % PAGE
                    stored[place] = token
                    metas[place] = 0
                    length += 1
            if commit and entry >= 0:
                metas[page_table[slot, entry // PAGE] * PAGE + entry % PAGE] += 1
            if not commit:
                draft_entries[slot, k] = entry
        headers[slot, NUM_STAGED] = length
        if commit:
            headers[slot, NUM_ENTRIES] = length
            headers[slot, NUM_OUTPUT] += num


@_compiled(
    void(
        float32[::1],
        int64,
        _MATRIX,
        int64,
        int64,
        _MATRIX,
        float32[:, ::1],
        _MATRIX,
        _POOL,
        _POOL,
        _MATRIX,
        float32[::1],
        uint8[:, :, ::1],
        _POOL,
        float32[::1],
        boolean,
    )
)
def _apply(
    logits,
    stride,
    index,
    begin,
    end,
    headers,
    params,
    page_table,
    stored,
    metas,
    draft_entries,
    biases,
    ancestors,
    staged_counts,
    page_logits,
    is_tree,
):
    """Penalize nodes `begin` to `end` of all rows' nodes in place, `stride` logits from each other.

    `staged_counts` has a zero for each entry, and has them again after. `page_logits` is for a page's.

    A page of a list is read, computed and written in three loops. The first one only reads, for nearly
    each logit is a miss of all caches, and so many of them are waited for at once. The second works on
    memory that lies side by side, on several entries at a time.
    """
    num_nodes = ancestors.shape[1] if is_tree else 1
    which = NUM_STAGED if is_tree else NUM_ENTRIES
    for item in range(begin, end):
        column, node = item // num_nodes, item % num_nodes
        slot = index[SLOT, column]
        if slot < 0:
            continue
        row = index[ROW, column]
        frequency = params[slot, FREQUENCY]
        presence = params[slot, PRESENCE]
        repetition = params[slot, REPETITION]
        length = headers[slot, which]
        num_output = headers[slot, NUM_OUTPUT]
        # Nodes on the way from the root, without it.
        for inner in range(1, num_nodes):
            if ancestors[row, node, inner]:
                num_output += 1
                if draft_entries[slot, inner] >= 0:
                    staged_counts[draft_entries[slot, inner]] += 1
        is_short = num_output < headers[slot, MIN_NEW]
        place = (row * num_nodes + node) * stride
        for start in range(0, length, PAGE):
            first = page_table[slot, start // PAGE] * PAGE
            num = min(PAGE, length - start)
            tokens, page_metas = stored[first : first + num], metas[first : first + num]
            values, counts = page_logits[:num], staged_counts[start : start + num]
            for i in range(num):
                values[i] = logits[uint64(place + tokens[i])]
            flags = int32(0)
            for i in range(num):
                flags = int32(flags | page_metas[i])
                count = int32((page_metas[i] & COUNT_MASK) + counts[i])
                # What is 0 or 1 changes no bit.
                x = values[i] - (frequency * float32(count) + presence if count > 0 else float32(0))
                scale = repetition if count > 0 else float32(1)
                values[i] = x * scale if x < 0 else x / scale
            if flags & (BIAS | STOP):
                for i in range(num):
                    if page_metas[i] & BIAS:
                        values[i] += biases[first + i]
                    if page_metas[i] & STOP and is_short:
                        values[i] = float32(-np.inf)
            for i in range(num):
                logits[uint64(place + tokens[i])] = values[i]
        for inner in range(1, num_nodes):
            if ancestors[row, node, inner] and draft_entries[slot, inner] >= 0:
                staged_counts[draft_entries[slot, inner]] = 0


@_compiled(void(int64[:, ::1], uint8[:, :, ::1]))
def _mark_ways(parents, mask):
    """Put a one in `mask` for each node on the way of each node, itself included."""
    num_nodes = parents.shape[1]
    for tree in range(len(parents)):
        for node in range(num_nodes):
            here = node
            # No way is longer than the number of nodes, and what is no tree ends too.
            for _ in range(num_nodes):
                mask[tree, node, here] = 1
                here = parents[tree, here]
                if not 0 <= here < num_nodes:
                    break


_NO_LENS = np.empty(0, np.int64)
_NO_TREES = np.empty((0, 0, 0), np.uint8)


class _Scratch:
    """What one thread of an `apply` needs for itself.

    Attributes
    ----------
    staged_counts : ndarray, shape (entries of the longest list,), int32
        Zeros.
    page_logits : ndarray, shape (PAGE,), float32
    """

    def __init__(self, num_entries: int) -> None:
        self.staged_counts = np.zeros(num_entries, np.int32)
        self.page_logits = np.empty(PAGE, np.float32)

    @property
    def nbytes(self) -> int:
        return self.staged_counts.nbytes + self.page_logits.nbytes


class NumbaPenaltyOps:
    """The `PenaltyOps` of CPUs with numba.

    An `apply` that has much to do is shared by as many threads as torch's operations have.
    """

    def __init__(self) -> None:
        # For logits of 16 bits, in which no engine penalizes on a CPU.
        self._torch_ops = TorchPenaltyOps()
        self._arrays_of: torch.Tensor | None = None
        self._arrays: tuple[np.ndarray, ...] = ()
        self._longest = 0
        self._scratch: list[_Scratch] = []
        self._threads: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """See `PenaltyOps`."""
        return sum(scratch.nbytes for scratch in self._scratch) + self._torch_ops.nbytes

    def update(self, tables: PenaltyTables, update: PenaltyUpdate) -> None:
        """See `PenaltyOps`."""
        headers, _, page_table, stored, metas, _, biases = self._arrays_in(tables)
        longest = _update(
            update.packed.numpy(),
            update.start,
            update.num_given,
            update.num_admitted,
            update.num_entries,
            headers,
            page_table,
            stored,
            metas,
            biases,
        )
        self._longest = max(self._longest, longest)

    def ingest(
        self,
        tables: PenaltyTables,
        step: PenaltyStep,
        tokens: torch.Tensor,
        lens: torch.Tensor | None,
        commit: bool,
    ) -> None:
        """See `PenaltyOps`."""
        headers, _, page_table, stored, metas, draft_entries, _ = self._arrays_in(tables)
        _ingest(
            step.index.numpy(),
            tokens.to(torch.int64).numpy(),
            _NO_LENS if lens is None else lens.to(torch.int64).numpy(),
            headers,
            page_table,
            stored,
            metas,
            draft_entries,
            tables.vocab_size,
            lens is not None,
            commit,
        )

    def apply(
        self,
        tables: PenaltyTables,
        step: PenaltyStep,
        logits: torch.Tensor,
        ancestors: torch.Tensor | None,
    ) -> None:
        """See `PenaltyOps`."""
        if logits.dtype != torch.float32:
            self._torch_ops.apply(tables, step, logits, ancestors)
            return
        headers, params, page_table, stored, metas, draft_entries, biases = self._arrays_in(tables)
        flat, index = _flat_array(logits), step.index.numpy()
        trees = _NO_TREES if ancestors is None else ancestors.view(torch.uint8).numpy()
        num_nodes = 1 if ancestors is None else ancestors.shape[1]
        num_items = step.num_rows * num_nodes
        num_shares = max(1, min(step.total_pages * num_nodes // SHARE, torch.get_num_threads()))
        scratches = self._scratches(num_shares)

        def run(share: int) -> None:
            _apply(
                flat,
                logits.stride(0),
                index,
                num_items * share // num_shares,
                num_items * (share + 1) // num_shares,
                headers,
                params,
                page_table,
                stored,
                metas,
                draft_entries,
                biases,
                trees,
                scratches[share].staged_counts,
                scratches[share].page_logits,
                ancestors is not None,
            )

        self._run_shares(run, num_shares)

    def _scratches(self, num: int) -> list[_Scratch]:
        num_entries = self._longest * PAGE
        if len(self._scratch) < num or len(self._scratch[0].staged_counts) < num_entries:
            num = max(num, len(self._scratch))
            self._scratch = [_Scratch(num_entries) for _ in range(num)]
        return self._scratch

    def _run_shares(self, run: Callable[[int], None], num_shares: int) -> None:
        others: dict[int, Future[None]] = {}
        if num_shares > 1:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(torch.get_num_threads() - 1, "penalties")
            # When the main thread has ended, Python starts no work on threads any more, and what goes
            # on serving does all of it itself.
            with contextlib.suppress(RuntimeError):
                for share in range(1, num_shares):
                    others[share] = self._threads.submit(run, share)
        run(0)
        for share in range(1, num_shares):
            # What no thread has begun yet is done sooner than waited for.
            if share not in others or others[share].cancel():
                run(share)
            else:
                others[share].result()

    def ancestors(self, parents: torch.Tensor) -> torch.Tensor:
        """See `PenaltyOps`."""
        num_trees, num_nodes = parents.shape
        mask = torch.zeros((num_trees, num_nodes, num_nodes), dtype=torch.bool)
        _mark_ways(parents.to(torch.int64).numpy(), mask.view(torch.uint8).numpy())
        return mask

    def _arrays_in(self, tables: PenaltyTables) -> tuple[np.ndarray, ...]:
        """The tables' memory, seen by numpy. It stays where it is until the pool grows."""
        if self._arrays_of is not tables.biases:
            self._arrays_of = tables.biases
            self._arrays = tuple(
                tensor.numpy()
                for tensor in (
                    tables.headers,
                    tables.params,
                    tables.page_table,
                    tables.tokens,
                    tables.metas,
                    tables.draft_entries,
                    tables.biases,
                )
            )
        return self._arrays


def _flat_array(logits: torch.Tensor) -> np.ndarray:
    """The memory of rows of logits, from the first to the last."""
    array = logits.detach().numpy()
    if array.flags.c_contiguous:
        return array.reshape(-1)
    size = (len(logits) - 1) * logits.stride(0) + logits.shape[1]
    return logits.detach().as_strided((size,), (1,)).numpy()
