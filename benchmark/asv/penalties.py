"""What do penalties cost a step, plain and in verification, and a finish plus a join?"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Penalties(history.Common):
    """The commit's penalties without an engine: the sparse ones, or dense where there are none yet.

    A ratio is to dense passes of plain torch over logits of 32,000 tokens: three over 64 rows, on CUDA
    six over 1024 (see `lab.anchor`).
    """

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "3"
    params = history.cases("penalties")

    def setup_cache(self) -> history.Results:
        """Measure the quick set."""
        return history.measure("penalties")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    track_us_per_step = history.tracks("us_per_step", "us/step")
    track_us_per_step_ratio = history.tracks("us_per_step_ratio", "anchors/step")
    track_us_per_join = history.tracks("us_per_join", "us")
    track_us_per_join_ratio = history.tracks("us_per_join_ratio", "anchors")


class PenaltiesMore(Penalties):
    """The cases that the quick set leaves out."""

    params = history.cases("penalties", quick=False)

    # A method of its own, for asv tells caches apart by the line where it stands.
    def setup_cache(self) -> history.Results:
        """Measure the rest."""
        return history.measure("penalties", quick=False)

    setup_cache.timeout = history.MORE_TIMEOUT_S
