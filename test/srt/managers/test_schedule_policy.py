"""Which waiting requests start: budgets, chunks, pages, and the request that is alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder

CONTINUE, NO_TOKEN, OTHER = AddReqResult.CONTINUE, AddReqResult.NO_TOKEN, AddReqResult.OTHER


@pytest.fixture
def adder() -> Callable[..., PrefillAdder]:
    """Make an adder over a pool with `free` slots, beside running requests."""

    def make(free: int = 1000, running: list[Req] | None = None, **options: Any) -> PrefillAdder:
        page_size = options.pop("page_size", 1)
        reqs = running or []
        arguments = {"new_token_ratio": 0.0, "rem_input_tokens": 10**6, "rem_chunk_tokens": None}
        return PrefillAdder(
            SimpleNamespace(page_size=page_size, available_size=lambda: free),
            SimpleNamespace(reqs=reqs, is_empty=lambda: not reqs),
            **(arguments | options),
        )

    return make


def runs(adder: PrefillAdder) -> list[tuple[str, int]]:
    """What was added: names, and tokens of this forward."""
    return [(r.rid, r.extend_input_len) for r in adder.can_run_list]


Adder = Callable[..., PrefillAdder]
MakeReq = Callable[..., Req]


def test_requests_are_added_while_there_is_kv(adder: Adder, req: MakeReq) -> None:
    a = adder(free=10)
    assert a.add_one_req(req(6, "a")) is CONTINUE
    assert a.add_one_req(req(5, "b")) is NO_TOKEN
    assert a.add_one_req(req(4, "c")) is CONTINUE
    assert runs(a) == [("a", 6), ("c", 4)]


def test_output_to_come_is_counted_in_part(adder: Adder, req: MakeReq) -> None:
    def results(ratio: float) -> list[AddReqResult]:
        a = adder(free=30, new_token_ratio=ratio)
        return [a.add_one_req(req(4, params={"max_new_tokens": 10})) for _ in range(4)]

    assert results(1.0) == [CONTINUE, CONTINUE, NO_TOKEN, NO_TOKEN]  # 14 each
    assert results(0.5) == [CONTINUE, CONTINUE, CONTINUE, NO_TOKEN]  # 9 each
    assert results(0.0) == [CONTINUE] * 4


def test_running_requests_keep_what_they_will_need(adder: Adder, req: MakeReq) -> None:
    running = req(4, params={"max_new_tokens": 20})
    running.output_ids = [1] * 10
    assert (
        adder(free=20, running=[running], new_token_ratio=1.0).add_one_req(
            req(8, params={"max_new_tokens": 2})
        )
        is CONTINUE
    )
    assert (
        adder(free=20, running=[running], new_token_ratio=1.0).add_one_req(
            req(8, params={"max_new_tokens": 3})
        )
        is NO_TOKEN
    )


def test_more_output_than_anyone_writes_is_not_waited_for(adder: Adder, req: MakeReq) -> None:
    running = req(4, params={"max_new_tokens": 10**6})
    wanted = req(8, params={"max_new_tokens": 0})
    free = CLIP_MAX_NEW_TOKENS + 8
    assert adder(free=free, running=[running], new_token_ratio=1.0).add_one_req(wanted) is CONTINUE
    assert (
        adder(free=free - 1, running=[running], new_token_ratio=1.0).add_one_req(wanted) is NO_TOKEN
    )


def test_speculation_reserves_two_steps_for_everyone(adder: Adder, req: MakeReq) -> None:
    running = req(4, params={"max_new_tokens": 5})
    arguments = {"running": [running], "spec_alloc_len": 4}
    assert adder(free=26, **arguments).add_one_req(req(10)) is CONTINUE  # 10 + 8 + 8
    assert adder(free=25, **arguments).add_one_req(req(10)) is NO_TOKEN


def test_alone_a_request_may_have_the_whole_pool(adder: Adder, req: MakeReq) -> None:
    a = adder(free=20, new_token_ratio=1.0)
    assert a.add_one_req(req(20, "a", params={"max_new_tokens": 100})) is CONTINUE
    assert a.add_one_req(req(1, "b", params={"max_new_tokens": 0})) is NO_TOKEN
    assert runs(a) == [("a", 20)]


def test_beside_others_it_may_not(adder: Adder, req: MakeReq) -> None:
    big = {"max_new_tokens": 100}
    running = req(4, params={"max_new_tokens": 1})
    assert adder(30, [running], new_token_ratio=1.0).add_one_req(req(20, params=big)) is NO_TOKEN
    a = adder(30, new_token_ratio=1.0)
    assert a.add_one_req(req(2, "a", params={"max_new_tokens": 1})) is CONTINUE
    assert a.add_one_req(req(20, "b", params=big)) is NO_TOKEN


def test_what_is_larger_than_the_pool_is_never_added(adder: Adder, req: MakeReq) -> None:
    assert adder(free=19).add_one_req(req(20)) is NO_TOKEN


def test_whole_prompts_fill_a_forward_up_to_its_limit(adder: Adder, req: MakeReq) -> None:
    a = adder(rem_input_tokens=10)
    assert a.add_one_req(req(6, "a")) is CONTINUE
    assert a.add_one_req(req(5, "b")) is OTHER
    assert a.add_one_req(req(4, "c")) is OTHER  # added, and the forward is full
    assert runs(a) == [("a", 6), ("c", 4)]


def test_the_first_prompt_may_exceed_the_limit(adder: Adder, req: MakeReq) -> None:
    a = adder(rem_input_tokens=10)
    assert a.add_one_req(req(25, "a")) is OTHER
    assert runs(a) == [("a", 25)]


# --- Chunks -------------------------------------------------------------------------------------


def test_the_prompt_that_does_not_fit_is_cut(adder: Adder, req: MakeReq) -> None:
    a = adder(rem_chunk_tokens=8)
    assert a.add_one_req(req(5, "a")) is CONTINUE
    b = req(9, "b")
    assert a.add_one_req(b) is OTHER
    assert runs(a) == [("a", 5), ("b", 3)]
    assert a.new_chunked_req is b
    assert b.fill_ids == b.origin_input_ids[:3]


def test_a_cut_prompt_goes_on_first_and_leaves_the_rest(adder: Adder, req: MakeReq) -> None:
    r = req(10, "a")
    r.prefix_indices = list(range(7))
    a = adder(rem_chunk_tokens=8)
    assert a.add_chunked_req(r)
    assert a.new_chunked_req is None
    assert a.add_one_req(req(9, "b")) is OTHER
    assert runs(a) == [("a", 3), ("b", 5)]
    assert a.new_chunked_req.rid == "b"


def test_the_limit_of_a_forward_is_for_a_prompt_that_goes_on_too(
    adder: Adder, req: MakeReq
) -> None:
    r = req(100, "a")
    r.prefix_indices = list(range(7))
    a = adder(rem_chunk_tokens=64, rem_input_tokens=16)
    assert a.add_chunked_req(r)
    assert a.add_one_req(req(3, "b")) is OTHER
    assert runs(a) == [("a", 16)]


def test_only_one_prompt_is_cut(adder: Adder, req: MakeReq) -> None:
    """A page is left behind the first cut, but not a second cut prompt."""
    a = adder(page_size=4, rem_chunk_tokens=10)
    assert a.add_one_req(req(9, "a")) is CONTINUE
    assert a.add_one_req(req(9, "b")) is OTHER
    assert runs(a) == [("a", 9)]

    a = adder(page_size=4, rem_chunk_tokens=11)
    assert a.add_one_req(req(20, "a")) is CONTINUE  # cut at 8, and 3 are left
    assert a.add_one_req(req(9, "b")) is OTHER
    assert a.add_one_req(req(3, "c")) is OTHER
    assert runs(a) == [("a", 8), ("c", 3)]


@pytest.mark.parametrize(
    ("prefix", "room", "expected"), [(0, 11, 8), (4, 11, 8), (8, 3, 0), (8, 4, 4)]
)
def test_a_chunk_ends_at_a_pages_end(
    adder: Adder, req: MakeReq, prefix: int, room: int, expected: int
) -> None:
    r = req(40)
    r.prefix_indices = list(range(prefix))
    a = adder(page_size=4, rem_chunk_tokens=room)
    assert a.add_chunked_req(r) == (expected > 0)
    assert runs(a) == ([("r", expected)] if expected else [])
    assert (prefix + expected) % 4 == 0


def test_the_last_chunk_need_not(adder: Adder, req: MakeReq) -> None:
    r = req(11)
    r.prefix_indices = list(range(8))
    a = adder(page_size=4, rem_chunk_tokens=4)
    assert a.add_chunked_req(r)
    assert runs(a) == [("r", 3)]
    assert a.new_chunked_req is None


def test_a_chunk_takes_what_kv_there_is(adder: Adder, req: MakeReq) -> None:
    r = req(40)
    r.prefix_indices = list(range(8))
    a = adder(free=7, page_size=4, rem_chunk_tokens=32)
    assert a.add_chunked_req(r)
    assert runs(a) == [("r", 4)]
    assert a.new_chunked_req is r
    assert not adder(free=3, page_size=4, rem_chunk_tokens=32).add_chunked_req(r)


def test_pages_are_counted_whole(adder: Adder, req: MakeReq) -> None:
    a = adder(free=12, page_size=4)
    assert a.add_one_req(req(5, "a")) is CONTINUE  # two pages, and perhaps a third
    assert a.add_one_req(req(5, "b")) is NO_TOKEN
    assert runs(a) == [("a", 5)]


def test_decode_tokens_of_a_mixed_forward_count(adder: Adder, req: MakeReq) -> None:
    running = [req(4, params={"max_new_tokens": 0}) for _ in range(3)]
    a = adder(100, running, rem_chunk_tokens=8, mixed_with_decode_tokens=3)
    assert a.add_one_req(req(9, "a")) is OTHER
    assert runs(a) == [("a", 5)]

    full = adder(100, running, rem_chunk_tokens=3, mixed_with_decode_tokens=3)
    assert full.add_one_req(req(9, "a")) is OTHER
    assert runs(full) == []

    tight = adder(7, running, rem_chunk_tokens=100, mixed_with_decode_tokens=3)
    assert tight.add_one_req(req(5, "a")) is NO_TOKEN
    assert tight.add_one_req(req(4, "b")) is CONTINUE


def test_a_limit_of_prefill_tokens_below_a_page_still_lets_a_page_through(
    adder: Adder, req: MakeReq
) -> None:
    a = adder(page_size=16, rem_input_tokens=2, rem_chunk_tokens=64)
    assert a.add_one_req(req(40, "a")) is OTHER
    assert runs(a) == [("a", 16)]


def test_a_retracted_request_brings_its_output_along(adder: Adder, req: MakeReq) -> None:
    r = req(4, params={"max_new_tokens": 10})
    r.output_ids = [7] * 6
    a = adder(free=14, running=[req(1, params={"max_new_tokens": 0})], new_token_ratio=1.0)
    assert a.add_one_req(r) is CONTINUE  # 10 known tokens and 4 to come
    assert runs(a) == [("r", 10)]
