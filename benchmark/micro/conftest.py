"""Before and after, inside one run (``make micro``): the lab's workloads, compared by pytest-benchmark.

Variants of one workload are a group, and stand below each other in its table. A commit of history is
measured in a process of its own, which is asked for one round at a time (`lab.contest`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

REPO_ROOT: Final = Path(__file__).resolve().parents[2]
sys.path += [str(REPO_ROOT / "benchmark"), str(REPO_ROOT / "scripts")]

from bench import landmarks  # noqa: E402
from bench_gate import side  # noqa: E402
from lab import contest  # noqa: E402
from lab.contest import Side, Worker  # noqa: E402


def variants() -> dict[str, str]:
    """By name: a commit, or the directory of the working tree's package."""
    found = {}
    for mark in landmarks(REPO_ROOT):
        *_, name = (name for name in mark.names if name != "HEAD" or len(mark.names) == 1)
        if name != "HEAD":
            found["before" if name == "last base commit" else name.split(":")[0]] = mark.sha
    return found | {"working tree": str(REPO_ROOT / "python")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a ``variant`` gets all of them."""
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", list(variants()))


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[str], Worker]]:
    """Gives the process of a variant, which lives until the run ends."""
    started: dict[str, Worker] = {}
    with contest.forking(threads=1) as context, ExitStack() as stack:

        def worker_of(variant: str) -> Worker:
            if variant not in started:
                package = side(REPO_ROOT, variants()[variant]).package
                worker = Worker(context, Side(variant, package), threads=1)
                started[variant] = stack.enter_context(worker)
            return started[variant]

        yield worker_of


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """Say in saved results which torch it was, on what."""
    import torch

    machine_info["torch"] = torch.__version__
    if torch.cuda.is_available():
        machine_info["gpu"] = torch.cuda.get_device_name()
