"""What stands in the rows of the request pool after allocation, and what comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import (
    alloc_for_decode,
    alloc_for_extend,
    alloc_for_spec_decode,
    alloc_req_slots,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

CPU = torch.device("cpu")
WIDTH = 24


class FakeReq:
    """The part of a request that allocation knows."""

    def __init__(self, row: int | None = None) -> None:
        self.req_pool_idx = row
        self.prefix_indices: Any = []
        self.kv_committed_len = 0
        self.kv_allocated_len = 0

    def pop_kv_cache(self) -> int:
        held, self.kv_allocated_len, self.kv_committed_len = self.kv_allocated_len, 0, 0
        return held


class House:
    """Both pools, and requests that prefill and decode by what the pools' rows say."""

    def __init__(self, page_size: int, slots: int = 96, rows: int = 6) -> None:
        self.pool = ReqToTokenPool(rows, WIDTH, CPU)
        self.pool.req_to_token.fill_(-7)
        if page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(slots, CPU)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page_size, CPU)
        self.cache = ChunkCache(self.pool, self.allocator)
        self.page_size = page_size
        self.slots = slots

    def batch(self, reqs: list[FakeReq], **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(
            reqs=reqs,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            device=CPU,
            **fields,
        )

    def extend(self, reqs: list[FakeReq], lens: list[int]) -> torch.Tensor:
        prefixes = [req.kv_allocated_len for req in reqs]
        loc, rows = alloc_for_extend(self.batch(reqs, prefix_lens=prefixes, extend_lens=lens))
        assert rows.tolist() == [req.req_pool_idx for req in reqs]
        for req, n in zip(reqs, lens, strict=True):
            req.kv_allocated_len += n
        return loc

    def decode(self, reqs: list[FakeReq]) -> torch.Tensor:
        lens = torch.tensor([req.kv_allocated_len for req in reqs])
        rows = torch.tensor([req.req_pool_idx for req in reqs])
        batch = self.batch(reqs, seq_lens=lens, seq_lens_cpu=lens, req_pool_indices=rows)
        loc = alloc_for_decode(batch)
        for req in reqs:
            req.kv_allocated_len += 1
        return loc

    def row(self, req: FakeReq) -> list[int]:
        return self.pool.req_to_token[req.req_pool_idx].tolist()

    def check(self, reqs: list[FakeReq]) -> None:
        """Rows hold slots of their own, in order, up to their length; behind it nothing was written."""
        pages = []
        for req in reqs:
            held = self.row(req)[: req.kv_allocated_len]
            assert self.row(req)[req.kv_allocated_len :] == [-7] * (WIDTH - len(held))
            for position, slot in enumerate(held):
                assert 0 <= slot < self.slots
                assert slot % self.page_size == position % self.page_size
                if position % self.page_size:
                    assert slot == held[position - 1] + 1
                else:
                    pages.append(slot // self.page_size)
        pages += self.allocator.free_pages.tolist()
        assert sorted(pages) == list(range(self.slots // self.page_size))


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_say_where_each_position_lies(page_size: int) -> None:
    house = House(page_size)
    a, b, c = FakeReq(), FakeReq(), FakeReq()
    loc = house.extend([a, b], [5, 8])
    assert loc.tolist() == house.row(a)[:5] + house.row(b)[:8]
    # A second chunk of b beside a new request.
    loc = house.extend([b, c], [3, 1])
    assert loc.tolist() == house.row(b)[8:11] + house.row(c)[:1]
    house.check([a, b, c])
    for _ in range(6):
        loc = house.decode([c, a, b])
        assert loc.tolist() == [house.row(r)[r.kv_allocated_len - 1] for r in (c, a, b)]
        house.check([a, b, c])


@pytest.mark.parametrize("page_size", [1, 4])
def test_speculation_grows_rows_and_keeps_what_they_have(page_size: int) -> None:
    house = House(page_size)
    a, b, c = FakeReq(), FakeReq(), FakeReq()
    house.extend([a, b, c], [5, 8, 2])
    before = {req: house.row(req)[: req.kv_allocated_len] for req in (a, b, c)}
    grown = [12, 8, 9]
    alloc_for_spec_decode(house.batch([a, b, c]), [5, 8, 2], grown)
    for req, length in zip((a, b, c), grown, strict=True):
        req.kv_allocated_len = length
        assert house.row(req)[: len(before[req])] == before[req]
    house.check([a, b, c])
    # Nothing to grow: nothing is taken.
    free = house.allocator.available_size()
    alloc_for_spec_decode(house.batch([a, b, c]), grown, grown)
    assert house.allocator.available_size() == free


def test_a_request_keeps_its_row() -> None:
    house = House(1, rows=2)
    a, b = FakeReq(), FakeReq()
    (row,) = alloc_req_slots(house.batch([a]))
    rows = alloc_req_slots(house.batch([b, a]))
    assert rows == [b.req_pool_idx, row]
    assert sorted(rows) == [0, 1]
    with pytest.raises(RuntimeError, match="1 requests need a row of the request pool and 0"):
        alloc_req_slots(house.batch([FakeReq()]))


@pytest.mark.parametrize("page_size", [1, 4])
def test_running_out_is_an_error_that_says_so(page_size: int) -> None:
    house = House(page_size, slots=8)
    a, b = FakeReq(), FakeReq()
    house.extend([a], [8])
    with pytest.raises(RuntimeError, match="0 are free"):
        house.decode([a])
    with pytest.raises(RuntimeError, match="3 KV slots are needed and 0 are free"):
        house.extend([b], [3])


def test_a_row_has_an_end() -> None:
    house = House(1)
    with pytest.raises(RuntimeError, match=f"has {WIDTH} positions, {WIDTH + 1} needed"):
        house.extend([FakeReq()], [WIDTH + 1])
    house.extend([FakeReq()], [WIDTH])


@pytest.mark.parametrize("page_size", [1, 4])
def test_release_gives_back_everything_once(page_size: int) -> None:
    house = House(page_size)
    a, b = FakeReq(), FakeReq()
    house.extend([a, b], [5, 6])
    alloc_for_spec_decode(house.batch([a]), [5], [15])
    a.kv_allocated_len = 15
    release_kv_cache(a, house.cache)
    assert a.req_pool_idx is None
    assert a.kv_allocated_len == 0
    house.check([b])
    assert house.pool.available_size() == 5
    release_kv_cache(b, house.cache)
    assert house.allocator.available_size() == house.slots
    assert house.pool.available_size() == 6


def test_a_row_may_be_reused_before_a_group_of_frees_ends() -> None:
    house = House(1, slots=8, rows=1)
    a, b = FakeReq(), FakeReq()
    house.extend([a], [4])
    house.allocator.free_group_begin()
    release_kv_cache(a, house.cache)
    house.extend([b], [4])
    house.allocator.free_group_end()
    assert sorted(house.allocator.free_pages.tolist() + house.row(b)[:4]) == list(range(8))


def test_a_request_without_kv_gives_back_its_row_alone() -> None:
    house = House(4)
    a = FakeReq()
    alloc_req_slots(house.batch([a]))
    release_kv_cache(a, house.cache)
    assert house.pool.available_size() == 6
    assert house.allocator.available_size() == house.slots


def test_the_chunk_cache_hands_on_what_is_committed() -> None:
    house = House(4)
    a = FakeReq()
    house.extend([a], [8])
    a.kv_committed_len = 8
    house.cache.cache_unfinished_req(a)
    assert a.prefix_indices.tolist() == house.row(a)[:8]
    # Asked again while no chunk could run: the same.
    house.cache.cache_unfinished_req(a)
    assert a.prefix_indices.tolist() == house.row(a)[:8]
