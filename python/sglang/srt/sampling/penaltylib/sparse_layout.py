"""How the state of sparse penalties lies in memory: what planner, state and kernels agree on.

A request has a slot (its ``req_pool_idx``) and a list of entries, one for each distinct token that its
penalties know of. The list is spread over pages, in order::

    page_table[slot]   5            9            2          (pages that the planner gave it)
                       |            |            |
    entries            0 .. 127     128 .. 255   256 .. n-1 | n .. n_staged-1 | nothing yet
                       committed                            | tail: tokens of the draft, count 0

Entry ``e`` lies at the place ``page_table[slot, e // PAGE] * PAGE + e % PAGE`` of the pool. Two pages
belong to nobody. `NULL_PAGE` is never written: its entries are token 0 without effect, and stand in
where a read has to go somewhere. `TRASH_PAGE` takes writes that have to go somewhere: what is read of
it means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

PAGE: Final = 128
"""Entries a page."""

NULL_PAGE: Final = 0
TRASH_PAGE: Final = 1
FIRST_PAGE: Final = 2
"""The first page that a request can get."""

ENTRY_BYTES: Final = 12
"""Token, count with flags, and bias."""

COUNT_MASK: Final = (1 << 29) - 1
"""The bits of an entry's ``meta`` that count the token's occurrences in the output."""

STOP: Final = 1 << 29
"""The flag of a stop token that is masked while the output is short."""

BIAS: Final = 1 << 30
"""The flag of an entry with a bias. Adding 0 to the others would turn -0.0 into 0.0."""

MAX_TOKENS: Final = 64
"""Most tokens of a request that a step stages or commits: one program compares all pairs of them."""

# Columns of a slot's header. The last three hold the bits of a float32.
NUM_ENTRIES, NUM_STAGED, NUM_OUTPUT, MIN_NEW, COUNTING, FREQUENCY, PRESENCE, REPETITION = range(8)
HEADER: Final = 8

# Rows of a step's index.
ROW, SLOT, LIMIT, PAGES = range(4)


@dataclass(eq=False)
class PenaltyTables:
    """The tensors of a pool of ``S`` slots, which all lie on one device.

    Attributes
    ----------
    vocab_size : int
        Columns of the logits, ``V``. No entry has a token outside [0, V).
    headers : Tensor, shape (S, HEADER), int32
        Entries, entries with the tail, output tokens, ``min_new_tokens``, whether tokens are counted,
        and the three penalties.
    page_table : Tensor, shape (S, pages of the longest list), int32
        What lies behind a slot's pages is left from owners before.
    tokens, metas : Tensor, shape (pages * PAGE,), int32
        Token, and count with flags, of each entry.
    biases : Tensor, shape (pages * PAGE,), float32
        Of entries with the flag `BIAS`; others have what was there before.
    draft_entries : Tensor, shape (S, D), int32
        Entry of each staged node's token; -1 for the root and for tokens that are not counted.
    """

    vocab_size: int
    headers: torch.Tensor
    page_table: torch.Tensor
    tokens: torch.Tensor
    metas: torch.Tensor
    biases: torch.Tensor
    draft_entries: torch.Tensor

    @property
    def params(self) -> torch.Tensor:
        """The headers as float32, for their last three columns."""
        return self.headers.view(torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))
