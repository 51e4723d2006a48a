"""What benchmarks along history (`benchmark/asv`) have in common.

One measurement feeds all metrics: a benchmark class measures its cases in ``setup_cache``, once a
commit, and its ``track_*`` methods read one of them each. asv takes smaller as better, so what is better
when it is larger is tracked as its inverse or its complement: tokens a second as microseconds a token,
accepted length as steps a token, occupancy as the idle part.

What varies is given to asv as samples, a round each, equally many from each of `lab.cases.PROCESSES`
processes, those of the first process first. asv keeps their median, and its statistics (``stats_*``),
and with ``--record-samples`` the samples themselves. What is the same in each round is a plain number,
and so is the median of a case that was measured in another number of processes.

A question whose cases take longer than a person waits has two classes. The first one has the quick set,
and the one called ``...More`` the rest.

A commit whose generation requests do not go on under scoring requests *stalls* (see `lab.worker`): the
case's numbers are NaN, which asv shows as "n/a", but for ``track_stalled``, which is 1, and how many are
unfinished. A case that a commit has no API for is skipped. Anything else that goes wrong is an error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from typing import Any

from lab.arguments import positive_int
from lab.cases import PROCESSES, QUESTIONS
from lab.metrics import DEVICE_ONLY
from lab.run import Event, run_cases

# For asv's regular expressions, behind the name of a question's file: the classes of quick sets.
QUICK_CLASSES = r"(?!\w*More\.)"

# Names a file that gets the events of the measurement, for whoever shows progress: asv keeps to itself
# what a benchmark prints.
EVENTS_VARIABLE = "LAB_EVENTS"
# Rounds a case and processes a case, for a look whether everything works.
ROUNDS_VARIABLE = "LAB_ROUNDS"
PROCESSES_VARIABLE = "LAB_PROCESSES"

# Seconds that the cases of one question may take, on a busy machine.
QUESTION_TIMEOUT_S = 1800
# The same of those that the quick set leaves out.
MORE_TIMEOUT_S = 7200

Results = dict[str, dict[str, Any]]
# What asv takes for a value that has samples.
Samples = dict[str, Any]


def cases(question: str, quick: bool = True) -> list[str]:
    """Names of the cases of a question: its quick set, or the rest."""
    return [case.name for case in QUESTIONS[question] if case.quick == quick]


def measure(question: str, quick: bool = True) -> Results:
    """Measure cases of a question on the installed commit, by name of the case."""
    prefix = f"{question}/"
    results = run_cases(
        [prefix + name for name in cases(question, quick)],
        rounds=_number(ROUNDS_VARIABLE),
        processes=_number(PROCESSES_VARIABLE),
        on_event=_tell,
    )
    return {name.removeprefix(prefix): result for name, result in results.items()}


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{variable} {error}") from error


def _tell(event: Event) -> None:
    path = os.environ.get(EVENTS_VARIABLE)
    if path:
        brief = {
            key: event.get(key) for key in ("event", "case", "done", "total", "what", "outcome")
        }
        with open(path, "a") as sink:
            sink.write(json.dumps(brief) + "\n")


def require(results: Results, case: str) -> None:
    """Skip a case that this commit has no API for.

    Raises
    ------
    NotImplementedError
        Which asv takes as a wish to skip.
    """
    if results[case]["outcome"] == "unsupported":
        raise NotImplementedError(results[case]["detail"])


def value(results: Results, case: str, metric: str) -> float | Samples:
    """A metric of a case, with samples if its rounds differ.

    It is NaN where the commit stalls, and of `lab.metrics.DEVICE_ONLY` where the device has none.

    Raises
    ------
    RuntimeError
        If the case failed, or has no such metric.
    """
    result = results[case]
    if result["outcome"] == "failed":
        raise RuntimeError(result["detail"])
    if result["outcome"] == "stalls":
        return math.nan
    if any(metric not in round_ for round_ in result["rounds"]):
        if metric not in DEVICE_ONLY:
            raise RuntimeError(f"not every round of {case} has a metric {metric}")
        return math.nan
    found = [round_[metric] for round_ in result["rounds"]]
    if len(set(found)) == 1:
        return float(found[0])
    # More digits than that are noise.
    samples = [float(f"{value:.5g}") for value in found]
    if result["processes"] != PROCESSES:
        # Readers divide samples among so many processes.
        return statistics.median(samples)
    return {"samples": samples, "number": 1}


def stalled(results: Results, case: str) -> float:
    """1 where the commit cannot do the work of the case, else 0."""
    if results[case]["outcome"] == "failed":
        raise RuntimeError(results[case]["detail"])
    return float(results[case]["outcome"] == "stalls")


def unfinished(results: Results, case: str) -> float:
    """Generation requests of the round that was run last that did not get all their tokens."""
    if results[case]["outcome"] == "failed":
        raise RuntimeError(results[case]["detail"])
    return float(results[case].get("unfinished", 0))


def tracks(metric: str, unit: str) -> Any:
    """A ``track_*`` method for asv that reads `metric`."""

    def track(self: Any, results: Results, case: str) -> float | Samples:
        return value(results, case, metric)

    track.unit = unit  # type: ignore[attr-defined]
    return track


class Common:
    """What every question has."""

    param_names = ["case"]
    timeout = 120

    def setup(self, results: Results, case: str) -> None:
        """Skip what this commit does not have."""
        require(results, case)


class Timed(Common):
    """Metrics of time.

    A time is tracked as it is, and as its ratio to the anchor beside it.
    """

    track_us_per_token = tracks("us_per_token", "us/token")
    track_us_per_token_ratio = tracks("us_per_token_ratio", "anchors/token")
    track_itl_p50_ms = tracks("itl_p50_ms", "ms")
    track_itl_p50_ms_ratio = tracks("itl_p50_ms_ratio", "anchors")
    track_itl_p99_ms = tracks("itl_p99_ms", "ms")
    track_itl_p99_ms_ratio = tracks("itl_p99_ms_ratio", "anchors")


class Stepped(Timed):
    """Metrics that follow from step records."""

    track_forward_idle = tracks("forward_idle", "of the decode phase")
    track_host_us_per_step = tracks("host_us_per_step", "us")
    track_host_us_per_step_ratio = tracks("host_us_per_step_ratio", "anchors")
