"""How much memory does a decode step take at most, and how much do penalties hold?"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Memory(history.Common):
    """Generation requests on a tiny model with a vocabulary of 32,000, in the loop without overlap."""

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "1"
    params = history.cases("memory")

    def setup_cache(self) -> history.Results:
        """Measure the quick set."""
        return history.measure("memory")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    # Beyond what is there when the step starts.
    track_peak_step_bytes = history.tracks("peak_step_bytes", "bytes")
    track_penalty_state_bytes = history.tracks("penalty_state_bytes", "bytes")


class MemoryMore(Memory):
    """The cases that the quick set leaves out."""

    params = history.cases("memory", quick=False)

    # A method of its own, for asv tells caches apart by the line where it stands.
    def setup_cache(self) -> history.Results:
        """Measure the rest."""
        return history.measure("memory", quick=False)

    setup_cache.timeout = history.MORE_TIMEOUT_S
