"""The copy of #28500: what the host waits for it, behind a forward that runs.

A pageable copy waits until the stream has come to it, a pinned one does not. That takes a device: on a
CPU there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

TOKENS = list(range(64))
FORWARD_S = 0.005


def pageable() -> torch.Tensor:
    """As it was before the fix."""
    return torch.tensor(TOKENS, dtype=torch.int64, device="cuda")


def pinned() -> torch.Tensor:
    """As it is since."""
    host = torch.tensor(TOKENS, dtype=torch.int64, pin_memory=True)
    return host.to("cuda", non_blocking=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to wait for")
@pytest.mark.parametrize("copy", [pageable, pinned], ids=lambda copy: copy.__name__)
def test_tokens_behind_a_forward(benchmark: Any, copy: Callable[[], torch.Tensor]) -> None:
    from lab.modelled_accelerator import cycles_per_second

    benchmark.group = f"host's time of the copy, behind a forward of {1e3 * FORWARD_S:.0f} ms"
    cycles = int(FORWARD_S * cycles_per_second())

    def forward() -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)

    found: list[torch.Tensor] = []
    benchmark.pedantic(lambda: found.append(copy()), setup=forward, rounds=30, warmup_rounds=3)
    assert all(tensor.tolist() == TOKENS for tensor in found)
