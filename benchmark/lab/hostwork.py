"""Host work of the scheduler between two decode steps: ``filter_batch`` and ``prepare_for_decode``.

``python -m lab.hostwork`` measures the installed package, ``python -m lab.hostwork --upstream`` a
release of SGLang, each time that it is asked (see `lab.remote`). Nothing runs between the steps, no
request ends, none has penalties: what is timed is the part that every decode step pays. `moves` times
besides what a request costs that comes or goes.
"""

from __future__ import annotations

import argparse
import statistics
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
    """A prefilled `ScheduleBatch` of this project on the device that is measured, ready to decode."""
    import torch

    from lab import devices
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    device = devices.device()
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
    batch.output_ids = torch.zeros(batch_size, dtype=torch.int64, device=device)
    return batch


def upstream_batch(batch_size: int) -> Any:
    """The same out of real SGLang 0.5.10."""
    import torch

    from lab import upstream

    batch = upstream.schedule_batch(batch_size, "cpu", prompt_len=PROMPT_LEN, row_len=ROW_LEN)
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


def moves(batch_size: int, times: int = STEPS) -> dict[str, float]:
    """Medians of what becomes of a batch between two decode steps.

    Parameters
    ----------
    batch_size : int
        Requests of the batch.
    times : int
        How often each is done.

    Returns
    -------
    dict
        ``prepare_us``: ``prepare_for_decode`` behind a ``filter_batch`` that finds nothing to do.
        ``merge_us``: one more request comes. ``filter_us``: it goes.

    Raises
    ------
    RuntimeError
        If the batch is not what it should be.
    """
    import torch

    with torch.inference_mode():
        batch = own_batch(batch_size)
        prepare = measure(batch, steps=times, warmup=min(WARMUP, times))
        merge, leave = measure_moves(batch, [own_batch(1) for _ in range(times)])
    return {"prepare_us": 1e6 * prepare, "merge_us": 1e6 * merge, "filter_us": 1e6 * leave}


def measure_moves(batch: Any, others: Sequence[Any]) -> tuple[float, float]:
    """Median seconds in which each of `others` is merged into `batch`, and filtered out of it.

    Raises
    ------
    RuntimeError
        If the batch is not what it should be.
    """
    reqs, rows = list(batch.reqs), batch.req_pool_indices.tolist()
    keep = list(range(len(reqs)))
    merging, leaving = [], []
    for other in others:
        joined = reqs + list(other.reqs)
        started = time.perf_counter()
        batch.merge_batch(other)
        merged = time.perf_counter()
        if batch.reqs != joined:
            raise RuntimeError("the batch did not merge")
        before = time.perf_counter()
        batch.filter_batch(keep_indices=keep)
        leaving.append(time.perf_counter() - before)
        merging.append(merged - started)
    if batch.reqs != reqs or batch.req_pool_indices.tolist() != rows:
        raise RuntimeError("the batch did not filter")
    return statistics.median(merging), statistics.median(leaving)


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
            from lab.upstream import stub_what_is_absent

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
