"""The modelled accelerator: who waits for what, and the numbers that come of it."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from step_records import record

from lab import modelled_accelerator
from lab.audit_transfers import Audit
from lab.cases import CASES, QUESTIONS
from lab.metrics import Step, WorkNotDone
from lab.modelled_accelerator import (
    ModelledAccelerator,
    blocking_sites,
    occupancy_metrics,
    predicted_occupancy,
    quick_switches,
)
from lab.sessions import Session
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.server_args import ServerArgs

# --- Numbers ------------------------------------------------------------------------------------


def test_prediction() -> None:
    # 5 ms of forward; 0.3 ms to prepare, 0.2 ms to handle results, 0.1 ms to wake up.
    times = (0.3e-3, 0.2e-3, 0.1e-3)
    assert predicted_occupancy(5e-3, *times, stalls=False) == 1
    assert predicted_occupancy(5e-3, *times, stalls=True) == pytest.approx(5 / 5.4)
    # A host that is slower than the forward is what counts.
    assert predicted_occupancy(0.25e-3, *times, stalls=False) == pytest.approx(0.5)
    assert predicted_occupancy(0.25e-3, *times, stalls=True) == pytest.approx(0.25 / 0.65)


def steps(count: int, period: float, tokens: int = 4) -> list[Step]:
    """Decode steps of two requests behind a prefill."""
    made = [Step(9.0, record(1, "EXTEND", 2, 2))]
    for i in range(count):
        found = record(
            i + 2,
            "DECODE",
            2,
            tokens,
            prepare_time=0.9e-3,
            process_time=0.2e-3,
        )
        made.append(Step(10 + period * i, found))
    return made


def test_metrics() -> None:
    found = occupancy_metrics(steps(12, 6e-3), 5e-3, [0.5e-3] * 12, [0.1e-3] * 12)
    assert found["fwd_occupancy"] == pytest.approx(5 / 6)
    assert found["forwards_per_step"] == pytest.approx(6 / 5)
    # Two tokens a request share a step.
    assert found["itl_p50_ms"] == found["itl_p99_ms"] == pytest.approx(3)
    # Stalls are not work.
    assert found["prepare_us_per_step"] == pytest.approx(400)
    assert found["host_us_per_step"] == pytest.approx(600)
    assert found["stalls_per_step"] == 1
    assert found["wake_up_us"] == pytest.approx(100)
    assert found["fwd_occupancy_predicted"] == pytest.approx(5 / 5.5)
    without = occupancy_metrics(steps(12, 6e-3), 5e-3)
    assert (without["stalls_per_step"], without["wake_up_us"]) == (0, 0)
    assert without["fwd_occupancy_predicted"] == 1
    # Where stalls are not seen there is nothing to be said of them.
    unseen = occupancy_metrics(steps(12, 6e-3), 5e-3, None)
    assert not {"stalls_per_step", "fwd_occupancy_predicted"} & unseen.keys()
    assert unseen["fwd_occupancy"] == without["fwd_occupancy"]


def test_forwards_take_no_more_than_all_of_the_time() -> None:
    """Results that come a little early at the end, behind forwards without a gap."""
    found = occupancy_metrics(steps(12, 4.999e-3), 5e-3)
    assert found["fwd_occupancy"] == found["forwards_per_step"] == 1


def test_delay_kernels_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes what the kernels took, and not what they were asked for."""

    class Event:
        def __init__(self, ms: float) -> None:
            self._ms = ms

        def elapsed_time(self, end: Event) -> float:
            return end._ms - self._ms

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    accelerator = ModelledAccelerator(frozenset())
    assert accelerator.take_forward_s() == accelerator.forward_s == 0.005
    accelerator._delays = [(Event(1.0), Event(6.5)), (Event(7.0), Event(13.5))]
    assert accelerator.take_forward_s() == pytest.approx(0.006)
    assert accelerator.take_forward_s() == 0.005  # taken


def test_the_edges_do_not_count() -> None:
    made = steps(12, 6e-3)
    made[1] = Step(made[1].delivered - 5, made[1].record)
    made[-1] = Step(made[-1].delivered + 5, made[-1].record)
    assert occupancy_metrics(made, 5e-3)["fwd_occupancy"] == pytest.approx(5 / 6)


def test_few_steps_say_nothing() -> None:
    with pytest.raises(WorkNotDone, match="5 decode steps are too few"):
        occupancy_metrics(steps(5, 6e-3), 5e-3)


def test_the_sweep_is_whole() -> None:
    swept = {(c.setup.speculative, c.batch_size, c.forward_ms) for c in QUESTIONS["overlap"]}
    assert swept == {
        (s, b, t) for s in ("none", "chain") for b in (1, 8, 64) for t in (1, 2, 5, 10)
    }
    assert all(
        case.penalties and case.setup.forwards == "modelled" for case in QUESTIONS["overlap"]
    )


# --- Waiting ------------------------------------------------------------------------------------


