"""What is compared with each other, each in a process of its own (see `lab.remote`).

``python -m lab.serve session --setup JSON`` holds an engine of this project,
``python -m lab.serve hf --model DIR`` the same model in transformers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import metrics
from lab.remote import answer

Handler = Callable[[Mapping[str, Any]], dict[str, Any]]


def serve_session(setup_json: str) -> Handler:
    """Runs rounds of greedy decoding.

    It is asked for ``output_len`` tokens behind each of ``prompts``, or behind ``batch_size`` prompts of
    its own, with all ``penalties`` or without, and answers with ``metrics``, ``tokens`` and
    ``seconds`` of the whole call.
    """
    from lab.cases import Case, Setup
    from lab.sessions import Session, check_round, sampling_params
    from lab.workloads import once_more

    setup = Setup(**json.loads(setup_json))
    session = Session(setup, Path.cwd())

    def handle(question: Mapping[str, Any]) -> dict[str, Any]:
        size, length = question["batch_size"], question["output_len"]
        penalties = question.get("penalties", False)
        case = Case("serve", setup, batch_size=size, output_len=length, penalties=penalties)
        prompts = question.get("prompts") or session.prompts(case)

        def run() -> metrics.Round:
            round_ = session.generate(prompts, sampling_params(case))
            check_round(round_, case, [len(p) for p in prompts])
            return round_

        round_ = once_more(run)
        return {
            "metrics": metrics.decode_metrics(round_),
            "tokens": [result["output_ids"] for result in round_.results],
            "seconds": round_.ended - round_.started,
        }

    return handle


def serve_hf(path: str) -> Handler:
    """Runs Hugging Face's ``generate``, greedily, with a stopwatch at each step.

    It is asked for ``output_len`` tokens behind each of ``prompts``, which have one length, and answers
    with ``tokens``, ``decode_seconds`` from the first to the last token, and ``seconds`` of the call.
    """
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None  # nothing ends early

    def handle(question: Mapping[str, Any]) -> dict[str, Any]:
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return scores

        ids, length = torch.tensor(question["prompts"]), question["output_len"]
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[stamp],
            )
        ended = time.perf_counter()
        tokens = output[:, ids.shape[1] :].tolist()
        if any(len(row) != length for row in tokens) or len(stamps) != length:
            raise metrics.WorkNotDone(f"transformers did not generate {length} tokens a prompt")
        decode_seconds = stamps[-1] - stamps[0]
        return {"tokens": tokens, "decode_seconds": decode_seconds, "seconds": ended - started}

    return handle


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(prog="lab.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=("session", "hf"))
    parser.add_argument("--setup", help="fields of lab.cases.Setup, as JSON")
    parser.add_argument("--model", help="directory of the model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(args.threads)
    if args.kind == "session":
        answer(lambda: serve_session(args.setup))
    else:
        answer(lambda: serve_hf(args.model))


if __name__ == "__main__":
    main()
