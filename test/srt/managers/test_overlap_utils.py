"""Tokens that exist only in flight."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

CPU = torch.device("cpu")


def test_placeholders_become_what_the_last_forward_left() -> None:
    future_map = FutureMap(6, CPU)
    rows = torch.tensor([4, 0, 5])
    future_map.store_to_map(rows, SimpleNamespace(next_token_ids=torch.tensor([40, 10, 50])))
    # Row 5 has got another owner since.
    future_map.store_to_map(torch.tensor([5]), SimpleNamespace(next_token_ids=torch.tensor([55])))
    # A prompt's own tokens, among them token 0, stand beside placeholders.
    ids = torch.cat([torch.tensor([7, 0]), future_map.placeholders(rows)])
    batch = SimpleNamespace(input_ids=ids, forward_mode=ForwardMode.MIXED)
    future_map.resolve_future(batch)
    assert batch.input_ids.tolist() == [7, 0, 40, 10, 55]
    # The scheduler's tensor is not written to.
    assert ids.tolist() == [7, 0, -5, -1, -6]


def test_a_placeholder_is_never_a_token() -> None:
    assert (FutureMap(1, CPU).placeholders(torch.arange(100)) < 0).all()


def test_placeholders_follow_the_rows() -> None:
    future_map = FutureMap(6, CPU)
    first, second = torch.tensor([3, 1]), torch.tensor([3])
    ids = future_map.placeholders(first)
    assert ids.tolist() == [-4, -2]
    assert future_map.placeholders(first) is ids
    assert future_map.placeholders(second).tolist() == [-4]
    assert future_map.placeholders(first).tolist() == [-4, -2]


def test_a_decode_step_reads_its_rows() -> None:
    future_map = FutureMap(6, CPU)
    rows = torch.tensor([4, 0])
    future_map.store_to_map(rows, SimpleNamespace(next_token_ids=torch.tensor([40, 10])))
    batch = SimpleNamespace(
        input_ids=future_map.placeholders(rows),
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=rows,
    )
    future_map.resolve_future(batch)
    assert batch.input_ids.tolist() == [40, 10]


def test_a_draft_comes_back_row_by_row() -> None:
    future_map = FutureMap(5, CPU, SpeculativeAlgorithm.EAGLE, topk=2, hidden_size=3)
    rows = torch.tensor([3, 1])
    draft = EagleDraftInput(
        verified_id=torch.tensor([30, 10]),
        new_seq_lens=torch.tensor([7, 9]),
        topk_p=torch.tensor([[0.5, 0.25], [0.75, 0.125]]),
        topk_index=torch.tensor([[1, 2], [3, 4]]),
        hidden_states=torch.arange(6.0).view(2, 3),
    )
    future_map.store_to_map(rows, SimpleNamespace(next_draft_input=draft))
    got = future_map.resolve_spec(torch.tensor([1, 3]))
    for name in ("verified_id", "new_seq_lens", "topk_p", "topk_index", "hidden_states"):
        assert torch.equal(getattr(got, name), getattr(draft, name).flip(0))
    assert got.future_indices is None


def test_between_steps_a_batch_knows_the_rows_alone() -> None:
    rows = torch.tensor([2, 0])
    future_map = FutureMap(3, CPU, SpeculativeAlgorithm.EAGLE, topk=1, hidden_size=2)
    carried = future_map.draft_input(rows)
    assert torch.equal(carried.future_indices, rows)
    assert carried.verified_id is None
