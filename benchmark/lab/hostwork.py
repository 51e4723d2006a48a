"""Host work of the scheduler between two decode steps: ``filter_batch`` and ``prepare_for_decode``.

``python -m lab.hostwork`` measures the installed package, ``python -m lab.hostwork --upstream`` a
release of SGLang, each time that it is asked (see `lab.remote`). Nothing runs between the steps, no
request ends, none has penalties: what is timed is the part that every decode step pays.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lab.remote import answer

PROMPT_LEN = 32
ROW_LEN = 1024
STEPS = 400
WARMUP = 50


def own_batch(batch_size: int) -> Any:
    """A prefilled `ScheduleBatch` of this project, ready to decode."""
    import torch

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    device = torch.device("cpu")
    pool = ReqToTokenPool(batch_size, ROW_LEN, device)
    allocator = TokenToKVPoolAllocator(batch_size * ROW_LEN, device)
    reqs = []
    for i in range(batch_size):
        params = SamplingParams(max_new_tokens=ROW_LEN, temperature=0)
        params.normalize(None)
        req = Req(f"r{i}", list(range(PROMPT_LEN)), params, eos_token_ids={2}, vocab_size=4096)
        req.init_next_round_input()
        reqs.append(req)
    batch = ScheduleBatch.init_new(
        reqs,
        pool,
        allocator,
        ChunkCache(pool, allocator),
        SimpleNamespace(vocab_size=4096),
        enable_overlap=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    batch.output_ids = torch.zeros(batch_size, dtype=torch.int64)
    return batch


def upstream_batch(batch_size: int) -> Any:
    """The same out of real SGLang, by 0.5.10's signatures. Its configuration objects are stand-ins."""
    import torch

    from sglang.srt import server_args as arguments
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # Made without its __post_init__, which looks for a GPU and a model.
    args = object.__new__(arguments.ServerArgs)
    for name, spec in arguments.ServerArgs.__dataclass_fields__.items():
        setattr(args, name, spec.default)
    args.device, args.attention_backend = "cpu", "torch_native"
    arguments.set_global_server_args_for_scheduler(args)

    pool = ReqToTokenPool(batch_size, ROW_LEN, "cpu", enable_memory_saver=False)
    allocator = TokenToKVPoolAllocator(batch_size * ROW_LEN, torch.float32, "cpu", None, False)
    cache = ChunkCache(CacheInitParams(True, pool, allocator, page_size=1))
    reqs = []
    for i in range(batch_size):
        params = SamplingParams(max_new_tokens=ROW_LEN, temperature=0)
        params.normalize(None)
        req = Req(f"r{i}", "", list(range(PROMPT_LEN)), params, eos_token_ids={2}, vocab_size=4096)
        req.kv_committed_len = req.kv_allocated_len = PROMPT_LEN
        reqs.append(req)
    config = SimpleNamespace(
        vocab_size=4096, is_encoder_decoder=False, context_len=ROW_LEN, is_multimodal=False
    )
    batch = ScheduleBatch.init_new(
        reqs, pool, allocator, cache, config, True, SpeculativeAlgorithm.from_string(None)
    )
    pool.alloc(reqs)
    allocator.alloc(batch_size * PROMPT_LEN)
    # What prepare_for_extend and the prefill leave behind.
    batch.req_pool_indices = torch.arange(batch_size, dtype=torch.int64)
    batch.seq_lens = torch.full((batch_size,), PROMPT_LEN, dtype=torch.int64)
    batch.seq_lens_cpu = batch.seq_lens.clone()
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = batch_size * PROMPT_LEN
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, 4096)
    batch.output_ids = torch.zeros(batch_size, dtype=torch.int64)
    return batch


def measure(batch: Any, steps: int = STEPS, warmup: int = WARMUP) -> float:
    """Median seconds of one step's host work.

    Raises
    ------
    RuntimeError
        If the steps did not happen.
    """
    reqs, seq_len = list(batch.reqs), int(batch.seq_lens_cpu[0])
    seconds = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        batch.filter_batch()
        batch.prepare_for_decode()
        seconds.append(time.perf_counter() - started)
        # What the scheduler does between two steps, as far as the next one needs it.
        batch.output_ids = batch.input_ids
        for req in reqs:
            req.output_ids.append(3)
    if batch.reqs != reqs or int(batch.seq_lens_cpu[0]) != seq_len + warmup + steps:
        raise RuntimeError("the batch did not decode")
    return statistics.median(seconds[warmup:])


def stub_what_is_absent() -> None:
    """Let a release of SGLang be imported without packages that only a GPU needs."""
    import importlib.abc
    import importlib.machinery
    import importlib.util
    import types

    class AnyAttribute(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything

    class Anything(metaclass=AnyAttribute):
        """Stands for any class, function or decorator."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # Used as a decorator, it leaves what it decorates.
            alone = len(args) == 1 and not kwargs and callable(args[0])
            return args[0] if alone else Anything()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

    class Stub(types.ModuleType):
        __path__: Sequence[str] = ()
        __version__ = "0"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if (self.__name__, name) == ("triton", "runtime"):
                raise RuntimeError("no active driver")  # what real Triton says without a GPU
            return Anything

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name.split(".")[0] in absent:
                return importlib.machinery.ModuleSpec(name, self, is_package=True)
            return None

        def create_module(self, spec: Any) -> types.ModuleType:
            return Stub(spec.name)

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    wanted = ("torchvision", "compressed_tensors", "sgl_kernel", "triton", "IPython")
    absent = [name for name in wanted if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder())


def main(argv: Sequence[str] | None = None) -> None:
    """Answer with the median ``us`` of a step for each ``batch_size``."""
    parser = argparse.ArgumentParser(
        prog="lab.hostwork", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--upstream", action="store_true", help="measure a release of SGLang")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(args.threads)

    def make() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        build: Callable[[int], Any] = own_batch
        if args.upstream:
            stub_what_is_absent()
            build = upstream_batch

        def handle(question: Mapping[str, Any]) -> dict[str, Any]:
            with torch.inference_mode():
                return {"us": 1e6 * measure(build(question["batch_size"]))}

        with torch.inference_mode():
            build(1)  # imports, and fails early
        return handle

    answer(make)


if __name__ == "__main__":
    main()
