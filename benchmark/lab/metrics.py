"""From the steps and results of one round of a workload to numbers.

A *round* is one call of a workload. Its metrics are plain floats under the names below. Several rounds
of a case, each between two runs of an anchor (see `lab.anchor`), get ratios to it from `with_ratios`.
`summarise` sums them up.

=====================  ==========================================================================
``us_per_token``       wall time of the decode steps, in microseconds, by the tokens they produced; of
                       mixed work, from the first token to the last, with what is scored meanwhile
``itl_p50_ms``         inter-token latency of decode steps, median over tokens; those that come of one
                       step share its time. Of mixed work, between arrivals; modelled, median over steps
``itl_p99_ms``         the same, 99th percentile: of a round of fewer than 100 steps it is the slowest
                       one's, or in a small batch between the two slowest
``tokens_per_s``       ``1e6 / us_per_token``
``accepted_length``    tokens a request got from one decode step, on average; 1 without speculation
``steps_per_token``    ``1 / accepted_length``: smaller is better
``forward_occupancy``  part of the decode phase in which a forward was under way, 0 to 1
``forward_idle``       ``1 - forward_occupancy``: smaller is better
``host_us_per_step``   host time to prepare a decode step and to handle its results, median; modelled,
                       mean without stalls
``forward_ms``         duration of a decode step's forward, median
``draft_ms`` ...       duration of each phase inside it, median, where the engine tells them; on CUDA
                       the time that the host takes to launch it, so they do not add up to the forward
``prepare_us``         `filter_batch` and ``prepare_for_decode`` alone (see `lab.hostwork.moves`)
``merge_us``           ``merge_batch`` with a batch of one request
``filter_us``          ``filter_batch`` that lets it go
``blocking_per_step``  transfers that block and are not meant to (see `lab.audit_transfers`)
``peak_step_bytes``    what a decode step takes beyond what is there when it starts (see `lab.memory`)
``us_per_step``        what penalties cost a step (see `lab.penalty_history`)
``us_per_join``        what a request that goes and another one that comes cost them
=====================  ==========================================================================
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

DECODE_MODES = frozenset({"DECODE", "MIXED"})

RATIO: Final = "_ratio"
"""Ends the name of a metric that is a time by the time of an anchor beside it."""

# Metrics in units of time. Each exists as a ratio to the anchor too, under its name and `RATIO`.
TIME_UNITS = {
    "us_per_token": 1e-6,
    "itl_p50_ms": 1e-3,
    "itl_p99_ms": 1e-3,
    "ttft_p50_ms": 1e-3,
    "score_p50_ms": 1e-3,
    "host_us_per_step": 1e-6,
    "forward_ms": 1e-3,
    "us_per_step": 1e-6,
    "us_per_join": 1e-6,
    "prepare_us": 1e-6,
    "merge_us": 1e-6,
    "filter_us": 1e-6,
}

HOST_TIMES: Final = frozenset({"host_us_per_step", "prepare_us", "merge_us", "filter_us"})
"""Those of the host alone, which go by its own anchor where there is one."""

DEVICE_ONLY: Final = frozenset({"stalls_per_step"})
"""Metrics that not every device has."""


class WorkNotDone(RuntimeError):
    """A round did not do the work it was measured for, so its times mean nothing."""


class SmallerBatch(WorkNotDone):
    """Not all requests decoded together."""


class StepRecord(Protocol):
    """What is read of the engine's step records."""

    step: int
    forward_mode: str
    batch_size: int
    num_tokens: int
    prepare_time: float
    process_time: float
    wait_time: float
    forward_start: float
    forward_end: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Step:
    """One scheduling step.

    Attributes
    ----------
    delivered : float
        When its results had been handed out, in seconds of ``time.perf_counter``.
    record : StepRecord
        What the engine says about it. Its forward has a clock of its own.
    """

    delivered: float
    record: StepRecord

    @property
    def decodes(self) -> bool:
        """Whether the step produced tokens behind a first one."""
        return self.record.forward_mode in DECODE_MODES and self.record.num_tokens > 0

    @property
    def tokens_per_request(self) -> float:
        """Mean number of tokens that a request got which got any.

        Under overlap a batch carries requests that have just ended, so this is at least 1.
        """
        return max(self.record.num_tokens / self.record.batch_size, 1.0)


