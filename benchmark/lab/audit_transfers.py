"""What crosses between host and device in a decode step: ``python -m lab.audit_transfers``.

An engine of this project with a tiny model runs on the fake device, or on CUDA where there is one, under
a `TransferLedger`. Shown is what its decode steps do, divided by their number, so that one row with one
call is one call a step.

Examples
--------
::

    cd benchmark
    python -m lab.audit_transfers
    python -m lab.audit_transfers --speculative chain --penalties all --steps 20
    python -m lab.audit_transfers --phase all --json

The exit status is 1 if something blocks that is not meant.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab import models
from lab.cases import DRAFT_SHAPES, Case, Setup
from lab.fake_engine import MEANT, watched_engine
from lab.metrics import (
    WorkNotDone,
    check_pools,
    check_results,
    check_speculation,
    has_penalties,
)
from lab.remote import end_on_signals
from lab.transfer_ledger import D2H, Transfer, TransferLedger, blocking_of, render, totals_of

PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency": {"frequency_penalty": 0.3},
    "presence": {"presence_penalty": 0.2},
    "repetition": {"repetition_penalty": 1.2},
    "min_new_tokens": {"min_new_tokens": 4},
}
PENALTIES["all"] = {name: value for kind in PENALTIES.values() for name, value in kind.items()}

# Decode steps that are left out: those beside the prefill, and those beside the end.
_EDGE = 2
_VOCAB = 512


@dataclass
class Audit:
    """What was found.

    Attributes
    ----------
    transfers : list of Transfer
        Of the steps that were asked for.
    steps : int
        How many those are.
    device : str
        Type of the device.
    """

    transfers: list[Transfer]
    steps: int
    device: str

    def blocking(self) -> list[Transfer]:
        """Those that block and are not meant."""
        return blocking_of(self.transfers)

    def as_dict(self) -> dict[str, Any]:
        """For programs. Counts are of all steps together."""
        return {"device": self.device, "steps": self.steps, **totals_of(self.transfers)}


def audit(
    speculative: str = "none",
    penalties: str = "none",
    steps: int = 8,
    phase: str = "decode",
    batch_size: int = 4,
    mode: str = "record",
    penalty_backend: str | None = None,
    **engine_args: Any,
) -> Audit:
    """Run an engine under a ledger.

    Parameters
    ----------
    speculative : {"none", "chain", "tree"}
    penalties : str
        A key of `PENALTIES`.
    steps : int
        Decode steps to look at.
    phase : {"decode", "all"}
        Whether to look at decode steps in the middle alone, or at everything but the loading: admission,
        prefill, the first steps and the end.
    batch_size : int
    mode : {"record", "raise"}
        See `TransferLedger`.
    penalty_backend : {"dense", "sparse"}, optional
        The engine's default by default. Commits that have no choice yet have dense penalties.
    **engine_args
        For the engine.

    Raises
    ------
    WorkNotDone
        If the requests did not get their tokens, had no penalties or drafts although they should, or
        left something behind.
    """
    decode_steps: list[int] = []
    penalized: list[bool] = []

    def observe(record: Any) -> None:
        if record.forward_mode == "DECODE" and record.num_tokens > 0:
            decode_steps.append(record.step)
            penalized.append(has_penalties(engine.scheduler))

    with tempfile.TemporaryDirectory(prefix="lab-audit-") as scratch:
        engine_args = engine_args_for(Path(scratch), speculative) | engine_args
        engine_args |= _backend_args(penalty_backend)
        with (
            one_thread(),
            TransferLedger(mode=mode, allow=MEANT) as ledger,
            watched_engine(ledger=ledger, observer=observe, **engine_args) as engine,
        ):
            # Nothing runs yet that loading a model could hold up.
            ledger.transfers.clear()
            tokens = output_len_for(speculative, steps)
            results = generate_checked(engine, batch_size, tokens, PENALTIES[penalties])
            transfers = list(ledger.transfers)
    if speculative != "none":
        check_speculation(results, accepts=False)
    # Those of a step that is a request's last one are gone when it is told.
    if any(penalized) != (penalties != "none"):
        raise WorkNotDone(
            f"requests with penalties {penalties!r} had {'some' if any(penalized) else 'none'}"
        )
    chosen = len(decode_steps)
    if phase == "decode":
        wanted = set(decode_steps[_EDGE : _EDGE + steps])
        transfers, chosen = [t for t in transfers if t.step in wanted], len(wanted)
    return Audit(transfers, chosen, ledger.device_type)


def engine_args_for(scratch: Path, speculative: str) -> dict[str, Any]:
    """Arguments for an engine with a tiny model, which is written below `scratch`."""
    args: dict[str, Any] = {
        "model_path": models.write_tiny_model(scratch / "tiny", vocab_size=_VOCAB),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_total_tokens": 4096,
        "dtype": "float32",
    }
    if speculative != "none":
        draft = models.write_tiny_model(scratch / "draft", draft=True, vocab_size=_VOCAB)
        args |= DRAFT_SHAPES[speculative] | {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": draft,
        }
    return args


def output_len_for(speculative: str, steps: int) -> int:
    """Tokens that take a request so many decode steps, and those at the edges, at least."""
    # A speculative step may yield several tokens a request.
    most = 1 if speculative == "none" else DRAFT_SHAPES[speculative]["speculative_num_steps"] + 1
    return (steps + 2 * _EDGE + 1) * most


def generate_checked(
    engine: Any, batch_size: int, output_len: int, penalties: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run requests to their end, and see that they got there."""
    prompts = models.random_prompts(_VOCAB, 12, batch_size)
    params = {"max_new_tokens": output_len, "ignore_eos": True, "temperature": 0, **penalties}
    results = engine.generate(input_ids=prompts, sampling_params=params)
    check_results(results, [len(prompt) for prompt in prompts], output_len)
    check_pools(engine.scheduler, timeout=10.0)
    return results


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations of a tiny model are not worth two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _backend_args(penalty_backend: str | None) -> dict[str, str]:
    from sglang.srt.server_args import ServerArgs

    if any(field.name == "penalty_backend" for field in dataclasses.fields(ServerArgs)):
        return {} if penalty_backend is None else {"penalty_backend": penalty_backend}
    if penalty_backend == "sparse":
        raise ValueError("this commit of the package has no sparse penalties")
    return {}


