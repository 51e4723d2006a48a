"""The decode loop on an accelerator that is a model. **What it measures is a model's, not a GPU's.**

Where there is no GPU, a scheduler that stands still for a whole forward loses no time: nothing runs
meanwhile that it could keep from running on. So the time is modelled, openly:

- A forward, sampling included, occupies the forward stream for a fixed time ``T``, from when it was
  submitted or the one before it ended. Its thread sleeps and leaves the interpreter to the scheduler.
  Its result is made up.
- A transfer that counts as blocking, on the scheduler's thread, waits until every forward that was
  submitted before it is done: what a copy that the host waits for does on a stream that is chained
  behind the forward. For one that is pageable and says ``non_blocking`` this is the worst case; a driver
  may stage small ones without.

Everything else is the package's real code in real time. Which transfers block is not assumed but seen:
a `TransferLedger` on the fake device names the lines, on the same commit, before anything is timed.

On CUDA the forward is a delay kernel instead, and what blocks is up to the device.

Examples
--------
::

    cd benchmark
    python -m lab.modelled_accelerator
    python -m lab.modelled_accelerator --speculative chain --batch-size 8 --forward-ms 5 10
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from lab import devices
from lab.audit_transfers import audit
from lab.metrics import Step, WorkNotDone, percentile
from lab.transfer_ledger import SYNC, short_path

# Tokens that a made-up verification accepts for each request.
ACCEPTED: Final = 2
# A thread that wakes up waits so long for the interpreter, unless it is let in before. By default that
# is 5 ms, as long as a forward.
SWITCH_INTERVAL_S: Final = 0.0005
# Decode steps at either end of a round that are not measured.
EDGE: Final = 2

_TOKEN: Final = 7


def blocking_sites(speculative: str, penalties: str) -> frozenset[str]:
    """Lines (``file:line``) that block the scheduler in a decode step, as a ledger sees them.

    Raises
    ------
    WorkNotDone
        If the ledger does not see the scheduler wait for results, by which its thread is known.
    """
    found = audit(speculative, penalties, steps=4)
    schedule_threads = {t.thread for t in found.transfers if t.kind == SYNC and t.allowed}
    if not schedule_threads:
        raise WorkNotDone(
            "the scheduler was not seen to wait for results: what blocks it is unknown"
        )
    return frozenset(t.site for t in found.blocking() if t.thread in schedule_threads)


class ModelledAccelerator:
    """Stands for the accelerator of one engine.

    Give `thread_context` to the engine, and then the engine to `attach`.

    Parameters
    ----------
    sites : collection of str
        What blocks, see `blocking_sites`.

    Attributes
    ----------
    forward_s : float
        How long a forward takes, in seconds. May be changed while nothing runs.
    stalls : list of float
        Seconds for which the scheduler's thread was held up, each time.
    wake_ups : list of float
        Seconds from the end of a forward until the scheduler, which waited for it, went on.
    """

    def __init__(self, sites: frozenset[str]) -> None:
        self.sites = sites
        self.forward_s = 0.005
        self.stalls: list[float] = []
        self.wake_ups: list[float] = []
        self._schedule_thread: int | None = None
        self._drain: Callable[[], None] = lambda: None
        self._cycles_per_s: float | None = None
        self._delays: list[tuple[Any, Any]] = []
        # When the last forward ended on the modelled stream.
        self._free_at = self._ended = 0.0
        self._last: Any = None

    @property
    def device(self) -> str:
        """What the engine is to run on: CUDA where that is measured, to be delayed there."""
        return devices.chosen()

    def thread_context(self) -> contextlib.AbstractContextManager:
        """What each thread of the engine enters. The same on every commit, since it costs time."""
        return contextlib.nullcontext() if self.device == "cuda" else _Stalls(self)

    def attach(self, engine: Any) -> None:
        """Take the place of an engine's forwards. The engine must be idle."""
        scheduler = engine.scheduler
        stream, choose = scheduler.forward_stream, scheduler.get_next_batch_to_run
        submit = stream.submit
        self._drain = stream.drain
        if scheduler.device.type == "cuda":
            self._cycles_per_s = cycles_per_second()

        def get_next_batch_to_run() -> Any:
            self._schedule_thread = threading.get_ident()
            return choose()

        def submit_modelled(fn: Callable[[], Any]) -> Any:
            submitted = time.perf_counter()

            def run() -> Any:
                result = fn()
                self._occupy(submitted)
                return result

            handle = self._last = submit(run)
            handle.wait = self._timed(handle.wait)
            return handle

        scheduler.get_next_batch_to_run = get_next_batch_to_run
        stream.submit = submit_modelled
        scheduler.worker = MadeUpWorker(scheduler)

    def _occupy(self, submitted: float) -> None:
        """Make a forward last as long as it should.

        An accelerator starts what is queued by itself: that the thread woke up a little late is no part
        of the model, unless what it did took longer than the forward may.
        """
        if self._cycles_per_s is not None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(int(self.forward_s * self._cycles_per_s))
            end.record()
            self._delays.append((start, end))
            return
        _wake_up_in_time()
        self._free_at = max(max(submitted, self._free_at) + self.forward_s, time.perf_counter())
        while (rest := self._free_at - time.perf_counter()) > 0:
            time.sleep(rest)
        self._ended = self._free_at

    def take_forward_s(self) -> float:
        """How long a forward has taken since the last call, in seconds; nothing may run.

        On CUDA it is the mean of what the delay kernels took: a GPU's clock changes under load.
        """
        if not self._delays:
            return self.forward_s
        torch.cuda.synchronize()
        taken = statistics.fmean(start.elapsed_time(end) for start, end in self._delays) / 1e3
        self._delays.clear()
        return taken

    def hold_up(self, site: str) -> None:
        """Called for each line that calls PyTorch: wait if it blocks."""
        if (
            site in self.sites
            and threading.get_ident() == self._schedule_thread
            and self._last is not None
            and not self._last.done()
        ):
            started = time.perf_counter()
            self._timed(self._drain)()
            self.stalls.append(time.perf_counter() - started)

    def _timed(self, wait: Callable[[], Any]) -> Callable[[], Any]:
        """A function that waits, which notes how late it comes back."""

        def timed_wait() -> Any:
            started = time.perf_counter()
            found = wait()
            # While nothing else is submitted, the last forward is the one that was waited for.
            if started < self._ended < (now := time.perf_counter()):
                self.wake_ups.append(now - self._ended)
            return found

        return timed_wait


