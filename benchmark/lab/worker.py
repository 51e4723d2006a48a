"""Measures cases in this process: ``python -m lab.worker CASE ... --out FILE``.

All cases must have the same setup; they share an engine. Each event is one line of JSON in FILE:
``{"event": "progress", ...}`` while it works, one ``{"event": "result", ...}`` a case. A workload that
stops making progress is given up, and with it this process: the engine's threads cannot be ended from
within it. `lab.run` starts workers and reads their events.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from lab.cases import CASES, Case
from lab.metrics import with_ratios
from lab.models import Unsupported
from lab.remote import Remote, end_with_parent
from lab.sessions import Session
from lab.workloads import make_session, once_more

# Seconds without a new token after which a mixed workload counts as stalled. A step of the slowest case
# takes a second on a busy machine.
STALL_S = 20.0
# The same for a workload that tells of no tokens until it is done.
ROUND_S = 240.0


class Stalled(RuntimeError):
    """The workload does not go on."""


class Events:
    """Writes events."""

    def __init__(self, sink: TextIO) -> None:
        self._sink = sink

    def progress(self, case: str, done: int, total: int, what: str) -> None:
        """Say how far a case is."""
        self._write(event="progress", case=case, done=done, total=total, what=what)

    def result(self, case: str, outcome: str, **fields: Any) -> None:
        """Say how a case ended."""
        self._write(event="result", case=case, outcome=outcome, **fields)

    def _write(self, **fields: Any) -> None:
        self._sink.write(json.dumps(fields) + "\n")
        self._sink.flush()


class Watched:
    """Runs a function on a thread of its own and gives up when it stops making progress."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seen = time.monotonic()

    def alive(self) -> None:
        """Tell that there is progress."""
        self._seen = time.monotonic()

    def call(self, function: Any, *args: Any) -> Any:
        """The function's result.

        Raises
        ------
        Stalled
            If there is no progress for too long.
        """
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome[:] = [True, function(*args)]
            except BaseException as error:
                outcome[:] = [False, error]

        self.alive()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            if time.monotonic() - self._seen > self._stall_s:
                raise Stalled(f"no token for {self._stall_s:.0f} s while requests were running")
        ok, value = outcome
        if not ok:
            raise value
        return value


def measure(
    session: Session,
    case: Case,
    name: str,
    rounds: int,
    anchor: Remote | None,
    events: Events,
    stall_s: float = STALL_S,
) -> dict[str, Any]:
    """Run a case `rounds` times after a short warm-up, each round between two runs of the anchor.

    A case that does not vary is run once, with neither.

    Returns
    -------
    dict
        ``rounds``, the metrics of each round (see `lab.metrics.with_ratios`), and ``anchors``, the
        seconds of each run of the anchors, by kind.

    Raises
    ------
    Stalled
        If a round makes no progress for `stall_s` seconds.
    WorkNotDone
        If a round did not do its work.
    """
    watched = Watched(stall_s if case.kind == "mixed" else ROUND_S)
    session.progress = watched.alive
    if not case.varies:
        events.progress(name, 0, 1, "counting")
        return {"rounds": [once_more(lambda: watched.call(session.run_round, case))], "anchors": []}
    events.progress(name, 0, rounds, "warm-up")
    once_more(lambda: watched.call(session.run_round, case.shortened()))
    assert anchor is not None
    found: list[dict[str, float]] = []
    anchors = [anchor.ask()["seconds"]]
    for i in range(rounds):
        events.progress(name, i, rounds, "measuring")
        gc.collect()
        found.append(once_more(lambda: watched.call(session.run_round, case)))
        anchors.append(anchor.ask()["seconds"])
    if case.kind == "decode" and case.penalties:
        assert isinstance(session, Session)
        watched.call(session.check_penalties, case)
    return {"rounds": with_ratios(found, anchors), "anchors": anchors}


def measure_all(
    names: Sequence[str],
    rounds: int | None,
    events: Events,
    threads: int = 1,
    stall_s: float = STALL_S,
) -> None:
    """Measure cases of one setup, one after the other, on one engine."""
    cases = [CASES[name] for name in names]
    if len({case.setup for case in cases}) != 1:
        raise ValueError(f"cases of several setups: {', '.join(names)}")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-"))
        anchor = None
        if cases[0].varies:
            options = [*cases[0].anchors, f"--threads={threads}"]
            anchor = stack.enter_context(Remote("lab.anchor", options, threads=threads))
        events.progress(names[0], 0, 1, "starting the engine")
        try:
            session = make_session(cases[0].setup, Path(scratch))
        except Unsupported as error:
            for name in names:
                events.result(name, "unsupported", detail=str(error))
            return
        if anchor is not None:
            anchor.wait_until_ready()
        about: dict[str, Any] = {"engine": _where_the_engine_is()}
        for name, case in zip(names, cases, strict=True):
            try:
                found = measure(session, case, name, rounds or case.rounds, anchor, events, stall_s)
                if name == names[-1]:
                    session.close()
            except Exception as error:
                unfinished = session.unfinished(case) if isinstance(session, Session) else 0
                outcome = _outcome(case, error, unfinished)
                detail = f"{type(error).__name__}: {error}"
                if outcome == "failed":
                    detail = traceback.format_exc(limit=-3).strip()
                if outcome == "stalls":
                    about["unfinished"] = unfinished
                events.result(name, outcome, detail=detail, **about)
                # Its engine cannot be trusted any more, nor closed.
                raise
            events.result(name, "done", **found, **about)


def _outcome(case: Case, error: Exception, unfinished: int) -> str:
    """Generation requests of a mixed workload that do not go on, or that an idle engine has, *stall*.

    That is what #21840 is about. Anything else is a failure, and so are both of any other work.
    """
    stalled = isinstance(error, Stalled) or "leak detected" in str(error)
    return "stalls" if stalled and unfinished and case.kind == "mixed" else "failed"


def _where_the_engine_is() -> str:
    import sglang

    return str(Path(sglang.__file__).resolve().parent)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; end the process whatever its threads do."""
    parser = argparse.ArgumentParser(prog="lab.worker", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="+", choices=sorted(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, required=True, help="file that events are appended to")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="instead of what each case says")
    parser.add_argument("--stall", type=float, default=STALL_S, help="seconds, see STALL_S")
    args = parser.parse_args(argv)

    end_with_parent()
    import torch

    torch.set_num_threads(args.threads)
    status = 0
    with args.out.open("a") as sink:
        try:
            measure_all(args.cases, args.rounds, Events(sink), args.threads, args.stall)
        except BaseException as error:
            print(f"lab.worker: {type(error).__name__}: {error}", file=sys.stderr)
            status = 1
    # Threads of an engine that has stalled would hold up an ordinary exit for good.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
