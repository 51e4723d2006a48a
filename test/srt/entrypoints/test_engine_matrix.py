"""Random requests through every kind of engine: each gets the tokens that it would get alone.

The first half runs the scheduler's own loop with messages that arrive at given steps, so a failure
comes back with its seed. The second half has callers' threads and real time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

VOCAB = 64
CONTEXT = 256
# Another one gives other requests: for i in 1 2 3; do SGLANG_TEST_SALT=$i make test ARGS=...; done
SALT = os.environ.get("SGLANG_TEST_SALT", "")
SPECULATION = {
    "none": {},
    "chain": {"speculative_num_steps": 3},
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 7,
    },
}


@dataclass(frozen=True)
class Setup:
    """One kind of engine."""

    overlap: bool
    page: int
    chunk: int
    mixed: bool
    tiny: bool
    spec: str
    penalties: bool = False

    def __str__(self) -> str:
        words = [
            "overlap" if self.overlap else "normal",
            f"page{self.page}",
            f"chunk{self.chunk}" if self.chunk > 0 else "whole",
            *(["mixed"] if self.mixed else []),
            *(["tiny"] if self.tiny else []),
            self.spec,
            *(["penalties"] if self.penalties else []),
        ]
        return "-".join(words)

    @property
    def pool(self) -> int:
        """KV slots: enough for everything, or just so many that one request always fits."""
        if not self.tiny:
            return 2048
        return {"none": 96, "chain": 112, "tree": 128}[self.spec]

    @property
    def room(self) -> int:
        """Most tokens of one request."""
        reserve = {"none": 0, "chain": 4, "tree": 7}[self.spec]
        return min(CONTEXT, self.pool - 2 * reserve)

    def arguments(self, paths: Any) -> dict[str, Any]:
        """For `ServerArgs`."""
        arguments = {
            "model_path": paths.target,
            "skip_tokenizer_init": True,
            "disable_overlap_schedule": not self.overlap,
            "page_size": self.page,
            "chunked_prefill_size": self.chunk,
            "enable_mixed_chunk": self.mixed,
            "max_total_tokens": self.pool,
            "max_running_requests": 6,
        }
        if self.penalties:
            arguments["penalty_backend"] = "sparse"
        if self.spec != "none":
            arguments |= {
                "speculative_algorithm": "EAGLE",
                "speculative_draft_model_path": paths.draft,
            }
        return arguments | SPECULATION[self.spec]


def _setups() -> list[Setup]:
    """Every loop, page size and kind of speculation; chunks, mixing and pools take turns."""
    turns = {
        "none": itertools.cycle(
            [
                (True, True, True),
                (False, False, True),
                (True, False, False),
                (True, True, False),
                (True, False, True),
                (False, False, False),
                (False, True, True),
            ]
        ),
        "spec": itertools.cycle([(True, False, True), (False, False, False), (False, False, True)]),
    }
    found = []
    for spec, page, overlap in itertools.product(SPECULATION, (1, 4, 16), (True, False)):
        for _ in range(3 if spec == "none" else 2):
            chunked, mixed, tiny = next(turns["none" if spec == "none" else "spec"])
            chunk = max(8, page) if chunked else -1
            found.append(Setup(overlap, page, chunk, mixed, tiny, spec))
    return list(dict.fromkeys(found))


def _penalty_setups() -> list[Setup]:
    """All of it with penalties, which have to be right wherever a token is counted or forgotten.

    In a tiny pool requests are retracted. In each, requests come alone and in groups, join those that
    decode, and leave or are aborted beside others.
    """
    return [
        Setup(overlap, page, max(8, page) if chunked else -1, mixed, tiny, spec, penalties=True)
        for spec, page, overlap, tiny in itertools.product(
            SPECULATION, (1, 16), (True, False), (True, False)
        )
        for chunked, mixed in ((False, False), (True, False), (True, True))
        if spec == "none" or not mixed
    ]


def draw_penalties(rng: random.Random) -> dict[str, Any]:
    """Random penalties: often none, some negative, some that make a request say something new."""
    params: dict[str, Any] = {}
    if rng.random() < 0.25:
        return params
    if rng.random() < 0.5:
        params["frequency_penalty"] = rng.choice([rng.uniform(-2, 2), 0.1, 2.0])
    if rng.random() < 0.5:
        params["presence_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.5:
        params["repetition_penalty"] = rng.choice([rng.uniform(0.5, 2), 2.0])
    if rng.random() < 0.4:
        params["min_new_tokens"] = rng.randint(0, 12)
    return params


def draw_ask(rng: random.Random, asks: type, rid: str, tiny: bool, penalties: bool = False) -> Any:
    """A random request that wants at least one token; for tiny pools one that grows a lot."""
    lengths = [1, 2, rng.randint(3, 12), rng.randint(13, 18 if tiny else 40)]
    limits = [rng.randint(10, 40) if tiny else rng.randint(6, 24) for _ in range(6)]
    if tiny and rng.random() < 0.15:
        limits = [1000]  # as much as there is room for
    params: dict[str, Any] = {
        "max_new_tokens": rng.choice([1, 2, *limits]),
        "temperature": rng.choice([0, 0, 0.6, 1.0, 1.4]),
        "sampling_seed": rng.randrange(-(1 << 63), 1 << 63),
    }
    if params["temperature"]:
        if rng.random() < 0.4:
            params["top_k"] = rng.choice([1, 3, 20, 1000])
        if rng.random() < 0.4:
            params["top_p"] = rng.choice([0.05, 0.7, 0.95])
        if rng.random() < 0.3:
            params["min_p"] = rng.choice([0.02, 0.2])
    if rng.random() < 0.2:
        params["stop_token_ids"] = rng.sample(range(VOCAB), 3)
    if rng.random() < 0.6:
        params["ignore_eos"] = True
    if rng.random() < 0.2:
        params["logit_bias"] = {str(t): rng.uniform(-3, 3) for t in rng.sample(range(VOCAB), 4)}
    if penalties:
        params |= draw_penalties(rng)
        params["max_new_tokens"] = max(params["max_new_tokens"], params.get("min_new_tokens", 0))
    ask = asks([rng.randrange(VOCAB) for _ in range(rng.choice(lengths))], params, rid)
    if rng.random() < 0.4:
        ask.return_logprob = True
        ask.logprob_start_len = rng.randint(-1, len(ask.prompt))
        ask.top_logprobs_num = rng.choice([0, 0, 1, 5])
        ask.token_ids_logprob = rng.choice([None, rng.sample(range(VOCAB), 3)])
    return ask


def draw_scoring(rng: random.Random, asks: type, rid: str) -> Any:
    """A random request that wants no token."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, rng.randint(2, 40)]))]
    ask = asks(prompt, {"max_new_tokens": 0}, rid, return_logprob=True)
    ask.logprob_start_len = rng.randint(-1, len(prompt))
    ask.top_logprobs_num = rng.choice([0, 3])
    ask.token_ids_logprob = rng.choice([None, rng.sample(range(VOCAB), 3)])
    return ask


