"""What does a decode step cost the host, by batch size, and a batch that changes?"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import history


class Scheduler(history.Common):
    """Generation requests whose forwards are made up at once, and batches without an engine.

    ``prepare_us`` is ``prepare_for_decode`` behind a ``filter_batch`` that finds nothing to do;
    ``merge_us`` and ``filter_us`` are a request that comes and goes.
    """

    # asv does not see a change in the lab: count up when a number gets another meaning.
    version = "2"
    params = history.cases("scheduler")

    def setup_cache(self) -> history.Results:
        """Measure the quick set."""
        return history.measure("scheduler")

    setup_cache.timeout = history.QUESTION_TIMEOUT_S

    track_host_us_per_step = history.tracks("host_us_per_step", "us")
    track_host_us_per_step_ratio = history.tracks("host_us_per_step_ratio", "anchors")
    track_prepare_us = history.tracks("prepare_us", "us")
    track_prepare_us_ratio = history.tracks("prepare_us_ratio", "anchors")
    track_merge_us = history.tracks("merge_us", "us")
    track_merge_us_ratio = history.tracks("merge_us_ratio", "anchors")
    track_filter_us = history.tracks("filter_us", "us")
    track_filter_us_ratio = history.tracks("filter_us_ratio", "anchors")
