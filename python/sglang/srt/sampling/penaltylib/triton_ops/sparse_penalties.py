"""Kernels of the sparse penalties, for NVIDIA and AMD GPUs, and what launches them.

The launches of `ingest` and `apply` have the same grids whatever the lists hold, read every number from
tensors, and allocate nothing: a CUDA graph may hold them. Each slot is written by one program alone, so
there are no atomics, and no result depends on what else is in the batch.

Fusing a product and a sum is forbidden to the compiler, so that the numbers are those of the CPU.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib.sparse_layout import PenaltyTables

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib.sparse_step import PenaltyStep, PenaltyUpdate

PAGE = tl.constexpr(layout.PAGE)
COUNT_MASK = tl.constexpr(layout.COUNT_MASK)
STOP = tl.constexpr(layout.STOP)
BIAS = tl.constexpr(layout.BIAS)
HEADER = tl.constexpr(layout.HEADER)
NUM_ENTRIES = tl.constexpr(layout.NUM_ENTRIES)
NUM_STAGED = tl.constexpr(layout.NUM_STAGED)
NUM_OUTPUT = tl.constexpr(layout.NUM_OUTPUT)
MIN_NEW = tl.constexpr(layout.MIN_NEW)
COUNTING = tl.constexpr(layout.COUNTING)
FREQUENCY = tl.constexpr(layout.FREQUENCY)
PRESENCE = tl.constexpr(layout.PRESENCE)
REPETITION = tl.constexpr(layout.REPETITION)
ROW = tl.constexpr(layout.ROW)
SLOT = tl.constexpr(layout.SLOT)
LIMIT = tl.constexpr(layout.LIMIT)
PAGES = tl.constexpr(layout.PAGES)

SPLIT = 4
"""Programs that share a row's list in `apply_kernel`."""


