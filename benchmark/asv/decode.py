"""How fast does the engine decode: plain, with all penalties, and speculating?"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Decode(history.Stepped):
    """Generation requests alone; the batch stays the same from the first token to the last.

    Real are SmolLM2-135M and its EAGLE head; the tiny model and its head are random.
    """

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "4"
    params = history.cases("decode")

    def setup_cache(self) -> history.Results:
        """Measure the quick set."""
        return history.measure("decode")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    # One by the accepted length.
    track_steps_per_token = history.tracks("steps_per_token", "steps/token")


class DecodeMore(Decode):
    """The cases that the quick set leaves out."""

    params = history.cases("decode", quick=False)

    # A method of its own, for asv tells caches apart by the line where it stands.
    def setup_cache(self) -> history.Results:
        """Measure the rest."""
        return history.measure("decode", quick=False)

    setup_cache.timeout = history.MORE_TIMEOUT_S
