"""Parameters of penalties, lengths, stops and biases, in every kind of engine.

What is not valid is refused with its field and its value, and nobody else notices. What is just valid
does what it says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.entrypoints.engine import Engine

VOCAB, EOS = 64, 2
NAN, INF = math.nan, math.inf
ALL = range(VOCAB)
NO_LIMIT = 10**9
KINDS = {
    "dense": {"disable_overlap_schedule": True},
    "dense-overlap-chain": {"speculative_num_steps": 3},
    "sparse": {"penalty_backend": "sparse", "disable_overlap_schedule": True},
    "sparse-overlap": {"penalty_backend": "sparse"},
    "sparse-overlap-tree": {
        "penalty_backend": "sparse",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 7,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, paths: Any) -> Iterator[Engine]:
    arguments = dict(KINDS[request.param])
    if "speculative_num_steps" in arguments:
        arguments["speculative_algorithm"] = "EAGLE"
        arguments["speculative_draft_model_path"] = paths.draft
    with Engine(
        paths.target,
        skip_tokenizer_init=True,
        max_total_tokens=2048,
        max_running_requests=8,
        **arguments,
    ) as engine:
        yield engine


# --- Refused ------------------------------------------------------------------------------------

NO_NUMBERS = [NAN, INF, -INF, np.float32(NAN), "1", b"1", True, np.True_, [1.0], {}, 1j, 10**400]
NO_NUMBERS += [torch.ones(()), np.array(1.0), np.timedelta64(1, "ns")]
NO_INTEGERS = [*NO_NUMBERS[:-4], 1.0, -0.0, np.float64(1), torch.ones((), dtype=torch.int64)]
BAD_VALUES = {
    "frequency_penalty": [*NO_NUMBERS, math.nextafter(2, INF), math.nextafter(-2, -INF), 10**5000],
    "presence_penalty": [*NO_NUMBERS, math.nextafter(2, INF), math.nextafter(-2, -INF), -3],
    "repetition_penalty": [*NO_NUMBERS, 0, 0.0, -0.0, -1, -5e-324, math.nextafter(2, INF)],
    "min_new_tokens": [*NO_INTEGERS, -1, -(10**5000), 129, 10**5000],
    "max_new_tokens": [*NO_INTEGERS, -1, -(10**5000)],
    "stop_token_ids": [5, 5.0, "5", b"5", True, {5: 1}, np.array([5]), torch.tensor([5]), range(5)],
    "logit_bias": [5, "5", [5], [(5, 1.0)], {5}, torch.zeros(VOCAB), np.zeros(VOCAB), NAN, True],
}
NO_IDS = [None, 5.0, NAN, "5", True, np.False_, -1, [5], VOCAB, 10**30, -(10**30), 10**5000]
NO_IDS += [torch.tensor(5), np.float32(5), np.timedelta64(5, "ns")]
NO_KEYS = [-1, "-1", "+1", " 1", "1.0", "1e1", "", "x", "٣", 1.0, True, None, (1,)]
NO_KEYS += [np.float64(1), torch.tensor(5), VOCAB, 10**30, 10**5000, "9" * 5000]

# Parameters, the field that is named, and the value that is shown.
BAD: list[tuple[dict[str, Any], str, Any]] = [
    *(({field: value}, field, value) for field, bad in BAD_VALUES.items() for value in bad),
    *(({"stop_token_ids": [*ALL, value]}, "stop_token_ids", value) for value in NO_IDS),
    *(({"logit_bias": {5: 1.0, key: 1.0}}, "logit_bias", key) for key in NO_KEYS),
    *(({"logit_bias": {3: 1.0, 5: v}}, "logit_bias[5]", v) for v in [None, 1e39, *NO_NUMBERS]),
    ({"logit_bias": {"5": NAN}}, "logit_bias['5']", NAN),
    ({"logit_bias": {str(VOCAB): 1.0}}, "logit_bias", VOCAB),
    ({"logit_bias": {5: 1.0, "5": 1.0}}, "logit_bias", "5"),
    ({"logit_bias": {"5": 1.0, "05": 1.0}}, "logit_bias", "05"),
    ({"min_new_tokens": 4, "max_new_tokens": 3}, "min_new_tokens", 4),
    ({"min_new_tokens": 1, "max_new_tokens": 0}, "min_new_tokens", 1),
    # Something has to be left to sample.
    ({"min_new_tokens": 1, "stop_token_ids": list(ALL)}, "min_new_tokens", 1),
    (
        {"min_new_tokens": 2, "stop_token_ids": set(ALL) - {EOS}, "ignore_eos": True},
        "min_new_tokens",
        2,
    ),
    (
        {"min_new_tokens": 10**5000, "max_new_tokens": None, "stop_token_ids": list(ALL)},
        "min_new_tokens",
        10**5000,
    ),
]


def refusals(engine: Engine, params: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is said to a request with `params`, and how that has to begin."""
    fine = {"max_new_tokens": 4}
    alone = {"input_ids": [5, 9], "sampling_params": params}
    several = {"input_ids": [[5], [9], [7]], "sampling_params": [fine, params, fine]}
    for arguments, start in ((alone, ""), (several, "prompt 1: ")):
        for stream in (False, True):
            with pytest.raises(ValueError) as error:
                engine.generate(**arguments, stream=stream)
            yield str(error.value), start
            with pytest.raises(ValueError) as error:
                asyncio.run(engine.async_generate(**arguments, stream=stream))
            yield str(error.value), start


