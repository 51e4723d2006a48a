"""Contests: who is asked when, what a pair becomes, and what is said of a side that fails."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench_gate
from lab import contest, verdicts
from lab.cases import CASES, Case, Setup
from lab.contest import CaseError, Contest, ContestError, Side
from processes import end_by, is_alive, wait_for

REPO_ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(REPO_ROOT / "python")


class FakeWorker:
    """Notes what it is asked, and answers with numbers of its side."""

    asked: list[tuple[str, str]] = []
    # Rounds that a side can do of a case, if not all.
    lasts: dict[tuple[str, str], int] = {}
    closed: list[str] = []

    def __init__(self, context: Any, side: Side, threads: int) -> None:
        self._side = side

    def run(
        self, case: str, warm_up: bool = False, patience: float = contest.ANSWER_S
    ) -> dict[str, float] | None:
        if case == f"new to {self._side.name}":
            return None
        if case == f"bad for {self._side.name}":
            raise CaseError(case, self._side, "Traceback:\n  here\nit broke")
        if case == "transfers/plain":
            # What is counted in a part of a case is not what the case has.
            assert not warm_up
            count = 0.0 if self._side.name == "base" else 1.0
            return {"blocking_per_step": count, "transfers_per_step": 2.0, "seconds": count}
        if not warm_up:
            self.asked.append((self._side.name, case))
            if self.asked.count((self._side.name, case)) > self.lasts.get(
                (self._side.name, case), math.inf
            ):
                raise CaseError(case, self._side, "it broke later")
        slower = 1.1 if self._side.name == "head" else 1.0
        number = len(self.asked)
        return {"us_per_token": slower * (100 + number // 2 % 3), "tokens_per_s": 1.0}

    def ask(self, case: str, warm_up: bool = False) -> None:
        self._question = case, warm_up

    def answer(self, patience: float) -> dict[str, float] | None:
        return self.run(*self._question, patience)

    def close(self) -> None:
        self.closed.append(self._side.name)

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(FakeWorker, "asked", asked)
    monkeypatch.setattr(FakeWorker, "lasts", {})
    monkeypatch.setattr(FakeWorker, "closed", [])
    monkeypatch.setattr(contest, "Worker", FakeWorker)
    made = {name: Case(name, Setup()) for name in ("one", "two")}
    for kind in ("new to", "bad for"):
        made |= {f"{kind} {side}": made["one"] for side in ("base", "head")}
    monkeypatch.setattr(contest, "CASES", CASES | made)
    return asked


def make(cases: Sequence[str], rounds: int = 2) -> Contest:
    return Contest(None, Side("base", "a"), Side("head", "b"), cases, rounds)


def test_sides_take_turns_in_both_orders(fake: list[tuple[str, str]]) -> None:
    found = make(["one", "two"])
    for _ in range(2):
        found.run_pair()
    names = [name for name, _ in fake]
    assert [case for _, case in fake] == ["one", "one", "two", "two"] * 4
    first = ["base", "head"] * 2 + ["head", "base"] * 2
    assert names == first + [{"base": "head", "head": "base"}[name] for name in first]


def test_a_pair_is_the_median_of_its_rounds(fake: list[tuple[str, str]]) -> None:
    found = make(["one"], rounds=3)
    for _ in range(8):
        found.run_pair()
    (verdict,) = found.judge()
    # Only what is gated: tokens a second are shown elsewhere.
    assert verdict.metric == "one us_per_token"
    assert verdict.verdict == "slower" and verdict.ratio == pytest.approx(1.1, rel=0.02)
    assert found.pairs[0].log_ratios()["one us_per_token"] == pytest.approx(math.log(1.1), abs=0.02)


@pytest.mark.parametrize(
    ("case", "note"),
    [
        ("new to base", "base: has no API for it"),
        ("bad for base", "base: it broke"),
    ],
)
def test_what_the_base_cannot_do_is_left_out(
    fake: list[tuple[str, str]], case: str, note: str
) -> None:
    found = make(["one", case])
    found.prepare()
    assert found.notes == [f"{case} left out: {note}"]
    found.run_pair()
    assert {name for _, name in fake} == {"one"}
    with pytest.raises(ContestError, match=f"no case that both can do; {case} left out"):
        make([case]).prepare()


@pytest.mark.parametrize("case", ["new to head", "bad for head"])
def test_what_only_the_head_cannot_do_is_a_verdict(fake: list[tuple[str, str]], case: str) -> None:
    found = make([case])
    found.prepare()
    # All that is known: it is the head's author who reads this.
    why = {"new": "has no API for it", "bad": "Traceback:\n  here\nit broke"}[case[:3]]
    assert found.is_settled and found.notes == [f"{case} left out: head: {why}"]
    (verdict,) = found.judge()
    assert (verdict.metric, verdict.verdict) == (case, "fails") and math.isnan(verdict.ratio)


def test_a_head_that_breaks_later_fails_at_the_case_and_keeps_the_others(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind three pairs of two rounds each."""
    monkeypatch.setattr(FakeWorker, "lasts", {("head", "two"): 6})
    found = make(["one", "two"])
    done = [found.run_pair() is not None for _ in range(9)]
    assert done == [True] * 3 + [False] + [True] * 5
    assert found.notes == ["two left out: head: it broke later"]
    fails, one = found.judge()
    assert (fails.metric, fails.verdict) == ("two", "fails")
    assert (one.metric, one.verdict) == ("one us_per_token", "slower")


def test_short_pairs_come_behind_those_of_all_cases(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "SHORT", {"two": 3})
    monkeypatch.setattr(contest, "SHORT_PAIRS", 2)
    found = Contest(None, Side("base", "a"), Side("head", "b"), ["one", "two"])
    for _ in range(8):
        found.run_pair()
    assert (len(found.pairs), len(found.short)) == (8, 16)
    # Both sides of four rounds each, then of three in each short pair, whose order alternates too.
    of_one = fake[: 2 * (4 + 4 + 3 + 3)]
    assert [case for _, case in of_one] == ["one"] * 2 + ["two"] * 2 + (
        ["one"] * 2 + ["two"] * 2
    ) * 3 + ["two"] * 12
    assert of_one[16][0] == "base" and of_one[22][0] == "head"
    names, logs = found.log_ratios()
    assert names == ["one us_per_token", "two us_per_token"] and logs.shape == (24, 2)
    assert np.isnan(logs[8:, 0]).all() and not np.isnan(logs[:, 1]).any()
    assert [verdict.verdict for verdict in found.judge()] == ["slower", "slower"]
    # A case that is left out later is left out of them, and has none any more.
    # Here in a short pair: the long one before it is kept.
    monkeypatch.setattr(FakeWorker, "lasts", {("base", "two"): fake.count(("base", "two")) + 5})
    assert found.run_pair() is not None and found.run_pair() is not None
    assert found.notes == ["two left out: base: it broke later"]
    assert (len(found.pairs), len(found.short)) == (10, 16)
    names, logs = found.log_ratios()
    assert names == ["one us_per_token"] and np.isfinite(logs).sum() == 10


def test_where_there_is_nothing_else_each_pair_is_short(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "SHORT", {"one": 3, "two": 3})
    found = make(["one", "two"])
    found.run_pair()
    assert (len(found.pairs), len(found.short)) == (1, 0)


def test_a_base_that_breaks_later_is_left_out_of_all_pairs(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "lasts", {("base", "two"): 2})
    found = make(["one", "two"])
    for _ in range(9):
        found.run_pair()
    assert found.notes == ["two left out: base: it broke later"]
    assert [verdict.metric for verdict in found.judge()] == ["one us_per_token"]


def test_whoever_failed_is_ended_before_the_next_case(fake: list[tuple[str, str]]) -> None:
    """One that hangs would be a neighbour to all that follow."""
    found = make(["bad for head", "one"])
    closed_before: list[int] = []
    run = FakeWorker.run

    def noting(self: FakeWorker, case: str, *args: Any) -> dict[str, float] | None:
        if case == "one" and self._side.name == "head":
            closed_before.append(self.closed.count("head"))
        return run(self, case, *args)

    FakeWorker.run, kept = noting, run  # type: ignore[method-assign]
    try:
        found.prepare()
    finally:
        FakeWorker.run = kept  # type: ignore[method-assign]
    assert closed_before == [1]


