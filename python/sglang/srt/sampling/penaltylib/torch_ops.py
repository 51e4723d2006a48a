"""Sparse penalties in plain torch: the backend of the CPU, and of devices without Triton.

No operation here has a size that depends on a tensor's values, so nothing waits for a device. The
sizes come from the step: how many pages each row's list may fill. What is gathered from these pages
is a rectangle of ``Q`` pages by `PAGE` entries, of which some lie behind the end of their list.

Every number is made of single operations that IEEE 754 rounds correctly: the vectorised middle of an
array and its scalar end give the same bits, so a row's result does not depend on where it lies. A fused
operation, such as ``torch.sub`` with ``alpha``, would not promise that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.sampling.penaltylib.sparse_layout import (
    BIAS,
    COUNT_MASK,
    COUNTING,
    FREQUENCY,
    LIMIT,
    MIN_NEW,
    NULL_PAGE,
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
    TRASH_PAGE,
    PenaltyTables,
)

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib.sparse_step import PenaltyStep, PenaltyUpdate

_NULL = NULL_PAGE * PAGE
_TRASH = TRASH_PAGE * PAGE


class _Lanes(NamedTuple):
    """Where the entries of a step's ``P`` rows lie, in ``Q`` pages. All int64.

    Attributes
    ----------
    rows, slots, limits, capacities : Tensor, shape (P,)
        Row of the batch, slot, most tokens to commit, and entries that the row's pages hold.
    owners : Tensor, shape (Q,)
        Which of the P rows a page belongs to; its pages lie together, in order.
    pages : Tensor, shape (Q,)
        Pages of the pool.
    numbers, places : Tensor, shape (Q, PAGE)
        Number of each entry in its list, and its place in the pool.
    firsts : Tensor, shape (P,)
        Place of each row's first entry; any place if the row has no page.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    limits: torch.Tensor
    capacities: torch.Tensor
    owners: torch.Tensor
    pages: torch.Tensor
    numbers: torch.Tensor
    places: torch.Tensor
    firsts: torch.Tensor