# --- At given steps ------------------------------------------------------------------------------


@dataclass
class Play:
    """A scheduler that gets its messages at given steps.

    Attributes
    ----------
    script : dict of int to list
        Messages by step. Where nothing is left to do, the next ones come at once.
    reckless : bool
        Admit requests as if no output were coming, so that KV runs out again and again.
    """

    scheduler: Scheduler
    script: dict[int, list[Any]]
    outputs: dict[str, list[BatchTokenIDOutput]]
    reckless: bool = False
    step: int = 0
    expected: set[str] = field(default_factory=set)

    @classmethod
    def make(
        cls, arguments: dict[str, Any], script: dict[int, list[Any]], thread_context: Any
    ) -> Play:
        outputs: dict[str, list[BatchTokenIDOutput]] = {}
        scheduler = Scheduler(
            ServerArgs.from_kwargs(**arguments),
            lambda output: outputs.setdefault(output.rid, []).append(output),
            thread_context=thread_context,
        )
        play = cls(scheduler, dict(script), outputs)
        messages = itertools.chain(*script.values())
        play.expected = {m.rid for m in messages if isinstance(m, TokenizedGenerateReqInput)}
        play.receive = scheduler.recv_requests
        scheduler.recv_requests = play.recv_requests
        return play

    @property
    def unanswered(self) -> set[str]:
        """Requests that have not ended."""
        ended = {r for r, o in self.outputs.items() if o[-1].finished_reason is not None}
        return self.expected - ended

    def recv_requests(self) -> list[Any]:
        """In the place of `Scheduler.recv_requests`."""
        self.step += 1
        assert self.step < 3000, f"{self.unanswered} wait while nothing runs"
        s = self.scheduler
        if self.reckless:
            s.new_token_ratio = 0.0
        due = self.script.pop(self.step, [])
        idle = s.cur_batch is None and s.last_batch is None and not s.waiting_queue
        if idle and not due:
            if self.script:
                due = self.script.pop(min(self.script))
            else:
                assert not self.unanswered, f"{self.unanswered} are lost"
                s.stop()
        for message in due:
            s.submit_request(message)
        return self.receive()


