"""Compiled loops on as many threads as torch has, for opponents that torch does not share out itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache


@lru_cache
def _threads(num: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num, "lab-share")


def in_shares(run: Callable[[int, int], None], num_rows: int, num_shares: int) -> None:
    """Call ``run(begin, end)`` for shares of rows, each on a thread; it has to let go of the GIL."""
    num_shares = max(1, min(num_shares, num_rows))
    bounds = [num_rows * i // num_shares for i in range(num_shares + 1)]
    others = [
        _threads(num_shares - 1).submit(run, *bounds[i : i + 2]) for i in range(1, num_shares)
    ]
    run(*bounds[:2])
    for other in others:
        other.result()
