"""prove_fixes.py on a tiny repository of its own, and its judgement on made-up results."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import prove_fixes
from prove_fixes import FIXES, MARK, ProofError, TestResult, find_reason, judge, main

FLAG, COPY = FIXES
FLAG_TRAILER = "Upstream-PR: sgl-project/sglang#21840"
COPY_TRAILER = "Upstream-PR: sgl-project/sglang#28500"

BASE = {
    "python/sglang/__init__.py": "",
    "python/sglang/srt/__init__.py": "",
    "python/sglang/srt/managers/__init__.py": "",
    "python/sglang/srt/managers/schedule_batch.py": "FLAG = False\nCOPY = 'pageable'\n",
    "python/sglang/srt/speculative/__init__.py": "",
    "python/sglang/srt/speculative/eagle_info_v2.py": "COPY = 'pageable'\n",
}
FLAG_FIX = {"python/sglang/srt/managers/schedule_batch.py": "FLAG = True\nCOPY = 'pageable'\n"}
COPY_FIX = {
    "python/sglang/srt/managers/schedule_batch.py": "FLAG = True\nCOPY = 'pinned'\n",
    "python/sglang/srt/speculative/eagle_info_v2.py": "COPY = 'pinned'\n",
}
TESTS = {
    "test/srt/managers/test_fix_21840_flag.py": """
import pytest
from sglang.srt.managers import schedule_batch

@pytest.mark.proves_fix
def test_flag():
    assert schedule_batch.FLAG, "is_prefill_only is stale"

def test_guard():
    assert schedule_batch.COPY
""",
    "test/srt/managers/test_fix_28500_copy.py": """
import logging
import pytest
from sglang.srt.managers import schedule_batch

@pytest.mark.proves_fix
def test_copy():
    logging.getLogger().warning("a %s copy was seen", schedule_batch.COPY)
    assert schedule_batch.COPY == "pinned"[:6], "the reason stands in the log alone"
""",
    "test/srt/speculative/test_fix_28500_spec.py": """
import pytest
from sglang.srt.speculative import eagle_info_v2

@pytest.fixture
def batch():
    yield
    assert eagle_info_v2.COPY != "pageable"

@pytest.mark.proves_fix
@pytest.mark.parametrize("topk", [1, 4])
def test_spec(batch, topk):
    pass
