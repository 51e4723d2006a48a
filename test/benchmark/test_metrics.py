"""Right values, computed by hand, of everything that the laboratory reads off steps and results."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import step_records as records

from lab import metrics
from lab.formats import significant
from lab.metrics import Round, SmallerBatch, Step, WorkNotDone


def make_round(
    steps: list[tuple[float, Any]], results: list[dict[str, Any]], start: float
) -> Round:
    return Round(start, steps=[Step(t, r) for t, r in steps], results=copy.deepcopy(results))


@pytest.fixture
def plain() -> Round:
    return make_round(records.PLAIN, records.PLAIN_RESULTS, 0.2)


@pytest.fixture
def speculative() -> Round:
    return make_round(records.SPECULATIVE, records.SPECULATIVE_RESULTS, 1.0)


def test_percentile_is_numpys() -> None:
    draw = random.Random(0)
    for length in (1, 2, 3, 10, 101):
        values = [draw.gauss(0, 1) for _ in range(length)]
        for q in (0, 1, 50, 99, 100):
            assert metrics.percentile(values, q) == pytest.approx(np.percentile(values, q))


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        metrics.percentile([], 50)


def test_plain_decoding(plain: Round) -> None:
    found = metrics.decode_metrics(plain)
    # Two steps of 0.1 s and 0.2 s with two tokens each. Neither the prefill nor the dropped step counts.
    assert found["us_per_token"] == pytest.approx(0.3e6 / 4)
    assert found["tokens_per_s"] == pytest.approx(4 / 0.3)
    assert found["itl_p50_ms"] == pytest.approx(np.percentile([100, 100, 200, 200], 50))
    assert found["itl_p99_ms"] == pytest.approx(np.percentile([100, 100, 200, 200], 99))
    assert found["host_us_per_step"] == pytest.approx((200 + 400) / 2)
    assert found["forward_ms"] == pytest.approx((80 + 160) / 2)
    assert found["accepted_length"] == found["steps_per_token"] == 1.0
    # From 50.91 to 51.19 forwards ran for 0.08 s and 0.16 s.
    assert found["forward_occupancy"] == pytest.approx(0.24 / 0.28)
    assert found["forward_idle"] == pytest.approx(0.04 / 0.28)
    assert "draft_ms" not in found


def test_speculative_decoding(speculative: Round) -> None:
    found = metrics.decode_metrics(speculative)
    assert found["us_per_token"] == pytest.approx(0.7e6 / 5)
    # Three tokens in 0.3 s are 0.1 s each, two in 0.4 s are 0.2 s each.
    latencies = [100, 100, 100, 200, 200]
    assert found["itl_p50_ms"] == pytest.approx(np.percentile(latencies, 50))
    assert found["itl_p99_ms"] == pytest.approx(np.percentile(latencies, 99))
    assert found["accepted_length"] == pytest.approx(2.5)
    assert found["steps_per_token"] == pytest.approx(0.4)
    assert found["forward_occupancy"] == pytest.approx(1.0)
    assert found["draft_ms"] == pytest.approx(150)
    assert found["verify_ms"] == pytest.approx(150)
    assert found["extend_ms"] == pytest.approx(50)


def test_requests_that_have_ended_do_not_make_tokens_faster() -> None:
    """A batch of four of which one still decodes: its token took the whole step."""
    steps = [(1.0, records.record(1, "DECODE", 4, 1, forward_start=0.0, forward_end=1.0))]
    assert metrics.decode_metrics(make_round(steps, [], 0.5))["itl_p50_ms"] == pytest.approx(500)


def test_a_prefill_between_decode_steps_is_no_decode_time(plain: Round) -> None:
    late = records.record(5, "EXTEND", 1, 1, forward_start=51.3, forward_end=52.0)
    more = records.record(6, "DECODE", 3, 3, forward_start=52.0, forward_end=52.1)
    plain.steps += [Step(2.4, late), Step(2.5, more)]
    assert metrics.decode_metrics(plain)["us_per_token"] == pytest.approx(0.4e6 / 7)
    # But the forward was not idle meanwhile.
    assert metrics.forward_occupancy(plain.steps) == pytest.approx(
        (0.08 + 0.16 + 0.09 + 0.7 + 0.1) / (52.1 - 50.91)
    )


def test_mixed_steps_decode() -> None:
    steps = [(1.0, records.record(1, "MIXED", 3, 3, forward_start=0.0, forward_end=1.0))]
    assert metrics.decode_metrics(make_round(steps, [], 0.4))["us_per_token"] == pytest.approx(2e5)


def test_accepted_length_weighs_requests_by_their_verifications() -> None:
    results = [
        # The first token is the prefill's; the engine's own figure counts what was cut off, too.
        records.result(1, [0] * 5, spec_verify_ct=1, spec_accept_length=4.5),
        records.result(1, [0] * 7, spec_verify_ct=3, spec_accept_length=2.5),
        records.result(1, [0]),
    ]
    assert metrics.accepted_length(results) == pytest.approx((1 * 4 + 3 * 2) / 4)


def test_no_decode_step_is_no_work() -> None:
    prefill = records.PLAIN[:1]
    with pytest.raises(WorkNotDone, match="no step decoded"):
        metrics.decode_metrics(make_round(prefill, records.PLAIN_RESULTS, 0.0))
    with pytest.raises(WorkNotDone, match="no step decoded"):
        metrics.forward_occupancy([Step(t, r) for t, r in prefill])


# --- Was the work done? -----------------------------------------------------------------------


def test_results_that_are_all_there(plain: Round) -> None:
    metrics.check_results(plain.results, [4, 4], 3)
    metrics.check_steps(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[0]["output_ids"].pop(), "request 0 .* 2 output tokens"),
        (lambda r: r[1]["meta_info"].update(prompt_tokens=5), "request 1 .* 5 prompt"),
        (lambda r: r[1]["meta_info"].update(finish_reason={"type": "abort"}), "request 1 .*abort"),
        (lambda r: r[0]["meta_info"].update(finish_reason=None), "request 0 ended with None"),
        (lambda r: r.pop(), "1 results for 2"),
    ],
)
def test_results_that_fall_short(plain: Round, change: Any, message: str) -> None:
    change(plain.results)
    with pytest.raises(WorkNotDone, match=message):
        metrics.check_results(plain.results, [4, 4], 3)


def test_steps_that_do_not_account_for_the_results(plain: Round) -> None:
    lost = Round(0.0, steps=plain.steps[:2], results=plain.results)
    with pytest.raises(WorkNotDone, match="produced 4 tokens, the results hold 6"):
        metrics.check_steps(lost)


def test_a_forward_that_is_reported_twice(plain: Round) -> None:
    plain.steps.append(plain.steps[-1])
    with pytest.raises(WorkNotDone, match="forward 4 was reported twice"):
        metrics.check_steps(plain)


def test_a_forward_that_ends_before_it_starts() -> None:
    steps = [(1.0, records.record(1, "DECODE", 1, 1, forward_start=2.0, forward_end=1.0))]
    with pytest.raises(WorkNotDone, match="ended before"):
        metrics.check_steps(make_round(steps, [records.result(1, [5])], 0.0))


def test_requests_that_decode_together(plain: Round, speculative: Round) -> None:
    metrics.check_batches(plain, 2, 2)
    metrics.check_batches(speculative, 1, 2)
    metrics.check_batches(plain, 2, 0)  # of a single token each


@pytest.mark.parametrize(
    ("batch_size", "steps", "message"),
    [
        (3, 2, "the first 2 decode steps had 2 to 2 requests; 2 of 3 were wanted"),
        (2, 3, "the first 2 decode steps had 2 to 2 requests; 3 of 2 were wanted"),
    ],
)
def test_requests_that_do_not_decode_together(
    plain: Round, batch_size: int, steps: int, message: str
) -> None:
    with pytest.raises(SmallerBatch, match=message):
        metrics.check_batches(plain, batch_size, steps)


def test_requests_that_were_retracted(plain: Round) -> None:
    plain.results[1]["meta_info"]["retraction_count"] = 2
    with pytest.raises(WorkNotDone, match="request 1 was retracted, 2 times") as caught:
        metrics.check_batches(plain, 2, 2)
    assert not isinstance(caught.value, SmallerBatch)  # once more would be in vain


def test_speculation_that_took_place(speculative: Round, plain: Round) -> None:
    metrics.check_speculation(speculative.results, accepts=True)
    with pytest.raises(WorkNotDone, match="request 0 was to be speculated for"):
        metrics.check_speculation(plain.results, accepts=False)
    in_vain = [records.result(4, [1, 2, 3], spec_verify_ct=2, spec_accept_length=1.0)]
    metrics.check_speculation(in_vain, accepts=False)  # a random head's drafts
    with pytest.raises(WorkNotDone, match="no token of any draft was accepted"):
        metrics.check_speculation(in_vain, accepts=True)


def scored(prompt: list[int]) -> dict[str, Any]:
    pairs = [(None, prompt[0], None)] + [(-2.5, token, None) for token in prompt[1:]]
    return records.result(len(prompt), []) | {
        "meta_info": {"input_token_logprobs": pairs, "finish_reason": {"type": "length"}}
    }


def test_scores_that_are_all_there() -> None:
    prompts = [[5, 6, 7], [8, 9]]
    metrics.check_scores([scored(p) for p in prompts], prompts)


@pytest.mark.parametrize("bad", [0.5, -math.inf, math.nan, None])
def test_scores_that_are_no_logprobs(bad: float | None) -> None:
    result = scored([5, 6, 7])
    result["meta_info"]["input_token_logprobs"][1] = (bad, 6, None)
    with pytest.raises(WorkNotDone, match="scoring request 0"):
        metrics.check_scores([result], [[5, 6, 7]])


def test_scores_that_are_missing() -> None:
    with pytest.raises(WorkNotDone, match="1 of 2"):
        metrics.check_scores([scored([5, 6])], [[5, 6], [7, 8]])
    with pytest.raises(WorkNotDone, match="did not score its prompt"):
        metrics.check_scores([scored([5, 6])], [[5, 6, 7]])


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (10000.0, 4, "10,000"),
        (123456.7, 3, "123,457"),
        (1.23456, 4, "1.235"),
        (0.000123456, 2, "0.00012"),
        (-0.5, 3, "-0.500"),
        (0.0, 4, "0.000"),
        (math.nan, 4, "nan"),
    ],
)
def test_significant_digits(value: float, digits: int, text: str) -> None:
    assert significant(value, digits) == text


# --- Summing up -------------------------------------------------------------------------------


def test_summary_is_the_median_and_the_median_of_ratios() -> None:
    rounds = [
        {"us_per_token": 100.0, "accepted_length": 1.5},
        {"us_per_token": 300.0, "accepted_length": 1.7},
        {"us_per_token": 200.0, "accepted_length": 1.6, "draft_ms": 1.0},
    ]
    # The machine was three times as slow in the second round, and so was the anchor.
    anchors = [{"host": seconds} for seconds in (0.01, 0.01, 0.05, 0.015)]
    found = metrics.summarise(metrics.with_ratios(rounds, anchors))
    assert found["us_per_token"] == 200.0
    assert found["accepted_length"] == 1.6
    assert found["us_per_token_ratio"] == pytest.approx(100e-6 / 0.01)
    assert found["anchor_ms"] == pytest.approx(30)
    assert "accepted_length_ratio" not in found
    assert "draft_ms" not in found


def test_every_time_has_a_ratio(plain: Round) -> None:
    (found,) = metrics.with_ratios([metrics.decode_metrics(plain)], [{"model": 0.1}] * 2)
    for name, unit in metrics.TIME_UNITS.items():
        if name in found:
            assert found[f"{name}_ratio"] == pytest.approx(found[name] * unit / 0.1)
    assert {"us_per_token", "itl_p50_ms", "itl_p99_ms"} <= found.keys()


def test_the_hosts_times_go_by_its_own_anchor() -> None:
    anchors = [{"model": 0.1, "host": 0.02}, {"model": 0.3, "host": 0.04}]
    (found,) = metrics.with_ratios([{"itl_p50_ms": 50.0, "host_us_per_step": 600.0}], anchors)
    assert found["itl_p50_ms_ratio"] == pytest.approx(0.05 / 0.2)
    assert found["host_us_per_step_ratio"] == pytest.approx(600e-6 / 0.03)
    assert (found["anchor_ms"], found["host_anchor_ms"]) == (pytest.approx(200), pytest.approx(30))
    # Where there is none of its own, it goes by the other.
    (found,) = metrics.with_ratios([{"host_us_per_step": 600.0}], [{"dense": 0.2}] * 2)
    assert found["host_us_per_step_ratio"] == pytest.approx(600e-6 / 0.2)
    assert "host_anchor_ms" not in found


def test_anchors_have_to_enclose_the_rounds() -> None:
    with pytest.raises(ValueError, match="1 anchors do not enclose 1 rounds"):
        metrics.with_ratios([{"us_per_token": 1.0}], [{"host": 0.1}])
    with pytest.raises(ValueError, match="enclose 0 rounds"):
        metrics.with_ratios([], [{"host": 0.1}])
    with pytest.raises(ValueError, match="no rounds"):
        metrics.summarise([])
