"""A step's penalties: sparse ones beside dense ones in one pass, in one process.

``make bench-penalties`` has the whole grid, and the penalizers of a real release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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

CELLS = (
    Cell("plain", 64, 32_000, 256),
    Cell("plain", 8, 128_256, 256),
    Cell("chain", 8, 32_000, 256),
)
SUBJECTS: dict[str, Callable[[Workload], Subject]] = {"dense": OnePass, "sparse": Sparse}
STEPS = 4

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_few_steps(benchmark: Any, cell: Cell, subject: str) -> None:
    benchmark.group = f"penalties of {STEPS} steps, {cell.name}"
    with torch.inference_mode():
        logits = Logits([cell], DEVICE)
        made = SUBJECTS[subject](Workload(cell, DEVICE))
        stepper = Stepper(made, logits.of(cell))

        def steps() -> None:
            stepper(STEPS)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()

        benchmark.pedantic(steps, rounds=15, warmup_rounds=2)
        check(subject, made, logits)


def test_a_finish_and_a_join(benchmark: Any) -> None:
    benchmark.group = "penalties of a finish and a join"
    with torch.inference_mode():
        made = Sparse(Workload(Cell("join", 64, 32_000, 256), DEVICE))
        joiner = Joiner(made, DEVICE)
        benchmark.pedantic(joiner, args=(2,), rounds=15, warmup_rounds=2)
        check_joined("sparse", made)
