"""Contests: who is asked when, what a pair becomes, and what is said of a side that fails."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import contest, verdicts
from lab.cases import CASES, Case, Setup
from lab.contest import Contest, ContestError, Side

REPO_ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(REPO_ROOT / "python")


class FakeWorker:
    """Notes what it is asked, and answers with numbers of its side."""

    asked: list[tuple[str, str]] = []

    def __init__(self, context: Any, side: Side, threads: int) -> None:
        self._side = side

    def run(self, case: str, warm_up: bool = False) -> dict[str, float] | None:
        if case == f"new to {self._side.name}":
            return None
        if case == f"bad for {self._side.name}":
            raise ContestError(f"{self._side.name}, {case}: it broke")
        if case == "transfers/plain":
            assert warm_up
            count = 0.0 if self._side.name == "base" else 1.0
            return {"blocking_per_step": count, "transfers_per_step": 2.0, "seconds": count}
        if not warm_up:
            self.asked.append((self._side.name, case))
        slower = 1.1 if self._side.name == "head" else 1.0
        number = len(self.asked)
        return {"us_per_token": slower * (100 + number // 2 % 3), "tokens_per_s": 1.0}

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(FakeWorker, "asked", asked)
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
    assert found.is_settled and found.notes[0].startswith(f"{case} left out: head: ")
    (verdict,) = found.judge()
    assert (verdict.metric, verdict.verdict) == (case, "fails") and math.isnan(verdict.ratio)


def test_what_is_counted_is_asked_once_and_any_difference_is_certain(
    fake: list[tuple[str, str]],
) -> None:
    found = make(["transfers/plain"])
    found.prepare()
    assert found.is_settled
    blocking, all_of_them = found.judge()
    assert blocking == verdicts.Verdict(
        "transfers/plain blocking_per_step", "slower", math.inf, math.inf, math.inf
    )
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
    assert found["pairs"] == 8
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


def test_a_package_that_fails_is_named(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    command = [sys.executable, str(REPO_ROOT / "scripts" / "bench_gate.py")]
    done = subprocess.run(
        [*command, str(tmp_path), PACKAGE, "--cases", "decode/tiny-b8"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"decode/tiny-b8 left out: {tmp_path}: " in done.stderr
    assert "broken on purpose" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "HEAD"], "nowhere"),
        (["HEAD", "HEAD", "--minutes", "0"], "--minutes: must be a finite number above 0, got '0'"),
        (["HEAD", "HEAD", "--rounds", "1.5"], "--rounds: must be a whole number of at least 1"),
        (["HEAD", "HEAD", "--cases", "decode/none"], "decode/none"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(REPO_ROOT / "scripts" / "bench_gate.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr
