#!/usr/bin/env python3
"""How fast is the decode path, beside what it should be compared with? (``make speed``)

Everything is measured alternately in one call: float32, two threads, SmolLM2-135M, greedy. What is
compared with a target are the ratios of neighbouring runs, since both runs of a pair had the same
machine. Each side has a process of its own, which sleeps while another one runs. Half of the pairs come
from processes that were started in one order, half from others that were started the other way round:
the one that is started first may get slower memory. The section ``overlap`` shows by how much.

=========  ====================================================================================
hf         decode tokens/s of the engine by those of Hugging Face's ``generate``: the same prompts,
           the same number of new tokens
overlap    decode tokens/s of the overlap loop by those of the normal loop
penalties  decode tokens/s with all penalties by those without, in turns on one engine
host       host work of ``filter_batch`` + ``prepare_for_decode`` by that of real SGLang 0.5.10,
           where that is installed
eagle      EAGLE chain and tree beside plain decoding: accepted length, draft and verify time. The
           draft head is a fixture with real acceptance, and not a claim of speed
=========  ====================================================================================

For ``host``, SGLang 0.5.10 is measured beside where ``python scripts/upstream fetch --environment
0.5.10`` has put it (``UPSTREAM_PYTHON`` may name another interpreter). Else the figures measured
earlier on such a machine are printed, as such, and held against nothing.

Examples
--------
::

    python benchmark/speed.py
    python benchmark/speed.py --section hf --batch-size 1 8 --rounds 9
    python benchmark/speed.py --section host --json host.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

REPO_ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [str(REPO_ROOT / "benchmark"), str(REPO_ROOT / "scripts")]

from lab import models  # noqa: E402
from lab.formats import busy_notes, significant  # noqa: E402
from lab.remote import Remote, RemoteError  # noqa: E402
from upstream import releases  # noqa: E402

HF_TARGETS: Final = {1: 1.5, 8: 1.3, 32: 1.1}
OVERLAP_TARGET: Final = 1.0
PENALTIES_TARGET: Final = 0.98
HOST_BATCH_SIZES: Final = (1, 8, 64, 256)
# Microseconds a step of real SGLang 0.5.10, measured on a two-core machine of this kind.
HOST_REFERENCE_US: Final = {1: 31.0, 8: 31.0, 64: 44.0, 256: 91.0}
PACKAGE: Final = str(REPO_ROOT / "python")
UPSTREAM: Final = REPO_ROOT / ".cache" / "upstream" / "0.5.10" / "python"
SECTIONS: Final = ("hf", "overlap", "penalties", "host", "eagle")

Row = dict[str, Any]
Tick = Callable[[str], None]


@dataclass
class Section:
    """What a section found: rows for its table, and whether its targets were met."""

    title: str
    columns: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of pairs."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def fair_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Ratio of sides whose first half of runs was started in one order, the second in the other.

    The geometric mean of the halves' medians: what being started first is worth cancels out.
    """
    half = len(ours) // 2
    first, second = (median_ratio(ours[part], others[part]) for part in _halves(half))
    return math.sqrt(first * second)


def worth_of_being_first(ours: Sequence[float], others: Sequence[float]) -> float:
    """Speed of a side that was started first, as ours was in the first half, by that when second."""
    half = len(ours) // 2
    first, second = (median_ratio(ours[part], others[part]) for part in _halves(half))
    return math.sqrt(first / second)


def noise(ours: Sequence[float], others: Sequence[float]) -> float:
    """Standard error of `fair_ratio`, relative, by the bootstrap (Efron, 1979) within each half.

    Nothing can be said of halves of fewer than three pairs: that is infinity.
    """
    half = len(ours) // 2
    if half < 3:
        return math.inf
    halves = [
        [math.log(a / b) for a, b in zip(ours[part], others[part], strict=True)]
        for part in _halves(half)
    ]
    rng = random.Random(0)
    drawn = [
        statistics.mean(statistics.median(rng.choices(logs, k=len(logs))) for logs in halves)
        for _ in range(2000)
    ]
    return statistics.pstdev(drawn)


def _halves(half: int) -> tuple[slice, slice]:
    return slice(half), slice(half, None)


def spread(ours: Sequence[float], others: Sequence[float]) -> str:
    """Smallest and largest ratio of a pair."""
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


