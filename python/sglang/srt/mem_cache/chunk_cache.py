"""The prefix cache that caches nothing beyond the request itself: a chunked prompt's finished part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class ChunkCache:
    """Hands a request's KV from one chunk of its prompt to the next, and frees it at the end.

    Parameters
    ----------
    req_to_token_pool : ReqToTokenPool
    token_to_kv_pool_allocator : BaseTokenToKVPoolAllocator
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = token_to_kv_pool_allocator.page_size

    def cache_unfinished_req(self, req: Req) -> None:
        """Let the next chunk of `req` start behind the tokens that it has prefilled."""
        req.prefix_indices = self.req_to_token_pool.req_to_token[
            req.req_pool_idx, : req.kv_committed_len
        ]

    def cache_finished_req(self, req: Req) -> None:
        """Free all KV that `req` holds, over-allocated slots included."""
        held = req.pop_kv_cache()
        if held:
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
            # A copy, since the row may belong to someone else before a group of frees ends.
            self.token_to_kv_pool_allocator.free(row[:held].clone())
