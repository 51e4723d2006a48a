"""The same work on both sides of each fix: a case's metric, by variant.

Each round of a case gives one number, which stands in the table as a time. Variants follow each other
here and do not take turns: whether one is slower is told by ``make bench-gate``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from lab.contest import Worker
from lab.metrics import TIME_UNITS
from lab.told_time import TOLD

METRICS = (
    ("scheduler/b8", "host_us_per_step"),
    ("scheduler/b64", "host_us_per_step"),
    ("scheduler/b64", "merge_us"),
    ("decode/tiny-b8", "us_per_token"),
    ("decode/tiny-b8-penalties", "us_per_token"),
    ("decode/tiny-b8-chain-penalties", "us_per_token"),
    ("decode/tiny-b8-tree-penalties", "us_per_token"),
    ("mixed/tiny-b8", "us_per_token"),
    ("penalties/plain-b64", "us_per_step"),
    ("penalties/plain-b64", "us_per_join"),
)
STALLS = {("mixed/tiny-b8", "before"): "#21840: the engine dies of it"}
ROUNDS = 5


@pytest.mark.parametrize(("case", "metric"), METRICS)
@pytest.mark.benchmark(timer=TOLD)
def test_a_round(
    benchmark: Any, workers: Callable[[str], Worker], case: str, metric: str, variant: str
) -> None:
    if (case, variant) in STALLS:
        pytest.skip(STALLS[case, variant])
    worker = workers(variant)
    if worker.run(case, warm_up=True) is None:
        pytest.skip(f"{variant} has no API for it")
    found: list[dict[str, float]] = []

    def round_() -> None:
        found.append(worker.run(case))
        TOLD.tell(found[-1][metric] * TIME_UNITS[metric])

    benchmark.group = f"{case}, {metric}"
    benchmark.pedantic(round_, rounds=ROUNDS, warmup_rounds=1)
    # Without the warm-up.
    benchmark.extra_info |= {
        name: statistics.median(metrics[name] for metrics in found[-ROUNDS:]) for name in found[0]
    }
