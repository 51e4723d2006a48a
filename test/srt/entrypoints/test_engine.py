"""The engine's front door: what may be asked, what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang import SamplingParams
from sglang.srt.entrypoints.engine import Engine

GREEDY = {"temperature": 0, "ignore_eos": True}
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])


@pytest.fixture(scope="module")
def engine(paths: Any) -> Iterator[Engine]:
    """An engine that takes token ids."""
    with Engine(paths.target, skip_tokenizer_init=True, max_total_tokens=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def text_engine(text_model: str) -> Iterator[Engine]:
    """An engine that takes text and writes bytes."""
    with Engine(text_model, load_format="dummy", max_total_tokens=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def ascii_only(text_engine: Engine) -> dict[str, float]:
    """A bias under which the dummy model writes printable ASCII."""
    decode = text_engine.tokenizer.decode
    shown = [decode([i], skip_special_tokens=False) for i in range(300)]
    bad = [i for i, s in enumerate(shown) if not (s.isascii() and s.isprintable() and s) or i < 4]
    return {str(i): -100.0 for i in bad}


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def is_idle(engine: Engine) -> bool:
    scheduler = engine.scheduler
    return (
        not engine._router._receivers
        and scheduler.req_to_token_pool.available_size() == scheduler.req_to_token_pool.size
        and not scheduler.waiting_queue
    )


# --- Ways to ask --------------------------------------------------------------------------------


def test_one_prompt_gives_one_result(engine: Engine, asks: type, make_referee: Callable) -> None:
    ask = asks([5, 9, 31], {"max_new_tokens": 7, **GREEDY})
    result = engine.generate(input_ids=ask.prompt, sampling_params=ask.params)
    make_referee().judge(ask, result)
    assert set(result) == {"output_ids", "meta_info"}
    meta = result["meta_info"]
    assert meta["cached_tokens"] == 0
    assert meta["e2e_latency"] > 0
    assert len(meta["id"]) == 32


def test_several_prompts_give_results_in_their_order(
    engine: Engine, asks: type, make_referee: Callable
) -> None:
    # The first is the last to end.
    many = [asks([5 + i, 9], {"max_new_tokens": 12 - 2 * i, **GREEDY}, f"n{i}") for i in range(5)]
    results = engine.generate(
        input_ids=[a.prompt for a in many],
        sampling_params=[a.params for a in many],
        rid=[a.rid for a in many],
    )
    referee = make_referee()
    for ask, result in zip(many, results, strict=True):
        referee.judge(ask, result)


def test_a_list_of_one_prompt_gives_a_list(engine: Engine) -> None:
    results = engine.generate(input_ids=[[5, 9]], sampling_params={"max_new_tokens": 2})
    assert len(results) == 1
    assert (
        engine.generate(input_ids=[5, 9], sampling_params=[{"max_new_tokens": 0}])["output_ids"]
        == []
    )


def test_no_prompts_give_no_results(text_engine: Engine) -> None:
    assert text_engine.generate([]) == []
    assert list(text_engine.generate([], stream=True)) == []


def test_parameters_may_be_an_object_which_stays_as_it_is(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=3, temperature=0, min_new_tokens=2)
    before = dict(vars(params))
    first, second = engine.generate(input_ids=[[5, 9], [5, 9]], sampling_params=params)
    assert first["output_ids"] == second["output_ids"]
    assert vars(params) == before


def test_without_parameters_128_tokens_are_sampled(engine: Engine) -> None:
    result = engine.generate(input_ids=[5, 9, 4])
    reason = result["meta_info"]["finish_reason"]
    assert reason["type"] == "stop" or reason == {"type": "length", "length": 128}


def test_the_prompt_is_the_callers_own(engine: Engine) -> None:
    prompt = [5, 9, 31]
    stream = engine.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 20, **GREEDY}, stream=True
    )
    prompt[:] = [1]
    expected = engine.generate(
        input_ids=[5, 9, 31], sampling_params={"max_new_tokens": 20, **GREEDY}
    )
    *_, last = stream
    assert last["output_ids"] == expected["output_ids"]
    assert last["meta_info"]["prompt_tokens"] == 3


def test_a_stream_holds_all_that_is_known(
    engine: Engine, asks: type, make_referee: Callable
) -> None:
    ask = asks([5, 9, 31], {"max_new_tokens": 9, **GREEDY}, return_logprob=True, top_logprobs_num=2)
    items = list(
        engine.generate(
            input_ids=ask.prompt,
            sampling_params=ask.params,
            stream=True,
            **ask.logprob_arguments(),
        )
    )
    ids = items[-1]["output_ids"]
    assert [item["output_ids"] for item in items] == [ids[: i + 1] for i in range(9)]
    reasons = [item["meta_info"]["finish_reason"] for item in items]
    assert reasons == [None] * 8 + [{"type": "length", "length": 9}]
    for item in items:
        assert "index" not in item
        assert len(item["meta_info"]["output_token_logprobs"]) == len(item["output_ids"])
    make_referee().judge(ask, items[-1])


def test_a_stream_of_several_prompts_says_which(
    engine: Engine, asks: type, make_referee: Callable
) -> None:
    many = [asks([5 + i, 9], {"max_new_tokens": 3 + i, **GREEDY}) for i in range(3)]
    items = list(
        engine.generate(
            input_ids=[a.prompt for a in many],
            sampling_params=[a.params for a in many],
            stream=True,
        )
    )
    referee = make_referee()
    for i, ask in enumerate(many):
        own = [item for item in items if item["index"] == i]
        assert [len(item["output_ids"]) for item in own] == list(range(1, 4 + i))
        referee.judge(ask, own[-1])


def test_coroutines_share_the_engine(engine: Engine, asks: type, make_referee: Callable) -> None:
    many = [asks([5 + i, 9], {"max_new_tokens": 6, **GREEDY}) for i in range(6)]

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(engine.async_generate(input_ids=a.prompt, sampling_params=a.params) for a in many),
            engine.async_generate(
                input_ids=[a.prompt for a in many], sampling_params=many[0].params
            ),
        )

    *single, together = asyncio.run(main())
    referee = make_referee()
    for ask, one, other in zip(many, single, together, strict=True):
        referee.judge(ask, one)
        assert other["output_ids"] == one["output_ids"]


def test_an_asynchronous_stream(engine: Engine, asks: type, make_referee: Callable) -> None:
    ask = asks([5, 9, 31], {"max_new_tokens": 9, **GREEDY})

    async def main() -> list[dict[str, Any]]:
        stream = await engine.async_generate(
            input_ids=ask.prompt, sampling_params=ask.params, stream=True
        )
        return [item async for item in stream]

    items = asyncio.run(main())
    assert [len(item["output_ids"]) for item in items] == list(range(1, 10))
    make_referee().judge(ask, items[-1])


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_a_seed_gives_the_same_tokens_in_any_company(engine: Engine, seed: int) -> None:
    params = {"max_new_tokens": 12, "temperature": 1.2, "sampling_seed": seed, "ignore_eos": True}
    alone = engine.generate(input_ids=[5, 9], sampling_params=params)["output_ids"]
    others = [{"max_new_tokens": 9, "temperature": 0.7, "top_k": 5}, params, params, GREEDY]
    company = engine.generate(input_ids=[[7, 7, 7], [5, 9], [5, 9], [5, 9]], sampling_params=others)
    assert company[1]["output_ids"] == company[2]["output_ids"] == alone
    assert company[3]["output_ids"][:12] != alone


@LOOPS
def test_penalties_without_overlap_are_exact(
    overlap: bool, paths: Any, make_referee: Callable
) -> None:
    """Under overlap they lag behind by a token, as upstream's do; `min_new_tokens` holds in both."""
    params = {
        "max_new_tokens": 30,
        "min_new_tokens": 6,
        "temperature": 0,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.3,
        "stop_token_ids": list(range(32, 64)),
    }
    with Engine(
        paths.target, skip_tokenizer_init=True, disable_overlap_schedule=not overlap
    ) as engine:
        plain = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0}
        results = engine.generate(
            input_ids=[[5, 9, 31], [5, 9, 31], [60]], sampling_params=[params, plain, params]
        )
    for prompt, result in zip(([5, 9, 31], [60]), (results[0], results[2]), strict=True):
        ids = result["output_ids"]
        assert len(ids) >= 6
        assert all(token < 32 for token in ids[:5])
        if not overlap:
            _check_penalties(make_referee().logits(prompt + ids)[len(prompt) - 1 :], ids, params)


