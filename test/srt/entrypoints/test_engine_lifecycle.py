"""Engines come and go: several at once, shut down, dying, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import scheduler
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import StepRecord
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams

LONG = {"max_new_tokens": 250, "temperature": 0, "ignore_eos": True}
SHORT = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
SOON = 30.0
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])


@pytest.fixture
def make_engine(paths: Any) -> Iterator[Callable[..., Engine]]:
    """Factory of engines; all threads that they started are gone in the end."""
    before = set(threading.enumerate())

    def make(**arguments: Any) -> Engine:
        return Engine(paths.target, skip_tokenizer_init=True, max_total_tokens=512, **arguments)

    yield make
    gc.collect()
    deadline = time.monotonic() + SOON
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"{left} are still there"
        time.sleep(0.005)


class Gate:
    """Forwards that wait until they may go on, or fail."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.open = threading.Event()
        self.error: BaseException | None = None
        gate = self

        class Runner(ModelRunner):
            def forward(self, forward_batch: ForwardBatch) -> Any:
                gate.arrived.set()
                assert gate.open.wait(SOON)
                if gate.error is not None:
                    raise gate.error
                return super().forward(forward_batch)

        self.runner_class = Runner


class Caller(threading.Thread):
    """A thread that calls, and keeps what comes of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error

    def wait(self) -> Caller:
        self.join(SOON)
        assert not self.is_alive(), "the call never came back"
        return self


# --- Several ------------------------------------------------------------------------------------


def test_engines_in_one_process_do_not_meet(
    make_engine: Callable[..., Engine], paths: Any, asks: type, make_referee: Callable
) -> None:
    kinds = [
        {},
        {"page_size": 4, "disable_overlap_schedule": True},
        {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": paths.draft},
    ]
    asked = [asks([5 + i, 9], {**SHORT, "max_new_tokens": 40}) for i in range(3)]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(make_engine(**kind)) for kind in kinds]

        def ask(engine: Engine, a: Any) -> Callable[[], Any]:
            # The same name everywhere: engines know nothing of each other.
            return lambda: engine.generate(input_ids=a.prompt, sampling_params=a.params, rid="x")

        callers = [Caller(ask(e, a)) for e, a in zip(engines, asked, strict=True)]
        results = [caller.wait().result for caller in callers]
        engines[0].shutdown()
        again = engines[1].generate(input_ids=[5], sampling_params=SHORT)
        assert len(again["output_ids"]) == 3
    referee = make_referee()
    for a, result in zip(asked, results, strict=True):
        referee.judge(a, result)


# --- Shutdown -----------------------------------------------------------------------------------


@LOOPS
def test_after_its_end_an_engine_refuses(overlap: bool, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(disable_overlap_schedule=not overlap)
    assert engine.generate(input_ids=[5], sampling_params=SHORT)["output_ids"]
    engine.shutdown()
    engine.shutdown()
    for stream in (True, False):
        with pytest.raises(RuntimeError, match="the engine is shut down"):
            engine.generate(input_ids=[5], sampling_params=SHORT, stream=stream)
        with pytest.raises(RuntimeError, match="the engine is shut down"):
            asyncio.run(engine.async_generate(input_ids=[5], stream=stream))
    with pytest.raises(RuntimeError, match="the engine is shut down"):
        engine.score([5], [[6]], [7])
    engine.abort_request("nobody")


def test_an_engine_that_was_never_used(make_engine: Callable[..., Engine]) -> None:
    with make_engine():
        pass


@LOOPS
def test_shutdown_with_requests_running(overlap: bool, make_engine: Callable[..., Engine]) -> None:
    """Those who wait get what there is."""
    engine = make_engine(disable_overlap_schedule=not overlap, max_running_requests=2)
    stream = engine.generate(input_ids=[4], sampling_params=LONG, stream=True)
    next(stream)
    callers = [
        Caller(lambda i=i: engine.generate(input_ids=[5 + i], sampling_params=LONG))
        for i in range(4)
    ]
    while len(engine._router._receivers) < 5:
        time.sleep(0.001)
    engine.shutdown()
    results = [caller.wait().result for caller in callers]
    *_, last = stream
    for result in [last, *results]:
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(result["output_ids"]) < 250
    scheduler = engine.scheduler
    assert scheduler.token_to_kv_pool_allocator.available_size() == 512
    assert scheduler.req_to_token_pool.available_size() == 2


def test_a_shutdown_waits_for_the_forward_that_runs(make_engine: Callable[..., Engine]) -> None:
    gate = Gate()
    engine = make_engine(model_runner_class=gate.runner_class)
    caller = Caller(lambda: engine.generate(input_ids=[5], sampling_params=LONG))
    assert gate.arrived.wait(SOON)
    end = Caller(engine.shutdown)
    time.sleep(0.05)
    assert end.is_alive()
    gate.open.set()
    end.wait()
    assert caller.wait().result["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_request_is_refused_from_the_shutdown_on(make_engine: Callable[..., Engine]) -> None:
    """It is not run to its end while the shutdown waits."""
    gate = Gate()
    engine = make_engine(model_runner_class=gate.runner_class)
    caller = Caller(lambda: engine.generate(input_ids=[5], sampling_params=LONG))
    assert gate.arrived.wait(SOON)
    end = Caller(engine.shutdown)
    while not engine._router.closed:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="the engine is shut down"):
        engine.generate(input_ids=[5], sampling_params=LONG)
    gate.open.set()
    end.wait()
    assert caller.wait().result["meta_info"]["finish_reason"]["type"] == "abort"


def test_the_context_is_left_by_an_error_too(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(KeyError), make_engine() as engine:
        raise KeyError
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate(input_ids=[5])


SCRIPT = """
import sys
from sglang import Engine
engine = Engine(sys.argv[1], skip_tokenizer_init=True)
stream = engine.generate(
    input_ids=[5], sampling_params={"max_new_tokens": 250, "ignore_eos": True}, stream=True
)
next(stream)
print("bye")
"""


def test_a_process_ends_although_its_engine_runs(paths: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, paths.target],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")


# --- Death --------------------------------------------------------------------------------------


@LOOPS
def test_everyone_who_waits_hears_of_the_death(
    overlap: bool, make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    gate.error = ZeroDivisionError("the forward broke")
    engine = make_engine(
        model_runner_class=gate.runner_class,
        disable_overlap_schedule=not overlap,
        max_running_requests=1,
    )
    ids = {"input_ids": [5], "sampling_params": LONG}

    async def consume() -> None:
        async for _ in await engine.async_generate(stream=True, **ids):
            pass

    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(**ids),
        lambda: engine.generate(input_ids=[[5], [6]], sampling_params=LONG),
        lambda: list(engine.generate(stream=True, **ids)),
        lambda: asyncio.run(engine.async_generate(**ids)),
        lambda: asyncio.run(consume()),
    ]
    callers = [Caller(call) for call in calls]
    while len(engine._router._receivers) < 6:
        time.sleep(0.001)
    gate.open.set()
    for caller in callers:
        error = caller.wait().error
        assert isinstance(error, RuntimeError)
        assert "the engine has died: the forward broke" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
    # And so does everyone who comes later.
    for call in calls:
        with pytest.raises(RuntimeError, match="the engine has died: the forward broke"):
            call()
    assert "the scheduler has died" in caplog.text
    engine.shutdown()


def test_an_error_of_the_observer_is_a_death(make_engine: Callable[..., Engine]) -> None:
    def observe(record: StepRecord) -> None:
        if record.step == 3:
            raise LookupError("observer")

    with (
        make_engine(observer=observe) as engine,
        pytest.raises(RuntimeError, match="the engine has died: observer"),
    ):
        engine.generate(input_ids=[5], sampling_params=LONG)


@LOOPS
def test_a_leak_is_a_death(overlap: bool, make_engine: Callable[..., Engine]) -> None:
    with make_engine(disable_overlap_schedule=not overlap) as engine:
        engine.scheduler.token_to_kv_pool_allocator.alloc(1)
        with pytest.raises(RuntimeError, match="the engine has died: KV slots do not add up"):
            engine.generate(input_ids=[5], sampling_params=LONG)


@LOOPS
def test_a_leak_is_found_when_idle_and_not_with_the_next_request(
    overlap: bool, make_engine: Callable[..., Engine]
) -> None:
    with make_engine(disable_overlap_schedule=not overlap) as engine:
        engine.scheduler.check_busy = False
        engine.scheduler.token_to_kv_pool_allocator.alloc(1)
        engine.generate(input_ids=[5], sampling_params=SHORT)
        engine._thread.join(timeout=20)
        assert not engine._thread.is_alive()
        with pytest.raises(RuntimeError, match=r"the engine has died: .* memory leak detected"):
            engine.generate(input_ids=[5], sampling_params=SHORT)


@LOOPS
def test_a_leak_is_found_although_a_request_waits_for_room(
    overlap: bool, make_engine: Callable[..., Engine]
) -> None:
    """Which it is not to be refused for, as if there were none."""
    with make_engine(disable_overlap_schedule=not overlap) as engine:
        engine.scheduler.check_busy = False
        engine.scheduler.token_to_kv_pool_allocator.alloc(508)
        with pytest.raises(RuntimeError, match=r"memory leak detected: 4 of 512 slots"):
            engine.generate(input_ids=[5] * 8, sampling_params=SHORT)


@LOOPS
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "before another one"])
def test_a_leak_is_found_although_a_prompt_that_has_begun_cannot_go_on(
    others: int, overlap: bool, make_engine: Callable[..., Engine]
) -> None:
    with make_engine(disable_overlap_schedule=not overlap, chunked_prefill_size=64) as engine:
        engine.scheduler.check_busy = False
        engine.scheduler.token_to_kv_pool_allocator.alloc(400)
        with pytest.raises(RuntimeError, match=r"memory leak detected: \d+ of 512 slots"):
            engine.generate(input_ids=[[5] * 250] + [[5] * 8] * others, sampling_params=SHORT)


@LOOPS
def test_a_prompt_that_cannot_go_on_is_given_up_where_nobody_looks_for_leaks(
    overlap: bool, make_engine: Callable[..., Engine]
) -> None:
    with make_engine(disable_overlap_schedule=not overlap, chunked_prefill_size=64) as engine:
        scheduler = engine.scheduler
        scheduler.check_busy = scheduler.check_idle = False
        lost = scheduler.token_to_kv_pool_allocator.alloc(400)
        begun, short = engine.generate(input_ids=[[5] * 250, [5] * 8], sampling_params=SHORT)
        assert "out of KV" in begun["meta_info"]["finish_reason"]["message"]
        assert short["meta_info"]["finish_reason"]["type"] == "length"
        scheduler.token_to_kv_pool_allocator.free(lost)
        assert scheduler.token_to_kv_pool_allocator.available_size() == 512


@LOOPS
def test_requests_that_no_step_takes_are_a_leak_although_another_one_waits(
    overlap: bool, make_engine: Callable[..., Engine]
) -> None:
    """The defect of #21840: they are taken for requests that do not decode."""
    with make_engine(disable_overlap_schedule=not overlap, max_running_requests=2) as engine:
        engine.scheduler.check_busy = False
        choose = engine.scheduler.get_next_batch_to_run

        def without_decode() -> Any:
            batch = choose()
            if batch is not None and len(batch.reqs) == 2:
                batch.is_prefill_only = True
            return batch

        engine.scheduler.get_next_batch_to_run = without_decode
        with pytest.raises(
            RuntimeError, match=r"memory leak detected: .* are in the running batch"
        ):
            engine.generate(input_ids=[[5], [6], [7]], sampling_params=SHORT)


