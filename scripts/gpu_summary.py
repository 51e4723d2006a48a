#!/usr/bin/env python3
"""Put what the steps of ``gpu_check.sh`` have found into one table and one file, ``summary.json``.

Called by it with the folder of its output. A step that has not run is left out, and one that ended
without telling what it found has its verdict alone.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from asv_machine import gpu_fields

Found = dict[str, Any]
# What timeout(1) says of a command that it ended by INT, and of one that was killed, by whomever.
_TIMED_OUT: Final = 124
_KILLED: Final = 137


def read_tests(folder: Path) -> tuple[Found, str]:
    """Counts of the tests, and what is shown of them."""
    found = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(folder / "tests.xml").iter("testsuite"):
        for name in found:
            found[name] += int(suite.get(name, 0))
    passed = found["tests"] - found["failures"] - found["errors"] - found["skipped"]
    bad = found["failures"] + found["errors"]
    return found | {"passed": passed}, f"{passed} passed, {bad} failed, {found['skipped']} skipped"


def read_sync(folder: Path) -> tuple[Found, str]:
    """What waited."""
    runs = json.loads((folder / "sync-debug-found.json").read_text())
    raised = sum(run["raised"] is not None for run in runs)
    blocking = sum(run["blocking"] for run in runs)
    steps = sum(run["steps"] for run in runs)
    text = f"{blocking} blocking calls, {raised} of {len(runs)} runs raised, {steps} steps"
    return {"runs": runs, "blocking": blocking, "raised": raised}, text


def read_kernels(folder: Path) -> tuple[Found, str]:
    """Measured beside predicted, cell by cell, the worst first."""
    document = json.loads((folder / "kernels-found.json").read_text())
    cells = []
    wrong = [cell for cell in document["cells"] if cell.get("error")]
    for cell in document["cells"]:
        measured, predicted = cell.get("device_us"), cell.get("predicted_us", {}).get("sparse")
        if measured is not None and predicted:
            ratio = measured / predicted
            cells.append(
                {
                    "cell": cell["cell"],
                    "measured_us": measured,
                    "predicted_us": predicted,
                    "ratio": ratio,
                }
            )
    cells.sort(key=lambda cell: -cell["ratio"])
    found = {"device": document["device"], "cells": cells, "notes": document["notes"]}
    found["wrong"] = {cell["cell"]: cell["error"] for cell in wrong}
    bad = "".join(f"\n{cell['cell']}: {cell['error']}" for cell in wrong)
    if not cells:
        return found, f"nothing to compare with the model{bad}"
    worst = cells[0]
    text = f"worst measured/predicted {worst['ratio']:.1f} ({worst['cell']}), {len(cells)} cells"
    if document["device"] == "cpu":
        text += "; the model is a GPU's"
    if late := sum(bool(cell.get("late")) for cell in document["cells"]):
        text += f"; in {late} the device may have waited"
    return found, text + bad


def read_occupancy(folder: Path) -> tuple[Found, str]:
    """Before and after."""
    document = json.loads((folder / "occupancy-found.json").read_text())
    texts = []
    for result in document["results"]:
        sides = [result.get("before"), result.get("after")]
        shown = " -> ".join("?" if side is None else f"{side:.3f}" for side in sides)
        texts.append(f"{shown} ({result['what']})")
    return document, "\n".join(texts)


def read_asv(folder: Path) -> tuple[Found, str]:
    """The commits."""
    document = json.loads((folder / "asv-found.json").read_text())
    commits = document["commits"]
    done = [commit for commit in commits if commit["outcome"] == "done"]
    values = sum(commit["values"] for commit in commits)
    text = f"{len(done)} of {len(commits)} commits, {values} values"
    without = sum(commit["without"] for commit in commits)
    text += f", {without} without a number" if without else ""
    if document["skipped"]:
        text += f"\nasv skipped: {document['skipped']}; measured without it"
    return document, text


READERS: Final[dict[str, Callable[[Path], tuple[Found, str]]]] = {
    "tests": read_tests,
    "sync-debug": read_sync,
    "kernels": read_kernels,
    "occupancy": read_occupancy,
    "asv": read_asv,
}


def verdict(step: Found) -> str:
    """A word for what came of a step."""
    status = step["status"]
    is_late = step["seconds"] >= step["limit"]
    if status == _TIMED_OUT or (status == _KILLED and is_late):
        return "timed out"
    if status == _KILLED:
        return "KILLED"
    return "FAILED" if status else "passed"


def summarise(folder: Path) -> Found:
    """All that the steps left in a folder."""
    steps = []
    for name, read in READERS.items():
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        step = json.loads(path.read_text())
        step["verdict"] = verdict(step)
        try:
            step["found"], step["figures"] = read(folder)
        # Whatever a step left that was ended while it wrote; the others' figures are shown all the same.
        except (
            *(OSError, ValueError, LookupError, TypeError, AttributeError),
            ElementTree.ParseError,
        ) as error:
            step["found"], step["figures"] = None, f"says nothing ({type(error).__name__})"
        steps.append(step)
    return {"machine": gpu_fields(), "steps": steps}


def table(summary: Found) -> list[str]:
    """Lines of the table."""
    machine = ", ".join(f"{key} {value}" for key, value in summary["machine"].items())
    lines = [f"== gpu_check: {machine}"]
    for step in summary["steps"]:
        first, *rest = step["figures"].split("\n")
        head = f"  {step['step']:11} {step['verdict']:10} {step['seconds']:4} s  "
        lines += [head + first, *(" " * len(head) + line for line in rest)]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Write and print; return the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: gpu_summary.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    summary = summarise(folder)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("\n".join(table(summary)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
