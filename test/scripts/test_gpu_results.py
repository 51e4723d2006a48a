"""``scripts/gpu_results.py`` and ``keep_gpu_results.sh``: what is measured, and what is taken of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpu_results
from gpu_results import RefusedError, accept, main, plan

SHA = "0123456789abcdef0123456789abcdef01234567"
NAME = f"{SHA[:8]}-existing-py3.11.json"
MACHINE = {
    "machine": "gpu-h200",
    "os": "Linux 6.8.0",
    "num_cpu": "16",
    "arch": "x86_64",
    "cpu": "Intel(R) Xeon(R) Platinum @ 2.10GHz",
    "ram": "135291469824",
    "gpu": "NVIDIA H200",
    "driver": "580.95.05",
    "cuda": "13.0",
    "torch": "2.13.0+cu130",
    "triton": "3.9.0",
    "version": 1,
}


def result(**results: list[Any]) -> dict[str, Any]:
    return {
        "commit_hash": SHA,
        "env_name": "existing-py3.11",
        "date": 1,
        "params": {k: v for k, v in MACHINE.items() if k != "version"} | {"python": "3.11"},
        "python": "3.11",
        "requirements": {},
        "env_vars": {},
        "result_columns": ["result", "params", "version"],
        "results": {f"decode.Decode.{key}": value for key, value in results.items()},
        "durations": {"<build>": 0.1, "<setup_cache decode:21>": 9.5},
        "version": 2,
    }


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    folder = tmp_path / "incoming" / "gpu-h200"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    columns = [[47.6, float("nan"), None], [["'tiny-b8'", "'real-b8'", "'real-b1'"]], "2"]
    (folder / NAME).write_text(json.dumps(result(track_itl_p50_ms=columns)))
    (folder.parent / "benchmarks.json").write_text('{"code": "<script>"}')
    return folder.parent


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# --- Before -------------------------------------------------------------------------------------


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repo), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "--quiet", "-b", "main")
    for message in ("one", "two"):
        git(folder, "commit", "--quiet", "--allow-empty", "-m", message)
    return folder


def test_what_is_measured_when(repo: Path) -> None:
    head, first = (git(repo, "rev-parse", name) for name in ("HEAD", "HEAD~1"))
    assert plan(repo, "schedule", "") == plan(repo, "workflow_dispatch", " ") == []
    assert plan(repo, "push", "ignored") == [head]
    assert plan(repo, "workflow_dispatch", f" {first}  {head}\n") == [first, head]


@pytest.mark.parametrize(
    ("event", "asked", "said"),
    [
        ("pull_request", "", "nothing is measured"),
        ("pull_request_target", "", "nothing is measured"),
        ("workflow_dispatch", "main", "no full hash"),
        ("workflow_dispatch", "$(id)", "no full hash"),
        ("workflow_dispatch", "--all", "no full hash"),
        ("workflow_dispatch", SHA, "no commit of this history"),
        ("workflow_dispatch", f"{SHA} " * 9, "too many"),
    ],
)
def test_what_is_not_measured(repo: Path, event: str, asked: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        plan(repo, event, asked)


def test_a_commit_of_another_branch_is_refused(repo: Path) -> None:
    git(repo, "checkout", "--quiet", "-b", "side")
    git(repo, "commit", "--quiet", "--allow-empty", "-m", "side")
    side = git(repo, "rev-parse", "HEAD")
    git(repo, "checkout", "--quiet", "main")
    with pytest.raises(RefusedError, match="no commit of this history"):
        plan(repo, "workflow_dispatch", side)


def test_the_plan_is_one_line_for_a_step(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--repo", str(repo), "--event"]
    assert main([*options, "push"]) == 0
    assert capsys.readouterr().out == f"commits={git(repo, 'rev-parse', 'HEAD')}\n"
    assert main([*options, "workflow_dispatch", "--asked", "x\ncommits=y"]) == 1
    assert capsys.readouterr().out == ""


def test_without_git_or_a_repository(
    repo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--event", "push", "--repo", str(tmp_path / "nowhere")]) == 1
    assert "gpu_results: error: git says: " in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["plan", "--event", "push", "--repo", str(repo)]) == 1
    assert "git cannot be run: No such file" in capsys.readouterr().err


# --- Afterwards ---------------------------------------------------------------------------------


def test_results_are_taken(incoming: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert accept(incoming, results) == [f"gpu-h200/{NAME}", "gpu-h200/machine.json"]
    assert read(results / "gpu-h200" / "machine.json") == MACHINE
    # What the benchmarks are is found out by whoever publishes.
    assert not (results / "benchmarks.json").exists()
    assert read(results / "gpu-h200" / NAME)["results"].keys() == {"decode.Decode.track_itl_p50_ms"}


def test_what_is_there_stays_but_for_what_was_measured_anew(incoming: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    accept(incoming, results)
    other = results / "gpu-l4" / "machine.json"
    other.parent.mkdir()
    other.write_text("{}")
    path = incoming / "gpu-h200" / NAME
    path.write_text(json.dumps(result(track_us_per_token=[[1.0], [["'tiny-b8'"]], "2"])))
    accept(incoming, results)
    kept = read(results / "gpu-h200" / NAME)["results"]
    assert set(kept) == {"decode.Decode.track_itl_p50_ms", "decode.Decode.track_us_per_token"}
    assert other.read_text() == "{}"


@pytest.mark.parametrize(
    "about",
    [
        {"params": result()["params"] | {"driver": "590.10"}},
        {"result_columns": ["result", "params", "version", "started_at"]},
        {"requirements": {"torch": "2.14"}},
    ],
    ids=lambda about: next(iter(about)),
)
def test_what_was_measured_by_something_else_is_not_mixed_in(
    incoming: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], about: dict[str, Any]
) -> None:
    results = tmp_path / "results"
    accept(incoming, results)
    again = result(track_us_per_token=[[1.0], [["'tiny-b8'"]], "2"]) | about | {"durations": {}}
    (incoming / "gpu-h200" / NAME).write_text(json.dumps(again))
    accept(incoming, results)
    assert read(results / "gpu-h200" / NAME) == again
    assert "measured by something else before" in capsys.readouterr().err


Change = Callable[[Path], object]


def change(name: str, **fields: Any) -> Change:
    def write(machine: Path) -> None:
        document = read(machine / name)
        (machine / name).write_text(json.dumps(document | fields))

    return write


def set_value(value: Any) -> Change:
    return change(NAME, results={"decode.Decode.track_x": [[value], [["'tiny-b8'"]], "1"]})


REFUSED: dict[str, tuple[Change, str]] = {
    "a script": (lambda m: (m / "x.sh").write_text("id"), "no name of a result"),
    "a page": (lambda m: (m.parent / "index.html").write_text(""), "no name of a result"),
    "a hidden file": (lambda m: (m / ".gitattributes").write_text(""), "no name of a result"),
    "a folder below": (lambda m: (m / "gpu-x").mkdir(), "no name of a machine"),
    "a CPU machine": (lambda m: m.rename(m.parent / "laptop"), "no name of a machine"),
    "a second machine": (
        lambda m: [
            (m.parent / "gpu-x").mkdir(),
            (m.parent / "gpu-x/machine.json").write_text("{}"),
        ],
        "of one machine",
    ),
    "another machine's name": (lambda m: m.rename(m.parent / "gpu-other"), "another machine"),
    "no machine.json": (lambda m: (m / "machine.json").unlink(), "no machine.json"),
    "no GPU": (change("machine.json", gpu="none"), "has no GPU"),
    "an unknown field": (change("machine.json", note="x"), "other fields"),
    "a field that is no text": (change("machine.json", ram=[1]), r"ram is \[1\], not text"),
    "another version of the form": (change("machine.json", version=5), "version is 5, not 1"),
    "a link": (
        lambda m: (m / f"{'b' * 8}-existing-py3.11.json").symlink_to("/etc/passwd"),
        "a link",
    ),
    "no JSON": (lambda m: (m / NAME).write_text("{"), "no JSON"),
    "a list": (lambda m: (m / NAME).write_text("[]"), "no JSON object"),
    "bottomless": (lambda m: (m / NAME).write_text("[" * 100_000), "no JSON"),
    "markup": (change(NAME, python="<script>"), "text that no result has"),
    "markup behind a phase": (
        change(NAME, durations={"<build><script>": 1}),
        "text that no result has",
    ),
    "an ampersand": (change("machine.json", cpu="&lt;"), "text that no result has"),
    "a quote": (change("machine.json", cpu='"'), "text that no result has"),
    "an apostrophe": (change("machine.json", cpu="' onclick=x"), "text that no result has"),
    "a call between quotes": (change(NAME, python="'onclick=x'"), "text that no result has"),
    "words between quotes": (change(NAME, python="'a b'"), "text that no result has"),
    "quotes between quotes": (change(NAME, python="'a'b'"), "text that no result has"),
    "a new line": (change("machine.json", cpu="a\nb"), "text that no result has"),
    "a long text": (change("machine.json", cpu="a" * 201), "text that no result has"),
    "too large": (lambda m: (m / NAME).write_text(" " * (gpu_results.MOST_BYTES + 1)), "larger"),
    "too many": (
        lambda m: [(m / f"{i:08x}-existing-py3.11.json").write_text("{}") for i in range(70)],
        "too many",
    ),
    "another commit's": (change(NAME, commit_hash="f" * 40), "another commit"),
    "another environment's": (change(NAME, env_name="virtualenv-py3.11"), "another environment"),
    "a field too many": (change(NAME, html="x"), "other fields than asv's: html"),
    "another machine's results": (change(NAME, params={"machine": "gpu-l4"}), "another machine"),
    "no results": (change(NAME, results=[]), r"results is \[\], not a JSON object"),
    "an odd benchmark": (change(NAME, results={"a b": []}), "results is 'a b', not a benchmark's"),
    "a long benchmark": (
        change(NAME, results={f"a.{'b' * 61}": [[1.0], [], "1"]}),
        "a benchmark called",
    ),
    "infinity": (set_value(math.inf), r"\.result is inf, not a number"),
    "a number beyond all": (set_value(10**400), r"\.result is 1000.*, not a number"),
    "a value of text": (set_value("abc"), r"\.result is 'abc', not a number"),
    "a date of text": (change(NAME, date="yesterday"), "date is 'yesterday', not a time"),
    "another version of the results": (change(NAME, version=99), "version is 99, not 2"),
    "parameters of numbers": (
        change(NAME, results={"decode.Decode.track_x": [[1.0], [[1]], "1"]}),
        r"\.params is 1, not text",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(incoming: Path, tmp_path: Path, what: str) -> None:
    alter, said = REFUSED[what]
    alter(incoming / "gpu-h200")
    results = tmp_path / "results"
    with pytest.raises(RefusedError, match=said):
        accept(incoming, results)
    assert not results.exists()


@pytest.mark.parametrize("there", ["{", "[]", '{"results": null}'])
def test_what_is_there_and_is_none_of_asvs_is_left_as_it_is(
    incoming: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    target = tmp_path / "results" / "gpu-h200" / NAME
    target.parent.mkdir(parents=True)
    target.write_text(there)
    assert main(["accept", str(incoming), str(tmp_path / "results")]) == 1
    assert f"there already, and to be mended first: gpu-h200/{NAME}" in capsys.readouterr().err
    assert [path.read_text() for path in target.parent.iterdir()] == [there]


# --- The branch ---------------------------------------------------------------------------------


def keep(incoming: Path, remote: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    script = Path(gpu_results.__file__).with_name("keep_gpu_results.sh")
    return subprocess.run(
        ["bash", str(script), str(incoming), str(remote), "benchmark-results"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    folder = tmp_path / "remote.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(folder)], check=True)
    return folder


def test_results_are_pushed_onto_what_is_there(incoming: Path, remote: Path) -> None:
    done = keep(incoming, remote, TOKEN="sesame", SOURCE=SHA)
    assert done.returncode == 0, done.stderr
    files = git(remote, "ls-tree", "-r", "--name-only", "benchmark-results").split()
    assert files == [f"results/gpu-h200/{NAME}", "results/gpu-h200/machine.json"]
    assert SHA in git(remote, "log", "--format=%B", "benchmark-results")
    assert "sesame" not in done.stdout + done.stderr

    again = keep(incoming, remote)
    assert again.returncode == 0 and "there already" in again.stdout
    change("machine.json", driver="590.10")(incoming / "gpu-h200")
    assert keep(incoming, remote).returncode == 0
    assert git(remote, "rev-list", "--count", "benchmark-results") == "2"


def test_it_finds_its_folders_whatever_cd_makes_of_them(incoming: Path, remote: Path) -> None:
    script = Path(gpu_results.__file__).with_name("keep_gpu_results.sh")
    done = subprocess.run(
        ["bash", f"{script.parent.name}/{script.name}", str(incoming), str(remote), "branch"],
        cwd=script.parents[1],
        env=os.environ | {"CDPATH": str(script.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_refused_is_not_pushed(incoming: Path, remote: Path) -> None:
    (incoming / "gpu-h200" / "x.sh").write_text("id")
    done = keep(incoming, remote)
    assert done.returncode == 1 and "refused" in done.stderr
    assert git(remote, "for-each-ref") == ""


def hook(remote: Path, text: str) -> None:
    path = remote / "hooks" / "pre-receive"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_push_that_is_turned_away_is_not_tried_again(incoming: Path, remote: Path) -> None:
    hook(remote, "echo 'the disk is full' >&2; exit 1")
    done = keep(incoming, remote)
    assert done.returncode == 1 and "the disk is full" in done.stderr
    assert "meanwhile" not in done.stderr and "nobody else has pushed" in done.stderr
    hook(remote, "exit 0")
    assert keep(incoming, remote).returncode == 0
    hook(remote, "exit 1")
    change("machine.json", driver="590.10")(incoming / "gpu-h200")
    done = keep(incoming, remote)
    assert done.returncode == 1 and "meanwhile" not in done.stderr


@pytest.mark.parametrize("is_there", [False, True], ids=["a new branch", "a branch that is there"])
def test_a_push_that_somebody_was_faster_than_is_tried_again(
    incoming: Path, remote: Path, is_there: bool
) -> None:
    if is_there:
        assert keep(incoming, remote).returncode == 0
        change("machine.json", driver="590.10")(incoming / "gpu-h200")
    # Once, while ours is under way, somebody pushes a commit of theirs.
    hook(
        remote,
        "test -e theirs && exit 0; touch theirs; unset GIT_QUARANTINE_PATH\n"
        "export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=n@x GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=n@x\n"
        "tip=$(git rev-parse --verify --quiet refs/heads/benchmark-results)\n"
        "unset GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES\n"
        'tree=$(git rev-parse --quiet --verify "$tip^{tree}" || git mktree </dev/null)\n'
        'sha=$(git commit-tree -m theirs ${tip:+-p "$tip"} "$tree")\n'
        "git update-ref refs/heads/benchmark-results $sha; exit 1",
    )
    done = keep(incoming, remote)
    assert done.returncode == 0, done.stderr
    assert "moved meanwhile (attempt 1)" in done.stderr and "attempt 2" not in done.stderr
    messages = git(remote, "log", "--format=%s", "benchmark-results").splitlines()
    assert messages[:2] == ["Results of gpu-h200", "theirs"]


def test_a_repository_that_is_not_there_is_no_empty_one(incoming: Path, tmp_path: Path) -> None:
    assert keep(incoming, tmp_path / "nowhere.git").returncode == 1