# --- The processes ----------------------------------------------------------------------------


def start_engine(args: argparse.Namespace, **setup: Any) -> Remote:
    """A process with an engine of this project on the real model (see `lab.serve`)."""
    setup = {"model": "real", "max_running_requests": max(args.batch_size)} | setup
    options = ["session", "--setup", json.dumps(setup), "--threads", str(args.threads)]
    return Remote("lab.serve", options, threads=args.threads, package=PACKAGE)


def start_hf(args: argparse.Namespace) -> Remote:
    """A process with the real model in transformers."""
    options = ["hf", "--model", models.real_model(), "--threads", str(args.threads)]
    return Remote("lab.serve", options, threads=args.threads)


def ask_all(
    args: argparse.Namespace,
    starters: dict[str, Callable[[], Remote]],
    questions: Sequence[Row],
    label: str,
    tick: Tick,
) -> list[dict[str, list[Row]]]:
    """Each side's answers to each question, `args.rounds` from each order of starting the sides."""
    found = [{name: [] for name in starters} for _ in questions]
    for order in (list(starters), list(starters)[::-1]):
        with contextlib.ExitStack() as stack:
            sides = {}
            for name in order:
                tick(f"{label}: starting {name}")
                sides[name] = stack.enter_context(starters[name]())
                sides[name].wait_until_ready()
            for answers, question in zip(found, questions, strict=True):
                for name, more in alternate(args, sides, question, label, tick).items():
                    answers[name] += more
    return found


def alternate(
    args: argparse.Namespace, sides: dict[str, Remote], question: Row, label: str, tick: Tick
) -> dict[str, list[Row]]:
    """Ask all sides the same, `args.rounds` times, after a turn that warms up.

    Each turn begins with another side.
    """
    found: dict[str, list[Row]] = {name: [] for name in sides}
    names = list(sides)
    for i in range(args.rounds + 1):
        tick(f"{label}, batch {question['batch_size']}: turn {i} of {args.rounds}")
        for name in names[i % len(names) :] + names[: i % len(names)]:
            answered = sides[name].ask(**question)
            if i > 0:
                found[name].append(answered)
    return found


# --- Hugging Face -----------------------------------------------------------------------------


def equal_prompts(path: str, count: int, length: int = 32) -> list[list[int]]:
    """Text prompts of one length, so that neither side has to pad."""
    ids = [token for prompt in models.chat_prompts(path, 8) for token in prompt]
    ids *= 1 + (count * 7 + length) // len(ids)
    return [ids[7 * i : 7 * i + length] for i in range(count)]


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of leading tokens that are the same."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(theirs))


def run_hf(args: argparse.Namespace, tick: Tick) -> Section:
    """The engine beside Hugging Face's generate."""
    section = Section(
        f"Decode against Hugging Face generate, {args.new_tokens} new tokens",
        {
            "batch_size": "batch",
            "ours": "engine tok/s",
            "theirs": "HF tok/s",
            "ratio": "ratio",
            "spread": "pairs",
            "target": "target",
            "met": "met",
            "whole": "whole call",
            "same": "same tokens",
        },
        notes=["tok/s from the first token on; 'whole call' is the ratio with prefill and all."],
    )
    path = models.real_model()
    questions = [
        {"batch_size": size, "output_len": args.new_tokens, "prompts": equal_prompts(path, size)}
        for size in args.batch_size
    ]
    starters = {"Hugging Face": lambda: start_hf(args), "the engine": lambda: start_engine(args)}
    found = ask_all(args, starters, questions, "hf", tick)
    for size, answers in zip(args.batch_size, found, strict=True):
        theirs, ours = answers.values()
        section.rows.append(_hf_row(size, args.new_tokens, ours, theirs))
    return section


def _hf_row(size: int, new: int, engine: list[Row], hf: list[Row]) -> Row:
    ours = [r["metrics"]["tokens_per_s"] for r in engine]
    theirs = [size * (new - 1) / r["decode_seconds"] for r in hf]
    pairs = [
        (a, b)
        for mine, its in zip(engine, hf, strict=True)
        for a, b in zip(mine["tokens"], its["tokens"], strict=True)
    ]
    same = sum(common_prefix(a, b) for a, b in pairs) / (len(pairs) * new)
    ratio, target = fair_ratio(ours, theirs), HF_TARGETS.get(size)
    return {
        "batch_size": size,
        "ours": round(statistics.median(ours), 1),
        "theirs": round(statistics.median(theirs), 1),
        "ratio": round(ratio, 3),
        "spread": spread(ours, theirs),
        "target": target,
        "met": None if target is None else ratio >= target,
        "whole": round(fair_ratio([r["seconds"] for r in hf], [r["seconds"] for r in engine]), 3),
        "same": f"{same:.1%}",
    }