def test_both_sides_have_so_much_time_to_show_what_they_can_do(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 40))
    monkeypatch.setattr(contest.time, "monotonic", lambda: float(next(now)))
    found = make(["one", "bad for head", "two"])
    found.prepare()
    # It begins at 0. The cases are begun at 40, 160 and 280, each with an answer of each side.
    assert found.notes == [
        "bad for head left out: head: Traceback:\n  here\nit broke",
        "two left out: base: not reached within 240 s",
    ]
    # Where there are no pairs, nothing is told of what should have been measured in them.
    judged = [(v.metric, v.verdict) for v in found.judge()]
    assert judged == [("bad for head", "fails"), ("two", "cannot tell"), ("one", "cannot tell")]


@pytest.mark.parametrize(
    ("side", "clock", "verdict"),
    [
        # Who has all the time that there is for a case, and does not answer, cannot do it.
        ("head", 0, ["fails"]),
        ("base", 0, []),
        ("head", 20, ["cannot tell"]),
        ("base", 20, ["cannot tell"]),
    ],
)
def test_who_had_too_little_time_is_not_said_to_fail(
    fake: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    clock: int,
    verdict: list[str],
) -> None:
    """Each look at the clock takes so many seconds; 180 are a side's due, of 240."""
    now = iter(range(0, 10_000, clock) if clock else [0] * 100)
    monkeypatch.setattr(contest.time, "monotonic", lambda: float(next(now)))
    answer = FakeWorker.answer

    def late(self: FakeWorker, patience: float) -> dict[str, float] | None:
        if self._side.name == side and self._question[0] == "two":
            raise CaseError("two", self._side, f"no answer for {patience:.0f} s", is_late=True)
        return answer(self, patience)

    monkeypatch.setattr(FakeWorker, "answer", late)
    found = make(["one", "two"])
    found.prepare()
    patience = 240 - clock * {"base": 5, "head": 6}[side]
    assert found.notes == [f"two left out: {side}: no answer for {min(patience, 180)} s"]
    assert [v.verdict for v in found._fixed] == verdict


def test_where_nothing_was_reached_nothing_was_measured(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 240.0])
    monkeypatch.setattr(contest.time, "monotonic", lambda: next(now))
    with pytest.raises(ContestError, match="no case that both can do; two left out: base: not re"):
        make(["two"]).prepare()


def test_what_is_counted_is_asked_once_and_any_difference_is_certain(
    fake: list[tuple[str, str]],
) -> None:
    found = make(["transfers/plain"])
    found.prepare()
    assert found.is_settled
    blocking, all_of_them = found.judge()
    assert blocking == verdicts.Verdict(
        "transfers/plain blocking_per_step", "slower", math.inf, math.inf, math.inf, 0.0, 1.0
    )
    assert bench_gate._numbers(blocking) == ("inf", "0 → 1")
    assert (all_of_them.verdict, all_of_them.ratio) == ("same", 1.0)
    # Within the tolerance it does not count.
    assert verdicts.count("bytes", 1000, 1009).within(0.01).verdict == "same"
    assert verdicts.count("bytes", 1000, 990).within(0.001).verdict == "faster"
    assert verdicts.count("bytes", 0, 0).verdict == "same"


def test_a_metric_without_a_ratio_is_named(fake: list[tuple[str, str]]) -> None:
    found = make(["one"])
    pair = found.run_pair()
    pair.head["one"][0]["us_per_token"] = 0.0
    with pytest.raises(ContestError, match=r"one: us_per_token must be above 0 .*got 0\.0"):
        pair.log_ratios()


