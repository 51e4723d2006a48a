"""``benchmark/speed.py``: its arithmetic, its host section, its command line."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import random
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from lab import hostwork

REPO_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("speed", REPO_ROOT / "benchmark" / "speed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_ratios_are_those_of_pairs(speed: ModuleType) -> None:
    ours, theirs = [2.0, 30.0, 4.0], [1.0, 10.0, 4.0]
    assert speed.median_ratio(ours, theirs) == 2.0
    assert speed.spread(ours, theirs) == "1.00 to 3.00"


def test_what_being_started_first_is_worth_cancels_out(speed: ModuleType) -> None:
    """Ours is twice as fast, and whoever was started first 10% slower."""
    slow, fast = 1 / 1.1, 1.0
    ours = [2 * slow] * 3 + [2 * fast] * 3
    theirs = [fast] * 3 + [slow] * 3
    assert speed.fair_ratio(ours, theirs) == pytest.approx(2.0)
    assert speed.worth_of_being_first(ours, theirs) == pytest.approx(1 / 1.1)
    # The halves differ, but inside a half there is no doubt.
    assert speed.noise(ours, theirs) == pytest.approx(0.0)


@pytest.mark.parametrize("pairs", [8, 12, 40])
def test_noise_is_a_standard_error_of_the_median(speed: ModuleType, pairs: int) -> None:
    """Against the spread of the ratio over many repetitions of the same measurement."""
    rng = random.Random(0)
    found, told = [], []
    for i in range(2000):
        ours = [2 * (1 + rng.gauss(0, 0.04)) for _ in range(pairs)]
        found.append(speed.fair_ratio(ours, [1.0] * pairs) / 2)
        if i % 50 == 0:
            told.append(speed.noise(ours, [1.0] * pairs))
    assert statistics.mean(told) == pytest.approx(statistics.stdev(found), rel=0.15)


def test_two_pairs_say_nothing_of_noise(speed: ModuleType) -> None:
    assert speed.noise([1.0] * 4, [1.0] * 4) == math.inf


def test_the_row_of_hugging_face(speed: ModuleType) -> None:
    engine = [
        {"metrics": {"tokens_per_s": 30.0}, "tokens": [[1, 2, 3, 4]] * 2, "seconds": 2.0},
        {"metrics": {"tokens_per_s": 60.0}, "tokens": [[1, 2, 3, 4]] * 2, "seconds": 1.0},
    ]
    # Two prompts, three tokens each behind the first one, in 0.3 s: 20 tokens/s.
    hf = {"tokens": [[1, 2, 3, 4], [1, 9, 3, 4]], "decode_seconds": 0.3, "seconds": 3.0}
    row = speed._hf_row(1, 4, engine, [hf | {"decode_seconds": 0.15}, hf | {"decode_seconds": 0.1}])
    assert (row["ours"], row["theirs"]) == (45.0, 25.0)
    assert row["ratio"] == pytest.approx(math.sqrt(30 / 20 * 60 / 30), abs=1e-3)
    assert (row["target"], row["met"]) == (1.5, True)
    assert row["whole"] == pytest.approx(math.sqrt(1.5 * 3.0), abs=1e-3)
    assert row["same"] == "62.5%"  # 4 and 1 of 4


def test_sides_take_turns_and_the_first_turn_does_not_count(speed: ModuleType) -> None:
    asked: list[str] = []

    class Side:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, **question: int) -> dict[str, int]:
            asked.append(self.name)
            return {"turn": len(asked)} | question

    args = speed.parse_args(["--rounds", "2"])
    sides = {"a": Side("a"), "b": Side("b")}
    found = speed.alternate(args, sides, {"batch_size": 3}, "x", lambda text: None)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert [r["turn"] for r in found["a"]] == [4, 5]
    assert [r["turn"] for r in found["b"]] == [3, 6]


def test_sides_are_started_in_both_orders(speed: ModuleType) -> None:
    log: list[str] = []

    class Side:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> object:
            return self

        def __exit__(self, *exc_info: object) -> None:
            log.append(f"{self.name} ends")

        def wait_until_ready(self) -> None:
            log.append(f"{self.name} is ready")

        def ask(self, batch_size: int) -> dict[str, object]:
            return {"by": self.name, "size": batch_size, "at": len(log)}

    args = speed.parse_args(["--rounds", "3"])
    starters = {name: functools.partial(Side, name) for name in "ab"}
    found = speed.ask_all(args, starters, [{"batch_size": 1}, {"batch_size": 8}], "x", print)
    assert log == [
        *("a is ready", "b is ready", "b ends", "a ends"),
        *("b is ready", "a is ready", "a ends", "b ends"),
    ]
    for size, answers in zip((1, 8), found, strict=True):
        for name in "ab":
            assert [(r["by"], r["size"]) for r in answers[name]] == [(name, size)] * 6
            assert [r["at"] for r in answers[name]] == [2] * 3 + [6] * 3


def test_common_prefix(speed: ModuleType) -> None:
    assert speed.common_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert speed.common_prefix([1, 2, 4], [1, 2, 3]) == 2
    assert speed.common_prefix([9], [1]) == 0


def test_overlap_row(speed: ModuleType) -> None:
    def rounds(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": s, "forward_idle": 0.1, "host_us_per_step": 200.0} for s in speeds]

    normal = rounds(*[100] * 6)
    row = speed._overlap_row(8, rounds(96, 99, 102, 96, 99, 102), normal)
    assert row["ratio"] == 0.99 and row["met"] is None
    assert row["first"] == 1.0
    better = speed._overlap_row(8, rounds(96, 101, 102, 96, 101, 102), normal)
    assert better["ratio"] == 1.01 and better["met"] is True
    assert row["idle"] == "0.100 / 0.100"
    assert speed._overlap_row(8, rounds(90, 91, 92, 90, 91, 92), normal)["met"] is False
    assert speed._overlap_row(8, rounds(90, 90), rounds(100, 100))["noise"] == "-"


def test_host_work_of_a_step() -> None:
    batch = hostwork.own_batch(3)
    seconds = hostwork.measure(batch, steps=5, warmup=1)
    assert 0 < seconds < 1
    assert batch.seq_lens.tolist() == [hostwork.PROMPT_LEN + 6] * 3
    assert [len(req.output_ids) for req in batch.reqs] == [6, 6, 6]
    assert batch.token_to_kv_pool_allocator.available_size() == 3 * (
        hostwork.ROW_LEN - hostwork.PROMPT_LEN - 6
    )


def test_host_work_that_does_not_happen_is_an_error() -> None:
    batch = hostwork.own_batch(2)
    batch.prepare_for_decode = lambda: None
    with pytest.raises(RuntimeError, match="did not decode"):
        hostwork.measure(batch, steps=2, warmup=1)


def test_a_request_that_comes_and_goes() -> None:
    batch = hostwork.own_batch(3)
    others = [hostwork.own_batch(1) for _ in range(4)]
    merging, leaving = hostwork.measure_moves(batch, others)
    assert 0 < merging < 1 and 0 < leaving < 1
    assert len(batch.reqs) == 3 and batch.seq_lens.tolist() == [hostwork.PROMPT_LEN] * 3
    found = hostwork.moves(2, times=3)
    assert found.keys() == {"prepare_us", "merge_us", "filter_us"} and min(found.values()) > 0


@pytest.mark.parametrize("broken", ["merge", "filter"])
def test_moves_that_do_not_happen_are_an_error(broken: str) -> None:
    batch = hostwork.own_batch(2)
    setattr(batch, f"{broken}_batch", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match=f"did not {broken}"):
        hostwork.measure_moves(batch, [hostwork.own_batch(1)])


def test_the_host_section_without_upstream(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "UPSTREAM", REPO_ROOT / "no" / "such" / "folder")
    monkeypatch.setattr(speed, "HOST_BATCH_SIZES", (1, 8))
    args = speed.parse_args(["--section", "host", "--rounds", "1"])
    ticks: list[str] = []
    section = speed.run_host(args, ticks.append)
    assert [row["batch_size"] for row in section.rows] == [1, 8]
    for row in section.rows:
        assert row["ours"] > 0
        assert (row["theirs"], row["source"]) == (31.0, "a reference")
        assert row["ratio"] == pytest.approx(row["ours"] / 31, rel=0.01)
        assert row["met"] is None
    assert any("was not measured" in note for note in section.notes)
    assert ticks


def test_an_interpreter_that_cannot_import_upstream_is_named(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    (release / "sglang").mkdir(parents=True)
    (release / "sglang" / "__init__.py").write_text("raise ImportError('no module named zmq')")
    monkeypatch.setattr(speed, "UPSTREAM", release)
    monkeypatch.setattr(speed, "REPO_ROOT", tmp_path)
    section = speed.Section("", {})
    with speed.upstream_worker(1, section) as worker:
        assert worker is None
    assert "zmq" in section.notes[0]


def test_penalties_may_cost_two_percent(speed: ModuleType) -> None:
    def rounds(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": s, "host_us_per_step": 100 + s} for s in speeds]

    plain = rounds(*[100.0] * 8)
    row = speed._penalties_row(8, rounds(*[99.0] * 8), plain)
    assert row["ratio"] == 0.99 and row["met"] is True and row["host"] == "199 / 200"
    assert speed._penalties_row(8, rounds(*[97.0] * 8), plain)["met"] is False
    wide = rounds(90, 97, 104, 97, 90, 104, 97, 97)
    assert speed._penalties_row(8, wide, plain)["met"] is None


def test_missing_drafts_are_a_note(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAB_DRAFT", str(tmp_path))
    section = speed.run_eagle(speed.parse_args([]), print)
    assert section.rows == []
    assert "no EAGLE head" in section.notes[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is too small: 0"),
        (["--new-tokens", "1"], "--new-tokens is too small"),
        (["--batch-size", "4", "0"], "--batch-size is too small: 0"),
        (["--section", "gpu"], "invalid choice"),
    ],
)
def test_bad_arguments_are_named(
    speed: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        speed.parse_args(arguments)
    assert message in capsys.readouterr().err


def test_json_and_the_exit_status(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = speed.Section(
        "host", {"a": "A", "met": "met"}, [{"a": 1.5, "met": False}], ["a note"]
    )
    monkeypatch.setattr(speed, "RUNNERS", {"host": lambda *_: section})
    assert speed.main(["--section", "host", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "host": {"rows": [{"a": 1.5, "met": False}], "notes": ["a note"]}
    }
    assert speed.main(["--section", "host", "--strict"]) == 1
    assert "1 target(s) not met" in capsys.readouterr().out