def as_message(ask: Any, stream: bool = False) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=ask.rid,
        input_ids=list(ask.prompt),
        sampling_params=SamplingParams.from_dict(ask.params),
        stream=stream,
        return_logprob=ask.return_logprob,
        logprob_start_len=ask.logprob_start_len,
        top_logprobs_num=ask.top_logprobs_num,
        token_ids_logprob=ask.token_ids_logprob,
    )


def as_result(ask: Any, output: BatchTokenIDOutput) -> dict[str, Any]:
    """An output, in the engine's form."""

    def triples(pairs: list | None) -> list | None:
        return None if pairs is None else [(*pair, None) for pair in pairs]

    meta = {
        "id": output.rid,
        "prompt_tokens": len(ask.prompt),
        "completion_tokens": len(output.output_ids),
        "finish_reason": output.finished_reason.to_json(),
    }
    if output.logprobs is not None:
        for side in ("input", "output"):
            meta[f"{side}_token_logprobs"] = triples(getattr(output.logprobs, f"{side}_token"))
            for kind, name in (("top", "top"), ("token_ids", "token_ids")):
                values = getattr(output.logprobs, f"{side}_{kind}")
                meta[f"{side}_{name}_logprobs"] = [triples(pairs) for pairs in values]
    return {"output_ids": output.output_ids, "meta_info": meta}


def judge_all(play: Play, referee: Any, wanted: list[Any]) -> None:
    """Every request ended once, as it should, and its stream only ever grew."""
    for ask in wanted:
        *partial, last = play.outputs[ask.rid]
        assert all(output.finished_reason is None for output in partial)
        for earlier, later in itertools.pairwise([*partial, last]):
            assert later.output_ids[: len(earlier.output_ids)] == earlier.output_ids
        referee.judge(ask, as_result(ask, last))


