"""#28500: the copy of the penalties' tokens does not block, and is written once.

A machine without a GPU does not stall, so what is looked at is how the copy is asked for: a stand-in for
the device's platform says that page-locked memory is to be had, and every tensor that a decode step
makes from host data, with the way in which it goes to the device, is recorded.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils import common

CPU = torch.device("cpu")
VOCAB_SIZE = 32
PENALTIES = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "repetition_penalty": 1.5,
    "min_new_tokens": 2,
}
MODES = {"plain": SpeculativeAlgorithm.NONE, "speculative": SpeculativeAlgorithm.EAGLE}


def make_batch(mode: str, params: list[dict]) -> ScheduleBatch:
    """A prefilled batch with a request for each set of parameters, ready for its first decode."""
    rows, allocator = ReqToTokenPool(8, 64, CPU), TokenToKVPoolAllocator(256, CPU)
    reqs = []
    for i, given in enumerate(params):
        sampling_params = SamplingParams(max_new_tokens=8, temperature=0, **given)
        sampling_params.normalize(None)
        req = Req(f"r{i}", [3 + i, 10 + i], sampling_params, eos_token_ids={2})
        req.init_next_round_input()
        reqs.append(req)
    algorithm = MODES[mode]
    batch = ScheduleBatch.init_new(
        reqs,
        rows,
        allocator,
        ChunkCache(rows, allocator),
        SimpleNamespace(vocab_size=VOCAB_SIZE),
        enable_overlap=True,
        spec_algorithm=algorithm,
        spec_alloc_len=0 if algorithm.is_none() else 4,
    )
    batch.prepare_for_extend()
    after_forward(batch)
    return batch


def after_forward(batch: ScheduleBatch) -> None:
    """What the scheduler leaves on a batch whose forward is in flight."""
    batch.output_ids = -1 - batch.req_pool_indices
    if not batch.spec_algorithm.is_none():
        batch.spec_info = batch.spec_algorithm.create_draft_input(
            future_indices=batch.req_pool_indices
        )


class HostTensors(TorchFunctionMode):
    """Records tensors made from lists of `values`, and their way to the device."""

    def __init__(self, values: list[int]) -> None:
        self.values = values
        self.made: list[SimpleNamespace] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "tensor" and list(args[0] if args else kwargs["data"]) == self.values:
            # There is no page-locked memory here; that it is asked for is what counts.
            record = SimpleNamespace(
                pinned=bool(kwargs.pop("pin_memory", False)),
                to_device="device" in kwargs,
                non_blocking=None,
            )
            record.tensor = func(*args, **kwargs)
            self.made.append(record)
            return record.tensor
        if name in ("to", "cuda"):
            for record in self.made:
                if record.tensor is args[0]:
                    record.non_blocking = kwargs.get("non_blocking", False)
        return func(*args, **kwargs)


@pytest.mark.proves_fix
@pytest.mark.parametrize("mode", MODES)
def test_token_copy_is_pinned_and_non_blocking(mode, monkeypatch):
    batch = make_batch(mode, [PENALTIES, {}, PENALTIES])
    # From here on the CPU's platform says what a GPU's says. The step's other copies would ask for
    # page-locked memory too, which is not to be had here.
    monkeypatch.setattr(common.get_platform("cpu"), "is_pin_memory_available", lambda: True)
    monkeypatch.setattr("sglang.srt.mem_cache.common.to_device_async", host_tensor)
    for step in range(3):
        for i, req in enumerate(batch.reqs):
            req.output_ids.append(20 + step + i)
        with HostTensors([20 + step, 21 + step, 22 + step]) as seen:
            batch.prepare_for_decode()
        after_forward(batch)
        assert len(seen.made) == 1, f"{len(seen.made)} copies of the step's tokens"
        (copy,) = seen.made
        assert not copy.to_device, "blocking copy: torch.tensor(..., device=...) synchronizes"
        assert copy.pinned, "the copy is not pinned: a pageable source makes it blocking"
        assert copy.non_blocking, "blocking copy: .to(...) without non_blocking"


def host_tensor(data, dtype, device):
    return torch.as_tensor(data, dtype=dtype)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_copied_without_penalties(mode):
    batch = make_batch(mode, [{}, {}])
    for i, req in enumerate(batch.reqs):
        req.output_ids.append(20 + i)
    with HostTensors([20, 21]) as seen:
        batch.prepare_for_decode()
    assert seen.made == []


@pytest.mark.parametrize("mode", MODES)
def test_penalties_are_those_of_the_tokens_fed(mode):
    """Counts in Python, with the tokens that the host knows: at first the prompt's last one."""
    params = [PENALTIES, {}, {"frequency_penalty": -0.5}]
    batch = make_batch(mode, params)
    fed: list[list[int]] = [[] for _ in params]
    for step in range(4):
        batch.prepare_for_decode()
        after_forward(batch)
        for i, req in enumerate(batch.reqs):
            fed[i].append(req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1])
            # Token 7 comes twice.
            req.output_ids.append(7 if step % 2 else 15 + i)

    x = torch.linspace(-2, 2, VOCAB_SIZE).repeat(len(params), 1)
    wanted = [penalized(row, fed[i], params[i]) for i, row in enumerate(x.double().tolist())]
    batch.sampling_info.apply_logits_bias(x)
    torch.testing.assert_close(x.double(), torch.tensor(wanted, dtype=torch.float64))


def penalized(row: list[float], tokens: list[int], given: dict) -> list[float]:
    """One row's penalties in float64, token by token."""
    out = []
    for token, value in enumerate(row):
        count = tokens.count(token)
        value -= given.get("frequency_penalty", 0.0) * count
        value -= given.get("presence_penalty", 0.0) * (count > 0)
        scale = given.get("repetition_penalty", 1.0) if count else 1.0
        out.append(value * scale if value < 0 else value / scale)
    return out


@pytest.mark.parametrize("mode", MODES)
def test_filter_and_merge_keep_counts_in_place(mode):
    batch = make_batch(mode, [PENALTIES, {}, {"presence_penalty": 1.0}])
    for req in batch.reqs:
        req.output_ids.append(5)
    batch.prepare_for_decode()
    after_forward(batch)
    batch.filter_batch(keep_indices=[1, 2])
    x = torch.zeros(2, VOCAB_SIZE)
    batch.sampling_info.apply_logits_bias(x)
    assert x[0].count_nonzero() == 0
    assert x[1].nonzero().flatten().tolist() == [5]
    assert x[1, 5] == -1.0
