"""The page's numbers and words, from made-up results in asv's own files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import report_results as made
from report_results import CPU, DESCRIBED, GPU

import asv_machine
import gpu_landmarks
import report
from lab.cases import PROCESSES
from lab.report import changes, page, plots, texts, wording
from lab.report.data import Key, Machine, Measured, Question, Results


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "repo"
    made.make_repo(path)
    suite = path / "benchmark" / "asv"
    suite.mkdir(parents=True)
    (suite / "decode.py").write_text(
        '"""How fast, really? Read on in `lab`. (#28500)\n\nMore.\n"""\n'
    )
    return path


@pytest.fixture(scope="module")
def shas(repo: Path) -> list[str]:
    return report.git(repo, "rev-list", "--reverse", "HEAD").split()


@pytest.fixture(scope="module")
def directory(repo: Path, shas: list[str]) -> Path:
    return made.write_results(repo.parent / "results", shas)


@pytest.fixture(scope="module")
def results(repo: Path, directory: Path) -> Results:
    return report.read(repo, [directory], made.PROCESSES)


@pytest.fixture(scope="module")
def html(results: Results) -> str:
    return page.render(results)


# --- What is read -----------------------------------------------------------------------------


def test_landmarks_carry_the_names_of_fixes(results: Results, shas: list[str]) -> None:
    assert [commit.sha for commit in results.commits] == shas
    assert [commit.axis for commit in results.commits] == [
        ("before", "the fixes"),
        ("#21840", "merge_batch"),
        ("#28500", "penalties' copy"),
        (shas[3][:8], "Count penalties where …"),
    ]
    assert [commit.fix for commit in results.commits] == [None, 21840, 28500, None]
    assert results.commits[3].name == f"{shas[3][:8]} “Count penalties where the tokens are”"
    assert not results.notes