""",
}

Commit = Callable[..., str]


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "tester")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tester@example.invalid")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "no-such-file"))
    path = tmp_path / "repo"
    path.mkdir()
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main", str(path)], check=True)
    return path


@pytest.fixture
def commit(repo: Path) -> Commit:
    def make(files: dict[str, str], subject: str, trailer: str | None = None) -> str:
        for name, text in files.items():
            target = repo / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        message = subject if trailer is None else f"{subject}\n\nWhy and how.\n\n{trailer}"
        prove_fixes.git(repo, "add", "--all")
        prove_fixes.git(repo, "commit", "--quiet", "--message", message)
        return prove_fixes.git(repo, "rev-parse", "HEAD").strip()

    return make


def worktrees(repo: Path) -> int:
    return len(prove_fixes.git(repo, "worktree", "list").splitlines())


# --- From history to exit status --------------------------------------------------------------


def test_both_fixes_are_proven(
    repo: Path, commit: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    base = commit(BASE, "the slice as it was")
    flag = commit(FLAG_FIX, "[Scheduler] flag", FLAG_TRAILER)
    copy = commit(COPY_FIX, "[Spec] copy", COPY_TRAILER)
    commit(TESTS, "tests")

    assert main(["--repo", str(repo), "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["ok"]
    first, second = report["fixes"]
    assert (first["pr"], first["parent"], first["commit"]) == (21840, base, flag)
    assert (second["pr"], second["parent"], second["commit"]) == (28500, flag, copy)
    assert first["tests"] == [
        {
            "name": "test_fix_21840_flag::test_flag",
            "proves": True,
            "parent": "failed",
            "commit": "passed",
            "reason": first["tests"][0]["reason"],
        },
        {
            "name": "test_fix_21840_flag::test_guard",
            "proves": False,
            "parent": "passed",
            "commit": "passed",
            "reason": "",
        },
    ]
    assert "is_prefill_only is stale" in first["tests"][0]["reason"]
    by_name = {test["name"]: test for test in second["tests"]}
    assert by_name["test_fix_28500_copy::test_copy"]["parent"] == "failed"
    assert "pageable" in by_name["test_fix_28500_copy::test_copy"]["reason"]
    # An assertion in a teardown is an error, and proves as well.
    assert by_name["test_fix_28500_spec::test_spec[4]"]["parent"] == "error"
    assert all(test["commit"] == "passed" for test in second["tests"])
    assert "failed  test_fix_21840_flag.py::test_flag" in err
    assert "Each fix on its parent" in err
    assert worktrees(repo) == 1


def test_a_fix_that_mends_nothing_is_not_proven(
    repo: Path, commit: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(BASE, "the slice as it was")
    text = "FLAG = False  # still\nCOPY = 'pageable'\n"
    commit({"python/sglang/srt/managers/schedule_batch.py": text}, "flag", FLAG_TRAILER)
    commit(TESTS, "tests")

    assert main(["--repo", str(repo)]) == 1
    out = capsys.readouterr().out
    assert "test_fix_21840_flag::test_flag fails with the fix" in out
    assert f"0 commits carry '{COPY_TRAILER}'" in out
    assert worktrees(repo) == 1


def test_tests_that_cannot_be_collected_on_the_parent_prove_nothing(
    repo: Path, commit: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(BASE, "the slice as it was")
    commit(FLAG_FIX, "flag", FLAG_TRAILER)
    test = "from sglang.srt.managers.schedule_batch import leak\n"
    commit({"test/srt/managers/test_fix_21840_flag.py": test}, "tests")

    assert main(["--repo", str(repo)]) == 1
    assert "pytest ended with status 2" in capsys.readouterr().out


def test_neither_fix_in_history(
    repo: Path, commit: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--repo", str(repo)]) == 0  # nothing is committed
    # A number in the text of a commit is no trailer.
    commit(BASE, f"the slice\n\n{FLAG_TRAILER} comes later\n\nnot now")
    assert main(["--repo", str(repo)]) == 0
    assert "History holds no fix yet" in capsys.readouterr().out


def test_a_shallow_clone_is_refused(
    repo: Path, commit: Commit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(BASE, "the slice as it was")
    commit(TESTS, "tests")
    clone = tmp_path / "clone"
    prove_fixes.git(repo, "clone", "--quiet", "--depth=1", repo.as_uri(), str(clone))
    assert main(["--repo", str(clone)]) == 1
    assert "shallow" in capsys.readouterr().err


def test_without_git_there_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProofError, match="git cannot be run: No such file"):
        prove_fixes.git(tmp_path, "status")
    assert main(["--repo", str(tmp_path)]) == 1
    assert "prove_fixes: error: git cannot be run" in capsys.readouterr().err


def test_two_commits_with_one_trailer(repo: Path, commit: Commit) -> None:
    commit(BASE, "the slice as it was")
    first = commit(FLAG_FIX, "flag", FLAG_TRAILER)
    second = commit(COPY_FIX, "again", FLAG_TRAILER)
    commits = prove_fixes.trailers(repo)
    with pytest.raises(ProofError, match="2 commits carry") as caught:
        prove_fixes.fix_commit(repo, FLAG, commits)
    assert first[:10] in str(caught.value)
    assert second[:10] in str(caught.value)


def test_a_fix_that_touches_more_than_upstream_did(repo: Path, commit: Commit) -> None:
    commit(BASE, "the slice as it was")
    commit({**FLAG_FIX, "README.md": "news\n"}, "flag", FLAG_TRAILER)
    with pytest.raises(ProofError, match=r"touches README\.md"):
        prove_fixes.fix_commit(repo, FLAG, prove_fixes.trailers(repo))


def test_another_package_than_the_worktrees_ends_the_run(repo: Path, commit: Commit) -> None:
    commit({**BASE, **TESTS}, "the slice as it was")
    elsewhere = repo.parent / "elsewhere" / "sglang"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text("")
    tests = [repo / "test/srt/managers/test_fix_21840_flag.py"]
    with prove_fixes.worktree(repo, "HEAD") as tree:
        package = tree / "python" / "sglang"
        package.rename(package.with_name("moved"))
        package.symlink_to(elsewhere)
        with pytest.raises(ProofError, match="sglang comes from"):
            prove_fixes.run_tests(repo, tree, tests, lambda _: None)
    assert worktrees(repo) == 1


# --- The judgement ----------------------------------------------------------------------------


def result(status: str, said: str = "", proves: bool = True) -> list[TestResult]:
    return [TestResult("t", status, proves, said)]


def problems(parent: list[TestResult], commit: list[TestResult]) -> str:
    return "\n".join(judge(FLAG, parent, commit)[1])


def test_a_proof() -> None:
    tests, found = judge(FLAG, result("failed", "E  Memory Leak detected"), result("passed"))
    assert found == []
    assert tests[0].reason == "Memory Leak detected"


@pytest.mark.parametrize(
    ("parent", "commit", "expected"),
    [
        (result("passed"), result("passed"), "t has to fail without the fix: passed"),
        (result("skipped"), result("passed"), "t has to fail without the fix: skipped"),
        ([], result("passed"), "t has to fail without the fix: absent"),
        (result("failed", "leak"), [], "t has to pass with the fix: absent"),
        (result("failed", "leak"), result("skipped"), "t has to pass with the fix: skipped"),
        (result("failed", "leak"), result("failed", "E boom"), "t fails with the fix: E boom"),
        (result("failed", "E KeyError"), result("passed"), "not for the stated reason: E KeyError"),
        (result("skipped"), result("skipped"), f"every test marked {MARK} is skipped here"),
        (result("failed", "leak", False), result("passed", "", False), "no test is marked"),
        ([], [], "no test is marked"),
    ],
)
def test_no_proof(parent: list[TestResult], commit: list[TestResult], expected: str) -> None:
    assert expected in problems(parent, commit)


def test_a_guard_may_fail_on_the_parent_but_not_on_the_commit() -> None:
    proof = TestResult("p", "failed", True, "leak"), TestResult("p", "passed", True)
    guard = [TestResult("g", "failed", False, "no such name"), TestResult("g", "passed", False)]
    assert problems([proof[0], guard[0]], [proof[1], guard[1]]) == ""
    guard[1] = TestResult("g", "error", False, "boom")
    assert problems([proof[0], guard[0]], [proof[1], guard[1]]) == "g fails with the fix: boom"


def test_a_test_may_have_a_reason_of_its_own() -> None:
    fix = FIXES[0]
    said = "E   AssertionError: the pool has a leak"
    assert find_reason(fix.reason, said)
    for own, expected in (("pool has a leak", ""), ("stalls", "not for the stated reason")):
        parent = TestResult("t", "failed", True, said, own)
        commit = TestResult("t", "passed", True, "", own)
        assert expected in problems([parent], [commit])
        assert bool(problems([parent], [commit])) == bool(expected)


def test_the_source_of_a_test_is_no_reason(tmp_path: Path) -> None:
    """Only what a failing test says counts, not the lines of code that its traceback shows."""
    junit = tmp_path / "junit.xml"
    junit.write_text(
        """<testsuites><testsuite><testcase classname="test.srt.test_x.TestA" name="test_y[1]">
        <properties><property name="proves_fix" value="leak|KEY"/></properties>
        <failure message="KeyError: 3">    check_memory_leak(engine)
E   KeyError: 3</failure></testcase></testsuite></testsuites>"""
    )
    (read,) = prove_fixes.read_junit(junit)
    assert (read.name, read.status, read.proves) == ("test_x::TestA::test_y[1]", "failed", True)
    assert read.reason == "leak|KEY"
    assert find_reason("leak", read.said) == ""
    assert find_reason("KEYERROR", read.said) == "KeyError: 3"
    for misfit in (
        "E   AttributeError: 'ScheduleBatch' object has no attribute 'is_prefill_only'",
        "TypeError: to() got an unexpected keyword argument 'is_prefill_only'",
        "ImportError: cannot import name 'is_prefill_only'",
    ):
        assert find_reason("is_prefill_only", misfit) == ""
    assert find_reason("leak", "TypeError: x\nE   RuntimeError: memory leak") != ""


def test_a_failure_and_an_error_in_teardown_are_one_failed_test(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    case = '<testcase classname="test_x" name="t">{}</testcase>'
    failure, error = '<failure message="first"/>', '<error message="second leak"/>'
    body = case.format(failure) + case.format(error)
    junit.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    (read,) = prove_fixes.read_junit(junit)
    assert read.status == "failed"
    assert "first" in read.said
    assert find_reason("leak", read.said) == "second leak"
