#!/usr/bin/env python3
"""What do penalties cost a step, beside dense ones and beside upstream's? (``make bench-penalties``)

Prints a table of a grid of cells, and which targets are met. `lab.penalty_costs` says what a cell is and
how it is measured, `lab.penalty_model` what the columns of the GPU model say, which need no GPU. With
``--device cuda`` the table has what was measured there beside what the model predicts.

The real penalizers of SGLang 0.5.14 are measured where ``make upstream`` has put them, else left out.

Examples
--------
::

    python benchmark/micro/penalties.py --quick
    python benchmark/micro/penalties.py --kinds plain join --threads 1 --json penalties.json
    python benchmark/micro/penalties.py --cells 'b64-v128256'
    python benchmark/micro/penalties.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

REPO_ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO_ROOT / "benchmark"))
# Of the profiler that tells of memory, no lines of its own.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch  # noqa: E402

from lab import penalty_costs as costs  # noqa: E402
from lab import upstream_penalties  # noqa: E402
from lab.formats import busy_notes, significant  # noqa: E402

# Seconds of measuring a cell, and most rounds.
FULL: Final = {"cpu": (1.2, 41), "cuda": (0.6, 9)}
QUICK_SECONDS: Final = 1.0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="penalties.py", description=summary)
    parser.add_argument("--quick", action="store_true", help="a few cells, less than a minute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count(),
        help="of torch; all of the machine by default",
    )
    parser.add_argument("--kinds", nargs="+", choices=costs.KINDS, default=list(costs.KINDS))
    parser.add_argument("--cells", metavar="REGEX", help="only cells whose name it is found in")
    backends = ("auto", "torch", "triton", "numba")
    parser.add_argument(
        "--backend", default="auto", choices=backends, help="of PenaltyState, auto by default"
    )
    parser.add_argument(
        "--dense-backend", default="auto", choices=backends, help="of the one-pass dense penalties"
    )
    parser.add_argument(
        "--release", default=upstream_penalties.VERSION, help="SGLang's, to compare"
    )
    parser.add_argument("--seconds", type=float, help="of measuring a cell")
    parser.add_argument(
        "--cold", action="store_true", help="sweep memory through the caches before each step"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"argument --threads: must be at least 1, got {args.threads}")
    if args.seconds is not None and not args.seconds > 0:
        parser.error(f"argument --seconds: must be above 0, got {args.seconds}")
    if args.device == "cpu" and "triton" in (args.backend, args.dense_backend):
        parser.error("triton penalizes on a GPU only: --device cuda")
    try:
        re.compile(args.cells or "")
    except re.error as error:
        parser.error(f"argument --cells: {args.cells!r} is no regular expression: {error}")
    return args


def chosen_cells(args: argparse.Namespace) -> list[costs.Cell]:
    """The cells that were asked for."""
    cells = list(costs.QUICK) if args.quick else costs.grid()
    cells = [cell for cell in cells if cell.kind in args.kinds]
    return [cell for cell in cells if args.cells is None or re.search(args.cells, cell.name)]


def options(args: argparse.Namespace, notes: list[str]) -> costs.Options:
    """How to measure; what is to be said of it goes into `notes`."""
    library = None
    if upstream_penalties.is_there(args.release):
        why_eager = upstream_penalties.why_eager(args.device)
        library = upstream_penalties.load(args.release, compiles=why_eager is None)
        notes += [why_eager] if why_eager else []
    else:
        fetch = f".venv/bin/python scripts/upstream fetch {args.release}"
        notes.append(f"SGLang {args.release} is not there, and was left out: run `{fetch}`")
    seconds, most = FULL[args.device]
    seconds = QUICK_SECONDS if args.quick else seconds
    return costs.Options(
        device=torch.device(args.device),
        backend=args.backend,
        dense_backend=args.dense_backend,
        library=library,
        seconds=args.seconds or seconds,
        max_rounds=most,
        cold=args.cold,
    )


def run(
    cells: Sequence[costs.Cell],
    how: costs.Options,
    console: Any,
    results: list[costs.CellResult],
    failed: list[costs.CellResult],
) -> None:
    """Measure cells into `results`, and show how far it is: a bar on a terminal, elsewhere lines.

    Cells without numbers go into `failed`. Behind an error of the device there are no others.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    started = said = time.monotonic()
    logits = costs.Logits(cells, how.device)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("penalties", total=len(cells))
        for number, cell in enumerate(cells):
            bar.update(task, description=cell.name)
            if not console.is_terminal and time.monotonic() - said > 10:
                said = time.monotonic()
                text = f"[{said - started:6.0f} s] {number}/{len(cells)} {cell.name}"
                console.print(text, markup=False, highlight=False)
            try:
                with torch.inference_mode():
                    results.append(costs.measure(cell, how, logits))
            except costs.WorkNotDone as error:
                failed.append(costs.CellResult(cell, error=str(error)))
            except Exception as error:
                failed.append(costs.CellResult(cell, error=f"{type(error).__name__}: {error}"))
                return
            bar.advance(task)


