"""Measures cases, each engine in a process of its own: ``python -m lab.run [CASE ...]``.

Nothing outlives a call: a worker that stalls, or whose parent ends, is killed with all it started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.arguments import positive_int
from lab.cases import CASES, PROCESSES, check_name
from lab.formats import significant
from lab.metrics import RATIO, summarise
from lab.remote import end_on_signals, environment

# Seconds without any event after which a worker is killed. It notices a stall itself, far earlier.
SILENCE_S = 300.0

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


def by_setup(names: Iterable[str]) -> list[list[str]]:
    """Groups of cases that can share an engine, in the order of their first ones.

    Raises
    ------
    ValueError
        If there is no such case.
    """
    groups: dict[Any, list[str]] = {}
    for name in names:
        check_name(name)
        groups.setdefault(CASES[name].engine_key, []).append(name)
    return list(groups.values())


def run_cases(
    names: Iterable[str],
    *,
    python: str = sys.executable,
    package: str | None = None,
    threads: int | None = None,
    rounds: int | None = None,
    processes: int | None = None,
    stall_s: float | None = None,
    seconds: float = math.inf,
    on_event: OnEvent = lambda event: None,
) -> dict[str, Event]:
    """Measure cases.

    Each is measured in several processes, and between two processes of a case all others have their
    turn, so that they see the machine at times that are apart.

    Parameters
    ----------
    names : iterable of str
        Keys of `lab.cases.CASES`.
    python : str
        Interpreter whose environment holds the package to measure.
    package : str, optional
        Directory that holds ``sglang``, if it is another one than the installed one.
    threads : int, optional
        Threads that torch gets, instead of what each setup says.
    rounds : int, optional
        Rounds a case in each process, instead of what the case says.
    processes : int, optional
        Processes a case, instead of `lab.cases.PROCESSES`; of one that does not vary it is one.
    stall_s : float, optional
        Seconds without a token after which a mixed workload counts as stalled.
    seconds : float
        How long it may take. What is under way then is ended.
    on_event : callable
        Takes each event as it comes, see `lab.worker`.

    Returns
    -------
    dict of str to dict
        By case: ``outcome`` ("done", "stalls", "unsupported", "failed", "not reached"). If done,
        ``rounds``, those of the first process first, ``processes``, their number, and ``metrics``, the
        medians; else ``detail``.
    """
    end = time.monotonic() + seconds
    names = list(names)
    found: dict[str, list[Event]] = {name: [] for group in by_setup(names) for name in group}
    wanted = {name: processes or PROCESSES if CASES[name].varies else 1 for name in found}
    turn = 0
    while names := [name for name in names if turn < wanted[name]]:

        def tell(event: Event, turn: int = turn) -> None:
            # A case has ended when its last process has, or one that could not do it.
            last = turn + 1 == wanted[event["case"]] or event.get("outcome") != "done"
            if event["event"] == "progress" or last:
                on_event(event)

        results = _run_once(names, python, package, threads, rounds, stall_s, end, tell)
        for name, result in results.items():
            found[name].append(result)
        names = [name for name in names if results[name]["outcome"] == "done"]
        turn += 1
    return {name: _united(results) for name, results in found.items()}


def _united(results: Sequence[Event]) -> Event:
    """One result of those that the processes of a case have given, in order."""
    *_, last = results
    if last["outcome"] != "done":
        return last
    rounds = [round_ for result in results for round_ in result["rounds"]]
    anchors = [seconds for result in results for seconds in result["anchors"]]
    about = {"rounds": rounds, "anchors": anchors, "processes": len(results)}
    return last | about | {"metrics": summarise(rounds)}


def _run_once(
    names: Iterable[str],
    python: str,
    package: str | None,
    threads: int | None,
    rounds: int | None,
    stall_s: float | None,
    end: float,
    on_event: OnEvent,
) -> dict[str, Event]:
    """Results of one process a case, as far as they were there by `end`."""
    options = [] if rounds is None else ["--rounds", str(rounds)]
    options += [] if stall_s is None else ["--stall", str(stall_s)]
    results: dict[str, Event] = {}
    for group in by_setup(names):
        count = threads or CASES[group[0]].setup.threads
        env = environment(count, package)
        pending = list(group)
        while pending:
            if time.monotonic() >= end:
                results |= {name: _not_reached(name, on_event) for name in pending}
                break
            results |= _run_worker(
                pending, python, env, ["--threads", str(count), *options], end, on_event
            )
            # A case that failed took its worker with it; the others get a new one.
            pending = [name for name in pending if name not in results]
    return results


def _not_reached(case: str, on_event: OnEvent) -> Event:
    result = {"case": case, "outcome": "not reached", "detail": "there was no time left"}
    on_event({"event": "result", **result})
    return result


def _run_worker(
    names: list[str],
    python: str,
    env: dict[str, str],
    options: list[str],
    end: float,
    on_event: OnEvent,
) -> dict[str, Event]:
    """Results of the cases that one worker came to, at least one."""
    with tempfile.TemporaryDirectory(prefix="lab-run-") as scratch:
        out, log = Path(scratch) / "events", Path(scratch) / "log"
        out.touch()
        with log.open("w") as sink:
            worker = subprocess.Popen(
                [python, "-m", "lab.worker", *names, "--out", str(out), *options],
                # A worker that is killed cannot remove what it has for a time.
                env=env | {"TMPDIR": scratch},
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                results, current = _follow(worker, out, names[0], end, on_event)
                is_late = worker.poll() is None and time.monotonic() >= end
            finally:
                _end(worker)
        # A case may end its worker, but it says so first.
        if current not in results and is_late:
            results[current] = _not_reached(current, on_event)
        elif current not in results:
            tail = log.read_text(errors="replace")[-2000:].strip()
            detail = f"the worker ended with status {worker.returncode}: {tail or 'no output'}"
            results[current] = {"case": current, "outcome": "failed", "detail": detail}
            on_event({"event": "result", **results[current]})
        return results


def _follow(
    worker: subprocess.Popen, out: Path, first: str, end: float, on_event: OnEvent
) -> tuple[dict[str, Event], str]:
    """Results until `end`, and the case that was last at work."""
    results: dict[str, Event] = {}
    current, heard = first, time.monotonic()
    with out.open() as events:
        partial = ""
        while True:
            ended = worker.poll() is not None
            for event in _lines(events, partial):
                if isinstance(event, str):
                    partial = event
                    continue
                heard, current = time.monotonic(), event["case"]
                if event["event"] == "result":
                    results[current] = {k: v for k, v in event.items() if k != "event"}
                on_event(event)
            now = time.monotonic()
            if ended or now >= end or now - heard > SILENCE_S:
                return results, current
            time.sleep(0.05)


def _lines(events: Any, partial: str) -> Iterator[Event | str]:
    """Events that have come, then what has come of the next one."""
    *lines, rest = (partial + events.read()).split("\n")
    for line in lines:
        yield json.loads(line)
    yield rest


def _end(worker: subprocess.Popen) -> None:
    """Kill a worker and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def package_folder(path: str) -> str:
    """A directory that holds ``sglang``, for argparse."""
    if not (Path(path) / "sglang" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"there is no sglang in {path!r}")
    return path