class TransferSession:
    """Runs rounds of cases of the question ``transfers``, as `lab.sessions.Session` does of others.

    Parameters
    ----------
    setup : Setup
    scratch : Path
        Not used.

    Raises
    ------
    Unsupported
        If the installed commit lacks a seam that this needs.
    """

    def __init__(self, setup: Setup, scratch: Path) -> None:
        del scratch
        models.require_engine("observer", "thread_context")
        self._setup = setup
        self.progress: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Nothing is held."""

    def run_round(self, case: Case) -> dict[str, float]:
        """Look at ``case.output_len`` decode steps.

        Returns
        -------
        dict of str to float
            Of each step, on average: ``blocking_per_step``, transfers that block and are not meant to;
            ``transfers_per_step``, all of them but the wait for results; ``transfer_bytes_per_step``.

        Raises
        ------
        WorkNotDone
            If there were not so many steps, or not even their results were seen to cross.
        """
        found = audit(
            self._setup.speculative,
            "all" if case.penalties else "none",
            steps=case.output_len,
            batch_size=case.batch_size,
            disable_overlap_schedule=not self._setup.overlap,
        )
        if found.steps != case.output_len:
            raise WorkNotDone(f"{found.steps} decode steps were seen, not {case.output_len}")
        if not any(t.kind == D2H for t in found.transfers):
            raise WorkNotDone("no result was seen to come from the device: the ledger sees nothing")
        crossing = [t for t in found.transfers if not t.allowed]
        return {
            "blocking_per_step": len(found.blocking()) / found.steps,
            "transfers_per_step": len(crossing) / found.steps,
            "transfer_bytes_per_step": sum(t.nbytes for t in crossing) / found.steps,
        }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="lab.audit_transfers",
        description=(__doc__ or "").split("\n")[0],
        epilog="The exit status is 1 if something blocks that is not meant.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--speculative", choices=("none", *DRAFT_SHAPES), default="none")
    parser.add_argument("--penalties", choices=tuple(PENALTIES), default="none")
    parser.add_argument(
        "--penalty-backend", choices=("sparse", "dense"), help="instead of the engine's default"
    )
    parser.add_argument("--steps", type=int, default=8, help="decode steps to look at")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--normal", action="store_true", help="the loop without overlap")
    parser.add_argument(
        "--phase",
        choices=("decode", "all"),
        default="decode",
        help="decode steps alone, or also admission, prefill and end",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Audit and print; return the exit status."""
    args = parse_args(argv)
    found = audit(
        args.speculative,
        args.penalties,
        args.steps,
        args.phase,
        args.batch_size,
        penalty_backend=args.penalty_backend,
        disable_overlap_schedule=args.normal,
    )
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        what = "a run with" if args.phase == "all" else "the middle of a run,"
        print(f"Transfers of {what} {found.steps} decode steps, device {found.device}:")
        print(render(found.as_dict()["rows"]))
    return 1 if found.blocking() else 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