# --- Tables -------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 3, unit: str = "") -> str:
    return "" if value is None else f"{significant(value, digits)}{unit}"


def _bytes(count: int | None) -> str:
    if count is None or count < 0:
        return ""
    if count == 0:
        return "0"
    if count < 1 << 20:
        return f"{significant(count / 1024, 3)}K"
    return f"{significant(count / (1 << 20), 3)}M"


def _memory(result: costs.CellResult, name: str) -> str:
    if name not in result.state_bytes:
        return ""
    return f"{_bytes(result.state_bytes[name])}+{_bytes(result.temporary_bytes[name])}"


def table(results: Sequence[costs.CellResult], device: str) -> Any:
    """The table of the cells, for rich."""
    from rich.table import Table

    made = Table(title=f"Penalties, us a step on {device}", title_justify="left")
    for name in ("kind", "B", "V", "seen"):
        made.add_column(name, justify="left" if name == "kind" else "right")
    columns = ["sparse", "host", "device", "floor", "one-pass", "upstream", "overlap"]
    columns += ["one-pass ÷", "upstream ÷", "overlap ÷", "memory", "upstream's"]
    columns += ["GPU model", "one-pass", "upstream"] + (["by model"] if device == "cuda" else [])
    for name in columns:
        made.add_column(name, justify="right", overflow="fold")
    before = None
    for result in results:
        cell = result.cell
        group = (cell.kind, cell.batch_size)
        if before not in (None, group):
            made.add_section()
        before = group
        made.add_row(*_cells(result, device))
    return made


def _cells(result: costs.CellResult, device: str) -> list[str]:
    cell, us, model = result.cell, result.us, result.predicted_us
    joins = cell.kind == "join"
    cells = [cell.kind, str(cell.batch_size), str(cell.vocab_size), "" if joins else str(cell.seen)]
    cells.append(f"[bold]{_number(us['sparse'])}[/]")
    cells += ["", ""] if joins else [_number(result.host_us), _number(result.device_us)]
    cells.append(_number(us.get("floor")))
    cells += [_number(us.get(name)) for name in costs.OTHERS]
    for name in costs.OTHERS:
        ratio = result.ratios.get(name)
        text = _number(ratio, 3, "x")
        cells.append(f"[red]{text}[/]" if ratio is not None and ratio < 1 else text)
    cells += [_memory(result, "sparse"), _memory(result, "upstream")]
    cells += [_number(model.get(name)) for name in ("sparse", "one_pass", "upstream")]
    if device == "cuda":
        predicted = model.get("sparse")
        cells.append(_number(result.device_us / predicted, 3, "x") if predicted else "")
    return cells


LEGEND: Final = (
    "us of a step, medians; '÷': the other's time by ours, median of the rounds' ratios. host: plan and "
    "settle; device: begin, stage, apply, commit.",
    "one-pass: a dense pass of our own; upstream: SGLang's penalizers as the loop without overlap uses "
    "them, overlap: as with it. All take turns, so each finds the caches as another one left them.",
    "floor: each logit that has to change, read and written once in ascending order, on the CPU; no "
    "penalties, no counting, no looking up.",
    "memory: held between steps + allocated besides within one (from torch's allocator); K and M bytes.",
    "GPU model: us on paper for an H200, bytes / 4.3 TB/s + launches x 2.5 us, see "
    "lab/penalty_model.py; nothing of it was measured.",
)


