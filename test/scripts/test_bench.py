"""``scripts/bench.py``: which commits it measures, and what its table says of asv's results."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import bench
from bench import Landmark, Progress
from lab.cases import QUESTIONS
from processes import end_by, is_alive, wait_for

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


def write_results(
    repo: Path,
    sha: str,
    results: dict[str, dict[str, float | None]],
    *,
    version: str = "1",
    env: str = "env",
    started_at: int = 1,
) -> Path:
    """What asv writes of a commit; the file."""
    shutil.copy(REPO_ROOT / "asv.conf.json", repo)
    folder = repo / ".asv" / "results" / MACHINE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps({"machine": MACHINE, "version": 1}))
    benchmarks = folder.parent / "benchmarks.json"
    known = json.loads(benchmarks.read_text()) if benchmarks.is_file() else {"version": 2}
    for key, values in results.items():
        params = [[f"'{case}'" for case in values]]
        about = {"name": key, "params": params, "param_names": ["case"], "version": "1"}
        known.setdefault(key, about)
    benchmarks.write_text(json.dumps(known))
    columns = ["result", "params", "version", "started_at"]
    document = {
        "commit_hash": sha,
        "env_name": env,
        "date": 0,
        "params": {"machine": MACHINE},
        "python": "3.11",
        "requirements": {},
        "env_vars": {},
        "result_columns": columns,
        "results": {
            key: [list(values.values()), [[f"'{case}'" for case in values]], version, started_at]
            for key, values in results.items()
        },
        "durations": {},
        "version": 2,
    }
    path = folder / f"{sha[:8]}-{env}.json"
    path.write_text(json.dumps(document))
    return path


BASE_RESULTS: dict[str, dict[str, float | None]] = {
    "decode.Decode.track_us_per_token": {"tiny-b8": 100.0},
    "decode.Decode.track_us_per_token_ratio": {"tiny-b8": 0.010},
    "decode.Decode.track_itl_p50_ms": {"tiny-b8": 0.8},
    "decode.Decode.track_itl_p50_ms_ratio": {"tiny-b8": 0.08},
    "decode.Decode.track_forward_idle": {"tiny-b8": 0.25},
    "mixed.Mixed.track_stalled": {"tiny-b8": 1.0},
    "mixed.Mixed.track_unfinished": {"tiny-b8": 8.0},
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
    "decode.Decode.track_itl_p99_ms": {"tiny-b8": 9.0},
    "mixed.Mixed.track_stalled": {"tiny-b8": 0.0},
    "mixed.Mixed.track_unfinished": {"tiny-b8": 0.0},
    "mixed.Mixed.track_us_per_token": {"tiny-b8": 250.0},
    "decode.Decode.track_steps_per_token": {"tiny-b8-normal": None},
}


@pytest.fixture
def found(repo: Path) -> list[bench.Values]:
    shas = ["a" * 40, "b" * 40]
    for sha, results in zip(shas, (BASE_RESULTS, FIXED_RESULTS), strict=True):
        write_results(repo, sha, results)
    loaded = bench.load_results(repo, MACHINE, shas)
    assert loaded.notes == []
    return loaded.values


def test_results_are_read_as_asv_wrote_them(found: list[bench.Values]) -> None:
    assert found[0]["decode.track_us_per_token", "tiny-b8"] == 100.0
    assert math.isnan(found[0]["mixed.track_us_per_token", "tiny-b8"] or 0.0)
    assert found[1]["decode.track_steps_per_token", "tiny-b8-normal"] is None


def test_a_commit_without_results(repo: Path, found: list[bench.Values]) -> None:
    assert bench.load_results(repo, MACHINE, ["c" * 40]).values == [{}]


TIME = "decode.Decode.track_us_per_token"


def test_what_a_benchmark_no_longer_means_is_left_out(repo: Path) -> None:
    write_results(repo, "b" * 40, {TIME: {"tiny-b8": 100.0}})
    write_results(
        repo, "a" * 40, {TIME: {"tiny-b8": 7777.0}, "gone.Gone.track_x": {"c": 1.0}}, version="0"
    )
    loaded = bench.load_results(repo, MACHINE, ["a" * 40, "b" * 40])
    assert loaded.values == [{}, {("decode.track_us_per_token", "tiny-b8"): 100.0}]
    (note,) = loaded.notes
    assert note.startswith("2 results are left out: their benchmarks have changed")


@pytest.mark.parametrize("last", ["a-existing", "b-virtualenv"])
def test_of_several_environments_the_last_one_counts(repo: Path, last: str) -> None:
    """Whatever their files are called, and benchmark by benchmark."""
    other = "decode.Decode.track_itl_p50_ms"
    for env in ("a-existing", "b-virtualenv"):
        value, when = (200.0, 2) if env == last else (100.0, 1)
        write_results(repo, "a" * 40, {TIME: {"tiny-b8": value}}, env=env, started_at=when)
    write_results(repo, "a" * 40, {other: {"tiny-b8": 3.0}}, env="c-more", started_at=0)
    (values,) = bench.load_results(repo, MACHINE, ["a" * 40]).values
    assert values["decode.track_us_per_token", "tiny-b8"] == 200.0
    assert values["decode.track_itl_p50_ms", "tiny-b8"] == 3.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("null", "no JSON object, but None"),
        ("{", "no JSON"),
        ('{"version": 2, "results": null}', "commit_hash is None, not a commit's hash"),
        (None, "commit_hash is bbbb"),
    ],
    ids=["null", "truncated", "no results", "another commit's"],
)
def test_a_file_that_is_odd_is_left_out_and_named(
    repo: Path, content: str | None, said: str
) -> None:
    write_results(repo, "a" * 40, {TIME: {"tiny-b8": 100.0}})
    odd = repo / ".asv" / "results" / MACHINE / "aaaaaaaa-odd.json"
    if content is None:
        write_results(repo, "b" * 40, {TIME: {"tiny-b8": 5.0}}).rename(odd)
    else:
        odd.write_text(content)
    loaded = bench.load_results(repo, MACHINE, ["a" * 40])
    assert loaded.values == [{("decode.track_us_per_token", "tiny-b8"): 100.0}]
    (note,) = loaded.notes
    assert note.startswith("left out: ") and "aaaaaaaa-odd.json" in note and said in note


def test_benchmarks_of_another_suite_are_left_alone(repo: Path) -> None:
    path = write_results(repo, "a" * 40, {TIME: {"tiny-b8": 100.0}})
    document, benchmarks = json.loads(path.read_text()), path.parents[1] / "benchmarks.json"
    known = json.loads(benchmarks.read_text())
    foreign: dict[str, list[list[str]]] = {
        "other.time_none": [],
        "other.Two.time_two": [["1"], ["2"]],
    }
    for key, params in foreign.items():
        document["results"][key] = [[1.0], params, "1", 1]
        names = ["n"] * len(params)
        known[key] = {"name": key, "params": params, "param_names": names, "version": "1"}
    path.write_text(json.dumps(document))
    benchmarks.write_text(json.dumps(known))
    loaded = bench.load_results(repo, MACHINE, ["a" * 40])
    assert loaded.values == [{("decode.track_us_per_token", "tiny-b8"): 100.0}]


def test_without_a_list_of_benchmarks_nothing_is_told(repo: Path) -> None:
    path = write_results(repo, "a" * 40, {TIME: {"tiny-b8": 100.0}})
    (path.parents[1] / "benchmarks.json").write_text("[]")
    with pytest.raises(bench.BenchError, match=r"benchmarks.json is no JSON object.*make bench"):
        bench.load_results(repo, MACHINE, ["a" * 40])


def table_rows(found: list[bench.Values]) -> dict[tuple[str, str, str], list[str]]:
    rows = bench.rows(found)
    return {(question, case, metric): cells for question, case, metric, cells, _ in rows}


def test_what_the_table_says(found: list[bench.Values]) -> None:
    rows = table_rows(found)
    assert rows["decode", "tiny-b8", "tokens/s ↑"] == ["10,000", "5,000 [dim]0.50×[/]"]
    assert rows["decode", "tiny-b8", "ITL p50, ms ↓"] == ["0.800", "0.800 [dim]1.00×[/]"]
    assert rows["decode", "tiny-b8", "forward occupancy ↑"] == ["0.750", "0.750 [dim]1.00×[/]"]
    assert rows["mixed", "tiny-b8", "tokens/s ↑"] == ["[bold red]stalls[/]", "4,000"]
    # A commit that stalls has this number all the same.
    assert rows["mixed", "tiny-b8", "generations unfinished ↓"] == ["8", "0 [dim]0.00×[/]"]
    # What the quick set leaves out has a class of its own, and is shown beside it.
    assert rows["mixed", "real-b4", "tokens/s ↑"] == ["20,000", "20,000 [dim]1.00×[/]"]
    accepted = rows["decode", "tiny-b8-normal", "accepted length ↑"]
    assert accepted == ["1.60", "[red]failed[/]"]
    assert rows["memory", "plain", "peak of a step, MB ↓"] == ["[dim]n/a[/]"] * 2
    assert rows["decode", "tiny-b8", "ITL p99, ms ↓"] == ["[dim]not measured[/]", "9.00"]
    # No commit has any.
    assert ("memory", "plain", "penalties, MB ↓") not in rows


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([0.0, 1.0, 2.0], ["0.0", "1.0", "2.0"]),
        (
            [None, 2.0, 0.0, 1.0],
            ["[red]failed[/]", "2.0", "0.0 [dim]0.00×[/]", "1.0 [dim]0.50×[/]"],
        ),
    ],
)
def test_factors_are_against_the_first_number_or_there_are_none(
    values: list[float | None], cells: list[str]
) -> None:
    key = ("transfers.track_blocking_per_step", "decode-b8")
    metric = bench.METRICS["transfers"][0]
    assert (
        bench._cells([{key: value} for value in values], "transfers", metric, "decode-b8") == cells
    )


def test_a_time_of_0_has_an_infinite_inverse() -> None:
    key = ("decode.track_us_per_token", "tiny-b8")
    metric = bench.METRICS["decode"][0]
    found = [{key: value} for value in (0.0, 100.0)]
    assert bench._cells(found, "decode", metric, "tiny-b8") == ["inf", "10,000"]


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
            assert re.search(rf"\btrack_{metric.track}( =|\()", source), metric.track


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
    for regex, matches in (
        (r"^decode\.|memory", True),
        ("track_", True),
        ("^track", False),
        (r"(?i)^DECODE\.|MEMORY", True),
    ):
        (of_quick,) = bench.chosen([regex], full=False)
        assert bool(re.search(of_quick, name)) is (quick and matches)
        assert bench.chosen([regex], full=True) == [regex]
    # It is named.
    assert bench.chosen([r"\.\w+More\."], full=False) == [r"\.\w+More\."]


def test_without_an_expression_it_is_the_quick_set_or_all() -> None:
    assert bench.chosen([], full=False) == [bench.QUICK]
    assert bench.chosen([], full=True) == []


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
    monkeypatch.setattr(bench, "machine_known_as", lambda name: MACHINE)
    commit(repo, "base")
    assert bench.main(["--repo", str(repo), "--table"]) == 1
    assert "asv.conf.json" in capsys.readouterr().err
    shutil.copy(REPO_ROOT / "asv.conf.json", repo)
    assert bench.main(["--repo", str(repo), "--table"]) == 1
    assert "there are no results yet" in capsys.readouterr().err


# --- The call ---------------------------------------------------------------------------------


@pytest.fixture
def measured(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results of HEAD, which asv has measured; no call of it has been made."""
    (repo / "home").mkdir()
    monkeypatch.setenv("HOME", str(repo / "home"))
    monkeypatch.delenv("ASV_MACHINE", raising=False)
    return write_results(repo, commit(repo, "base"), {TIME: {"tiny-b8": 100.0}})


