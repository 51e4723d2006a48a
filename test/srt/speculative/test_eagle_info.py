"""What a batch carries between speculative steps, and what the scheduler does before one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_tree import DraftTree

CPU = torch.device("cpu")


# --- EagleDraftInput --------------------------------------------------------------------------


def in_flight(rows: list[int]) -> EagleDraftInput:
    return EagleDraftInput(future_indices=torch.tensor(rows))


def at_hand(rows: list[int]) -> EagleDraftInput:
    ids = torch.tensor(rows)
    return EagleDraftInput(
        verified_id=ids,
        new_seq_lens=ids + 100,
        topk_p=ids[:, None] / torch.tensor([10.0, 20.0]),
        topk_index=ids[:, None] * 2 + torch.arange(2),
        hidden_states=ids[:, None] + torch.zeros(1, 3),
    )


def assert_same(left: EagleDraftInput, right: EagleDraftInput) -> None:
    for name, value in vars(left).items():
        other = getattr(right, name)
        assert (value is None) == (other is None), name
        assert value is None or torch.equal(value, other), name


@pytest.mark.parametrize("make", [in_flight, at_hand])
def test_filter_and_merge_are_those_of_lists(make: Any) -> None:
    left, right = make([3, 1, 4, 5]), make([2, 6])
    before = {name: value for name, value in vars(left).items() if value is not None}
    copies = {name: value.clone() for name, value in before.items()}
    left.filter_batch(torch.tensor([3, 0]))
    assert_same(left, make([5, 3]))
    left.merge_batch(right)
    assert_same(left, make([5, 3, 2, 6]))
    assert_same(right, make([2, 6]))
    for name, value in before.items():
        assert torch.equal(value, copies[name]), f"{name} was written in place"


def test_filter_to_nothing() -> None:
    draft_input = at_hand([1, 2])
    draft_input.filter_batch(torch.tensor([], dtype=torch.int64))
    assert draft_input.topk_p.shape == (0, 2)


@pytest.mark.parametrize("pair", [(in_flight, at_hand), (at_hand, in_flight)])
def test_merge_of_unlike_states_is_refused(pair: Any) -> None:
    left, right = pair[0]([1]), pair[1]([2])
    with pytest.raises(ValueError, match="only one of them has"):
        left.merge_batch(right)


# --- EagleVerifyInput -------------------------------------------------------------------------


def test_verify_input_keeps_the_tree() -> None:
    tree = DraftTree(
        tokens=torch.tensor([[7, 8, 9], [4, 5, 6]]),
        parents=torch.tensor([[-1, 0, 0], [-1, 0, 1]]),
        depth=torch.tensor([[0, 1, 1], [0, 1, 2]]),
        ancestor_mask=torch.eye(3, dtype=torch.bool).expand(2, -1, -1),
    )
    verify_input = EagleVerifyInput.from_tree(tree, spec_steps=2, topk=2)
    assert verify_input.draft_token.tolist() == [7, 8, 9, 4, 5, 6]
    assert verify_input.draft_token_num == 3
    assert (verify_input.spec_steps, verify_input.topk) == (2, 2)
    for mine, other in zip(verify_input.tree, tree, strict=True):
        assert torch.equal(mine, other)


def test_verify_input_does_not_outlive_its_forward() -> None:
    verify_input = EagleVerifyInput(*[torch.zeros(1)] * 4, draft_token_num=1, spec_steps=1, topk=1)
    with pytest.raises(NotImplementedError):
        verify_input.filter_batch(torch.tensor([0]))
    with pytest.raises(NotImplementedError):
        verify_input.merge_batch(verify_input)


# --- prepare_for_decode -----------------------------------------------------------------------


class Orchestrator:
    """Notes which tokens it is told to count."""

    def __init__(self, is_required: bool) -> None:
        self.is_required = is_required
        self.counted: list[torch.Tensor] = []

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        self.counted.append(output_ids)


def make_batch(
    lens: list[int], alloc_len: int, page_size: int = 1, penalties: bool = False, spare: int = 4096
) -> Any:
    """Requests that hold KV for their prompt in whole pages' slots, as after a prefill."""
    size = spare // page_size * page_size
    allocator = (
        TokenToKVPoolAllocator(size, CPU)
        if page_size == 1
        else PagedTokenToKVPoolAllocator(size, page_size, CPU)
    )
    pool = ReqToTokenPool(len(lens) + 1, 512, CPU)
    reqs = []
    for n in lens:
        row = pool.alloc(1)[0]
        pool.req_to_token[row, :n] = allocator.alloc_extend([0], [n], torch.zeros(1).long())
        reqs.append(
            SimpleNamespace(
                req_pool_idx=row,
                origin_input_ids=list(range(n)),
                output_ids=[],
                kv_allocated_len=n,
                kv_committed_len=n,
            )
        )
    return ScheduleBatch(
        reqs=reqs,
        device=CPU,
        spec_alloc_len=alloc_len,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        sampling_info=SimpleNamespace(penalizer_orchestrator=Orchestrator(penalties)),
    )


