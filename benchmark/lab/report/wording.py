"""What questions and metrics are called, and numbers with their units."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from typing import Final

from lab.formats import significant
from lab.history import QUICK_CLASSES
from lab.metrics import RATIO
from lab.report.data import STALLED, Machine, Question

# In this order; questions and metrics that are not here come behind, under their own names.
QUESTION_ORDER: Final = (
    "decode",
    "mixed",
    "overlap",
    "transfers",
    "penalties",
    "scheduler",
    "memory",
)
LABELS: Final = {
    "us_per_token": "time per token",
    "itl_p50_ms": "inter-token latency, median",
    "itl_p99_ms": "inter-token latency, 99th percentile",
    "ttft_p50_ms": "time to first token, median",
    "score_p50_ms": "latency of scoring requests, median",
    "steps_per_token": "steps per token, one by the accepted length",
    "forward_idle": "part of the time without a forward, one less the occupancy",
    "host_us_per_step": "host's work per step",
    "model_forwards_per_step": "step time by forward time, modelled accelerator",
    "model_itl_p50_ms": "inter-token latency, median, modelled accelerator",
    "model_itl_p99_ms": "inter-token latency, 99th percentile, modelled accelerator",
    "model_stalls_per_step": "stalls per step, modelled accelerator",
    "blocking_per_step": "blocking transfers per step",
    "transfers_per_step": "transfers per step",
    "transfer_bytes_per_step": "bytes that cross per step",
    "us_per_step": "time per step",
    "us_per_join": "time per finish and join",
    "prepare_us": "preparing a step",
    "merge_us": "a request that comes",
    "filter_us": "a request that goes",
    "peak_step_bytes": "most memory of a step",
    "penalty_state_bytes": "memory that penalties hold",
    "unfinished": "generations without an end",
}
# What is plotted of a question, first of those that it has, without the suffix of ratios.
HEADLINES: Final = {
    "decode": ("us_per_token",),
    "mixed": ("us_per_token", "score_p50_ms"),
    "overlap": ("model_forwards_per_step",),
    "transfers": ("blocking_per_step", "transfer_bytes_per_step"),
    "penalties": ("us_per_step",),
    "scheduler": ("host_us_per_step",),
    "memory": ("peak_step_bytes", "penalty_state_bytes"),
}

# Parts of a whole: a multiple of one that is near nothing says nothing.
SHARES: Final = frozenset({"forward_idle"})

# Beyond them a number is told with an exponent: nobody counts the zeros.
_SMALL, _LARGE = 1e-9, 1e15


def base_name(metric: str) -> str:
    """The metric without the suffix of ratios."""
    return metric.removesuffix(RATIO)


def label(metric: str) -> str:
    """What people call a metric, whether as a ratio or absolute."""
    base = base_name(metric)
    return LABELS.get(base, base.replace("_", " "))


def compared(question: Question) -> list[str]:
    """The metrics to look at: ratios where there are some, in the order of `LABELS`."""
    names = list(LABELS)
    metrics = [
        metric
        for metric in question.units
        if metric != STALLED and metric + RATIO not in question.units
    ]
    headlines = HEADLINES.get(question.name, ())

    def place(metric: str) -> tuple[bool, int]:
        base = base_name(metric)
        return base not in headlines, names.index(base) if base in names else len(names)

    return sorted(metrics, key=place)


def absolute(question: Question, metric: str) -> str | None:
    """The absolute metric beside a ratio."""
    base = base_name(metric)
    return base if base != metric and base in question.units else None


def number(value: float) -> str:
    """A number for people: three digits, or four for one that is large."""
    if not math.isfinite(value):
        return "n/a"
    if _is_extreme(value):
        return f"{value:.3g}"
    if value == int(value):
        return f"{int(value):,}"
    return significant(value, 3 if abs(value) < 1000 else 4)


def _is_extreme(value: float) -> bool:
    return value != 0 and not _SMALL <= abs(value) < _LARGE


def factor(value: float) -> str:
    """A ratio, to the percent, and finer where it is small."""
    if value == 0:
        return "0"
    if _is_extreme(value):
        return f"{value:.2g}"
    return f"{value:.2f}" if value >= 0.095 else significant(value, 2)


def interval(low: float, high: float) -> str:
    """Bounds of a ratio, so that one beside 1 is told from 1.

    Examples
    --------
    >>> interval(0.9049, 0.9981)
    '[0.90, 0.998]'
    """
    return f"[{_bound(low)}, {_bound(high)}]"


def _bound(value: float) -> str:
    text = factor(value)
    return f"{value:.3f}" if text == "1.00" else text


def counted(count: int, noun: str) -> str:
    """A number of things.

    Examples
    --------
    >>> counted(1, "commit"), counted(2, "commit")
    ('1 commit', '2 commits')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(words: Iterable[str]) -> str:
    """Words as a sentence has them.

    Examples
    --------
    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *rest, last = words
    return f"{', '.join(rest)} and {last}" if rest else last


def commands(
    question: str, machines: Iterable[Machine], more: bool = False
) -> list[tuple[str, str]]:
    """The commands that measure a question again, one for each way to measure that machines need.

    Parameters
    ----------
    question : str
    machines : iterable of Machine
        The machines whose numbers are shown.
    more : bool
        Whether cases are shown that the quick set leaves out.

    Returns
    -------
    list of tuple of str
        Where it is to be run, and the command, ready to be pasted into a shell.
    """
    regex = rf"^{question}\."
    of_class = regex if more else regex + QUICK_CLASSES
    # A state of a machine cannot be brought back by a command, so each machine is there once.
    found = {}
    for machine in machines:
        if machine.is_gpu:
            name = shlex.quote(machine.name)
            command = f"python scripts/gpu_landmarks.py asv --machine {name} --bench "
            found[f"On the GPU machine {machine.name}"] = command + shlex.quote(of_class)
            continue
        # Within double quotes, a shell leaves a backslash before a dot alone.
        again = f'ARGS="--rerun --bench {shlex.quote(regex)}"'
        command = f"make {'bench-full' if more else 'bench'} {again}"
        if machine.is_off_gpu:
            found[f"On {machine.name}, and not on its GPU"] = f"LAB_DEVICE=cpu {command}"
        else:
            found["On a CPU"] = command
    return list(found.items())
