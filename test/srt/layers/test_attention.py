"""Attention over the pool against plain loops in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.layers.attention import TorchAttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

CPU = torch.device("cpu")
POOL_SIZE = 160
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# (query heads, KV heads, width)
SHAPES = [(4, 4, 8), (6, 2, 16), (3, 1, 4)]


@dataclass
class Request:
    """A sequence in the pool: `prefix` tokens are there, `new` tokens come with the forward."""

    prefix: int
    new: int


class Bench:
    """A pool with requests in it, whose keys and values the test knows."""

    def __init__(self, requests, shape=(6, 2, 16), dtype=torch.float32, layers=2, extra_length=0):
        self.requests = requests
        self.num_heads, self.num_kv_heads, self.head_dim = shape
        self.dtype = dtype
        generator = torch.Generator().manual_seed(7)

        def random(*size):
            return torch.randn(size, generator=generator).to(dtype)

        self.pool = MHATokenToKVPool(
            POOL_SIZE, 1, dtype, self.num_kv_heads, self.head_dim, layers, CPU
        )
        # What no request owns must not matter, not even if it is broken.
        for layer in range(layers):
            for buffer in self.pool.get_kv_buffer(layer):
                buffer.fill_(math.nan)
        self.backend = TorchAttentionBackend(
            self.pool, self.num_heads, self.num_kv_heads, self.head_dim, CPU
        )
        length = max(r.prefix + r.new for r in requests) + extra_length
        slots = torch.randperm(POOL_SIZE, generator=generator)
        self.kv_indices = torch.zeros((len(requests), length), dtype=torch.int64)
        self.keys, self.values, self.queries, used = [], [], [], 0
        for row, r in enumerate(requests):
            total = r.prefix + r.new
            self.kv_indices[row] = slots[torch.arange(used, used + length) % POOL_SIZE]
            used += total
            self.keys.append(random(layers, total, self.num_kv_heads, self.head_dim))
            self.values.append(random(layers, total, self.num_kv_heads, self.head_dim))
            self.queries.append(random(layers, r.new, self.num_heads, self.head_dim))
        assert used <= POOL_SIZE
        for layer in range(layers):
            for row, r in enumerate(requests):
                self.pool.set_kv_buffer(
                    layer,
                    self.kv_indices[row, : r.prefix],
                    self.keys[row][layer, : r.prefix],
                    self.values[row][layer, : r.prefix],
                )

    def batch(self, mode, custom_mask=None):
        requests = self.requests
        totals = [r.prefix + r.new for r in requests]
        positions = [torch.arange(r.prefix, r.prefix + r.new) for r in requests]
        loc = [self.kv_indices[i, p] for i, p in enumerate(positions)]
        ragged = mode.is_extend()
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=torch.zeros(sum(r.new for r in requests), dtype=torch.int64),
            positions=torch.cat(positions),
            out_cache_loc=torch.cat(loc),
            req_pool_indices=torch.arange(len(requests)),
            seq_lens=torch.tensor(totals),
            kv_indices=self.kv_indices.clone(),
            seq_lens_cpu=totals,
            extend_seq_lens_cpu=[r.new for r in requests] if ragged else None,
            extend_prefix_lens_cpu=[r.prefix for r in requests] if ragged else None,
            custom_mask=custom_mask,
        )

    def run(self, batch, layer):
        self.backend.init_forward_metadata(batch)
        new = [slice(r.prefix, None) for r in self.requests]
        q = torch.cat([q[layer] for q in self.queries])
        k = torch.cat([k[layer, s] for k, s in zip(self.keys, new)])
        v = torch.cat([v[layer, s] for v, s in zip(self.values, new)])
        return self.backend.forward(q, k, v, layer, batch)

    def expected(self, layer, custom_mask=None):
        """Row by row, head by head, in float64."""
        rows = []
        for i, r in enumerate(self.requests):
            for t in range(r.new):
                total = r.prefix + r.new
                if custom_mask is None:
                    visible = [j for j in range(total) if j <= r.prefix + t]
                else:
                    visible = [j for j in range(total) if custom_mask[i, t, j]]
                for h in range(self.num_heads):
                    kv_head = h * self.num_kv_heads // self.num_heads
                    q = self.queries[i][layer, t, h].double()
                    keys = [self.keys[i][layer, j, kv_head].double() for j in visible]
                    weights = [
                        math.exp(float(sum(a * b for a, b in zip(q.tolist(), k.tolist()))) * scale)
                        for k in keys
                        for scale in [1 / math.sqrt(self.head_dim)]
                    ]
                    out = torch.zeros(self.head_dim, dtype=torch.float64)
                    for j, w in zip(visible, weights):
                        out += w / sum(weights) * self.values[i][layer, j, kv_head].double()
                    rows.append(out)
        return torch.stack(rows).view(-1, self.num_heads * self.head_dim)


def check(bench, batch, custom_mask=None, layer=1):
    out = bench.run(batch, layer)
    expected = bench.expected(layer, custom_mask)
    assert out.dtype == bench.dtype
    assert out.shape == expected.shape
    assert (out.double() - expected).abs().max() <= TOLERANCE[bench.dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_of_different_lengths(shape, dtype):
    bench = Bench([Request(0, 1), Request(9, 1), Request(4, 1)], shape, dtype)
    check(bench, bench.batch(ForwardMode.DECODE))


def test_decode_may_be_given_more_slots_than_there_are_tokens():
    bench = Bench([Request(3, 1), Request(8, 1)], extra_length=5)
    check(bench, bench.batch(ForwardMode.DECODE))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_with_and_without_prefix(shape, dtype):
    bench = Bench([Request(0, 7), Request(5, 3), Request(0, 1), Request(2, 4)], shape, dtype)
    check(bench, bench.batch(ForwardMode.EXTEND))


@pytest.mark.parametrize(
    "requests",
    [
        [Request(0, 4), Request(6, 1), Request(3, 1)],
        [Request(6, 1), Request(3, 1), Request(1, 4)],
        [Request(6, 1), Request(1, 4), Request(3, 1), Request(0, 1)],
        [Request(5, 1)],
    ],
)
def test_mixed_prompts_and_running_requests(requests):
    bench = Bench(requests)
    check(bench, bench.batch(ForwardMode.MIXED))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_several_tokens_a_request_are_causal(shape, dtype):
    bench = Bench([Request(6, 3), Request(2, 3)], shape, dtype)
    check(bench, bench.batch(ForwardMode.DRAFT_EXTEND_V2))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_draft_tree(shape, dtype):
    bench = Bench([Request(6, 4), Request(2, 4)], shape, dtype, extra_length=2)
    # Nodes: 0 is the root, 1 and 2 its children, 3 a child of 2.
    ancestors = [[0], [0, 1], [0, 2], [0, 2, 3]]
    mask = torch.zeros((2, 4, bench.kv_indices.shape[1]), dtype=torch.bool)
    for row, r in enumerate(bench.requests):
        for node, path in enumerate(ancestors):
            mask[row, node, : r.prefix] = True
            mask[row, node, [r.prefix + a for a in path]] = True
    check(bench, bench.batch(ForwardMode.TARGET_VERIFY, mask), mask)


@pytest.mark.parametrize("slots", [1, 20, 30])
@pytest.mark.parametrize("mode", ["DECODE", "MIXED", "DRAFT_EXTEND_V2", "TARGET_VERIFY"])
def test_a_batch_in_pieces_is_the_same_batch(mode, slots):
    new = 2 if mode in ("DRAFT_EXTEND_V2", "TARGET_VERIFY") else 1
    bench = Bench([Request(n, new) for n in (3, 9, 1, 0, 6)], extra_length=1)
    bench.backend._piece_slots = slots
    mask = None
    if mode == "TARGET_VERIFY":
        mask = torch.zeros((5, 2, bench.kv_indices.shape[1]), dtype=torch.bool)
        for row, r in enumerate(bench.requests):
            mask[row, :, : r.prefix + 1] = True
            mask[row, 1, [0, r.prefix + 1]] = torch.tensor([False, True])
    batch = bench.batch(ForwardMode[mode], mask)
    check(bench, batch, mask)
    assert len(batch.attn_metadata) > 1


def test_one_token_with_a_custom_mask():
    bench = Bench([Request(5, 1), Request(3, 1)])
    mask = torch.zeros((2, 1, 6), dtype=torch.bool)
    mask[0, 0, [0, 2, 5]] = True
    mask[1, 0, [1, 3]] = True
    check(bench, bench.batch(ForwardMode.DECODE, mask), mask)


def test_keys_and_values_go_to_their_slots_and_nowhere_else():
    bench = Bench([Request(2, 1), Request(4, 1)])
    batch = bench.batch(ForwardMode.DECODE)
    before = [b.clone() for b in bench.pool.get_kv_buffer(1)]
    other_layer = [b.clone() for b in bench.pool.get_kv_buffer(0)]
    bench.run(batch, 1)
    for kind, new in enumerate((bench.keys, bench.values)):
        expected = before[kind]
        for row, r in enumerate(bench.requests):
            expected[bench.kv_indices[row, r.prefix]] = new[row][1, r.prefix]
        for layer, values in ((1, expected), (0, other_layer[kind])):
            found = bench.pool.get_kv_buffer(layer)[kind]
            torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_query_that_sees_nothing_is_finite(dtype):
    bench = Bench([Request(3, 1)], dtype=dtype)
    mask = torch.zeros((1, 1, 4), dtype=torch.bool)
    assert bench.run(bench.batch(ForwardMode.DECODE, mask), 0).isfinite().all()


def test_forwards_of_growing_and_shrinking_size_share_a_backend():
    small, large = Bench([Request(3, 1)]), Bench([Request(20, 1), Request(30, 1), Request(4, 1)])
    for bench in (small, large, small):
        bench.backend = TorchAttentionBackend(bench.pool, 6, 2, 16, CPU)
    shared = large.backend
    for bench in (small, large, small):
        shared.token_to_kv_pool = bench.pool
        bench.backend = shared
        check(bench, bench.batch(ForwardMode.DECODE))


def test_no_requests():
    backend = TorchAttentionBackend(
        MHATokenToKVPool(4, 1, torch.float32, 2, 4, 1, CPU), 4, 2, 4, CPU
    )
    none = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        ForwardMode.IDLE, 0, none, none, none, none, none, none.view(0, 0), seq_lens_cpu=[]
    )
    backend.init_forward_metadata(batch)
    out = backend.forward(*(torch.empty(0, h, 4) for h in (4, 2, 2)), 0, batch)
    assert out.shape == (0, 16)


class ForbidSync(TorchDispatchMode):
    """Raises where a device would have to be asked for a value before the host can go on."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{func} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "new"), [("DECODE", 1), ("EXTEND", 4), ("MIXED", 1), ("TARGET_VERIFY", 3)]
)
def test_nothing_waits_for_the_device(mode, new):
    bench = Bench([Request(5, new), Request(2, new)])
    mask = torch.ones((2, new, 5 + new), dtype=torch.bool) if mode == "TARGET_VERIFY" else None
    batch = bench.batch(ForwardMode[mode], mask)
    with ForbidSync():
        bench.run(batch, 0)


def test_the_scheduler_s_tensors_are_not_written():
    bench = Bench([Request(5, 1), Request(2, 1)])
    batch = bench.batch(ForwardMode.DECODE)
    names = ("positions", "out_cache_loc", "seq_lens", "kv_indices", "req_pool_indices")
    versions = {n: getattr(batch, n)._version for n in names}
    bench.run(batch, 0)
    assert {n: getattr(batch, n)._version for n in names} == versions