@dataclass
class Round:
    """One call of a workload.

    Attributes
    ----------
    started, ended : float
        When it was called and when all results were there, in seconds of ``time.perf_counter``.
    steps : list of Step
        In order of delivery.
    results : list of dict
        What the engine returned for each request.
    """

    started: float
    ended: float = 0.0
    steps: list[Step] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)


def percentile(values: Sequence[float], q: float) -> float:
    """The `q`-th percentile, 0 to 100, interpolated linearly between the neighbours."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def decode_gaps(round_: Round) -> list[tuple[Step, float]]:
    """Each step that decodes, with the seconds since the step before it was handed out."""
    before = round_.started
    gaps = []
    for step in round_.steps:
        if step.decodes:
            gaps.append((step, step.delivered - before))
        before = step.delivered
    return gaps


def decode_metrics(round_: Round) -> dict[str, float]:
    """Metrics of the decode steps of a round.

    Prefill steps count neither as time nor as tokens.

    Raises
    ------
    WorkNotDone
        If no step decoded.
    """
    gaps = decode_gaps(round_)
    if not gaps:
        raise WorkNotDone("no step decoded")
    tokens = sum(step.record.num_tokens for step, _ in gaps)
    seconds = sum(gap for _, gap in gaps)
    # Each token counts with the latency of its step.
    latencies = [
        gap / step.tokens_per_request for step, gap in gaps for _ in range(step.record.num_tokens)
    ]
    records = [step.record for step, _ in gaps]
    metrics = {
        "us_per_token": 1e6 * seconds / tokens,
        "itl_p50_ms": 1e3 * percentile(latencies, 50),
        "itl_p99_ms": 1e3 * percentile(latencies, 99),
        "host_us_per_step": 1e6
        * statistics.median(r.prepare_time + r.process_time for r in records),
        "forward_ms": 1e3 * statistics.median(r.forward_end - r.forward_start for r in records),
        "accepted_length": accepted_length(round_.results),
        "forward_occupancy": forward_occupancy(round_.steps),
        **phase_metrics(records),
    }
    return add_derived(metrics)


def add_derived(metrics: dict[str, float]) -> dict[str, float]:
    """Add the metrics that follow from others."""
    metrics["tokens_per_s"] = 1e6 / metrics["us_per_token"]
    if "accepted_length" in metrics:
        metrics["steps_per_token"] = 1 / metrics["accepted_length"]
    if "forward_occupancy" in metrics:
        metrics["forward_idle"] = 1 - metrics["forward_occupancy"]
    return metrics


def accepted_length(results: Iterable[Mapping[str, Any]]) -> float:
    """Tokens a request got from one verification, bonus token included; 1 without speculation.

    Its first token is the prefill's. What was accepted behind a request's end is not counted.
    """
    verifications = tokens = 0
    for result in results:
        meta = result["meta_info"]
        if count := meta.get("spec_verify_ct", 0):
            verifications += count
            tokens += meta["completion_tokens"] - 1
    return tokens / verifications if verifications else 1.0


def forward_occupancy(steps: Sequence[Step]) -> float:
    """Part of the time from the first decode forward's start to the last one's end, in which one ran.

    All of it is on the clock of the forwards. What runs in between, a prefill too, counts as running.
    """
    decodes = [step.record for step in steps if step.decodes]
    if not decodes:
        raise WorkNotDone("no step decoded")
    start = min(r.forward_start for r in decodes)
    end = max(r.forward_end for r in decodes)
    busy = sum(
        max(min(s.record.forward_end, end) - max(s.record.forward_start, start), 0.0) for s in steps
    )
    return busy / (end - start) if end > start else 1.0


def phase_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Median milliseconds of each phase that the records name."""
    names = sorted({name for record in records for name in record.phases})
    return {
        f"{name}_ms": 1e3 * statistics.median(r.phases[name] for r in records if name in r.phases)
        for name in names
    }


