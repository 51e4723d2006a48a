"""The scheduler, one step at a time: who runs, what an abort does where, and what happens without KV.

`stepper` goes through the loop by hand, with both checks of the memory after each step. Tokens are
compared with those of the same request alone in a scheduler without overlap, chunks or pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams

LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
PAGES = pytest.mark.parametrize("page_size", [1, 4], ids=["page1", "page4"])
MakeStepper = Callable[..., Any]


@pytest.fixture
def alone(stepper: MakeStepper) -> Callable[..., list[int]]:
    """Tokens of a request that runs alone in the simplest scheduler."""
    simple = stepper(overlap=False, chunked_prefill_size=-1)

    def run(prompt: list[int] | int, **fields: Any) -> list[int]:
        rid = simple.send(prompt, **fields)
        simple.finish()
        return simple.last(rid).output_ids

    return run


# --- Steps --------------------------------------------------------------------------------------


def test_a_loop_without_overlap_finishes_each_step(stepper: MakeStepper, alone: Callable) -> None:
    s = stepper(overlap=False)
    a = s.send(5, max_new_tokens=3)
    s.step()
    assert s.modes == ["EXTEND"]
    assert len(s.req(a).output_ids) == 1
    s.step(2)
    assert s.modes == ["EXTEND", "DECODE", "DECODE"]
    assert s.last(a).output_ids == alone(5, max_new_tokens=3)
    s.step()
    assert s.modes[3:] == [None]
    s.finish()


def test_a_loop_with_overlap_is_a_step_ahead(stepper: MakeStepper, alone: Callable) -> None:
    s = stepper()
    a = s.send(5, max_new_tokens=3)
    s.step()
    assert s.req(a).output_ids == []
    s.step(2)
    assert len(s.req(a).output_ids) == 2
    s.step()
    # The end was seen while a step that no one needs was under way.
    assert s.modes == ["EXTEND", "DECODE", "DECODE", "DECODE"]
    assert s.last(a).output_ids == alone(5, max_new_tokens=3)
    s.finish()


@LOOPS
def test_prefill_comes_before_decode(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap)
    s.send(4, max_new_tokens=9)
    s.step(2)
    s.send(4, max_new_tokens=9)
    s.step(2)
    assert s.modes == ["EXTEND", "DECODE", "EXTEND", "DECODE"]
    assert s.scheduler.running_batch.batch_size() == 2
    s.finish()


@LOOPS
@PAGES
def test_chunks_and_decodes_share_forwards(
    overlap: bool, page_size: int, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap, chunked_prefill_size=8, enable_mixed_chunk=True, page_size=page_size)
    a = s.send(3, max_new_tokens=12)
    s.step(2)
    b = s.send(21, max_new_tokens=4)
    s.step(4)
    assert s.modes[:4] == ["EXTEND", "DECODE", "MIXED", "MIXED"]
    s.finish()
    assert s.last(a).output_ids == alone(3, max_new_tokens=12)
    assert s.last(b).output_ids == alone(21, max_new_tokens=4)


@LOOPS
def test_no_more_requests_run_than_there_are_rows(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap, max_running_requests=2)
    rids = [s.send(3, max_new_tokens=4) for _ in range(5)]
    most = 0
    for _ in range(40):
        s.step()
        most = max(most, 2 - s.scheduler.req_to_token_pool.available_size())
    s.finish()
    assert most == 2
    assert [s.reason(rid) for rid in rids] == ["length"] * 5


@LOOPS
@pytest.mark.parametrize("scarce", ["rows", "slots"])
def test_a_request_starts_as_soon_as_another_makes_room(
    scarce: str, overlap: bool, stepper: MakeStepper
) -> None:
    limits = {"rows": {"max_running_requests": 2}, "slots": {"max_total_tokens": 48}}[scarce]
    s = stepper(overlap, **limits)
    long, short = s.send(4, max_new_tokens=30), s.send(12, max_new_tokens=3)
    s.step()
    third = s.send(12, max_new_tokens=3)
    s.step()
    assert s.req(third) in s.scheduler.waiting_queue
    while short not in s.outputs:
        s.step()
    s.step(2)
    assert s.req(third) not in s.scheduler.waiting_queue
    assert long not in s.outputs
    s.finish()


@LOOPS
def test_whoever_came_first_starts_first(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap, max_running_requests=1)
    rids = [s.send(n, max_new_tokens=2) for n in (9, 3, 6)]
    s.finish()
    assert list(s.outputs) == rids


@LOOPS
def test_streams_grow_token_by_token(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap)
    a, b = s.send(3, max_new_tokens=4, stream=True), s.send(3, max_new_tokens=4)
    s.finish()
    assert [len(o.output_ids) for o in s.outputs[a]] == [1, 2, 3, 4]
    assert len(s.outputs[b]) == 1
    assert [o.finished_reason is None for o in s.outputs[a]] == [True, True, True, False]


def test_a_result_does_not_change_after_it_was_sent(stepper: MakeStepper) -> None:
    s = stepper()
    a = s.send(3, max_new_tokens=5, stream=True, return_logprob=True, logprob_start_len=0)
    s.finish()
    lengths = [len(o.output_ids) for o in s.outputs[a]]
    assert lengths == [1, 2, 3, 4, 5]
    assert [len(o.logprobs.output_token) for o in s.outputs[a]] == lengths


@LOOPS
def test_an_output_ends_where_the_context_does(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap, context_length=20)
    for limit in (None, 100):
        a = s.send(15, max_new_tokens=limit)
        s.finish()
        assert len(s.last(a).output_ids) == 5
        assert s.last(a).finished_reason.length == 5


@LOOPS
@PAGES
def test_a_request_may_fill_the_pool_to_the_last_slot(
    overlap: bool, page_size: int, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap, max_total_tokens=24, page_size=page_size)
    longest, short = s.send(23, max_new_tokens=9), s.send(6, max_new_tokens=99)
    s.finish()
    assert s.last(longest).output_ids == alone(23, max_new_tokens=1)
    assert s.last(short).output_ids == alone(6, max_new_tokens=18)


@LOOPS
def test_requests_that_are_not_valid_are_answered(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap)
    a = s.send(3, max_new_tokens=3)
    bad = s.send([3, 40])
    s.step()
    last = s.last(bad)
    assert last.finished_reason == FINISH_ABORT("input_ids must be integers in [0, 40), got 40")
    assert last.output_ids == []
    s.finish()
    assert s.reason(a) == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", 5),
        ("min_new_tokens", "x"),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logit_bias", {40: 1.0}),
    ],
)
def test_parameters_that_were_set_by_hand_are_checked(
    field: str, value: object, stepper: MakeStepper
) -> None:
    """In a request that did not come through an Engine."""
    s = stepper()
    a = s.send(3, max_new_tokens=3)
    params = SamplingParams(max_new_tokens=3)
    setattr(params, field, value)
    s.scheduler.submit_request(TokenizedGenerateReqInput("bad", [4, 5], params))
    s.step()
    reason = s.last("bad").finished_reason.to_json()
    assert reason["type"] == "abort" and reason["message"].startswith(field)
    s.finish()
    assert s.reason(a) == "length"


def test_seeds_are_drawn_in_order_of_arrival_from_the_engines_seed(stepper: MakeStepper) -> None:
    def tokens(seed: int) -> list[list[int]]:
        s = stepper(random_seed=seed, model_runner_class=SameWeights)
        rids = [s.send(3, max_new_tokens=8, temperature=1.0) for _ in range(3)]
        s.finish()
        return [s.last(rid).output_ids for rid in rids]

    first = tokens(1)
    assert first == tokens(1)
    assert first != tokens(2)
    assert first[0] != first[1]


class SameWeights(ModelRunner):
    """A dummy model that does not depend on the engine's seed."""

    def load_model(self) -> torch.nn.Module:
        self.server_args = type("Args", (), {"load_format": "dummy", "random_seed": 5})()
        return super().load_model()