def _check_penalties(rows: torch.Tensor, ids: list[int], params: dict[str, Any]) -> None:
    for n, (token, row) in enumerate(zip(ids, rows, strict=False)):
        x = row.clone()
        for t in set(ids[:n]):
            x[t] -= params["frequency_penalty"] * ids[:n].count(t) + params["presence_penalty"]
            x[t] *= params["repetition_penalty"] if x[t] < 0 else 1 / params["repetition_penalty"]
        if n < params["min_new_tokens"]:
            x[[2, *params["stop_token_ids"]]] = -torch.inf
        assert x[token] > x.max() - 1e-3


# --- Text ---------------------------------------------------------------------------------------


def test_text_goes_in_and_comes_out(text_engine: Engine, ascii_only: dict[str, float]) -> None:
    params = {"max_new_tokens": 12, "logit_bias": ascii_only, **GREEDY}
    text = "the thing"
    ids = text_engine.tokenizer.encode(text)
    one = text_engine.generate(text, params)
    assert one["meta_info"]["prompt_tokens"] == len(ids)
    assert one["text"] == text_engine.tokenizer.decode(one["output_ids"])
    other, _ = text_engine.generate(prompt=[text, "in"], sampling_params=params)
    by_id = text_engine.generate(input_ids=ids, sampling_params=params)
    assert one["text"] == other["text"] == by_id["text"]