# --- The two loops ----------------------------------------------------------------------------


def run_overlap(args: argparse.Namespace, tick: Tick) -> Section:
    """The overlap loop beside the normal loop."""
    section = Section(
        f"Overlap loop against normal loop, {args.new_tokens} new tokens",
        {
            "batch_size": "batch",
            "ours": "overlap tok/s",
            "theirs": "normal tok/s",
            "ratio": "ratio",
            "noise": "noise",
            "first": "first",
            "spread": "pairs",
            "target": "target",
            "met": "met",
            "idle": "forward idle, overlap / normal",
            "host": "host us/step, overlap / normal",
        },
        notes=[
            "noise: standard error of the ratio. Where it is not met but lies within twice the noise, "
            "nothing is said.",
            "first: speed of a side whose process was started first, by that of the other order.",
        ],
    )
    questions = [{"batch_size": size, "output_len": args.new_tokens} for size in args.batch_size]
    starters = {
        "overlap": lambda: start_engine(args, overlap=True),
        "normal": lambda: start_engine(args, overlap=False),
    }
    found = ask_all(args, starters, questions, "overlap", tick)
    for size, answers in zip(args.batch_size, found, strict=True):
        rounds = {name: [r["metrics"] for r in side] for name, side in answers.items()}
        section.rows.append(_overlap_row(size, rounds["overlap"], rounds["normal"]))
    return section


def _overlap_row(size: int, overlap: list[Row], normal: list[Row]) -> Row:
    ours, theirs = ([r["tokens_per_s"] for r in rounds] for rounds in (overlap, normal))

    def both(metric: str, form: str) -> str:
        values = (statistics.median(r[metric] for r in rounds) for rounds in (overlap, normal))
        return " / ".join(form.format(value) for value in values)

    return _compared(size, ours, theirs, OVERLAP_TARGET) | {
        "first": round(worth_of_being_first(ours, theirs), 3),
        "idle": both("forward_idle", "{:.3f}"),
        "host": both("host_us_per_step", "{:.0f}"),
    }


def run_penalties(args: argparse.Namespace, tick: Tick) -> Section:
    """All penalties and none, in turns on one engine with overlap."""
    section = Section(
        f"Decode with all penalties against none, {args.new_tokens} new tokens",
        {
            "batch_size": "batch",
            "ours": "with, tok/s",
            "theirs": "without, tok/s",
            "ratio": "ratio",
            "noise": "noise",
            "spread": "pairs",
            "target": "target",
            "met": "met",
            "host": "host us/step, with / without",
        },
    )
    tick("penalties: starting the engine")
    with start_engine(args, overlap=True) as engine:
        engine.wait_until_ready()
        for size in args.batch_size:
            question = {"batch_size": size, "output_len": args.new_tokens}
            found: dict[bool, list[Row]] = {True: [], False: []}
            # Half of the pairs in each order; the first two warm up.
            for i in range(-2, 2 * args.rounds):
                which = "warm-up" if i < 0 else f"pair {i + 1} of {2 * args.rounds}"
                tick(f"penalties, batch {size}: {which}")
                for penalties in (i < args.rounds, i >= args.rounds):
                    metrics = engine.ask(**question, penalties=penalties)["metrics"]
                    if i >= 0:
                        found[penalties].append(metrics)
            section.rows.append(_penalties_row(size, found[True], found[False]))
    return section


def _penalties_row(size: int, penalized: list[Row], plain: list[Row]) -> Row:
    ours, theirs = ([r["tokens_per_s"] for r in rounds] for rounds in (penalized, plain))
    host = [statistics.median(r["host_us_per_step"] for r in side) for side in (penalized, plain)]
    return _compared(size, ours, theirs, PENALTIES_TARGET) | {
        "host": " / ".join(f"{value:.0f}" for value in host)
    }


