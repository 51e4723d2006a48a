"""``lab.sync_debug``: when the debug mode is on, and what comes of something that waits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import audit_transfers, metrics, sync_debug
from lab.devices import DEVICE_VARIABLE
from lab.metrics import check_pools
from lab.sync_debug import EDGE, Finding, Switch, decode_under_error, main


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a call says of the device is forgotten after the test."""
    monkeypatch.setenv(DEVICE_VARIABLE, "")


def step(mode: str = "DECODE", tokens: int = 4) -> Any:
    return SimpleNamespace(forward_mode=mode, num_tokens=tokens)


def test_the_mode_is_on_in_the_middle_alone() -> None:
    modes: list[str] = []
    switch = Switch(3, modes.append)
    for _ in range(9):
        switch(step())  # a warm-up
    assert modes == [] and switch.watched == 0
    switch.arm()
    switch(step("EXTEND"))
    for _ in range(EDGE - 1):
        switch(step())
    switch(step(tokens=0))
    assert modes == []
    switch(step())
    assert modes == ["error"] and switch.watched == 0
    for _ in range(3):
        switch(step())
    assert modes == ["error", "default"] and switch.watched == 3
    for _ in range(9):
        switch(step())
    assert modes == ["error", "default"] and switch.watched == 3


def test_decode_steps_are_watched() -> None:
    finding = Finding("chain", "sparse", "cpu")
    decode_under_error(finding, steps=3, batch_size=2)
    assert (finding.steps, finding.raised) == (3, None)


def test_what_raises_on_the_schedulers_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(sync_debug, "_nothing", set_mode)
    found = sync_debug.look("none", "sparse", 2, "cpu")
    assert found.raised is not None and "synchronizing" in found.raised
    assert not found.is_clean
    # Whatever happened, the mode is off again.
    assert modes == ["error", "default"]


def test_work_that_was_not_done_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time that results are looked at, those of the watched steps are wrong."""
    checked: list[int] = []

    def check_results(results: Any, prompt_lens: Any, output_len: int) -> None:
        checked.append(output_len)
        assert [len(result["output_ids"]) for result in results] == [output_len] * len(prompt_lens)
        if len(checked) == 2:
            raise metrics.WorkNotDone("request 0 ended with abort")

    monkeypatch.setattr(audit_transfers, "check_results", check_results)
    found = sync_debug.look("none", "sparse", 2, "cpu")
    assert found.raised == "WorkNotDone: request 0 ended with abort"
    assert not found.is_clean and found.steps == 2


def test_a_ledger_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def audit(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr(sync_debug, "decode_under_error", lambda *_: None)
    monkeypatch.setattr(sync_debug, "audit", audit)
    found = sync_debug.look("none", "sparse", 2, "cpu")
    assert found.raised == "under the ledger: ValueError: no such thing" and not found.is_clean


def test_pools_are_looked_at_behind_the_watched_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def leaks(scheduler: Any, timeout: float) -> None:
        check_pools(scheduler, timeout)
        looked.append(scheduler)
        if len(looked) == 2:  # behind the warm-up they are whole
            raise metrics.WorkNotDone("5 KV slots are free")

    monkeypatch.setattr(audit_transfers, "check_pools", leaks)
    with pytest.raises(metrics.WorkNotDone, match="5 KV slots"):
        decode_under_error(Finding("chain", "sparse", "cpu"), steps=2, batch_size=2)


def test_the_device_is_the_laboratorys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def look(speculative: str, backend: str, steps: int, device: str) -> Finding:
        seen.append(device)
        return Finding(speculative, backend, device, steps)

    monkeypatch.setattr(sync_debug, "look", look)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv(DEVICE_VARIABLE, "")
    assert main([]) == main(["--device", "cpu"]) == 0
    assert set(seen[: len(sync_debug.RUNS)]) == {"cuda"} and seen[-1] == "cpu"
    # What was asked for holds for all that looks for a device, here and in other processes.
    seen.clear()
    assert main([]) == 0 and set(seen) == {"cpu"}
    monkeypatch.setenv(DEVICE_VARIABLE, "tpu")
    with pytest.raises(SystemExit):
        main([])
    assert "LAB_DEVICE must be cpu or cuda" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "device 'cuda': torch sees no CUDA device" in capsys.readouterr().err


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(speculative: str, backend: str, steps: int, device: str) -> Finding:
        found = Finding(speculative, backend, device, steps)
        if backend == "dense":
            found.blocking, found.sites = 2, ["H2D to at schedule_batch.py:1"]
        return found

    monkeypatch.setattr(sync_debug, "look", look)
    out = tmp_path / "found.json"
    assert main(["--device", "cpu", "--steps", "5", "--json", str(out)]) == 1
    assert "blocks: H2D to at schedule_batch.py:1" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [(run["speculative"], run["penalty_backend"]) for run in found] == list(sync_debug.RUNS)
    assert {run["steps"] for run in found} == {5}

    # What there is when it is interrupted, or when the ledger cannot be had, is written too.
    def interrupted(speculative: str, *args: Any) -> Finding:
        if speculative == "tree":
            raise KeyboardInterrupt
        return look(speculative, *args)

    monkeypatch.setattr(sync_debug, "look", interrupted)
    assert main(["--device", "cpu", "--json", str(out)]) == 130
    assert [run["speculative"] for run in json.loads(out.read_text())] == ["none", "chain"]
    assert "interrupted, 2 of 4 are there" in capsys.readouterr().err

    # Less was looked at than asked for: that nothing was found means nothing.
    monkeypatch.setattr(sync_debug, "look", lambda *_: Finding("none", "sparse", "cpu", 1))
    assert main(["--device", "cpu", "--steps", "5"]) == 2
    with pytest.raises(SystemExit):
        main(["--steps", "0"])


@pytest.mark.gpu
@pytest.mark.parametrize(("speculative", "backend"), sync_debug.RUNS)
def test_nothing_waits_on_cuda(speculative: str, backend: str) -> None:
    finding = sync_debug.look(speculative, backend, 8, "cuda")
    assert finding.is_clean, finding
    assert finding.steps == 8
