"""Each penalty against plain Python, at its edges."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from sampling_reference import FakeReq, build, make_req, penalize

from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.repetition_penalty import MIN_SCALING, apply_scaling_penalties
from sglang.srt.sampling.sampling_batch_info import PENALIZERS, SamplingBatchInfo

VOCAB = 8
INF = math.inf


def run(req: FakeReq, tokens: list[int], logits: list[float]) -> list[float]:
    """Penalize `logits` after `tokens` were counted; the same in both ways there are."""
    info = build([req], len(logits))
    for token in tokens:
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
    req.counted = list(tokens)
    results = []
    for way in (info, info.copy_for_forward()):
        rows = torch.tensor([logits], dtype=torch.float32)
        way.apply_logits_bias(rows)
        results.append(rows[0].tolist())
    assert results[0] == results[1]
    return results[0]


def test_order_is_additive_then_scaling_then_bias() -> None:
    req = make_req(
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias={0: 3.0, 2: 1.0},
    )
    # 4 - 2 * 0.5 - 0.25 = 2.75, / 2 = 1.375, + 3;  0.5 - 0.75 = -0.25, * 2 = -0.5
    assert run(req, [0, 1, 0], [4.0, 0.5, 7.0]) == [4.375, -0.5, 8.0]


@pytest.mark.parametrize("frequency", [0.0, 0.5, -2.0])
@pytest.mark.parametrize("presence", [0.0, 1.5, -0.25])
@pytest.mark.parametrize("repetition", [1.0, 0.5, 2.0, 1e-3])
@pytest.mark.parametrize("minimum", [0, 2, 5])
def test_all_penalties_together(
    frequency: float, presence: float, repetition: float, minimum: int
) -> None:
    req = make_req(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=minimum,
        stop_token_ids=[1],
        eos=[6, 7],
        logit_bias={1: 2.0, 3: -4.0},
    )
    logits = [2.5, -1.0, 0.0, 3.0, -0.0, 8.0, -INF, 1.0]
    out = run(req, [0, 1, 1, 6], logits)
    assert out == pytest.approx(penalize(logits, req), rel=1e-6)


def test_minus_infinity_stays_and_nan_never_comes() -> None:
    scalings = torch.tensor([MIN_SCALING, 1e-20, 0.5, 1.0, 2.0])
    values = torch.tensor([-INF, -1e4, -1.0, -0.0, 0.0, 1e-30, 1.0, 1e4])
    logits = values.repeat(len(scalings), 1)
    apply_scaling_penalties(logits, scalings.unsqueeze(1))
    assert torch.isfinite(logits[:, 1:]).all()
    assert (logits[:, 0] == -INF).all()


def test_repetition_penalty_next_to_zero_is_a_limit() -> None:
    """0 in float32, but x / 0 and 0 / 0 are no logits: repeated tokens win if positive, in order."""
    req = make_req(repetition_penalty=1e-300, logit_bias={1: 1.0})
    out = run(req, [0, 1, 2, 3, 4, 4], [3.0, 2.0, 0.0, -2.0, -INF, 100.0])
    assert all(math.isfinite(x) for i, x in enumerate(out) if i != 4)
    assert out[0] > out[1] > 1e20
    assert out[2] == 0.0 and abs(out[3]) < 1e-20
    assert out[4] == -INF
    assert out[5] == 100.0
    probs = torch.tensor(out).softmax(dim=0)
    assert probs.isfinite().all() and probs[0] == 1.0


def test_stop_tokens_come_back_when_enough_is_counted() -> None:
    req = make_req(
        min_new_tokens=2,
        stop_token_ids=[1],
        eos=[3, 99],
        repetition_penalty=0.5,
        frequency_penalty=-1.0,
        logit_bias={1: 100.0, 3: 100.0},
    )
    logits = [1.0, 2.0, 3.0, 4.0]
    for counted in ([], [1], [1, 3], [1, 3, 1]):
        out = run(req, counted, logits)
        assert out == pytest.approx(penalize(logits, req))
        assert (out[1] == -INF) is (len(counted) < 2)


def test_minimum_without_stop_tokens_and_beyond_int32() -> None:
    assert run(make_req(min_new_tokens=2), [], [1.0, 2.0]) == [1.0, 2.0]
    req = make_req(max_new_tokens=None, min_new_tokens=10**12, stop_token_ids=[0])
    assert run(req, [1], [1.0, 2.0]) == [-INF, 2.0]


def test_frequency_penalty_drifts_no_more_than_upstreams() -> None:
    """One float32 addition for each token: a known defect of the base, 3.3e-3 after 2,000 tokens."""
    req = make_req(frequency_penalty=0.1)
    out = run(req, [0] * 2000, [0.0, 0.0])
    assert out[0] == pytest.approx(-200.0, abs=4e-3)


def test_penalizers_have_a_fixed_order() -> None:
    orchestrator = build([make_req()], VOCAB).penalizer_orchestrator
    assert tuple(orchestrator.penalizers) == PENALIZERS
    # Multiplicative ones act last, whatever order they are given in.
    batch = type("Batch", (), {"reqs": [], "device": torch.device("cpu")})()
    reverse = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, PENALIZERS[::-1])
    assert list(reverse.penalizers)[-1] is penaltylib.BatchedRepetitionPenalizer


def penalized() -> SamplingBatchInfo:
    return build(
        [make_req(frequency_penalty=1, presence_penalty=1, repetition_penalty=2, min_new_tokens=1)],
        VOCAB,
    )


def test_release_and_an_empty_filter_give_up_all_state() -> None:
    for empty in (
        lambda o: o.release(),
        lambda o: o.filter([], torch.empty(0, dtype=torch.int64)),
    ):
        orchestrator = penalized().penalizer_orchestrator
        empty(orchestrator)
        assert not orchestrator.is_required and len(orchestrator) == 0
        for penalizer in orchestrator.penalizers.values():
            assert not penalizer.is_prepared()
            assert not any(isinstance(v, torch.Tensor) for v in vars(penalizer).values())
        # Nothing is left to go wrong.
        orchestrator.cumulate_output_tokens(torch.tensor([], dtype=torch.int64))
        orchestrator.apply(torch.zeros(2, VOCAB))
        assert orchestrator.accumulate_scaling_penalties() is None
        orchestrator.merge(penalized().penalizer_orchestrator)
        assert orchestrator.is_required and len(orchestrator) == 1


def test_nothing_keeps_tensors_alive_in_a_circle() -> None:
    """[B, vocab] tensors go when the batch goes, not when the garbage collector comes."""
    gc.disable()
    try:
        info = penalized()
        orchestrator = weakref.ref(info.penalizer_orchestrator)
        del info
        assert orchestrator() is None
    finally:
        gc.enable()


def test_requests_are_not_looked_at_again() -> None:
    """Filtering and merging do not depend on when the batch updates its requests."""
    req, plain = make_req(presence_penalty=1.0), make_req()
    info = build([plain], VOCAB)
    info.merge_batch(build([req], VOCAB))
    plain.sampling_params = req.sampling_params = None
    info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([1, 2]))
    info.filter_batch([1], torch.tensor([1]))
    logits = torch.zeros(1, VOCAB)
    info.apply_logits_bias(logits)
    assert logits[0].tolist() == [0, 0, -1, 0, 0, 0, 0, 0]
