"""Merge, filter, mix, prepare, retract; `test_field_rules` has the laws that every field keeps."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def draw_req(rng: random.Random, make: Callable[..., Req], number: int) -> Req:
    params: dict[str, Any] = {"max_new_tokens": 20, "temperature": rng.choice([0, 0.5, 1.0])}
    if rng.random() < 0.3:
        params["top_p"] = 0.5
    if rng.random() < 0.3:
        params["frequency_penalty"] = 1.0
    logprob = rng.random() < 0.4
    return make(
        rng.randint(1, 5),
        f"r{number}",
        params,
        sampling_seed=number,
        stream=rng.random() < 0.4,
        return_logprob=logprob,
        top_logprobs_num=rng.randint(0, 3) if logprob else 0,
        token_ids_logprob=rng.choice([None, [1, 2]]) if logprob else None,
        return_hidden_states=rng.random() < 0.3,
    )


def test_filter_leaves_out_who_prefills_elsewhere(pools: type, req: Callable[..., Req]) -> None:
    house = pools()
    a, b, c = (req(2, name) for name in "abc")
    batch = house.prefilled([a, b, c])
    c.finished_reason = object()
    batch.filter_batch(chunked_req_to_exclude=[a])
    assert batch.reqs == [b]
    batch.filter_batch(chunked_req_to_exclude=[b])
    assert batch.is_empty()
    assert batch.batch_size() == 0


def test_a_filter_that_keeps_all_changes_nothing(pools: type, req: Callable[..., Req]) -> None:
    batch = pools().prefilled([req(2), req(3)])
    before = copy.copy(batch)
    batch.filter_batch()
    for f in dataclasses.fields(batch):
        assert getattr(batch, f.name) is getattr(before, f.name), f.name


@pytest.mark.parametrize("has", [(True, False), (False, True)])
def test_a_side_without_logprobs_is_filled_up(
    has: tuple[bool, bool], pools: type, req: Callable[..., Req]
) -> None:
    house = pools()
    sides = []
    for logprob in has:
        extra = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [3]}
        sides.append(house.prefilled([req(2), req(2, **(extra if logprob else {}))]))
    left, right = sides
    left.merge_batch(right)
    assert left.return_logprob
    wanted = [r.return_logprob for r in left.reqs]
    assert left.top_logprobs_nums == [2 if w else 0 for w in wanted]
    assert left.token_ids_logprobs == [[3] if w else None for w in wanted]
    left.filter_batch(keep_indices=[i for i, w in enumerate(wanted) if not w])
    assert not left.return_logprob
    assert left.top_logprobs_nums is left.token_ids_logprobs is None


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """All tensors that a forward is given, those of its sampling parameters included."""
    found = {k: v for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    for owner in (batch.sampling_info, batch.spec_info):
        if owner is not None:
            found |= {k: v for k, v in vars(owner).items() if isinstance(v, torch.Tensor)}
    return found


@pytest.mark.parametrize("seed", range(6))
def test_what_a_forward_holds_is_never_written(
    seed: int, pools: type, req: Callable[..., Req]
) -> None:
    """Whatever the scheduler does next, a forward that runs meanwhile sees what it was given."""
    rng = random.Random(seed)
    house = pools(slots=1024, rows=80, page_size=rng.choice([1, 4]))
    numbers = iter(range(100))
    make = lambda: [draw_req(rng, req, next(numbers)) for _ in range(rng.randint(2, 4))]  # noqa: E731
    held: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any, Any]] = []

    def submit(batch: ScheduleBatch) -> None:
        forward = batch.get_forward_batch()
        tensors = tensors_of(forward)
        lists = {
            name: value
            for owner in (forward, forward.sampling_info)
            for name, value in vars(owner).items()
            if isinstance(value, list)
        }
        assert forward.sampling_info.penalizer_orchestrator is None
        held.append(
            (tensors, {k: v.clone() for k, v in tensors.items()}, lists, copy.deepcopy(lists))
        )
        house.sampled(batch)

    running = house.prefilled(make())
    submit(running)
    for _ in range(6):
        new = house.prefilled(make())
        submit(new)
        running.merge_batch(new)
        for _ in range(2):
            running.prepare_for_decode()
            submit(running)
        running.filter_batch(keep_indices=sorted(rng.sample(range(len(running.reqs)), 2)))
        mixed = house.batch(make())
        for r in mixed.reqs:
            r.init_next_round_input()
        mixed.prepare_for_extend()
        running.prepare_for_decode()
        mixed.mix_with_running(running)
        submit(mixed)
        running = mixed
    for tensors, tensors_then, lists, lists_then in held:
        for name, tensor in tensors.items():
            assert torch.equal(tensor, tensors_then[name]), name
        assert lists == lists_then


# --- Preparing a forward --------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefill_gathers_the_new_tokens(
    page_size: int, pools: type, req: Callable[..., Req]
) -> None:
    house = pools(page_size)
    a, b = req([5, 6, 7], "a"), req([9, 8, 7, 6, 5, 4], "b")
    first = house.batch([b])
    b.init_next_round_input()
    b.set_extend_input_len(4)
    first.prepare_for_extend()
    house.cache.cache_unfinished_req(b)

    batch = house.batch([a, b])
    a.init_next_round_input()
    b.init_next_round_input()
    batch.prepare_for_extend()
    assert batch.forward_mode is ForwardMode.EXTEND
    assert batch.input_ids.tolist() == [5, 6, 7, 5, 4]
    assert (batch.prefix_lens, batch.extend_lens) == ([0, 4], [3, 2])
    assert batch.extend_num_tokens == 5
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [3, 6]
    assert [(r.kv_committed_len, r.kv_allocated_len) for r in (a, b)] == [(3, 3), (6, 6)]

    forward = batch.get_forward_batch()
    assert forward.positions.tolist() == [0, 1, 2, 4, 5]
    table = house.rows.req_to_token
    assert forward.kv_indices.tolist() == table[[a.req_pool_idx, b.req_pool_idx], :6].tolist()
    slots = [table[r.req_pool_idx, p].item() for r, p in ((a, 0), (a, 1), (a, 2), (b, 4), (b, 5))]
    assert forward.out_cache_loc.tolist() == slots
    assert forward.seq_lens_cpu == [3, 6]
    assert forward.extend_prefix_lens_cpu == [0, 4]
    assert forward.extend_seq_lens_cpu == [3, 2]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_decode_takes_a_slot_for_each_last_token(
    page_size: int, pools: type, req: Callable[..., Req]
) -> None:
    house = pools(page_size)
    a, b = req(3, "a"), req(4, "b")
    batch = house.prefilled([a, b])
    for step in range(1, 7):
        tokens = batch.output_ids
        batch.prepare_for_decode()
        assert batch.forward_mode is ForwardMode.DECODE
        assert batch.input_ids is tokens
        assert batch.output_ids is None
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [3 + step, 4 + step]
        assert [r.kv_allocated_len for r in (a, b)] == [3 + step, 4 + step]
        forward = batch.get_forward_batch()
        assert forward.positions.tolist() == [2 + step, 3 + step]
        table = house.rows.req_to_token
        for i, r in enumerate((a, b)):
            row = table[r.req_pool_idx].tolist()
            length = r.kv_allocated_len
            assert forward.out_cache_loc[i].item() == row[length - 1]
            assert forward.kv_indices[i, :length].tolist() == row[:length]
            assert len(set(row[:length])) == length
        house.sampled(batch)


def test_input_logprobs_are_of_the_tokens_behind(pools: type, req: Callable[..., Req]) -> None:
    """The example of `LogitsProcessor`: chunks of 2, from position 1 on."""
    house = pools()
    r = req([10, 11, 12, 13, 14], return_logprob=True, logprob_start_len=1, top_logprobs_num=2)
    other = req([20, 21], "o")
    seen = []
    for length in (2, 2, 1):
        batch = house.batch([other, r] if not seen else [r])
        for x in batch.reqs:
            x.init_next_round_input()
        r.set_extend_input_len(length)
        batch.prepare_for_extend()
        house.cache.cache_unfinished_req(r)
        forward = batch.get_forward_batch()
        seen.append(
            (
                forward.extend_logprob_start_lens_cpu,
                forward.extend_input_logprob_token_ids.tolist(),
                forward.top_logprobs_nums,
            )
        )
    assert seen == [([2, 1], [12], [0, 2]), ([0], [13, 14], [2]), ([0], [0], [2])]


def test_a_draft_is_told_the_token_behind_a_chunk(pools: type, req: Callable[..., Req]) -> None:
    """Where it is known: in the prompt, or in the output of a request that starts over."""
    house = pools()
    whole, chunk, again = req([30, 31], "w"), req([20, 21, 22, 23], "c"), req([10, 11], "a")
    again.output_ids = [12, 13]
    for r, length in ((whole, 2), (chunk, 3), (again, 3)):
        r.init_next_round_input()
        r.set_extend_input_len(length)
    batch = house.batch([whole, chunk, again], spec_algorithm=SpeculativeAlgorithm.EAGLE)
    batch.prepare_for_extend()
    assert batch.get_forward_batch().spec_next_token_ids.tolist() == [-1, 23, 13]


@pytest.mark.parametrize(
    ("wanted", "extend", "mode"),
    [
        (False, True, CaptureHiddenMode.NULL),
        (True, True, CaptureHiddenMode.FULL),
        (True, False, CaptureHiddenMode.LAST),
    ],
)
def test_hidden_states_are_asked_for_when_someone_wants_them(
    wanted: bool, extend: bool, mode: CaptureHiddenMode, pools: type, req: Callable[..., Req]
) -> None:
    batch = pools().prefilled([req(2), req(2, return_hidden_states=wanted)])
    if not extend:
        batch.prepare_for_decode()
    assert batch.get_forward_batch().capture_hidden_mode == mode


def test_penalties_count_the_last_token_of_each_request(
    pools: type, req: Callable[..., Req]
) -> None:
    """Before any output is known the last prompt token is counted: upstream does so too."""
    house = pools()
    a = req([4, 5], "a", {"frequency_penalty": 1.5})
    b = req([4, 5], "b", {"frequency_penalty": 0.5})
    batch = house.prefilled([a, b])
    b.output_ids.clear()
    batch.prepare_for_decode()
    penalties = batch.get_forward_batch().sampling_info.acc_additive_penalties
    expected = torch.zeros(2, 40)
    expected[0, a.output_ids[-1]] = -1.5
    expected[1, 5] = -0.5
    assert torch.equal(penalties, expected)


# --- Mixing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", ["neither", "prefill", "decode", "both"])
def test_a_prefill_takes_running_requests_along(
    logprobs: str, pools: type, req: Callable[..., Req]
) -> None:
    house = pools(4)

    def extra(side: str) -> dict[str, Any]:
        wanted = logprobs in (side, "both")
        return (
            {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
            if wanted
            else {}
        )

    running = house.prefilled([req(6, "a", **extra("decode")), req(2, "b")])
    running.prepare_for_decode()
    new = house.batch([req([30, 31, 32], "c", **extra("prefill")), req([33, 34], "d")])
    for r in new.reqs:
        r.init_next_round_input()
    new.prepare_for_extend()
    tokens, slots = running.input_ids.tolist(), running.out_cache_loc.tolist()
    own = new.out_cache_loc.tolist()
    new.mix_with_running(running)

    assert new.forward_mode is ForwardMode.MIXED
    assert [r.rid for r in new.reqs] == ["c", "d", "a", "b"]
    assert new.input_ids.tolist() == [30, 31, 32, 33, 34, *tokens]
    assert new.out_cache_loc.tolist() == own + slots
    assert (new.prefix_lens, new.extend_lens) == ([0, 0, 6, 2], [3, 2, 1, 1])
    assert new.extend_num_tokens == 7
    assert new.seq_lens.tolist() == [3, 2, 7, 3]
    assert not new.is_prefill_only
    forward = new.get_forward_batch()
    assert forward.positions.tolist() == [0, 1, 2, 0, 1, 6, 2]
    assert forward.sampling_info.sampling_seed.shape == (4,)
    assert forward.return_logprob == (logprobs != "neither")
    if logprobs in ("prefill", "both"):
        assert forward.extend_logprob_start_lens_cpu == [0, 2, 1, 1]
        assert forward.extend_input_logprob_token_ids.tolist() == [31, 32, 0]
    elif logprobs == "decode":
        assert forward.extend_logprob_start_lens_cpu == [3, 2, 1, 1]
        assert forward.extend_input_logprob_token_ids.tolist() == []
    if logprobs != "neither":
        wanted = [logprobs in ("prefill", "both"), False, logprobs in ("decode", "both"), False]
        assert forward.top_logprobs_nums == [int(w) for w in wanted]


def test_scoring_that_takes_running_requests_along_is_not_prefill_only(
    pools: type, req: Callable[..., Req]
) -> None:
    house = pools()
    running = house.prefilled([req(3)])
    running.prepare_for_decode()
    scoring = req(4, "s", {"max_new_tokens": 0}, is_prefill_only=True)
    scoring.init_next_round_input()
    new = house.batch([scoring])
    new.prepare_for_extend()
    assert new.is_prefill_only
    new.mix_with_running(running)
    assert not new.is_prefill_only


# --- Running out of KV ----------------------------------------------------------------------------


def test_pages_that_the_next_decode_needs(pools: type, req: Callable[..., Req]) -> None:
    house = pools(4)
    batch = house.prefilled([req(3), req(4), req(5), req(8)])
    # Those with 4 and 8 tokens are at a page's end.
    assert batch.new_tokens_required_next_decode() == 8
    assert batch.new_tokens_required_next_decode([0, 2]) == 0
    assert batch.new_tokens_required_next_decode([0, 1]) == 4
    assert pools(1).prefilled([req(3), req(4)]).new_tokens_required_next_decode() == 2


def test_slots_that_the_next_speculative_step_needs(pools: type, req: Callable[..., Req]) -> None:
    def needed(page_size: int) -> int:
        batch = pools(page_size).prefilled(
            [req(3), req(4)], spec_algorithm=SpeculativeAlgorithm.EAGLE, spec_alloc_len=5
        )
        return batch.new_tokens_required_next_decode()

    assert needed(1) == 20
    # 3 and 4 tokens lie in one page each; 13 and 14 need four.
    assert needed(4) == 2 * 3 * 4


def grown(house: Any, reqs: list[Req], outputs: list[int]) -> ScheduleBatch:
    """A batch whose requests have that many output tokens."""
    batch = house.prefilled(reqs)
    for r, n in zip(reqs, outputs, strict=True):
        r.output_ids = [9] * n
    return batch


def test_those_with_the_least_output_are_retracted_first(
    pools: type, req: Callable[..., Req]
) -> None:
    house = pools(slots=16)
    a, b, c, d = (req(4, name) for name in "abcd")
    batch = grown(house, [a, b, c, d], [5, 1, 9, 2])
    assert not batch.check_decode_mem()
    assert batch.retract_decode() == [b]
    assert batch.reqs == [a, c, d]
    assert batch.seq_lens.tolist() == [4, 4, 4]
    assert batch.check_decode_mem()
    assert b.is_retracted
    assert b.req_pool_idx is None
    assert house.allocator.available_size() == 4


def test_of_equal_output_the_longer_prompt_goes(pools: type, req: Callable[..., Req]) -> None:
    house = pools(slots=12)
    a, b, c = req(3, "a"), req(5, "b"), req(4, "c")
    assert grown(house, [a, b, c], [2, 2, 2]).retract_decode() == [b]


def test_one_request_stays_even_if_it_does_not_fit(pools: type, req: Callable[..., Req]) -> None:
    house = pools(slots=8)
    a, b = req(4, "a"), req(4, "b")
    # Someone else holds what they would free.
    batch = grown(house, [a, b], [3, 1])
    batch.check_decode_mem = lambda selected=None: False
    assert batch.retract_decode() == [b]
    assert batch.reqs == [a]


def test_as_many_are_retracted_as_it_takes(pools: type, req: Callable[..., Req]) -> None:
    house = pools(page_size=4, slots=16)
    reqs = [req(4, name) for name in "abcd"]
    batch = grown(house, reqs, [4, 3, 2, 1])
    # Each needs a page: with two gone, two pages are free for the other two.
    assert batch.retract_decode() == [reqs[3], reqs[2]]
    batch.prepare_for_decode()
    assert house.allocator.available_size() == 0
