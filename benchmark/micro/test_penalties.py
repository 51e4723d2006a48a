"""A step's penalties: sparse ones beside dense ones, in one process.

Timed is what the lab has timed itself: on the CPU all of a step, on a GPU the device's part of it,
behind a kernel that holds the stream until all steps of a block are launched. ``make bench-penalties``
has the whole grid, and the penalizers of a real release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab import devices
from lab.penalty_costs import (
    Cell,
    Joiner,
    Logits,
    OnePass,
    Sparse,
    Stepper,
    Subject,
    Workload,
    check,
    check_joined,
)
from lab.penalty_history import DenseOfCommit, timely
from lab.told_time import TOLD

CELLS = (
    Cell("plain", 64, 32_000, 256),
    Cell("plain", 8, 128_256, 256),
    Cell("chain", 8, 32_000, 256),
)
JOIN = Cell("join", 64, 32_000, 256)
SUBJECTS: dict[str, Callable[[Workload], Subject]] = {"dense": OnePass, "sparse": Sparse}
# One pass over dense state knows no such thing; penalizers as upstream has them do.
JOINING: dict[str, Callable[[Workload], Subject]] = {"dense": DenseOfCommit, "sparse": Sparse}
STEPS = 4

DEVICE = devices.device()


def seconds(stepper: Stepper, steps: int) -> float:
    """Seconds of one of so many steps."""
    block = timely(stepper, steps)
    return (block.device if DEVICE.type == "cuda" else block.host + block.device) / block.steps


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.benchmark(timer=TOLD)
def test_a_step(benchmark: Any, cell: Cell, subject: str) -> None:
    benchmark.group = f"penalties of a step, {cell.name}"
    with torch.inference_mode():
        logits = Logits([cell], DEVICE)
        made = SUBJECTS[subject](Workload(cell, DEVICE))
        stepper = Stepper(made, logits.of(cell))
        benchmark.pedantic(lambda: TOLD.tell(seconds(stepper, STEPS)), rounds=15, warmup_rounds=2)
        check(subject, made, logits)


@pytest.mark.parametrize("subject", JOINING)
@pytest.mark.benchmark(timer=TOLD)
def test_a_finish_and_a_join(benchmark: Any, subject: str) -> None:
    benchmark.group = f"penalties of a finish and a join, b{JOIN.batch_size}-v{JOIN.vocab_size}"
    with torch.inference_mode():
        made = JOINING[subject](Workload(JOIN, DEVICE))
        joiner = Joiner(made, DEVICE)
        benchmark.pedantic(lambda: TOLD.tell(seconds(joiner, 2)), rounds=15, warmup_rounds=2)
        check_joined(subject, made)