@pytest.mark.parametrize("trim", [True, False])
def test_an_end_of_text_is_not_part_of_the_text(text_engine: Engine, trim: bool) -> None:
    def run(**extra: Any) -> dict[str, Any]:
        params = {"max_new_tokens": 8, "temperature": 0, "skip_special_tokens": False, **extra}
        return text_engine.generate("the", params)

    free = run(ignore_eos=True)["output_ids"]
    stop = free[4]
    end = free.index(stop) + 1
    result = run(stop_token_ids=[stop], no_stop_trim=not trim)
    assert result["output_ids"] == free[:end]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert result["meta_info"]["completion_tokens"] == end
    shown = free[: end - trim]
    assert result["text"] == text_engine.tokenizer.decode(shown, skip_special_tokens=False)


def draw_stops(rng: random.Random, text: str) -> list[str]:
    """Pieces of `text`, and something that is not in it."""
    pieces = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text))
        pieces.append(text[start : start + rng.randint(1, 5)])
    return [*pieces, "\x01never"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("trim", [True, False], ids=["trimmed", "whole"])
def test_stop_texts_end_the_text(
    seed: int, trim: bool, text_engine: Engine, ascii_only: dict[str, float]
) -> None:
    rng = random.Random(seed)
    params = {
        "max_new_tokens": 40,
        "temperature": 0.8,
        "sampling_seed": seed,
        "logit_bias": ascii_only,
        "ignore_eos": True,
    }
    free = text_engine.generate("in the", params)
    text, decode = free["text"], text_engine.tokenizer.decode
    stops = draw_stops(rng, text)
    # The reference: the first token behind which the text holds a stop text, and the first of them.
    tokens = next(
        n for n in range(1, 41) if any(s in decode(free["output_ids"][:n]) for s in stops)
    )
    known = decode(free["output_ids"][:tokens])
    first = min((s for s in stops if s in known), key=known.index)
    expected = known[: known.index(first)] if trim else known

    params |= {"stop": stops, "no_stop_trim": not trim}
    result = text_engine.generate("in the", params)
    assert result["output_ids"] == free["output_ids"][:tokens]
    assert result["text"] == expected
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}

    # A stream ends with the same, and never showed what belongs to a stop text.
    items = list(text_engine.generate("in the", params, stream=True))
    assert items[-1]["text"] == expected
    for item in items:
        assert expected.startswith(item["text"])


