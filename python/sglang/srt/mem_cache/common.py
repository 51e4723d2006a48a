"""Giving KV to the requests of a batch, and taking it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.utils.common import to_device_async

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def alloc_req_slots(batch: ScheduleBatch) -> list[int]:
    """Give each request of `batch` a row of the request pool; one that has a row keeps it.

    Returns
    -------
    list of int
        The rows, in order of the requests.

    Raises
    ------
    RuntimeError
        If there are not enough rows, which admission should have seen.
    """
    need = [req for req in batch.reqs if req.req_pool_idx is None]
    rows = batch.req_to_token_pool.alloc(len(need))
    if rows is None:
        raise RuntimeError(
            f"{len(need)} requests need a row of the request pool and "
            f"{batch.req_to_token_pool.available_size()} are free"
        )
    for req, row in zip(need, rows, strict=True):
        req.req_pool_idx = row
    return [req.req_pool_idx for req in batch.reqs]


def _grow(
    batch: ScheduleBatch, rows: list[int], cur_lens: list[int], nxt_lens: list[int]
) -> torch.Tensor:
    """Take slots for positions ``cur .. nxt - 1`` of each row and enter them into the rows."""
    pool, allocator = batch.req_to_token_pool, batch.token_to_kv_pool_allocator
    width = pool.max_context_len
    if max(nxt_lens, default=0) > width:
        raise RuntimeError(
            f"a row of the request pool has {width} positions, {max(nxt_lens)} needed"
        )

    last_loc = None
    if allocator.page_size > 1:
        last = [row * width + max(cur - 1, 0) for row, cur in zip(rows, cur_lens, strict=True)]
        last_loc = pool.flat[to_device_async(last, torch.int64, batch.device)]
    out_cache_loc = allocator.alloc_extend(cur_lens, nxt_lens, last_loc)
    if out_cache_loc is None:
        raise RuntimeError(
            f"{sum(nxt_lens) - sum(cur_lens)} KV slots are needed and "
            f"{allocator.available_size()} are free"
        )

    cells = [
        np.arange(row * width + cur, row * width + nxt)
        for row, cur, nxt in zip(rows, cur_lens, nxt_lens, strict=True)
    ]
    index = to_device_async(np.concatenate(cells), torch.int64, batch.device)
    pool.flat.index_copy_(0, index, out_cache_loc)
    return out_cache_loc


def alloc_for_extend(batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and KV slots for the new tokens of a prefill batch.

    Returns
    -------
    out_cache_loc : Tensor, shape (extend_num_tokens,), int64
    req_pool_indices : Tensor, shape (B,), int64
    """
    rows = alloc_req_slots(batch)
    seq_lens = [p + e for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    out_cache_loc = _grow(batch, rows, batch.prefix_lens, seq_lens)
    return out_cache_loc, to_device_async(rows, torch.int64, batch.device)


def alloc_for_decode(batch: ScheduleBatch) -> torch.Tensor:
    """One KV slot for each request, for the position behind its last one.

    Returns
    -------
    Tensor, shape (B,), int64
    """
    pool, allocator = batch.req_to_token_pool, batch.token_to_kv_pool_allocator
    cell = torch.add(batch.seq_lens, batch.req_pool_indices, alpha=pool.max_context_len)
    if allocator.page_size == 1:
        out_cache_loc = allocator.alloc(len(batch.reqs))
    else:
        cur = batch.seq_lens_cpu.tolist()
        out_cache_loc = allocator.alloc_extend(cur, [n + 1 for n in cur], pool.flat[cell - 1])
    if out_cache_loc is None:
        raise RuntimeError(
            f"{len(batch.reqs)} requests need a KV slot and {allocator.available_size()} are free"
        )
    pool.flat.index_copy_(0, cell, out_cache_loc)
    return out_cache_loc


def alloc_for_spec_decode(
    batch: ScheduleBatch, cur_kv_lens: list[int], nxt_kv_lens: list[int]
) -> None:
    """Grow each request's row from `cur_kv_lens` to `nxt_kv_lens` slots, for tokens yet unverified."""
    rows = [req.req_pool_idx for req in batch.reqs]
    if sum(nxt_kv_lens) > sum(cur_kv_lens):
        _grow(batch, rows, cur_kv_lens, nxt_kv_lens)


def release_kv_cache(req: Req, tree_cache: ChunkCache) -> None:
    """Give back all KV that `req` holds, and its row."""
    tree_cache.cache_finished_req(req)
    tree_cache.req_to_token_pool.free(req.req_pool_idx)
    req.req_pool_idx = None
