"""Whether a decode step waits for the device, by PyTorch and the ledger: ``python -m lab.sync_debug``.

An engine with a tiny model decodes plainly, along chains and along trees, with all penalties, twice:

- Under ``torch.cuda.set_sync_debug_mode("error")``. The engine's observer switches that on between two
  decode steps and off again some steps later, on the scheduler's thread: prefill, compilation and the
  end, which may wait, are left out. Whatever waits in between raises, and ends the engine. The wait for
  results is one for an event, which is none of these; nor is a copy from pageable memory, as PyTorch
  knows only of what it synchronises itself.
- Under a `TransferLedger`, which knows of pageable copies too, and names the lines (see
  `lab.audit_transfers`).

Without a GPU the first run does the same steps on the CPU, where nothing can raise, and the ledger
watches the fake device.

The work is checked, too: each request has the tokens that were asked for, and the pools are whole again.

The exit status is 1 if anything waits, or if work was not done.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from lab import devices
from lab.arguments import positive_int
from lab.audit_transfers import (
    PENALTIES,
    audit,
    engine_args_for,
    generate_checked,
    one_thread,
    output_len_for,
)
from lab.metrics import WorkNotDone
from lab.remote import end_on_signals

# Speculation, and the penalties' backend. The dense one has the copy that fix #28500 is about.
RUNS: Final = (("none", "sparse"), ("chain", "sparse"), ("tree", "sparse"), ("chain", "dense"))
# Decode steps that are left out at either end.
EDGE: Final = 2


@dataclass
class Finding:
    """What was found of one way to decode.

    Attributes
    ----------
    speculative, penalty_backend : str
    device : str
        Where it ran under the debug mode.
    steps : int
        Decode steps under the debug mode.
    raised : str or None
        What PyTorch said of the first thing that waited; or what work was not done.
    blocking : int
        Blocking transfers that the ledger saw and that are not meant.
    sites : list of str
        Where.
    """

    speculative: str
    penalty_backend: str
    device: str
    steps: int = 0
    raised: str | None = None
    blocking: int = 0
    sites: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing waits."""
        return self.raised is None and self.blocking == 0


class Switch:
    """Observer of an engine that switches the debug mode on for its middle decode steps.

    Parameters
    ----------
    steps : int
        For how many.
    set_mode : callable
        Takes ``"error"`` and ``"default"``.

    Attributes
    ----------
    watched : int
        Decode steps that came to their end while it was on.
    """

    def __init__(self, steps: int, set_mode: Callable[[str], Any]) -> None:
        self.watched = 0
        self._steps = steps
        self._set_mode = set_mode
        self._seen = 0
        self._is_armed = self._is_on = False

    def arm(self) -> None:
        """Look from now on; what came before was a warm-up."""
        self._seen = 0
        self._is_armed = True

    def __call__(self, record: Any) -> None:
        if not self._is_armed or record.forward_mode != "DECODE" or record.num_tokens == 0:
            return
        self._seen += 1
        self.watched += self._is_on
        if self._seen == EDGE:
            self._set_mode("error")
            self._is_on = True
        elif self._seen == EDGE + self._steps:
            self.off()

    def off(self) -> None:
        """Switch it off."""
        self._set_mode("default")
        self._is_on = False


def _nothing(mode: str) -> None:
    """On the CPU there is no such mode."""


def decode_under_error(finding: Finding, steps: int, batch_size: int = 4) -> None:
    """Decode with the debug mode on, and note in `finding` what raised.

    Raises
    ------
    WorkNotDone
        If a request has not got its tokens, or leaves something behind in the pools.
    """
    import sglang as sgl

    set_mode = torch.cuda.set_sync_debug_mode if finding.device == "cuda" else _nothing
    switch = Switch(steps, set_mode)
    with tempfile.TemporaryDirectory(prefix="lab-sync-") as scratch, one_thread():
        args = engine_args_for(Path(scratch), finding.speculative)
        with sgl.Engine(
            **args,
            device=finding.device,
            penalty_backend=finding.penalty_backend,
            observer=switch,
        ) as engine:
            tokens = output_len_for(finding.speculative, steps)
            generate_checked(engine, batch_size, tokens, PENALTIES["all"])  # compiles
            switch.arm()
            try:
                generate_checked(engine, batch_size, tokens, PENALTIES["all"])
            except WorkNotDone:
                raise
            except Exception as error:
                finding.raised = f"{type(error).__name__}: {error}"
            finally:
                switch.off()
                finding.steps = switch.watched


def look(speculative: str, penalty_backend: str, steps: int, device: str) -> Finding:
    """Decode in one way, both times."""
    finding = Finding(speculative, penalty_backend, device)
    try:
        decode_under_error(finding, steps)
    except Exception as error:  # of an engine that could not be shut down either
        finding.raised = finding.raised or f"{type(error).__name__}: {error}"
    try:
        found = audit(speculative, "all", steps, penalty_backend=penalty_backend).blocking()
    except Exception as error:
        finding.raised = finding.raised or f"under the ledger: {type(error).__name__}: {error}"
        return finding
    finding.blocking = len(found)
    finding.sites = list(dict.fromkeys(f"{t.kind} {t.op} at {t.site}" for t in found))
    return finding


def main(argv: Sequence[str] | None = None) -> int:
    """Look, and print; return the exit status."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="lab.sync_debug", description=summary)
    parser.add_argument(
        "--steps", type=positive_int, default=16, help="decode steps (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="LAB_DEVICE, else CUDA if there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    args = parser.parse_args(argv)
    try:
        device = devices.choose(args.device)
    except ValueError as error:
        parser.error(str(error))
    findings: list[Finding] = []
    print(f"{'speculation':12} {'penalties':10} {'steps':>5} {'blocking':>8}  sync debug, {device}")
    try:
        for speculative, backend in RUNS:
            finding = look(speculative, backend, args.steps, device)
            findings.append(finding)
            said = finding.raised or ("nothing raised" if device == "cuda" else "not on the CPU")
            print(f"{speculative:12} {backend:10} {finding.steps:5} {finding.blocking:8}  {said}")
            for site in finding.sites:
                print(f"    blocks: {site}")
    except KeyboardInterrupt:
        print(
            f"lab.sync_debug: interrupted, {len(findings)} of {len(RUNS)} are there",
            file=sys.stderr,
        )
        return 130
    finally:
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(f) for f in findings], indent=2) + "\n")
    if any(finding.steps < args.steps and finding.raised is None for finding in findings):
        print("lab.sync_debug: error: fewer steps were watched than asked for", file=sys.stderr)
        return 2
    return 0 if all(finding.is_clean for finding in findings) else 1


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
