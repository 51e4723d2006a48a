"""What the pages say of the code is so: lines of sources, limits, commands, links."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench_gate
from lab import verdicts

REPO_ROOT = Path(__file__).resolve().parents[2]
PAGES = [REPO_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "PATCHES.md")]
PAGES += sorted((REPO_ROOT / "docs").glob("*.md"))
# What is written by a program has tests of its own.
WRITTEN = [path for path in PAGES if path.name != "upstream-matrix.md"]
NAMES = [path.name for path in WRITTEN]


def page(name: str) -> str:
    """A page's text."""
    return next(path for path in PAGES if path.name == name).read_text()


def sources(line: str) -> Iterator[tuple[Path, int, str]]:
    """Lines of our package that a line of a page shows, and the function that they are said to be in."""
    for name, number, function in re.findall(r"([\w/]+\.py):(\d+)(?: ([a-z]\w+)\b)?", line):
        paths = [
            p for p in (REPO_ROOT / "python").rglob("*.py") if p.as_posix().endswith(f"/{name}")
        ]
        if len(paths) == 1:
            yield paths[0], int(number), function


@pytest.mark.parametrize("name", ["README.md", "laboratory.md"])
def test_lines_of_sources_are_in_the_functions_that_they_are_said_to_be_in(name: str) -> None:
    # A function's name is in the line of the file's.
    shown = [found for line in page(name).splitlines() for found in sources(line)]
    assert len(shown) >= 3
    for path, line, function in shown:
        text = path.read_text()
        if function in ("", "via"):  # a caller, without its name
            assert "(" in text.splitlines()[line - 1], (path.name, line)
            continue
        nodes = ast.walk(ast.parse(text))
        spans = [
            (node.lineno, node.end_lineno)
            for node in nodes
            if isinstance(node, ast.FunctionDef) and node.name == function
        ]
        assert any(first < line <= (last or first) for first, last in spans), (
            path.name,
            line,
            function,
        )


def test_the_gates_figures() -> None:
    text = " ".join(page("benchmarking.md").split())
    minutes = bench_gate.parse_args(["base", "head"]).minutes
    assert minutes == 6 and "Six minutes are the default" in text
    most, pairs = f"{bench_gate.MOST_MINUTES:.0f}", bench_gate.ENOUGH_PAIRS
    assert f"up to {most}, for {pairs} pairs of all cases" in text
    assert f"fewer than {verdicts.MIN_PAIRS} by then" in text
    assert verdicts.ALPHA == 0.01 and "one run in a hundred" in text
    assert f"differs from it by more than {verdicts.TOLERANCE:.0%} (`--tolerance`)" in text
    assert f"within {verdicts.MARGIN:.0%} of 1 (`--margin`)" in text


def test_the_limits_of_the_gpu_check() -> None:
    script = (REPO_ROOT / "scripts" / "gpu_check.sh").read_text()
    (limits,) = re.findall(r"^tests=\d+ .*$", script, re.MULTILINE)
    wanted = {name.replace("_", "-"): int(s) for name, s in re.findall(r"(\w+)=(\d+)", limits)}
    text = page("gpu-runner.md")
    told = {name: int(s) for name, s in re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) \|$", text, re.M)}
    assert told == wanted
    assert "these are 480 s" in text


@pytest.mark.parametrize("path", WRITTEN, ids=NAMES)
def test_what_is_called_by_its_path_can_be(path: Path) -> None:
    """The file is there, and it is executable, or an interpreter stands before it."""
    text = path.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    for line in lines:
        if match := re.match(r"(?:\$ )?((?:scripts|benchmark)/[\w./]+\.(?:py|sh)) \S", line):
            assert os.access(REPO_ROOT / match[1], os.X_OK), line
        if match := re.match(r"(?:\$ )?\S*(?:python3?|bash) ((?:scripts|benchmark)/[\w./]+)", line):
            assert (REPO_ROOT / match[1]).exists(), line


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
