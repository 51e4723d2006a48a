"""Merging is building of joined requests, filtering is building of those that stay, in every field."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import FakeReq, build, make_req, penalize

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.utils.common import Platform, register_platform

VOCAB = 12


def optional(values: st.SearchStrategy, default: object) -> st.SearchStrategy:
    """The default twice as often, so that batches without a need are frequent."""
    return st.one_of(st.just(default), st.just(default), values)


tokens = st.integers(0, VOCAB - 1)
requests = st.builds(
    make_req,
    seed=st.integers(-(2**63), 2**63 - 1),
    eos=st.lists(st.integers(0, VOCAB + 3), max_size=2),
    temperature=optional(st.floats(0, 3), 1.0),
    top_p=optional(st.floats(0.1, 1.0), 1.0),
    top_k=optional(st.integers(1, 20), -1),
    min_p=optional(st.floats(0, 1), 0.0),
    frequency_penalty=optional(st.floats(-2, 2, width=32), 0.0),
    presence_penalty=optional(st.floats(-2, 2, width=32), 0.0),
    repetition_penalty=optional(st.floats(0.125, 2, width=32), 1.0),
    min_new_tokens=optional(st.integers(0, 4), 0),
    stop_token_ids=optional(st.lists(tokens, max_size=2), None),
    logit_bias=optional(st.dictionaries(tokens, st.floats(-5, 5, width=32), max_size=2), None),
)
batches = st.lists(requests, min_size=1, max_size=4)


def copy_of(reqs: list[FakeReq]) -> list[FakeReq]:
    return [FakeReq(r.sampling_params, r.sampling_seed, r.eos_token_ids) for r in reqs]


def filter_info(info: SamplingBatchInfo, keep: list[int]) -> None:
    info.filter_batch(keep, torch.tensor(keep, dtype=torch.int64))


def cumulate(info: SamplingBatchInfo, reqs: list[FakeReq], ids: list[int]) -> None:
    """As ScheduleBatch does, one token for each request, only where somebody needs it."""
    if info.penalizer_orchestrator.is_required:
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(ids))
    for req, token in zip(reqs, ids, strict=True):
        req.counted.append(token)


def assert_same(actual: object, expected: object, name: str = "") -> None:
    if expected is None or isinstance(expected, bool | int | str | float | torch.device):
        assert actual == expected, name
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, name
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=name)
    elif isinstance(expected, list):
        assert actual == expected, name
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), name
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}.{key}")
    else:  # an orchestrator or a penalizer
        assert type(actual) is type(expected), name
        assert_same(vars(actual), vars(expected), name)


def assert_same_info(actual: SamplingBatchInfo, expected: SamplingBatchInfo) -> None:
    for f in fields(SamplingBatchInfo):
        assert_same(getattr(actual, f.name), getattr(expected, f.name), f.name)


def assert_penalizes(info: SamplingBatchInfo, reqs: list[FakeReq], seed: int = 0) -> None:
    """In every way in which penalties reach logits, they are what the reference says."""
    logits = torch.randn(len(reqs), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    expected = torch.tensor(
        [penalize(row, req) for row, req in zip(logits.double().tolist(), reqs, strict=True)],
        dtype=torch.float64,
    )
    forward = info.copy_for_forward()
    assert forward.penalizer_orchestrator is None
    for way in (info, forward):
        for repeat in (None, 1, 3):
            n = repeat or 1
            out = logits.repeat_interleave(n, dim=0)
            way.apply_logits_bias(out, repeat)
            torch.testing.assert_close(
                out.double(), expected.repeat_interleave(n, dim=0), rtol=2e-6, atol=1e-5
            )


@settings(max_examples=60, deadline=None)
@given(a=batches, b=batches, c=batches)
def test_merging_is_building_of_joined_requests(
    a: list[FakeReq], b: list[FakeReq], c: list[FakeReq]
) -> None:
    merged, other = build(a, VOCAB), build(b, VOCAB)
    before = build(b, VOCAB)
    merged.merge_batch(other)
    assert_same_info(merged, build(a + b, VOCAB))
    assert_same_info(other, before)
    merged.merge_batch(build(c, VOCAB))
    assert_same_info(merged, build(a + b + c, VOCAB))
    assert len(merged) == len(a) + len(b) + len(c)


@settings(max_examples=60, deadline=None)
@given(reqs=st.lists(requests, min_size=1, max_size=6), data=st.data())
def test_filtering_is_building_of_those_that_stay(reqs: list[FakeReq], data: st.DataObject) -> None:
    info = build(reqs, VOCAB)
    # Any order, and none at all.
    keep = data.draw(st.lists(st.integers(0, len(reqs) - 1), unique=True))
    filter_info(info, keep)
    assert_same_info(info, build([reqs[i] for i in keep], VOCAB))


@settings(max_examples=40, deadline=None)
@given(first=batches, data=st.data())
def test_any_history_penalizes_as_each_request_alone(
    first: list[FakeReq], data: st.DataObject
) -> None:
    """Counting, merging and filtering in any order; what forwards hold is never written."""
    reqs = copy_of(first)
    info = build(reqs, VOCAB)
    in_flight = []
    for _ in range(data.draw(st.integers(1, 8), label="steps")):
        step = data.draw(st.sampled_from(["count", "count", "merge", "filter"]))
        if step == "count":
            cumulate(
                info, reqs, data.draw(st.lists(tokens, min_size=len(reqs), max_size=len(reqs)))
            )
        elif step == "merge":
            new = copy_of(data.draw(batches))
            other = build(new, VOCAB)
            if data.draw(st.booleans()):  # also one that has generated
                cumulate(other, new, [data.draw(tokens)] * len(new))
            info.merge_batch(other)
            reqs = reqs + new
        elif len(reqs) > 1:
            keep = data.draw(
                st.lists(st.integers(0, len(reqs) - 1), min_size=1, unique=True).map(sorted)
            )
            filter_info(info, keep)
            reqs = [reqs[i] for i in keep]
        forward = info.copy_for_forward()
        in_flight.append((forward, snapshot(forward)))
        assert_penalizes(info, reqs)
    needs_penalty = [r for r in reqs if any(r.sampling_params.__dict__[k] for k in ADDITIVE)]
    needs_penalty += [r for r in reqs if r.sampling_params.repetition_penalty != 1]
    assert info.penalizer_orchestrator.is_required == bool(needs_penalty)
    for forward, before in in_flight:
        assert_same(snapshot(forward), before)


ADDITIVE = ("frequency_penalty", "presence_penalty", "min_new_tokens")


def snapshot(info: SamplingBatchInfo) -> dict[str, object]:
    values = {f.name: getattr(info, f.name) for f in fields(SamplingBatchInfo)}
    return {
        k: v.clone() if isinstance(v, torch.Tensor) else list(v) if isinstance(v, list) else v
        for k, v in values.items()
    }


def test_fields_of_a_batch() -> None:
    info = build(
        [
            make_req(seed=-1),
            make_req(seed=2**63 - 1, temperature=0, top_p=0.5, min_p=0.1),
            make_req(temperature=0.5, top_p=0.5, top_k=7, min_p=0.25),
        ],
        VOCAB,
    )
    assert info.temperatures.tolist() == [[1.0], [1.0], [0.5]]
    assert info.top_ps.tolist() == [1.0, 0.5, 0.5]
    assert info.top_ks.tolist() == [TOP_K_ALL, 1, 7]
    assert info.min_ps.tolist() == pytest.approx([0.0, 0.1, 0.25])
    assert info.sampling_seed.tolist() == [-1, 2**63 - 1, 0]
    assert info.sampling_seed.dtype == torch.int64
    assert (info.is_all_greedy, info.has_greedy, info.need_filter) == (False, True, True)
    assert info.filtered_rows.tolist() == [2]
    assert info.logit_bias is None
    assert len(info) == 3


def test_greedy_rows_need_no_filter_and_no_temperature() -> None:
    info = build([make_req(temperature=0.7, top_k=1, top_p=0.5, min_p=0.5)], VOCAB)
    assert info.is_all_greedy and info.has_greedy
    assert not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling)
    assert info.filtered_rows is None
    assert info.temperatures.item() == 1.0


@settings(max_examples=30, deadline=None)
@given(reqs=batches, n=st.integers(1, 4))
def test_repeat_is_building_of_repeated_requests(reqs: list[FakeReq], n: int) -> None:
    repeated = build(reqs, VOCAB).repeat(n)
    expected = build([r for r in reqs for _ in range(n)], VOCAB)
    assert repeated.penalizer_orchestrator is None and repeated.logit_bias is None
    expected.penalizer_orchestrator = expected.logit_bias = None
    assert_same_info(repeated, expected)


def test_update_penalties_is_not_applied_twice() -> None:
    req = make_req(frequency_penalty=1.0)
    info = build([req], VOCAB)
    cumulate(info, [req], [3])
    info.update_penalties()
    logits = torch.zeros(1, VOCAB)
    info.apply_logits_bias(logits)
    assert logits[0, 3] == -1.0
    # Counting goes on, and what was accumulated does not survive a change of the batch.
    filter_info(info, [0])
    assert info.acc_additive_penalties is None
    cumulate(info, [req], [3])
    logits.zero_()
    info.apply_logits_bias(logits)
    assert logits[0, 3] == -2.0


def test_only_what_is_needed_is_allocated() -> None:
    plain, scaled = build([make_req()], VOCAB), build([make_req(repetition_penalty=1.5)], VOCAB)
    assert not plain.penalizer_orchestrator.is_required
    assert plain.copy_for_forward().acc_additive_penalties is None
    assert plain.copy_for_forward().acc_scaling_penalties is None
    assert scaled.copy_for_forward().acc_additive_penalties is None
    assert scaled.copy_for_forward().acc_scaling_penalties is not None
    prepared = [p.is_prepared() for p in scaled.penalizer_orchestrator.penalizers.values()]
    assert prepared == [False, False, False, True]
    scaled.merge_batch(plain)
    filter_info(scaled, [1])
    assert not scaled.penalizer_orchestrator.is_required
    assert not any(p.is_prepared() for p in scaled.penalizer_orchestrator.penalizers.values())


def test_logits_must_be_float32() -> None:
    with pytest.raises(TypeError, match="float32"):
        build([make_req()], VOCAB).apply_logits_bias(torch.zeros(1, VOCAB, dtype=torch.bfloat16))


def test_the_device_is_asked_for_nothing() -> None:
    """On a device without values, whoever asks for one gets an error instead of a wait."""
    meta = torch.device("meta")
    previous = register_platform(Platform("meta", meta))
    try:
        everything = {
            "frequency_penalty": 1,
            "presence_penalty": 1,
            "repetition_penalty": 2,
            "min_new_tokens": 1,
            "logit_bias": {1: 2.0},
            "top_p": 0.5,
        }
        info = build([make_req(eos=[2], **everything), make_req()], VOCAB, meta)
        info.merge_batch(build([make_req(top_k=5), make_req(**everything)], VOCAB, meta))
        ids = torch.empty(4, dtype=torch.int64, device=meta)
        info.penalizer_orchestrator.cumulate_output_tokens(ids)
        for way in (info, info.copy_for_forward()):
            way.apply_logits_bias(torch.empty(4, VOCAB, device=meta))
            way.apply_logits_bias(torch.empty(12, VOCAB, device=meta), 3)
        info.repeat(3)
        info.filter_batch([0, 2], torch.empty(2, dtype=torch.int64, device=meta))
        assert len(info) == 2 and info.logit_bias.shape == (2, VOCAB)
        for f in fields(SamplingBatchInfo):
            value = getattr(info, f.name)
            assert not isinstance(value, torch.Tensor) or value.device == meta
    finally:
        if previous is not None:
            register_platform(previous)