def test_head_may_have_moved_on(repo: Path, directory: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    report.git(repo, "clone", "--quiet", str(repo), str(later))
    report.git(
        later,
        *("-c", "user.name=Test", "-c", "user.email=test@example.invalid"),
        *("commit", "--quiet", "--allow-empty", "--message", "Not measured"),
    )
    found = report.read(later, [directory])
    assert [commit.name for commit in found.commits][-1].endswith("where the tokens are”")
    assert len(found.commits) == 4


def test_commits_of_another_history_are_shown_and_said(directory: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    report.git(strange, "init", "--quiet")
    found = report.read(strange, [directory])
    assert len(found.commits) == 4
    assert all(commit.name == commit.short and not commit.known for commit in found.commits)
    assert any("Not in the history of this checkout" in note for note in found.notes)
    text = page.render(found)
    assert "not in the history of this checkout" in text
    assert all(commit.short in text for commit in found.commits)


def test_a_shallow_clone_is_said(repo: Path, directory: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    report.git(repo, "clone", "--quiet", "--depth", "1", repo.as_uri(), str(shallow))
    found = report.read(shallow, [directory])
    assert any("shallow clone" in note for note in found.notes)
    assert [commit.known for commit in found.commits] == [False, False, False, True]


def test_two_classes_are_one_question(results: Results) -> None:
    decode = results.questions["decode"]
    assert [case for case, quick in decode.cases.items() if quick] == [
        *("real-b1", "real-b8", "real-b8-penalties", "tiny-b8")
    ]
    assert [case for case, quick in decode.cases.items() if not quick] == [
        *("real-b32", "tiny-b64", "tiny-b64-penalties")
    ]
    assert decode.heading == "How fast, really? (#28500)"
    assert results.questions["mixed"].heading == "Mixed"  # without a file of its own
    assert list(results.questions) == ["decode", "mixed", "overlap", "transfers"]


def test_machines_say_what_they_are(results: Results) -> None:
    cpu, gpu = results.machines
    assert (cpu.label, cpu.is_gpu) == ("CPU, 2 cores", False)
    assert cpu.facts["memory"] == "8.0 GiB"
    assert cpu.facts["torch"] == "2.13.0"
    assert cpu.facts["triton"] == "not recorded"
    assert (gpu.label, gpu.is_gpu) == ("Fake GPU (test)", True)
    # What asv has no field for stays in its file of the machine.
    assert {key: gpu.facts[key] for key in ("driver", "CUDA", "torch", "triton")} == {
        "driver": "999.99",
        "CUDA": "13.0",
        "torch": "2.13.0+cu130",
        "triton": "3.9.0",
    }


def test_a_machine_without_a_gpu_that_says_so_is_a_cpu(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    found = report.read(repo, [made.write_results(tmp_path, shas, machines=(DESCRIBED,))])
    (machine,) = found.machines
    assert (machine.label, machine.is_gpu) == ("CPU, 4 cores", False)
    assert "none" not in machine.facts.values()
    assert not machine.facts.keys() & {"GPU", "driver", "CUDA"}
    assert machine.facts["torch"] == "2.13.0+cpu"
    assert machine.facts["triton"] == "not recorded"
    assert made.MACHINES[DESCRIBED].keys() == asv_machine.describe("x").keys()


def edit(directory: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change asv's files of a made-up machine, `name` among them."""
    paths = list((directory / CPU).glob(name))
    assert paths
    for path in paths:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))


def test_versions_are_those_of_results_then_of_pins_then_of_the_machine(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    made.write_results(tmp_path, shas, machines=(CPU,))

    def facts() -> Mapping[str, str]:
        (machine,) = report.read(repo, [tmp_path]).machines
        return machine.facts

    # asv puts what it has installed among the parameters.
    edit(tmp_path, "machine.json", lambda d: d.update(torch="1.0", triton="1.0"))
    assert (facts()["torch"], facts()["triton"]) == ("2.13.0", "1.0")
    edit(tmp_path, "*-env.json", lambda d: d["params"].pop("torch"))
    edit(tmp_path, "*-env.json", lambda d: d["requirements"].update(torch="2.12.1", triton="3.8.0"))
    assert (facts()["torch"], facts()["triton"]) == ("2.12.1", "3.8.0")
    edit(tmp_path, "*-env.json", lambda d: d.update(requirements={}))
    assert (facts()["torch"], facts()["triton"]) == ("1.0", "1.0")
    edit(tmp_path, "machine.json", lambda d: (d.pop("torch"), d.update(triton="none")))
    assert (facts()["torch"], facts()["triton"]) == ("not recorded", "not recorded")


def test_a_gpu_that_came_later_was_not_there_before(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    """What a result says of its machine holds, whatever its file says by now."""
    made.write_results(tmp_path, shas, machines=(CPU,))
    edit(tmp_path, "*-env.json", lambda d: d["params"].update(gpu="none", driver="none"))
    edit(tmp_path, "machine.json", lambda d: d.update(gpu="Fake GPU (test)", driver="1"))
    (machine,) = report.read(repo, [tmp_path]).machines
    assert (machine.label, machine.is_gpu) == ("CPU, 2 cores", False)


def test_another_driver_is_a_series_of_its_own(repo: Path, shas: list[str], tmp_path: Path) -> None:
    newer = {"driver": "1000.01"}
    found = report.read(
        repo, [made.write_results(tmp_path, shas, machines=(GPU,), states={2: newer, 3: newer})]
    )
    before, after = sorted(found.machines, key=lambda m: m.label, reverse=True)
    assert before.label == "Fake GPU (test), driver 999.99"
    assert after.label == "Fake GPU (test), driver 1000.01"
    assert (before.facts["driver"], after.facts["driver"]) == ("999.99", "1000.01")
    assert before.name == after.name == GPU
    assert before.key != after.key
    # Each has its commits; between them nothing is compared.
    for machine, numbers in ((before, (0, 1)), (after, (2, 3))):
        line = found.line(machine, "decode", "us_per_token_ratio", "real-b1")
        measured = [commit.sha for commit, reading in line if reading.status == "number"]
        assert measured == [shas[i] for i in numbers]
    assert changes.steps(found)[1].pairs == {}
    assert changes.changes(found, changes.steps(found)[1]) == []
    within = changes.changes(found, changes.steps(found)[2])
    assert {c.machine.key for c in within if c.verdict == changes.SAME} == {after.key}
    text = page.render(found)
    for machine in found.machines:
        assert f"{machine.label}: " in text


def test_what_a_result_does_not_say_of_its_state_its_machine_says(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    made.write_results(tmp_path, shas, machines=(CPU,))
    edit(tmp_path, "machine.json", lambda d: d.update(triton="3.9.0"))
    edit(tmp_path, f"{shas[3][:8]}-*.json", lambda d: d["params"].update(triton="3.9.0"))
    assert len(report.read(repo, [tmp_path]).machines) == 1
    edit(tmp_path, f"{shas[3][:8]}-*.json", lambda d: d["params"].update(triton="4.0.0"))
    found = report.read(repo, [tmp_path]).machines
    assert [m.label for m in found] == [f"CPU, 2 cores, triton {v}" for v in ("3.9.0", "4.0.0")]


def test_results_of_another_version_are_left_out(
    directory: Path, repo: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "results"
    shutil.copytree(directory, copy)
    benchmarks = json.loads((copy / "benchmarks.json").read_text())
    benchmarks["decode.Decode.track_forward_idle"]["version"] = "2"
    (copy / "benchmarks.json").write_text(json.dumps(benchmarks))
    found = report.read(repo, [copy])
    assert "forward_idle" not in found.questions["decode"].units
    assert any("results left out" in note for note in found.notes)


def test_two_directories_make_one_page(repo: Path, shas: list[str], tmp_path: Path) -> None:
    here = made.write_results(tmp_path / "here", shas, machines=(CPU,))
    there = made.write_results(tmp_path / "there", shas, machines=(GPU,))
    found = report.read(repo, [here, there])
    assert [machine.name for machine in found.machines] == [CPU, GPU]


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_directories_the_benchmark_that_was_measured_last_counts(
    repo: Path, shas: list[str], tmp_path: Path, order: int
) -> None:
    """And not the file: that may have a newer number of another benchmark."""
    blocking, sent = (
        f"transfers.Transfers.track_{m}" for m in ("blocking_per_step", "bytes_per_step")
    )

    def write(name: str, value: float, **when: int) -> Path:
        directory = made.write_results(tmp_path / name, shas, machines=(CPU,))

        def change(document: dict[str, Any]) -> None:
            columns = document["result_columns"]
            for key, of_metric in ((blocking, "blocking"), (sent, "sent")):
                row = document["results"][key]
                row[columns.index("result")] = [value, value]
                row[columns.index("started_at")] = when[of_metric]
            for key, row in document["results"].items():
                if key not in (blocking, sent):
                    row[columns.index("started_at")] = 0

        edit(directory, f"{shas[1][:8]}-*.json", change)
        return directory

    here = write("here", 11.0, blocking=3_000, sent=4_000)
    there = write("there", 22.0, blocking=2_000, sent=9_000)
    found = report.read(repo, [here, there][::order])
    values = {
        metric: found.measured[Key(CPU, shas[1], "transfers", metric, "decode-b8-penalties")].value
        for metric in ("blocking_per_step", "bytes_per_step")
    }
    assert values == {"blocking_per_step": 11.0, "bytes_per_step": 22.0}


BLOCKING = "transfers.Transfers.track_blocking_per_step"


def set_column(document: dict[str, Any], column: str, value: Any) -> None:
    document["results"][BLOCKING][document["result_columns"].index(column)] = value


# What is done to a file of results, and what is said of it.
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "truncated": (lambda d: json.dumps(d)[: len(json.dumps(d)) // 2], "no JSON"),
    "null": (lambda d: "null", "None"),
    "not UTF-8": (lambda d: b"\xff\xfe", "UTF-8"),
    "another version": (lambda d: d.update(version=99), "version is 99"),
    "no hash": (lambda d: d.update(commit_hash=None), "commit_hash is None"),
    "odd date": (lambda d: d.update(date="yesterday"), "date is 'yesterday'"),
    "late date": (lambda d: d.update(date=10**18), "date is"),
    "text as a value": (lambda d: set_column(d, "result", ["abc", 1.0]), f"{BLOCKING}].result"),
    "infinite": (lambda d: set_column(d, "result", [math.inf, 1.0]), f"{BLOCKING}].result"),
    "huge": (lambda d: set_column(d, "result", [10**400, 1.0]), f"{BLOCKING}].result"),
    "no values": (lambda d: set_column(d, "result", []), f"{BLOCKING}].result"),
    "numbers as parameters": (lambda d: set_column(d, "params", [[1, 2]]), f"{BLOCKING}].params"),
    "started at a text": (lambda d: set_column(d, "started_at", "x"), f"{BLOCKING}].started_at"),
    "another machine": (lambda d: d["params"].update(machine="x"), "params[machine] is 'x'"),
    "a name with tags": (
        lambda d: d["results"].update({'x"><script>a.B.track_c': [[1.0], [["'a'"]], "1"]}),
        "<script>a.B.track_c",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_is_not_of_the_form_is_left_out_and_said(
    repo: Path, shas: list[str], tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made.write_results(tmp_path, shas, machines=(CPU,))
    change, said = BROKEN[how]
    (path,) = (tmp_path / CPU).glob(f"{shas[1][:8]}-*.json")
    document = json.loads(path.read_text())
    broken = change(document)
    if isinstance(broken, bytes):
        path.write_bytes(broken)
    else:
        path.write_text(broken if isinstance(broken, str) else json.dumps(document))
    found = report.read(repo, [tmp_path])
    assert [commit.sha for commit in found.commits] == [shas[0], *shas[2:]]
    (note,) = found.notes
    assert note.startswith("Left out: ")
    assert path.name in note and said in note
    assert f"report: {note}\n" in capsys.readouterr().err
    # The rest stands.
    change = step(found, 0)[CPU, "transfers", "blocking_per_step", "decode-b8-penalties"]
    assert (change.before.value, change.after.value) == (2.0, 1.0)
    text = page.render(found)
    assert '<p class="note">Left out: ' in text
    assert "<script" not in text


@pytest.mark.parametrize(
    "text", [None, "{", "[]", '{"version": 5}', '{"version": 1, "machine": 3}']
)
def test_results_of_a_machine_that_nothing_describes_are_left_out(
    repo: Path, shas: list[str], tmp_path: Path, text: str | None
) -> None:
    made.write_results(tmp_path, shas)
    path = tmp_path / CPU / "machine.json"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    found = report.read(repo, [tmp_path])
    assert [machine.name for machine in found.machines] == [GPU]
    (note,) = found.notes
    assert note.startswith(f"Left out, with 4 files beside it: {CPU}/machine.json")


@pytest.mark.parametrize(
    "change", [lambda d: d.update(version=99), lambda d: d[BLOCKING].update(unit=None)]
)
def test_benchmarks_that_cannot_be_read_are_taken_from_the_other_directory(
    repo: Path,
    shas: list[str],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = made.write_results(tmp_path / "here", shas, machines=(CPU,))
    there = made.write_results(tmp_path / "there", shas, machines=(GPU,))
    document = json.loads((here / "benchmarks.json").read_text())
    change(document)
    (here / "benchmarks.json").write_text(json.dumps(document))
    found = report.read(repo, [here, there])
    assert [machine.name for machine in found.machines] == [CPU, GPU]
    (note,) = found.notes
    assert note.startswith("Left out: here/benchmarks.json: ")
    # Alone they mean nothing.
    assert report.main(["--repo", str(repo), "--results", str(here)]) == 1
    said = capsys.readouterr().err
    assert "here/benchmarks.json: " in said
    assert "no results of the present benchmarks" in said


def test_benchmarks_of_other_suites_are_left_out_and_counted(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    made.write_results(tmp_path, shas, machines=(CPU,))
    others: dict[str, list[list[str]]] = {
        "alone.track_it": [["'a'"]],
        "decode.Decode.time_it": [["'real-b1'"]],
        "decode.Decode.track_none": [],
        "decode.Decode.track_both": [["'a'"], ["'b'"]],
        "deep.er.Class.track_it": [["'a'"]],
    }
    described = json.loads((tmp_path / "benchmarks.json").read_text())
    for name, params in others.items():
        names = [str(i) for i in range(len(params))]
        described[name] = {"name": name, "params": params, "param_names": names, "version": "1"}
    (tmp_path / "benchmarks.json").write_text(json.dumps(described))
    rows = {name: [[7], params, "1"] for name, params in others.items()}
    edit(tmp_path, f"{shas[1][:8]}-*.json", lambda d: d["results"].update(rows))
    found = report.read(repo, [tmp_path])
    assert found.notes == ["4 results left out: not one number for each case."]
    # Whose unit nobody knows.
    assert found.questions["deep.er"].units == {"it": ""}
    text = page.render(found)
    number = found.reading(Key(CPU, shas[1], "deep.er", "it", "a"))
    assert number.value == 7.0
    assert "deep.er, a: it along the commits" in text


def test_odd_values_of_the_right_form_make_a_page(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    made.write_results(tmp_path, shas, machines=(CPU,))
    edit(tmp_path, "*-env.json", lambda d: set_column(d, "result", [10**299, 10**25]))
    edit(tmp_path, "*-env.json", lambda d: d["params"].update(ram="²"))
    found = report.read(repo, [tmp_path])
    assert found.machines[0].facts["memory"] == "²"
    text = page.render(found)
    assert "1e+299" in text and "1e+25" in text
    assert "Too large to be drawn: before the fixes, #21840 merge_batch, " in text


def test_what_is_no_name_of_a_question_opens_no_file(repo: Path) -> None:
    (repo / "benchmark" / "elsewhere.py").write_text('"""Not to be read?"""\n')
    assert report._heading(repo, "../elsewhere") == "../elsewhere"
    assert report._heading(repo, "decode") == "How fast, really? (#28500)"


def test_the_default_results_are_the_first_that_exist(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    with pytest.raises(report.ReportError, match="make bench"):
        report.results_dirs(tmp_path, [])
    committed = made.write_results(tmp_path / "benchmark" / "results", shas, machines=(CPU,))
    assert report.results_dirs(tmp_path, []) == [committed]
    measured = made.write_results(tmp_path / ".asv" / "results", shas, machines=(CPU,))
    assert report.results_dirs(tmp_path, []) == [measured]
    with pytest.raises(report.ReportError, match="nowhere"):
        report.results_dirs(tmp_path, [tmp_path / "nowhere"])


# --- Numbers ----------------------------------------------------------------------------------


def key(shas: list[str], commit: int, metric: str, case: str, machine: str = CPU) -> Key:
    question = {"blocking_per_step": "transfers", "score_p50_ms": "mixed"}.get(metric, "decode")
    return Key(machine, shas[commit], question, metric, case)


def test_readings(results: Results, shas: list[str]) -> None:
    timed = key(shas, 0, "us_per_token_ratio", "real-b1")
    reading = results.reading(timed)
    samples = results.measured[timed].samples
    medians = [sorted(samples[i : i + 5])[2] for i in (0, 5, 10)]
    assert reading.value == pytest.approx(math.prod(medians) ** (1 / 3))
    assert reading.low < reading.value < reading.high
    assert reading.high / reading.value == pytest.approx(reading.value / reading.low)
    exact = results.reading(key(shas, 0, "blocking_per_step", "decode-b8-penalties"))
    assert (exact.value, exact.low, exact.high) == (2.0, 2.0, 2.0)
    assert results.reading(key(shas, 0, "score_p50_ms", "real-b4")).status == "stalls"
    assert (
        results.reading(key(shas, 0, "us_per_token_ratio", "no such case")).status == "not measured"
    )


def test_failed_and_skipped_are_told_apart(results: Results, shas: list[str]) -> None:
    place = key(shas, 1, "us_per_token_ratio", "real-b1")
    other = Results(
        results.machines,
        results.commits,
        results.questions,
        {place: Measured(None)},
        results.processes,
    )
    assert other.reading(place).status == "failed"
    other.measured[place] = Measured(math.nan)
    assert other.reading(place).status == "n/a"


def test_a_commit_of_another_history_is_no_side_of_a_step(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    """One of a date between the fixes, which has what the second does already, and a late one."""
    between, late = "e" * 40, "f" * 40
    made.write_results(tmp_path, [*shas[:2], between, *shas[2:], late], machines=(CPU,))
    found = report.read(repo, [tmp_path])
    assert [commit.sha for commit in found.commits] == [*shas[:2], between, *shas[2:], late]
    pairs = [{(p.before.sha, p.after.sha) for p in s.pairs.values()} for s in changes.steps(found)]
    assert pairs == [{(shas[i], shas[i + 1])} for i in range(3)]
    change = step(found, 1)[CPU, "transfers", "blocking_per_step", "decode-b8-penalties"]
    assert (change.before.value, change.after.value, change.ratio) == (2.0, 1.0, 0.5)
    said = texts.sentence(found, found.machines[0], "decode", "us_per_token_ratio", "real-b1")
    assert f"from before the fixes to {shas[3][:8]}" in said


def test_each_machine_has_a_commit_before_of_its_own(
    repo: Path, shas: list[str], tmp_path: Path
) -> None:
    """The first fix and what came after the second were measured on the GPU alone."""
    here = made.write_results(tmp_path / "here", [shas[0], shas[0], shas[2]], machines=(CPU,))
    there = made.write_results(tmp_path / "there", shas, machines=(GPU,))
    found = report.read(repo, [here, there])
    pairs = [
        {key: (p.before.sha, p.after.sha) for (key, _), p in s.pairs.items()}
        for s in changes.steps(found)
    ]
    assert pairs == [
        {GPU: (shas[0], shas[1])},
        {CPU: (shas[0], shas[2]), GPU: (shas[1], shas[2])},
        {GPU: (shas[2], shas[3])},
    ]
    for machine in (CPU, GPU):
        change = step(found, 1)[machine, "transfers", "blocking_per_step", "decode-b8-penalties"]
        assert (change.before.value, change.after.value, change.ratio) == (2.0, 1.0, 0.5)
    assert not any(c.verdict == changes.NOT_COMPARABLE for c in step(found, 1).values())
    text = page.render(found)
    before, first, second = (f"<code>{sha[:8]}</code>" for sha in shas[:3])
    assert (
        f"CPU, 2 cores: Before: {before} before the fixes. After: {second} #28500 penalties&#39; copy. "
        f"Without a number there, but within the difference: {first} #21840 merge_batch.</p>"
        in text
    )
    assert f"<p>Fake GPU (test): Before: {first} #21840 merge_batch. After: {second} " in text
    assert text.count("within the difference") == 1
    assert text.count("compared with “before the fixes”, ") == 1


def step(results: Results, number: int) -> dict[tuple[str, str, str, str], changes.Change]:
    found = changes.changes(results, changes.steps(results)[number])
    return {(c.machine.name, c.question, c.metric, c.case): c for c in found}


def test_steps_are_the_fixes_and_what_came_since(results: Results) -> None:
    assert [s.title for s in changes.steps(results)] == [
        "Fix #21840 merge_batch",
        "Fix #28500 penalties' copy",
        "Since the last fix",
    ]


def test_the_first_fix_lets_cases_run(results: Results) -> None:
    found = step(results, 0)
    change = found[CPU, "mixed", "us_per_token_ratio", "real-b4"]
    assert change.verdict == changes.RUNS_NOW
    assert math.isnan(change.ratio)
    # That is said once a case, and not again of each metric.
    assert (CPU, "mixed", "score_p50_ms_ratio", "real-b4") not in found
    assert next(iter(found.values())).verdict == changes.RUNS_NOW


def test_the_second_fix_shows_on_the_made_up_gpu(results: Results) -> None:
    found = step(results, 1)
    for case in results.questions["decode"].cases:
        change = found[GPU, "decode", "us_per_token_ratio", case]
        assert change.verdict == changes.BETTER
        assert change.low < change.ratio < change.high < 0.85
        assert change.ratio == pytest.approx(0.78, abs=0.05)
        # The interval that is stated, by hand.
        noise = results.noises[GPU, "decode", "us_per_token_ratio", case]
        assert noise is not None
        # All seven cases, or one of them alone, on four commits.
        quantile = {7 * 4 * 2: 2.0032, 4 * 2: 2.3060}[noise.dof]
        half = quantile * noise.s * math.sqrt(2 / 3)
        assert change.high == pytest.approx(change.ratio * math.exp(half), rel=1e-4)
        # A ratio has its absolute numbers beside it.
        assert change.absolute is not None
        assert change.absolute_unit == "us/token"
    exact = found[CPU, "transfers", "blocking_per_step", "decode-b8-penalties"]
    assert (exact.ratio, exact.low, exact.high, exact.verdict) == (0.5, 0.5, 0.5, changes.BETTER)
    gone = found[CPU, "overlap", "model_stalls_per_step", "none-b8-t5ms"]
    assert (gone.ratio, gone.verdict) == (0.0, changes.BETTER)
    # Absolute times, which their ratios stand for, have no row of their own.
    assert not any(metric == "us_per_token" for _, _, metric, _ in found)


def test_tables_begin_with_what_has_changed(results: Results) -> None:
    for one in changes.steps(results):
        found = changes.changes(results, one)
        changed = [change.changed for change in found]
        assert changed == sorted(changed, reverse=True)


def test_equal_commits_are_hardly_ever_called_different(repo: Path, tmp_path: Path) -> None:
    """In twelve steps; a chance of 5% each of any verdict makes three or more a matter of 2%."""
    wrong = 0
    for seed in range(4):
        same = made.write_results(
            tmp_path / str(seed), [f"{seed}{i}" * 20 for i in range(4)], same=True, seed=seed
        )
        found = report.read(repo, [same])
        for before, after in zip(found.commits, found.commits[1:], strict=False):
            pairs = {
                (machine.key, question): changes.Pair(before, after)
                for machine in found.machines
                for question in found.questions
            }
            judged = changes.changes(found, changes.Step("", pairs))
            wrong += any(c.verdict in (changes.BETTER, changes.WORSE) for c in judged)
            assert sum(c.verdict.startswith("perhaps") for c in judged) < 0.2 * len(judged)
    assert wrong <= 2


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "report: interrupted"),
        (PermissionError(errno.EACCES, "Permission denied", "results"), 1, "Permission denied"),
    ],
)
def test_what_ends_it_is_said_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    directory: Path,
    error: BaseException,
    status: int,
    said: str,
) -> None:
    def read(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(report, "read", read)
    assert report.main(["--results", str(directory)]) == status
    assert said in capsys.readouterr().err


def test_results_without_samples_have_no_band(repo: Path, shas: list[str], tmp_path: Path) -> None:
    found = report.read(repo, [made.write_results(tmp_path, shas, samples=False, machines=(CPU,))])
    reading = found.reading(key(shas, 1, "us_per_token_ratio", "real-b1"))
    assert math.isfinite(reading.value)
    assert not reading.has_band
    assert any("no samples" in note for note in found.notes)
    change = step(found, 1)[CPU, "decode", "us_per_token_ratio", "real-b1"]
    assert change.verdict == changes.NO_INTERVAL
    assert math.isnan(change.low)
    text = page.render(found)
    assert "No noise band" in text
    # Of what is counted nobody misses any.
    for unit, notes in (("us", 1), ("bytes", 0)):
        question = Question("memory", "?", {"case": True}, {"number": unit})
        number = {Key(CPU, shas[0], "memory", "number", "case"): Measured(1.0)}
        alone = Results([Machine(CPU, "CPU")], [], {"memory": question}, number, processes=3)
        assert len(report._sample_notes(alone)) == notes
    assert "-band-" not in text


def test_one_process_has_no_band(repo: Path, directory: Path) -> None:
    found = report.read(repo, [directory], processes=1)
    assert all(noise is None for noise in found.noises.values())
    assert "No noise band" in page.render(found)


# --- Words ------------------------------------------------------------------------------------


def test_a_sentence_says_what_a_plot_shows(results: Results) -> None:
    gpu = results.machines[1]
    text = texts.sentence(results, gpu, "decode", "us_per_token_ratio", "real-b1")
    pattern = (
        r"Fake GPU \(test\): 0\.1\d\d → 0\.1\d\d anchors/token from before the fixes to [0-9a-f]{8}, "
        r"(0\.\d\d) times \[(0\.\d\d), (0\.\d\d)\]: better\. "
        r"\(([\d,]+) → [\d,]+ us/token, ([\d,]+) → [\d,]+ tokens/s\)"
    )
    match = re.fullmatch(pattern, text)
    assert match, text
    assert float(match[2]) < float(match[1]) < float(match[3]) < 0.85
    us, tokens = (float(match[i].replace(",", "")) for i in (4, 5))
    assert us * tokens == pytest.approx(1e6, rel=0.01)
    text = texts.sentence(results, gpu, "mixed", "us_per_token_ratio", "real-b4")
    assert "from #21840 merge_batch to" in text
    assert text.endswith("Stalls: before the fixes.")
    text = texts.sentence(results, gpu, "transfers", "blocking_per_step", "decode-b8-penalties")
    assert re.fullmatch(
        r"Fake GPU \(test\): 2 → 1 transfers from before the fixes to [0-9a-f]{8}, "
        r"0\.50 times: better\.",
        text,
    )


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_command_is_one_that_a_shell_and_make_hand_on(tmp_path: Path, shell: str) -> None:
    """To the scripts comes a regular expression with one backslash."""
    if shutil.which("make") is None or shutil.which(shell) is None:
        pytest.skip(f"needs make and {shell}")
    (tmp_path / "Makefile").write_text("bench bench-full:\n\t@printf '%s\\n' $(ARGS)\n")
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    # Below another make, one says which folder it enters.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"

    def handed_on(command: str) -> list[str]:
        done = subprocess.run([shell, "-c", command], cwd=tmp_path, capture_output=True, env=env)
        return done.stdout.decode().splitlines()

    machines = [Machine("lab", "CPU"), Machine("gpu-h200", "NVIDIA H200", is_gpu=True)]
    (_, on_cpu), (_, on_gpu) = wording.commands("decode", machines)
    assert handed_on(on_cpu) == ["--rerun", "--bench", r"^decode\."]
    on_a_gpu = ("scripts/gpu_landmarks.py", "asv", "--machine", "gpu-h200", "--bench")
    assert handed_on(on_gpu) == [*on_a_gpu, r"^decode\.(?!\w*More\.)"]
    (_, on_cpu), (_, on_gpu) = wording.commands("decode", machines, more=True)
    assert on_cpu.startswith("make bench-full ")
    assert handed_on(on_cpu) == ["--rerun", "--bench", r"^decode\."]
    assert handed_on(on_gpu) == [*on_a_gpu, r"^decode\."]
    ((_, off_gpu),) = wording.commands("decode", [Machine("gpu-h200-cpu", "CPU")])
    assert off_gpu.startswith("LAB_DEVICE=cpu make bench ")


def test_the_command_for_a_gpu_is_one_that_its_script_takes() -> None:
    ((where, command),) = wording.commands("mixed", [Machine("gpu-h200", "x", is_gpu=True)])
    assert where == "On the GPU machine gpu-h200"
    interpreter, script, *arguments = shlex.split(command)
    assert (interpreter, script) == ("python", "scripts/gpu_landmarks.py")
    args = gpu_landmarks.parse_args(arguments)
    assert (args.what, args.machine, args.bench) == (
        *("asv", "gpu-h200"),
        [r"^mixed\.(?!\w*More\.)"],
    )


def test_each_machine_that_has_a_command_of_its_own_has_it_once() -> None:
    gpu = Machine("a", "GPU, driver 1", is_gpu=True, state=("1",))
    other = Machine("a", "GPU, driver 2", is_gpu=True, state=("2",))
    found = wording.commands("mixed", [Machine("x", "CPU"), Machine("y", "CPU"), gpu, other])
    assert [where for where, _ in found] == ["On a CPU", "On the GPU machine a"]


def test_numbers_of_all_sizes() -> None:
    values = (0.0123456, 0.5, 12.3456, 12345.6, 4096.0, 0.0, math.nan)
    assert [wording.number(v) for v in values] == [
        *("0.0123", "0.500", "12.3", "12,346", "4,096", "0", "n/a")
    ]
    assert wording.interval(0.004, 1.5) == "[0.0040, 1.50]"


# --- The file ---------------------------------------------------------------------------------


def test_the_page_loads_nothing(html: str) -> None:
    assert "<script" not in html
    assert "@import" not in html
    loading = re.findall(r"(?:\bsrc|\bhref|xlink:href)=\"([^\"]*)\"|url\(([^)]*)\)", html)
    for one, other in loading:
        assert (one or other).startswith(("#", "data:,")), one or other
    assert set(re.findall(r"https?://[^\"<\s]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_each_id_occurs_once_and_each_reference_is_met(html: str) -> None:
    ids = re.findall(r"\bid=\"([^\"]+)\"", html)
    assert len(ids) == len(set(ids))
    for names in re.findall(r"(?:href=\"#|url\(#|aria-labelledby=\")([^\")]+)", html):
        assert set(names.split()) <= set(ids), names


def test_each_plot_has_words(html: str) -> None:
    drawn = re.findall(r"<svg role=\"img\".*?</svg>", html, flags=re.DOTALL)
    assert len(drawn) == 7 + 2 * 2 + 2 + 2
    for text in drawn:
        root = ElementTree.fromstring(text)
        space = "{http://www.w3.org/2000/svg}"
        title, description = root.find(f"{space}title"), root.find(f"{space}desc")
        assert title is not None and title.text
        assert description is not None and re.search(r"\d → [\d.,]+ \w", description.text or "")
        axis = "".join(root.itertext())
        assert all(name in axis for name in ("before", "#21840", "merge_batch", "#28500"))
        # All colours are the page's, in light and dark.
        assert not re.search(r"#[0-9a-f]{6}(?![0-9a-f])", re.sub(r"href=\"[^\"]+\"", "", text))


def test_a_plot_says_its_numbers_as_they_are() -> None:
    marks = tuple(plots.Mark(x, y, y - 0.02, y + 0.02) for x, y in enumerate((1.0, 0.7849)))
    ticks = ("before\nthe fixes", "#28500\npenalties' copy")
    root = ElementTree.fromstring(
        plots.svg(plots.Panel("x", "t", "d", ticks, (plots.Line(0, "m", marks),)))
    )
    said = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "0.78×" in said
    assert {"0.80×", "0.90×", "1.00×", "1.10×"} <= set(said)
    for words in ("before", "the fixes", "#28500", "penalties' copy"):
        assert words in said
    absolute = plots.Panel(
        "x", "t", "d", ("a\nb",), (plots.Line(0, "m", (plots.Mark(0, 0.12345),)),), relative=False
    )
    said = [
        node.text
        for node in ElementTree.fromstring(plots.svg(absolute)).iter()
        if node.tag.endswith("text")
    ]
    assert "0.123" in said


@pytest.mark.parametrize("count", [2, 4, 5])
def test_level_labels_break_between_words(count: int) -> None:
    assert "merge_batch" in plots._label_lines("#21840\nmerge_batch", count)
    assert "".join(plots._label_lines("#28500\npenalties' copy", count)[1:]).startswith(
        "penalties'"
    )


def test_marks_are_where_the_numbers_are() -> None:
    """Two values and the axis between them, read off the drawing."""
    marks = (plots.Mark(0, 1.0), plots.Mark(1, 0.8))
    text = plots.svg(plots.Panel("x", "t", "d", ("a\nb", "c\nd"), (plots.Line(0, "m", marks),)))
    group = text[text.index('id="x-marks-0"') :]
    drawn = [float(y) for y in re.findall(r'<use [^>]*y="([\d.]+)"', group)]
    ticks = dict(re.findall(r'y="([\d.]+)">([\d.]+)×<', text))
    scale = {value: float(y) for y, value in ticks.items()}
    step = (scale["0.90"] - scale["1.00"]) / 0.1
    assert drawn[1] - drawn[0] == pytest.approx(0.2 * step, abs=0.3)


def test_the_page_says_where_what_and_how(results: Results, html: str) -> None:
    for text in ("Fake GPU (test)", "999.99", "2.13.0+cu130", "Made-up CPU at 2.00GHz"):
        assert text in html
    for question in ("decode", "mixed", "overlap", "transfers"):
        # Only a CPU has modelled forwards here.
        machines = results.machines[:1] if question == "overlap" else results.machines
        more = not all(results.questions[question].cases.values())
        commands = wording.commands(question, machines, more)
        assert len(commands) == len(machines)
        for where, command in commands:
            escaped = command.replace('"', "&#34;").replace("'", "&#39;")
            assert f'<code class="cmd">{escaped}</code>' in html
            if len(commands) > 1:
                assert f'{where}:</p><code class="cmd">{escaped}' in html
    assert html.count("lower is better ↓") >= 5
    assert (
        "anchors</em>: divided by that of a fixed piece of work, which a process of its own" in html
    )
    assert len(html.encode()) < 3_000_000


def test_the_same_results_make_the_same_page(results: Results, html: str) -> None:
    assert page.render(results) == html


def test_names_of_cases_cannot_break_out(results: Results) -> None:
    panel = plots.Panel(
        "x", "<b>", "a & b </desc>", ("a\nb",), (plots.Line(0, "m", (plots.Mark(0, 1.0),)),)
    )
    text = plots.svg(panel)
    root = ElementTree.fromstring(text)
    assert root[0].text == "<b>"
    assert root[1].text == "a & b </desc>"


def test_the_command_line(
    repo: Path, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    status = report.main(
        ["--repo", str(repo), "--results", str(directory), "--processes", "3", "--out", str(out)]
    )
    assert status == 0
    assert "4 commits, 2 machines" in capsys.readouterr().out
    assert out.read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")
    assert report.main(["--repo", str(tmp_path)]) == 1
    assert "make bench" in capsys.readouterr().err


def test_a_page_is_written_at_once_or_not_at_all(
    repo: Path,
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "page.html"
    out.write_text("the page before")
    write_bytes, write_text = Path.write_bytes, Path.write_text

    def full(path: Path, data: bytes) -> int:
        write_bytes(path, data[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", lambda path, text, **_: full(path, text.encode()))
    arguments = ["--repo", str(repo), "--results", str(directory), "--out"]
    assert report.main([*arguments, str(out)]) == 1
    assert "the page cannot be written to" in (said := capsys.readouterr().err)
    assert os.strerror(errno.ENOSPC) in said
    assert out.read_text() == "the page before"
    assert list(tmp_path.iterdir()) == [out]
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    monkeypatch.setattr(Path, "write_text", write_text)
    assert report.main([*arguments, str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [out]


def test_where_no_page_can_be_is_said(
    repo: Path, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "page.html"):
        arguments = ["--repo", str(repo), "--results", str(directory), "--out", str(out)]
        assert report.main(arguments) == 1
        assert f"report: error: the page cannot be written to {out}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        report.write(pipe, "the page")
        assert reader.communicate(timeout=30)[0] == b"the page"
    assert pipe.is_fifo()


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "many"])
def test_a_number_of_processes_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], count: str
) -> None:
    with pytest.raises(SystemExit):
        report.parse_args([f"--processes={count}"])
    said = capsys.readouterr().err
    assert "argument --processes" in said
    assert repr(count) in said


def test_processes_are_as_many_as_cases_are_measured_in() -> None:
    assert report.parse_args([]).processes == PROCESSES
