"""No transfer of a running engine blocks, but for the wait for results that is meant.

In every mode an engine on the fake device serves requests of all kinds, which come and go so that
batches are admitted, merged, filtered, mixed, retracted, aborted and finished. A ledger sees all of its
threads, and raises where something blocks: the engine would die of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lab.audit_transfers import one_thread
from lab.cases import DRAFT_SHAPES
from lab.fake_device import counted_copies
from lab.fake_engine import MEANT, watched_engine
from lab.models import random_prompts, write_tiny_model
from lab.transfer_ledger import Transfer, TransferLedger
from sglang.srt.managers.schedule_batch import ScheduleBatch

VOCAB = 64
SHAPE = {"vocab_size": VOCAB, "num_hidden_layers": 1}
LOOPS = {"overlap": {}, "normal": {"disable_overlap_schedule": True}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paged": {"page_size": 16},
    "chunked": {"chunked_prefill_size": 8},
    "mixed": {"chunked_prefill_size": 8, "enable_mixed_chunk": True},
    "chain": {"speculative_algorithm": "EAGLE", **DRAFT_SHAPES["chain"]},
    "chain-paged": {"speculative_algorithm": "EAGLE", "page_size": 4, **DRAFT_SHAPES["chain"]},
    "tree": {"speculative_algorithm": "EAGLE", **DRAFT_SHAPES["tree"]},
    "tree-chunked": {
        "speculative_algorithm": "EAGLE",
        "chunked_prefill_size": 8,
        **DRAFT_SHAPES["tree"],
    },
}
GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "ignore_eos": True, "sampling_seed": 3}
PENALIZED = {
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.3,
    "min_new_tokens": 3,
    "stop_token_ids": [7, 9],
}
PARAMS: list[dict[str, Any]] = [
    {"max_new_tokens": 5, **GREEDY},
    {"max_new_tokens": 9, **GREEDY, **PENALIZED},
    {"max_new_tokens": 4, **SAMPLED, "top_p": 0.8, "top_k": 20},
    {"max_new_tokens": 7, **SAMPLED, "min_p": 0.05, **PENALIZED},
    {"max_new_tokens": 3, **GREEDY, "logit_bias": {"5": 2.0, "17": -1.0}},
    {"max_new_tokens": 8, **GREEDY, "frequency_penalty": 0.5},
]
LOGPROBS: list[dict[str, Any]] = [
    {},
    {"return_logprob": True},
    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    {"return_logprob": True, "token_ids_logprob": [3, 8]},
    {"return_hidden_states": True},
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("tiny")
    return (
        write_tiny_model(root / "model", **SHAPE),
        write_tiny_model(root / "draft", draft=True, **SHAPE),
    )


def serve(engine: Any) -> list[dict[str, Any]]:
    """Requests of all kinds, in waves: a batch, single ones beside it, scoring, an abort."""
    results: list[dict[str, Any]] = []
    prompts = random_prompts(VOCAB, 14, len(PARAMS))
    results += engine.generate(input_ids=prompts, sampling_params=PARAMS)
    kinds = itertools.cycle(LOGPROBS)
    streams: list[Iterator[dict[str, Any]]] = []
    for prompt, params in zip(prompts, PARAMS, strict=True):
        # Each joins those that decode already.
        streams.append(
            engine.generate(
                input_ids=prompt,
                sampling_params=params,
                stream=True,
                rid=f"s{len(streams)}",
                **next(kinds),
            )
        )
        next(streams[-1])
    results.append(
        engine.generate(
            input_ids=prompts[0],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
        )
    )
    engine.abort_request("s1")
    return results + [list(stream)[-1] for stream in streams]


def serve_more_than_fits(engine: Any) -> list[dict[str, Any]]:
    """Requests that are admitted together and grow to twice the pool."""
    params = [{**p, "max_new_tokens": 36, "min_new_tokens": 36} for p in PARAMS[:4]]
    return engine.generate(
        input_ids=random_prompts(VOCAB, 4, len(params)), sampling_params=params, return_logprob=True
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("penalties", ["sparse", "dense"])
def test_no_transfer_blocks(penalties: str, loop: str, kind: str, paths: tuple[str, str]) -> None:
    args = {
        "max_total_tokens": 1024,
        "penalty_backend": penalties,
        **KINDS[kind],
        **LOOPS[loop],
    }
    ledger, _, results = run(args, paths)
    assert ledger.blocking() == []
    assert len(results) == len(PARAMS) * 2 + 1
    check_what_was_seen(ledger.transfers, loop)
    # Sparse penalties take tokens from the host only where it knows them before each step.
    is_fed = penalties == "dense" or (loop == "normal" and not speculates(kind))
    functions = {t.function for t in ledger.transfers}
    assert ("cumulate_penalty_output_tokens" in functions) == is_fed


def speculates(kind: str) -> bool:
    return "speculative_algorithm" in KINDS[kind]


@pytest.mark.parametrize("kind", ["plain", "mixed", "chain", "tree"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("penalties", ["sparse", "dense"])
def test_no_transfer_blocks_when_requests_start_over(
    penalties: str, loop: str, kind: str, paths: tuple[str, str]
) -> None:
    args = {
        "penalty_backend": penalties,
        "max_total_tokens": 128 if speculates(kind) else 88,
        **KINDS[kind],
        **LOOPS[loop],
    }
    ledger, retractions, _ = run(args, paths, serve_more_than_fits)
    assert ledger.blocking() == []
    assert retractions > 0


def run(
    args: dict[str, Any],
    paths: tuple[str, str],
    serve: Callable[[Any], list[dict[str, Any]]] = serve,
) -> tuple[TransferLedger, int, list[dict[str, Any]]]:
    """Serve under a ledger that raises once the engine stands."""
    model, draft = paths
    if "speculative_algorithm" in args:
        args["speculative_draft_model_path"] = draft
    with (
        one_thread(),
        counted_copies() as copies,
        TransferLedger(allow=MEANT) as ledger,
        watched_engine(
            model,
            ledger,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            schedule_conservativeness=0.05,
            **args,
        ) as engine,
    ):
        # Loading a model may block.
        ledger.transfers.clear()
        copies.clear()
        ledger.mode = "raise"
        results = serve(engine)
        retractions = engine.scheduler.num_retractions
    # Nothing crossed that the ledger did not see.
    assert sorted(copies) == sorted(
        (t.kind, t.nbytes) for t in ledger.transfers if t.kind != "SYNC"
    )
    return ledger, retractions, results


def check_what_was_seen(transfers: list[Transfer], loop: str) -> None:
    """The ledger looked at both threads, and at what is meant."""
    functions = {t.function for t in transfers}
    assert {"to_device_async", "to_host_async"} <= functions
    meant = [t for t in transfers if t.allowed]
    assert {t.kind for t in meant} == {"SYNC"}
    assert len(meant) == max(t.step for t in transfers)
    threads = {t.thread for t in transfers}
    assert len(threads) == (2 if loop == "overlap" else 1)


def test_a_transfer_that_blocks_would_be_noticed(
    paths: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test itself: put a construction back that blocks."""

    def cumulate(self: ScheduleBatch) -> None:
        tokens = [req.output_ids[-1] for req in self.reqs if req.output_ids] or [0]
        torch.tensor(tokens, device=self.device)

    monkeypatch.setattr(ScheduleBatch, "cumulate_penalty_output_tokens", cumulate)
    with pytest.raises(RuntimeError, match=r"blocking H2D tensor\(data, device\)"):
        run({"max_total_tokens": 1024, "penalty_backend": "dense"}, paths)