# --- Scoring ------------------------------------------------------------------------------------


def test_scoring_beside_generation_in_any_order_without_overlap(
    stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap=False)
    scoring = {"max_new_tokens": 0, "return_logprob": True, "logprob_start_len": 0}
    first = s.send(5, **scoring)
    s.step()
    a = s.send(4, max_new_tokens=4)
    s.step()
    second = s.send(6, **scoring)
    s.finish()
    for rid, n in ((first, 5), (second, 6)):
        assert s.last(rid).output_ids == []
        assert len(s.last(rid).logprobs.input_token) == n
    assert s.last(a).output_ids == alone(4, max_new_tokens=4)


def test_scoring_joins_what_generates(stepper: MakeStepper, alone: Callable) -> None:
    s = stepper()
    a = s.send(4, max_new_tokens=8)
    s.step(2)
    scoring = s.send(6, max_new_tokens=0)
    s.step()
    assert not s.scheduler.running_batch.is_prefill_only
    s.finish()
    assert s.last(scoring).output_ids == []
    assert s.last(a).output_ids == alone(4, max_new_tokens=8)


def test_scoring_alone_is_never_decoded(stepper: MakeStepper) -> None:
    s = stepper()
    rids = [s.send(6, max_new_tokens=0) for _ in range(3)]
    s.finish()
    assert [m for m in s.modes if m] == ["EXTEND"]
    assert [s.reason(rid) for rid in rids] == ["length"] * 3


