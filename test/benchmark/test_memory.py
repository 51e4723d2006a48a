"""What a decode step takes of memory: bytes are followed to their end, and steps have their own."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.audit_transfers import one_thread
from lab.cases import CASES, Setup
from lab.memory import Allocations, MemorySession, penalty_bytes
from lab.metrics import WorkNotDone


def test_bytes_are_followed_from_their_making_to_their_end() -> None:
    allocations = Allocations()
    with allocations.attach():
        a = torch.zeros(1000)
        assert (allocations.live, allocations.peak) == (4000, 4000)
        view = a[10:20].view(2, 5)
        a.add_(1)
        assert allocations.live == 4000  # no memory of its own
        b = a + 1
        assert (allocations.live, allocations.peak) == (8000, 8000)
        del a
        assert allocations.live == 8000  # the view holds it
        del view
        assert allocations.live == 4000
        allocations.reset_peak()
        (b * 2 + 1).sum()  # two of 4000 at a time beside b, and the sum
        assert allocations.live == 4000
        assert allocations.peak == 12_000
        del b
    assert allocations.live == 0


def test_threads_share_the_count_and_what_is_made_outside_is_not_counted() -> None:
    allocations = Allocations()
    kept: list[torch.Tensor] = [torch.zeros(77)]

    def work() -> None:
        with torch.inference_mode(), allocations.attach():
            kept.append(torch.ones(50, dtype=torch.int64))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert allocations.live == 400
    kept.clear()  # given back on this thread
    assert allocations.live == 0


def test_what_penalties_hold() -> None:
    """Dense ones by their tensors, each memory once; sparse ones say it themselves."""
    counts = torch.zeros(2, 100)
    orchestrator = SimpleNamespace(
        penalizers={int: SimpleNamespace(counts=counts, rate=torch.zeros(2, 1), vocab_size=100)}
    )
    info = SimpleNamespace(
        penalizer_orchestrator=orchestrator,
        acc_additive_penalties=counts[:1],
        acc_scaling_penalties=None,
        logit_bias=torch.zeros(2, 100),
    )
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(sampling_info=info))
    assert penalty_bytes(scheduler) == 800 + 8 + 800
    assert penalty_bytes(SimpleNamespace(penalty_state=SimpleNamespace(nbytes=5))) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA allocator counts in another way")
@pytest.mark.parametrize("name", ["memory/plain", "memory/tree-penalties"])
def test_a_round(name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], batch_size=2)
    setup = replace(case.setup, vocab_size=900)
    with one_thread(), MemorySession(setup, tmp_path) as session:
        found = [session.run_round(case) for _ in range(2)]
    # At least the logits of a step; not the whole engine, whose KV pool alone is far larger.
    nodes = 6 if "tree" in name else 1
    assert 2 * nodes * 900 * 4 < found[0]["peak_step_bytes"] < 200_000
    assert found[0]["penalty_state_bytes"] > 0
    # Counted, and not measured.
    assert found[1] == found[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA allocator counts in another way")
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("lab.memory.penalty_bytes", "penalties hold nothing, or it is not known where"),
        ("lab.metrics.has_penalties", "requests with penalties had none"),
    ],
)
def test_penalties_that_are_not_there_or_not_found(
    lost: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, lambda scheduler: False)
    case = replace(CASES["memory/plain-penalties"], batch_size=2)
    setup = replace(case.setup, vocab_size=900)
    with (
        one_thread(),
        MemorySession(setup, tmp_path) as session,
        pytest.raises(WorkNotDone, match=message),
    ):
        session.run_round(case)


def test_steps_under_overlap_have_no_memory_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"setup\.overlap must be False"):
        MemorySession(Setup("tiny", watch="memory"), tmp_path)
