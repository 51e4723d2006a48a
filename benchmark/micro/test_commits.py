"""The same work on both sides of each fix: a round of a case, by variant.

A round has its prefill in it. The case's own metrics are in what ``--benchmark-json`` saves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from lab.contest import Worker

CASES = (
    "scheduler/b8",
    "scheduler/b64",
    "decode/tiny-b8",
    "decode/tiny-b8-penalties",
    "decode/tiny-b8-chain-penalties",
    "decode/tiny-b8-tree-penalties",
    "mixed/tiny-b8",
    "penalties/plain-b64",
)
STALLS = {("mixed/tiny-b8", "before"): "#21840: the engine dies of it"}


@pytest.mark.parametrize("case", CASES)
def test_a_round(benchmark: Any, workers: Callable[[str], Worker], case: str, variant: str) -> None:
    if (case, variant) in STALLS:
        pytest.skip(STALLS[case, variant])
    worker = workers(variant)
    if worker.run(case, warm_up=True) is None:
        pytest.skip(f"{variant} has no API for it")
    found: list[dict[str, float]] = []
    benchmark.group = case
    benchmark.pedantic(lambda: found.append(worker.run(case)), rounds=5, warmup_rounds=1)
    benchmark.extra_info |= {
        name: statistics.median(round_[name] for round_ in found) for name in found[0]
    }