class TorchPenaltyOps:
    """The `PenaltyOps` of plain torch."""

    def __init__(self) -> None:
        # A batch that stays the same keeps its index, and with it the places of its entries.
        self._lanes: tuple[torch.Tensor | None, _Lanes | None] = (None, None)

    @property
    def nbytes(self) -> int:
        """See `PenaltyOps`."""
        return sum(tensor.nbytes for tensor in self._lanes[1] or ())

    def update(self, tables: PenaltyTables, update: PenaltyUpdate) -> None:
        """See `PenaltyOps`."""
        parts = update.parts()
        _put(tables.page_table.view(-1), parts.table_places, parts.table_pages)
        _put(tables.headers, parts.slots, parts.headers)
        _put(tables.tokens, parts.entry_places, parts.tokens)
        _put(tables.metas, parts.entry_places, parts.metas)
        _put(tables.biases, parts.entry_places, parts.biases.view(torch.float32))

    def ingest(
        self,
        tables: PenaltyTables,
        step: PenaltyStep,
        tokens: torch.Tensor,
        lens: torch.Tensor | None,
        commit: bool,
    ) -> None:
        """See `PenaltyOps`."""
        lanes = self._lanes_of(tables, step)
        headers = tables.headers[lanes.slots]
        tokens = tokens[lanes.rows]
        nums = _lens_of(lanes, tokens.shape[1], lens, commit)
        order = torch.arange(tokens.shape[1], device=tokens.device)
        is_counted = (order < nums.unsqueeze(1)) & (tokens >= 0) & (tokens < tables.vocab_size)
        is_counted &= headers[:, COUNTING, None] != 0
        if not commit:
            is_counted &= order > 0  # the root is counted already
        tokens = torch.where(is_counted, tokens, -1).to(torch.int32)

        lengths = headers[:, NUM_ENTRIES]
        entries, is_first, is_new, repeats = _locate(tables, lanes, tokens, is_counted, lengths)
        is_writable = is_first & (entries < lanes.capacities.unsqueeze(1))
        places = _places_of(tables, lanes, entries)
        places = torch.where(is_writable, places, _TRASH)
        counts = torch.where(is_new, 0, tables.metas[places])
        if commit:
            counts += repeats
        tables.metas[places] = counts
        places = torch.where(is_new, places, _TRASH)
        tables.tokens[places] = tokens

        # The planner sees to it that all of them fit. If it did not, the list would end here.
        lengths = torch.minimum(lengths + is_new.sum(-1), lanes.capacities)
        headers[:, NUM_STAGED] = lengths.to(torch.int32)
        if commit:
            headers[:, NUM_ENTRIES] = headers[:, NUM_STAGED]
            headers[:, NUM_OUTPUT] += nums.to(torch.int32)
        else:
            staged = torch.where(is_counted, entries, -1).to(torch.int32)
            tables.draft_entries[lanes.slots, : tokens.shape[1]] = staged
        tables.headers[lanes.slots] = headers

    def apply(
        self,
        tables: PenaltyTables,
        step: PenaltyStep,
        logits: torch.Tensor,
        ancestors: torch.Tensor | None,
    ) -> None:
        """See `PenaltyOps`."""
        lanes = self._lanes_of(tables, step)
        headers = tables.headers[lanes.slots]
        lengths = headers[:, NUM_ENTRIES if ancestors is None else NUM_STAGED]
        is_entry = lanes.numbers < lengths[lanes.owners].unsqueeze(1)
        # What lies behind a list's end stands in for the list's first entry, or for one without effect
        # if there is none: it writes what is written there anyway, to the bit, so order is nothing.
        firsts = torch.where(lengths > 0, lanes.firsts, _NULL)[lanes.owners]
        tokens = _read(tables.tokens, lanes, firsts, is_entry)
        metas = _read(tables.metas, lanes, firsts, is_entry)
        counts = metas & COUNT_MASK if step.has_flags else metas
        num_output = headers[:, NUM_OUTPUT, None]
        num_nodes = 1
        if ancestors is not None:
            num_nodes = ancestors.shape[1]
            ancestors = ancestors[lanes.rows][:, :, 1:].to(torch.float32)  # less the root
            num_output = num_output + ancestors.sum(-1).to(torch.int32)
            numbers = torch.where(is_entry, lanes.numbers, 0)
            counts = counts + _staged_counts(tables, lanes, ancestors, numbers)

        nodes = torch.arange(num_nodes, device=tokens.device)
        starts = (lanes.rows.unsqueeze(1) * num_nodes + nodes) * logits.stride(0)
        places = (starts[lanes.owners].unsqueeze(2) + tokens).flatten()
        flat = _flat_view(logits)
        values = flat.index_select(0, places).to(torch.float32).view(-1, num_nodes, PAGE)
        values = _penalize(values, counts, tables.params[lanes.slots][lanes.owners])
        if step.has_flags:
            biases = _read(tables.biases, lanes, firsts, is_entry)
            values = torch.where(metas & BIAS != 0, values + biases, values)
            is_short = (num_output < headers[:, MIN_NEW, None])[lanes.owners].unsqueeze(2)
            values.masked_fill_((metas & STOP != 0) & is_short, float("-inf"))
        flat.scatter_(0, places, values.flatten().to(logits.dtype))

    def ancestors(self, parents: torch.Tensor) -> torch.Tensor:
        """See `PenaltyOps`."""
        size = parents.shape[1]
        nodes = torch.arange(size, device=parents.device)
        # Who has no parent is its own. Each round doubles the way that a node has looked back.
        is_linked = (parents >= 0) & (parents < size)
        jump = torch.where(is_linked, parents.to(torch.int64), nodes)
        mask = (nodes.unsqueeze(1) == nodes).expand(parents.shape[0], -1, -1)
        for _ in range(max(size - 1, 0).bit_length()):
            mask = mask | mask.gather(1, jump.unsqueeze(-1).expand(-1, -1, size))
            jump = jump.gather(1, jump)
        return mask

    def _lanes_of(self, tables: PenaltyTables, step: PenaltyStep) -> _Lanes:
        if step.is_padded:
            # Which rows are real, only the values tell. On a device this would wait for them.
            return _make_lanes(tables, step.index[:, step.index[SLOT] >= 0], None)
        if self._lanes[0] is not step.index:
            self._lanes = (step.index, _make_lanes(tables, step.index, step.total_pages))
        return self._lanes[1]


def _make_lanes(tables: PenaltyTables, index: torch.Tensor, total_pages: int | None) -> _Lanes:
    index = index.to(torch.int64)
    slots, counts = index[SLOT], index[PAGES]
    owners = torch.repeat_interleave(
        torch.arange(index.shape[1], device=index.device), counts, output_size=total_pages
    )
    before = counts.cumsum(0) - counts
    ordinals = torch.arange(len(owners), device=index.device) - before[owners]
    pages = tables.page_table[slots[owners], ordinals].to(torch.int64)
    offsets = torch.arange(PAGE, device=index.device)
    return _Lanes(
        rows=index[ROW],
        slots=slots,
        limits=index[LIMIT],
        capacities=counts * PAGE,
        owners=owners,
        pages=pages,
        numbers=ordinals.unsqueeze(1) * PAGE + offsets,
        places=pages.unsqueeze(1) * PAGE + offsets,
        firsts=tables.page_table[slots, 0].to(torch.int64) * PAGE,
    )


