"""#21840: a batch that merges with a generating one is not prefill-only.

The failure needs a scoring batch whose result is not known yet when a generation batch joins it. With
one step's budget filled by the scoring prompt, the generation request starts in the step behind it,
while the scoring forward is in flight. No sleep decides whether that happens.
"""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

CPU = torch.device("cpu")


# ---- merge_batch


class Batches:
    """Makes prepared batches that share one set of pools."""

    def __init__(self) -> None:
        self.rows = ReqToTokenPool(32, 64, CPU)
        self.allocator = TokenToKVPoolAllocator(256, CPU)
        self.names = itertools.count()

    def make(self, *prefill_only: bool) -> ScheduleBatch:
        """A batch with one request for each flag."""
        reqs = []
        for flag in prefill_only:
            params = SamplingParams(max_new_tokens=0 if flag else 8, temperature=0)
            params.normalize(None)
            req = Req(f"r{next(self.names)}", [1, 2, 3], params, is_prefill_only=flag)
            req.init_next_round_input()
            reqs.append(req)
        batch = ScheduleBatch.init_new(
            reqs,
            self.rows,
            self.allocator,
            ChunkCache(self.rows, self.allocator),
            SimpleNamespace(vocab_size=16),
            enable_overlap=True,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        return batch


@pytest.mark.parametrize(
    ("mine", "theirs", "merged"),
    [
        pytest.param(True, False, False, marks=pytest.mark.proves_fix),
        (False, True, False),
        (True, True, True),
        (False, False, False),
    ],
)
def test_merged_batch_is_prefill_only_iff_both_sides_are(mine, theirs, merged):
    batches = Batches()
    batch = batches.make(mine)
    batch.merge_batch(batches.make(theirs))
    assert batch.is_prefill_only is merged, "is_prefill_only of the merged batch"


@pytest.mark.proves_fix
@pytest.mark.parametrize("rest", list(itertools.product([True, False], repeat=3))[1:])
def test_nested_merges_agree_with_a_batch_built_at_once(rest):
    flags = (True, *rest)
    batches = Batches()
    left, right = batches.make(flags[0]), batches.make(flags[2])
    left.merge_batch(batches.make(flags[1]))
    right.merge_batch(batches.make(flags[3]))
    left.merge_batch(right)
    assert left.is_prefill_only is batches.make(*flags).is_prefill_only, "is_prefill_only"


@pytest.mark.proves_fix
def test_merge_after_a_filter_that_left_scoring_requests_only():
    batches = Batches()
    batch = batches.make(True, True)
    batch.filter_batch(keep_indices=[1])
    batch.merge_batch(batches.make(False))
    assert batch.is_prefill_only is False, "is_prefill_only of the merged batch"


# ---- the scheduler


SCORE_LEN = 32


def score_request(rid: str) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=0)
    params.normalize(None)
    ids = [3 + i % 50 for i in range(SCORE_LEN)]
    return TokenizedGenerateReqInput(rid, ids, params, return_logprob=True, logprob_start_len=0)


def generate_request(rid: str, max_new_tokens: int = 6) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0, ignore_eos=True)
    params.normalize(None)
    return TokenizedGenerateReqInput(rid, [5, 6, 7, 8], params)


def serve(model_path: str, requests: list[TokenizedGenerateReqInput], **server_args):
    """Run a scheduler over `requests` in their order until nothing is left to do."""
    outputs = {}
    scheduler = Scheduler(
        ServerArgs(
            model_path=model_path,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_total_tokens=256,
            **server_args,
        ),
        lambda output: outputs.__setitem__(output.rid, output),
    )
    for request in requests:
        scheduler.submit_request(request)
    scheduler.stop()
    error = []

    def run() -> None:
        try:
            scheduler.run()
        except RuntimeError as caught:
            error.append(caught)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "is_prefill_only: decode is skipped and the scheduler spins"
    assert not error, f"the scheduler died: {error[0]}"
    return scheduler, outputs


def assert_served(scheduler: Scheduler, outputs: dict, alone: list[int]) -> None:
    for rid, output in outputs.items():
        wanted = alone if rid.startswith("gen") else []
        assert output.output_ids == wanted
        assert output.finished_reason == FINISH_LENGTH(len(wanted))
        if not wanted:
            assert len(output.logprobs.input_token) == SCORE_LEN
    assert scheduler.token_to_kv_pool_allocator.available_size() == scheduler.max_total_num_tokens
    assert scheduler.req_to_token_pool.available_size() == scheduler.req_to_token_pool.size


