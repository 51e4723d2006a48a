"""What planner and state of the sparse penalties hand each other.

A request says what is asked, a pool how much may be kept. A step is what the planner tells the state of
one forward, and all that it tells. `sparse_penalties` says how they work together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib.sparse_layout import FIRST_PAGE, PAGE
from sglang.srt.utils.common import ceil_div

INT32_MAX: Final = (1 << 31) - 1


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
        Most distinct tokens of a request, staged ones included, rounded up to whole pages. The
        vocabulary by default, so that no request ever has too many.
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
        if self.max_entries is not None and self.max_pages * PAGE > INT32_MAX:
            raise ValueError(f"a pool may have {INT32_MAX} entries at most, got {self}")

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
            return min(most, INT32_MAX // PAGE)  # places are int32
        return FIRST_PAGE + ceil_div(self.max_entries, PAGE)

    @property
    def initial_pages(self) -> int:
        """Pages from the beginning, likewise."""
        return min(self.max_pages, FIRST_PAGE + ceil_div(self.initial_entries, PAGE))


class PenaltyRows(NamedTuple):
    """The rows of a batch that have penalties, as the planner notes them; each array has shape (P,).

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

    A tuple, since one is copied each step, which of a frozen dataclass takes four times as long.

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
    rows : PenaltyRows or None
        The planner's own note of the rows, for `PenaltyPlanner.settle`.
    number : int
        Steps are begun, and settled, in the order 1, 2, ...; 0 for a static one.
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
    rows: PenaltyRows | None = None
    number: int = 0


def check_shape(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    """Refuse a tensor of another shape, by its name.

    Raises
    ------
    ValueError
    """
    if tensor.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {tuple(tensor.shape)}")
