"""The queue on which forwards run while the scheduler prepares the next one.

One interface for every device: ``submit(fn) -> ForwardHandle`` and ``handle.wait()``. Work that was
submitted earlier runs earlier. On CUDA the queue is a stream, `fn` only launches kernels. On the CPU
it is one thread, so that the same two things are in flight at the same time, with the same hazards:
what a forward reads must not be written by the scheduler until that forward is done.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


class _Flag:
    """A `threading.Event` that is set once, at little cost between two forwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._lock.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        with self._lock:
            pass


class ForwardHandle:
    """A forward in flight. Filled in by the stream that runs it.

    Parameters
    ----------
    fn : callable
        What to run. The handle holds it, and so what it was made with, until `wait` lets go of it. To
        free a tensor is to let another thread of Python run: on the forward thread, between two
        forwards, the scheduler would take its whole turn there.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn: Callable[[], Any] | None = fn
        self._done = _Flag()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def wait(self) -> Any:
        """Block until the forward and its copies to the host are done.

        Returns
        -------
        object
            What the submitted function returned.

        Raises
        ------
        BaseException
            Whatever the submitted function raised.
        """
        self._done.wait()
        self._fn = None
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._fn()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._done.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()


class ForwardStream:
    """Runs submitted functions one after the other, in the order of submission."""

    def start(self, thread_context: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Get ready. `thread_context` is entered by any thread that the stream makes."""

    def submit(self, fn: Callable[[], Any]) -> ForwardHandle:
        """Queue `fn` behind everything that was submitted before it."""
        raise NotImplementedError

    def drain(self) -> None:
        """Block until everything submitted so far is done."""

    def mark(self) -> Any:
        """The point in time that the stream has come to. Called inside a submitted function."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """A mark on one clock for all marks of this stream. Its function must be done."""
        return mark

    def close(self) -> None:
        """Finish what was submitted and give back the stream's resources."""


class InlineForwardStream(ForwardStream):
    """Runs a function when it is submitted: no overlap."""

    def submit(self, fn: Callable[[], Any]) -> ForwardHandle:
        handle = ForwardHandle(fn)
        handle._run()
        if handle._error is not None:
            raise handle._error
        return handle


class ThreadForwardStream(ForwardStream):
    """One worker thread: the forward stream of devices that have no streams."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_done: _Flag | None = None

    def start(self, thread_context: Callable[[], contextlib.AbstractContextManager]) -> None:
        self._thread = threading.Thread(
            target=self._loop, args=(thread_context,), name="forward-stream", daemon=True
        )
        self._thread.start()

    def _loop(self, thread_context: Callable[[], contextlib.AbstractContextManager]) -> None:
        entered = False
        try:
            with thread_context():
                entered = True
                self._serve()
        except BaseException as error:
            if entered:
                raise

            self._serve(error)

    def _serve(self, error: BaseException | None = None) -> None:
        """Run what is submitted; given an `error`, nothing can run, and whoever waits gets that."""
        while (handle := self._queue.get()) is not None:
            if error is None:
                handle._run()
            else:
                handle._fail(error)
            # An idle thread holds nothing of the last forward.
            del handle

    def submit(self, fn: Callable[[], Any]) -> ForwardHandle:
        handle = ForwardHandle(fn)
        self._last_done = handle._done
        self._queue.put(handle)
        return handle

    def drain(self) -> None:
        if self._last_done is not None:
            self._last_done.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


class _CudaHandle(ForwardHandle):
    """A forward whose kernels are queued; it is done when the event behind them is."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(fn)
        self._event = torch.cuda.Event()

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> Any:
        if self._error is None:
            self._event.synchronize()
        return super().wait()


class CudaForwardStream(ForwardStream):
    """A CUDA stream beside the schedule stream, which is the stream current in the caller.

    Parameters
    ----------
    overlap : bool
        Without it forwards run on the schedule stream itself. Their results are copied to the host
        asynchronously all the same, so that they are there only when `ForwardHandle.wait` returns.
    """

    def __init__(self, overlap: bool) -> None:
        self._own_stream = torch.cuda.Stream() if overlap else None
        self._last_event: torch.cuda.Event | None = None
        self._origin = self.mark()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) / 1e3

    def submit(self, fn: Callable[[], Any]) -> ForwardHandle:
        handle = _CudaHandle(fn)
        self._last_event = handle._event
        schedule_stream = torch.cuda.current_stream()
        stream = self._own_stream or schedule_stream
        stream.wait_stream(schedule_stream)
        with torch.cuda.stream(stream):
            handle._run()
            handle._event.record()
        # What the schedule stream does from now on, it does behind this forward: it may write rows of
        # the request pool, and memory that it gave to this forward may be handed out again.
        schedule_stream.wait_stream(stream)
        if handle._error is not None:
            raise handle._error
        return handle

    def drain(self) -> None:
        if self._last_event is not None:
            self._last_event.synchronize()

    def close(self) -> None:
        self.drain()