def say(event: Event) -> None:
    """Print an event as a line, on stderr."""
    if event["event"] == "progress":
        text = f"{event['case']}: {event['what']} {event['done']}/{event['total']}"
    else:
        text = f"{event['case']}: {event['outcome']} {event.get('detail', '')}"
    print(text, file=sys.stderr, flush=True)


def _print_table(results: dict[str, Event]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("case", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "in anchors"):
        table.add_column(name, justify="right")
    for case, result in results.items():
        found = result.get("metrics", {})
        if not found:
            table.add_row(case, f"[bold]{result['outcome']}[/]", end_section=True)
            continue
        names = [name for name in found if not name.endswith(RATIO)]
        for name in names:
            ratio = found.get(name + RATIO)
            table.add_row(
                case if name == names[0] else "",
                name.replace("_", " "),
                significant(found[name]),
                "" if ratio is None else significant(ratio),
                end_section=name == names[-1],
            )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure cases from the command line."""
    parser = argparse.ArgumentParser(prog="lab.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--threads", type=positive_int, help="instead of what each setup says")
    parser.add_argument("--rounds", type=positive_int, help="rounds a case, in each process")
    parser.add_argument("--processes", type=positive_int, help="processes a case")
    parser.add_argument(
        "--package", type=package_folder, help="directory that holds another sglang to measure"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    try:
        results = run_cases(
            args.cases,
            package=args.package,
            threads=args.threads,
            rounds=args.rounds,
            processes=args.processes,
            on_event=say,
        )
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("lab.run: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        _print_table(results)
    return 0 if all(r["outcome"] != "failed" for r in results.values()) else 1


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