def test_a_contest_without_a_gated_metric_is_an_error(fake: list[tuple[str, str]]) -> None:
    found = make(["one"])
    found.run_pair()
    for side in (found.pairs[0].base, found.pairs[0].head):
        side["one"] = [{"tokens_per_s": 1.0}]
    with pytest.raises(ContestError, match="nothing was measured that verdicts are about"):
        found.judge()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slower_package_is_found_from_the_command_line(tmp_path: Path) -> None:
    """Real processes of a real engine, one of them with a pause in each decode step."""
    slow = tmp_path / "slow"
    shutil.copytree(PACKAGE, slow, ignore=shutil.ignore_patterns("__pycache__"))
    path = slow / "sglang" / "srt" / "managers" / "schedule_batch.py"
    text = path.read_text(encoding="utf-8")
    hook = "\n\nimport time as _time\n_prepare = ScheduleBatch.prepare_for_decode\n"
    hook += "ScheduleBatch.prepare_for_decode = lambda self, *a, **k: "
    hook += "(_time.sleep(0.003), _prepare(self, *a, **k))[1]\n"
    path.write_text(text + hook, encoding="utf-8")
    command = [sys.executable, str(REPO_ROOT / "scripts" / "bench_gate.py"), PACKAGE, str(slow)]
    options = ["--cases", "decode/tiny-b8", "--minutes", "0.1", "--rounds", "2", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["pairs"] == 12
    judged = {v["metric"]: v for v in found["verdicts"]}
    assert judged["decode/tiny-b8 host_us_per_step"]["verdict"] == "slower"
    assert judged["decode/tiny-b8 host_us_per_step"]["low"] > 1.5
    assert judged["decode/tiny-b8 steps_per_token"]["verdict"] == "same"


def test_a_transfer_that_blocks_is_found_from_the_command_line(tmp_path: Path) -> None:
    """A wait in each decode step, which costs nothing on a CPU."""
    slow = tmp_path / "slow"
    shutil.copytree(PACKAGE, slow, ignore=shutil.ignore_patterns("__pycache__"))
    path = slow / "sglang" / "srt" / "managers" / "schedule_batch.py"
    hook = "\n\n_prepare = ScheduleBatch.prepare_for_decode\n"
    hook += "ScheduleBatch.prepare_for_decode = lambda self, *a, **k: "
    hook += "(self.seq_lens.sum().item(), _prepare(self, *a, **k))[1]\n"
    path.write_text(path.read_text(encoding="utf-8") + hook, encoding="utf-8")
    command = [sys.executable, str(REPO_ROOT / "scripts" / "bench_gate.py"), PACKAGE, str(slow)]
    done = subprocess.run(
        [*command, "--cases", "transfers/plain", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["pairs"], found["left_out"]) == (0, [])
    blocking = found["verdicts"][0]
    assert blocking["metric"] == "transfers/plain blocking_per_step"
    assert (blocking["verdict"], blocking["ratio"]) == ("slower", None)
    assert blocking["base"] == 0.0 and blocking["head"] >= 1.0


def test_a_package_that_fails_is_named(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    command = [sys.executable, str(REPO_ROOT / "scripts" / "bench_gate.py")]
    done = subprocess.run(
        [*command, str(tmp_path), PACKAGE, "--json", "--cases", *["decode/tiny-b8"] * 2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"decode/tiny-b8 left out: {tmp_path}: " in done.stderr
    # The base's is no matter of whoever reads this.
    assert "broken on purpose" in done.stderr and "Traceback" not in done.stderr
    said = json.loads(done.stdout)["error"]
    assert said.count("decode/tiny-b8 left out") == 1 and "broken on purpose" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "HEAD"], "'nowhere' is neither a commit nor a directory that holds sglang"),
        (
            ["HEAD", "HEAD", "--tolerance", "-1"],
            "--tolerance: must be a finite number of at least 0",
        ),
        (["HEAD", "HEAD", "--minutes", "0"], "--minutes: must be a finite number above 0, got '0'"),
        (["HEAD", "HEAD", "--rounds", "1.5"], "--rounds: must be a whole number of at least 1"),
        (
            ["HEAD", "HEAD", "--cases", "decode/tny-b8"],
            "no case 'decode/tny-b8'; there are decode/tiny-b8, ",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(REPO_ROOT / "scripts" / "bench_gate.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr


def git(repo: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(repo), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A commit without a package, and one with it."""
    made = tmp_path / "repo"
    package = made / "python" / "sglang"
    package.mkdir(parents=True)
    git(made, "init", "--quiet")
    (made / "python" / "README").write_text("nothing yet")
    for name in ("README", "sglang/__init__.py"):
        (made / "python" / name).write_text("")
        git(made, "add", "--all")
        git(made, "commit", "--quiet", "--message", name)
    return made


def test_a_commits_package_lies_in_the_checkout_that_was_named(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo)
    args = bench_gate.parse_args(["HEAD", "HEAD~1", "--repo", ".", "--tolerance", "0"])
    assert (args.repo, args.tolerance) == (repo, 0.0)
    sha = git(repo, "rev-parse", "HEAD")
    found = bench_gate.side(args.repo, args.base)
    assert found == Side(f"HEAD ({sha[:8]})", str(repo / ".asv" / "gate" / sha / "python"))
    assert (Path(found.package) / "sglang" / "__init__.py").is_file()
    with pytest.raises(bench_gate.ProofError, match="HEAD~1 has no package"):
        bench_gate.side(args.repo, args.head)


def test_an_interrupted_extraction_leaves_nothing(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extract(self: Any, target: Path, **how: Any) -> None:
        target.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gate.tarfile.TarFile, "extractall", extract)
    with pytest.raises(KeyboardInterrupt):
        bench_gate.side(repo, "HEAD")
    assert list((repo / ".asv" / "gate").iterdir()) == []


def test_a_package_without_a_place_is_no_commit_without_a_package(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(bench_gate.ProofError, match=r"package of HEAD has no place: .*No space"):
        bench_gate.side(repo, "HEAD")
    assert list((repo / ".asv" / "gate").iterdir()) == []


def test_another_call_may_be_faster(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has put the package there, and a folder that is not empty cannot be renamed to."""
    rename = Path.rename

    def late(self: Path, target: Path) -> None:
        shutil.copytree(self, target)
        rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    assert (Path(bench_gate.side(repo, "HEAD").package) / "sglang" / "__init__.py").is_file()
    assert len(list((repo / ".asv" / "gate").iterdir())) == 1


def test_a_hook_of_git_does_not_lead_to_another_repository(
    repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    found = bench_gate.side(repo, "HEAD")
    assert (Path(found.package) / "sglang" / "__init__.py").is_file()


def test_what_goes_wrong_is_not_called_slower(
    repo: Path,
    fake: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 would be that. Here the table cannot be printed."""

    def show(*args: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(bench_gate, "show", show)
    monkeypatch.setattr(bench_gate, "compare", lambda *_: compared)
    compared = make(["one"])
    for _ in range(8):
        compared.run_pair()
    assert bench_gate.main(["HEAD", "HEAD", "--repo", str(repo), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "error": "BrokenPipeError: [Errno 32] Broken pipe"
    }


def test_without_its_libraries_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no numpy here')\n")
    done = subprocess.run(
        [sys.executable, bench_gate.__file__, "HEAD", "HEAD"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert (
        done.stderr.startswith("bench_gate: error: no numpy here") and done.stderr.count("\n") == 1
    )


def test_pairs_that_fail_take_no_longer_than_there_is_time(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case of the head breaks in its turn, 300 seconds after the last."""
    now = [0.0]
    monkeypatch.setattr(bench_gate.time, "monotonic", lambda: now[0])
    names = [f"case {i}" for i in range(9)]
    cases = {name: contest.CASES["one"] for name in names}
    monkeypatch.setattr(contest, "CASES", contest.CASES | cases)
    monkeypatch.setattr(FakeWorker, "lasts", {("head", name): 0 for name in names})
    measured = Contest.run_pair

    def slow(self: Contest, tick: Any) -> Any:
        now[0] += 300
        return measured(self, tick)

    monkeypatch.setattr(Contest, "run_pair", slow)
    sides = (Side("base", "a"), Side("head", "b"))
    found = bench_gate.compare(*sides, names, 6, None, lambda *_: None, lambda _: None)
    assert now[0] == 900 and not found.pairs
    assert [v.verdict for v in found.judge()] == ["fails"] * 3 + ["cannot tell"] * 6


def test_a_session_that_cannot_be_had_leaves_the_next_one_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fine:
        def run_round(self, case: Case) -> dict[str, float]:
            return {"number": 1.0}

    def make_session(setup: Setup, scratch: Path) -> Fine:
        (scratch / "file").touch()
        if setup.model == "real":
            raise contest.Unsupported("no model")
        return Fine()

    monkeypatch.setattr(contest, "make_session", make_session)
    sessions: dict[Any, Any] = {}
    with pytest.raises(contest.Unsupported):
        contest._round(sessions, tmp_path, "decode/real-b8", True)
    for name in ("decode/tiny-b8", "scheduler/b8"):
        assert contest._round(sessions, tmp_path, name, True) == {"metrics": {"number": 1.0}}
    assert len(sessions) == 2 and len(list(tmp_path.iterdir())) == 3


def test_the_time_that_there_is_may_be_any(
    fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = (Side("base", "a"), Side("head", "b"))
    told: list[tuple[int, int]] = []

    def on_pair(done: int, total: int) -> None:
        told.append((done, total))

    for minutes, pairs in ((1e-9, 12), (1e300, bench_gate.MAX_PAIRS)):
        found = bench_gate.compare(*sides, ["one"], minutes, 1, on_pair, lambda _: None)
        assert len(found.pairs) == pairs and told[-1] == (pairs, pairs)


@pytest.mark.parametrize(
    ("a_pair_s", "minutes", "pairs"),
    [
        # As many as there are minutes for.
        (20, 6, 18),
        # Twelve take longer than that, and are wanted.
        (60, 6, 12),
        # Twelve would take longer than anybody waits; who waits longer says so.
        (90, 6, 9),
        (90, 30, 20),
        (200, 6, 4),
        (2000, 6, 1),
    ],
)
def test_a_slow_machine_has_its_pairs_in_time(
    fake: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    a_pair_s: float,
    minutes: float,
    pairs: int,
) -> None:
    now = [0.0]
    monkeypatch.setattr(bench_gate.time, "monotonic", lambda: now[0])
    measured = Contest.run_pair

    def slow(self: Contest, tick: Any) -> Any:
        now[0] += a_pair_s
        return measured(self, tick)

    monkeypatch.setattr(Contest, "run_pair", slow)
    sides = (Side("base", "a"), Side("head", "b"))
    found = bench_gate.compare(*sides, ["one"], minutes, 1, lambda *_: None, lambda _: None)
    assert len(found.pairs) == pairs
    assert now[0] <= max(60 * max(minutes, 14.0), a_pair_s)
    (verdict,) = found.judge()
    assert (verdict.verdict == "cannot tell") or pairs >= 8


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder that sockets may be in, whose paths have 107 letters at most."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_gate_that_is_ended(
    tmp_path: Path, short_folder: Path, number: signal.Signals
) -> None:
    """Not even of a head that hangs."""
    package = tmp_path / "hanging" / "sglang"
    package.mkdir(parents=True)
    told = tmp_path / "process"
    (package / "__init__.py").write_text(
        "import os, pathlib, time\n"
        f"told = pathlib.Path({str(told)!r})\n"
        "told.with_suffix('.new').write_text(str(os.getpid()))\n"
        "told.with_suffix('.new').rename(told)\n"
        "time.sleep(600)\n"
    )
    sides = (str(package.parent), PACKAGE)
    arguments = [bench_gate.__file__, *sides, "--cases", "decode/tiny-b8"]
    # An interrupt comes from a terminal.
    found = end_by(number, arguments, told, short_folder, to_all=number == signal.SIGINT)
    assert found.status == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in found.said
    wait_for(lambda: not is_alive(int(told.read_text())))
    # Nobody can answer the last one.
    assert number == signal.SIGKILL or list(short_folder.iterdir()) == []
