"""Benchmarks of pytest-benchmark: they run, and say which variants they compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]


def run(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "benchmark/micro", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run([*command, *options], cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_sides_of_each_fix_are_compared() -> None:
    listed = run("--collect-only", "-k", "scheduler/b8")
    found = [line.partition("[")[2] for line in listed.splitlines() if "test_a_round" in line]
    if len(found) < 4:
        pytest.skip("the history ends before the fixes")
    assert found == [
        "before-scheduler/b8]",
        "fix #21840-scheduler/b8]",
        "fix #28500-scheduler/b8]",
        "working tree-scheduler/b8]",
    ]


def test_a_benchmark_of_each_kind_runs() -> None:
    chosen = "(working and scheduler/b8) or (plain-b64 and sparse) or join or behind"
    assert "passed" in run("-k", chosen, "--benchmark-disable")