def test_a_stop_text_may_be_in_a_token_twice(text_engine: Engine) -> None:
    (oo,) = text_engine.tokenizer.encode("oo")
    params = {"stop": "o", "logit_bias": {str(oo): 100.0}, "max_new_tokens": 5}
    result = text_engine.generate("the", params)
    assert (result["output_ids"], result["text"]) == ([oo], "")
    result = text_engine.generate("the", {**params, "no_stop_trim": True})
    assert result["text"] == "oo"


def test_a_stream_of_text_only_grows(text_engine: Engine) -> None:
    """The dummy model writes bytes that are mostly broken characters."""
    params = {"max_new_tokens": 60, "temperature": 1.5, "ignore_eos": True}
    for seed in range(5):
        params["sampling_seed"] = seed
        items = list(text_engine.generate("the", params, stream=True))
        for earlier, later in itertools.pairwise(items):
            assert later["text"].startswith(earlier["text"])
        assert items[-1]["text"] == text_engine.generate("the", params)["text"]
        assert items[-1]["text"] == text_engine.tokenizer.decode(items[-1]["output_ids"])


# --- Score --------------------------------------------------------------------------------------


def test_scores_are_the_models_probabilities(engine: Engine, make_referee: Callable) -> None:
    referee = make_referee()
    query, items, labels = [5, 9], [[31], [7, 8, 40], [2]], [11, 3, 60]
    for item_first in (False, True):
        rows = [
            referee.logits(item + query if item_first else query + item)[-1].softmax(-1)
            for item in items
        ]
        scores = engine.score(query, items, labels, item_first=item_first)
        for row, got in zip(rows, scores, strict=True):
            assert got == pytest.approx(row[labels].tolist(), abs=1e-5)
        scores = engine.score(query, items, labels, apply_softmax=True, item_first=item_first)
        for row, got in zip(rows, scores, strict=True):
            assert got == pytest.approx((row[labels] / row[labels].sum()).tolist(), abs=1e-5)
            assert sum(got) == pytest.approx(1.0)


def test_one_item_may_stand_for_itself(engine: Engine, text_engine: Engine) -> None:
    assert engine.score([5], [31, 7], [3]) == engine.score([5], [[31, 7]], [3])
    tokenizer = text_engine.tokenizer
    assert text_engine.score("the ", "thing", [5, 6]) == text_engine.score(
        "the ", ["thing"], [5, 6]
    )
    assert text_engine.score("the ", "thing", [5, 6])[0] == pytest.approx(
        text_engine.score(tokenizer.encode("the thing"), [[]], [5, 6])[0]
    )


def test_labels_may_come_twice_and_in_any_order(engine: Engine) -> None:
    ((a, b, c),) = engine.score([5], [[9]], [7, 3, 7])
    assert a == c != b


def test_labels_that_are_all_next_to_impossible_have_shares_too() -> None:
    pairs = [(-2000.0, 3, None), (-2000.0 - math.log(3), 5, None)]
    meta = {"finish_reason": {"type": "length"}, "output_token_ids_logprobs": [pairs]}
    scores = Engine._label_scores({"meta_info": meta}, [3, 5], apply_softmax=True)
    assert scores == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("labels", [None, (), "ab", torch.tensor([1, 2])])
def test_labels_are_a_list(labels: Any, engine: Engine) -> None:
    with pytest.raises(ValueError, match="label_token_ids must be a list of at least one"):
        engine.score([5], [[6]], labels)


@pytest.mark.parametrize("items", [None, 5, iter([[6]])])
def test_items_are_a_list_or_a_text(items: Any, engine: Engine) -> None:
    with pytest.raises(ValueError, match="items must be a string or a list, got"):
        engine.score([5], items, [7])


def test_nothing_to_score(engine: Engine) -> None:
    assert engine.score([5], [], [3]) == []
    with pytest.raises(
        ValueError, match="label_token_ids must be a list of at least one token id, got"
    ):
        engine.score([5], [[9]], [])
    with pytest.raises(ValueError, match="got 64"):
        engine.score([5], [[9]], [64])


# --- Refused at the door ------------------------------------------------------------------------

