"""The two pools that a request holds a part of while it runs.

`ReqToTokenPool` maps a request's row and a position to a KV slot; the KV pool maps a slot to keys and
values. Who owns which range of a request's row::

    position  0            kv_committed_len      kv_allocated_len          width
              |  committed  |   over-allocated    |   stale, never read     |
              |  tokens     |   (draft tokens)    |                         |

Both ranges on the left are given back together, once, by `common.release_kv_cache`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class ReqToTokenPool:
    """One row for each running request: the KV slot of each of its positions.

    Parameters
    ----------
    size : int
        Number of rows, the most requests that can hold KV at a time.
    max_context_len : int
        Width of a row, over-allocation included.
    device : torch.device
        Where the table lives. It is written by the schedule stream alone.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.device = device
        self.req_to_token = torch.zeros((size, max_context_len), dtype=torch.int64, device=device)
        # The same memory in one row, for what writes single cells.
        self.flat = self.req_to_token.view(-1)
        self.free_slots = list(range(size))
        # Told of each row that is given back, before it can be taken again.
        self.on_free: Callable[[int], None] | None = None

    def available_size(self) -> int:
        """Number of free rows."""
        return len(self.free_slots)

    def alloc(self, need_size: int) -> list[int] | None:
        """Take `need_size` rows, or None if there are not as many."""
        if need_size > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return taken

    def free(self, req_pool_idx: int) -> None:
        """Give a row back.

        Raises
        ------
        ValueError
            If the row is free already.
        """
        if req_pool_idx in self.free_slots:
            raise ValueError(f"req_pool_idx {req_pool_idx} is freed twice")
        if self.on_free is not None:
            self.on_free(req_pool_idx)
        self.free_slots.append(req_pool_idx)

    def clear(self) -> None:
        """Make every row free."""
        self.free_slots = list(range(self.size))


class MHATokenToKVPool:
    """Keys and values of every layer, one slot a token.

    Parameters
    ----------
    size : int
        Number of slots that are handed out. Slots ``size .. size + page_size - 1`` exist besides;
        no allocator hands them out, so what is written there harms no one.
    page_size : int
        Tokens a page.
    dtype : torch.dtype
        Type of keys and values.
    head_num, head_dim, layer_num : int
        KV heads, their width, and layers.
    device : torch.device
        Where the buffers live. Only forwards read and write them.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.head_num = head_num
        self.head_dim = head_dim
        self.layer_num = layer_num
        # The key and the value of a slot lie side by side, so that attention, which reads slots that
        # are scattered over the pool, finds both at one place.
        shape = (size + page_size, 2, head_num, head_dim)
        self.kv_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, each of shape (size + page_size, head_num, head_dim)."""
        buffer = self.kv_buffer[layer_id]
        return buffer[:, 0], buffer[:, 1]

    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Write keys and values, shape (T, head_num, head_dim), to the slots `loc`, shape (T,)."""
        k, v = self.get_kv_buffer(layer_id)
        k.index_copy_(0, loc, cache_k)
        v.index_copy_(0, loc, cache_v)

    def gather_rows(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Where `gather_kv` finds the slots `kv_indices`, shape (B, L), the same in every layer.

        Returns
        -------
        Tensor, shape (2 * B * head_num * L,), int64
        """
        parts = 2 * self.head_num
        part = torch.arange(parts, device=kv_indices.device).view(2, 1, self.head_num, 1)
        return (kv_indices[None, :, None] * parts + part).reshape(-1)

    def gather_kv(self, layer_id: int, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Read keys and values of slots, head by head, as batched matrix products want them.

        Parameters
        ----------
        layer_id : int
            Which layer's.
        rows : Tensor, shape (2 * B * head_num * L,), int64
            From `gather_rows`.
        out : Tensor, shape (2 * B * head_num * L, head_dim)
            Written, and returned: all keys, then all values, each of shape (B, head_num, L, head_dim).
        """
        return torch.index_select(
            self.kv_buffer[layer_id].view(-1, self.head_dim), 0, rows, out=out
        )

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the slots `src_loc` to `tgt_loc`, as if all were read before any is written.

        Parameters
        ----------
        tgt_loc, src_loc : Tensor, shape (N,), int64
            No slot may occur twice in `tgt_loc`.
        """
        for buffer in self.kv_buffer:
            buffer.index_copy_(0, tgt_loc, buffer.index_select(0, src_loc))

    def get_kv_size_bytes(self) -> int:
        """Bytes that all buffers take."""
        return sum(buffer.nbytes for buffer in self.kv_buffer)