def _compared(size: int, ours: list[float], theirs: list[float], target: float) -> Row:
    """What is shown of two sides' speeds."""
    ratio, error = fair_ratio(ours, theirs), noise(ours, theirs)
    return {
        "batch_size": size,
        "ours": round(statistics.median(ours), 1),
        "theirs": round(statistics.median(theirs), 1),
        "ratio": round(ratio, 3),
        "noise": "-" if error == math.inf else f"{error:.1%}",
        "spread": spread(ours, theirs),
        "target": target,
        "met": _is_met(ratio, error, target),
    }


def _is_met(ratio: float, error: float, target: float) -> bool | None:
    """Whether a ratio is at least its target; None if it is not, but noise may be the reason."""
    if ratio >= target:
        return True
    return None if ratio * (1 + 2 * error) >= target else False


# --- Host work --------------------------------------------------------------------------------


@contextlib.contextmanager
def upstream_worker(threads: int, section: Section) -> Iterator[Remote | None]:
    """A process with real SGLang, or None with a note in `section` that says why not."""
    made = releases.interpreter("0.5.10") or sys.executable
    python = os.environ.get("UPSTREAM_PYTHON", str(made))
    reason = f"it is not at {UPSTREAM.relative_to(REPO_ROOT)}"
    with contextlib.ExitStack() as stack:
        worker = None
        if (UPSTREAM / "sglang").is_dir():
            options = ["--upstream", f"--threads={threads}"]
            try:
                worker = Remote(
                    "lab.hostwork", options, threads=threads, python=python, package=str(UPSTREAM)
                )
                stack.enter_context(worker).wait_until_ready()
            except (RemoteError, OSError) as error:
                worker, reason = None, f"{python} cannot import it ({error})"
        section.notes.append(
            "SGLang 0.5.10 was measured alternately, in this run."
            if worker
            else f"SGLang 0.5.10 was not measured: {reason}. "
            "Its figures are those measured earlier on a two-core machine of this kind."
        )
        yield worker


def run_host(args: argparse.Namespace, tick: Tick) -> Section:
    """Host work of a decode step beside upstream's."""
    section = Section(
        "Host work of filter_batch + prepare_for_decode, us a step, no penalties",
        {
            "batch_size": "batch",
            "ours": "ours, us",
            "theirs": "SGLang 0.5.10, us",
            "source": "which is",
            "ratio": "ratio",
            "spread": "pairs",
            "met": "no more",
        },
    )
    tick("host: starting the workers")
    options = [f"--threads={args.threads}"]
    with (
        Remote("lab.hostwork", options, threads=args.threads, package=PACKAGE) as own,
        upstream_worker(args.threads, section) as upstream,
    ):
        for size in HOST_BATCH_SIZES:
            ours: list[float] = []
            theirs: list[float] = []
            for i in range(args.rounds):
                tick(f"host: batch {size}, pair {i + 1} of {args.rounds}")
                ours.append(own.ask(batch_size=size)["us"])
                theirs.append(
                    upstream.ask(batch_size=size)["us"] if upstream else HOST_REFERENCE_US[size]
                )
            ratio = median_ratio(ours, theirs)
            section.rows.append(
                {
                    "batch_size": size,
                    "ours": round(statistics.median(ours), 1),
                    "theirs": round(statistics.median(theirs), 1),
                    "source": "measured beside" if upstream else "a reference",
                    "ratio": round(ratio, 3),
                    "spread": spread(ours, theirs),
                    # Figures of another machine are no measure for this one.
                    "met": ratio <= 1 if upstream else None,
                }
            )
    return section


# --- EAGLE ------------------------------------------------------------------------------------


