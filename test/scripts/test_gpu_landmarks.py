"""``scripts/gpu_landmarks.py``: packages of commits, and what is made of measuring them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpu_landmarks
from bench import BenchError
from gpu_landmarks import (
    FIX,
    INDEX,
    REPO_ROOT,
    Clock,
    Measured,
    Package,
    Packages,
    by_importance,
    count,
    extract,
    has_history,
    judge,
    load,
    main,
    occupancy,
    packages,
    run_asv,
    run_group,
    run_lab,
    settle,
    why_no_asv,
    write_config,
)
from lab import asv_files
from lab.cases import QUESTIONS
from lab.devices import DEVICE_VARIABLE
from process_sessions import members
from processes import end_by, is_alive, wait_for
from prove_fixes import FIXES

FIRST = f"Fix 1\n\nUpstream-PR: sgl-project/sglang#{FIXES[0].pr}"
SECOND = f"Fix 2\n\nUpstream-PR: sgl-project/sglang#{FIX}"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a call says of the device is forgotten after the test."""
    monkeypatch.setenv(DEVICE_VARIABLE, "")


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repo), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(repo: Path, message: str, *files: str) -> str:
    for name in files:
        path = repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {message.splitlines()[0]}\n")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "--quiet", "-b", "main")
    (folder / ".gitignore").write_text("/.asv/\n/.cache/\n")
    return folder


@pytest.fixture
def shas(repo: Path) -> list[str]:
    """Base, first fix, before the second one, the second one, HEAD."""
    init = "python/sglang/__init__.py"
    fixes = {fix.pr: sorted(fix.files) for fix in FIXES}
    return [
        commit(repo, "Base", init, *fixes[FIX]),
        commit(repo, FIRST, *fixes[FIXES[0].pr]),
        commit(repo, "Between", init),
        commit(repo, SECOND, *fixes[FIX]),
        commit(repo, "Head", init),
    ]


def text_of(package: Package, name: str = "sglang/__init__.py") -> str:
    return (Path(package.folder) / name).read_text()


# --- Packages -----------------------------------------------------------------------------------


def test_packages_are_those_of_the_commits(repo: Path, shas: list[str]) -> None:
    found = packages(repo)
    assert [mark.sha for mark in found.landmarks] == [shas[0], shas[1], shas[3], shas[4]]
    assert [text_of(mark) for mark in found.landmarks] == [
        *("# Base\n", "# Base\n", "# Between\n", "# Head\n")
    ]
    assert (found.before.sha, found.after.sha) == (shas[2], shas[3])
    changed = "sglang/srt/managers/schedule_batch.py"
    assert (text_of(found.before, changed), text_of(found.after, changed)) == (
        "# Fix 1\n",
        "# Fix 2\n",
    )


def test_what_was_extracted_needs_no_history(repo: Path, shas: list[str], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    extract(repo, bare / ".cache" / "landmarks")
    extract(repo, bare / ".cache" / "landmarks")  # a second time changes nothing
    assert has_history(repo) and not has_history(bare)
    found, wanted = packages(bare), packages(repo)
    assert [mark.sha for mark in found.landmarks] == [mark.sha for mark in wanted.landmarks]
    assert [mark.names for mark in found.landmarks] == [mark.names for mark in wanted.landmarks]
    for mine, theirs in zip(found.landmarks, wanted.landmarks, strict=True):
        assert mine.folder.startswith(str(bare)) and text_of(mine) == text_of(theirs)
    assert (found.before.sha, found.after.sha) == (shas[2], shas[3])
    # Of the commits that were named there is no looking up.
    with pytest.raises(BenchError, match="no history"):
        packages(bare, ["main~1"])


def test_neither_history_nor_packages_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"gpu_landmarks\.py extract --to \.cache/landmarks"):
        packages(tmp_path)


def test_a_copy_inside_of_another_repository_has_no_history(repo: Path, shas: list[str]) -> None:
    (repo / "copy").mkdir()
    assert not has_history(repo / "copy")


def test_the_landmarks_of_this_repository() -> None:
    found = packages(REPO_ROOT)
    assert found.landmarks[-1].names[-1] == "HEAD"
    assert {found.before.sha, found.after.sha} & {mark.sha for mark in found.landmarks} == {
        found.after.sha
    }
    assert "non_blocking" in text_of(found.after, "sglang/srt/managers/schedule_batch.py")


