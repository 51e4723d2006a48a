"""The KV pool's layout, seen through its methods."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

CPU = torch.device("cpu")
HEADS, WIDTH, LAYERS = 3, 4, 2


@pytest.fixture
def pool():
    return MHATokenToKVPool(10, 2, torch.float32, HEADS, WIDTH, LAYERS, CPU)


def fill(pool, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (pool.size + pool.page_size, HEADS, WIDTH)
    content = [[torch.randn(size, generator=generator) for _ in "kv"] for _ in range(LAYERS)]
    for layer, (k, v) in enumerate(content):
        pool.set_kv_buffer(layer, torch.arange(size[0]), k, v)
    return content


def test_there_is_a_page_more_than_is_handed_out(pool):
    for layer in range(LAYERS):
        for buffer in pool.get_kv_buffer(layer):
            assert buffer.shape == (12, HEADS, WIDTH)
            assert not buffer.any()


def test_what_is_set_is_got(pool):
    content = fill(pool)
    k, v = torch.full((2, HEADS, WIDTH), 5.0), torch.full((2, HEADS, WIDTH), 6.0)
    pool.set_kv_buffer(1, torch.tensor([7, 2]), k, v)
    content[1][0][[7, 2]], content[1][1][[7, 2]] = 5.0, 6.0
    for layer in range(LAYERS):
        for got, expected in zip(pool.get_kv_buffer(layer), content[layer]):
            assert torch.equal(got, expected)


def test_gather_is_head_by_head(pool):
    content = fill(pool)
    slots = torch.tensor([[3, 0, 9, 9], [1, 11, 4, 3]])
    rows = pool.gather_rows(slots)
    out = torch.empty((2 * 2 * HEADS * 4, WIDTH))
    for layer in range(LAYERS):
        assert pool.gather_kv(layer, rows, out) is out
        gathered = out.view(2, 2, HEADS, 4, WIDTH)
        for kind in range(2):
            for b in range(2):
                for h in range(HEADS):
                    for j in range(4):
                        expected = content[layer][kind][slots[b, j], h]
                        assert torch.equal(gathered[kind, b, h, j], expected)


def test_move_reads_everything_before_it_writes(pool):
    content = fill(pool)
    target, source = [1, 2, 3, 5], [2, 3, 1, 5]
    pool.move_kv_cache(torch.tensor(target), torch.tensor(source))
    for layer in range(LAYERS):
        for got, before in zip(pool.get_kv_buffer(layer), content[layer]):
            expected = before.clone()
            for t, s in zip(target, source):
                expected[t] = before[s]
            assert torch.equal(got, expected)


def test_size_in_bytes(pool):
    assert pool.get_kv_size_bytes() == 2 * LAYERS * 12 * HEADS * WIDTH * 4
