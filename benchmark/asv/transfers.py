"""What crosses between host and device in a decode step, and what blocks? (#28500)"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Transfers(history.Common):
    """A tiny model on the fake device, or on CUDA where there is one, under a transfer ledger."""

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "1"
    params = history.cases("transfers")

    def setup_cache(self) -> history.Results:
        """Measure the quick set."""
        return history.measure("transfers")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    # What is meant to block, the wait for results a step old, is not counted.
    track_blocking_per_step = history.tracks("blocking_per_step", "transfers/step")
    track_transfers_per_step = history.tracks("transfers_per_step", "transfers/step")
    track_transfer_bytes_per_step = history.tracks("transfer_bytes_per_step", "bytes/step")


class TransfersMore(Transfers):
    """The cases that the quick set leaves out."""

    params = history.cases("transfers", quick=False)

    # A method of its own, for asv tells caches apart by the line where it stands.
    def setup_cache(self) -> history.Results:
        """Measure the rest."""
        return history.measure("transfers", quick=False)

    setup_cache.timeout = history.MORE_TIMEOUT_S