def test_quick_switches_are_put_back() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(KeyError), quick_switches():
        assert sys.getswitchinterval() < 1e-3 < before
        raise KeyError
    assert sys.getswitchinterval() == before


def copy_site() -> str:
    """The line that copies the penalties' tokens, as a ledger names it."""
    lines, first = inspect.getsourcelines(ScheduleBatch.cumulate_penalty_output_tokens)
    (place,) = (i for i, line in enumerate(lines) if "torch.tensor(" in line)
    return f"sglang/srt/managers/schedule_batch.py:{first + place}"


@pytest.mark.parametrize("shape", ["none", "chain"])
def test_nothing_blocks_at_present(shape: str) -> None:
    assert blocking_sites(shape, "all") == frozenset()


def test_a_scheduler_that_is_not_seen_to_wait_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What blocks it would be unknown, and nothing would."""
    nothing = Audit([], 4, "fakegpu")
    monkeypatch.setattr(modelled_accelerator, "audit", lambda *_, **__: nothing)
    with pytest.raises(WorkNotDone, match="was not seen to wait for results"):
        blocking_sites("none", "all")


@pytest.mark.parametrize("shape", ["none", "chain"])
@pytest.mark.parametrize("blocks", [False, True], ids=["asynchronous", "blocking"])
def test_a_line_that_blocks_waits_once_a_step(
    shape: str, blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = frozenset([copy_site()] if blocks else [])
    monkeypatch.setattr(modelled_accelerator, "blocking_sites", lambda *_: sites)
    # Dense penalties run this line in every step.
    make = ServerArgs.from_kwargs
    monkeypatch.setattr(ServerArgs, "from_kwargs", lambda **a: make(penalty_backend="dense", **a))
    case = CASES[f"overlap/{shape}-b8-t2ms"].shortened()
    with Session(case.setup, tmp_path) as session:
        found = session.run_round(case)
        accelerator = session.accelerator
    # Each decode step but the first waits for the forward before it, and one more behind the end.
    assert found["stalls_per_step"] == pytest.approx(1 if blocks else 0, abs=0.4)
    assert all(0 < seconds < 1 for seconds in accelerator.stalls)
    # A short run, between whose ends the clock may lose or gain a wake-up.
    assert 0 < found["fwd_occupancy"] <= 1.5
    assert found["forwards_per_step"] == 1 / found["fwd_occupancy"]


def test_only_the_scheduler_is_held_up() -> None:
    """A line that blocks, on another thread, and with nothing in flight."""

    class Handle:
        def __init__(self) -> None:
            self.is_done = False

        def done(self) -> bool:
            return self.is_done

    drained: list[str] = []
    accelerator = ModelledAccelerator(frozenset(["a.py:1"]))
    accelerator._drain = lambda: drained.append(threading.current_thread().name)
    accelerator.hold_up("a.py:1")
    accelerator._schedule_thread = threading.get_ident()
    accelerator.hold_up("a.py:1")
    accelerator._last = handle = Handle()
    accelerator.hold_up("a.py:2")
    other = threading.Thread(target=accelerator.hold_up, args=("a.py:1",))
    other.start()
    other.join()
    assert drained == []
    accelerator.hold_up("a.py:1")
    assert drained == [threading.current_thread().name]
    handle.is_done = True
    accelerator.hold_up("a.py:1")
    assert len(drained) == len(accelerator.stalls) == 1


def test_forwards_stand_in_a_row() -> None:
    """Each takes its time from when it was submitted, or from the end of the one before."""
    accelerator = ModelledAccelerator(frozenset())
    accelerator.forward_s = 0.02
    submitted = time.perf_counter()
    accelerator._occupy(submitted)
    first = accelerator._ended
    assert first - submitted >= 0.02 - 1e-9
    accelerator._occupy(submitted + 0.001)
    assert accelerator._ended - first >= 0.02 - 1e-9
    # Neither began before it was submitted, nor earlier than it had to.
    accelerator._occupy(later := accelerator._ended + 0.005)
    assert accelerator._ended - later >= 0.02 - 1e-9
    # What took longer than it may is not made up for.
    accelerator.forward_s = 0.0
    before = time.perf_counter()
    accelerator._occupy(submitted)
    assert accelerator._ended >= before


def test_every_call_of_torch_is_looked_at() -> None:
    seen: list[str] = []

    class Watched(ModelledAccelerator):
        def hold_up(self, site: str) -> None:
            seen.append(site)

    with Watched(frozenset()).thread_context():
        torch.ones(2).add_(1).tolist()
    line = inspect.currentframe().f_lineno - 1
    assert seen == [f"benchmark/test_modelled_accelerator.py:{line}"] * 3


@pytest.mark.gpu
def test_a_delay_kernel_takes_its_time() -> None:
    accelerator: Any = ModelledAccelerator(frozenset())
    accelerator.forward_s = 0.02
    accelerator._cycles_per_s = modelled_accelerator.cycles_per_second()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    accelerator._occupy(0.0)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(20, rel=0.2)
