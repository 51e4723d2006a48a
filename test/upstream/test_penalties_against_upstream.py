"""Sparse penalties against the real penalizers of SGLang 0.5.14: the same where both mean the same.

And where they do not, what is right stands here in float64, with how far the release is off.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lab import upstream_penalties
from lab.audit_transfers import one_thread
from lab.upstream_penalties import UpstreamPenalties
from sglang.srt.sampling.penaltylib.sparse_penalties import (
    PenaltyPlanner,
    PenaltyPool,
    PenaltyRequest,
    PenaltyState,
)

pytestmark = pytest.mark.upstream
CPU = torch.device("cpu")
# Of float32, by magnitudes that go into a result. Upstream adds a frequency penalty up token by token:
# 40 additions of 6e-8 each are within it.
TOLERANCE = 1e-5
NUM_STEPS = 40
SLOTS = 6


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def library() -> upstream_penalties.Penaltylib:
    if not upstream_penalties.is_there():
        pytest.skip(f"needs SGLang {upstream_penalties.VERSION}: make upstream")
    return upstream_penalties.load(compiles=False)


class Ours:
    """Sparse penalties that are fed as the loop without overlap feeds them."""

    def __init__(self, vocab_size: int, backend: str = "torch", max_draft_tokens: int = 0) -> None:
        pool = PenaltyPool(SLOTS, vocab_size, max_draft_tokens)
        self.planner = PenaltyPlanner(pool, CPU)
        self.state = PenaltyState(pool, CPU, backend)

    def step(self, slots: list[int], tokens: list[int], logits: torch.Tensor) -> None:
        step = self.planner.plan(slots, fed_tokens=torch.tensor(tokens))
        self.state.begin(step)
        self.state.apply(step, logits)
        self.planner.settle(step)


def draw_request(draw: random.Random, slot: int, vocab_size: int) -> PenaltyRequest:
    return PenaltyRequest(
        rid=str(slot),
        slot=slot,
        frequency_penalty=draw.choice([0.0, draw.uniform(-2, 2)]),
        presence_penalty=draw.choice([0.0, draw.uniform(-2, 2)]),
        repetition_penalty=draw.choice([1.0, draw.uniform(0.3, 2)]),
        min_new_tokens=draw.choice([0, draw.randint(1, 30)]),
        stop_token_ids=set(draw.sample(range(vocab_size), draw.randint(1, 3))),
    )


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("vocab_size", [512, 32_000])
@pytest.mark.parametrize("seed", range(6))
def test_plain_decoding_is_upstreams(
    library: upstream_penalties.Penaltylib, seed: int, vocab_size: int, backend: str
) -> None:
    """Random requests, which come and go, one token a step."""
    draw = random.Random(seed)
    slots = draw.sample(range(SLOTS), draw.randint(1, 4))
    requests = {slot: draw_request(draw, slot, vocab_size) for slot in slots}
    outputs: dict[int, list[int]] = {slot: [] for slot in slots}
    ours = Ours(vocab_size, backend)
    for request in requests.values():
        ours.planner.admit(request)
    theirs = UpstreamPenalties(library, list(requests.values()), vocab_size, CPU)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_STEPS):
        if draw.random() < 0.15:
            row = draw.randrange(len(slots))
            ours.planner.release(slots.pop(row))
            slot = draw.choice([s for s in range(SLOTS) if s not in slots])
            requests[slot] = draw_request(draw, slot, vocab_size)
            outputs[slot] = []
            theirs.finish_and_join(row, requests[slot])
            ours.planner.admit(requests[slot])
            slots.append(slot)
        tokens = [draw.choice([draw.randrange(8), draw.randrange(vocab_size)]) for _ in slots]
        for slot, token in zip(slots, tokens):
            outputs[slot].append(token)
        given = 4 * torch.randn(len(slots), vocab_size, generator=generator)
        got, wanted = given.clone(), given.clone()
        ours.step(slots, tokens, got)
        theirs.cumulate(torch.tensor(tokens))
        theirs.apply(wanted)
        for row, slot in enumerate(slots):
            allowed = TOLERANCE * magnitude(given[row], outputs[slot], requests[slot])
            is_same = (got[row] == wanted[row]) | ((got[row] - wanted[row]).abs() <= allowed)
            assert is_same.all(), (requests[slot], outputs[slot])


def magnitude(row: torch.Tensor, output: list[int], request: PenaltyRequest) -> torch.Tensor:
    """What rounding may scale with, for each logit."""
    found = row.abs()
    for token, count in Counter(output).items():
        found[token] += abs(request.frequency_penalty) * count + abs(request.presence_penalty)
        found[token] *= max(request.repetition_penalty, 1 / request.repetition_penalty)
    return found


def params(**given: Any) -> PenaltyRequest:
    return PenaltyRequest("r", 0, **{"stop_token_ids": {3}, **given})


def test_a_frequency_penalty_does_not_drift(library: upstream_penalties.Penaltylib) -> None:
    """0.1, 2,000 times. Upstream adds it up in float32."""
    request = params(frequency_penalty=0.1)
    ours, theirs = Ours(64), UpstreamPenalties(library, [request], 64, CPU)
    ours.planner.admit(request)
    for _ in range(2000):
        got, upstream = torch.zeros(1, 64), torch.zeros(1, 64)
        ours.step([0], [7], got)
        theirs.cumulate(torch.tensor([7]))
        theirs.apply(upstream)
    right = -2000 * 0.1
    assert math.isclose(got[0, 7], right, rel_tol=1e-7)
    assert 1e-3 < abs(upstream[0, 7] - right) < 1e-2


def test_a_node_of_a_draft_counts_its_way(library: upstream_penalties.Penaltylib) -> None:
    """Upstream gives all nodes the root's row."""
    request = params(frequency_penalty=0.5, min_new_tokens=2)
    ours, theirs = Ours(64, max_draft_tokens=3), UpstreamPenalties(library, [request], 64, CPU)
    ours.planner.admit(request)
    ours.step([0], [7], torch.zeros(1, 64))
    theirs.cumulate(torch.tensor([7]))
    got, upstream = torch.zeros(3, 64), torch.zeros(3, 64)
    step = ours.planner.plan([0], max_tokens=3, num_draft_tokens=3)
    ours.state.begin(step)
    ours.state.stage(step, torch.tensor([[7, 7, 9]]))
    mask = ours.state.ancestors_from_parents(torch.tensor([[-1, 0, 1]]))
    ours.state.apply(step, got, mask)
    theirs.apply(upstream, repeat=3)
    assert got[:, [7, 9]].tolist() == [[-0.5, 0.0], [-1.0, 0.0], [-1.0, -0.5]]
    assert got[:, 3].tolist() == [-math.inf, 0.0, 0.0]  # two tokens are out at the first draft
    assert torch.equal(got[0], upstream[0])
    assert torch.equal(upstream, upstream[:1].repeat(3, 1))


def test_a_retracted_request_keeps_its_counts(library: upstream_penalties.Penaltylib) -> None:
    """Upstream builds the batch anew, and counts from nothing."""
    request = params(presence_penalty=1.0, min_new_tokens=3)
    ours, theirs = Ours(64), UpstreamPenalties(library, [request], 64, CPU)
    ours.planner.admit(request)
    for token in (7, 8):
        ours.step([0], [token], torch.zeros(1, 64))
        theirs.cumulate(torch.tensor([token]))
    ours.planner.release(0)
    ours.planner.admit(params(presence_penalty=1.0, min_new_tokens=3, output_ids=[7, 8]))
    theirs = UpstreamPenalties(library, [request], 64, CPU)
    got, upstream = torch.zeros(1, 64), torch.zeros(1, 64)
    ours.step([0], [9], got)
    theirs.cumulate(torch.tensor([9]))
    theirs.apply(upstream)
    assert got[0].nonzero().flatten().tolist() == [7, 8, 9]
    assert upstream[0].nonzero().flatten().tolist() == [
        3,
        9,
    ]  # and the third token may not be the last
