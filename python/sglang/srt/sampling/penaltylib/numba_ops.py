"""Sparse penalties as loops over entries, compiled by numba: the backend of the CPU.

A step in torch is some forty operations of a few microseconds each, whatever there is to do. Here a
verb is one call that reads each entry once and leaves Python to the other thread meanwhile.

The compiler may neither fuse nor reorder arithmetic, so the numbers are those of the other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import boolean, float32, int32, int64, uint8, void
from numba.core import cgutils
from numba.extending import intrinsic

from sglang.srt.sampling.penaltylib.sparse_layout import (
    BIAS,
    COUNT_MASK,
    COUNTING,
    FREQUENCY,
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
    from sglang.srt.sampling.penaltylib.sparse_penalties import PenaltyStep

AHEAD = 24
"""Entries that a logit is asked for ahead of its turn, for nearly each is a miss of all caches. 64 rows
of 128 k logits with 2048 tokens took 2.8 ms without on an EPYC, 1.8 with 8, 1.2 with 24, 1.7 with 48."""


def _compiled(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile now, when an engine starts, and not at its first token; or read what was compiled."""

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:  # no folder that the code could be kept in
            return numba.njit(signature, **options)(function)

    return compile_


@intrinsic
def _prefetch(typing_context: Any, array: Any, place: Any) -> Any:
    """Begin to bring an element of a vector into the cache, and go on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        struct = context.make_array(kind)(context, builder, args[0])
        pointer = cgutils.get_item_pointer(context, builder, kind, struct, [args[1]])
        byte_pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [byte_pointer],
            ir.FunctionType(ir.VoidType(), [byte_pointer, flag, flag, flag]),
        )
        # To be written; to be kept in all levels; data.
        flags = [ir.Constant(flag, value) for value in (1, 3, 1)]
        builder.call(prefetch, [builder.bitcast(pointer, byte_pointer), *flags])
        return context.get_dummy_value()

    return void(array, place), generate


_MATRIX = int32[:, ::1]
_POOL = int32[::1]


@_compiled(int64(_POOL, _MATRIX, int64, int64, int64))
def _find(stored, page_table, slot, length, token):
    """Entry of a token in the first `length` ones of a slot's list, -1 if there is none."""
    for start in range(0, length, PAGE):
        first = page_table[slot, start // PAGE] * PAGE
        page = stored[first : first + min(PAGE, length - start)]
        hit = -1
        # Without a way out before the end of the page, eight entries are compared at once.
        for i in range(len(page)):
            hit = max(hit, i if page[i] == token else -1)
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
                entry = _find(stored, page_table, slot, length, token)
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
        float32[:, :],
        _MATRIX,
        _MATRIX,
        float32[:, ::1],
        _MATRIX,
        _POOL,
        _POOL,
        _MATRIX,
        float32[::1],
        uint8[:, :, ::1],
        _POOL,
        boolean,
    )
)
def _apply(
    logits,
    index,
    headers,
    params,
    page_table,
    stored,
    metas,
    draft_entries,
    biases,
    ancestors,
    staged_counts,
    is_tree,
):
    """Penalize rows in place. `staged_counts` has a zero for each entry, and has them again after."""
    num_nodes = ancestors.shape[1] if is_tree else 1
    for column in range(index.shape[1]):
        slot = index[SLOT, column]
        if slot < 0:
            continue
        row = index[ROW, column]
        frequency = params[slot, FREQUENCY]
        presence = params[slot, PRESENCE]
        repetition = params[slot, REPETITION]
        length = headers[slot, NUM_STAGED if is_tree else NUM_ENTRIES]
        for node in range(num_nodes):
            num_output = headers[slot, NUM_OUTPUT]
            # Nodes on the way from the root, without it.
            for inner in range(1, num_nodes):
                if ancestors[row, node, inner]:
                    num_output += 1
                    if draft_entries[slot, inner] >= 0:
                        staged_counts[draft_entries[slot, inner]] += 1
            is_short = num_output < headers[slot, MIN_NEW]
            values = logits[row * num_nodes + node]
            for start in range(0, length, PAGE):
                first = page_table[slot, start // PAGE] * PAGE
                last = min(PAGE, length - start) - 1
                for i in range(min(AHEAD, last + 1)):
                    _prefetch(values, int64(stored[first + i]))
                for i in range(last + 1):
                    _prefetch(values, int64(stored[first + min(i + AHEAD, last)]))
                    token, meta = stored[first + i], metas[first + i]
                    count = (meta & COUNT_MASK) + staged_counts[start + i]
                    x = values[token]
                    if count > 0:
                        x -= frequency * float32(count) + presence
                        # A choice of factors and not of results: no branch waits for the logit, so
                        # the processor is at the next ones already. What is 1 changes no bit.
                        is_negative = x < 0
                        x *= repetition if is_negative else float32(1)
                        x /= float32(1) if is_negative else repetition
                    if meta & BIAS:
                        x += biases[first + i]
                    if meta & STOP and is_short:
                        x = float32(-np.inf)
                    values[token] = x
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


class NumbaPenaltyOps:
    """What `PenaltyState` asks of a backend, see there."""

    def __init__(self) -> None:
        # For logits of 16 bits, in which no engine penalizes on a CPU.
        self._torch_ops = TorchPenaltyOps()
        self._pool: tuple[np.ndarray, ...] = ()
        self._pool_of: torch.Tensor | None = None
        self._staged_counts = np.zeros(0, np.int32)

    def ingest(
        self,
        tables: PenaltyTables,
        step: PenaltyStep,
        tokens: torch.Tensor,
        lens: torch.Tensor | None,
        commit: bool,
    ) -> None:
        """Append `tokens`, shape (B, K), to the lists, counted (`commit`) or as tails."""
        headers, _, page_table, stored, metas, draft_entries, _ = self._arrays(tables)
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
        """Penalize the rows of `logits`, shape (B * D, V), in place; D is 1 without `ancestors`."""
        if logits.dtype != torch.float32:
            self._torch_ops.apply(tables, step, logits, ancestors)
            return
        headers, params, page_table, stored, metas, draft_entries, biases = self._arrays(tables)
        _apply(
            logits.detach().numpy(),
            step.index.numpy(),
            headers,
            params,
            page_table,
            stored,
            metas,
            draft_entries,
            biases,
            _NO_TREES if ancestors is None else ancestors.view(torch.uint8).numpy(),
            self._staged_counts,
            ancestors is not None,
        )

    def ancestors(self, parents: torch.Tensor) -> torch.Tensor:
        """Who is on whose way, shape (B, D, D), bool, see `ancestors_from_parents`."""
        num_trees, num_nodes = parents.shape
        mask = torch.zeros((num_trees, num_nodes, num_nodes), dtype=torch.bool)
        _mark_ways(parents.to(torch.int64).numpy(), mask.view(torch.uint8).numpy())
        return mask

    def _arrays(self, tables: PenaltyTables) -> tuple[np.ndarray, ...]:
        """The tables' memory, seen by numpy. It stays where it is until the pool grows."""
        if self._pool_of is not tables.biases:
            self._pool_of = tables.biases
            self._pool = tuple(
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
            self._staged_counts = np.zeros(len(tables.tokens), np.int32)
        return self._pool
