"""Requests, batches over real pools, and a scheduler that goes one step at a time."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler, StepRecord
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

# For helpers of these tests.
sys.path.append(str(Path(__file__).parent))

CPU = torch.device("cpu")
VOCAB = 40


class Words:
    """A tokenizer whose every id is a word."""

    eos_token_id = None

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        shown = [
            w for w in (self.words[i] for i in ids) if not (w[:1] == "<" and skip_special_tokens)
        ]
        return "".join(shown)

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        return self.words[token_id][:1] == "<" and skip_special_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(range(len(text)))


def make_req(
    prompt: list[int] | int = 3, rid: str = "r", params: dict[str, Any] | None = None, **fields: Any
) -> Req:
    """A request; a prompt given as a number is that many tokens."""
    ids = list(range(4, 4 + prompt)) if isinstance(prompt, int) else list(prompt)
    sampling_params = SamplingParams(**(params or {}))
    sampling_params.normalize(fields.get("tokenizer"))
    fields.setdefault("eos_token_ids", {2})
    return Req(rid, ids, sampling_params, vocab_size=VOCAB, **fields)


class Pools:
    """Both pools, and batches that use them."""

    def __init__(self, page_size: int = 1, slots: int = 64, rows: int = 8, width: int = 64) -> None:
        self.rows = ReqToTokenPool(rows, width, CPU)
        if page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(slots, CPU)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page_size, CPU)
        self.cache = ChunkCache(self.rows, self.allocator)
        self.slots = slots

    def batch(self, reqs: list[Req], **options: Any) -> ScheduleBatch:
        """A batch that has not been prepared."""
        return ScheduleBatch.init_new(
            reqs,
            self.rows,
            self.allocator,
            self.cache,
            SimpleNamespace(vocab_size=VOCAB),
            options.pop("enable_overlap", True),
            options.pop("spec_algorithm", SpeculativeAlgorithm.NONE),
            **options,
        )

    def prefilled(self, reqs: list[Req], **options: Any) -> ScheduleBatch:
        """A batch whose requests are prefilled, each with its first token."""
        batch = self.batch(reqs, **options)
        for req in reqs:
            req.init_next_round_input()
        batch.prepare_for_extend()
        self.sampled(batch)
        return batch

    def sampled(self, batch: ScheduleBatch) -> None:
        """As if a forward had sampled a token for each request."""
        for req in batch.reqs:
            req.output_ids.append(10 + (7 * req.req_pool_idx + len(req.output_ids)) % 30)
        batch.output_ids = torch.tensor([req.output_ids[-1] for req in batch.reqs])


@pytest.fixture
def req() -> Callable[..., Req]:
    """Factory of requests, see `make_req`."""
    return make_req


@pytest.fixture
def words() -> type[Words]:
    """Factory of tokenizers whose ids are words."""
    return Words


@pytest.fixture
def pools() -> type[Pools]:
    """Factory of pools."""
    return Pools


# --- A scheduler, step by step -------------------------------------------------------------------


class Stepper:
    """A scheduler without its loop: `step` does what the loop does once.

    A scheduler with overlap has its own forward thread; everything else happens here and now.
    """

    def __init__(self, server_args: ServerArgs, **options: Any) -> None:
        self.outputs: dict[str, list[BatchTokenIDOutput]] = {}
        self.records: list[StepRecord] = []
        self.scheduler = Scheduler(
            server_args,
            lambda output: self.outputs.setdefault(output.rid, []).append(output),
            observer=self.records.append,
            **options,
        )
        self.modes: list[str | None] = []
        self._numbers = itertools.count()

    def send(self, prompt: list[int] | int = 3, rid: str | None = None, **fields: Any) -> str:
        """Put a request into the inbox. Fields of the message or of its sampling parameters."""
        rid = rid or f"r{next(self._numbers)}"
        ids = [4 + i % 36 for i in range(prompt)] if isinstance(prompt, int) else prompt
        names = TokenizedGenerateReqInput.__dataclass_fields__
        own = {k: fields.pop(k) for k in list(fields) if k in names}
        fields = {"temperature": 0, "ignore_eos": True} | fields
        self.scheduler.submit_request(
            TokenizedGenerateReqInput(rid, ids, SamplingParams.from_dict(fields), **own)
        )
        return rid

    def abort(self, rid: str | None) -> None:
        self.scheduler.submit_request(AbortReq(rid))

    def step(self, times: int = 1) -> None:
        """Go through the loop; the checks of the memory are on."""
        for _ in range(times):
            s = self.scheduler
            if s._has_nothing_to_do() and s._inbox.empty():
                s.self_check_during_idle()
                continue
            s._receive()
            batch = s.get_next_batch_to_run()
            s.cur_batch = batch
            self.modes.append(batch.forward_mode.name if batch else None)
            if batch:
                handle, record = s.run_batch(batch)
                s.result_queue.append((batch.copy(), handle, record))
            if s.last_batch if s.enable_overlap else batch:
                s.process_batch_result(*s.result_queue.popleft())
            elif batch is None:
                s.self_check_during_idle()
            s.last_batch = batch
            s.self_check_during_busy()

    def finish(self, limit: int = 300) -> None:
        """Step until nothing is left; then everything is free."""
        s = self.scheduler
        for _ in range(limit):
            self.step()
            if s._has_nothing_to_do() and s._inbox.empty():
                break
        else:
            pytest.fail(f"still at work after {limit} steps: {s.running_batch.reqs}")
        self.step()
        assert s.token_to_kv_pool_allocator.available_size() == s.max_total_num_tokens
        assert s.req_to_token_pool.available_size() == s.req_to_token_pool.size

    def req(self, rid: str) -> Req:
        """The request, wherever it is."""
        s = self.scheduler
        (found,) = {id(r): r for r in [*s.waiting_queue, *s._live_reqs()] if r.rid == rid}.values()
        return found

    def last(self, rid: str) -> BatchTokenIDOutput:
        """The result with which a request ended."""
        *others, last = self.outputs[rid]
        assert last.finished_reason is not None
        assert all(output.finished_reason is None for output in others)
        return last

    def reason(self, rid: str) -> str:
        """Type of the reason why a request ended."""
        return self.last(rid).finished_reason.to_json()["type"]

    def close(self) -> None:
        self.scheduler.forward_stream.close()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


@pytest.fixture(scope="session")
def stepper_model(tiny_model: Callable[..., str]) -> str:
    """Directory of a dummy model."""
    return tiny_model(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, max_position_embeddings=128
    )


@pytest.fixture
def stepper(stepper_model: str) -> Iterator[Callable[..., Stepper]]:
    """Factory of schedulers that go step by step. Torch is on one thread meanwhile."""
    made: list[Stepper] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(overlap: bool = True, model: str = stepper_model, **arguments: Any) -> Stepper:
        options = {
            k: arguments.pop(k) for k in ("model_runner_class", "tokenizer") if k in arguments
        }
        args = ServerArgs(
            model,
            skip_tokenizer_init=True,
            load_format="dummy",
            disable_overlap_schedule=not overlap,
            **{"max_total_tokens": 256, "max_running_requests": 8, **arguments},
        )
        made.append(Stepper(args, thread_context=_one_thread, **options))
        return made[-1]

    with torch.no_grad():
        yield make
    for stepper in made:
        stepper.close()
    torch.set_num_threads(threads)
