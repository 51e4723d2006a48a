"""The gate's error rates: what counts as wrong, and what is said of a share."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import gate_error_rates
from gate_error_rates import (
    SITES,
    bounds,
    copy_package,
    describe_gate,
    is_wrong,
    main,
    run_trial,
    summarise,
)
from lab import contest, verdicts
from lab.contest import ContestError, Side


def trial(kind: str, *verdicts: str) -> dict[str, Any]:
    made = [{"metric": f"m{i}", "verdict": verdict} for i, verdict in enumerate(verdicts)]
    about = {"kind": kind, "gate": {"version": 7, "minutes": 6.0}, "load": [1, 2]}
    return about | {"pairs": 12, "seconds": 180, "verdicts": made}


@pytest.mark.parametrize(
    ("kind", "verdicts", "wrong"),
    [
        ("same", ["same", "cannot tell"], False),
        ("same", ["same", "slower"], True),
        ("same", ["faster", "same"], True),
        ("same", ["fails", "same"], True),
        ("slow-5", ["slower", "same"], False),
        ("slow-5", ["fails", "same"], True),
        ("slow-5", ["cannot tell", "same"], True),
        ("slow-10", ["slower", "faster"], True),
    ],
)
def test_what_is_wrong(kind: str, verdicts: list[str], wrong: bool) -> None:
    assert is_wrong(trial(kind, *verdicts)) is wrong


def test_a_comparison_without_an_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compare(*args: Any) -> Any:
        raise ContestError("base, decode/tiny-b8: the process has died")

    monkeypatch.setattr(gate_error_rates, "compare", compare)
    found = run_trial(Side("base", "a"), Side("head", "b"), 1.0)
    assert (found["pairs"], found["verdicts"]) == (0, []) and "has died" in found["error"]
    assert is_wrong({"kind": "same"} | found)


def test_the_gates_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one = describe_gate(6.0)
    assert one == describe_gate(6.0) != describe_gate(5.0)
    monkeypatch.setattr(contest, "VERSION", contest.VERSION + 1)
    assert describe_gate(6.0) != one
    first = trial("same", "slower")
    assert summarise([first, trial("same", "same") | {"gate": one}]) == [
        f"gate: {json.dumps(one, sort_keys=True)}",
        "same: 0 of 1 false alarms (95%: 0% to 79%); median 12 pairs in 180 s",
        'gate: {"minutes": 6.0, "version": 7}',
        "same: 1 of 1 false alarms (95%: 21% to 100%); median 12 pairs in 180 s",
    ]


def test_a_trial_keeps_its_numbers_and_has_the_verdicts_of_todays_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = contest.Contest(None, Side("base", "a"), Side("head", "b"), ["one"])
    numbers = [1.2, 1.1, 1.25, 1.15, 1.2, 1.1, 1.25, 1.15]
    for number in numbers:
        sides = ({"one": [{"us_per_token": 1.0}]}, {"one": [{"us_per_token": number}]})
        made.pairs.append(contest.Pair(*sides))
    made.short.append(contest.Pair({}, {}))  # which lacks the metric
    made._fixed.append(verdicts.failure("two"))
    monkeypatch.setattr(gate_error_rates, "compare", lambda *_: made)
    found = {"kind": "slow-10", "gate": describe_gate(6.0)}
    found |= run_trial(Side("base", "a"), Side("head", "b"), 1.0)
    assert found["metrics"] == ["one us_per_token"]
    told = [[pytest.approx(math.log(number), abs=5e-6)] for number in numbers]
    assert found["logs"] == [*told, [None]] and found["short_pairs"] == 1
    out = tmp_path / "trials.jsonl"
    out.write_text(json.dumps(found) + "\n")
    assert [v["verdict"] for v in gate_error_rates.read(out)[0]["verdicts"]] == ["fails", "slower"]
    monkeypatch.setattr(verdicts, "TOLERANCE", 0.5)
    monkeypatch.setitem(verdicts.judge.__kwdefaults__, "tolerance", 0.5)
    assert [v["verdict"] for v in gate_error_rates.read(out)[0]["verdicts"]] == ["fails", "same"]


@pytest.mark.parametrize(
    "line", ['{"kind": "same", "verd', "[]", "{}", "5", '{"verdicts": []}', '{"kind": 1}']
)
def test_a_line_that_is_no_trial_is_named(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trials.jsonl"
    out.write_text(json.dumps(trial("same", "same")) + "\n" + line + "\n")
    assert main(["--out", str(out), "--summary"]) == 2
    assert f"{out}, line 2 is no trial: " in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["none", "bytes"])
def test_what_is_no_file_of_trials_is_named(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trials.jsonl"
    if content is not None:
        out.write_bytes(content)
    for path in (out, tmp_path):
        assert main(["--out", str(path), "--summary"]) == 2
        assert f"{path} is no file of trials: " in capsys.readouterr().err


def test_a_worker_that_dies_while_the_loop_is_measured_ends_it_with_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def calibrate(scratch: Path) -> float:
        raise ContestError("calibrate-plain, scheduler/b8: the process has died")

    monkeypatch.setattr(gate_error_rates, "calibrate", calibrate)
    assert main(["--out", str(tmp_path / "trials.jsonl")]) == 2
    assert "error: calibrate-plain, scheduler/b8: the process has died" in capsys.readouterr().err


def measured(sides: list[int], costs: Any) -> type:
    """A contest in which a loop makes a step slower by ``costs(turns)``."""

    class Measured(contest.Contest):
        def run_pair(self, tick: Any = None) -> contest.Pair:
            text = Path(self.sides[1].package, "sglang/srt", SITES["choice"][0]).read_text()
            (turns,) = re.findall(r"_burn\((\d+)\)", text)
            sides.append(int(turns))
            # Now and then a neighbour.
            is_slow = len(self.pairs) % 10 == 0
            us = [100.0, 300.0 if is_slow else 100 * (1 + costs(int(turns)))]
            rounds = ({"scheduler/b8": [{"host_us_per_step": one}]} for one in us)
            self.pairs.append(contest.Pair(*rounds))
            return self.pairs[-1]

    return Measured


def test_the_loop_is_measured_by_what_it_costs_where_it_is_as_long_as_it_will_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns of a long loop cost a quarter more: of 2000 they would seem to be 6400 a step."""
    sides: list[int] = []
    cost = lambda turns: turns / 8000 * (1.25 if turns > 1000 else 1)  # noqa: E731
    monkeypatch.setattr(gate_error_rates, "Contest", measured(sides, cost))
    assert gate_error_rates.calibrate(tmp_path) == pytest.approx(8000)
    assert sides == [2000] * 15 + [640] * 40
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", [0.0, -0.1, 2.0])
def test_a_loop_that_cannot_be_measured_is_no_slowdown(
    by: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gate_error_rates, "Contest", measured([], lambda turns: by))
    with pytest.raises(ContestError, match=r"a loop of 2000 turns made scheduler/b8 slower by"):
        gate_error_rates.calibrate(tmp_path)


