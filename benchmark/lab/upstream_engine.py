"""What a whole Engine answers, as JSON: ``python -m lab.upstream_engine {merge,texts} --model DIR``.

For an interpreter that runs the whole of a release of SGLang (``scripts/upstream/releases.py``) and
has one on its path. With ``--engine ours`` the same questions go to this project's package, which bears
the same name, in an interpreter of its own. ``scripts/upstream/engine_proof.py`` asks and compares.

``merge``
    A scoring request, and a generation request that is prefilled before the result of the scoring one is
    known: the situation of #21840. Where ``merge_batch`` forgets ``is_prefill_only``, the engine dies or
    the generation request never ends.
``texts``
    Greedy continuations of many prompts in one batch, with the logprobs of the two best candidates at
    each position, and the logprobs of a text that is scored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lab import upstream

# The scoring prompt fills a step's budget to the last token. So the generation request is prefilled in
# the step behind it, whether it arrives together with it or at any time while its forward runs, which is
# half a second and more. No sleep decides.
SCORE_LEN: Final = 1200
SCORE_IDS: Final = tuple(5 + i % 1000 for i in range(SCORE_LEN))
PROMPT: Final = "The capital of France is"
GENERATION: Final = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}
ROUNDS: Final = 2
# Before a round, so that the answer before it has left `running_batch`; and after all, so that the idle
# engine has checked its memory. Both take a step or two.
IDLE_S: Final = 1.0

TEXT: Final = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}

SETTINGS: Final = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 4096,
    "max_running_requests": 32,
    "chunked_prefill_size": SCORE_LEN,
    "max_prefill_tokens": SCORE_LEN,
    # A release tells at this level which batches it runs.
    "log_level": "info",
}
# What a release needs besides to start without a GPU, and to compute everything it is asked for.
UPSTREAM_SETTINGS: Final = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "grammar_backend": "none",
    "sampling_backend": "pytorch",
    "skip_server_warmup": True,
}
# Threads that spin at a barrier stand still for seconds beside another busy process.
VARIABLES: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
UPSTREAM_VARIABLES: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    # torch.compile takes a stub of Triton for Triton, and has nothing to win in a minute.
    "TORCHDYNAMO_DISABLE": "1",
}


class _Hung(Exception):
    """A request does not end."""


# --- Engines ------------------------------------------------------------------------------------


@contextmanager
def running_engine(model: Path, ours: bool) -> Iterator[Any]:
    """An Engine of the package on the path, which is shut down at the end."""
    os.environ.update(VARIABLES)
    if not ours:
        os.environ.update(UPSTREAM_VARIABLES)
        upstream.stub_what_is_absent()
        _stub_in_children()
    import sglang

    settings = SETTINGS if ours else SETTINGS | UPSTREAM_SETTINGS
    engine = sglang.Engine(model_path=str(model), **settings)
    try:
        yield engine
    finally:
        engine.shutdown()


def _stub_in_children() -> None:
    """Let the processes that the Engine starts find the same stubs.

    The folder stays: the Engine may kill this process. Who minds sets ``TMPDIR``.
    """
    folder = Path(tempfile.mkdtemp(prefix="stubs-"))
    lines = ("from lab.upstream import stub_what_is_absent", "stub_what_is_absent()", "")
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    path = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in path if part)


def _wait_for(engine: Any, awaitable: Any) -> Any:
    """Run a coroutine to its end, on upstream's own loop where the engine has one."""
    if (loop := getattr(engine, "loop", None)) is not None:
        return loop.run_until_complete(awaitable)
    return asyncio.run(awaitable)


# --- Scenarios ----------------------------------------------------------------------------------


def merge(engine: Any, patience_s: float) -> dict[str, Any]:
    """Generation requests behind scoring requests, `ROUNDS` times.

    Returns
    -------
    dict
        ``alone`` and ``again``: the answer to `PROMPT` before and after the rounds, with nothing beside
        it. ``rounds``: the answers in them. ``hangs``: whether a request did not end within `patience_s`
        seconds; nothing else is asked then. ``pools``: see `pools`.
    """
    told: dict[str, Any] = {"alone": _answer(engine.generate(PROMPT, GENERATION))}
    told |= {"rounds": [], "hangs": False}
    try:
        for number in range(ROUNDS):
            time.sleep(IDLE_S)
            print(f"upstream_engine: round {number + 1}", flush=True)
            told["rounds"].append(_wait_for(engine, _round(engine, patience_s)))
    except _Hung:
        print(f"upstream_engine: no answer within {patience_s:g} s", flush=True)
        return told | {"hangs": True}
    time.sleep(IDLE_S)
    told["pools"] = pools(engine)
    told["again"] = _answer(engine.generate(PROMPT, GENERATION))
    return told


