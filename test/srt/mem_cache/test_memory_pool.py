"""The request pool and the KV pool."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

CPU = torch.device("cpu")


def test_rows_are_handed_out_once() -> None:
    pool = ReqToTokenPool(4, 10, CPU)
    assert pool.req_to_token.shape == (4, 10)
    first, second = pool.alloc(3), pool.alloc(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.available_size() == 0
    assert pool.alloc(1) is None
    assert pool.alloc(0) == []


def test_too_large_a_request_takes_nothing() -> None:
    pool = ReqToTokenPool(4, 10, CPU)
    assert pool.alloc(5) is None
    assert pool.available_size() == 4


def test_a_row_comes_back() -> None:
    pool = ReqToTokenPool(2, 10, CPU)
    rows = pool.alloc(2)
    pool.free(rows[1])
    assert pool.available_size() == 1
    assert pool.alloc(1) == [rows[1]]


def test_a_row_is_not_freed_twice() -> None:
    pool = ReqToTokenPool(2, 10, CPU)
    (row,) = pool.alloc(1)
    pool.free(row)
    with pytest.raises(ValueError, match=f"req_pool_idx {row} is freed twice"):
        pool.free(row)
    assert sorted(pool.free_slots) == [0, 1]


def test_clear_makes_every_row_free() -> None:
    pool = ReqToTokenPool(3, 10, CPU)
    pool.alloc(2)
    pool.clear()
    assert sorted(pool.free_slots) == [0, 1, 2]


@pytest.fixture
def kv_pool() -> MHATokenToKVPool:
    pool = MHATokenToKVPool(8, 2, torch.float32, head_num=2, head_dim=3, layer_num=2, device=CPU)
    for layer, buffer in enumerate(pool.kv_buffer):
        # Every number says where it stands: layer, slot, key or value, head, element.
        buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) + 1000 * layer)
    return pool


def test_buffers_have_a_page_that_no_allocator_hands_out(kv_pool: MHATokenToKVPool) -> None:
    k, v = kv_pool.get_kv_buffer(0)
    assert k.shape == v.shape == (8 + 2, 2, 3)
    assert kv_pool.get_kv_size_bytes() == 2 * (10 * 2 * 2 * 3) * 4


def test_what_is_set_is_read_back_in_its_layer_alone(kv_pool: MHATokenToKVPool) -> None:
    before = [buffer.clone() for buffer in kv_pool.kv_buffer]
    loc = torch.tensor([6, 1])
    keys, values = -torch.ones(2, 2, 3), -2 * torch.ones(2, 2, 3)
    kv_pool.set_kv_buffer(1, loc, keys, values)
    k, v = kv_pool.get_kv_buffer(1)
    assert torch.equal(k[loc], keys)
    assert torch.equal(v[loc], values)
    others = torch.tensor([0, 2, 3, 4, 5, 7, 8, 9])
    assert torch.equal(kv_pool.kv_buffer[1][others], before[1][others])
    assert torch.equal(kv_pool.kv_buffer[0], before[0])


def test_gather_brings_keys_and_values_head_by_head(kv_pool: MHATokenToKVPool) -> None:
    slots = torch.tensor([[5, 5, 0], [7, 2, 9]])
    rows = kv_pool.gather_rows(slots)
    out = torch.zeros(len(rows), 3)
    assert kv_pool.gather_kv(1, rows, out) is out
    k, v = kv_pool.get_kv_buffer(1)
    keys, values = out.view(2, 2, 2, 3, 3)
    for got, buffer in ((keys, k), (values, v)):
        for b, head, i in itertools.product(range(2), range(2), range(3)):
            assert torch.equal(got[b, head, i], buffer[slots[b, i], head])


def test_a_move_reads_all_before_it_writes(kv_pool: MHATokenToKVPool) -> None:
    before = [buffer.clone() for buffer in kv_pool.kv_buffer]
    # A cycle, a slot that stays, and a slot that is read twice.
    target, source = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 2, 0, 3, 0])
    kv_pool.move_kv_cache(target, source)
    for buffer, old in zip(kv_pool.kv_buffer, before, strict=True):
        assert torch.equal(buffer[target], old[source])
        assert torch.equal(buffer[5:], old[5:])
