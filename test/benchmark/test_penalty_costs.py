"""The bench of penalties: that all subjects do the work, the model's arithmetic, verdicts, tables."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from lab import penalty_costs as costs
from lab import penalty_history, penalty_model, upstream_penalties
from lab.cases import QUESTIONS
from lab.metrics import WorkNotDone
from lab.penalty_costs import Cell, CellResult, Logits, Options, Target, measuring

REPO_ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
KINDS = ("plain", "chain", "tree")
HAS_NUMBA = importlib.util.find_spec("numba") is not None
TINY = {kind: Cell(kind, 3, 700, 40) for kind in KINDS} | {"join": Cell("join", 3, 700, 40)}

needs_release = pytest.mark.skipif(
    not upstream_penalties.is_there(),
    reason=f"needs SGLang {upstream_penalties.VERSION}: make upstream",
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = REPO_ROOT / "benchmark" / "micro" / "penalties.py"
    spec = importlib.util.spec_from_file_location("micro_penalties", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def quick(**options: Any) -> Options:
    """Three rounds; what is compiled takes longer than what is measured."""
    return Options(CPU, dense_backend="torch", seconds=0.0, **options)


# --- The work is done ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_our_subjects_pass_their_check(kind: str) -> None:
    """`measure` raises where a logit is wrong."""
    cell = TINY[kind]
    found = costs.measure(cell, quick(), Logits([cell], CPU))
    floor = {"floor"} if HAS_NUMBA else set()
    assert found.us.keys() == {"sparse", "one_pass"} | floor
    assert found.rounds == 3 and found.ratios.keys() == {"one_pass"} | floor
    assert bool(found.notes) is not HAS_NUMBA
    assert found.host_us > 0 and found.device_us > 0
    assert found.state_bytes["one_pass"] > 9 * 3 * 700
    assert found.temporary_bytes["sparse"] >= 0


@needs_release
@pytest.mark.upstream
@pytest.mark.parametrize("kind", TINY)
def test_upstream_passes_its_check(kind: str) -> None:
    cell = TINY[kind]
    library = upstream_penalties.load(compiles=False)
    found = costs.measure(cell, quick(library=library), Logits([cell], CPU))
    others = {"upstream"} if kind == "join" else {"one_pass", "upstream", "overlap"}
    if kind != "join" and HAS_NUMBA:
        others.add("floor")
    assert found.us.keys() == {"sparse", *others}
    # Four float32 a column, one of them with a column more until it is copied; and numbers a row.
    more = 0 if kind == "join" else 3 * 4
    assert found.state_bytes["upstream"] == 3 * 4 * 700 * 4 + more + 3 * (3 * 4 + 2 * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_penalizers_of_a_commit_pass_their_check(kind: str) -> None:
    cell = TINY[kind]
    logits = Logits([cell], CPU)
    subject = penalty_history.DenseOfCommit(costs.Workload(cell, CPU))
    costs.Stepper(subject, logits.of(cell))(5)
    costs.check("dense", subject, logits)
    subject.join(1)
    subject.note_join(1)
    costs.check_joined("dense", subject)


@pytest.mark.parametrize("what", ["nothing", "a token less", "a step late"])
def test_work_that_is_not_done_is_noticed(what: str) -> None:
    class Wrong(costs.OnePass):
        def run(self, planned: Any, turn: Any, logits: torch.Tensor) -> None:
            if what == "a step late":
                self._state.commit(turn.tokens, turn.lens)
            elif what == "a token less":
                before = logits[0, self.work.outputs[0][0]].clone()
            if what != "nothing":
                self._state.apply(logits)
            if what == "a token less":
                logits[0, self.work.outputs[0][0]] = before

    cell = TINY["plain"]
    subject = Wrong(costs.Workload(cell, CPU), "torch")
    with pytest.raises(WorkNotDone, match="plain-b3-v700-s40: it makes"):
        costs.check("it", subject, Logits([cell], CPU))


def test_a_lost_request_is_noticed() -> None:
    """Also one whose row is not compared."""
    subject = costs.Sparse(costs.Workload(Cell("join", 9, 700, 40), CPU))
    subject.planner.release(7)
    with pytest.raises(WorkNotDone, match="it has lost a request's stop tokens"):
        costs.check_joined("it", subject)


class KeepsTheOldCounts(costs.Sparse):
    def join(self, row: int) -> None:
        pass


class LosesANeighbour(costs.Sparse):
    def join(self, row: int) -> None:
        super().join(row)
        super().join((row + 1) % len(self._slots))


class MovesTheOthers(costs.Sparse):
    """As upstream's rows move, but the truth of ours is that they stay."""

    def join(self, row: int) -> None:
        super().join(row)
        self._slots.append(self._slots.pop(row))


@pytest.mark.parametrize("joins", [0, 1, 7], ids=lambda joins: f"{joins} joins before")
@pytest.mark.parametrize("wrong", [KeepsTheOldCounts, LosesANeighbour, MovesTheOthers])
def test_joins_that_go_wrong_are_noticed(wrong: type[costs.Sparse], joins: int) -> None:
    """Also behind so many joins that no request is left of those at the beginning."""
    cell = TINY["join"]
    for kind in (costs.Sparse, wrong):
        subject = kind(costs.Workload(cell, CPU))
        costs.Stepper(subject, Logits([TINY["plain"]], CPU).of(TINY["plain"]))(3)
        for _ in range(joins):
            costs.Joiner(subject, CPU)(1)
        if kind is costs.Sparse:
            costs.check_joined("ours", subject)
            continue
        with pytest.raises(WorkNotDone, match="join-b3-v700-s40: it makes"):
            costs.check_joined("it", subject)


def test_a_join_that_is_not_noted_is_noticed() -> None:
    subject = costs.Sparse(costs.Workload(TINY["join"], CPU))
    subject.join(1)
    with pytest.raises(WorkNotDone):
        costs.check_joined("it", subject)


def test_who_has_said_what_behind_joins() -> None:
    class First(costs.Subject):
        joins_last = True

    subject = First(costs.Workload(TINY["join"], CPU))
    outputs, (turn, *_) = subject.work.outputs, subject.work.turns
    subject.taken[0] += 1
    subject.note_join(0)
    assert subject.said_so_far(0) == Counter([*outputs[1], *turn.host_tokens[1]])
    assert subject.said_so_far(2) == Counter()
    subject.taken[0] += 2
    subject.note_join(1)
    assert subject.said_so_far(0) == Counter(
        [*outputs[1], *turn.host_tokens[1], *turn.host_tokens[0] * 2]
    )
    assert subject.said_so_far(1) == Counter(turn.host_tokens[2] * 2)
    assert subject.said_so_far(2) == Counter()


# --- What is measured ---------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize("kind", KINDS)
def test_the_floor_touches_what_penalties_change(kind: str) -> None:
    """Those logits and no others: all that the truth penalizes, and at most what a stop token masks."""
    cell = TINY[kind]
    work = costs.Workload(cell, CPU)
    subject = costs.Touch(work)
    for turn in work.turns[:2]:
        touched = torch.zeros(cell.batch_size * cell.num_nodes, cell.vocab_size)
        subject.run(subject.before(turn), turn, touched)
        for place, row in enumerate(touched):
            request, node = divmod(place, cell.num_nodes)
            said = {*work.outputs[request], *costs.REQUEST.stop_token_ids}
            said |= {turn.host_drafts[request][n] for n in cell.ways[node] if n != 0}
            assert set(row.nonzero().view(-1).tolist()) == said
        # Each of them once.
        assert torch.unique(touched[touched != 0]).numel() == 1


def test_a_floor_that_is_left_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.penalty_costs.subjects.find_spec", lambda name: None)
    assert costs.Touch.why_not(torch.device("cuda")) == "it is one of the CPU"
    cell = TINY["plain"]
    found = costs.measure(cell, quick(backend="torch"), Logits([cell], CPU))
    assert "floor" not in found.us
    assert found.notes == ["floor left out: numba is not installed"]


def test_lists_stay_as_long_as_the_cell_says() -> None:
    cell = TINY["chain"]
    subject = costs.Sparse(costs.Workload(cell, CPU))
    costs.Stepper(subject, Logits([cell], CPU).of(cell))(30)
    assert subject.state.tables.headers[:, 0].tolist() == [cell.seen + 2] * 3


def test_trees() -> None:
    chain, tree = TINY["chain"], TINY["tree"]
    assert (chain.num_nodes, chain.max_tokens) == (4, 4)
    assert (tree.num_nodes, tree.max_tokens) == (16, 5)
    assert tree.ways[15] == [0, 1, 3, 7, 15]
    assert (TINY["plain"].num_nodes, TINY["plain"].max_tokens) == (1, 1)


def test_subjects_that_do_not_fit_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = TINY["plain"]
    monkeypatch.setattr("lab.penalty_costs.measuring.CELL_BYTES", cell.dense_bytes("one_pass") - 1)
    found = costs.measure(cell, quick(), Logits([cell], CPU))
    assert "one_pass" not in found.us and "sparse" in found.us
    assert found.notes == ["one_pass left out: it would take 0.0 GiB"]


def test_all_of_the_grid_fits() -> None:
    largest = Cell("tree", 256, 152_064)
    assert largest.dense_bytes("upstream") < costs.CELL_BYTES
    assert Cell("tree", 256, 512_000).dense_bytes("upstream") > costs.CELL_BYTES
    assert len(costs.grid()) == 3 * 4 * 3 * 3 + 4 * 3


def test_the_allocators_account(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stepper:
        def __call__(self, steps: int) -> None:
            first = torch.zeros(1000)
            second = torch.zeros(500)
            del first
            torch.zeros(100)
            del second

    assert costs.temporaries(Stepper(), CPU) == 6000


# --- The model ----------------------------------------------------------------------------------


def test_sectors() -> None:
    assert penalty_model.sectors(32_000, 1) == pytest.approx(1)
    assert penalty_model.sectors(8, 5) == 1
    assert penalty_model.sectors(16, 2) == pytest.approx(1.5)


def test_bytes_of_a_step_by_hand() -> None:
    """Two requests, one sector a row: every token of a row is in it."""
    cell = Cell("plain", 2, 8, 4)
    about = 32 + 16 + 4  # header, column of the index, one page
    apply, commit = penalty_model.sparse(cell)
    assert apply.reads == 2 * (about + 8 * 6 + 32) and apply.writes == 2 * 32
    assert commit.reads == 2 * (about + 8 + 4 * 6 + 32) and commit.writes == 2 * (32 + 32)
    assert penalty_model.floor_us([apply, commit]) == pytest.approx(
        (264 + 64 + 232 + 128) / 4.3e6 + 5
    )
    one_pass, count = penalty_model.one_pass(cell)
    assert (one_pass.reads, one_pass.writes) == (2 * 8 * 13, 2 * 8 * 4)
    assert count.launches == 2


def test_dense_bytes_a_logit_by_hand() -> None:
    """What is left a logit where the batch is large: 56 without overlap, 80 with it."""
    cell = Cell("plain", 100, 100_000, 16)
    for name, wanted, launches in (("one_pass", 17, 3), ("upstream", 56, 10), ("overlap", 80, 13)):
        ops = penalty_model.MODELS[name](cell)
        assert sum(op.nbytes for op in ops) / 1e7 == pytest.approx(wanted, rel=1e-3)
        assert sum(op.launches for op in ops) == launches
    chain = Cell("chain", 100, 100_000, 16)
    ops = penalty_model.upstream(chain)
    assert ops == penalty_model.overlap(chain)
    assert sum(op.nbytes for op in ops) / 1e7 == pytest.approx(64 + 32 * 4, rel=1e-3)


# --- Verdicts -----------------------------------------------------------------------------------


def result(cell: Cell, **fields: Any) -> CellResult:
    return CellResult(cell, **fields)


def test_verdicts() -> None:
    few, many = Cell("plain", 64, 128_256, 16), Cell("plain", 64, 128_256, 2048)
    small, join = Cell("chain", 8, 32_000, 16), Cell("join", 64, 128_256)
    results = [
        result(few, ratios={"upstream": 14.0, "overlap": 99.0}),
        result(many, ratios={"upstream": 5.0}),
        result(small, ratios={"upstream": 0.9, "one_pass": 0.1}),
        result(join, ratios={"upstream": 120.0}),
        result(Cell("tree", 8, 32_000)),  # upstream did not fit
    ]
    never, fifteen, five, eight, joins, memory, floor, gpu = costs.verdicts(results, "cpu")
    assert (never.met, never.value, never.cells) == (False, 0.9, 4)
    assert never.worst is results[2]
    assert (fifteen.met, fifteen.value) == (False, 14.0)
    assert (five.met, five.cells) == (True, 1)
    assert (eight.met, eight.value) == (False, 0.9)
    assert [miss.value for miss in never.misses] == [0.9] and five.misses == []
    assert joins.met is True
    assert memory.met is floor.met is gpu.met is None


def test_a_missed_ratio_says_what_the_floor_would_reach(script: ModuleType) -> None:
    us = {"sparse": 100.0, "floor": 20.0, "upstream": 82.0}
    found = [result(Cell("plain", 1, 32_000, 16), us=us, ratios={"upstream": 0.82, "floor": 0.2})]
    never = costs.verdicts(found, "cpu")[0]
    assert (never.met, never.value) == (False, 0.82)
    assert never.misses == [costs.Miss(found[0].cell, 0.82, 4.1)]
    assert script.missed([never]) == [
        "missed: never slower than upstream: plain-b1-v32000-s16 0.820, the floor itself 4.1"
    ]
    # Where it is met, or there is no floor, nothing is said.
    found[0].ratios["upstream"] = 1.0
    assert script.missed(costs.verdicts(found, "cpu")[:1]) == []
    found[0].ratios["upstream"] = 0.82
    del us["floor"]
    assert script.missed(costs.verdicts(found, "cpu")[:1]) == [
        "missed: never slower than upstream: plain-b1-v32000-s16 0.820"
    ]


def test_verdicts_on_a_gpu_look_at_overlap_too() -> None:
    cell = Cell("plain", 1, 32_000, 16)
    found = result(
        cell,
        ratios={"upstream": 6.0, "overlap": 4.0},
        predicted_us={"sparse": 5.0},
        device_us=7.0,
        state_bytes={"sparse": 1000},
        temporary_bytes={"sparse": 0},
    )
    verdicts = {verdict.target.text: verdict for verdict in costs.verdicts([found], "cuda")}
    assert verdicts["device time <= 1.5x of the predicted floor"].value == pytest.approx(1.4)
    assert verdicts["device time <= 1.5x of the predicted floor"].met is True
    assert verdicts[">= 5x faster than upstream everywhere"].met is False
    assert verdicts["never slower than upstream"].met is None
    memory = verdicts["extra memory <= 32 B a token seen + 64 KiB, a request"]
    assert memory.value == pytest.approx(1000 / (32 * 16 + 65_536)) and memory.met is True


def test_a_limit_itself_is_met() -> None:
    found = [result(TINY["plain"], ratios={"upstream": 2.0})]
    for at_least in (True, False):
        target = Target("t", "cpu", lambda c: True, lambda r: r.ratios["upstream"], 2, at_least)
        (verdict,) = costs.verdicts(found, "cpu", [target])
        assert verdict.met is True


# --- The command --------------------------------------------------------------------------------


def printed(*what: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=220)
    for item in what:
        console.print(item)
    return out.getvalue()


def test_the_tables(script: ModuleType) -> None:
    found = [
        result(
            Cell("plain", 8, 32_000, 256),
            us={"sparse": 80.5, "floor": 17.5, "one_pass": 99.0, "upstream": 250.0},
            host_us=30.25,
            device_us=50.25,
            ratios={"one_pass": 1.23, "upstream": 3.11},
            state_bytes={"sparse": 50_000, "upstream": 4_096_192},
            temporary_bytes={"sparse": 0, "upstream": 1_024_000},
            predicted_us={"sparse": 5.04, "one_pass": 8.51, "upstream": 28.3},
        ),
        result(Cell("join", 8, 32_000), us={"sparse": 200.0, "upstream": 900.0}),
    ]
    text = printed(script.table(found, "cpu"))
    for word in (
        "plain",
        "80.5",
        "30.2",
        "17.5",
        "3.11x",
        "48.8K+0 ",
        "3.91M+1,000K",
        "28.3",
        "join",
    ):
        assert word in text, word
    assert "by model" not in text and "by model" in printed(script.table(found, "cuda"))
    assert "9.97x" in printed(script.table(found, "cuda"))
    text = printed(script.verdict_table(costs.verdicts(found, "cpu")))
    assert "plain-b8-v32000-s256" in text and "not measured" in text


def test_cells_are_chosen(script: ModuleType) -> None:
    def chosen(*options: str) -> list[str]:
        return [cell.name for cell in script.chosen_cells(script.parse_args(options))]

    assert len(chosen()) == len(costs.grid())
    assert chosen("--quick", "--kinds", "join") == ["join-b64-v128256-s256"]
    assert len(chosen("--kinds", "plain", "--cells", "b64-v128256")) == 3
    assert script.main(["--cells", "nowhere"]) == 2


@pytest.fixture
def tiny_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick set of tiny cells, without a release of SGLang."""
    monkeypatch.setattr(costs, "QUICK", tuple(TINY.values()))
    monkeypatch.setattr(upstream_penalties, "is_there", lambda version: False)


def test_the_command(
    script: ModuleType,
    tiny_set: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "found" / "penalties.json"
    options = ["--quick", "--threads", "2", "--seconds", "0.01", "--json", str(file)]
    assert script.main([*options, "--dense-backend", "torch"]) == 0
    text = capsys.readouterr().out
    assert "scripts/upstream fetch" in text and "4 cells, 2 threads" in text
    document = json.loads(file.read_text())
    assert [cell["cell"] for cell in document["cells"]] == [cell.name for cell in TINY.values()]
    assert len(document["targets"]) == len(costs.TARGETS)
    assert not math.isnan(document["cells"][0]["us"]["sparse"])


def test_a_cell_that_is_wrong_leaves_the_others(
    script: ModuleType,
    tiny_set: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But behind an error of the device nothing can be believed."""
    file, cells = tmp_path / "penalties.json", list(TINY.values())
    options = ["--quick", "--threads", "1", "--seconds", "0.01", "--json", str(file)]
    measure = costs.measure

    def failing(error: Exception) -> Any:
        def one(cell: costs.Cell, *args: Any) -> costs.CellResult:
            if cell == cells[1]:
                raise error
            return measure(cell, *args)

        return one

    for error, said, there in (
        (WorkNotDone("row 3 is off"), "row 3 is off", 4),
        (RuntimeError("illegal memory access"), "RuntimeError: illegal memory access", 2),
    ):
        monkeypatch.setattr(costs, "measure", failing(error))
        assert script.main([*options, "--dense-backend", "torch"]) == 1
        assert f"error: {cells[1].name}: {said}" in capsys.readouterr().err
        document = json.loads(file.read_text())
        errors = {cell["cell"]: cell["error"] for cell in document["cells"]}
        assert len(errors) == there and errors.pop(cells[1].name) == said
        assert set(errors.values()) == {""}
        missing = [note for note in document["notes"] if "missing" in note]
        assert missing == ([] if there == 4 else ["not gone on: 2 of 4 cells are missing"])


def test_blocks_in_which_the_device_may_have_waited_do_not_count() -> None:
    def block(us: float, is_late: bool) -> costs.Block:
        return costs.Block(1, host=1e-6, device=us * 1e-6, is_late=is_late)

    rounds = [
        {"sparse": block(10, False), "upstream": block(40, False)},
        {"sparse": block(90, True), "upstream": block(50, False)},
        {"sparse": block(12, False), "upstream": block(900, True)},
    ]
    result = costs.CellResult(TINY["plain"])
    measuring._sum_up(result, rounds, torch.device("cuda"))
    assert result.device_us == pytest.approx(11) and result.us["upstream"] == pytest.approx(45)
    assert result.ratios["upstream"] == pytest.approx(4) and result.rounds == 3
    assert not result.late and result.notes == []
    # If there are no others, they are better than nothing.
    late = costs.CellResult(TINY["plain"])
    measuring._sum_up(late, rounds[1:2], torch.device("cuda"))
    assert late.device_us == pytest.approx(90) and late.late
    assert late.notes == [
        "all blocks of sparse began before all was launched: the device may have waited"
    ]


# --- Along history ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", QUESTIONS["penalties"], ids=lambda case: case.name)
def test_a_round_along_history(case: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    from lab.workloads import make_session

    setup = replace(case.setup, vocab_size=900)
    session = make_session(setup, tmp_path)
    found = session.run_round(replace(case, batch_size=2, setup=setup))
    assert found.keys() == {"us_per_step", "us_per_join"} and min(found.values()) > 0
    session.close()


def test_a_block_that_was_launched_too_late_is_done_again_with_fewer_steps() -> None:
    asked: list[int] = []

    def stepper(steps: int) -> costs.Block:
        asked.append(steps)
        return costs.Block(steps, device=1e-3, is_late=steps > 6)

    assert penalty_history.timely(stepper, penalty_history.STEPS).steps == 6
    assert asked == [24, 12, 6]
    with pytest.raises(WorkNotDone, match="did not wait"):
        penalty_history.timely(lambda steps: costs.Block(steps, is_late=True), 24)