# --- Aborts -------------------------------------------------------------------------------------


@LOOPS
def test_abort_while_waiting(overlap: bool, stepper: MakeStepper, alone: Callable) -> None:
    s = stepper(overlap, max_running_requests=1)
    a, b, c = (s.send(3, max_new_tokens=5) for _ in range(3))
    s.step()
    s.abort(b)
    s.step()
    assert s.reason(b) == "abort"
    assert s.last(b).output_ids == []
    s.finish()
    for rid in (a, c):
        assert s.last(rid).output_ids == alone(3, max_new_tokens=5)


@LOOPS
@PAGES
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_abort_while_a_prompt_is_prefilled_in_chunks(
    chunks: int, page_size: int, overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap, chunked_prefill_size=8, page_size=page_size)
    a = s.send(3, max_new_tokens=30)
    s.step(2)
    b = s.send(40, max_new_tokens=5, return_logprob=True, logprob_start_len=0)
    s.step(chunks)
    assert s.scheduler.chunked_req.rid == b
    s.abort(b)
    s.step(2)
    assert s.scheduler.chunked_req is None
    assert s.reason(b) == "abort"
    assert s.last(b).output_ids == []
    s.finish()
    assert s.last(a).output_ids == alone(3, max_new_tokens=30)


@LOOPS
def test_abort_while_running(overlap: bool, stepper: MakeStepper, alone: Callable) -> None:
    s = stepper(overlap)
    a, b = s.send(3, max_new_tokens=20, stream=True), s.send(4, max_new_tokens=20)
    s.step(5)
    s.abort(a)
    s.step()
    assert s.reason(a) == "abort"
    known = s.last(a).output_ids
    assert 4 <= len(known) <= 6
    assert known == alone(3, max_new_tokens=20)[: len(known)]
    s.finish()
    assert s.last(b).output_ids == alone(4, max_new_tokens=20)