IDS = {"input_ids": [5, 9]}
NAN = float("nan")
BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of prompt and input_ids"),
    ({"prompt": "x", **IDS}, "exactly one of prompt and input_ids"),
    ({"prompt": 5}, "prompt must be a string or a list of strings, got 5"),
    ({"prompt": ["x", 5]}, "prompt must be a string or a list of strings"),
    ({"prompt": "text"}, "this engine has no tokenizer"),
    ({"input_ids": (5, 9)}, r"input_ids must be a list, got \(5, 9\)"),
    ({"input_ids": "59"}, "input_ids must be a list"),
    ({"input_ids": []}, "input_ids must not be empty"),
    ({"input_ids": [[5], []]}, "prompt 1: input_ids must not be empty"),
    ({"input_ids": [[5], 9]}, "a list of integers or a list of such lists"),
    ({"input_ids": [5, [9]]}, r"integers in \[0, 64\), got \[9\]"),
    ({"input_ids": [5, 64]}, r"integers in \[0, 64\), got 64"),
    ({"input_ids": [-1]}, "got -1"),
    ({"input_ids": [5, True]}, "got True"),
    ({"input_ids": [5, 9.0]}, "got 9.0"),
    ({"input_ids": [None]}, "got None"),
    ({"input_ids": [[5], [5, "x"]]}, "prompt 1: .*got 'x'"),
    ({"input_ids": [5] * 256}, "256 tokens, but this engine takes at most 255"),
    ({"sampling_params": "greedy", **IDS}, "sampling_params must be a dict, got 'greedy'"),
    ({"sampling_params": [{}, {}], **IDS}, "sampling_params has 2 entries for 1 prompts"),
    ({"sampling_params": {"colour": 1}, **IDS}, "colour"),
    ({"sampling_params": {"temperature": NAN}, **IDS}, "temperature must be .*got nan"),
    ({"sampling_params": {"max_new_tokens": -1}, **IDS}, "max_new_tokens must be .*got -1"),
    ({"sampling_params": {"stop": "x"}, **IDS}, r"stop=\['x'\] needs a tokenizer"),
    ({"sampling_params": {"stop_token_ids": [64]}, **IDS}, "stop_token_ids must .*got 64"),
    ({"sampling_params": {"logit_bias": {"64": 1}}, **IDS}, "logit_bias must .*got 64"),
    ({"logprob_start_len": -2, **IDS}, r"logprob_start_len must be in \[-1, 2\], got -2"),
    ({"logprob_start_len": 3, **IDS}, "got 3"),
    ({"logprob_start_len": 1.0, **IDS}, "logprob_start_len must be .*got 1.0"),
    ({"logprob_start_len": True, **IDS}, "logprob_start_len must be .*got True"),
    ({"top_logprobs_num": -1, **IDS}, r"top_logprobs_num must be in \[0, 64\], got -1"),
    ({"top_logprobs_num": 65, **IDS}, "got 65"),
    ({"top_logprobs_num": 2.5, **IDS}, "got 2.5"),
    ({"top_logprobs_num": [1, 2], **IDS}, "top_logprobs_num has 2 entries for 1 prompts"),
    (
        {"token_ids_logprob": [64], **IDS},
        r"token_ids_logprob must hold integers in \[0, 64\), got 64",
    ),
    ({"token_ids_logprob": [True], **IDS}, "got True"),
    ({"token_ids_logprob": [[None]], **IDS}, "got None"),
    ({"token_ids_logprob": 5, **IDS}, "token_ids_logprob must be a list, got 5"),
    ({"token_ids_logprob": [[1], [2]], **IDS}, "token_ids_logprob has 2 entries for 1 prompts"),
    ({"return_logprob": [True, True], **IDS}, "return_logprob has 2 entries for 1 prompts"),
    ({"return_logprob": "no", **IDS}, "return_logprob must be True or False, got 'no'"),
    ({"return_hidden_states": 1, **IDS}, "return_hidden_states must be True or False, got 1"),
    (
        {"return_hidden_states": [True, True], **IDS},
        "return_hidden_states has 2 entries for 1 prompts",
    ),
    (
        {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": list(range(64))}, **IDS},
        "min_new_tokens must be 0 where all tokens end the output, got 1",
    ),
    (
        {
            "sampling_params": {
                "min_new_tokens": 1,
                "stop_token_ids": [t for t in range(64) if t != 2],
            },
            **IDS,
        },
        "min_new_tokens must be 0 where all tokens end the output, got 1",
    ),
    ({"rid": 5, **IDS}, "rid must be a string of its own, got 5"),
    ({"rid": ["a", "a"], "input_ids": [[5], [9]]}, "rid must be a string of its own, got 'a'"),
    ({"rid": ["a"], "input_ids": [[5], [9]]}, "rid has 1 entries for 2 prompts"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_CALLS, ids=[str(i) for i in range(len(BAD_CALLS))]
)
def test_what_is_not_valid_is_refused_in_the_callers_face(
    arguments: dict[str, Any], message: str, engine: Engine
) -> None:
    forwards = engine.scheduler.forward_ct
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)
    with pytest.raises(ValueError, match=message):
        asyncio.run(engine.async_generate(**arguments))
    with pytest.raises(ValueError, match=message):
        engine.generate(stream=True, **arguments)
    assert engine.scheduler.forward_ct == forwards
    assert not engine._router._receivers