def check_results(
    results: Sequence[Mapping[str, Any]], prompt_lens: Sequence[int], output_len: int
) -> None:
    """See that each request has the prompt, the tokens and the end that it should have.

    Raises
    ------
    WorkNotDone
        If not; says which.
    """
    if len(results) != len(prompt_lens):
        raise WorkNotDone(f"{len(results)} results for {len(prompt_lens)} requests")
    for i, (result, prompt_len) in enumerate(zip(results, prompt_lens, strict=True)):
        meta = result["meta_info"]
        reason = meta["finish_reason"]
        kind = None if reason is None else reason["type"]
        found = (kind, meta["prompt_tokens"], len(result["output_ids"]))
        if found != ("length", prompt_len, output_len):
            raise WorkNotDone(
                f"request {i} ended with {reason}, {found[1]} prompt and {found[2]} output tokens; "
                f"{prompt_len} and {output_len} were wanted"
            )


def check_speculation(results: Sequence[Mapping[str, Any]], accepts: bool) -> None:
    """See that drafts were verified for each request, and that some were accepted.

    Parameters
    ----------
    results : sequence of dict
    accepts : bool
        Whether the drafts are so good that some must have been accepted.

    Raises
    ------
    WorkNotDone
        If not.
    """
    for i, result in enumerate(results):
        if not result["meta_info"].get("spec_verify_ct", 0):
            raise WorkNotDone(f"request {i} was to be speculated for, and had no verification")
    if accepts and accepted_length(results) <= 1:
        raise WorkNotDone("no token of any draft was accepted")


def check_batches(round_: Round, batch_size: int, steps: int) -> None:
    """See that all requests decode together, as long as none can have ended, and none is retracted.

    Parameters
    ----------
    round_ : Round
    batch_size : int
        All requests.
    steps : int
        Decode steps that none of them can end in.

    Raises
    ------
    SmallerBatch
        If they do not.
    WorkNotDone
        If one is retracted.
    """
    for i, result in enumerate(round_.results):
        if count := result["meta_info"]["retraction_count"]:
            raise WorkNotDone(f"request {i} was retracted, {count} times")
    sizes = [step.record.batch_size for step in round_.steps if step.decodes][:steps]
    if sizes != [batch_size] * steps:
        raise SmallerBatch(
            f"the first {len(sizes)} decode steps had {min(sizes, default=0)} to "
            f"{max(sizes, default=0)} requests; {steps} of {batch_size} were wanted"
        )


def has_penalties(scheduler: Any) -> bool:
    """Whether requests that run have penalties, as the scheduler of any commit has it."""
    planner = getattr(scheduler, "penalty_planner", None)
    if planner is not None:
        return len(planner) > 0
    info = scheduler.running_batch.sampling_info
    return info is not None and info.penalizer_orchestrator.is_required


def check_steps(round_: Round) -> None:
    """See that the steps account for every token of the results, each forward once.

    Raises
    ------
    WorkNotDone
        If not.
    """
    produced = sum(step.record.num_tokens for step in round_.steps)
    wanted = sum(len(result["output_ids"]) for result in round_.results)
    if produced != wanted:
        raise WorkNotDone(f"the steps produced {produced} tokens, the results hold {wanted}")
    twice = [n for n, count in Counter(s.record.step for s in round_.steps).items() if count > 1]
    if twice:
        raise WorkNotDone(f"forward {twice[0]} was reported twice")
    for step in round_.steps:
        if step.record.forward_end < step.record.forward_start:
            raise WorkNotDone(f"forward {step.record.step} ended before it started")