def assert_rows_are_whole(batch: Any) -> None:
    """Every allocated position has a slot of its own, in pages that follow positions."""
    page = batch.token_to_kv_pool_allocator.page_size
    seen: list[int] = []
    for req in batch.reqs:
        row = batch.req_to_token_pool.req_to_token[req.req_pool_idx]
        slots = row[: req.kv_allocated_len].tolist()
        assert all(s % page == p % page for p, s in enumerate(slots))
        seen += slots
    assert len(seen) == len(set(seen))
    free = batch.token_to_kv_pool_allocator.free_pages.tolist()
    assert not {s // page for s in seen} & set(free)
    held = sum(-(-req.kv_allocated_len // page) for req in batch.reqs)
    assert held + len(free) == batch.token_to_kv_pool_allocator.size // page


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    alloc_len=st.integers(2, 9),
    page_size=st.sampled_from([1, 4, 16]),
    overlap=st.booleans(),
)
def test_kv_is_reserved_ahead_of_every_step(
    seed: int, lens: list[int], alloc_len: int, page_size: int, overlap: bool
) -> None:
    """However many tokens are accepted, and though results come a step late, the KV suffices."""
    rng = random.Random(seed)
    batch = make_batch(lens, alloc_len, page_size)
    draft_input = in_flight(list(range(len(lens))))
    true_len = list(lens)
    late: list[int] = []
    for _ in range(7):
        draft_input.prepare_for_decode(batch)
        assert_rows_are_whole(batch)
        accepted = []
        for i, req in enumerate(batch.reqs):
            # The step writes `alloc_len` positions behind the committed ones at most.
            assert req.kv_allocated_len >= true_len[i] + alloc_len
            accepted.append(rng.randint(1, alloc_len))
            true_len[i] += accepted[-1]
        # The result adds what goes beyond the one token that was claimed.
        for due in [late] if overlap else [accepted]:
            for req, count in zip(batch.reqs, due, strict=False):
                req.kv_committed_len += count - 1
        late = accepted
        if not overlap:
            assert [req.kv_committed_len for req in batch.reqs] == true_len


def test_reservation_never_shrinks() -> None:
    batch = make_batch([5], alloc_len=3)
    batch.reqs[0].kv_allocated_len = 5
    draft_input = in_flight([0])
    draft_input.prepare_for_decode(batch)
    assert batch.reqs[0].kv_allocated_len == 11
    draft_input.prepare_for_decode(batch)
    assert batch.reqs[0].kv_allocated_len == 12
    batch.spec_alloc_len = 1
    free = batch.token_to_kv_pool_allocator.available_size()
    draft_input.prepare_for_decode(batch)
    assert batch.reqs[0].kv_allocated_len == 12
    assert batch.token_to_kv_pool_allocator.available_size() == free


def test_penalties_count_the_last_token_the_host_knows() -> None:
    batch = make_batch([3, 5, 2], alloc_len=2, penalties=True)
    batch.reqs[1].output_ids = [11, 12]
    in_flight([0, 1, 2]).prepare_for_decode(batch)
    counted = batch.sampling_info.penalizer_orchestrator.counted
    assert len(counted) == 1
    assert counted[0].dtype == torch.int64
    assert counted[0].tolist() == [2, 12, 1]


def test_nothing_is_counted_without_penalties() -> None:
    batch = make_batch([3], alloc_len=2)
    in_flight([0]).prepare_for_decode(batch)
    assert batch.sampling_info.penalizer_orchestrator.counted == []