@pytest.mark.parametrize("limit", [0, 1, 20])
def test_abort_while_the_prefill_is_in_flight(
    limit: int, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper()
    a = s.send(3, max_new_tokens=limit, return_logprob=True)
    s.step()
    assert s.scheduler.result_queue
    s.abort(a)
    s.step()
    assert s.reason(a) == "abort"
    # The token that was on its way is kept, unless none was asked for.
    expected = alone(3, max_new_tokens=min(limit, 1))
    assert s.last(a).output_ids == expected
    assert [token for _, token in s.last(a).logprobs.output_token] == expected
    s.finish()


def retracting(stepper: MakeStepper, overlap: bool, page_size: int = 1) -> tuple[Any, str, str]:
    """Two requests that do not fit together; the second has been retracted."""
    s = stepper(overlap, max_total_tokens=24, page_size=page_size, schedule_conservativeness=0.01)
    a, b = s.send(5, max_new_tokens=14, rid="a"), s.send(6, max_new_tokens=14, rid="b")
    for _ in range(40):
        s.step()
        if s.scheduler.num_retractions:
            break
    assert [r.rid for r in s.scheduler.waiting_queue] == ["b"]
    assert s.req("b").output_ids
    return s, a, b


@LOOPS
@PAGES
def test_a_retracted_request_gets_the_same_tokens(
    page_size: int, overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    s, a, b = retracting(stepper, overlap, page_size)
    s.finish()
    assert s.last(a).output_ids == alone(5, max_new_tokens=14)
    assert s.last(b).output_ids == alone(6, max_new_tokens=14)
    assert s.last(a).meta["retraction_count"] == 0
    assert s.last(b).meta["retraction_count"] >= 1


@LOOPS
@pytest.mark.parametrize("wait", [0, 1])
def test_abort_while_retracted(
    wait: int, overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    s, a, b = retracting(stepper, overlap)
    s.step(wait)
    s.abort(b)
    s.step()
    assert s.reason(b) == "abort"
    known = s.last(b).output_ids
    assert known
    assert known == alone(6, max_new_tokens=14)[: len(known)]
    s.finish()
    assert s.last(a).output_ids == alone(5, max_new_tokens=14)


@LOOPS
def test_an_abort_that_comes_with_the_retraction(overlap: bool, stepper: MakeStepper) -> None:
    """The request is told to end with its next result, but is retracted before there is one."""
    s, _, _ = retracting(stepper, overlap)
    steps = len(s.modes)
    twin = stepper(overlap, max_total_tokens=24, schedule_conservativeness=0.01)
    a, b = twin.send(5, max_new_tokens=14), twin.send(6, max_new_tokens=14)
    twin.step(steps - 1)
    twin.abort(b)
    twin.step()
    assert twin.scheduler.num_retractions == 1
    assert twin.reason(b) == "abort"
    twin.finish()
    assert twin.reason(a) == "length"


@LOOPS
def test_abort_of_what_has_ended_or_never_was(
    overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap)
    s.abort("nobody")
    a, b = s.send(3, max_new_tokens=2), s.send(3, max_new_tokens=9)
    for _ in range(20):
        s.step()
        if a in s.outputs:
            break
    s.abort(a)
    s.abort(a)
    s.finish()
    assert s.reason(a) == "length"
    assert len(s.outputs[a]) == 1
    assert s.last(b).output_ids == alone(3, max_new_tokens=9)
    s.abort(a)
    s.finish()
    assert len(s.outputs[a]) == 1


@LOOPS
def test_abort_of_everything(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap, chunked_prefill_size=8, max_running_requests=3)
    rids = [s.send(3, max_new_tokens=50), s.send(3, max_new_tokens=50)]
    s.step(3)
    rids += [s.send(40, max_new_tokens=50), s.send(3), s.send(3)]
    s.step(2)
    assert s.scheduler.chunked_req is not None
    assert len(s.scheduler.waiting_queue) == 2
    s.abort(None)
    s.finish()
    assert [s.reason(rid) for rid in rids] == ["abort"] * 5


@LOOPS
def test_a_name_may_be_used_again_after_an_abort(
    overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap)
    s.send(3, rid="x", max_new_tokens=9)
    s.step(3)
    s.abort("x")
    s.send(4, rid="x", max_new_tokens=5)
    s.finish()
    first, second = s.outputs["x"]
    assert first.finished_reason.to_json()["type"] == "abort"
    assert second.output_ids == alone(4, max_new_tokens=5)


# --- Without KV ---------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize(("limit", "retracted"), [(12, False), (20, True)])
def test_a_prompt_in_chunks_waits_for_kv(
    limit: int, retracted: bool, overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    """It goes on when the running request has ended, or starts over if that one needs its KV."""
    s = stepper(
        overlap, max_total_tokens=44, chunked_prefill_size=8, page_size=4, enable_mixed_chunk=True
    )
    a = s.send(8, max_new_tokens=limit)
    s.step(2)
    b = s.send(28, max_new_tokens=5, return_logprob=True, logprob_start_len=3)
    s.scheduler.new_token_ratio = 0.0
    waited = 0
    while b not in s.outputs:
        s.step()
        waited += s.scheduler.chunked_req is not None and s.modes[-1] == "DECODE"
    s.finish()
    assert waited >= 2
    assert bool(s.scheduler.num_retractions) == retracted
    assert s.last(a).output_ids == alone(8, max_new_tokens=limit)
    assert s.last(b).output_ids == alone(28, max_new_tokens=5)
    assert [token for _, token in s.last(b).logprobs.input_token] == list(range(7, 32))


@LOOPS
def test_input_logprobs_from_a_start_behind_the_first_chunk(
    overlap: bool, stepper: MakeStepper
) -> None:
    s = stepper(overlap, chunked_prefill_size=8)
    whole = s.send(6, max_new_tokens=1, return_logprob=True, logprob_start_len=0)
    for start in (0, 7, 8, 9, 15, 16, 20, 29, 30):
        a = s.send(30, max_new_tokens=1, return_logprob=True, logprob_start_len=start)
        s.finish()
        entries = s.last(a).logprobs.input_token
        assert [token for _, token in entries] == list(range(4 + start, 34))
        assert [logprob is None for logprob, _ in entries] == ([True] + [False] * 29)[: 30 - start]
    assert s.last(whole).logprobs.input_token[0] == (None, 4)


@LOOPS
def test_a_prefill_does_not_take_along_whom_it_leaves_no_page(
    overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap, max_total_tokens=20, page_size=4, enable_mixed_chunk=True)
    rids = [s.send(4, max_new_tokens=3) for _ in range(3)]
    s.scheduler.new_token_ratio = 0.0
    s.step()
    # The three are at the end of a page each, and the new prompt takes one of the two free pages.
    rids.append(s.send(4, max_new_tokens=3))
    s.step()
    assert s.modes == ["EXTEND", "EXTEND"]
    s.finish()
    for rid in rids:
        assert s.last(rid).output_ids == alone(4, max_new_tokens=3)


def test_the_last_request_is_given_up_if_the_pool_is_too_small(stepper: MakeStepper) -> None:
    s = stepper(overlap=False, max_total_tokens=16)
    s.scheduler.self_check_during_busy = lambda: None
    s.scheduler.check_idle = False
    a = s.send(4, max_new_tokens=12)
    s.step(2)
    stolen = s.scheduler.token_to_kv_pool_allocator.alloc(8)
    s.step(12)
    message = s.last(a).finished_reason.message
    assert "out of KV" in message
    assert 1 < len(s.last(a).output_ids) < 12
    s.scheduler.token_to_kv_pool_allocator.free(stolen)
    s.scheduler.check_idle = True
    s.finish()


@LOOPS
def test_a_request_that_nothing_makes_room_for_is_given_up(
    overlap: bool, stepper: MakeStepper
) -> None:
    s = stepper(overlap, max_total_tokens=16)
    s.scheduler.self_check_during_busy = lambda: None
    s.scheduler.check_idle = False
    stolen = s.scheduler.token_to_kv_pool_allocator.alloc(14)
    a, b = s.send(9, max_new_tokens=2), s.send(2, max_new_tokens=0)
    s.step(6)
    assert "no room for 9 tokens" in s.last(a).finished_reason.message
    assert s.reason(b) == "length"
    s.scheduler.token_to_kv_pool_allocator.free(stolen)
    s.scheduler.check_idle = True
    s.finish()


@LOOPS
def test_many_requests_in_a_small_pool_all_get_their_tokens(
    overlap: bool, stepper: MakeStepper, alone: Callable
) -> None:
    s = stepper(overlap, max_total_tokens=48, page_size=4, schedule_conservativeness=0.01)
    prompts = [list(range(4 + i, 8 + i)) for i in range(8)]
    sampled = {"max_new_tokens": 16, "temperature": 1.0}
    rids = [s.send(p, sampling_seed=i, **sampled) for i, p in enumerate(prompts)]
    for _ in range(400):
        s.scheduler.new_token_ratio = 0.0
        s.step()
    s.finish()
    assert s.scheduler.num_retractions > 5
    for i, (rid, p) in enumerate(zip(rids, prompts, strict=True)):
        assert s.last(rid).output_ids == alone(p, sampling_seed=i, **sampled)


# --- Checks -------------------------------------------------------------------------------------


def test_a_slot_that_is_lost_is_noticed_when_idle(stepper: MakeStepper) -> None:
    s = stepper()
    s.scheduler.token_to_kv_pool_allocator.alloc(1)
    with pytest.raises(RuntimeError, match=r"token_to_kv_pool_allocator .* 255 of 256 slots"):
        s.step()


def test_a_row_that_is_lost_is_noticed_when_idle(stepper: MakeStepper) -> None:
    s = stepper()
    s.scheduler.req_to_token_pool.alloc(1)
    with pytest.raises(RuntimeError, match="req_to_token_pool memory leak detected: 7 of 8"):
        s.step()


def test_the_check_when_idle_can_be_switched_off(
    stepper: MakeStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "0")
    s = stepper()
    s.scheduler.token_to_kv_pool_allocator.alloc(1)
    s.step()


@LOOPS
def test_a_slot_that_is_lost_is_noticed_when_busy(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap)
    s.send(3, max_new_tokens=9)
    s.step(2)
    s.scheduler.token_to_kv_pool_allocator.alloc(1)
    with pytest.raises(RuntimeError, match="KV slots do not add up"):
        s.step()


@LOOPS
def test_a_row_that_is_lost_is_noticed_when_busy(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap)
    s.send(3, max_new_tokens=9)
    s.step(2)
    s.scheduler.req_to_token_pool.free_slots.pop()
    with pytest.raises(RuntimeError, match="rows of the request pool do not add up"):
        s.step()


# --- Records ------------------------------------------------------------------------------------


@LOOPS
def test_a_record_tells_of_each_step(overlap: bool, stepper: MakeStepper) -> None:
    s = stepper(overlap, chunked_prefill_size=8, enable_mixed_chunk=True)
    s.send(4, max_new_tokens=6)
    s.send(3, max_new_tokens=0)
    s.step(2)
    s.send(20, max_new_tokens=2)
    s.finish()
    records = s.records
    assert [r.step for r in records] == list(range(1, len(records) + 1))
    assert [r.forward_mode for r in records] == [m for m in s.modes if m]
    # Tokens that a request kept: 6 and 2, and none of the scoring request or of steps too many.
    assert sum(r.num_tokens for r in records) == 8
    assert records[0].batch_size == 2
    assert records[0].num_tokens == 1
    assert {"EXTEND", "MIXED", "DECODE"} <= {r.forward_mode for r in records}
    chunks = [r for r in records if r.forward_mode == "MIXED"]
    assert [r.num_tokens for r in chunks][:2] == [1, 1]
    for r in records:
        assert min(r.prepare_time, r.process_time, r.wait_time) >= 0
        assert r.forward_end > r.forward_start > 0
    ends = [r.forward_end for r in records]
    assert ends == sorted(ends)
    assert all(b.forward_start >= a.forward_end for a, b in itertools.pairwise(records))


def test_without_an_observer_nothing_is_recorded(stepper: MakeStepper) -> None:
    s = stepper()
    s.scheduler.observer = None
    s.send(3, max_new_tokens=2)
    s.step()
    assert [record for _, _, record in s.scheduler.result_queue] == [None]
    s.finish()
    assert s.records == []