def check_pools(scheduler: Any, timeout: float = 0.0) -> None:
    """See that all KV slots and rows are free, and no request has penalties.

    Parameters
    ----------
    scheduler : Scheduler
        Of an engine that has nothing to do.
    timeout : float
        Seconds that its last forward may still take.

    Raises
    ------
    WorkNotDone
        If not; says how many are.
    """
    limit = time.perf_counter() + timeout
    wanted = (scheduler.max_total_num_tokens, scheduler.req_to_token_pool.size)
    # Which dense penalties have not, and not every commit has others.
    planner = getattr(scheduler, "penalty_planner", None)
    while True:
        slots = scheduler.token_to_kv_pool_allocator.available_size()
        rows = scheduler.req_to_token_pool.available_size()
        penalized = len(planner) if planner is not None else 0
        if (slots, rows, penalized) == (*wanted, 0):
            return
        if time.perf_counter() > limit:
            raise WorkNotDone(
                f"{slots} KV slots and {rows} rows are free at rest, of {wanted[0]} and {wanted[1]}; "
                f"{penalized} requests have penalties"
            )
        time.sleep(0.001)


def check_scores(results: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]]) -> None:
    """See that each scoring request has a logprob for each token of its prompt but the first.

    Raises
    ------
    WorkNotDone
        If not; says which.
    """
    if len(results) != len(prompts):
        raise WorkNotDone(f"{len(results)} of {len(prompts)} scoring requests came back")
    for i, (result, prompt) in enumerate(zip(results, prompts, strict=True)):
        pairs = result["meta_info"]["input_token_logprobs"]
        ids = [pair[1] for pair in pairs]
        values = [pair[0] for pair in pairs[1:]]
        if ids != list(prompt) or result["output_ids"]:
            raise WorkNotDone(f"scoring request {i} did not score its prompt")
        if not all(isinstance(v, float) and -1e4 < v <= 1e-6 for v in values):
            raise WorkNotDone(f"scoring request {i} has logprobs that are none")


def with_ratios(
    rounds: Sequence[Mapping[str, float]], anchors: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """The rounds of one process, each with the ratios of its times to an anchor.

    Parameters
    ----------
    rounds : sequence of dict
        Metrics of each round.
    anchors : sequence of dict
        Seconds that the anchor of each kind took before, between and after the rounds: one more than
        rounds. A round's anchor is the mean of its two neighbours: that of the first kind, and for
        `HOST_TIMES` that of the kind ``host``, if there is one.

    Returns
    -------
    list of dict
        Ratios have no unit: the metric's time by the anchor's. ``anchor_ms`` is the latter, of the
        first kind, and ``host_anchor_ms`` that of the host, if it is another one.
    """
    if not rounds or len(anchors) != len(rounds) + 1:
        raise ValueError(f"{len(anchors)} anchors do not enclose {len(rounds)} rounds")
    found = []
    for metrics, before, after in zip(rounds, anchors, anchors[1:], strict=False):
        seconds = {kind: (before[kind] + after[kind]) / 2 for kind in before}
        kind, *_ = seconds
        host_kind = "host" if "host" in seconds else kind
        ratios = {
            f"{name}{RATIO}": value
            * TIME_UNITS[name]
            / seconds[host_kind if name in HOST_TIMES else kind]
            for name, value in metrics.items()
            if name in TIME_UNITS
        }
        told = {"anchor_ms": 1e3 * seconds[kind]}
        if host_kind != kind:
            told["host_anchor_ms"] = 1e3 * seconds[host_kind]
        found.append({**metrics, **ratios, **told})
    return found


def summarise(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each metric over the rounds; those that not every round has are left out."""
    if not rounds:
        raise ValueError("there are no rounds to sum up")
    names = [name for name in rounds[0] if all(name in metrics for metrics in rounds)]
    return {name: statistics.median(metrics[name] for metrics in rounds) for name in names}
