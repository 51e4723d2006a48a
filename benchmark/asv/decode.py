"""How fast does the engine decode, alone and with all penalties?"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Decode(history.Stepped):
    """Generation requests alone; the batch stays the same from the first token to the last."""

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "2"
    params = history.cases("decode")

    def setup_cache(self) -> history.Results:
        """Measure all cases."""
        return history.measure("decode")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S