def test_to_stream_is_a_yes_or_no(engine: Engine) -> None:
    with pytest.raises(ValueError, match="stream must be True or False, got 'false'"):
        engine.generate(stream="false", **IDS)


def test_hidden_states_are_for_those_who_ask(engine: Engine) -> None:
    results = engine.generate(
        input_ids=[[5, 9], [7]],
        sampling_params={"max_new_tokens": 2},
        return_hidden_states=[False, True],
    )
    assert ["hidden_states" in r["meta_info"] for r in results] == [False, True]


@pytest.mark.parametrize(
    ("query", "items", "said"),
    [
        ("abc", [[1, 2]], r"items \[1, 2\]"),
        ([1], ["x"], "items 'x'"),
        (None, [[1]], "query None"),
        (5, [[1]], "query 5"),
        ([1], [[1], 7], "items 7"),
    ],
)
def test_text_and_ids_are_not_mixed_in_a_score(
    query: Any, items: Any, said: str, engine: Engine
) -> None:
    with pytest.raises(ValueError, match=f"query and items must both be .* got {said}"):
        engine.score(query, items, [5])


def test_parameters_that_change_later_change_nothing(text_engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=0, ignore_eos=True)
    expected = text_engine.generate("abc", params)["text"]
    before = dict(vars(params))
    stream = text_engine.generate("abc", params, stream=True)
    next(stream)
    assert vars(params) == before
    params.stop_strs = [expected[0]]
    *_, last = stream
    assert last["text"] == expected


def test_what_a_caller_changes_later_changes_nothing(engine: Engine) -> None:
    """Lists that were given, and containers of parameters; also while the request still waits."""
    named = [1, 2]
    stops = SamplingParams(
        max_new_tokens=250, temperature=0, stop_token_ids=[2], logit_bias={3: 1.0, 2: -1e9}
    )
    arguments = {"input_ids": [5, 9], "return_logprob": True}
    expected = engine.generate(sampling_params=stops, token_ids_logprob=[1, 2], **arguments)
    stream = engine.generate(
        sampling_params=stops, token_ids_logprob=named, stream=True, **arguments
    )
    next(stream)
    named.append(10**6)
    stops.stop_token_ids.update(range(64))
    stops.logit_bias[10**6] = 1.0
    *_, last = stream
    assert last["output_ids"] == expected["output_ids"]
    ids = [[t for _, t, _ in row] for row in last["meta_info"]["output_token_ids_logprobs"]]
    assert ids == [[1, 2]] * len(last["output_ids"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", "x", "max_new_tokens must be an integer of at least 0, got 'x'"),
        ("max_new_tokens", -3, "got -3"),
        ("sampling_seed", 2**64, "sampling_seed must be"),
        ("temperature", NAN, "temperature must be .*got nan"),
        ("top_k", 0, "top_k must be"),
        ("min_new_tokens", 7, "min_new_tokens must be at most max_new_tokens"),
        ("logit_bias", {"a": 1}, "logit_bias must"),
    ],
)
def test_parameters_are_checked_as_they_are_now(
    field: str, value: Any, message: str, engine: Engine
) -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    setattr(params, field, value)
    with pytest.raises(ValueError, match=message):
        engine.generate(sampling_params=params, **IDS)


