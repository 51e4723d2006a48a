"""Who hands out KV slots. The free list is a device tensor whose length the host knows."""

from __future__ import annotations

import abc

import numpy as np
import torch

from sglang.srt.utils.common import ceil_div, to_device_async


class BaseTokenToKVPoolAllocator(abc.ABC):
    """Free list of KV pages.

    Parameters
    ----------
    size : int
        Slots in all, a multiple of `page_size`.
    page_size : int
        Slots that are handed out together.
    device : torch.device
        Where slot indices live.
    """

    def __init__(self, size: int, page_size: int, device: torch.device) -> None:
        self.size = size
        self.page_size = page_size
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Make every page free."""
        self.free_pages = torch.arange(self.size // self.page_size, device=self.device)
        self._free_group: list[torch.Tensor] | None = None

    def available_size(self) -> int:
        """Number of slots in free pages."""
        return len(self.free_pages) * self.page_size

    def pages_needed(self, cur_lens: list[int], nxt_lens: list[int]) -> int:
        """Pages that growing sequences from `cur_lens` to `nxt_lens` tokens takes."""
        page = self.page_size
        return sum(
            ceil_div(nxt, page) - ceil_div(cur, page)
            for cur, nxt in zip(cur_lens, nxt_lens, strict=True)
        )

    def free_group_begin(self) -> None:
        """Collect what is freed until `free_group_end`, to join the free list once."""
        self._free_group = []

    def free_group_end(self) -> None:
        """Free what was collected."""
        group, self._free_group = self._free_group, None
        if group:
            self.free_pages = torch.cat([self.free_pages, *group])

    def free(self, free_index: torch.Tensor) -> None:
        """Give back slots.

        Parameters
        ----------
        free_index : Tensor, shape (N,), int64
            Slots of one sequence in order of position, from the start of a page on.
        """
        pages = self._pages_of(free_index)
        if self._free_group is not None:
            self._free_group.append(pages)
        else:
            self.free_pages = torch.cat([self.free_pages, pages])

    @abc.abstractmethod
    def _pages_of(self, free_index: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def alloc_extend(
        self, cur_lens: list[int], nxt_lens: list[int], last_loc: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Take slots for the positions ``cur_lens[i] .. nxt_lens[i] - 1`` of each sequence.

        Parameters
        ----------
        cur_lens, nxt_lens : list of int
            Tokens that have a slot, and that shall have one.
        last_loc : Tensor, shape (B,), int64, or None
            Slot of the last token that has one; of no meaning where ``cur_lens`` is at a page's start.
            None is fine when pages hold one token.

        Returns
        -------
        Tensor, shape (sum of nxt - cur,), int64, or None
            Slots of all sequences in a row, or None if the free pages do not suffice.
        """

    def _take(self, num_pages: int) -> torch.Tensor | None:
        if num_pages > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:num_pages], self.free_pages[num_pages:]
        return taken


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of one token."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, 1, device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take `need_size` slots, or None if there are not as many."""
        return self._take(need_size)

    def alloc_extend(
        self, cur_lens: list[int], nxt_lens: list[int], last_loc: torch.Tensor | None
    ) -> torch.Tensor | None:
        return self._take(sum(nxt_lens) - sum(cur_lens))

    def _pages_of(self, free_index: torch.Tensor) -> torch.Tensor:
        return free_index


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of `page_size` tokens. A sequence fills a page before it gets the next."""

    def alloc_extend(
        self, cur_lens: list[int], nxt_lens: list[int], last_loc: torch.Tensor | None
    ) -> torch.Tensor | None:
        cur, nxt = np.asarray(cur_lens), np.asarray(nxt_lens)
        first_new = -(-cur // self.page_size)
        new_pages = -(-nxt // self.page_size) - first_new
        taken = self._take(int(new_pages.sum()))
        if taken is None:
            return None

        # Where each new token goes is known on the host but for the page numbers: the ordinal of its
        # page among the taken ones, or -1 and its distance from the last token in the page begun.
        grow = nxt - cur
        owner = np.repeat(np.arange(len(cur)), grow)
        position = np.arange(len(owner)) - np.repeat(np.cumsum(grow) - grow, grow) + cur[owner]
        ordinal = position // self.page_size - first_new[owner]
        base = np.cumsum(new_pages) - new_pages
        in_new = ordinal >= 0
        plan = np.stack(
            [
                np.where(in_new, base[owner] + ordinal, -1),
                np.where(in_new, position % self.page_size, position - cur[owner] + 1),
                owner,
            ]
        )
        page_of, offset, row = to_device_async(plan, torch.int64, self.device)
        if len(taken) == 0:
            return last_loc[row] + offset
        new_loc = taken[page_of.clamp(min=0)] * self.page_size + offset
        return torch.where(page_of >= 0, new_loc, last_loc[row] + offset)

    def _pages_of(self, free_index: torch.Tensor) -> torch.Tensor:
        return free_index[:: self.page_size] // self.page_size
