#!/usr/bin/env python3
"""Is HEAD slower than BASE? A verdict for each metric, with an interval. (``make bench-gate``)

Both packages are measured in turns, in pairs of processes (`lab.contest`), for as long as
``--minutes`` say. Where nothing has changed, one run in a hundred should call any metric faster or
slower, of all there are (`lab.verdicts`); ``docs/benchmarking.md`` says how many do. BASE and HEAD are
commits, or directories that hold ``sglang`` (``python`` is the working tree's).

The exit status is 1 if anything is slower or fails, 2 if nothing could be measured, and with
``--strict`` 3 if there is something that cannot be told; else 0. With ``--json`` what is printed is an
object, also where nothing could be measured: then it has ``error``. (A command line that is wrong, and
an interrupt, print none.)

Examples
--------
::

    python scripts/bench_gate.py main~5 HEAD
    python scripts/bench_gate.py HEAD python --minutes 3
    python scripts/bench_gate.py v1 v2 --cases decode/tiny-b8 --json
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from prove_fixes import ProofError, git, git_bytes

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.append(str(REPO_ROOT / "benchmark"))

try:
    from lab import contest, verdicts
    from lab.arguments import case_name, non_negative_float, positive_float, positive_int
    from lab.contest import Contest, ContestError, Side
    from lab.remote import end_on_signals
except ImportError as error:
    # 1 would say that something is slower.
    print(f"bench_gate: error: {error}; .venv/bin/python has what it needs", file=sys.stderr)
    raise SystemExit(2) from error

ENOUGH_PAIRS: Final = 12
"""Long pairs that are measured where ``--minutes`` are too few for them. Eight, the fewest that can be
judged, have wide intervals."""
MOST_MINUTES: Final = 14.0
"""But not for longer than this, and a pair more: then there is what there is."""
MAX_PAIRS: Final = 300
DEFAULT_CASES: Final = (*contest.QUICK_COUNTS, *contest.QUICK)
Tick = Callable[[str], None]


def side(repo: Path, name: str) -> Side:
    """The package of a commit, taken out of git below ``.asv/gate``, or of a directory.

    Raises
    ------
    ProofError
        If there is no such commit, or no package in it.
    """
    if (Path(name) / "sglang" / "__init__.py").is_file():
        return Side(name, str(Path(name).resolve()))
    try:
        sha = git(repo, "rev-parse", "--verify", f"{name}^{{commit}}").strip()
    except ProofError as error:
        message = f"{name!r} is neither a commit nor a directory that holds sglang"
        raise ProofError(f"{message}: {error}") from error
    target = repo / ".asv" / "gate" / sha
    package = target / "python"
    if not target.is_dir():
        try:
            archive = git_bytes(repo, "archive", sha, "python")
        except ProofError as error:
            raise ProofError(f"{name} has no package: {error}") from error
        partial = target.with_name(f"{sha}.{os.getpid()}")
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as members:
                members.extractall(partial, filter="data")
            try:
                partial.rename(target)
            except OSError as error:
                if not target.is_dir():  # no other call was faster
                    raise ProofError(f"the package of {name} has no place: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if not (package / "sglang" / "__init__.py").is_file():
        raise ProofError(f"{name} has no package: there is no python/sglang/__init__.py in it")
    label = name if sha.startswith(name) else f"{name} ({sha[:8]})"
    return Side(label, str(package))


def compare(
    base: Side,
    head: Side,
    cases: Sequence[str],
    minutes: float,
    rounds: int | None,
    on_pair: Callable[[int, int], None],
    tick: Tick,
) -> Contest:
    """Measure as many pairs as there is time for; for `ENOUGH_PAIRS` there are `MOST_MINUTES`.

    Time runs from the start, and what is counted takes its part of it.

    Only the clock ends it, which knows nothing of the result: who goes on until there is a difference
    finds one.
    """
    started = time.monotonic()
    longest = 60 * max(minutes, MOST_MINUTES)
    with contest.forking(threads=1) as context:
        found = Contest(context, base, head, cases, rounds)
        tick("compiling")
        found.prepare()
        spent = 0.0
        while not found.is_settled:
            begun = time.monotonic()
            if found.run_pair(tick) is None:
                if time.monotonic() - started > longest:
                    break
                continue
            done, now = len(found.pairs), time.monotonic()
            spent += now - begun
            within, at_most = (
                done + (started + limit - now) / (spent / done) for limit in (60 * minutes, longest)
            )
            total = max(int(min(max(within, ENOUGH_PAIRS), at_most, MAX_PAIRS)), done)
            on_pair(done, total)
            if done >= total:
                break
    return found


def show(found: Sequence[verdicts.Verdict], sides: tuple[Side, Side], console: Any) -> None:
    """Print the table."""
    from rich.markup import escape
    from rich.table import Table

    base, head = (escape(side.name) for side in sides)
    table = Table(title=f"{head}, compared with {base}", title_justify="left")
    for name in ("case", "metric"):
        table.add_column(name)
    for name in ("head ÷ base", "interval, or counts"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    colors = {
        verdicts.FAILS: "bold red",
        verdicts.SLOWER: "bold red",
        verdicts.FASTER: "green",
        verdicts.CANNOT_TELL: "yellow",
    }
    before = ""
    for verdict in found:
        case, _, metric = verdict.metric.partition(" ")
        color = colors.get(verdict.verdict, "dim")
        table.add_row(
            case if case != before else "",
            metric,
            *_numbers(verdict),
            f"[{color}]{verdict.verdict}[/]",
        )
        before = case
    console.print(table)


def _numbers(verdict: verdicts.Verdict) -> tuple[str, str]:
    """Cells of the ratio and of its interval."""
    if math.isnan(verdict.ratio):
        return "", ""
    if verdict.base is not None and verdict.head is not None:
        counts = (
            f"{n:,.0f}" if n == round(n) else f"{n:,.4g}" for n in (verdict.base, verdict.head)
        )
        return f"{verdict.ratio:.3f}", " → ".join(counts)
    return f"{verdict.ratio:.3f}", f"{verdict.low:.3f} .. {verdict.high:.3f}"


def _as_json(found: Contest, judged: Sequence[verdicts.Verdict]) -> dict[str, Any]:
    """For programs; what is no finite number is null."""
    return {
        "base": found.sides[0].name,
        "head": found.sides[1].name,
        "pairs": len(found.pairs),
        "short_pairs": len(found.short),
        "left_out": found.notes,
        "verdicts": [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(verdict).items()
            }
            for verdict in judged
        ],
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    rounds = [contest.ROUNDS, *(turns.rounds for turns in contest.QUICK.values())]
    few, many = min(rounds), max(rounds)
    parser = argparse.ArgumentParser(prog="bench_gate.py", description=summary)
    parser.add_argument("base", help="a commit, or a directory that holds sglang")
    parser.add_argument("head", help="likewise")
    parser.add_argument(
        "--minutes",
        type=positive_float,
        default=6.0,
        help="of measuring, about (default: %(default)s)",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        type=case_name,
        metavar="CASE",
        default=list(DEFAULT_CASES),
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        help=f"of each case in a pair, long or short (default: {few} to {many}, see lab.contest)",
    )
    parser.add_argument(
        "--tolerance",
        type=non_negative_float,
        default=verdicts.TOLERANCE,
        help="a difference up to this is none (default: %(default)s)",
    )
    parser.add_argument(
        "--margin",
        type=positive_float,
        default=verdicts.MARGIN,
        help="within which 'same' is certain (default: %(default)s)",
    )
    parser.add_argument("--strict", action="store_true", help="fail where something cannot be told")
    parser.add_argument("--json", action="store_true", help="print JSON; the rest goes to stderr")
    parser.add_argument(
        "--repo", type=Path, default=REPO_ROOT, help="another checkout than this script's own"
    )
    args = parser.parse_args(argv)
    args.cases = list(dict.fromkeys(args.cases))
    args.repo = args.repo.resolve()
    return args


def _fail(message: str, as_json: bool) -> int:
    """Say why there is no verdict; return the exit status of that."""
    print(f"bench_gate: error: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    return 2


def gate(args: argparse.Namespace) -> int:
    """Compare and print; return the exit status."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    started = time.monotonic()
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 120)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def on_pair(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not console.is_terminal:
            seconds = time.monotonic() - started
            console.print(f"[{seconds:6.0f} s] {done} of {total} pairs", markup=False)

    sides = (side(args.repo, args.base), side(args.repo, args.head))
    with bar:
        task = bar.add_task("pairs of processes", total=None, what="")
        found = compare(
            *sides,
            args.cases,
            args.minutes,
            args.rounds,
            on_pair,
            lambda what: bar.update(task, what=what),
        )
    judged = found.judge(tolerance=args.tolerance, margin=args.margin)
    show(judged, sides, console)
    for note in found.notes:
        console.print(note, markup=False)
    if 0 < len(found.pairs) < verdicts.MIN_PAIRS:
        few = (
            f"{len(found.pairs)} pairs in the time that there is, of {verdicts.MIN_PAIRS} at least"
        )
        console.print(f"{few}: nothing that is timed can be told", markup=False)
    kinds = [verdict.verdict for verdict in judged]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.print(f"{len(found.pairs)} pairs, {time.monotonic() - started:.0f} s: {counts}")
    if args.json:
        print(json.dumps(_as_json(found, judged), indent=2))
    if verdicts.SLOWER in kinds or verdicts.FAILS in kinds:
        return 1
    return 3 if args.strict and verdicts.CANNOT_TELL in kinds else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; return the exit status."""
    args = parse_args(argv)
    try:
        return gate(args)
    except (ContestError, ProofError) as error:
        return _fail(str(error), args.json)
    except KeyboardInterrupt:
        print("bench_gate: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        # An uncaught one would end with 1, which says that something is slower.
        traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error}", args.json)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