def test_head_comes_first_where_time_may_run_out() -> None:
    marks = [Package(str(i), [str(i)], "") for i in range(3)]
    assert [mark.sha for mark in by_importance(marks)] == ["2", "1", "0"]


# --- Both sides of the fix ----------------------------------------------------------------------


def sides() -> Packages:
    before, after = Package("b" * 40, ["b"], "/before"), Package("a" * 40, ["a"], "/after")
    return Packages([before, after], before, after)


def test_both_sides_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"/before": 0.8, "/after": 0.99}
    asked: list[Any] = []

    def run_cases(names: list[str], package: str, **_: Any) -> dict[str, Any]:
        asked.append((names, package))
        metrics = {"fwd_occupancy": busy[package]}
        return {names[0]: {"outcome": "done", "metrics": metrics, "rounds": [metrics]}}

    def run_model(package: Package, device: str, seconds: float, options: Any) -> dict[str, Any]:
        assert (device, list(options)) == ("cuda", ["--model", "shape"])
        metrics = {"forward_occupancy": busy[package.folder] - 0.1}
        return {"outcome": "done", "model": "shape", "batch_size": 8, "metrics": metrics}

    monkeypatch.setattr(gpu_landmarks, "run_cases", run_cases)
    monkeypatch.setattr(gpu_landmarks, "_run_model", run_model)
    said: list[str] = []
    options = ["--model", "shape"]
    found = list(occupancy(sides(), "cuda", Clock(100), ["overlap/x"], options, say=said.append))
    assert (found[0].before, found[0].after) == (0.8, 0.99)
    assert (found[1].before, found[1].after) == (pytest.approx(0.7), pytest.approx(0.89))
    assert [one.what for one in found] == ["x, delayed forwards", "chain-b8-penalties, model shape"]
    assert asked == [(["overlap/x"], "/before"), (["overlap/x"], "/after")]
    assert len(said) == 4 and "rounds" not in found[0].detail["before"]


def test_one_side_that_fails_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cases(names: list[str], package: str, **_: Any) -> dict[str, Any]:
        if package == "/before":
            return {names[0]: {"outcome": "failed", "detail": "out of memory"}}
        return {names[0]: {"outcome": "done", "metrics": {"fwd_occupancy": 0.9}}}

    monkeypatch.setattr(gpu_landmarks, "run_cases", run_cases)
    monkeypatch.setattr(
        gpu_landmarks, "_run_model", lambda *_: {"outcome": "failed", "detail": "x"}
    )
    said: list[str] = []
    delayed, model = occupancy(sides(), "cuda", Clock(100), ["overlap/x"], say=said.append)
    assert (delayed.before, delayed.after) == (None, 0.9)
    assert (model.before, model.after) == (None, None)
    assert any("out of memory" in text for text in said)


def test_a_metric_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every metric of the modelled accelerator is one of a real one."""
    done = {"outcome": "done", "metrics": {"x": 1.0}}
    monkeypatch.setattr(gpu_landmarks, "run_cases", lambda names, **_: {names[0]: done})
    model = done | {"batch_size": 8, "model": "shape"}
    monkeypatch.setattr(gpu_landmarks, "_run_model", lambda *_: model)
    said: list[str] = []
    found = list(occupancy(sides(), "cuda", Clock(100), ["overlap/x"], say=said.append))
    assert [(one.before, one.after) for one in found] == [(None, None)] * 2
    assert len(said) == 4 and all("done, without its occupancy" in text for text in said)


def test_the_device_that_is_asked_for_holds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delayed cases run in processes that take it from the environment."""
    seen: list[tuple[str, str | None]] = []

    def run_cases(names: list[str], **_: Any) -> dict[str, Any]:
        seen.append(("delayed", os.environ.get(DEVICE_VARIABLE)))
        return {names[0]: {"outcome": "failed"}}

    def run_model(package: Package, device: str, *_: Any) -> dict[str, Any]:
        seen.append(("model", device))
        return {"outcome": "failed"}

    monkeypatch.setattr(gpu_landmarks, "run_cases", run_cases)
    monkeypatch.setattr(gpu_landmarks, "_run_model", run_model)
    monkeypatch.setattr(gpu_landmarks, "packages", lambda repo, extra=(): sides())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for options, device in ((["--device", "cpu"], "cpu"), ([], "cuda")):
        os.environ[DEVICE_VARIABLE] = ""
        seen.clear()
        main(["occupancy", *options])
        assert {kind for kind, _ in seen} == {"delayed", "model"}
        assert {name for _, name in seen} == {device}
    os.environ[DEVICE_VARIABLE] = "tpu"
    assert main(["occupancy"]) == 2