@pytest.mark.parametrize("rid", [7, ["a"], torch.tensor([1, 2])])
def test_a_name_to_abort_is_a_string(rid: Any, engine: Engine) -> None:
    with pytest.raises(ValueError, match="rid must be a string, got"):
        engine.abort_request(rid)


@pytest.mark.parametrize(
    "arguments", [{"input_ids": [10**5000]}, {"logprob_start_len": 10**5000, **IDS}]
)
def test_a_huge_number_is_refused_by_the_name_of_its_field(
    arguments: dict[str, Any], engine: Engine
) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be .*got <int>"):
        engine.generate(**arguments)


def test_a_stop_text_is_found_around_ids_that_no_token_has(text_engine: Engine) -> None:
    a, b = text_engine.tokenizer.encode("ab")
    nothing = 290
    params = {
        "max_new_tokens": 12,
        "ignore_eos": True,
        "temperature": 1000.0,
        "logit_bias": {str(t): 1e5 for t in (a, b, nothing)},
    }
    found = 0
    for seed in range(40):
        ids = text_engine.generate(input_ids=[5], sampling_params={**params, "sampling_seed": seed})
        text = ids["text"]
        stopped = text_engine.generate(
            input_ids=[5], sampling_params={**params, "sampling_seed": seed, "stop": "ab"}
        )
        assert stopped["text"] == text.split("ab")[0]
        kinds = [t for t in ids["output_ids"] if t != nothing]
        ends = [i for i, pair in enumerate(itertools.pairwise(kinds)) if pair == (a, b)]
        if ends:
            place = [i for i, t in enumerate(ids["output_ids"]) if t != nothing][ends[0] + 1]
            assert stopped["output_ids"] == ids["output_ids"][: place + 1]
            found += place > ends[0] + 2
    assert found > 3


def test_text_that_cannot_be_encoded_is_refused(text_engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt must be valid Unicode"):
        text_engine.generate(["the", "\ud800"])
    with pytest.raises(ValueError, match="input_ids must not be empty"):
        text_engine.generate("")


def test_others_notice_nothing_of_what_is_refused(
    engine: Engine, asks: type, make_referee: Callable
) -> None:
    many = [asks([5 + i, 9, 31], {"max_new_tokens": 60, **GREEDY}) for i in range(3)]
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        results[i] = engine.generate(input_ids=many[i].prompt, sampling_params=many[i].params)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    refused = 0
    while any(thread.is_alive() for thread in threads):
        arguments, message = BAD_CALLS[refused % len(BAD_CALLS)]
        with pytest.raises(ValueError, match=message):
            engine.generate(**arguments)
        refused += 1
        # A thread that never rests takes the interpreter from the engine's for 5 ms an operation.
        time.sleep(0.002)
    for thread in threads:
        thread.join()
    assert refused
    referee = make_referee()
    for i, ask in enumerate(many):
        referee.judge(ask, results[i])


# --- Names and aborts ---------------------------------------------------------------------------

LONG = {"max_new_tokens": 250, **GREEDY}


def test_a_name_is_in_use_until_its_request_ends(engine: Engine) -> None:
    stream = engine.generate(input_ids=[5, 9], sampling_params=LONG, rid="x", stream=True)
    first = next(stream)
    assert first["meta_info"]["id"] == "x"
    for other in ("x", ["y", "x"]):
        ids = [[7], [8]] if isinstance(other, list) else [7]
        with pytest.raises(ValueError, match="rid 'x' is in use"):
            engine.generate(input_ids=ids, rid=other, sampling_params={"max_new_tokens": 1})
    *_, last = stream
    assert len(last["output_ids"]) == 250
    again = engine.generate(input_ids=[7], rid="x", sampling_params={"max_new_tokens": 1})
    assert again["meta_info"]["id"] == "x"
    # Nothing of the call that was refused has run.
    assert engine.generate(input_ids=[7], rid="y", sampling_params={"max_new_tokens": 1})


def test_a_stream_that_is_left_behind_does_not_end_a_namesake(engine: Engine) -> None:
    """The first one has ended, unread, so the second may have its name."""
    short = {"max_new_tokens": 2, **GREEDY}
    left = engine.generate(input_ids=[5, 9], sampling_params=short, rid="x", stream=True)
    wait_until(lambda: "x" not in engine._router._receivers)
    stream = engine.generate(input_ids=[7], sampling_params=LONG, rid="x", stream=True)
    next(stream)
    del left
    *_, last = stream
    assert len(last["output_ids"]) == 250
    assert last["meta_info"]["finish_reason"]["type"] == "length"


def test_an_abort_ends_a_request_with_what_it_has(
    engine: Engine, asks: type, make_referee: Callable
) -> None:
    ask = asks([5, 9], LONG, "x", aborted=True)
    stream = engine.generate(input_ids=ask.prompt, sampling_params=LONG, rid="x", stream=True)
    for _ in range(3):
        next(stream)
    engine.abort_request("x")
    *_, last = stream
    assert last["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    assert 3 <= len(last["output_ids"]) < 250
    make_referee().judge(ask, last)


def test_an_abort_of_nobody_is_no_error(engine: Engine) -> None:
    engine.abort_request("nobody")
    with pytest.raises(ValueError, match="rid is required unless abort_all=True"):
        engine.abort_request()
    assert engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})["output_ids"]