def test_variables_that_are_left_behind_are_told(
    repo: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their results look like any, and are not measured again."""
    for name in bench.CHANGING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bench, "make_machine_known", lambda name: MACHINE)
    monkeypatch.setattr(bench, "publish", lambda repo: (repo, "not written"))
    monkeypatch.setattr(bench, "run_asv", lambda *_: 0)
    assert bench.main(["--repo", str(repo)]) == 0
    assert "changes what is measured" not in capsys.readouterr().out
    monkeypatch.setenv("LAB_ROUNDS", "1")
    monkeypatch.setenv("LAB_DRAFT", "/some/head")
    assert bench.main(["--repo", str(repo)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "LAB_ROUNDS=1 changes what is measured, and so what is kept" in out
    assert "LAB_DRAFT=/some/head changes" in out and "--rerun" in out
    assert "LAB_MODEL" not in out


def no_asv(*_: Any) -> Any:
    raise AssertionError("asv was called")


def test_a_table_alone_writes_nothing(
    repo: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("publish", "run_asv", "make_machine_known", "measuring_alone"):
        monkeypatch.setattr(bench, name, no_asv)
    before = sorted(repo.rglob("*"))
    assert bench.main(["--repo", str(repo), "--table", "--machine", MACHINE]) == 0
    assert "10,000" in capsys.readouterr().out
    assert sorted(repo.rglob("*")) == before


def test_a_table_of_what_is_asked_for(
    repo: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {
        "decode.Decode.track_us_per_token": {"tiny-b8": 100.0, "tiny-b8-normal": 200.0},
        "decode.DecodeMore.track_us_per_token": {"real-b32": 300.0},
        "decode.Decode.track_itl_p50_ms": {"tiny-b8": 4.0, "tiny-b8-normal": 5.0},
        "mixed.Mixed.track_us_per_token": {"tiny-b8": math.nan},
        "mixed.Mixed.track_stalled": {"tiny-b8": 1.0},
    }
    sha = git(repo, "rev-parse", "HEAD").strip()
    write_results(repo, sha, results)

    def shown(*options: str) -> str:
        status = bench.main(["--repo", str(repo), "--table", "--machine", MACHINE, *options])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "") or (status == 1 and not out)
        return out + err

    table = shown()
    assert all(text in table for text in ("10,000", "5,000", "4.00", "5.00", "mixed"))
    table = shown("--bench", r"decode.*token\('tiny-b8'")
    assert "10,000" in table and "ITL" not in table
    assert not any(text in table for text in ("5,000", "mixed", "not measured"))
    table = shown("--bench", "^mixed", "--bench", "itl_p50")
    assert all(text in table for text in ("mixed", "4.00", "5.00")) and "10,000" not in table
    # It is of a question with many cases, and not of its quick set.
    assert "3,333" not in shown() and "3,333" in shown("--bench", "real-b32", "--full")
    assert "no results of ^gone to be shown: run" in shown("--bench", "^gone")
    with pytest.raises(SystemExit):
        bench.main(["--repo", str(repo), "--bench", "(x"])
    assert "'(x' is no regular expression" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--table"], []])
def test_a_machine_that_is_none_is_named(
    repo: Path,
    measured: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    monkeypatch.setattr(bench, "run_asv", no_asv)
    assert bench.main(["--repo", str(repo), "--machine", "a/b", *options]) == 1
    assert "bench: error: a machine's name is of letters" in capsys.readouterr().err
    (repo / "home" / ".asv-machine.json").write_text("[]")
    assert bench.main(["--repo", str(repo), *options]) == 1
    assert ".asv-machine.json, asv's file of machines, is no JSON" in capsys.readouterr().err


def test_asv_gets_no_results_that_it_would_not_come_to_an_end_with(
    repo: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither to add to them nor for its site; and they stay."""
    odd = measured.read_text().replace("100.0", "Infinity")
    measured.write_text(odd)
    monkeypatch.setattr(bench, "run_group", no_asv)
    monkeypatch.setattr(bench, "run_asv", no_asv)
    named = rf"mend these.*\n  {MACHINE}/{measured.name}: results\[{TIME}\].result is inf, not"
    with pytest.raises(bench.BenchError, match=f"site is not written: {named}"):
        bench.publish(repo)
    assert bench.main(["--repo", str(repo), "--machine", MACHINE]) == 1
    assert re.search(f"cannot be added to: {named}", capsys.readouterr().err)
    assert measured.read_text() == odd


def test_what_another_folder_of_machines_has_is_looked_at_too(repo: Path, measured: Path) -> None:
    folder = measured.parents[1]
    assert bench.odd_files(folder) == []
    (folder / "other").mkdir()
    (folder / "other" / "0123-env.json").write_text("{")
    # asv reads no folder without it.
    assert bench.odd_files(folder) == []
    (folder / "other" / "machine.json").write_text('{"machine": "other", "version": "x"}')
    first, second = bench.odd_files(folder)
    assert first.startswith("other/0123-env.json is no JSON")
    assert second.startswith("other/machine.json: version is 'x', not 1")


def test_the_table_is_there_where_the_site_cannot_be(
    repo: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark may find a number that asv cannot draw."""

    def run_asv(repo: Path, *_: Any) -> int:
        name = f"{measured.name[:8]}-odd.json"
        measured.with_name(name).write_text(measured.read_text().replace("100.0", "Infinity"))
        return 0

    monkeypatch.setattr(bench, "run_asv", run_asv)
    assert bench.main(["--repo", str(repo), "--machine", MACHINE]) == 1
    said = capsys.readouterr()
    assert "10,000" in said.out and "left out: " in said.out
    assert "the asv site is not written" in said.err


def test_two_calls_do_not_measure_at_once(
    repo: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run_asv", no_asv)
    with bench.measuring_alone(repo):
        assert bench.main(["--repo", str(repo), "--machine", MACHINE]) == 1
        said = capsys.readouterr().err
        assert f"another call measures here, process {os.getpid()}, and both" in said
        # What is there may be looked at meanwhile.
        assert bench.main(["--repo", str(repo), "--machine", MACHINE, "--table"]) == 0
    with bench.measuring_alone(repo):
        pass


# In place of asv, a process that starts another one in a group of its own, as asv does.
ASV = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: os.setpgid(0, 0))
open("pids.new", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_whatever_ends_us_ends_asv(repo: Path, measured: Path, number: int, status: int) -> None:
    (repo / "asv.py").write_text(ASV)
    scratch = repo / "scratch"
    scratch.mkdir()
    told = repo / "pids"
    arguments = [bench.__file__, "--repo", str(repo), "--machine", MACHINE]
    found = end_by(number, arguments, told, scratch, REPO_ROOT)
    assert found.status == status and "Traceback" not in found.said
    # Nobody can answer the last one, but for what ends asv.
    assert number == signal.SIGKILL or list(scratch.iterdir()) == []
    asvs = [int(pid) for pid in told.read_text().split()]
    wait_for(lambda: not any(map(is_alive, asvs)))


def test_without_git_there_is_no_traceback(
    repo: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(repo / "home"))
    assert bench.main(["--repo", str(repo), "--table"]) == 1
    assert "bench: error: git cannot be run: No such file" in capsys.readouterr().err
