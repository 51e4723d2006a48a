"""A clock for pytest-benchmark that goes by what it is told.

What the lab measures has its work checked, its set-up apart, and on a GPU the device's own clock. So its
benchmarks tell what was measured, and pytest-benchmark keeps and compares that.
"""

from __future__ import annotations

from typing import Final


class ToldTime:
    """Stands still but for `tell`."""

    __name__ = "told_time"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def tell(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now += seconds


TOLD: Final = ToldTime()
