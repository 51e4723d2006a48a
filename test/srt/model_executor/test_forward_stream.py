"""The queue on which forwards run: order, overlap, errors, and the end."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from sglang.srt.model_executor.forward_stream import (
    ForwardStream,
    InlineForwardStream,
    ThreadForwardStream,
)
from sglang.srt.utils.common import get_platform

SOON = 20.0  # seconds after which something that should have happened has not


@contextlib.contextmanager
def started(stream: ForwardStream, context=contextlib.nullcontext) -> Iterator[ForwardStream]:
    stream.start(context)
    try:
        yield stream
    finally:
        stream.close()


@pytest.mark.parametrize("make", [InlineForwardStream, ThreadForwardStream])
def test_results_come_in_order_of_submission(make: type[ForwardStream]) -> None:
    seen: list[int] = []

    def work(i: int) -> Callable[[], int]:
        def run() -> int:
            seen.append(i)
            return i * i

        return run

    with started(make()) as stream:
        handles = [stream.submit(work(i)) for i in range(50)]
        # Asked for in another order.
        assert [h.wait() for h in reversed(handles)] == [i * i for i in reversed(range(50))]
        assert [h.wait() for h in handles] == [i * i for i in range(50)]
        assert all(h.done() for h in handles)
    assert seen == list(range(50))


def test_the_caller_goes_on_while_a_forward_runs() -> None:
    started_, go_on = threading.Event(), threading.Event()

    def forward() -> int:
        started_.set()
        assert go_on.wait(SOON)
        return threading.get_ident()

    with started(ThreadForwardStream()) as stream:
        first, second = stream.submit(forward), stream.submit(lambda: 2)
        # Were this not another thread, nobody would be here to let the forward go on.
        assert started_.wait(SOON)
        assert not first.done()
        assert not second.done()
        go_on.set()
        assert first.wait() != threading.get_ident()
        assert second.wait() == 2


def test_a_context_that_cannot_be_entered_is_an_error_of_each_forward() -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise OSError("no such mode")
        yield

    with started(ThreadForwardStream(), broken) as stream:
        for handle in [stream.submit(lambda: 1) for _ in range(3)]:
            with pytest.raises(OSError, match="no such mode"):
                handle.wait()
        stream.drain()


def test_without_overlap_a_forward_is_done_when_it_is_submitted() -> None:
    with started(InlineForwardStream()) as stream:
        handle = stream.submit(threading.get_ident)
        assert handle.done()
        assert handle.wait() == threading.get_ident()


def test_an_error_comes_out_where_its_result_is_awaited_and_nowhere_else() -> None:
    def fail() -> None:
        raise KeyError("forward")

    with started(ThreadForwardStream()) as stream:
        before, broken, after = stream.submit(lambda: 1), stream.submit(fail), stream.submit(int)
        assert after.wait() == 0
        assert before.wait() == 1
        assert broken.done()
        for _ in range(2):
            with pytest.raises(KeyError, match="forward"):
                broken.wait()


def test_even_an_exit_is_handed_to_who_waits() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with started(ThreadForwardStream()) as stream:
        handle = stream.submit(leave)
        with pytest.raises(SystemExit):
            handle.wait()
        assert stream.submit(lambda: "alive").wait() == "alive"


def test_without_overlap_an_error_comes_out_of_submit() -> None:
    def fail() -> None:
        raise KeyError("forward")

    with started(InlineForwardStream()) as stream, pytest.raises(KeyError):
        stream.submit(fail)


def test_drain_waits_for_all_that_was_submitted() -> None:
    seen = []
    with started(ThreadForwardStream()) as stream:
        stream.drain()  # nothing yet
        for i in range(5):
            stream.submit(lambda i=i: (time.sleep(0.005), seen.append(i)))
        stream.drain()
        assert seen == list(range(5))


def test_close_finishes_what_was_submitted_and_ends_the_thread() -> None:
    before = threading.active_count()
    seen = []
    stream = ThreadForwardStream()
    stream.start(contextlib.nullcontext)
    assert threading.active_count() == before + 1
    handles = [stream.submit(lambda i=i: (time.sleep(0.005), seen.append(i))) for i in range(5)]
    stream.close()
    assert threading.active_count() == before
    assert seen == list(range(5))
    assert all(handle.done() for handle in handles)
    stream.close()  # again


def test_close_of_a_stream_that_never_started() -> None:
    ThreadForwardStream().close()


def test_the_thread_enters_the_context_it_is_given_and_leaves_it() -> None:
    events: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        events.append(("enter", threading.get_ident()))
        with torch.inference_mode():
            yield
        events.append(("leave", threading.get_ident()))

    with started(ThreadForwardStream(), context) as stream:
        thread = stream.submit(threading.get_ident).wait()
        assert stream.submit(torch.is_inference_mode_enabled).wait()
        assert not torch.is_inference_mode_enabled()
        assert events == [("enter", thread)]
    assert events == [("enter", thread), ("leave", thread)]


def test_a_finished_forward_is_not_kept_alive() -> None:
    class Result:
        pass

    with started(ThreadForwardStream()) as stream:
        result = Result()
        alive = weakref.ref(result)
        stream.submit(lambda kept=result: kept).wait()
        del result
        # The stream remembers the last handle; the one after that lets go of it.
        stream.submit(lambda: None).wait()
        deadline = time.monotonic() + SOON
        while alive() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        assert alive() is None


def test_what_a_forward_was_made_with_is_freed_by_the_thread_that_waits() -> None:
    """Not by the one that has the next forward to run."""
    freed_by = []

    class Input:
        def __del__(self) -> None:
            freed_by.append(threading.get_ident())

        def forward(self) -> int:
            return threading.get_ident()

    with started(ThreadForwardStream()) as stream:
        handle = stream.submit(Input().forward)
        stream.submit(lambda: None).wait()
        assert freed_by == []
        assert handle.wait() != threading.get_ident()
        assert freed_by == [threading.get_ident()]
        handle.wait()  # again


@pytest.mark.parametrize("make", [InlineForwardStream, ThreadForwardStream])
def test_marks_are_seconds_on_one_clock(make: type[ForwardStream]) -> None:
    def forward() -> tuple[object, object]:
        start = stream.mark()
        time.sleep(0.02)
        return start, stream.mark()

    with started(make()) as stream:
        spans = [stream.submit(forward).wait() for _ in range(3)]
        times = [stream.seconds(mark) for span in spans for mark in span]
    assert times == sorted(times)
    assert all(end - start >= 0.02 for start, end in zip(times[::2], times[1::2], strict=True))


@pytest.mark.parametrize(
    ("overlap", "kind"), [(True, ThreadForwardStream), (False, InlineForwardStream)]
)
def test_a_cpu_overlaps_by_a_thread(overlap: bool, kind: type[ForwardStream]) -> None:
    assert type(get_platform("cpu").create_forward_stream(overlap)) is kind