def assert_whole(scheduler: Scheduler) -> None:
    """All KV and all rows are free, each once."""
    allocator = scheduler.token_to_kv_pool_allocator
    pages = allocator.free_pages.tolist()
    assert sorted(pages) == list(range(allocator.size // allocator.page_size))
    pool = scheduler.req_to_token_pool
    assert sorted(pool.free_slots) == list(range(pool.size))


def write_script(setup: Setup, asks: type) -> tuple[list[Any], dict[int, list[Any]]]:
    """Random requests, some of them aborted, and when their messages come."""
    rng = random.Random(f"{setup}{SALT}")
    wanted: list[Any] = []
    script: dict[int, list[Any]] = {}

    def send(ask: Any, step: int) -> None:
        wanted.append(ask)
        script.setdefault(step, []).append(as_message(ask, stream=rng.random() < 0.3))

    for i in range(24):
        ask = draw_ask(rng, asks, f"r{i}", setup.tiny, setup.penalties)
        step = rng.randint(2, 30)
        send(ask, step)
        if rng.random() < 0.25:
            ask.aborted = True
            script.setdefault(step + rng.randint(0, 12), []).append(AbortReq(ask.rid))
    for i in range(8):
        # Before, between and behind what generates: #21840 was about the first.
        send(draw_scoring(rng, asks, f"s{i}"), rng.choice([1, rng.randint(1, 40)]))
    return wanted, script


@pytest.mark.parametrize("setup", _setups() + _penalty_setups(), ids=str)
def test_each_request_gets_what_it_would_get_alone(
    setup: Setup, paths: Any, asks: type, make_referee: Callable[..., Any], one_thread: Any
) -> None:
    wanted, script = write_script(setup, asks)
    play = Play.make(setup.arguments(paths), script, one_thread)
    play.reckless = setup.tiny
    play.scheduler.run()

    referee = make_referee(setup.room)
    judge_all(play, referee, wanted)
    assert_whole(play.scheduler)
    assert referee.num_tokens > 60
    assert referee.num_ties <= 2
    _seen[setup] = play.scheduler.num_retractions


_seen: dict[Setup, int] = {}


def test_the_small_pools_were_too_small() -> None:
    """What the matrix is for: retraction, in both loops, with and without speculation."""
    if len(_seen) < len(_setups() + _penalty_setups()):
        pytest.skip("needs the whole matrix")
    kinds = itertools.product(SPECULATION, (True, False), (True, False))
    for spec, overlap, penalties in kinds:
        retractions = {
            setup: count
            for setup, count in _seen.items()
            if (setup.spec, setup.overlap, setup.penalties) == (spec, overlap, penalties)
            and setup.tiny
        }
        assert sum(retractions.values()) >= 1, retractions
    assert not any(count for setup, count in _seen.items() if not setup.tiny)


# --- In real time --------------------------------------------------------------------------------


class Crowd:
    """Callers of one engine, each with a request and a way of its own."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.results: dict[str, dict[str, Any]] = {}
        self.left: set[str] = set()

    async def run(self, wanted: list[Any]) -> None:
        await asyncio.gather(*(self._call(ask) for ask in wanted))

    async def _call(self, ask: Any) -> None:
        way = self.rng.choice(["wait", "stream", "thread", "abort", "leave", "leave stream"])
        delay, patience = self.rng.uniform(0, 0.15), self.rng.uniform(0, 0.05)
        ask.aborted = way == "abort"
        await asyncio.sleep(delay)
        arguments = {
            "input_ids": ask.prompt,
            "sampling_params": ask.params,
            "rid": ask.rid,
            **ask.logprob_arguments(),
        }
        if way in ("wait", "abort"):
            waiting = asyncio.create_task(self.engine.async_generate(**arguments))
            if way == "abort":
                await asyncio.sleep(patience)
                self.engine.abort_request(ask.rid)
            self.results[ask.rid] = await waiting
        elif way == "stream":
            known: list[int] = []
            async for item in await self.engine.async_generate(stream=True, **arguments):
                assert item["output_ids"][: len(known)] == known
                known = item["output_ids"]
            self.results[ask.rid] = item
        elif way == "thread":
            self.results[ask.rid] = await asyncio.to_thread(self.engine.generate, **arguments)
        elif way == "leave":
            self.left.add(ask.rid)
            waiting = asyncio.create_task(self.engine.async_generate(**arguments))
            await asyncio.sleep(patience)
            waiting.cancel()
        else:
            self.left.add(ask.rid)
            stream = await self.engine.async_generate(stream=True, **arguments)
            async for _ in stream:
                break
            await stream.aclose()


LIVE = [
    Setup(True, 1, 8, True, False, "none"),
    Setup(True, 4, 8, False, True, "none"),
    Setup(False, 16, -1, False, True, "none"),
    Setup(True, 1, -1, False, False, "chain"),
    Setup(True, 4, 8, False, True, "tree"),
    Setup(True, 1, 8, True, True, "none", penalties=True),
    Setup(True, 4, 8, False, True, "tree", penalties=True),
]


@pytest.mark.parametrize("setup", LIVE, ids=str)
def test_callers_do_not_notice_each_other(
    setup: Setup, paths: Any, asks: type, make_referee: Callable[..., Any], one_thread: Any
) -> None:
    rng = random.Random(f"{setup}{SALT}")
    wanted = [draw_ask(rng, asks, f"r{i}", setup.tiny, setup.penalties) for i in range(24)]
    with Engine(**setup.arguments(paths), thread_context=one_thread) as engine:
        crowd = Crowd(engine, rng)
        asyncio.run(crowd.run(wanted))
        # Those who left are gone once this request, which came later, has got everything.
        last = asks([7, 8, 9], {"max_new_tokens": 4, "temperature": 0}, "last")
        crowd.results["last"] = engine.generate(
            input_ids=last.prompt, sampling_params=last.params, rid="last"
        )
    referee = make_referee(setup.room)
    for ask in [*wanted, last]:
        assert (ask.rid in crowd.results) != (ask.rid in crowd.left)
        if ask.rid in crowd.results:
            referee.judge(ask, crowd.results[ask.rid])
    assert referee.num_ties <= 2
    assert_whole(engine.scheduler)
