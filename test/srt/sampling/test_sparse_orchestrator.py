"""The way of the host's tokens to sparse penalties: rows stay with their requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.sampling.penaltylib import SparsePenalizerOrchestrator
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def make(
    *slots: int, penalized: tuple[int, ...] = (1, 2), overlap: bool = False, spec: str | None = None
) -> SparsePenalizerOrchestrator:
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(req_pool_idx=slot) for slot in slots],
        penalty_planner=dict.fromkeys(penalized),
        enable_overlap=overlap,
        spec_algorithm=SpeculativeAlgorithm.from_string(spec),
    )
    return SparsePenalizerOrchestrator(batch)


def test_tokens_are_required_where_the_host_knows_them_and_a_request_counts() -> None:
    assert make(0, 1).is_required
    assert not make(0, 3).is_required
    assert not make(0, 1, penalized=()).is_required
    assert not make().is_required
    # The sampler's or verifier's own output counts there.
    assert not make(0, 1, overlap=True).is_required
    assert not make(0, 1, spec="EAGLE").is_required
    assert not make(0, 1, overlap=True, spec="EAGLE").is_required


def test_who_leaves_takes_the_need_along() -> None:
    orchestrator = make(0, 1, 2)
    orchestrator.filter([0, 2], torch.tensor([0, 2]))
    assert orchestrator.is_required and len(orchestrator) == 2
    orchestrator.filter([0], torch.tensor([0]))
    assert not orchestrator.is_required
    orchestrator.merge(make(2))
    assert orchestrator.is_required and len(orchestrator) == 2


def test_tokens_are_given_out_once() -> None:
    orchestrator = make(0, 1)
    assert orchestrator.take_output_ids() is None
    orchestrator.cumulate_output_tokens(torch.tensor([5, 6]))
    assert orchestrator.take_output_ids().tolist() == [5, 6]
    assert orchestrator.take_output_ids() is None


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        (None, [5, 6], [0, 0, 5, 6]),
        ([3, 4], None, [3, 4, 0, 0]),
        ([3, 4], [5, 6], [3, 4, 5, 6]),
        (None, None, None),
    ],
)
def test_a_prefill_has_no_tokens(ours: object, theirs: object, wanted: object) -> None:
    one, two = make(0, 1), make(2, 3)
    for orchestrator, tokens in ((one, ours), (two, theirs)):
        if tokens is not None:
            orchestrator.cumulate_output_tokens(torch.tensor(tokens))
    one.merge(two)
    got = one.take_output_ids()
    assert wanted == (None if got is None else got.tolist())


def test_tokens_stay_with_the_requests_that_stay() -> None:
    orchestrator = make(0, 1, 2)
    orchestrator.cumulate_output_tokens(torch.tensor([4, 5, 6]))
    orchestrator.filter([0, 2], torch.tensor([0, 2]))
    assert orchestrator.take_output_ids().tolist() == [4, 6]


def test_logits_are_left_to_the_state() -> None:
    logits = torch.ones(2, 4)
    make(0, 1).apply(logits)
    assert torch.equal(logits, torch.ones(2, 4))
