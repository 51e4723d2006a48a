"""The findings of docs/upstream-audit.md on real releases: where each shows, and where it does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from upstream import releases

REPO_ROOT: Final = Path(__file__).resolve().parents[2]
BENCHMARK: Final = REPO_ROOT / "benchmark"
REPORT: Final = REPO_ROOT / "docs" / "upstream-audit.md"
VERSIONS: Final = ("0.5.10rc0", "0.5.13.post1", "0.5.14")

EVERYWHERE: Final = {
    "filter-hidden-states",
    "filter-sampling-flags",
    "filter-prefill-only",
    "logit-bias-copies",
    "spec-lengths-pageable",
    "prefill-lengths-pageable",
    "penalties-built-on-device",
    "penalties-lag",
    "spec-penalties-miss-tokens",
    "penalties-after-retraction",
    "frequency-drift",
    "min-new-tokens-eos",
}
SHOWS: Final = {
    "0.5.10rc0": EVERYWHERE
    | {"min-new-tokens-mask", "repetition-penalty-ignored", "pause-merges-into-empty"},
    "0.5.13.post1": EVERYWHERE | {"min-new-tokens-mask"},
    "0.5.14": EVERYWHERE,
}
# These belong to releases that are not among the three.
NOWHERE: Final = {"repetition-penalty-zero", "penalizer-order", "spec-mix-blocks"}

pytestmark = pytest.mark.upstream


def run(version: str, *args: str) -> subprocess.CompletedProcess[str]:
    python = releases.interpreter(version)
    if python is None or not releases.is_there(version):
        pytest.skip(f"needs SGLang {version} and its environment: make upstream")
    tree = releases.UPSTREAM / version / "python"
    return subprocess.run(
        [str(python), "-m", "lab.upstream_reports", *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(BENCHMARK)])},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A release, and what came of each finding on it."""
    done = run(request.param, "all", "--json")
    assert done.returncode == 1, done.stderr[-3000:]
    return request.param, json.loads(done.stdout)["findings"]


@pytest.mark.parametrize("told", VERSIONS, indirect=True)
def test_what_shows_in_a_release(told: tuple[str, dict[str, Any]]) -> None:
    version, found = told
    assert {name: one["error"] for name, one in found.items() if "error" in one} == {}
    assert {name for name, one in found.items() if one["shows"]} == SHOWS[version]
    assert set(found) == EVERYWHERE | NOWHERE | set().union(*SHOWS.values())


@pytest.mark.parametrize("told", VERSIONS, indirect=True)
def test_the_matrix_of_the_report_is_what_shows(told: tuple[str, dict[str, Any]]) -> None:
    version, found = told
    head, *rows = re.findall(r"^\| (?:finding|\[`).*\|$", REPORT.read_text(), re.MULTILINE)
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    matrix = {}
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        (name,) = re.findall(r"`([\w-]+)`", cells[0])
        matrix[name] = cells[columns.index(version)] != "–"
    assert matrix == {name: one["shows"] for name, one in found.items()}


def test_the_report_has_a_section_for_each_finding() -> None:
    text = REPORT.read_text()
    titles = re.findall(r"^### (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= anchors | {
        "fields-of-a-batch",
        "transfers",
        "reports",
    }
    found = re.findall(r"^`([\w-]+)`\. Affected: ", text, re.MULTILINE)
    assert sorted(found) == sorted(EVERYWHERE | NOWHERE | set().union(*SHOWS.values()))


def test_a_finding_in_words_that_is_not_there() -> None:
    done = run("0.5.14", "repetition-penalty-zero")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "repetition-penalty-zero on 0.5.14: is not there",
        "  done   repetition_penalty 0; a token that was put out has logit 3.0",
        "  found  verify() refuses it",
        "  right  refused",
    ]
