"""Logprobs and hidden states, in every mode, against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang.srt.entrypoints.engine import Engine

HIDDEN = 32
PROMPT = [5, 9, 31, 7, 7, 20, 3, 11, 45, 60, 2, 8, 33, 1, 17, 29, 52, 4, 6, 41, 38]
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "normal": {"disable_overlap_schedule": True},
    "chunks": {"chunked_prefill_size": 4},
    "chunks-normal": {"chunked_prefill_size": 4, "disable_overlap_schedule": True},
    "mixed": {"chunked_prefill_size": 8, "enable_mixed_chunk": True, "page_size": 4},
    "chain": {"speculative_algorithm": "EAGLE", "chunked_prefill_size": 8},
    "tree": {"speculative_algorithm": "EAGLE", **TREE},
}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, paths: Any) -> Iterator[Engine]:
    """An engine of each kind."""
    arguments = dict(KINDS[request.param])
    if "speculative_algorithm" in arguments:
        arguments["speculative_draft_model_path"] = paths.draft
    with Engine(
        paths.target, skip_tokenizer_init=True, max_total_tokens=1024, **arguments
    ) as engine:
        yield engine


def generate_together(engine: Engine, asks: list[Any]) -> list[dict[str, Any]]:
    """One call for all of them."""
    return engine.generate(
        input_ids=[a.prompt for a in asks],
        sampling_params=[a.params for a in asks],
        return_logprob=[a.return_logprob for a in asks],
        logprob_start_len=[a.logprob_start_len for a in asks],
        top_logprobs_num=[a.top_logprobs_num for a in asks],
        token_ids_logprob=[a.token_ids_logprob for a in asks],
    )


@pytest.mark.parametrize("start", [-1, 0, 1, 3, 4, 5, 8, 19, 20, 21])
def test_input_and_output_logprobs(
    start: int, engine: Engine, asks: type, make_referee: Callable
) -> None:
    ask = asks(
        PROMPT,
        {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=3,
        token_ids_logprob=[40, 2, 40],
    )
    result = engine.generate(
        input_ids=PROMPT, sampling_params=ask.params, **ask.logprob_arguments()
    )
    make_referee().judge(ask, result)


@pytest.mark.parametrize("top", [0, 1, 64])
@pytest.mark.parametrize("named", [None, [], [63]])
def test_candidates_that_are_asked_for(
    top: int, named: list[int] | None, engine: Engine, asks: type, make_referee: Callable
) -> None:
    for limit in (0, 3):
        ask = asks(
            PROMPT,
            {"max_new_tokens": limit, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=2,
            top_logprobs_num=top,
            token_ids_logprob=named,
        )
        result = engine.generate(
            input_ids=PROMPT, sampling_params=ask.params, **ask.logprob_arguments()
        )
        make_referee().judge(ask, result)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_what_a_scoring_request_says_does_not_depend_on_its_company(
    temperature: float, engine: Engine, asks: type, make_referee: Callable
) -> None:
    """Temperature and bias count, alone and beside a request that wants tokens."""
    ask = asks(
        PROMPT,
        {"max_new_tokens": 0, "temperature": temperature, "logit_bias": {"7": 3.5, "8": -2.0}},
        return_logprob=True,
        top_logprobs_num=5,
        token_ids_logprob=[7, 8, 9],
    )
    beside = asks([9, 4], {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 3})
    for company in ([], [beside]):
        together = [*company, ask]
        referee = make_referee()
        for a, result in zip(together, generate_together(engine, together), strict=True):
            referee.judge(a, result)


def test_a_batch_in_which_everyone_asks_for_something_else(
    engine: Engine, asks: type, make_referee: Callable
) -> None:
    rng = random.Random(0)
    many = []
    for i in range(12):
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 20))]
        temperature = rng.choice([0, 0.5, 1.0, 2.0])
        params = {
            "max_new_tokens": rng.randint(1, 8),
            "temperature": temperature,
            "sampling_seed": i,
        }
        if i % 4 == 0:
            params["logit_bias"] = {"7": 2.5, "8": -100}
        many.append(
            asks(
                prompt,
                params,
                return_logprob=i % 3 != 0,
                logprob_start_len=rng.randint(-1, len(prompt)),
                top_logprobs_num=rng.randint(0, 4),
                token_ids_logprob=rng.choice([None, [3], [9, 8, 7]]),
            )
        )
    referee = make_referee()
    for ask, result in zip(many, generate_together(engine, many), strict=True):
        referee.judge(ask, result)
        assert ("output_token_logprobs" in result["meta_info"]) == ask.return_logprob
    assert referee.num_ties <= 1


def check_hidden_states(referee: Any, prompt: list[int], result: dict[str, Any]) -> None:
    """The prompt's in one list, then one for each output token but the last, which did not run."""
    ids = result["output_ids"]
    first, *others = result["meta_info"]["hidden_states"]
    assert len(first) == len(prompt)
    assert len(others) == max(len(ids) - 1, 0)
    got = torch.tensor([*first, *others], dtype=torch.float64)
    assert got.shape == (len(prompt) + len(others), HIDDEN)
    expected = referee.hidden_states(prompt + ids)[: len(got)]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_hidden_states(engine: Engine, make_referee: Callable) -> None:
    params = {"temperature": 0, "ignore_eos": True}
    limits = [9, 0, 5, 1]
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:9], [4]]
    results = engine.generate(
        input_ids=prompts,
        sampling_params=[{"max_new_tokens": n, **params} for n in limits],
        return_hidden_states=True,
    )
    for prompt, limit, result in zip(prompts, limits, results, strict=True):
        assert len(result["output_ids"]) == limit
        check_hidden_states(make_referee(), prompt, result)
    assert (
        "hidden_states" not in engine.generate(input_ids=[4], sampling_params=params)["meta_info"]
    )


def test_hidden_states_of_a_prompt_in_chunks_beside_a_decode(
    engine: Engine, make_referee: Callable
) -> None:
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    stream = engine.generate(
        input_ids=[7, 8], sampling_params=params, return_hidden_states=True, stream=True
    )
    next(stream)
    results = engine.generate(
        input_ids=[PROMPT, PROMPT[::-1]], sampling_params=params, return_hidden_states=True
    )
    *_, last = stream
    for prompt, result in (([7, 8], last), (PROMPT, results[0]), (PROMPT[::-1], results[1])):
        check_hidden_states(make_referee(), prompt, result)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
@pytest.mark.parametrize("chunk", [8, -1])
def test_what_is_known_is_known_once_after_a_retraction(
    overlap: bool, chunk: int, paths: Any, asks: type, make_referee: Callable
) -> None:
    many = [
        asks(
            PROMPT[i : i + 9],
            {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=3,
            top_logprobs_num=2,
        )
        for i in range(5)
    ]
    with Engine(
        paths.target,
        skip_tokenizer_init=True,
        max_total_tokens=64,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        schedule_conservativeness=0.01,
    ) as engine:
        results = engine.generate(
            input_ids=[a.prompt for a in many],
            sampling_params=many[0].params,
            return_hidden_states=True,
            **many[0].logprob_arguments(),
        )
    referee = make_referee(64)
    for ask, result in zip(many, results, strict=True):
        referee.judge(ask, result)
        check_hidden_states(referee, ask.prompt, result)
    assert sum(r["meta_info"]["retraction_count"] for r in results) > 0