@triton.jit
def _load_places(page_table, page_table_stride, slot, entries, mask):
    """Places of a slot's entries in the pool."""
    pages = tl.load(page_table + slot * page_table_stride + entries // PAGE, mask=mask, other=0)
    return pages.to(tl.int64) * PAGE + entries % PAGE


# An argument whose value changes from step to step, or from engine to engine, must not make another
# kernel of each value that is 1 or a multiple of 16: it would be compiled while requests wait.
@triton.jit(
    do_not_specialize=["index_stride", "tokens_stride", "num_given"],
    do_not_specialize_on_alignment=["tokens", "lens"],
)
def ingest_kernel(
    index,
    index_stride,
    tokens,
    tokens_stride,
    lens,
    headers,
    page_table,
    page_table_stride,
    stored,
    metas,
    draft_entries,
    draft_stride,
    vocab_size,
    num_given,
    HAS_LENS: tl.constexpr,
    COMMIT: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Append tokens to the list of one slot, counted (COMMIT) or as a tail. Grid (rows of the step,)."""
    column = index + tl.program_id(0)
    slot = tl.load(column + SLOT * index_stride).to(tl.int64)
    if slot < 0:
        return
    row = tl.load(column + ROW * index_stride).to(tl.int64)
    capacity = tl.load(column + PAGES * index_stride) * PAGE
    header = headers + slot * HEADER
    length = tl.load(header + NUM_ENTRIES)
    is_counting = tl.load(header + COUNTING)

    num = num_given
    if COMMIT:
        num = tl.minimum(num, tl.load(column + LIMIT * index_stride))
        if HAS_LENS:
            num = tl.maximum(tl.minimum(num, tl.load(lens + row).to(tl.int32)), 0)
    order = tl.arange(0, K)
    given = tl.load(tokens + row * tokens_stride + order, mask=order < num, other=-1).to(tl.int64)
    is_counted = (given >= 0) & (given < vocab_size)
    if not COMMIT:
        is_counted = is_counted & (order > 0)  # the root is counted already
    is_counted = is_counted & (order * 0 + is_counting != 0)
    given = tl.where(is_counted, given, -1).to(tl.int32)

    same = (given[:, None] == given[None, :]) & is_counted[:, None]
    repeats = tl.sum(same.to(tl.int32), 1)
    first = tl.min(tl.where(same, order[None, :], K), 1)
    is_first = is_counted & (first == order)
    entries = tl.full([K], -1, tl.int32)
    for start in range(0, length * is_counting, BLOCK):
        numbers = start + tl.arange(0, BLOCK)
        is_entry = numbers < length
        places = _load_places(page_table, page_table_stride, slot, numbers, is_entry)
        held = tl.load(stored + places, mask=is_entry, other=-2)
        hits = held[:, None] == given[None, :]
        entries = tl.maximum(entries, tl.max(tl.where(hits, numbers[:, None], -1), 0))

    is_new = is_first & (entries < 0)
    is_new_int = is_new.to(tl.int32)
    behind = length + tl.cumsum(is_new_int, 0) - 1
    if not COMMIT:
        # A new token that occurs again has the entry of its first occurrence.
        behind = tl.sum(tl.where(first[:, None] == order[None, :], behind[None, :], 0), 1)
    entries = tl.where(entries < 0, behind, entries)

    is_written = is_first & (entries < capacity)
    is_appended = is_new & (entries < capacity)
    places = _load_places(page_table, page_table_stride, slot, entries, is_written)
    counts = tl.load(metas + places, mask=is_written & (is_new_int == 0), other=0)
    if COMMIT:
        counts += repeats
    num_output = tl.load(header + NUM_OUTPUT)
    # All warps read the header for themselves. None may find what another has written already.
    tl.debug_barrier()
    tl.store(metas + places, counts, mask=is_written)
    tl.store(stored + places, given, mask=is_appended)

    # The planner sees to it that all of them fit. If it did not, the list would end here.
    staged = tl.minimum(length + tl.sum(is_new_int, 0), capacity)
    tl.store(header + NUM_STAGED, staged)
    if COMMIT:
        tl.store(header + NUM_ENTRIES, staged)
        tl.store(header + NUM_OUTPUT, num_output + num)
    else:
        entries = tl.where(is_counted, entries, -1)
        tl.store(draft_entries + slot * draft_stride + order, entries, mask=order < num_given)


@triton.jit(
    do_not_specialize=["index_stride", "num_nodes"],
    do_not_specialize_on_alignment=["logits", "ancestors"],
)
def apply_kernel(
    logits,
    logits_stride,
    index,
    index_stride,
    headers,
    page_table,
    page_table_stride,
    stored,
    metas,
    draft_entries,
    draft_stride,
    biases,
    ancestors,
    num_nodes,
    vocab_size,
    IS_TREE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Penalize a share of one row of logits. Grid (rows of the step * nodes of a tree, SPLIT)."""
    pid = tl.program_id(0)
    column = index + pid // num_nodes
    slot = tl.load(column + SLOT * index_stride).to(tl.int64)
    if slot < 0:
        return
    row = tl.load(column + ROW * index_stride).to(tl.int64) * num_nodes + pid % num_nodes
    header = headers + slot * HEADER
    num_output = tl.load(header + NUM_OUTPUT)
    min_new = tl.load(header + MIN_NEW)
    frequency = tl.load(header + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(header + PRESENCE).to(tl.float32, bitcast=True)
    repetition = tl.load(header + REPETITION).to(tl.float32, bitcast=True)
    length = tl.load(header + NUM_ENTRIES)
    if IS_TREE:
        length = tl.load(header + NUM_STAGED)
        node = tl.arange(0, D)
        # Nodes on the way from the root, without it.
        is_inner = (node > 0) & (node < num_nodes)
        way = tl.load(ancestors + row * num_nodes + node, mask=is_inner, other=0) != 0
        num_output += tl.sum(way.to(tl.int32), 0)
        staged = tl.load(draft_entries + slot * draft_stride + node, mask=way, other=-1)

    for start in range(tl.program_id(1) * BLOCK, length, SPLIT * BLOCK):
        numbers = start + tl.arange(0, BLOCK)
        is_entry = numbers < length
        places = _load_places(page_table, page_table_stride, slot, numbers, is_entry)
        token = tl.load(stored + places, mask=is_entry, other=-1)
        meta = tl.load(metas + places, mask=is_entry, other=0)
        counts = meta & COUNT_MASK
        if IS_TREE:
            counts += tl.sum((numbers[:, None] == staged[None, :]).to(tl.int32), 1)
        is_seen = counts > 0
        is_biased = (meta & BIAS) != 0
        # A comparison of vectors: the interpreter takes a mask of two scalars for something else.
        is_masked = ((meta & STOP) != 0) & (num_output + meta * 0 < min_new)
        is_live = is_seen | is_biased | is_masked
        is_live = is_live & is_entry & (token >= 0) & (token < vocab_size)

        pointers = logits + row * logits_stride + token
        x = tl.load(pointers, mask=is_live, other=0.0).to(tl.float32)
        scaled = x - (frequency * counts.to(tl.float32) + presence)
        scaled = tl.where(scaled < 0, scaled * repetition, tl.div_rn(scaled, repetition))
        x = tl.where(is_seen, scaled, x)
        bias = tl.load(biases + places, mask=is_entry & is_biased, other=0.0)
        x = tl.where(is_biased, x + bias, x)
        x = tl.where(is_masked, float("-inf"), x)
        tl.store(pointers, x.to(logits.dtype.element_ty), mask=is_live)


@triton.jit(do_not_specialize=["num_nodes"], do_not_specialize_on_alignment=["parents"])
def ancestors_kernel(parents, mask, num_nodes, D: tl.constexpr):
    """Who is on whose way in one tree, itself included. Grid (trees,)."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, D)
    is_node = node < num_nodes
    here = tl.where(is_node, node, -1)
    way = tl.zeros([D, D], tl.int32)
    # No way is longer than the number of nodes, and what is no tree ends too.
    for _ in range(num_nodes):
        way = way | (here[:, None] == node[None, :]).to(tl.int32)
        parent = tl.load(parents + tree * num_nodes + here, mask=here >= 0, other=-1).to(tl.int32)
        here = tl.where((parent >= 0) & (parent < num_nodes), parent, -1)
    places = (tree * num_nodes + node[:, None]) * num_nodes + node[None, :]
    tl.store(mask + places, way.to(tl.int8), mask=is_node[:, None] & is_node[None, :])


@triton.jit(do_not_specialize=["start", "num_given", "num_admitted", "num_entries"])
def update_kernel(
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
    BLOCK: tl.constexpr,
):
    """Write pages, headers and entries, packed as `PenaltyUpdate` says. Grid (blocks,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = packed + start
    is_given = i < num_given
    place = tl.load(part + i, mask=is_given, other=0)
    tl.store(page_table + place, tl.load(part + num_given + i, mask=is_given), mask=is_given)

    part += 2 * num_given
    is_header = i < HEADER * num_admitted
    slot = tl.load(part + i // HEADER, mask=is_header, other=0).to(tl.int64)
    value = tl.load(part + num_admitted + i, mask=is_header)
    tl.store(headers + slot * HEADER + i % HEADER, value, mask=is_header)

    part += (1 + HEADER) * num_admitted
    is_entry = i < num_entries
    place = tl.load(part + i, mask=is_entry, other=0)
    tl.store(stored + place, tl.load(part + num_entries + i, mask=is_entry), mask=is_entry)
    tl.store(metas + place, tl.load(part + 2 * num_entries + i, mask=is_entry), mask=is_entry)
    bits = tl.load(part + 3 * num_entries + i, mask=is_entry)
    tl.store(biases + place, bits.to(tl.float32, bitcast=True), mask=is_entry)


class Launch(NamedTuple):
    """What of a launch is fixed when a kernel is compiled."""

    constants: dict[str, Any]
    num_warps: int = 4


def update_launch() -> Launch:
    """For any update."""
    return Launch({"BLOCK": 256})


def ingest_launch(num_given: int, has_lens: bool, commit: bool) -> Launch:
    """For `num_given` tokens of each request. A block holds up to 4096 comparisons.

    Twice the warps for the widest: with four, AMD's compiler spills the masks of the pairs.
    """
    width = max(2, triton.next_power_of_2(num_given))
    block = max(64, min(1024, 4096 // width))
    constants = {"HAS_LENS": has_lens, "COMMIT": commit, "K": width, "BLOCK": block}
    return Launch(constants, num_warps=_warps_for_pairs(width))


def apply_launch(num_nodes: int | None) -> Launch:
    """For trees of `num_nodes` nodes, or for one row a request (None)."""
    if num_nodes is None:
        return Launch({"IS_TREE": False, "D": 2, "BLOCK": 256, "SPLIT": SPLIT})
    width = max(2, triton.next_power_of_2(num_nodes))
    block = max(64, min(256, 4096 // width))
    return Launch({"IS_TREE": True, "D": width, "BLOCK": block, "SPLIT": SPLIT})


def ancestors_launch(num_nodes: int) -> Launch:
    """For trees of `num_nodes` nodes."""
    width = max(2, triton.next_power_of_2(num_nodes))
    return Launch({"D": width}, num_warps=_warps_for_pairs(width))


def _warps_for_pairs(width: int) -> int:
    return 8 if width >= 64 else 4


def _launch(kernel: Any, grid: tuple[int, ...], launch: Launch, *args: Any) -> None:
    kernel[grid](*args, **launch.constants, num_warps=launch.num_warps, enable_fp_fusion=False)


class TritonPenaltyOps:
    """The `PenaltyOps` of GPUs."""

    nbytes = 0
    """See `PenaltyOps`."""

    def update(self, tables: PenaltyTables, update: "PenaltyUpdate") -> None:
        """See `PenaltyOps`."""
        launch = update_launch()
        longest = max(update.num_given, layout.HEADER * update.num_admitted, update.num_entries)
        _launch(
            update_kernel,
            (triton.cdiv(longest, launch.constants["BLOCK"]),),
            launch,
            update.packed,
            update.start,
            update.num_given,
            update.num_admitted,
            update.num_entries,
            tables.headers,
            tables.page_table,
            tables.tokens,
            tables.metas,
            tables.biases,
        )

    def ingest(
        self,
        tables: PenaltyTables,
        step: "PenaltyStep",
        tokens: torch.Tensor,
        lens: torch.Tensor | None,
        commit: bool,
    ) -> None:
        """See `PenaltyOps`."""
        num_given = tokens.shape[1]
        _launch(
            ingest_kernel,
            (step.num_rows,),
            ingest_launch(num_given, lens is not None, commit),
            step.index,
            step.index.stride(0),
            tokens,
            tokens.stride(0),
            tokens if lens is None else lens,
            *self._pool(tables),
            tables.vocab_size,
            num_given,
        )

    def apply(
        self,
        tables: PenaltyTables,
        step: "PenaltyStep",
        logits: torch.Tensor,
        ancestors: torch.Tensor | None,
    ) -> None:
        """See `PenaltyOps`."""
        num_nodes = None if ancestors is None else ancestors.shape[1]
        _launch(
            apply_kernel,
            (step.num_rows * (num_nodes or 1), SPLIT),
            apply_launch(num_nodes),
            logits,
            logits.stride(0),
            step.index,
            step.index.stride(0),
            *self._pool(tables),
            tables.biases,
            step.index if ancestors is None else ancestors.view(torch.uint8),
            num_nodes or 1,
            tables.vocab_size,
        )

    def ancestors(self, parents: torch.Tensor) -> torch.Tensor:
        """See `PenaltyOps`."""
        num_trees, num_nodes = parents.shape
        mask = torch.empty(
            (num_trees, num_nodes, num_nodes), dtype=torch.bool, device=parents.device
        )
        _launch(
            ancestors_kernel,
            (num_trees,),
            ancestors_launch(num_nodes),
            parents,
            mask.view(torch.int8),
            num_nodes,
        )
        return mask

    @staticmethod
    def _pool(tables: PenaltyTables) -> tuple[Any, ...]:
        return (
            tables.headers,
            tables.page_table,
            tables.page_table.stride(0),
            tables.tokens,
            tables.metas,
            tables.draft_entries,
            tables.draft_entries.stride(0),
        )