@pytest.fixture(scope="module")
def tiny(tiny_model):
    """A tiny model, and the tokens of `generate_request` when nothing else runs."""
    path = tiny_model()
    _, outputs = serve(path, [generate_request("gen")], disable_overlap_schedule=True)
    return SimpleNamespace(path=path, alone=outputs["gen"].output_ids)


# One step takes the scoring prompt, or its last chunk, and nothing more.
FULL_STEP = {
    "whole prompt": {"max_prefill_tokens": SCORE_LEN},
    "last chunk": {"chunked_prefill_size": SCORE_LEN // 2},
    "paged": {"max_prefill_tokens": SCORE_LEN, "page_size": 4},
}


@pytest.mark.proves_fix
@pytest.mark.parametrize("settings", FULL_STEP.values(), ids=FULL_STEP)
def test_generation_arrives_while_scoring_is_in_flight(tiny, settings):
    requests = [score_request("score"), generate_request("gen")]
    scheduler, outputs = serve(tiny.path, requests, **settings)
    assert len(outputs) == 2
    assert_served(scheduler, outputs, tiny.alone)


@pytest.mark.proves_fix
def test_generations_arrive_among_many_scorings(tiny):
    requests = [score_request(f"score{i}") for i in range(3)]
    requests += [generate_request("gen0"), score_request("score3"), generate_request("gen1")]
    scheduler, outputs = serve(tiny.path, requests, max_prefill_tokens=SCORE_LEN)
    assert len(outputs) == 6
    assert_served(scheduler, outputs, tiny.alone)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_scoring_arrives_while_a_generation_runs(tiny, overlap):
    requests = [generate_request("gen"), score_request("score")]
    scheduler, outputs = serve(
        tiny.path, requests, max_prefill_tokens=4, disable_overlap_schedule=not overlap
    )
    assert len(outputs) == 2
    assert_served(scheduler, outputs, tiny.alone)


@pytest.mark.parametrize("first", ["score", "gen"])
def test_mixed_chunk(tiny, first):
    requests = [score_request("score"), generate_request("gen")]
    if first == "gen":
        requests.reverse()
    scheduler, outputs = serve(
        tiny.path, requests, chunked_prefill_size=SCORE_LEN // 2, enable_mixed_chunk=True
    )
    assert len(outputs) == 2
    assert_served(scheduler, outputs, tiny.alone)


def test_scoring_alone_drains(tiny):
    scheduler, outputs = serve(
        tiny.path, [score_request("score0"), score_request("score1")], max_prefill_tokens=SCORE_LEN
    )
    assert len(outputs) == 2
    assert_served(scheduler, outputs, tiny.alone)


# ---- the engine, on the real model


PROMPT = "The capital of France is"
PARAMS = {"max_new_tokens": 16, "temperature": 0}


@pytest.mark.model
@pytest.mark.parametrize(
    "first", [pytest.param("score", marks=pytest.mark.proves_fix), "gen"], ids=["score", "gen"]
)
def test_engine_serves_both(model_path, first):
    """The second request arrives while the first one's forward runs, in either order."""
    # 1,200 tokens in five steps, so the forward is busy for a while after the first.
    with Engine(model_path=model_path, chunked_prefill_size=240) as engine:
        alone = engine.generate(PROMPT, PARAMS)["text"]
        results = {}

        def score() -> None:
            results["score"] = engine.generate(
                input_ids=[5 + i % 1000 for i in range(1200)],
                sampling_params={"max_new_tokens": 0},
                return_logprob=True,
                logprob_start_len=0,
            )

        def generate() -> None:
            results["gen"] = engine.generate(PROMPT, PARAMS)

        order = [score, generate] if first == "score" else [generate, score]
        errors = run_overlapping(engine, order)
        assert not errors, f"is_prefill_only: {errors[0]}"
        assert results["gen"]["text"] == alone
        assert len(results["score"]["meta_info"]["input_token_logprobs"]) == 1200
        assert results["score"]["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def run_overlapping(engine: Engine, calls: list) -> list[Exception]:
    """Start the calls in turn, each once the one before it is in a forward."""
    errors: list[Exception] = []

    def guarded(call) -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(error)

    threads = []
    for call in calls:
        before = engine.scheduler.forward_ct
        threads.append(threading.Thread(target=guarded, args=(call,), daemon=True))
        threads[-1].start()
        while engine.scheduler.forward_ct == before and threads[-1].is_alive():
            threads[-1].join(0.001)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "is_prefill_only: a request never ends"
    return errors
