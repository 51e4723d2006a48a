"""When a request ends, and what it prefills next."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    Req,
)


def feed(req: Req, steps: list[list[int]]) -> list[int] | None:
    """Give a request tokens, some at a time, until it ends; what belongs to its result."""
    for tokens in steps:
        req.output_ids += tokens
        req.check_finished(len(tokens))
        if req.finished():
            return req.output_ids_through_stop
    return None


def one_by_one(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def test_a_request_goes_on_until_its_limit(req: Callable[..., Req]) -> None:
    r = req(params={"max_new_tokens": 3})
    assert feed(r, one_by_one([7, 7])) is None
    assert feed(r, one_by_one([7])) == [7, 7, 7]
    assert r.finished_reason == FINISH_LENGTH(3)
    assert r.finished_reason.to_json() == {"type": "length", "length": 3}


def test_an_end_of_text_ends_it(req: Callable[..., Req]) -> None:
    r = req(params={"max_new_tokens": 9})
    assert feed(r, one_by_one([7, 2, 7])) == [7, 2]
    assert r.finished_reason.to_json() == {"type": "stop", "matched": 2}


def test_so_does_a_stop_token(req: Callable[..., Req]) -> None:
    r = req(params={"max_new_tokens": 9, "stop_token_ids": [5, 6]})
    assert feed(r, one_by_one([7, 6, 5])) == [7, 6]
    assert r.finished_reason == FINISH_MATCHED_TOKEN(6)


def test_a_stop_token_in_the_last_place_is_a_stop(req: Callable[..., Req]) -> None:
    r = req(params={"max_new_tokens": 2})
    assert feed(r, one_by_one([7, 2])) == [7, 2]
    assert r.finished_reason == FINISH_MATCHED_TOKEN(2)


def test_stop_tokens_may_be_ignored(req: Callable[..., Req]) -> None:
    """``ignore_eos`` means all stop tokens, as upstream has it."""
    r = req(params={"max_new_tokens": 3, "ignore_eos": True, "stop_token_ids": [5]})
    assert feed(r, one_by_one([2, 5, 2])) == [2, 5, 2]
    assert r.finished_reason == FINISH_LENGTH(3)


def test_a_model_may_have_no_end_of_text(req: Callable[..., Req]) -> None:
    r = req(params={"max_new_tokens": 2}, eos_token_ids=())
    assert feed(r, one_by_one([2, 2])) == [2, 2]
    assert r.finished_reason == FINISH_LENGTH(2)


def test_a_request_for_no_token_keeps_none(req: Callable[..., Req]) -> None:
    r = req(params={"max_new_tokens": 0})
    assert feed(r, [[2]]) == []
    assert r.finished_reason == FINISH_LENGTH(0)


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([7, 8, 2, 9], [1, 7, 8, 2], FINISH_MATCHED_TOKEN(2)),
        ([2, 5, 9], [1, 2], FINISH_MATCHED_TOKEN(2)),
        ([7, 8, 9, 7, 2], [1, 7, 8, 9, 7], FINISH_LENGTH(5)),
        ([7, 8, 9, 2, 7], [1, 7, 8, 9, 2], FINISH_MATCHED_TOKEN(2)),
        ([7, 8], None, None),
    ],
)
def test_of_several_tokens_at_once_the_first_end_counts(
    req: Callable[..., Req], tokens: list[int], kept: list[int] | None, reason: Any
) -> None:
    r = req(params={"max_new_tokens": 5, "stop_token_ids": [5]})
    assert feed(r, [[1], tokens]) == kept
    assert r.finished_reason == reason


def test_an_end_is_not_looked_for_twice(req: Callable[..., Req]) -> None:
    r = req(params={"max_new_tokens": 9})
    feed(r, one_by_one([7, 2]))
    r.output_ids += [5, 5]
    r.check_finished(2)
    assert r.output_ids_through_stop == [7, 2]


# --- Stop strings -------------------------------------------------------------------------------


def test_a_stop_text_inside_one_token(req: Callable[..., Req], words: type) -> None:
    r = req(params={"stop": "b"}, tokenizer=words("a", "abc"))
    assert feed(r, one_by_one([0, 0, 1, 0])) == [0, 0, 1]
    assert r.finished_reason == FINISH_MATCHED_STR("b")
    assert r.finished_reason.to_json() == {"type": "stop", "matched": "b"}


def test_a_stop_text_across_tokens(req: Callable[..., Req], words: type) -> None:
    r = req(params={"stop": ["cdef"]}, tokenizer=words("abc", "d", "e", "fgh"), eos_token_ids=())
    assert feed(r, one_by_one([0, 1, 2])) is None
    assert feed(r, one_by_one([3])) == [0, 1, 2, 3]


def test_a_stop_text_does_not_begin_in_the_prompt(req: Callable[..., Req], words: type) -> None:
    r = req([0], params={"stop": "ab", "max_new_tokens": 3}, tokenizer=words("a", "b"))
    assert feed(r, one_by_one([1, 1, 1])) == [1, 1, 1]
    assert r.finished_reason == FINISH_LENGTH(3)


def test_the_stop_text_that_comes_first_in_the_text_counts(
    req: Callable[..., Req], words: type
) -> None:
    r = req(params={"stop": ["z", "b"]}, tokenizer=words("abcz"))
    assert feed(r, [[0]]) == [0]
    assert r.finished_reason == FINISH_MATCHED_STR("b")


def test_tokens_that_are_not_shown_may_stand_inside_a_stop_text(
    req: Callable[..., Req], words: type
) -> None:
    r = req(params={"stop": "ab"}, tokenizer=words("a", "b", "<unseen>"), eos_token_ids=())
    assert feed(r, one_by_one([0, *[2] * 9, 1, 0])) == [0, *[2] * 9, 1]


def test_several_tokens_at_once_end_with_the_one_that_completes_a_stop_text(
    req: Callable[..., Req], words: type
) -> None:
    r = req(params={"stop": "bc"}, tokenizer=words("a", "b", "c"), eos_token_ids=())
    assert feed(r, [[0, 1, 2, 0, 1]]) == [0, 1, 2]


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_text_may_be_a_special_token_that_is_shown(
    req: Callable[..., Req], words: type, skip: bool
) -> None:
    params = {"stop": "<end>", "skip_special_tokens": skip, "max_new_tokens": 3}
    r = req(params=params, tokenizer=words("a", "<end>"))
    assert feed(r, one_by_one([0, 1, 0])) == ([0, 1, 0] if skip else [0, 1])


def test_random_stop_texts_are_found_where_the_text_first_has_them(
    req: Callable[..., Req], words: type
) -> None:
    """Against a search in the whole text after each token."""
    rng = random.Random(0)
    vocabulary = ["a", "b", "ab", "ba", "aab", "c", "bcb", "<unseen>"]
    tokenizer = words(*vocabulary)
    shown = [*vocabulary[:-1], ""]
    for _ in range(400):
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 3))]
        tokens = rng.choices(range(len(vocabulary)), weights=[*[1] * 7, rng.choice([0, 7])], k=30)
        ends = [
            n
            for n in range(1, 31)
            if any(s in "".join(shown[t] for t in tokens[:n]) for s in stops)
        ]
        r = req(params={"stop": stops, "max_new_tokens": 30}, tokenizer=tokenizer, eos_token_ids=())
        steps, left = [], list(tokens)
        while left:
            steps.append([left.pop(0) for _ in range(min(rng.randint(1, 4), len(left)))])
        assert len(feed(r, steps)) == (ends[0] if ends else 30)


# --- Abort --------------------------------------------------------------------------------------


def test_an_abort_takes_effect_with_the_next_result(req: Callable[..., Req]) -> None:
    r = req()
    feed(r, one_by_one([7]))
    r.to_finish = FINISH_ABORT("enough")
    assert not r.finished()
    assert feed(r, one_by_one([8, 9])) == [7, 8]
    assert r.finished_reason.to_json() == {
        "type": "abort",
        "message": "enough",
        "status_code": None,
        "err_type": None,
    }
    assert r.to_finish is None


@pytest.mark.parametrize(
    ("limit", "tokens", "kept"),
    [(0, [0], []), (3, [7, 8, 9, 5], [7, 8, 9]), (9, [7, 2, 8], [7, 2])],
)
def test_an_aborted_request_has_no_tokens_that_it_did_not_ask_for(
    req: Callable[..., Req], limit: int, tokens: list[int], kept: list[int]
) -> None:
    r = req(params={"max_new_tokens": limit})
    r.to_finish = FINISH_ABORT()
    assert feed(r, [tokens]) == kept
    assert r.finished_reason == FINISH_ABORT()


# --- What is prefilled next ---------------------------------------------------------------------


def test_a_prefill_takes_in_prompt_and_output(req: Callable[..., Req]) -> None:
    r = req([1, 3, 4])
    r.output_ids = [8, 9]
    r.init_next_round_input()
    assert (r.fill_ids, r.extend_input_len) == ([1, 3, 4, 8, 9], 5)
    r.prefix_indices = [0, 1]
    r.init_next_round_input()
    assert (r.fill_ids, r.extend_input_len) == ([1, 3, 4, 8, 9], 3)
    r.set_extend_input_len(2)
    assert (r.fill_ids, r.extend_input_len) == ([1, 3, 4, 8], 2)


@pytest.mark.parametrize(
    ("start", "prefix", "length", "expected"),
    [
        (-1, 0, 4, 4),  # no input logprobs
        (0, 0, 4, 0),
        (2, 0, 4, 2),
        (2, 0, 2, 2),  # the chunk ends before the start
        (2, 4, 4, 0),  # the start lies behind
        (6, 4, 4, 2),
        (8, 4, 4, 4),  # the prompt ends before the start
    ],
)
def test_from_where_a_chunk_has_input_logprobs(
    req: Callable[..., Req], start: int, prefix: int, length: int, expected: int
) -> None:
    r = req(8, return_logprob=True, logprob_start_len=start)
    r.prefix_indices = list(range(prefix))
    r.init_next_round_input()
    r.set_extend_input_len(length)
    assert r.extend_logprob_start_len == expected


def test_a_retracted_request_starts_over(req: Callable[..., Req]) -> None:
    r = req(4)
    r.output_ids = [8]
    r.prefix_indices = [0, 1]
    r.kv_committed_len, r.kv_allocated_len = 5, 7
    assert r.pop_kv_cache() == 7
    assert r.pop_kv_cache() == 0
    r.reset_for_retract()
    r.init_next_round_input()
    assert r.is_retracted
    assert (r.fill_ids, r.extend_input_len) == ([4, 5, 6, 7, 8], 5)
    assert r.retraction_count == 1
    assert r.seqlen == 5