class _Stalls(TorchFunctionMode):
    def __init__(self, accelerator: ModelledAccelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        self.accelerator.hold_up(f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


class MadeUpWorker:
    """Gives a forward's result at once: the same token again and again.

    Parameters
    ----------
    scheduler : Scheduler
        Whose worker it is to be.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def forward_batch_generation(self, batch: Any) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.generation_result import GenerationBatchResult

        scheduler, size = self.scheduler, batch.batch_size
        spec = scheduler.spec_algorithm
        speculates = not spec.is_none() and not batch.forward_mode.is_extend()
        shape = (size, scheduler.server_args.speculative_num_steps + 1) if speculates else (size,)
        tokens = self._full(shape, _TOKEN)
        result = GenerationBatchResult(LogitsProcessorOutput(None), tokens)
        if spec.is_none():
            return result
        if speculates:
            result.accept_lens = self._full((size,), ACCEPTED)
        future_map = scheduler.future_map
        result.next_draft_input = spec.create_draft_input(
            verified_id=self._full((size,), _TOKEN),
            new_seq_lens=self._full((size,), 1),
            **{
                name: torch.zeros((size, buffer.shape[1]), dtype=buffer.dtype, device=buffer.device)
                for name, buffer in (
                    ("topk_p", future_map.topk_p_buf),
                    ("topk_index", future_map.topk_index_buf),
                    ("hidden_states", future_map.hidden_states_buf),
                )
            },
        )
        return result

    def _full(self, shape: tuple[int, ...], value: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=self.scheduler.device)


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Let a thread that wakes up have the interpreter soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


_awake = threading.local()


def _wake_up_in_time() -> None:
    """Ask Linux, once a thread, not to let its sleeps end late, by 50 us and more."""
    if getattr(_awake, "in_time", False):
        return
    _awake.in_time = True
    PR_SET_TIMERSLACK, nanosecond = 29, 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_TIMERSLACK, nanosecond)


def cycles_per_second() -> float:
    """How long the delay kernel takes, measured."""
    cycles = 10_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # the first launch loads it
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return 1e3 * cycles / start.elapsed_time(end)


# --- Metrics ----------------------------------------------------------------------------------


def occupancy_metrics(
    steps: Sequence[Step],
    forward_s: float,
    stalls: Sequence[float] | None = (),
    wake_ups: Sequence[float] = (),
) -> dict[str, float]:
    """Metrics of a round's decode steps but the first and the last few.

    Parameters
    ----------
    steps : sequence of Step
        Of one round.
    forward_s : float
        ``T``, in seconds.
    stalls : sequence of float, optional
        Seconds for which the host was held up in these steps. None where that is not seen, as on CUDA:
        the host's time then has it in it, and what follows from stalls is left out.
    wake_ups : sequence of float
        Seconds that it took to go on after a forward that it had waited for.

    Returns
    -------
    dict
        ``fwd_occupancy``: part of the wall time that forwards had to take, ``T * steps / wall``.
        ``forwards_per_step``: its inverse, the time of a step in units of ``T``. ``itl_p50_ms``,
        ``itl_p99_ms``: see `lab.metrics`; tokens of one step share its time. ``host_us_per_step``: host
        time to prepare a step and to handle its results, mean, stalls not counted.
        ``prepare_us_per_step``: the first part of it. ``stalls_per_step``. ``wake_up_us``: median of
        `wake_ups`, 0 if there were none. ``fwd_occupancy_predicted``: see `predicted_occupancy`.

    Raises
    ------
    WorkNotDone
        If there are too few steps.
    """
    decodes = [step for step in steps if step.decodes]
    if len(decodes) < 2 * EDGE + 2:
        raise WorkNotDone(f"{len(decodes)} decode steps are too few")
    per_step, stall = len(stalls or ()) / len(decodes), sum(stalls or ()) / len(decodes)
    decodes = decodes[EDGE:-EDGE]
    gaps = [b.delivered - a.delivered for a, b in itertools.pairwise(decodes)]
    latencies = [gap / step.tokens_per_request for gap, step in zip(gaps, decodes[1:], strict=True)]
    prepare = statistics.mean(s.record.prepare_time for s in decodes) - stall
    host = prepare + statistics.mean(s.record.process_time for s in decodes)
    # Forwards cannot take more than all of it. When results are handed out varies a little, and at
    # the two ends that may make the time look shorter than it was.
    occupancy = min(forward_s * len(gaps) / sum(gaps), 1.0)
    wake_up = percentile(wake_ups, 50) if wake_ups else 0.0
    found = {
        "fwd_occupancy": occupancy,
        "forwards_per_step": 1 / occupancy,
        "itl_p50_ms": 1e3 * percentile(latencies, 50),
        "itl_p99_ms": 1e3 * percentile(latencies, 99),
        "host_us_per_step": 1e6 * host,
        "prepare_us_per_step": 1e6 * prepare,
        "wake_up_us": 1e6 * wake_up,
    }
    if stalls is not None:
        found["stalls_per_step"] = per_step
        found["fwd_occupancy_predicted"] = predicted_occupancy(
            forward_s, prepare, host - prepare, wake_up, stalls=per_step > 0.5
        )
    return found


def predicted_occupancy(
    forward_s: float, prepare_s: float, process_s: float, wake_up_s: float, stalls: bool
) -> float:
    """Occupancy that follows from ``T`` and the host's time.

    Without a stall the host's work lies beside the forward: ``T / max(T, prepare + process)``.

    With a stall in each step the scheduler stands still until the forward is done. It wakes up, and what
    it then has to do before it submits the next one, nearly all of its preparation, takes its time while
    no forward runs; results are handled while the next one does. Hence
    ``T / (T + wake-up + prepare)``.
    """
    if stalls:
        return forward_s / (forward_s + wake_up_s + prepare_s)
    return forward_s / max(forward_s, prepare_s + process_s)


# --- The command ------------------------------------------------------------------------------

_COLUMNS: Final = {
    "fwd_occupancy": ("occupancy", "{:.3f}"),
    "fwd_occupancy_predicted": ("predicted", "{:.3f}"),
    "stalls_per_step": ("stalls a step", "{:.0f}"),
    "itl_p50_ms": ("ITL p50, ms", "{:.2f}"),
    "itl_p99_ms": ("ITL p99, ms", "{:.2f}"),
    "host_us_per_step": ("host, us a step", "{:.0f}"),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    from lab.arguments import positive_int
    from lab.run import package_folder

    parser = argparse.ArgumentParser(
        prog="lab.modelled_accelerator",
        description="Decode with all penalties on a modelled accelerator, over T and batch size.",
    )
    parser.add_argument("--speculative", nargs="+", choices=("none", "chain"), default=[])
    parser.add_argument("--batch-size", nargs="+", type=int, choices=(1, 8, 64), default=[])
    parser.add_argument("--forward-ms", nargs="+", type=int, choices=(1, 2, 5, 10), default=[])
    parser.add_argument("--rounds", type=positive_int, help="rounds a case")
    parser.add_argument(
        "--package", type=package_folder, help="directory that holds another sglang to measure"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep and print; return the exit status."""
    from lab.cases import QUESTIONS
    from lab.run import run_cases, say

    args = parse_args(argv)
    cases = [
        case
        for case in QUESTIONS["overlap"]
        if case.setup.speculative in (args.speculative or [case.setup.speculative])
        and case.batch_size in (args.batch_size or [case.batch_size])
        and case.forward_ms in (args.forward_ms or [case.forward_ms])
    ]
    found = run_cases(
        [f"overlap/{case.name}" for case in cases],
        package=args.package,
        rounds=args.rounds,
        on_event=say,
    )
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print_table(cases, found)
    return 0 if all(r["outcome"] == "done" for r in found.values()) else 1


def _print_table(cases: Sequence[Any], found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    heads = [name for name, _ in _COLUMNS.values()]
    title = (
        "A MODEL, not a GPU: forwards take T, blocking transfers wait for them; the host is real"
    )
    table = Table("mode", "batch", "T, ms", *heads, title=title, title_justify="left")
    for case in cases:
        result = found[f"overlap/{case.name}"]
        cells = [f"[bold]{result['outcome']}[/]"]
        if "metrics" in result:
            metrics = result["metrics"]
            cells = [
                form.format(metrics[key]) if key in metrics else ""
                for key, (_, form) in _COLUMNS.items()
            ]
        where = (case.setup.speculative, str(case.batch_size), str(case.forward_ms))
        table.add_row(*where, *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