async def _round(engine: Any, patience_s: float) -> dict[str, Any]:
    """One scoring request, and a generation request that was sent right behind it."""
    scoring = asyncio.create_task(
        engine.async_generate(
            input_ids=list(SCORE_IDS),
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
    )
    generation = asyncio.create_task(engine.async_generate(PROMPT, GENERATION))
    _, pending = await asyncio.wait({scoring, generation}, timeout=patience_s)
    if pending:
        raise _Hung
    scored = scoring.result()["meta_info"]
    return _answer(generation.result()) | {
        "scored": len(scored["input_token_logprobs"]),
        "scoring_finish": scored["finish_reason"],
    }


def _answer(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": result["text"],
        "output_ids": list(result["output_ids"]),
        "finish": result["meta_info"]["finish_reason"],
    }


def pools(engine: Any) -> dict[str, Any] | None:
    """What a release tells of an idle engine's memory; nothing of ours, which has no such question.

    ``used_tokens`` and ``running`` are those of upstream's ``/v1/loads``. ``flushed`` tells whether it
    agreed to empty its cache, which it refuses as long as a request runs.
    """
    if not hasattr(engine, "flush_cache"):
        return None
    (load,) = _wait_for(engine, engine.tokenizer_manager.get_loads())
    flushed = engine.flush_cache()
    return {
        "used_tokens": load.num_used_tokens,
        "running": load.num_running_reqs,
        "flushed": bool(getattr(flushed, "success", flushed)),
    }


def texts(engine: Any, prompts: Sequence[str], scored: str) -> dict[str, Any]:
    """Continuations of `prompts` in one batch, and the logprobs of the text `scored`.

    Returns
    -------
    dict
        ``texts``: of each prompt ``input_ids`` and ``logprobs`` of all but the first; ``text``,
        ``output_ids`` and their logprobs, ``chosen``; and ``best``, at each position the two best
        candidates as pairs of logprob and id. ``scoring``: ``input_ids`` and ``logprobs``.
        ``seconds``: for all of it, after the start.
    """
    # Once, so that what is made at the first forward does not count.
    engine.generate(PROMPT, {"max_new_tokens": 2, "temperature": 0})
    started = time.perf_counter()
    answers = engine.generate(
        list(prompts), TEXT, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )
    score = engine.generate(scored, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "texts": [_with_candidates(answer) for answer in answers],
        "scoring": _scored(score),
    }


def _with_candidates(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {
        **_scored(answer),
        "text": answer["text"],
        "output_ids": list(answer["output_ids"]),
        "chosen": [entry[0] for entry in meta["output_token_logprobs"]],
        "best": [[[lp, i] for lp, i, _ in entry] for entry in meta["output_top_logprobs"]],
    }


def _scored(answer: dict[str, Any]) -> dict[str, Any]:
    entries = answer["meta_info"]["input_token_logprobs"]
    # Nothing comes before the first token, so nothing says how likely it is.
    return {"input_ids": [e[1] for e in entries], "logprobs": [e[0] for e in entries[1:]]}


# --- Command line -------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Start an Engine, ask it, and write what it answers."""
    parser = argparse.ArgumentParser(prog="python -m lab.upstream_engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scenario", choices=("merge", "texts"))
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--engine", choices=("upstream", "ours"), default="upstream")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON, {"prompts": [TEXT, ...], "scored": TEXT}, for texts',
    )
    parser.add_argument("--patience", type=float, default=45.0, metavar="S", help="for merge")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of standard output")
    args = parser.parse_args(argv)
    if args.scenario == "texts" and args.prompts is None:
        parser.error("texts wants --prompts")
    started = time.perf_counter()
    with running_engine(args.model, args.engine == "ours") as engine:
        start_s = time.perf_counter() - started
        if args.scenario == "merge":
            told = merge(engine, args.patience)
        else:
            told = texts(engine, **json.loads(args.prompts.read_text()))
        import sglang

        told |= {"package": sglang.__file__, "start_s": start_s}
        text = json.dumps(told, indent=1) + "\n"
        # Before the shutdown, which may end this process too.
        if args.out is not None:
            args.out.write_text(text)
        else:
            print(text)


if __name__ == "__main__":
    main()