def shown(value: Any) -> str:
    try:
        return repr(value)[:97]
    except ValueError:
        return f"<{type(value).__name__}>"


def test_what_is_not_valid_is_refused_and_nobody_notices(
    engine: Engine, asks: type, make_referee: Callable
) -> None:
    params = {"max_new_tokens": 230, "temperature": 0, "ignore_eos": True, "logit_bias": {7: -1.0}}
    others = [asks([5 + i, 9, 31], params) for i in range(3)]
    streams = [
        engine.generate(input_ids=a.prompt, sampling_params=params, stream=True) for a in others
    ]
    for stream in streams:
        next(stream)
    for bad, field, value in BAD:
        for message, start in refusals(engine, bad):
            assert message.startswith(f"{start}{field} must be "), bad
            assert f", got {shown(value)}" in message, bad
            assert len(message) < 300
    assert len(engine._router._receivers) <= len(others)
    referee = make_referee()
    for ask, stream in zip(others, streams, strict=True):
        *_, last = stream
        referee.judge(ask, last)
    assert not engine._router._receivers
    # The check for leaks runs when the engine is idle again; a leak is the engine's death.
    for _ in range(2):
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})


def test_what_is_refused_runs_nothing(engine: Engine) -> None:
    engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})
    forwards = engine.scheduler.forward_ct
    for bad, _, _ in BAD[::7]:
        assert len(list(refusals(engine, bad))) == 8
    assert engine.scheduler.forward_ct == forwards


def test_an_end_outside_the_vocabulary_is_no_token_that_is_masked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may name one. The only token that is left is sampled then."""
    monkeypatch.setattr(engine.scheduler, "eos_token_ids", {EOS, VOCAB})
    params = {"stop_token_ids": set(ALL) - {EOS, 7}, "min_new_tokens": 3, "max_new_tokens": 3}
    assert engine.generate(input_ids=[5], sampling_params=params)["output_ids"] == [7, 7, 7]


# --- Just valid ---------------------------------------------------------------------------------

EDGES: list[dict[str, Any]] = [
    {"repetition_penalty": 2},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 5e-324, "frequency_penalty": -2, "logit_bias": {9: 3e38, 8: -3e38}},
    {"frequency_penalty": 2},
    {"frequency_penalty": -2},
    {"presence_penalty": 2, "frequency_penalty": -0.0},
    {"presence_penalty": -2},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 2.0},
    {"min_new_tokens": 12, "max_new_tokens": 12},
    {"min_new_tokens": 12, "stop_token_ids": set(ALL) - {7}},
    {"min_new_tokens": 5, "stop_token_ids": set(ALL) - {7}},
    {"min_new_tokens": 5, "stop_token_ids": [5, 7, 9], "ignore_eos": True},
    {"min_new_tokens": 10**30, "max_new_tokens": None, "repetition_penalty": 0.5},
    {"min_new_tokens": 0, "stop_token_ids": list(ALL)},
    {"max_new_tokens": 0, "stop_token_ids": list(ALL)},
    {"max_new_tokens": 0, "frequency_penalty": 2, "logit_bias": dict.fromkeys(ALL, 3.0)},
    {"logit_bias": {t: t % 7 - 3 for t in ALL}, "frequency_penalty": 1},
    {"logit_bias": {t: 100 for t in ALL}},
    {"logit_bias": {str(t): -100 for t in ALL}},
    {"logit_bias": {5: 100}},
    {"logit_bias": {5: -100, 9: -0.0}},
    {"logit_bias": {t: 3.4e38 for t in ALL}},
    {"logit_bias": {t: -3.4e38 for t in ALL}, "min_new_tokens": 5},
    {"logit_bias": {}, "stop_token_ids": [], "stop": []},
    dict.fromkeys(BAD_VALUES),
]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_what_is_just_valid_does_what_it_says(
    temperature: float, engine: Engine, asks: type, make_referee: Callable
) -> None:
    # Dense penalties are upstream's. Of a factor that float32 has not, the referee knows no limit.
    is_exact = engine.server_args.penalty_backend == "sparse"
    base = {"max_new_tokens": 12, "temperature": temperature}
    many = [
        asks([5 + i, 9, 31], {**base, "sampling_seed": i, **params})
        for i, params in enumerate(EDGES)
    ]
    results = engine.generate(
        input_ids=[ask.prompt for ask in many],
        sampling_params=[ask.params for ask in many],
        return_logprob=True,
        top_logprobs_num=3,
    )
    referee = make_referee()
    for ask, result in zip(many, results, strict=True):
        ids, meta = result["output_ids"], result["meta_info"]
        for pairs in (meta["output_token_logprobs"], *meta["output_top_logprobs"]):
            assert all(-INF < logprob <= 0 for logprob, _, _ in pairs), ask
        assert set(ids) <= set(ALL), ask
        params = {name: value for name, value in ask.params.items() if value is not None}
        if is_exact and params.get("repetition_penalty", 1) > 1e-30:
            referee.judge(asks(ask.prompt, {"max_new_tokens": NO_LIMIT} | params), result)
