"""The gate's error rates: what counts as wrong, and what is said of a share."""

from __future__ import annotations

import json
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
from lab.contest import ContestError, Side


def trial(kind: str, *verdicts: str) -> dict[str, Any]:
    made = [{"metric": f"m{i}", "verdict": verdict} for i, verdict in enumerate(verdicts)]
    about = {"kind": kind, "gate": {"code": "abc", "minutes": 6.0}, "load": [1, 2]}
    return about | {"pairs": 12, "seconds": 180, "verdicts": made}


@pytest.mark.parametrize(
    ("kind", "verdicts", "wrong"),
    [
        ("same", ["same", "cannot tell"], False),
        ("same", ["same", "slower"], True),
        ("same", ["faster", "same"], True),
        ("slow-5", ["slower", "same"], False),
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


def test_the_gates_are_told_apart_by_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    one = describe_gate(6.0)
    assert one == describe_gate(6.0) != describe_gate(5.0)
    monkeypatch.setattr(gate_error_rates, "GATE_FILES", ("verdicts.py",))
    assert describe_gate(6.0)["code"] != one["code"]


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
    assert said[0] == 'gate: {"code": "abc", "minutes": 6.0}'
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
