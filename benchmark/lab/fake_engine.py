"""An engine on the fake device, asked for ``device="cuda"``, under a transfer ledger.

The package knows devices as platforms (``sglang.srt.utils.common``). `fake_cuda` puts one in the place
of CUDA whose tensors live on the fake device and whose host memory can be pinned. Forwards run on the
same thread as on a CPU, and waiting for their results counts as waiting for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lab import fake_device
from lab.transfer_ledger import TransferLedger

# Where the host is meant to wait: for the results of a forward, when it handles them.
MEANT: tuple[str, ...] = (
    "SYNC scheduler.py:process_batch_result",
    # On CUDA the wait is inside.
    "SYNC forward_stream.py:wait",
)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Serve ``device="cuda"`` with the fake device inside the ``with``."""
    from sglang.srt.utils.common import Platform, get_platform, register_platform

    class FakeCuda(Platform):
        def __init__(self) -> None:
            super().__init__("cuda", fake_device.device())

        def is_pin_memory_available(self) -> bool:
            return True

        def create_forward_stream(self, overlap: bool) -> Any:
            stream = super().create_forward_stream(overlap)
            submit = stream.submit

            def submit_noted(fn: Callable[[], Any]) -> Any:
                handle = submit(fn)
                handle.wait = _noted(handle.wait)
                return handle

            stream.submit = submit_noted
            return stream

    before = get_platform("cuda")
    register_platform(FakeCuda())
    try:
        yield
    finally:
        register_platform(before)


def _noted(wait: Callable[[], Any]) -> Callable[[], Any]:
    """A wait for a forward's results that counts as one for the device."""

    def noted_wait() -> Any:
        fake_device.synchronize()
        return wait()

    return noted_wait


def tell_steps(ledger: TransferLedger, scheduler: Any) -> None:
    """Let `ledger` know which step the scheduler of an engine works on.

    Preparing a forward belongs to its step, and so do the forward and the handling of its results.
    """
    prepare, process = scheduler.get_next_batch_to_run, scheduler.process_batch_result
    stream, submit = scheduler.forward_stream, scheduler.forward_stream.submit

    def get_next_batch_to_run() -> Any:
        with ledger.in_step(scheduler.forward_ct + 1):
            return prepare()

    def process_batch_result(batch: Any, handle: Any, *rest: Any) -> Any:
        with ledger.in_step(handle.lab_step):
            return process(batch, handle, *rest)

    def numbered_submit(fn: Callable[[], Any]) -> Any:
        step = scheduler.forward_ct

        def run() -> Any:
            with ledger.in_step(step):
                return fn()

        handle = submit(run)
        handle.lab_step = step
        return handle

    stream.submit = numbered_submit
    scheduler.get_next_batch_to_run = get_next_batch_to_run
    scheduler.process_batch_result = process_batch_result
    # What is left: making and submitting the forward, when its number is given.
    ledger.step = lambda: scheduler.forward_ct


@contextlib.contextmanager
def watched_engine(
    model_path: str,
    ledger: TransferLedger,
    observer: Callable[[Any], None] | None = None,
    **args: Any,
) -> Iterator[Any]:
    """An engine on the fake device, or on CUDA if that is what `ledger` watches.

    Enter `ledger` before.
    """
    import sglang as sgl

    with contextlib.ExitStack() as stack:
        if ledger.is_fake:
            stack.enter_context(fake_cuda())
        engine = stack.enter_context(
            sgl.Engine(
                model_path=model_path,
                device="cuda",
                observer=observer,
                thread_context=ledger.attach,
                **args,
            )
        )
        tell_steps(ledger, engine.scheduler)
        yield engine