def test_trials_of_other_slowdowns_are_other_trials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, out = describe_gate(1.0), tmp_path / "trials.jsonl"
    old = [trial("same", "same"), trial("slow-5", "same") | {"loop": 1}]
    out.write_text("".join(json.dumps(t | {"gate": gate}) + "\n" for t in old))
    monkeypatch.setattr(gate_error_rates, "TRIALS", {"same": 1, "slow-5": 1, "slow-10": 1})
    monkeypatch.setattr(gate_error_rates, "calibrate", lambda scratch: 1000.0)
    made = {k: v for k, v in trial("slow-5", "slower").items() if k not in ("kind", "gate")}
    monkeypatch.setattr(gate_error_rates, "run_trial", lambda *_: made)
    assert main(["--out", str(out), "--minutes", "1"]) == 0
    new = [json.loads(line) for line in out.read_text().splitlines()][2:]
    assert [(t["kind"], t["turns"], t["site"]) for t in new] == [
        ("slow-5", 50, "choice"),
        ("slow-10", 100, "choice"),
    ]
    said = summarise(gate_error_rates.read(out))
    assert [line.partition(" missed")[0] for line in said[2:]] == [
        "slow-5: 1 of 1",
        "slow-5: 0 of 1",
        "slow-10: 0 of 1",
    ]


def test_a_summary_says_how_large_the_slowdowns_were(tmp_path: Path) -> None:
    """Of the trials that have numbers of that case; and a row of a short pair may lack others."""
    numbers = [[0.0, math.log(1.06)], [None, math.log(1.04)], [None, math.log(1.05)]]
    told = {"metrics": ["decode/tiny-b8 us_per_token", "scheduler/b8 host_us_per_step"]}
    trials = [trial("slow-5", "slower") | told | {"logs": numbers}, trial("slow-5", "slower")]
    (_, line) = summarise(trials)
    assert line.endswith("; scheduler/b8 slower by 5.0% (5.0% to 5.0%)")
    assert "slower by" not in summarise([trial("same", "same") | told | {"logs": numbers}])[1]


def test_an_error_is_told_apart_from_an_alarm() -> None:
    failed = trial("same") | {"error": "base, decode/tiny-b8: the process has died"}
    assert summarise([trial("same", "same"), failed])[1].endswith("; 1 of them ended in an error")


def test_wilsons_interval() -> None:
    """Figures of Brown, Cai and DasGupta's formula, worked out by hand for 1 of 40 and 0 of 20."""
    low, high = bounds(1, 40)
    assert (round(low, 4), round(high, 4)) == (0.0044, 0.1288)
    low, high = bounds(0, 20)
    assert low == pytest.approx(0, abs=1e-12) and round(high, 4) == 0.1611


def test_a_summary_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trials.jsonl"
    trials = [trial("same", "same"), trial("same", "slower"), trial("slow-10", "slower")]
    out.write_text("".join(json.dumps(t) + "\n" for t in trials))
    assert main(["--out", str(out), "--summary"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == summarise(trials)
    assert said[0] == 'gate: {"minutes": 6.0, "version": 7}'
    assert said[1].startswith(
        "same: 1 of 2 false alarms (95%: 9% to 91%); median 12 pairs in 180 s"
    )
    assert said[2].startswith("slow-10: 0 of 1 missed")


@pytest.mark.parametrize("site", SITES)
def test_a_slow_copy_differs_in_its_loop_alone(site: str, tmp_path: Path) -> None:
    plain, slow = copy_package(tmp_path / "plain", 0), copy_package(tmp_path / "slow", 700, site)
    file, function = SITES[site]
    name = f"sglang/srt/{file}"
    one, other = ((Path(side.package) / name).read_text() for side in (plain, slow))
    assert other.startswith(one) and "_burn(700)" in other
    compile(other, name, "exec")
    class_name, method = function.split(".")
    assert f"class {class_name}" in one and f"def {method}(" in one
    assert not list(tmp_path.rglob("__pycache__"))
