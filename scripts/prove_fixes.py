#!/usr/bin/env python3
"""Prove each fix: its tests fail on the commit before it, for the stated reason, and pass on it.

The fix commits are found in the history of HEAD by their trailer. For each, two temporary worktrees
are made, of its parent and of itself, and the tests of the present checkout run against the package
of each. Tests marked ``proves_fix`` must fail on the parent with a message that the fix's reason
matches, or one that the mark itself gives: ``proves_fix(reason="regular expression")``; every test
must pass on the fix commit. Tests without the mark guard against overreach and may do as they like on
the parent.

The exit status is 0 if every fix is proven, or if history holds neither fix yet, and 1 otherwise.

The module is a pytest plugin as well (``-p prove_fixes``): inside each run it makes sure that the
package under test is the worktree's, and tells which tests carry the mark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmark"))

from lab.remote import end_on_signals

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Fix:
    """What is known of a fix before looking at history.

    Attributes
    ----------
    pr : int
        Number of upstream's pull request, as the trailer names it.
    title : str
        A few words for the table.
    files : frozenset of str
        The files that the commit may touch, and has to.
    tests : tuple of str
        Patterns of its test files, from the root of the repository.
    reason : str
        Regular expression (case ignored) that the failures on the parent must match. It is held
        against what the failing test says (message, pytest's "E" lines, captured output and logs).
        It is not held against the test's source, which names the reason in any case.
    """

    pr: int
    title: str
    files: frozenset[str]
    tests: tuple[str, ...]
    reason: str


SCHEDULE_BATCH: Final = "python/sglang/srt/managers/schedule_batch.py"
EAGLE_INFO_V2: Final = "python/sglang/srt/speculative/eagle_info_v2.py"

FIXES: Final = (
    Fix(
        pr=21840,
        title="is_prefill_only in merge_batch",
        files=frozenset({SCHEDULE_BATCH}),
        tests=("test/srt/managers/test_fix_21840_*.py",),
        reason=r"is_prefill_only|memory leak|leak",
    ),
    Fix(
        pr=28500,
        title="blocking copy of penalty token ids",
        files=frozenset({SCHEDULE_BATCH, EAGLE_INFO_V2}),
        tests=(
            "test/srt/managers/test_fix_28500_*.py",
            "test/srt/speculative/test_fix_28500_*.py",
        ),
        reason=r"pageable|blocking|pinned|pin_memory|synchronis|synchroniz|stood still",
    ),
)

TRAILER: Final = "Upstream-PR"
MARK: Final = "proves_fix"
REPO_ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE_VARIABLE: Final = "PROVE_FIXES_PACKAGE"
WRONG_PACKAGE: Final = 64  # pytest's own exit statuses are 0 to 5
RUN_TIMEOUT_S: Final = 1800.0

_MISFIT: Final = re.compile(
    r"E?\s*(AttributeError|ImportError|ModuleNotFoundError|NameError|SyntaxError|TypeError)\b"
)

Say = Callable[[str], None]


class ProofError(RuntimeError):
    """A fix cannot be proven; the message says what stands in the way."""


# --- Inside each pytest run: the plugin -------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Know the mark, also where the configuration of the tests does not."""
    config.addinivalue_line("markers", f"{MARK}(reason): must fail on the parent of the fix")


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run if the package under test is not the one in the worktree."""
    expected = os.environ.get(PACKAGE_VARIABLE)
    if expected is None:
        return
    import pytest

    import sglang

    found = Path(sglang.__file__ or "nowhere").resolve().parent
    if found != Path(expected):
        pytest.exit(f"sglang comes from {found}, not from {expected}", WRONG_PACKAGE)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Carry the mark into the JUnit file, with the test's own reason if it has one."""
    for item in items:
        if (mark := item.get_closest_marker(MARK)) is not None:
            item.user_properties.append((MARK, mark.kwargs.get("reason", "")))


# --- Git --------------------------------------------------------------------------------------


def git(repo: Path, *arguments: str) -> str:
    """Run git in `repo` and return what it prints.

    Raises
    ------
    ProofError
        If git fails, with what it said, or if there is none.
    """
    return git_bytes(repo, *arguments).decode()


def git_bytes(repo: Path, *arguments: str) -> bytes:
    """The same where that is no text."""
    # A caller that is itself a git hook must not redirect these calls to its own index.
    redirections = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE")
    environment = {key: v for key, v in os.environ.items() if key not in redirections}
    command = ["git", "-C", str(repo), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True)
    except OSError as error:
        raise ProofError(f"git cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise ProofError(f"git {' '.join(arguments)}: {said}")
    return done.stdout


def trailers(repo: Path) -> dict[str, list[str]]:
    """Return the commits of HEAD's history by the value of their trailer, newest first."""
    if git(repo, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise ProofError("the history is cut off here (a shallow clone): git fetch --unshallow")
    try:
        git(repo, "rev-parse", "--verify", "--quiet", "HEAD")
    except ProofError:
        return {}  # nothing is committed yet
    value = f"%(trailers:key={TRAILER},valueonly,separator=%x1f)"
    commits: dict[str, list[str]] = {}
    for record in git(repo, "log", f"--format=%H%x1f{value}%x1e").split("\x1e"):
        sha, *values = record.strip("\n").split("\x1f")
        for name in values:
            if name.strip():
                commits.setdefault(name.strip(), []).append(sha)
    return commits


def fix_commit(repo: Path, fix: Fix, commits: dict[str, list[str]]) -> tuple[str, str]:
    """Return the fix commit and its parent.

    Raises
    ------
    ProofError
        Unless exactly one commit carries the trailer, has one parent and touches the fix's files.
    """
    value = f"sgl-project/sglang#{fix.pr}"
    found = commits.get(value, [])
    if len(found) != 1:
        which = "".join(f" {sha[:10]}" for sha in found)
        raise ProofError(
            f"{len(found)} commits carry '{TRAILER}: {value}', exactly one may:{which}"
        )
    sha = found[0]
    parents = git(repo, "rev-list", "--parents", "-n", "1", sha).split()[1:]
    if len(parents) != 1:
        raise ProofError(f"{sha[:10]} has {len(parents)} parents, a fix has one")
    names = git(repo, "diff-tree", "-r", "--no-commit-id", "--name-only", sha)
    touched = frozenset(names.split())
    if touched != fix.files:
        raise ProofError(
            f"{sha[:10]} touches {' '.join(sorted(touched))}; "
            f"upstream's change touches {' '.join(sorted(fix.files))}"
        )
    return sha, parents[0]


@contextlib.contextmanager
def worktree(repo: Path, sha: str) -> Iterator[Path]:
    """Check `sha` out into a temporary directory, and take it away again whatever happens."""
    with tempfile.TemporaryDirectory(prefix="prove-fixes-") as scratch:
        tree = Path(scratch).resolve() / "tree"
        try:
            git(repo, "worktree", "add", "--detach", "--quiet", str(tree), sha)
            yield tree
        finally:
            with contextlib.suppress(ProofError):
                git(repo, "worktree", "remove", "--force", str(tree))
            git(repo, "worktree", "prune")


# --- One pytest run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TestResult:
    """One test of one run; `status` is passed, failed, error or skipped."""

    __test__ = False

    name: str
    status: str
    proves: bool
    said: str = ""  # message, "E" lines and captured output
    reason: str = ""  # that it must fail for, if it is another than the fix's


_STATUS_OF_TAG: Final = {"failure": "failed", "error": "error", "skipped": "skipped"}
_WORST_FIRST: Final = ("failed", "error", "skipped", "passed")


def read_junit(path: Path) -> list[TestResult]:
    """Read pytest's JUnit file.

    A test that fails and then errs in its teardown counts once, as failed, with both texts.
    """
    results: dict[str, TestResult] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        # The file and what is in it, without the way to the file.
        way = case.get("classname", "").split(".")
        start = max((i for i, part in enumerate(way) if part.startswith("test_")), default=0)
        name = "::".join([*way[start:], case.get("name", "")])
        status, said = "passed", list[str]()
        for child in case:
            if child.tag in _STATUS_OF_TAG:
                status = min(status, _STATUS_OF_TAG[child.tag], key=_WORST_FIRST.index)
                said.append(child.get("message", ""))
                said += [line for line in (child.text or "").splitlines() if line.startswith("E ")]
            elif child.tag in ("system-out", "system-err"):
                said.append(child.text or "")
        marks = [
            item.get("value", "") for item in case.iter("property") if item.get("name") == MARK
        ]
        proves, reason = bool(marks), "".join(dict.fromkeys(marks))
        if (earlier := results.get(name)) is not None:
            status = min(status, earlier.status, key=_WORST_FIRST.index)
            proves, said = proves or earlier.proves, [earlier.said, *said]
            reason = reason or earlier.reason
        results[name] = TestResult(name, status, proves, "\n".join(said), reason)
    return list(results.values())


_OUTCOME: Final = re.compile(
    r"^\S*?([^/\s]+\.py::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XPASS|XFAIL)\b"
)


def run_tests(repo: Path, tree: Path, tests: Sequence[Path], say: Say) -> list[TestResult]:
    """Run the test files of `repo` against the package in `tree`.

    Raises
    ------
    ProofError
        If pytest does not get as far as results, or does not end in `RUN_TIMEOUT_S` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="prove-fixes-") as scratch:
        junit = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-p", "prove_fixes", "-p", "no:cacheprovider"]
        command += ["-v", "--tb=short", "--color=no", f"--rootdir={repo}", f"--junitxml={junit}"]
        command += ["-o", "junit_family=xunit1", "-o", "junit_logging=all"]
        command += ["-o", "junit_log_passing_tests=false", *map(str, tests)]
        here = Path(__file__).resolve().parent
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree / "python"), str(here)]),
            "PYTHONSAFEPATH": "1",  # nothing is imported just because it lies where this runs
            "PYTHONDONTWRITEBYTECODE": "1",
            PACKAGE_VARIABLE: str(tree / "python" / "sglang"),
        }
        # A session of its own, so that engines that a test left behind end with it.
        pytest_run = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        status, output = _follow(pytest_run, say)
        if status not in (0, 1) or not junit.is_file():
            limit = f" (it may take {RUN_TIMEOUT_S:.0f} s)" if status < 0 else ""
            raise ProofError(f"pytest ended with status {status}{limit}:\n{output[-3000:]}")
        return read_junit(junit)


def _follow(run: subprocess.Popen[str], say: Say) -> tuple[int, str]:
    """Say each test's outcome as it comes; return the exit status and all output."""

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)

    def watch() -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(RUN_TIMEOUT_S)
        end()  # also what pytest left behind and holds the pipe open

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    output: list[str] = []
    try:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if outcome := _OUTCOME.match(line):
                say(f"  {outcome[2].lower():7} {outcome[1]}")
        return run.wait(), "".join(output)
    finally:
        end()
        watcher.join()


# --- The judgement ----------------------------------------------------------------------------


@dataclass
class TestProof:
    """One test on both sides; `reason` is what matched on the parent."""

    __test__ = False

    name: str
    proves: bool
    parent: str
    commit: str
    reason: str = ""


@dataclass
class Proof:
    """All that was seen of one fix. It is proven if `problems` is empty."""

    pr: int
    title: str
    commit: str = ""
    parent: str = ""
    tests: list[TestProof] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find_reason(pattern: str, said: str) -> str:
    """Return the line that `pattern` matches, without pytest's "E", or an empty string.

    An error of a test that does not fit the code, such as a name that is not there, is no reason.
    """
    for line in said.splitlines():
        if re.search(pattern, line, re.IGNORECASE) and not _MISFIT.match(line):
            return line.removeprefix("E").strip()
    return ""


def judge(
    fix: Fix, parent: Sequence[TestResult], commit: Sequence[TestResult]
) -> tuple[list[TestProof], list[str]]:
    """Hold the results of both runs against what a proof needs.

    Returns
    -------
    tests : list of TestProof
        Every test of either run.
    problems : list of str
        Why this is no proof; empty if it is one.
    """
    before = {result.name: result for result in parent}
    after = {result.name: result for result in commit}
    absent = TestResult("", "absent", False)
    tests, problems, proven = [], [], 0
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, absent), after.get(name, absent)
        proves = old.proves or new.proves
        reason = find_reason(old.reason or fix.reason, old.said)
        tests.append(TestProof(name, proves, old.status, new.status, reason))
        if new.status in ("failed", "error"):
            problems.append(f"{name} fails with the fix: {_first_line(new.said)}")
        if not proves or (old.status, new.status) == ("skipped", "skipped"):
            continue
        if old.status not in ("failed", "error"):
            problems.append(f"{name} has to fail without the fix: {old.status}")
        elif not reason:
            problems.append(
                f"{name} fails without the fix, but not for the stated reason: "
                f"{_first_line(old.said)}"
            )
        elif new.status in ("skipped", "absent"):
            problems.append(f"{name} has to pass with the fix: {new.status}")
        elif new.status == "passed":
            proven += 1
    if not any(test.proves for test in tests):
        problems.append(f"no test is marked {MARK}")
    elif not proven and not problems:
        problems.append(f"every test marked {MARK} is skipped here")
    return tests, problems


def _first_line(said: str) -> str:
    return next((line.strip() for line in said.splitlines() if line.strip()), "(it says nothing)")


def prove(repo: Path, fix: Fix, commits: dict[str, list[str]], say: Say) -> Proof:
    """Find a fix and run its tests on both sides of it."""
    proof = Proof(fix.pr, fix.title)
    try:
        proof.commit, proof.parent = fix_commit(repo, fix, commits)
        tests = sorted(path for pattern in fix.tests for path in repo.glob(pattern))
        if not tests:
            raise ProofError(f"no file matches {' or '.join(fix.tests)}")
        runs = []
        for label, sha in (("parent", proof.parent), ("commit", proof.commit)):
            say(f"#{fix.pr} {label} {sha[:10]}: {len(tests)} test file(s)")
            start = time.monotonic()
            with worktree(repo, sha) as tree:
                runs.append(run_tests(repo, tree, tests, say))
            say(f"#{fix.pr} {label} {sha[:10]}: done in {time.monotonic() - start:.0f} s")
        proof.tests, proof.problems = judge(fix, *runs)
    except ProofError as error:
        proof.problems.append(str(error))
    return proof


# --- What a person reads ----------------------------------------------------------------------


def _counts(statuses: Sequence[str]) -> str:
    words = (("failed", "fail"), ("error", "err"), ("passed", "pass"), ("skipped", "skip"))
    found = [f"{statuses.count(status)} {word}" for status, word in words if status in statuses]
    return ", ".join(found) or "-"


def show(proofs: Sequence[Proof], console: Any) -> None:
    """Print the table, and under it every problem in full."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Each fix on its parent and on its commit", title_justify="left")
    for column in ("fix", "commit", "on the parent", "reason found", "on the commit", "proven"):
        table.add_column(column, overflow="fold")
    for proof in proofs:
        marked = [test for test in proof.tests if test.proves]
        others = [test.parent for test in proof.tests if not test.proves]
        before = _counts([test.parent for test in marked])
        if others:
            before += f"\n(guards: {_counts(others)})"
        reasons = dict.fromkeys(test.reason for test in marked if test.reason)
        table.add_row(
            f"#{proof.pr}\n{escape(proof.title)}",
            proof.commit[:10] or "-",
            before,
            "\n".join(escape(shorten(reason, 160, placeholder=" ...")) for reason in reasons)
            or "-",
            _counts([test.commit for test in proof.tests]),
            "[red]NO[/]" if proof.problems else "[green]yes[/]",
        )
    console.print(table)
    for proof in proofs:
        for problem in proof.problems:
            console.print(f"#{proof.pr}: {problem}", markup=False, highlight=False)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="prove_fixes.py", description=summary)
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to stderr")
    parser.add_argument(
        "--repo", type=Path, default=REPO_ROOT, help="another checkout than this script's own"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prove every fix; return the exit status."""
    from rich.console import Console

    args = parse_args(argv)
    # A log has no width of its own, and the table needs some.
    width = None if sys.stdout.isatty() else 140
    console = Console(stderr=args.json, width=width)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    repo: Path = args.repo.resolve()
    proofs: list[Proof] = []
    try:
        commits = trailers(repo)
        if any(f"sgl-project/sglang#{fix.pr}" in commits for fix in FIXES):
            proofs = [prove(repo, fix, commits, say) for fix in FIXES]
            show(proofs, console)
        else:
            say(f"History holds no fix yet: no commit carries the trailer {TRAILER}.")
    except ProofError as error:
        print(f"prove_fixes: error: {error}", file=sys.stderr)
        return 1
    ok = not any(proof.problems for proof in proofs)
    if args.json:
        print(json.dumps({"ok": ok, "fixes": [asdict(p) for p in proofs]}, indent=2))
    return 0 if ok else 1


if __name__ == "__main__":
    # So that the worktrees go away also when the caller loses patience.
    end_on_signals()
    sys.exit(main())
