"""For how much of its decoding an engine has a forward under way: ``python -m lab.device_occupancy``.

The batch of fix #28500: requests with all penalties, speculating along chains. Where
`lab.modelled_accelerator` gives forwards a length, here they take what the device takes, and the
occupancy is what the engine's records of them say (`lab.metrics.forward_occupancy`). Where the host
launches the kernels of a forward more slowly than the device runs them, the device waits within a
forward, and that does not show.

The model is SmolLM2-135M-Instruct with its EAGLE head where ``make model`` has put it. A machine without
a network cannot get it, and there it is a model of the same shape with random weights: its forwards take
as long, and hardly a draft is accepted, so that a step yields fewer tokens; the occupancy is of steps.
``tiny`` is a model of a millisecond a forward.

The package is whichever is on the path. It runs in this process, which cannot be trusted behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lab import devices, models
from lab.arguments import positive_int
from lab.cases import Case, Setup
from lab.remote import end_on_signals
from lab.sessions import Session
from lab.workloads import once_more

# Its config.json, as far as the engine reads it.
SMOLLM2_135M: Final[dict[str, Any]] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
MODELS: Final = ("auto", "real", "shape", "tiny")
SHOWN: Final = (
    "forward_occupancy",
    "tokens_per_s",
    "itl_p50_ms",
    "forward_ms",
    "host_us_per_step",
    "accepted_length",
)


def choose(model: str) -> str:
    """Which model that is: ``auto`` is the real one where it is there, else one of its shape."""
    if model != "auto":
        return model
    try:
        models.real_model()
        models.real_draft()
    except (FileNotFoundError, models.Unsupported):
        return "shape"
    return "real"


def make_session(
    model: str, speculative: str, device: str, batch_size: int, output_len: int, scratch: Path
) -> Session:
    """An engine with that model on that device, in which so many requests find room at once."""
    setup = Setup(
        "real" if model == "real" else "tiny",
        speculative=speculative,
        max_running_requests=batch_size,
        # With what a prompt and its drafts take.
        max_total_tokens=max(16_384, batch_size * (output_len + 128)),
    )
    if model == "real":
        return Session(setup, scratch, device=device)
    overrides: dict[str, Any] = {}
    if model == "shape":
        overrides["model_path"] = models.write_tiny_model(scratch / "shape", **SMOLLM2_135M)
        if speculative != "none":
            overrides["speculative_draft_model_path"] = models.write_tiny_model(
                scratch / "shape-draft", draft=True, **SMOLLM2_135M | {"num_hidden_layers": 1}
            )
    return Session(setup, scratch, device=device, **overrides)


def measure(
    model: str, speculative: str, device: str, batch_size: int, output_len: int, rounds: int
) -> dict[str, Any]:
    """Metrics of a batch, medians over rounds, behind a warm-up."""
    with tempfile.TemporaryDirectory(prefix="lab-occupancy-") as scratch:
        session = make_session(model, speculative, device, batch_size, output_len, Path(scratch))
        case = Case(
            "occupancy",
            session.setup,
            batch_size=batch_size,
            output_len=output_len,
            penalties=True,
            rounds=rounds,
        )
        once_more(lambda: session.run_round(case.shortened()))
        found = [once_more(lambda: session.run_round(case)) for _ in range(rounds)]
        session.close()
    names = [name for name in found[0] if all(name in metrics for metrics in found)]
    return {name: statistics.median(metrics[name] for metrics in found) for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="lab.device_occupancy", description=summary)
    parser.add_argument("--model", choices=MODELS, default="auto")
    parser.add_argument("--speculative", choices=("none", "chain", "tree"), default="chain")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="LAB_DEVICE, else CUDA if there")
    parser.add_argument("--batch-size", type=positive_int, default=8)
    parser.add_argument("--output-len", type=positive_int, default=64, help="tokens a request")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    args = parser.parse_args(argv)
    try:
        device = devices.choose(args.device)
    except ValueError as error:
        parser.error(str(error))
    import sglang

    model = choose(args.model)
    metrics = measure(
        model, args.speculative, device, args.batch_size, args.output_len, args.rounds
    )
    found = {
        "model": model,
        "device": device,
        "speculative": args.speculative,
        "batch_size": args.batch_size,
        "engine": str(Path(sglang.__file__).resolve().parent),
        "metrics": metrics,
    }
    print(f"model {model} on {device}, {args.speculative}, batch {args.batch_size}")
    for name in SHOWN:
        if name in metrics:
            print(f"  {name:18} {metrics[name]:.4g}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    end_on_signals()
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    # Threads of an engine of another commit may hold up an ordinary exit.
    sys.stdout.flush()
    os._exit(status)