def _lens_of(
    lanes: _Lanes, num_given: int, lens: torch.Tensor | None, commit: bool
) -> torch.Tensor:
    """How many of the given tokens of each row are taken in, shape (P,)."""
    if not commit:
        return torch.full_like(lanes.limits, num_given)
    if lens is None:
        return lanes.limits.clamp(max=num_given)
    return torch.minimum(lens[lanes.rows], lanes.limits).clamp(0, num_given)


class _Located(NamedTuple):
    """Where the tokens of a step go, each of shape (P, K).

    Attributes
    ----------
    entries : Tensor, int64
        Number of each token's entry in its list, -1 for what is not counted.
    is_first, is_new : Tensor, bool
        Whether it occurs here for the first time in the step, and for the first time at all.
    repeats : Tensor, int32
        How often it occurs in the step.
    """

    entries: torch.Tensor
    is_first: torch.Tensor
    is_new: torch.Tensor
    repeats: torch.Tensor


def _locate(
    tables: PenaltyTables,
    lanes: _Lanes,
    tokens: torch.Tensor,
    is_counted: torch.Tensor,
    lengths: torch.Tensor,
) -> _Located:
    """Find tokens, shape (P, K), in lists of `lengths`, shape (P,), or put them behind the end."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & is_counted.unsqueeze(2)
    is_first = is_counted & ~(same & (order < order.unsqueeze(1))).any(-1)
    entries = _find(tables, lanes, tokens, lengths)
    is_new = is_first & (entries < 0)
    behind = lengths.unsqueeze(1) + is_new.cumsum(1) - 1
    # A new token that occurs again has the entry of its first occurrence.
    appended = torch.where(same & is_new.unsqueeze(1), behind.unsqueeze(1), 0).sum(-1)
    entries = torch.where(is_counted & (entries < 0), appended, entries)
    return _Located(entries, is_first, is_new, same.sum(-1, dtype=torch.int32))


def _find(
    tables: PenaltyTables, lanes: _Lanes, tokens: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Committed entry of each token, shape (P, K), int64; -1 where there is none."""
    stored = tables.tokens.view(-1, PAGE).index_select(0, lanes.pages)
    is_entry = lanes.numbers < lengths[lanes.owners].unsqueeze(1)
    # -2 is no token, and not what stands for an uncounted one either.
    stored = torch.where(is_entry, stored, -2)
    hits = stored.unsqueeze(1) == tokens[lanes.owners].unsqueeze(2)
    # A list has a token once at most, so a sum is the number of the one entry that is hit.
    numbers = (hits * (lanes.numbers + 1).unsqueeze(1)).sum(-1)
    return torch.zeros_like(tokens, dtype=torch.int64).index_add_(0, lanes.owners, numbers) - 1


def _places_of(tables: PenaltyTables, lanes: _Lanes, entries: torch.Tensor) -> torch.Tensor:
    """Places of entries, shape (P, K); of no meaning where an entry is outside the list's pages."""
    ordinals = (entries // PAGE).clamp(0, tables.page_table.shape[1] - 1)
    pages = tables.page_table[lanes.slots.unsqueeze(1), ordinals].to(torch.int64)
    return pages * PAGE + entries % PAGE


def _staged_counts(
    tables: PenaltyTables, lanes: _Lanes, ancestors: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """How often a node's way has the token of each entry, shape (Q, D, PAGE), int32.

    A product of zeros and ones: exact in float32, whatever order it is added up in.
    """
    num_nodes = ancestors.shape[1]
    staged = tables.draft_entries[lanes.slots, 1:num_nodes]
    hits = staged[lanes.owners].unsqueeze(2) == numbers.unsqueeze(1)
    return torch.bmm(ancestors[lanes.owners], hits.to(torch.float32)).to(torch.int32)


def _penalize(values: torch.Tensor, counts: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """The penalties on float32 values, shape (Q, D, PAGE)."""
    frequency, presence, repetition = (
        params[:, column, None, None] for column in (FREQUENCY, PRESENCE, REPETITION)
    )
    scaled = values - (frequency * counts.to(torch.float32) + presence)
    scaled = torch.where(scaled < 0, scaled * repetition, scaled / repetition)
    return torch.where(counts > 0, scaled, values)


def _put(target: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    if len(places) > 0:
        target.index_copy_(0, places.to(torch.int64), values)


def _read(
    pool: torch.Tensor, lanes: _Lanes, firsts: torch.Tensor, is_entry: torch.Tensor
) -> torch.Tensor:
    """Entries of a tensor of the pool, shape (Q, 1, PAGE), a list's first one behind its end."""
    held = pool.view(-1, PAGE).index_select(0, lanes.pages)
    return torch.where(is_entry, held, pool[firsts].unsqueeze(1)).unsqueeze(1)


def _flat_view(logits: torch.Tensor) -> torch.Tensor:
    """All that lies between the first and the last logit, as one row, which is fast to index."""
    size = (logits.shape[0] - 1) * logits.stride(0) + logits.shape[1]
    return logits.as_strided((size,), (1,))