def test_an_abort_of_all(engine: Engine) -> None:
    streams = [
        engine.generate(input_ids=[5 + i], sampling_params=LONG, stream=True) for i in range(3)
    ]
    for stream in streams:
        next(stream)
    engine.abort_request(abort_all=True)
    for stream in streams:
        *_, last = stream
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})["output_ids"]


def leave_by_closing(stream: Iterator[Any]) -> None:
    next(stream)
    stream.close()


def leave_by_forgetting(stream: Iterator[Any]) -> None:
    next(stream)
    del stream


def never_begin(stream: Iterator[Any]) -> None:
    del stream


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_forgetting, never_begin])
def test_who_leaves_a_stream_ends_its_request(leave: Callable, engine: Engine) -> None:
    forwards = engine.scheduler.forward_ct
    for i in range(5):
        many = {"input_ids": [[5 + i], [6 + i]]} if i % 2 else {"input_ids": [5 + i]}
        leave(engine.generate(sampling_params=LONG, stream=True, **many))
        wait_until(lambda: is_idle(engine))
    # Had they run to their ends, there would be 5 * 250.
    assert engine.scheduler.forward_ct - forwards < 500


@pytest.mark.parametrize(
    "way", ["cancel", "cancel stream", "close stream", "break", "never begin", "timeout"]
)
def test_a_coroutine_that_is_gone_ends_its_request(way: str, engine: Engine) -> None:
    async def leave() -> None:
        arguments = {"input_ids": [5, 9], "sampling_params": LONG}
        if way == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(engine.async_generate(**arguments), 0.02)
        elif way == "cancel":
            task = asyncio.create_task(engine.async_generate(**arguments))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "cancel stream":

            async def consume() -> None:
                async for _ in await engine.async_generate(stream=True, **arguments):
                    pass

            task = asyncio.create_task(consume())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = await engine.async_generate(stream=True, **arguments)
            if way == "never begin":
                return
            async for _ in stream:
                break
            if way == "close stream":
                await stream.aclose()

    forwards = engine.scheduler.forward_ct
    for _ in range(4):
        asyncio.run(leave())
        wait_until(lambda: is_idle(engine))
    assert engine.scheduler.forward_ct - forwards < 500


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed_is_no_harm(engine: Engine) -> None:
    """Results come for a request whose event loop has gone without a word."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.async_generate(input_ids=[5, 9], sampling_params=LONG))
    loop.call_later(0.02, loop.stop)
    loop.run_forever()
    task._log_destroy_pending = False
    loop.close()
    assert engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 3})["output_ids"]
    engine.abort_request(abort_all=True)
    wait_until(lambda: is_idle(engine))
    # Nobody holds the coroutine any more: its complaint about the closed loop belongs to this test.
    del task
    gc.collect()