def verdict_table(verdicts: Sequence[costs.Verdict]) -> Any:
    """The table of the targets, for rich."""
    from rich.table import Table

    made = Table(title="Targets", title_justify="left")
    for name in ("device", "target", "met", "worst", "cell", "cells", "missed"):
        made.add_column(name, justify="left" if name in ("device", "target", "cell") else "right")
    for verdict in verdicts:
        target = verdict.target
        if verdict.met is None or verdict.worst is None:
            made.add_row(target.device, target.text, "[dim]not measured[/]")
            continue
        met = "[green]yes[/]" if verdict.met else "[bold red]no[/]"
        cells = [_number(verdict.value, 3), verdict.worst.cell.name, str(verdict.cells)]
        made.add_row(target.device, target.text, met, *cells, str(len(verdict.misses) or ""))
    return made


def missed(verdicts: Sequence[costs.Verdict]) -> list[str]:
    """A line for each cell that misses a target, with what the floor itself would reach there."""
    lines = []
    for verdict in verdicts:
        for miss in verdict.misses:
            floor = "" if miss.floor is None else f", the floor itself {_number(miss.floor, 2)}"
            line = (
                f"missed: {verdict.target.text}: {miss.cell.name} {_number(miss.value, 3)}{floor}"
            )
            lines.append(line)
    return lines


def document(
    args: argparse.Namespace,
    results: Sequence[costs.CellResult],
    verdicts: Sequence[costs.Verdict],
    notes: Sequence[str],
) -> dict[str, Any]:
    """What the file of ``--json`` holds."""
    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": args.threads,
        "backend": args.backend,
        "release": args.release,
        "notes": list(notes),
        "cells": [result.as_json() for result in results],
        "targets": [
            {
                "target": verdict.target.text,
                "device": verdict.target.device,
                "met": verdict.met,
                "value": verdict.value,
                "cell": verdict.worst.cell.name if verdict.worst else None,
                "misses": [
                    {"cell": miss.cell.name, "value": miss.value, "floor": miss.floor}
                    for miss in verdict.misses
                ],
            }
            for verdict in verdicts
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the work was not done, whatever the targets say."""
    from rich.console import Console

    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    cells = chosen_cells(args)
    if not cells:
        print("penalties: error: no such cell", file=sys.stderr)
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print("penalties: error: torch sees no CUDA device", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    notes = busy_notes(args.threads)
    if notes and args.threads > 1:
        notes.append("--threads 1 waits less")
    results: list[costs.CellResult] = []
    failed: list[costs.CellResult] = []
    is_interrupted = False
    try:
        run(cells, options(args, notes), console, results, failed)
    except KeyboardInterrupt:
        is_interrupted = True
    if missing := len(cells) - len(results) - len(failed):
        why = "interrupted" if is_interrupted else "not gone on"
        notes.append(f"{why}: {missing} of {len(cells)} cells are missing")
    verdicts = costs.verdicts(results, args.device)
    for note, count in Counter(note for result in results for note in result.notes).items():
        notes.append(f"{count} cells: {note}")
    console.print(table(results, args.device))
    for line in (*LEGEND, *notes):
        console.print(line, style="dim", markup=False, highlight=False)
    console.print(verdict_table(verdicts))
    for line in missed(verdicts):
        console.print(line, markup=False, highlight=False)
    for result in failed:
        print(f"penalties: error: {result.cell.name}: {result.error}", file=sys.stderr)
    seconds = time.monotonic() - started
    console.print(f"{len(results)} cells, {args.threads} threads, {seconds:.0f} s in all")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found = document(args, [*results, *failed], verdicts, notes)
        args.json.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    if failed:
        return 1
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