@LOOPS
def test_a_leak_is_found_before_the_end(
    overlap: bool, make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that is shut down while it runs looks once more."""
    engine = make_engine(disable_overlap_schedule=not overlap)
    engine.scheduler.check_busy = False
    engine.scheduler.token_to_kv_pool_allocator.alloc(1)
    stream = engine.generate(input_ids=[5], sampling_params=LONG, stream=True)
    next(stream)
    engine.shutdown()
    assert "memory leak detected" in caplog.text


@pytest.mark.parametrize("thread", ["scheduler", "forward-stream"])
def test_a_context_that_cannot_be_entered_is_a_death(
    thread: str, make_engine: Callable[..., Engine]
) -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        if threading.current_thread().name == thread:
            raise OSError("no such mode")
        yield

    with (
        make_engine(thread_context=broken) as engine,
        pytest.raises(RuntimeError, match="the engine has died: no such mode"),
    ):
        engine.generate(input_ids=[5], sampling_params=SHORT)


# --- Threads ------------------------------------------------------------------------------------


@LOOPS
def test_every_thread_enters_the_context(overlap: bool, make_engine: Callable[..., Engine]) -> None:
    events: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        name = threading.current_thread().name
        events.append(("enter", name))
        yield
        events.append(("leave", name))

    with make_engine(thread_context=context, disable_overlap_schedule=not overlap) as engine:
        engine.generate(input_ids=[5], sampling_params=SHORT)
        entered = sorted(events)
    names = ["forward-stream", "scheduler"] if overlap else ["scheduler"]
    assert entered == [("enter", name) for name in names]
    assert sorted(events) == [(way, name) for way in ("enter", "leave") for name in names]


@LOOPS
def test_threads_keep_no_gradients(overlap: bool, make_engine: Callable[..., Engine]) -> None:
    seen = []

    class Runner(ModelRunner):
        def forward(self, forward_batch: ForwardBatch) -> Any:
            seen.append(torch.is_grad_enabled())
            return super().forward(forward_batch)

    with make_engine(model_runner_class=Runner, disable_overlap_schedule=not overlap) as engine:
        engine.generate(input_ids=[5], sampling_params=SHORT)
    assert set(seen) == {False}
    assert torch.is_grad_enabled()


@LOOPS
def test_a_forgotten_engine_ends_its_threads(
    overlap: bool, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(disable_overlap_schedule=not overlap)
    engine.generate(input_ids=[5], sampling_params=SHORT)
    alive = weakref.ref(engine)
    thread = engine._thread
    del engine
    gc.collect()
    assert alive() is None
    thread.join(SOON)
    assert not thread.is_alive()


@pytest.mark.parametrize("where", ["forward-stream", "scheduler"])
def test_an_engine_may_be_collected_on_one_of_its_own_threads(
    where: str, make_engine: Callable[..., Engine]
) -> None:
    """Garbage is collected wherever it is noticed. A thread must not wait for its own end there."""
    forgotten = threading.Event()
    collected = []

    def collect() -> None:
        if threading.current_thread().name == where and forgotten.is_set() and not collected:
            collected.append(gc.collect())

    class Runner(ModelRunner):
        def forward(self, forward_batch: ForwardBatch) -> Any:
            collect()
            return super().forward(forward_batch)

    engine = make_engine(model_runner_class=Runner, observer=lambda record: collect())
    scheduler, thread = engine.scheduler, engine._thread
    gc.disable()
    try:
        cycle: list[Any] = [engine]
        cycle.append(cycle)
        # A request without a caller, so that the engine is at work when it is forgotten.
        scheduler.submit_request(TokenizedGenerateReqInput("orphan", [5], SamplingParams(**LONG)))
        del engine, cycle
        forgotten.set()
        thread.join(SOON)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert collected


def test_an_observer_may_end_the_engine(make_engine: Callable[..., Engine]) -> None:
    engines: list[Engine] = []

    def observe(record: StepRecord) -> None:
        if record.step == 5:
            engines[0].shutdown()

    engines.append(make_engine(observer=observe))
    result = engines[0].generate(input_ids=[5], sampling_params=LONG)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert 3 <= len(result["output_ids"]) <= 8
    engines.clear()


@LOOPS
@pytest.mark.parametrize("params", [SHORT, {"max_new_tokens": 0}], ids=["generate", "score"])
def test_no_one_sleeps_while_requests_wait(
    params: dict[str, Any],
    overlap: bool,
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of a batch end at once, and others wait for their places."""
    timeouts = []

    class Inbox(queue.SimpleQueue):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if timeout is not None:
                timeouts.append(timeout)
            return super().get(block, timeout)

    monkeypatch.setattr(scheduler.queue, "SimpleQueue", Inbox)
    with make_engine(disable_overlap_schedule=not overlap, max_running_requests=2) as engine:
        results = engine.generate(input_ids=[[5 + i, 9] for i in range(8)], sampling_params=params)
    assert len(results) == 8
    assert timeouts == []


def test_the_second_who_shuts_an_engine_down_waits_too(make_engine: Callable[..., Engine]) -> None:
    """Also where the first could not, being one of its threads."""
    shut = threading.Event()

    def observer(record: StepRecord) -> None:
        engine.shutdown()
        shut.set()
        time.sleep(0.2)

    engine = make_engine(observer=observer)
    with contextlib.suppress(RuntimeError):
        engine.generate(input_ids=[5], sampling_params=SHORT)
    assert shut.wait(SOON)
    engine.shutdown()
    assert not engine._thread.is_alive()


def test_an_observer_cannot_wait_for_its_own_thread(make_engine: Callable[..., Engine]) -> None:
    said = []

    def observer(record: StepRecord) -> None:
        with pytest.raises(RuntimeError) as caught:
            engine.generate(input_ids=[7], sampling_params=SHORT)
        said.append(str(caught.value))

    with make_engine(observer=observer) as engine:
        assert engine.generate(input_ids=[5], sampling_params=SHORT)["output_ids"]
        assert "cannot be called on a thread of the engine" in said[0]
        assert not engine._router._receivers


def test_a_directory_of_another_kind_of_model_is_named(paths: Any) -> None:
    def refused(*args: Any, **kwargs: Any) -> str:
        with pytest.raises(ValueError) as caught:
            Engine(*args, skip_tokenizer_init=True, **kwargs)
        return str(caught.value)

    assert refused(paths.draft).startswith("model_path must be the directory of a LlamaForCausalLM")
    said = refused(
        paths.target, speculative_algorithm="EAGLE", speculative_draft_model_path=paths.target
    )
    assert said.startswith("speculative_draft_model_path must be the directory of a Llama")
    assert said.endswith("of a LlamaForCausalLM")


def test_an_observer_sees_every_step(make_engine: Callable[..., Engine], paths: Any) -> None:
    records: list[StepRecord] = []
    with make_engine(
        observer=records.append,
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=paths.draft,
    ) as engine:
        result = engine.generate(input_ids=[5, 9], sampling_params={**LONG, "max_new_tokens": 40})
    meta = result["meta_info"]
    assert [r.forward_mode for r in records] == ["EXTEND"] + ["DECODE"] * (len(records) - 1)
    assert sum(r.num_tokens for r in records) == 40
    # The draft knows something: fewer steps than tokens. One more step was under way at the end.
    assert meta["spec_verify_ct"] == len(records) - 2 < 39
    # The first token is the prefill's; what was accepted behind the end is not counted.
    assert meta["spec_accept_length"] == pytest.approx(39 / meta["spec_verify_ct"])
    for record in records[1:]:
        assert set(record.phases) == {"draft", "verify", "extend"}
        assert all(seconds > 0 for seconds in record.phases.values())
        assert sum(record.phases.values()) <= record.forward_end - record.forward_start


def test_the_accepted_length_is_of_tokens_that_were_kept(
    make_engine: Callable[..., Engine], paths: Any
) -> None:
    """Wherever the limit cuts the last verification short. The first token is the prefill's."""
    with make_engine(
        speculative_algorithm="EAGLE", speculative_draft_model_path=paths.draft
    ) as engine:
        for limit in range(30, 40):
            meta = engine.generate(
                input_ids=[5, 9], sampling_params={**LONG, "max_new_tokens": limit}
            )["meta_info"]
            kept = meta["spec_accept_length"] * meta["spec_verify_ct"]
            assert kept == pytest.approx(limit - 1)
