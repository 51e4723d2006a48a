"""Benchmarks of pytest-benchmark: they run, and say which variants they compare."""

from __future__ import annotations

import json
import os
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
        "before-scheduler/b8-host_us_per_step]",
        "fix #21840-scheduler/b8-host_us_per_step]",
        "fix #28500-scheduler/b8-host_us_per_step]",
        "working tree-scheduler/b8-host_us_per_step]",
    ]


def test_what_is_told_is_what_is_kept(tmp_path: Path) -> None:
    """Not the time that a round takes, with its set-up and its checks."""
    (tmp_path / "test_told.py").write_text(
        "import time\n"
        "import pytest\n"
        "from lab.told_time import TOLD\n"
        "numbers = iter([9.0, 0.25, 0.75, 0.5])\n"
        "def work():\n"
        "    time.sleep(0.01)\n"
        "    TOLD.tell(next(numbers))\n"
        "@pytest.mark.benchmark(timer=TOLD)\n"
        "def test_told(benchmark):\n"
        "    benchmark.pedantic(work, rounds=3, warmup_rounds=1)\n"
    )
    command = [sys.executable, "-m", "pytest", str(tmp_path), "-p", "no:cacheprovider", "-q"]
    kept = tmp_path / "kept.json"
    # Where tests are run by several processes, pytest-benchmark would measure nothing.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(REPO_ROOT / "benchmark")
    done = subprocess.run(
        [*command, f"--benchmark-json={kept}"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stdout
    (told,) = json.loads(kept.read_text())["benchmarks"]
    assert sorted(told["stats"]["data"]) == [0.25, 0.5, 0.75]
    assert told["stats"]["median"] == 0.5


def test_a_benchmark_of_each_kind_runs() -> None:
    chosen = "(working and scheduler/b8) or (plain-b64 and sparse) or finish or behind"
    assert "passed" in run("-k", chosen, "--benchmark-disable")