def run_eagle(args: argparse.Namespace, tick: Tick) -> Section:
    """EAGLE chain and tree beside plain decoding."""
    section = Section(
        f"EAGLE beside plain decoding, {args.new_tokens} new tokens",
        {
            "batch_size": "batch",
            "mode": "mode",
            "tokens_per_s": "tok/s",
            "ratio": "of plain",
            "accepted_length": "accepted length",
            "forward_ms": "forward ms",
            "draft_ms": "draft ms",
            "verify_ms": "verify ms",
            "extend_ms": "draft extend ms",
        },
        notes=["The draft head is a fixture with real acceptance, and not a claim of speed."],
    )
    try:
        models.real_draft()
    except models.Unsupported as error:
        section.notes.append(f"Not measured: {error}.")
        return section
    most = max(args.eagle_batch_size)
    starters = {
        name: partial(start_engine, args, speculative=mode, max_running_requests=most)
        for name, mode in (("plain", "none"), ("chain", "chain"), ("tree", "tree"))
    }
    questions = [
        {"batch_size": size, "output_len": args.new_tokens} for size in args.eagle_batch_size
    ]
    found = ask_all(args, starters, questions, "eagle", tick)
    for size, answers in zip(args.eagle_batch_size, found, strict=True):
        rounds = {name: [r["metrics"] for r in side] for name, side in answers.items()}
        plain = [r["tokens_per_s"] for r in rounds["plain"]]
        section.rows += [_eagle_row(size, mode, rounds[mode], plain) for mode in rounds]
    return section


def _eagle_row(size: int, mode: str, rounds: list[Row], plain: list[float]) -> Row:
    row: Row = {"batch_size": size, "mode": mode}
    for name in ("tokens_per_s", "accepted_length", "forward_ms"):
        row[name] = round(statistics.median(r[name] for r in rounds), 3)
    row["ratio"] = round(fair_ratio([r["tokens_per_s"] for r in rounds], plain), 3)
    for name in ("draft_ms", "verify_ms", "extend_ms"):
        if all(name in r for r in rounds):
            row[name] = round(statistics.median(r[name] for r in rounds), 3)
    return row


RUNNERS: Final[dict[str, Callable[[argparse.Namespace, Tick], Section]]] = {
    "hf": run_hf,
    "overlap": run_overlap,
    "penalties": run_penalties,
    "host": run_host,
    "eagle": run_eagle,
}


# --- The command ------------------------------------------------------------------------------


def show(section: Section, console: Any) -> None:
    """Print a section's table."""
    from rich.table import Table

    table = Table(title=section.title, title_justify="left")
    for title in section.columns.values():
        table.add_column(title, justify="right", overflow="fold")
    for row in section.rows:
        table.add_row(*(_shown(row.get(key)) for key in section.columns))
    if section.rows:
        console.print(table)
    else:
        console.print(section.title, style="italic")
    for note in section.notes:
        console.print(note, style="dim", highlight=False, markup=False)
    console.print()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "[green]yes[/]" if value else "[red]NO[/]"
    return significant(value) if isinstance(value, float) else str(value)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="speed.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all"
    )
    parser.add_argument("--batch-size", nargs="+", type=int, default=list(HF_TARGETS))
    parser.add_argument("--eagle-batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=4, help="pairs that count, in each order of starting"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write JSON too; - prints it, and no tables")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is not met")
    args = parser.parse_args(argv)
    for name in ("batch_size", "eagle_batch_size", "new_tokens", "rounds", "threads"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if value < (2 if name == "new_tokens" else 1):
                parser.error(f"--{name.replace('_', '-')} is too small: {value}")
    return args


def measure(args: argparse.Namespace, on_section: Callable[[Section], None]) -> dict[str, Section]:
    """Run the sections that were asked for."""
    from rich.console import Console

    progress = Console(stderr=True)
    found: dict[str, Section] = {}
    with progress.status("") as status:
        for name in args.section:
            tick: Tick = status.update if progress.is_terminal else _print_line
            found[name] = RUNNERS[name](args, tick)
            on_section(found[name])
    return found


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    args = parse_args(argv)
    from rich.console import Console

    quiet = args.json == "-"
    console = Console(stderr=quiet, width=None if sys.stdout.isatty() else 140)
    for note in busy_notes(args.threads):
        console.print(note, style="bold", markup=False)
    try:
        found = measure(args, lambda section: None if quiet else show(section, console))
    except (FileNotFoundError, RemoteError) as error:
        print(f"speed: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("speed: interrupted", file=sys.stderr)
        return 130
    document = {name: {"rows": s.rows, "notes": s.notes} for name, s in found.items()}
    if quiet:
        print(json.dumps(document, indent=2))
    elif args.json is not None:
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    missed = [r for s in found.values() for r in s.rows if r.get("met") is False]
    if missed and not quiet:
        console.print(f"{len(missed)} target(s) not met.", style="bold red")
    return 1 if missed and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
