"""How much of the time is the accelerator busy? A model: see `lab.modelled_accelerator`. (#28500)"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Overlap(history.Common):
    """Decoding with all penalties on a modelled accelerator whose forwards take a fixed time."""

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "2"
    params = history.cases("overlap")

    def setup_cache(self) -> history.Results:
        """Measure the quick set."""
        return history.measure("overlap")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    # The inverse of the occupancy: at least 1, so that a ratio of two of them means something.
    track_model_forwards_per_step = history.tracks("forwards_per_step", "forwards, modelled")
    track_model_itl_p50_ms = history.tracks("itl_p50_ms", "ms, modelled")
    track_model_itl_p99_ms = history.tracks("itl_p99_ms", "ms, modelled")
    track_model_stalls_per_step = history.tracks("stalls_per_step", "stalls")
    track_host_us_per_step = history.tracks("host_us_per_step", "us")
    track_host_us_per_step_ratio = history.tracks("host_us_per_step_ratio", "anchors")


class OverlapMore(Overlap):
    """The cases that the quick set leaves out."""

    params = history.cases("overlap", quick=False)

    # A method of its own, for asv tells caches apart by the line where it stands.
    def setup_cache(self) -> history.Results:
        """Measure the rest."""
        return history.measure("overlap", quick=False)

    setup_cache.timeout = history.MORE_TIMEOUT_S