def test_each_side_has_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One side alone says nothing."""
    now = [0.0]
    monkeypatch.setattr(gpu_landmarks.time, "monotonic", lambda: now[0])
    given: list[float] = []

    def run_cases(names: list[str], seconds: float, **_: Any) -> dict[str, Any]:
        given.append(seconds)
        now[0] += seconds
        return {names[0]: {"outcome": "not reached", "detail": "there was no time left"}}

    def run_model(package: Package, device: str, seconds: float, options: Any) -> dict[str, Any]:
        given.append(seconds)
        now[0] += 10
        return {"outcome": "failed"}

    monkeypatch.setattr(gpu_landmarks, "run_cases", run_cases)
    monkeypatch.setattr(gpu_landmarks, "_run_model", run_model)
    clock = Clock(100)
    delayed, model = occupancy(sides(), "cuda", clock, [], say=lambda text: None), None
    (model,) = delayed
    assert given == [50, 90] and {d["outcome"] for d in model.detail.values()} == {"failed"}
    given.clear()
    first, *_ = occupancy(sides(), "cuda", Clock(40), ["overlap/x"], say=lambda text: None)
    assert given[:2] == [20, 20]
    assert {d["outcome"] for d in first.detail.values()} == {"not reached"}


def test_what_is_not_reached_is_said_to_be_so() -> None:
    for one in list(occupancy(sides(), "cuda", Clock(0), ["overlap/none-b8-t5ms"])):
        assert {side["outcome"] for side in one.detail.values()} == {"not reached"}


def test_a_command_ends_in_time_with_all_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('hello', flush=True)"
    started = time.monotonic()
    status, text = run_group(
        [sys.executable, "-c", f"{child}; time.sleep(60)"], dict(os.environ), tmp_path, 1.0
    )
    assert (status, text.strip()) == (124, "hello")
    assert time.monotonic() - started < 20
    assert run_group(["sh", "-c", "echo no; exit 3"], dict(os.environ), tmp_path, 9.0) == (
        3,
        "no\n",
    )


# As asv does, a process in a group of its own; its number is told.
PARENT = """
import os, subprocess, sys, time
own_group = lambda: os.setpgid(0, 0)
child = subprocess.Popen(["sleep", "60"], preexec_fn=own_group)
partial = sys.argv[1] + ".partial"
open(partial, "w").write(f"{os.getpid()} {child.pid}")
os.rename(partial, sys.argv[1])
time.sleep(60)
"""


def test_a_command_ends_with_what_it_put_into_another_group(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    command = [sys.executable, "-c", PARENT, str(told)]
    assert run_group(command, dict(os.environ), tmp_path, 2.0)[0] == 124
    processes = [int(pid) for pid in told.read_text().split()]
    assert len(processes) == 2 and not any(map(is_alive, processes))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_us_ends_what_we_started(tmp_path: Path, number: int) -> None:
    """As the program, which answers all but the last one; nothing answers that."""
    told, started = tmp_path / "pids", tmp_path / "started.py"
    started.write_text(
        "import os, runpy, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(gpu_landmarks.__file__).parent)!r})\n"
        "import bench\n"
        # Whose function it calls first of all; here, it begins to measure.
        "def landmarks(repo, extra):\n"
        "    import inspect\n"
        "    run = inspect.stack()[1].frame.f_globals['run_group']\n"
        f"    run([sys.executable, '-c', {PARENT!r}, {str(told)!r}], os.environ, Path('/'), 60)\n"
        "bench.landmarks = landmarks\n"
        "sys.argv = ['gpu_landmarks.py', 'asv', '--device', 'cpu']\n"
        f"runpy.run_path({gpu_landmarks.__file__!r}, run_name='__main__')\n"
    )

    # Started in the background by a shell, a process has the first one ignored.
    found = end_by(number, [str(started)], told, tmp_path, ignored=[signal.SIGINT])
    processes = [int(pid) for pid in told.read_text().split()]
    wait_for(lambda: not any(map(is_alive, processes)))
    assert members(found.process) == []
    answered = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
    assert found.status == answered.get(number, -number)


# --- asv ----------------------------------------------------------------------------------------

DRIVER = {"driver": "580.95.05"}
COLUMNS = ["result", "params", "version"]


def write_result(folder: Path, name: str, about: Any = (), **results: list[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "commit_hash": "a" * 40,
        "env_name": name,
        "date": 1,
        "params": {"machine": folder.name, "python": "/somewhere/bin/python", **DRIVER},
        "python": "/somewhere/bin/python",
        "requirements": {},
        "result_columns": COLUMNS,
        "results": {
            f"{key}.track": [value, [[f"'{i}'" for i in range(len(value))]], "1"]
            for key, value in results.items()
        },
        "durations": {},
        "version": 2,
    }
    document |= dict(about)
    (folder / f"aaaaaaaa-{name}.json").write_text(json.dumps(document))


def measure_again(
    tmp_path: Path, about: Any = (), place: str = "elsewhere", **results: list[Any]
) -> tuple[int, int]:
    """Settle fresh results of the machine, which stand in a folder that is then gone."""
    fresh = tmp_path.parent / "fresh"
    write_result(fresh / "gpu-h200", f"existing-py_{place}_bin_python", about, **results)
    found = settle(fresh, tmp_path, "gpu-h200", "a" * 40)
    for path in (fresh / "gpu-h200").iterdir():
        path.unlink()
    return found


def kept(tmp_path: Path) -> dict[str, Any]:
    (path,) = (tmp_path / "gpu-h200").iterdir()
    results = json.loads(path.read_text())["results"]
    return {key.removesuffix(".track"): columns[0] for key, columns in results.items()}


def test_the_interpreter_is_called_by_its_version_not_its_path(tmp_path: Path) -> None:
    machine = tmp_path / "gpu-h200"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    settled = machine / f"aaaaaaaa-existing-py{version}.json"
    measure_again(tmp_path, place="somewhere", decode=[1.0])
    assert [path.name for path in machine.iterdir()] == [settled.name]
    document = json.loads(settled.read_text())
    assert "somewhere" not in settled.read_text()
    assert document["python"] == document["params"]["python"] == version
    assert document["env_name"] == f"existing-py{version}"

    # From another place, another time: what was not measured again stays.
    measure_again(tmp_path, decode=[3.0], mixed=[4.0])
    # What is told is what is new.
    assert measure_again(tmp_path, mixed=[5.0, None]) == (1, 1)
    assert kept(tmp_path) == {"decode": [3.0], "mixed": [5.0, None]}


@pytest.mark.parametrize(
    "about",
    [
        {"params": {"machine": "gpu-h200", "python": "", "driver": "590.10"}},
        {"result_columns": ["result", "params", "version", "started_at"]},
        {"requirements": {"torch": "2.14"}},
    ],
    ids=lambda about: next(iter(about)),
)
def test_what_was_measured_by_something_else_is_not_mixed_in(tmp_path: Path, about: Any) -> None:
    measure_again(tmp_path, decode=[1.0], mixed=[2.0])
    measure_again(tmp_path, about, mixed=[5.0])
    assert kept(tmp_path) == {"mixed": [5.0]}


def test_an_asv_that_was_ended_while_it_wrote_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = tmp_path / "results"
    measure_again(tmp_path, decode=[1.0])
    fresh = tmp_path.parent / "fresh" / "gpu-h200" / "aaaaaaaa-existing-py_x.json"
    fresh.write_text('{"commit_hash": "aaaa')
    assert settle(tmp_path.parent / "fresh", tmp_path, "gpu-h200", "a" * 40) == (0, 0)
    assert kept(tmp_path) == {"decode": [1.0]}
    assert "is no JSON" in capsys.readouterr().err


def test_a_number_that_asv_would_not_come_to_an_end_with_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = tmp_path / "results"
    measure_again(tmp_path, decode=[1.0])
    assert measure_again(tmp_path, decode=[math.inf], mixed=[2.0]) == (0, 0)
    assert kept(tmp_path) == {"decode": [1.0]}
    said = capsys.readouterr().err
    assert "results[decode.track].result is inf, not a number" in said and "; not kept" in said


@pytest.mark.parametrize("there", ["{", '{"results": null, "version": 2}'])
def test_a_file_that_is_none_of_asvs_is_put_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    tmp_path = tmp_path / "results"
    measure_again(tmp_path, decode=[1.0])
    (settled,) = (tmp_path / "gpu-h200").iterdir()
    settled.write_text(there)
    assert measure_again(tmp_path, mixed=[2.0]) == (1, 0)
    # Not among the results, which are published as they are.
    (aside,) = (tmp_path.parent / "results-odd" / "gpu-h200").iterdir()
    assert aside.read_text() == there and aside.name.startswith(settled.stem)
    assert f"gpu-h200/{settled.name}" in capsys.readouterr().err
    assert kept(tmp_path) == {"mixed": [2.0]}


def test_asvs_list_of_benchmarks_is_that_of_the_suite(tmp_path: Path) -> None:
    """What the page is made from, without anything that says where."""
    found = gpu_landmarks.discover(REPO_ROOT, tmp_path / "results")
    assert [path.name for path in found.parent.iterdir()] == ["benchmarks.json"]
    known = asv_files.read_benchmarks(found)
    assert known["decode.Decode.track_us_per_token_ratio"]["unit"] == "anchors/token"
    cases = [case.name for case in QUESTIONS["memory"] if case.quick]
    assert known["memory.Memory.track_peak_step_bytes"]["params"] == [list(map(repr, cases))]


def test_values_are_counted() -> None:
    columns = {"a": [[1.0, 2, None]], "b": [[math.nan]], "c": [[]], "d": []}
    assert count({"results": columns}) == (2, 4)
    assert count({"results": {}}) == (0, 0)


def test_what_came_of_a_commit() -> None:
    assert [judge(0, 3), judge(2, 3), judge(0, 0), judge(1, 0)] == ["done", *["failed"] * 3]
    # asv writes last of all.
    assert [judge(124, 0), judge(124, 3)] == ["not reached", "done"]


@pytest.mark.parametrize("status", [0, 1, 2])
def test_what_an_earlier_run_found_is_not_this_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    """asv ends, well or not, and writes nothing or, with a benchmark that failed, some of it."""
    measure_again(tmp_path, decode=[1.0])

    def group(command: list[str], env: Any, folder: Path, seconds: float) -> tuple[int, str]:
        config = json.loads(Path(command[command.index("--config") + 1]).read_text())
        if status == 2:
            machine = Path(config["results_dir"]) / "gpu-h200"
            write_result(machine, "existing-py_x", mixed=[2.0], decode=[None])
            (machine / "machine.json").write_text("{}")
        return status, "what asv said"

    monkeypatch.setattr(gpu_landmarks, "run_group", group)
    found: list[Measured] = []
    marks = [Package("a" * 40, ["a"], "/after")]
    run_asv(REPO_ROOT, marks, "gpu-h200", tmp_path, ["x"], Clock(100), found, say=lambda text: None)
    (one,) = found
    assert (one.outcome, one.values) == ("failed", 1 if status == 2 else 0)
    assert one.detail == f"exit status {status}: what asv said"
    if status == 2:
        (tmp_path / "gpu-h200" / "machine.json").unlink()
        assert kept(tmp_path) == {"mixed": [2.0], "decode": [None]}
    else:
        assert kept(tmp_path) == {"decode": [1.0]}


def test_asv_takes_the_configuration_from_elsewhere(tmp_path: Path) -> None:
    from asv.config import Config

    path = write_config(REPO_ROOT, tmp_path / "results", tmp_path)
    found, usual = Config.load(str(path)), Config.load(str(REPO_ROOT / "asv.conf.json"))
    assert found.results_dir == str(tmp_path / "results")
    assert found.repo == str(REPO_ROOT)
    assert Path(found.benchmark_dir) == REPO_ROOT / usual.benchmark_dir
    assert found.matrix == usual.matrix and found.project == usual.project


def test_why_asv_cannot_measure(
    repo: Path, shas: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_no_asv(repo) is None
    assert "no history" in str(why_no_asv(tmp_path / "nowhere"))
    monkeypatch.setattr(gpu_landmarks.importlib.util, "find_spec", lambda name: None)
    assert why_no_asv(repo) == "asv is not installed"


def test_without_asv_the_same_questions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cases(names: list[str], package: str, seconds: float, **_: Any) -> dict[str, Any]:
        outcome = "done" if package == "/after" else "failed"
        outcome = outcome if seconds else "not reached"
        return {name: {"outcome": outcome, "detail": "no"} for name in names}

    monkeypatch.setattr(gpu_landmarks, "run_cases", run_cases)
    said: list[str] = []
    marks = by_importance(sides().landmarks)
    found: list[Measured] = []
    everything: dict[str, Any] = {}
    run_lab(marks, [r"^mixed\.Mixed\."], 1, 1, Clock(100), found, everything, said.append)
    assert [(one.how, one.outcome) for one in found] == [("lab", "done"), ("lab", "failed")]
    assert all(name.startswith("mixed/") for name in everything["a" * 40])
    assert found[0].values == len(everything["a" * 40]) > 0
    run_lab(marks, [], 1, 1, Clock(0), found, everything, said.append)
    assert {one.outcome for one in found} == {"not reached"}
    with pytest.raises(BenchError, match="no case"):
        run_lab(marks, ["^nothing"], 1, 1, Clock(9), found, everything, said.append)


@pytest.mark.parametrize(("outcome", "verdict"), [("failed", "failed"), ("stalls", "done")])
def test_one_case_that_fails_is_a_failure_and_one_that_stalls_is_none(
    monkeypatch: pytest.MonkeyPatch, outcome: str, verdict: str
) -> None:
    def run_cases(names: list[str], **_: Any) -> dict[str, Any]:
        first, *others = names
        found = {name: {"outcome": "done"} for name in others}
        return found | {first: {"outcome": outcome, "detail": "out of memory"}}

    monkeypatch.setattr(gpu_landmarks, "run_cases", run_cases)
    found: list[Measured] = []
    marks = sides().landmarks[:1]
    run_lab(marks, ["^decode"], 1, 1, Clock(100), found, {}, lambda text: None)
    assert found[0].outcome == verdict and found[0].values > 0
    assert found[0].detail == ("out of memory" if verdict == "failed" else "")


def test_who_is_interrupted_has_written_what_there_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_cases(names: list[str], package: str, **_: Any) -> dict[str, Any]:
        if package == "/after":
            raise KeyboardInterrupt
        return {names[0]: {"outcome": "done", "metrics": {"fwd_occupancy": 0.8}}}

    monkeypatch.setattr(gpu_landmarks, "run_cases", run_cases)
    monkeypatch.setattr(gpu_landmarks, "packages", lambda repo, extra=(): sides())
    out = tmp_path / "found.json"
    assert main(["occupancy", "--device", "cpu", "--json", str(out)]) == 130
    (result,) = json.loads(out.read_text())["results"]
    assert (result["before"], result["after"]) == (0.8, None)

    monkeypatch.setattr(gpu_landmarks, "why_no_asv", lambda repo: "asv is not installed")
    assert main(["asv", "--device", "cpu", "--json", str(out)]) == 130
    document = json.loads(out.read_text())
    assert document["skipped"] == "asv is not installed" and len(document["commits"]) == 2


def test_what_is_wrong_is_said_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["occupancy", "--cases", "overlap/nothing"]) == 2
    assert "no case 'overlap/nothing'" in capsys.readouterr().err
    monkeypatch.setattr(gpu_landmarks, "REPO_ROOT", tmp_path)
    assert main(["extract", "--to", str(tmp_path / "to")]) == 2
    assert INDEX in capsys.readouterr().err
    with pytest.raises(BenchError):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--most", "-1"], "whole number of at least 1, got '-1'"),
        (["--most", "0"], "whole number"),
        (["--rounds", "0"], "whole number"),
        (["--processes", "x"], "whole number"),
        (["--seconds", "nan"], "finite number above 0, got 'nan'"),
        (["--seconds", "inf"], "finite number"),
        (["--seconds", "-5"], "finite number"),
        (["--only"], "--only without --commit"),
    ],
)
def test_what_is_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["asv", *options])
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_asv_keeps_the_results_of_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package of the commit is measured, by today's laboratory, in this environment."""
    monkeypatch.setenv("HOME", str(tmp_path))  # where asv keeps what it knows of machines
    sha = packages(REPO_ROOT).after.sha
    options = ["--commit", sha, "--only", "--device", "cpu", "--rounds", "1"]
    options += ["--bench", r"^penalties\.Penalties\.track_us_per_step\(", "--machine", "gpu-test"]
    out, results = tmp_path / "out.json", tmp_path / "results"
    assert main(["asv", *options, "--results", str(results), "--json", str(out)]) == 0
    (one,) = json.loads(out.read_text())["commits"]
    assert (one["sha"], one["how"], one["outcome"]) == (sha, "asv", "done")
    (path,) = (results / "gpu-test").glob(f"{sha[:8]}-*.json")
    document = json.loads(path.read_text())
    assert document["commit_hash"] == sha
    machine = json.loads((results / "gpu-test" / "machine.json").read_text())
    assert document["params"]["gpu"] == machine["gpu"] and machine["machine"] == "gpu-test"
    assert one["values"] > 0
