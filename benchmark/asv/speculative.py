"""What does EAGLE speculation cost and yield, chain and tree, with and without penalties? (#28500)"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Speculative(history.Stepped):
    """Generation requests alone, drafted by an EAGLE head; a random head for the tiny model."""

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "3"
    params = history.cases("speculative")

    def setup_cache(self) -> history.Results:
        """Measure all cases."""
        return history.measure("speculative")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    # One by the accepted length.
    track_steps_per_token = history.tracks("steps_per_token", "steps/token")
