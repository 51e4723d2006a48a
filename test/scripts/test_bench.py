"""``scripts/bench.py``: which commits it measures, and what its table says of asv's results."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import bench
from bench import Landmark, Progress
from lab.cases import QUESTIONS

REPO_ROOT = Path(__file__).resolve().parents[2]
MACHINE = "box"


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(repo), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(repo: Path, message: str) -> str:
    git(repo, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "-b", "main")
    return tmp_path


FIRST = "Fix 1\n\nUpstream-PR: sgl-project/sglang#21840"
SECOND = "Fix 2\n\nUpstream-PR: sgl-project/sglang#28500"


# --- Landmarks --------------------------------------------------------------------------------


def test_landmarks_of_the_whole_history(repo: Path) -> None:
    commit(repo, "older base")
    base = commit(repo, "base")
    first = commit(repo, FIRST)
    commit(repo, "tests of fix 1")
    second = commit(repo, SECOND)
    head = commit(repo, "tests of fix 2")
    found = bench.landmarks(repo)
    assert [mark.sha for mark in found] == [base, first, second, head]
    names = ["; ".join(mark.names) for mark in found]
    assert names[0] == "last base commit"
    assert "#21840" in names[1] and "is_prefill_only" in names[1]
    assert "#28500" in names[2]
    assert names[3] == "HEAD"


def test_landmarks_without_fixes_are_head_alone(repo: Path) -> None:
    head = commit(repo, "base")
    assert [(mark.sha, mark.names) for mark in bench.landmarks(repo)] == [(head, ["HEAD"])]


def test_a_commit_that_is_two_landmarks_is_measured_once(repo: Path) -> None:
    base = commit(repo, "base")
    first = commit(repo, FIRST)
    found = bench.landmarks(repo)
    assert [mark.sha for mark in found] == [base, first]
    assert found[1].names[1] == "HEAD"


def test_further_commits_stand_in_their_place(repo: Path) -> None:
    shas = [commit(repo, message) for message in ("base", FIRST, "between", SECOND, "last")]
    found = bench.landmarks(repo, ["HEAD~2"])
    assert [mark.sha for mark in found] == shas
    assert found[2].names == ["HEAD~2"]


def test_what_cannot_be_measured_is_named(repo: Path) -> None:
    with pytest.raises(bench.BenchError, match="HEAD"):
        bench.landmarks(repo)
    commit(repo, "base")
    with pytest.raises(bench.BenchError, match="no commit 'nowhere'"):
        bench.landmarks(repo, ["nowhere"])
    commit(repo, FIRST)
    commit(repo, FIRST)
    with pytest.raises(bench.BenchError, match="2 commits carry"):
        bench.landmarks(repo)


# --- Results ----------------------------------------------------------------------------------


def write_results(repo: Path, sha: str, results: dict[str, dict[str, float | None]]) -> None:
    """What asv writes of a commit."""
    shutil.copy(REPO_ROOT / "asv.conf.json", repo)
    folder = repo / ".asv" / "results" / MACHINE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps({"machine": MACHINE, "version": 1}))
    columns = ["result", "params", "version"]
    document = {
        "commit_hash": sha,
        "env_name": "env",
        "date": 0,
        "params": {"machine": MACHINE},
        "python": "3.11",
        "requirements": {},
        "env_vars": {},
        "result_columns": columns,
        "results": {
            key: [list(values.values()), [[f"'{case}'" for case in values]], "1"]
            for key, values in results.items()
        },
        "durations": {},
        "version": 2,
    }
    (folder / f"{sha[:8]}-env.json").write_text(json.dumps(document))


BASE_RESULTS: dict[str, dict[str, float | None]] = {
    "decode.Decode.track_us_per_token": {"tiny-b8": 100.0},
    "decode.Decode.track_us_per_token_ratio": {"tiny-b8": 0.010},
    "decode.Decode.track_itl_p50_ms": {"tiny-b8": 0.8},
    "decode.Decode.track_itl_p50_ms_ratio": {"tiny-b8": 0.08},
    "decode.Decode.track_forward_idle": {"tiny-b8": 0.25},
    "mixed.Mixed.track_stalled": {"tiny-b8": 1.0},
    "mixed.Mixed.track_us_per_token": {"tiny-b8": math.nan},
    "mixed.MixedMore.track_us_per_token": {"real-b4": 50.0},
    "memory.Memory.track_peak_step_bytes": {"plain": math.nan},
    "decode.Decode.track_steps_per_token": {"tiny-b8-normal": 0.625},
}
FIXED_RESULTS = BASE_RESULTS | {
    # Slower, but so was the machine: by the anchor it got twice as fast.
    "decode.Decode.track_us_per_token": {"tiny-b8": 200.0},
    "decode.Decode.track_us_per_token_ratio": {"tiny-b8": 0.005},
    "decode.Decode.track_itl_p50_ms_ratio": {"tiny-b8": 0.04},
    "mixed.Mixed.track_stalled": {"tiny-b8": 0.0},
    "mixed.Mixed.track_us_per_token": {"tiny-b8": 250.0},
    "decode.Decode.track_steps_per_token": {"tiny-b8-normal": None},
}


@pytest.fixture
def found(repo: Path) -> list[bench.Values]:
    shas = ["a" * 40, "b" * 40]
    for sha, results in zip(shas, (BASE_RESULTS, FIXED_RESULTS), strict=True):
        write_results(repo, sha, results)
    return [bench.load_results(repo, MACHINE, sha) for sha in shas]


def test_results_are_read_as_asv_wrote_them(found: list[bench.Values]) -> None:
    assert found[0]["decode.track_us_per_token", "tiny-b8"] == 100.0
    assert math.isnan(found[0]["mixed.track_us_per_token", "tiny-b8"] or 0.0)
    assert found[1]["decode.track_steps_per_token", "tiny-b8-normal"] is None


def test_a_commit_without_results(repo: Path, found: list[bench.Values]) -> None:
    assert bench.load_results(repo, MACHINE, "c" * 40) == {}


def table_rows(found: list[bench.Values]) -> dict[tuple[str, str, str], list[str]]:
    rows = bench.rows(found)
    return {(question, case, metric): cells for question, case, metric, cells, _ in rows}


def test_what_the_table_says(found: list[bench.Values]) -> None:
    rows = table_rows(found)
    assert rows["decode", "tiny-b8", "tokens/s ↑"] == ["10,000", "5,000 [dim]0.50×[/]"]
    assert rows["decode", "tiny-b8", "ITL p50, ms ↓"] == ["0.800", "0.800 [dim]1.00×[/]"]
    assert rows["decode", "tiny-b8", "forward occupancy ↑"] == ["0.750", "0.750 [dim]1.00×[/]"]
    assert rows["mixed", "tiny-b8", "tokens/s ↑"] == ["[bold red]stalls[/]", "4,000"]
    # What the quick set leaves out has a class of its own, and is shown beside it.
    assert rows["mixed", "real-b4", "tokens/s ↑"] == ["20,000", "20,000 [dim]1.00×[/]"]
    accepted = rows["decode", "tiny-b8-normal", "accepted length ↑"]
    assert accepted == ["1.60", "[red]failed[/]"]
    assert rows["memory", "plain", "peak of a step, MB ↓"] == ["[dim]n/a[/]"] * 2
    assert rows["decode", "tiny-b8", "ITL p99, ms ↓"] == ["[dim]not measured[/]"] * 2


def test_the_table_names_the_fixes(found: list[bench.Values]) -> None:
    out = io.StringIO()
    marks = [Landmark("a" * 40, ["last base commit"]), Landmark("b" * 40, ["fix #21840: [flag]"])]
    bench.show(marks, found, Console(file=out, width=150))
    text = out.getvalue()
    for word in (
        "last base commit",
        "fix #21840: [flag]",
        "aaaaaaaa",
        "bbbbbbbb",
        "stalls",
        "4,000",
    ):
        assert word in text


def test_json_has_no_bare_nan(found: list[bench.Values]) -> None:
    marks = [Landmark("a" * 40, ["x"]), Landmark("b" * 40, ["y"])]
    text = json.dumps(bench._as_json(marks, found), allow_nan=False)
    first = json.loads(text)[0]
    assert {
        "benchmark": "mixed.track_us_per_token",
        "case": "tiny-b8",
        "value": "NaN",
    } in first["results"]


def test_every_tracked_metric_of_the_table_exists() -> None:
    assert bench.METRICS.keys() == QUESTIONS.keys()
    for question, shown in bench.METRICS.items():
        source = (REPO_ROOT / "benchmark" / "asv" / f"{question}.py").read_text()
        source += (REPO_ROOT / "benchmark" / "lab" / "history.py").read_text()
        for metric in shown:
            assert f"track_{metric.track} =" in source, metric.track


@pytest.mark.parametrize(
    ("name", "quick"),
    [
        ("decode.Decode.track_us_per_token", True),
        ("decode.DecodeMore.track_us_per_token", False),
        ("memory.MemoryMore.track_peak_step_bytes", False),
    ],
)
def test_the_quick_set_by_asvs_regular_expression(name: str, quick: bool) -> None:
    assert bool(re.search(bench.QUICK, name)) is quick


# --- Progress ---------------------------------------------------------------------------------


def test_progress_in_a_log() -> None:
    out = io.StringIO()
    log: dict[str, Any] = {"case": "decode/tiny-b8"}
    with Progress(Console(file=out, width=100), cases=2) as progress:
        progress.stage("commit aaaaaaaa (1 of 4)")
        progress.event({"event": "progress", "done": 0, "total": 5, "what": "measuring", **log})
        progress.event({"event": "result", "outcome": "done", **log})
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("commit aaaaaaaa (1 of 4)")
    assert lines[1].endswith("decode/tiny-b8: done")


def test_a_checkout_without_asv_or_results_is_an_error(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "make_machine_known", lambda name: MACHINE)
    commit(repo, "base")
    assert bench.main(["--repo", str(repo), "--table"]) == 1
    assert "asv.conf.json" in capsys.readouterr().err
    shutil.copy(REPO_ROOT / "asv.conf.json", repo)
    assert bench.main(["--repo", str(repo), "--table"]) == 1
    assert "there are no results yet" in capsys.readouterr().err
