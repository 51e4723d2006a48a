"""``lab.sync_debug``: when the debug mode is on, and what comes of something that waits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import sync_debug
from lab.sync_debug import EDGE, Finding, Switch, decode_under_error, main


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
