"""What becomes of generation requests under a stream of scoring requests? (#21840)"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Mixed(history.Timed):
    """Generation requests that arrive while a scoring request prefills, and more scoring requests."""

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "5"
    params = history.cases("mixed")

    def setup_cache(self) -> history.Results:
        """Measure the quick set."""
        return history.measure("mixed")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    def track_stalled(self, results: history.Results, case: str) -> float:
        """1 if generation requests never end, or are what an idle engine finds left behind."""
        return history.stalled(results, case)

    track_stalled.unit = "cases"

    def track_unfinished(self, results: history.Results, case: str) -> float:
        """How many generation requests did not get all their tokens."""
        return history.unfinished(results, case)

    track_unfinished.unit = "generations"

    track_ttft_p50_ms = history.tracks("ttft_p50_ms", "ms")
    track_ttft_p50_ms_ratio = history.tracks("ttft_p50_ms_ratio", "anchors")
    track_score_p50_ms = history.tracks("score_p50_ms", "ms")
    track_score_p50_ms_ratio = history.tracks("score_p50_ms_ratio", "anchors")


class MixedMore(Mixed):
    """The cases that the quick set leaves out."""

    params = history.cases("mixed", quick=False)

    # A method of its own, for asv tells caches apart by the line where it stands.
    def setup_cache(self) -> history.Results:
        """Measure the rest."""
        return history.measure("mixed", quick=False)

    setup_cache.timeout = history.MORE_TIMEOUT_S
