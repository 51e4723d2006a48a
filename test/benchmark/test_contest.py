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

from lab import contest
from lab.contest import Contest, ContestError, Side

REPO_ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(REPO_ROOT / "python")


class FakeWorker:
    """Notes what it is asked, and answers with numbers of its side."""

    asked: list[tuple[str, str]] = []

    def __init__(self, context: Any, side: Side, threads: int) -> None:
        self._side = side

    def run(self, case: str, warm_up: bool = False) -> dict[str, float] | None:
        if case == "new" and self._side.name == "base":
            return None
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


def test_what_one_side_lacks_is_left_out(fake: list[tuple[str, str]]) -> None:
    found = make(["one", "new"])
    found.prepare()
    assert found.notes == ["new left out: base has no API for it"]
    found.run_pair()
    assert {case for _, case in fake} == {"one"}
    with pytest.raises(ContestError, match="no case that both can do"):
        make(["new"]).prepare()


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
    verdicts = {v["metric"]: v for v in found["verdicts"]}
    assert verdicts["decode/tiny-b8 host_us_per_step"]["verdict"] == "slower"
    assert verdicts["decode/tiny-b8 host_us_per_step"]["low"] > 1.5
    assert verdicts["decode/tiny-b8 steps_per_token"]["verdict"] == "same"


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
    assert f"{tmp_path}, decode/tiny-b8: " in done.stderr and "broken on purpose" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "HEAD"], "nowhere"),
        (["HEAD", "HEAD", "--minutes", "0"], "--minutes: must be above 0, got 0.0"),
        (["HEAD", "HEAD", "--cases", "decode/none"], "decode/none"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(REPO_ROOT / "scripts" / "bench_gate.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr
