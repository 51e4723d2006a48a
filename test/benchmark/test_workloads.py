"""The laboratory's workloads do their work, and say so when the engine does not."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import queue
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import step_records

from lab import contest, history, models, run, sessions, worker
from lab.anchor import Anchor
from lab.cases import CASES, QUESTIONS, WARM_UP_LEN, Case, Setup
from lab.metrics import Round, SmallerBatch, Step, WorkNotDone
from lab.remote import Remote, RemoteError
from lab.sessions import Gate, Probe, Session, _MixedRound
from lab.workloads import once_more
from processes import end_by, is_alive

REPO_ROOT = Path(__file__).resolve().parents[2]

# What a worker's interpreter runs first: the defect of #21840 put into, or taken out of, whatever
# package is installed. A filter leaves the flag, as upstream's does: one that sets it mends the defect.
PATCH = """
import sglang.srt.managers.schedule_batch as module

merge_batch = module.ScheduleBatch.merge_batch
filter_batch = module.ScheduleBatch.filter_batch

def merge(self, other):
    before = self.is_prefill_only, other.is_prefill_only
    merge_batch(self, other)
    self.is_prefill_only = {flag}

def filter(self, *args, **kwargs):
    before = self.is_prefill_only
    filter_batch(self, *args, **kwargs)
    self.is_prefill_only = before

module.ScheduleBatch.merge_batch = merge
module.ScheduleBatch.filter_batch = filter
"""
BROKEN = PATCH.format(flag="before[0]")
WHOLE = PATCH.format(flag="all(before)")


def patched(folder: Path, text: str, environment: str = "") -> str:
    """A folder that goes to the front of a worker's path."""
    (folder / "sitecustomize.py").write_text(f"import os\n{environment}\n{text}")
    return str(folder)


@pytest.fixture
def children() -> Any:
    """Fails the test if it leaves processes behind."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left


# --- Sessions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
@pytest.mark.parametrize("shape", ["none", "chain", "tree"])
def test_a_round_of_decoding(shape: str, overlap: bool, tmp_path: Path) -> None:
    setup = Setup("tiny", overlap=overlap, speculative=shape, max_running_requests=4)
    case = Case("test", setup, batch_size=3, output_len=6, penalties=True)
    with Session(setup, tmp_path) as session:
        for _ in range(2):
            found = session.run_round(case)
            assert all(math.isfinite(value) for value in found.values())
            assert 0 < found["forward_occupancy"] <= 1
            assert found["tokens_per_s"] > 0
            assert (shape == "none") == (found["accepted_length"] == 1 and "draft_ms" not in found)


def test_a_round_of_the_host_alone(tmp_path: Path) -> None:
    setup = Setup("tiny", forwards="none", max_running_requests=4)
    with Session(setup, tmp_path) as session:
        found = session.run_round(Case("test", setup, "scheduler", batch_size=3, output_len=12))
    assert found.keys() == {"host_us_per_step", "prepare_us", "merge_us", "filter_us"}
    assert 0 < found["prepare_us"] < found["host_us_per_step"] < 1e5


def test_a_round_holds_only_its_own_steps(tmp_path: Path) -> None:
    setup = Setup("tiny")
    with Session(setup, tmp_path) as session:
        params = {"max_new_tokens": 5, "ignore_eos": True}
        rounds = [session.generate([[3, 4, 5]] * 2, params) for _ in range(3)]
    for round_ in rounds:
        assert sum(s.record.num_tokens for s in round_.steps) == 10
        assert all(round_.started <= s.delivered for s in round_.steps)
        assert round_.started < round_.ended


def test_lost_slots_are_no_work_done(tmp_path: Path) -> None:
    setup = Setup("tiny")
    case = Case("test", setup, batch_size=1, output_len=3)
    with Session(setup, tmp_path) as session:
        allocator = session.engine.scheduler.token_to_kv_pool_allocator
        session.engine.scheduler.check_idle = session.engine.scheduler.check_busy = False
        free = allocator.available_size
        allocator.available_size = lambda: free() - 1
        with pytest.raises(WorkNotDone, match="KV slots"):
            session.run_round(case)


def test_penalties_that_are_left_behind_are_no_work_done(tmp_path: Path) -> None:
    setup = Setup("tiny")
    case = Case("test", setup, batch_size=2, output_len=3, penalties=True)
    with Session(setup, tmp_path) as session:
        session.engine.scheduler.check_idle = session.engine.scheduler.check_busy = False
        session.engine.scheduler.req_to_token_pool.on_free = lambda row: None
        with pytest.raises(WorkNotDone, match="2 requests have penalties"):
            session.run_round(case)


def test_an_engine_that_died_behind_its_last_round_is_noticed(tmp_path: Path) -> None:
    setup = Setup("tiny")
    case = Case("test", setup, batch_size=1, output_len=3)
    session = Session(setup, tmp_path)
    assert session.run_round(case)["us_per_token"] > 0

    def find_leak() -> None:
        raise RuntimeError("a leak detected too late")

    session.engine.scheduler.self_check_during_idle = find_leak
    with contextlib.suppress(RuntimeError):  # the idle pass of the round may have come late
        session.engine.generate(input_ids=[[3, 4]], sampling_params={"max_new_tokens": 1})
    session.engine._thread.join(timeout=30)
    with pytest.raises(RuntimeError, match="the engine has died: a leak detected too late"):
        session.close()


def test_the_largest_batch_is_one_batch(tmp_path: Path) -> None:
    """With the default number of KV slots it was one of 135, and less."""
    case = CASES["scheduler/b256"]
    with Session(case.setup, tmp_path) as session:
        round_ = session._generate_checked(case)
    sizes = [step.record.batch_size for step in round_.steps if step.decodes]
    assert sizes == [256] * 127
    small = dataclasses.replace(case.setup, max_total_tokens=None)
    with (
        Session(small, tmp_path) as session,
        pytest.raises(WorkNotDone, match=r"was retracted|127 of 256 were wanted"),
    ):
        session._generate_checked(case)


def test_an_engine_without_penalties_measures_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup("tiny", max_running_requests=4)
    case = Case("test", setup, batch_size=2, output_len=6, penalties=True)
    monkeypatch.setattr("lab.metrics.has_penalties", lambda scheduler: False)
    with Session(setup, tmp_path) as session:
        session.run_round(dataclasses.replace(case, penalties=False))
        with pytest.raises(WorkNotDone, match="requests with penalties had none"):
            session.run_round(case)


def test_an_engine_that_does_not_speculate_measures_no_speculation(tmp_path: Path) -> None:
    setup = Setup("tiny", speculative="chain", max_running_requests=4)
    case = Case("test", setup, batch_size=2, output_len=6)
    with (
        Session(setup, tmp_path) as session,
        Session(Setup("tiny", max_running_requests=4), tmp_path) as plain,
    ):
        session.generate = plain.generate
        with pytest.raises(WorkNotDone, match="was to be speculated for"):
            session.run_round(case)


def test_penalties_that_change_nothing_are_no_penalties(tmp_path: Path) -> None:
    setup = Setup("tiny", max_running_requests=4)
    case = Case("test", setup, batch_size=2, output_len=64, penalties=True)
    nothing = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    with Session(setup, tmp_path) as session:
        session.check_penalties(case)
        generate, asked = session.generate, []

        def without_penalties(prompts: list[list[int]], params: dict[str, Any]) -> Round:
            asked.append(params)
            return generate(prompts, params | nothing)

        session.generate = without_penalties
        with pytest.raises(WorkNotDone, match="penalties have changed no token"):
            session.check_penalties(case)
    # A bias, which is no penalty, is the same in both.
    strong, plain = asked
    assert strong["logit_bias"] == plain["logit_bias"] != {}
    assert {name for name in strong if strong[name] != plain[name]} == nothing.keys()


def test_a_round_whose_requests_came_late_is_run_once_more(tmp_path: Path) -> None:
    setup = Setup("tiny", max_running_requests=4)
    case = Case("test", setup, batch_size=2, output_len=8)
    with Session(setup, tmp_path) as session:
        generate, late = session.generate, iter([1, 0, 0, 1, 1])

        def sometimes_late(prompts: list[list[int]], params: dict[str, Any]) -> Round:
            round_ = generate(prompts, params)
            decodes = [step for step in round_.steps if step.decodes]
            for step in decodes:  # whatever this machine did
                step.record.batch_size = 2
            if next(late):
                decodes[0].record.batch_size = 1
            return round_

        session.generate = sometimes_late
        asked: list[int] = []

        def run() -> dict[str, float]:
            asked.append(1)
            return session.run_round(case)

        assert once_more(run)["us_per_token"] > 0 and len(asked) == 2
        assert once_more(run)["us_per_token"] > 0 and len(asked) == 3
        with pytest.raises(SmallerBatch, match="had 1 to 2 requests; 7 of 2 were wanted"):
            once_more(run)
        assert len(asked) == 5


def test_what_a_round_that_is_run_once_more_took_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the one took that stands aside."""
    clock = iter([0.0, 100.0, 101.0])
    monkeypatch.setattr(contest.time, "process_time", lambda: next(clock))
    outcomes: list[Any] = [SmallerBatch("late"), {"us_per_token": 5.0}]

    class Answers:
        def run_round(self, case: Case) -> dict[str, float]:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    case = contest._shortened(CASES["decode/tiny-b8"], "decode/tiny-b8")
    sessions_ = {case.engine_key: Answers()}
    found = contest._round(sessions_, tmp_path, "decode/tiny-b8", warm_up=False)["metrics"]
    assert found["cpu_us_per_token"] == 1e6 / (8 * 32)


def test_drafts_that_a_warm_up_is_too_short_for(tmp_path: Path) -> None:
    """In its few tokens it may be that none is accepted; in a round's that is a failure."""
    setup = Setup("real", speculative="chain")
    case = Case("test", setup, batch_size=1, output_len=24)
    for length, is_enough in ((WARM_UP_LEN, False), (24, True)):
        results = [step_records.result(4, [5] * length, spec_verify_ct=length - 1)]
        steps = [
            Step(1.0, step_records.record(i, "DECODE", 1, 1, forward_start=0.0, forward_end=1.0))
            for i in range(length)
        ]
        round_ = Round(0.0, steps=steps, results=results)
        asked = dataclasses.replace(case, output_len=length)
        if is_enough:
            with pytest.raises(WorkNotDone, match="no token of any draft was accepted"):
                sessions.check_round(round_, asked, [4])
        else:
            sessions.check_round(round_, asked, [4])


@pytest.mark.parametrize(("length", "ended"), [(96, [96] * 5 + [40] * 3), (8, [8] * 5 + [3])])
def test_who_is_unfinished_goes_by_the_round_under_way(
    length: int, ended: list[int], tmp_path: Path
) -> None:
    """A stall is mostly in the warm-up, which is shorter."""
    case = CASES["mixed/tiny-b8"]
    with Session(case.setup, tmp_path) as session:
        assert session.unfinished(case) == 8
        session._mixed_round = _MixedRound(session, dataclasses.replace(case, output_len=length))
        items = {i: {"output_ids": [5] * count} for i, count in enumerate(ended)}
        session._mixed_round.final = items
        assert session.unfinished(case) == 3


def test_a_scoring_request_that_waits_for_another_one_has_come(tmp_path: Path) -> None:
    """Its latency begins when it was to be made, and not when the one before it was done."""
    setup = Setup("tiny", chunked_prefill_size=64)
    with Session(setup, tmp_path) as session:
        generate, wanted = session.engine.generate, queue.SimpleQueue()
        round_ = _MixedRound(session, Case("test", setup, "mixed", output_len=12))

        def slow(**arguments: Any) -> Any:
            time.sleep(0.2)
            return generate(**arguments)

        session.engine.generate = slow
        for _ in range(3):
            round_._want_score(wanted)
        wanted.put(None)
        errors: list[BaseException] = []
        round_._score(wanted, errors)
    assert errors == [] and len(round_.scores) == 3
    # What the first one itself was delayed by is no wait for another.
    _, second, third = round_.score_latencies
    assert second > 0.2 and third > 0.4


def test_a_probe_waits_for_the_last_forward() -> None:
    probe = Probe()
    assert probe.take(lambda: 0) == []
    with pytest.raises(WorkNotDone, match="forward 1 was started and never reported"):
        probe.take(lambda: 1, timeout=0.05)


def test_a_gate_holds_one_prefill_and_only_when_armed() -> None:
    import threading

    gate = Gate()
    gate.pass_through()  # not armed
    gate.arm()
    passed = threading.Event()

    def prefill() -> None:
        gate.pass_through()
        passed.set()

    thread = threading.Thread(target=prefill, daemon=True)
    thread.start()
    assert gate.wait_until_reached(10)
    assert not passed.wait(0.05)
    gate.pass_through()  # a second one is not held up
    gate.open()
    assert passed.wait(10)
    thread.join()


def test_anchors_take_time_and_are_named() -> None:
    assert Anchor("host")() > 0
    with pytest.raises(ValueError, match="kind must be one of"):
        Anchor("disk")


def test_the_real_models_prompts_are_all_different(model_or_skip: str) -> None:
    prompts = models.chat_prompts(model_or_skip, 20)
    assert len({tuple(p) for p in prompts}) == 20
    assert all(8 < len(p) < 64 for p in prompts)


@pytest.fixture
def model_or_skip() -> str:
    try:
        return models.real_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAB_MODEL", str(tmp_path))
    monkeypatch.setenv("LAB_DRAFT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make model"):
        models.real_model()
    with pytest.raises(models.Unsupported, match="no EAGLE head"):
        models.real_draft()


# --- Processes that answer ---------------------------------------------------------------------


def test_an_engine_that_serves(children: None, tmp_path: Path) -> None:
    setup = json.dumps({"model": "tiny", "speculative": "chain"})
    with Remote("lab.serve", ["session", "--setup", setup], threads=1) as side:
        prompts = [[3, 4, 5], [6, 7, 8]]
        answers = [side.ask(batch_size=2, output_len=5, prompts=prompts) for _ in range(2)]
        for found in answers:
            assert [len(tokens) for tokens in found["tokens"]] == [5, 5]
            assert found["metrics"]["tokens_per_s"] > 0 and found["seconds"] > 0
        assert answers[0]["tokens"] == answers[1]["tokens"]
        with pytest.raises(RemoteError, match="KeyError"):
            side.ask(batch_size=2)
        # It goes on serving, with prompts of its own.
        assert len(side.ask(batch_size=3, output_len=2)["tokens"]) == 3


def test_a_process_that_cannot_answer_says_why(children: None) -> None:
    options = ["session", "--setup", '{"model": 1, "colour": 2}']
    with (
        Remote("lab.serve", options, threads=1) as side,
        pytest.raises(RemoteError, match="colour"),
    ):
        side.ask(batch_size=1, output_len=2)


# --- Workers ----------------------------------------------------------------------------------


def test_a_worker_measures(children: None) -> None:
    events: list[run.Event] = []
    found = run.run_cases(["decode/tiny-b8"], rounds=2, processes=1, on_event=events.append)
    result = found["decode/tiny-b8"]
    assert result["outcome"] == "done", result
    assert Path(result["engine"]).name == "sglang"
    assert {"us_per_token", "us_per_token_ratio", "anchor_ms"} <= result["metrics"].keys()
    assert len(result["rounds"]) == 2 and len(result["anchors"]) == 3
    assert all(run_.keys() == {"host"} and run_["host"] > 0 for run_ in result["anchors"])
    assert [e["what"] for e in events if e["event"] == "progress"][-1] == "measuring"
    assert json.loads(json.dumps(found)) == found


@pytest.mark.timeout(300)
def test_mixed_work_is_done_where_the_flag_is_merged(children: None, tmp_path: Path) -> None:
    found = run.run_cases(
        ["mixed/tiny-b8"], rounds=1, processes=1, package=patched(tmp_path, WHOLE)
    )
    result = found["mixed/tiny-b8"]
    assert result["outcome"] == "done", result
    wanted = {"us_per_token", "itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "score_p50_ms"}
    assert wanted | {f"{name}_ratio" for name in wanted} <= result["metrics"].keys()


def test_mixed_work_kills_an_engine_that_loses_the_flag(children: None, tmp_path: Path) -> None:
    found = run.run_cases(
        ["mixed/tiny-b8"], rounds=1, processes=1, package=patched(tmp_path, BROKEN)
    )
    result = found["mixed/tiny-b8"]
    assert result["outcome"] == "stalls", result
    assert "leak" in result["detail"]
    assert result["unfinished"] == CASES["mixed/tiny-b8"].batch_size


def test_mixed_work_stalls_where_no_check_ends_it(children: None, tmp_path: Path) -> None:
    unchecked = 'os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "0"'
    package = patched(tmp_path, BROKEN, unchecked)
    found = run.run_cases(["mixed/tiny-b8"], rounds=1, processes=1, stall_s=5, package=package)
    result = found["mixed/tiny-b8"]
    assert result["outcome"] == "stalls", result
    assert "no token for 5 s" in result["detail"]


def test_a_worker_that_dies_is_a_failure_and_the_next_case_gets_another(
    children: None, tmp_path: Path
) -> None:
    package = patched(tmp_path, "import sys; sys.exit('nothing works today')")
    found = run.run_cases(
        ["decode/tiny-b8", "decode/tiny-b32"], rounds=1, processes=1, package=package
    )
    assert [r["outcome"] for r in found.values()] == ["failed", "failed"]


def test_a_case_that_fails_leaves_the_others_alone(children: None, tmp_path: Path) -> None:
    package = patched(
        tmp_path,
        "import sglang.srt.model_executor.model_runner as module\n"
        "sample = module.ModelRunner.sample\n"
        "def failing(self, output, batch):\n"
        "    if batch.batch_size == 32: raise RuntimeError('no sample')\n"
        "    return sample(self, output, batch)\n"
        "module.ModelRunner.sample = failing\n",
    )
    names = ["decode/tiny-b32", "decode/tiny-b8"]
    found = run.run_cases(names, rounds=1, processes=1, package=package)
    assert found["decode/tiny-b32"]["outcome"] == "failed"
    assert "no sample" in found["decode/tiny-b32"]["detail"]
    assert found["decode/tiny-b8"]["outcome"] == "done"


def test_what_there_is_no_time_for_is_not_reached_and_ended(children: None, tmp_path: Path) -> None:
    package = patched(tmp_path, "import time; time.sleep(60)")
    events: list[run.Event] = []
    started = time.monotonic()
    found = run.run_cases(
        ["decode/tiny-b8", "decode/tiny-b32", "scheduler/b8"],
        processes=1,
        package=package,
        seconds=1.0,
        on_event=events.append,
    )
    assert time.monotonic() - started < 20
    assert {r["outcome"] for r in found.values()} == {"not reached"}
    assert [e["case"] for e in events if e["event"] == "result"] == list(found)


def test_an_engine_without_the_seams_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sglang

    class Old:
        def __init__(self, model_path: str) -> None:
            pass

    monkeypatch.setattr(sglang, "Engine", Old)
    sink = io.StringIO()
    worker.measure_all(["decode/tiny-b8"], 1, worker.Events(sink))
    last = json.loads(sink.getvalue().splitlines()[-1])
    assert last["outcome"] == "unsupported"
    with pytest.raises(NotImplementedError, match="observer"):
        history.require({"tiny-b8": last}, "tiny-b8")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_whoever_ends_it_is_left_no_traceback_folder_or_worker(
    tmp_path: Path, number: int, status: int
) -> None:
    package, scratch = tmp_path / "package", tmp_path / "scratch"
    (package / "sglang").mkdir(parents=True)
    (package / "sglang" / "__init__.py").touch()
    scratch.mkdir()
    told = tmp_path / "pid"
    # A worker that has something for a time, and does not come to an end.
    patched(
        package,
        "import tempfile, time\n"
        "open(tempfile.mkdtemp(prefix='lab-') + '/file', 'w').close()\n"
        f"open({str(told)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(told)!r} + '.new', {str(told)!r})\n"
        "time.sleep(60)\n",
    )

    arguments = ["-m", "lab.run", "decode/tiny-b8", "--package", str(package)]
    found = end_by(number, arguments, told, scratch, REPO_ROOT / "benchmark")
    assert found.status == status and "Traceback" not in found.said
    assert list(scratch.iterdir()) == []
    assert not is_alive(int(told.read_text()))


def test_unknown_cases_are_named() -> None:
    with pytest.raises(ValueError, match="no case 'decode/huge'"):
        run.run_cases(["decode/huge"])
    with pytest.raises(ValueError, match="several setups"):
        names = ["decode/tiny-b8", "mixed/tiny-b8"]
        worker.measure_all(names, 1, worker.Events(io.StringIO()))


def test_the_table_has_all_of_each_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole names, and each ratio beside its time."""
    name = "decode/tiny-b8-chain-penalties-normal"
    metrics = {"us_per_token": 8.0, "accepted_length": 2.5, "us_per_token_ratio": 0.00194}
    results = {
        name: {"case": name, "outcome": "done", "metrics": metrics},
        "mixed/tiny-b8": {"case": "mixed/tiny-b8", "outcome": "stalls", "detail": "no token"},
    }
    monkeypatch.setattr(run, "run_cases", lambda *_, **__: results)
    assert run.main(list(results)) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines if len(line) == 4] == [
        [name, "us per token", "8.000", "0.001940"],
        ["", "accepted length", "2.500", ""],
        ["mixed/tiny-b8", "stalls", "", ""],
    ]


def test_processes_of_a_case_are_apart_and_its_rounds_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def fake(names: list[str], *args: Any) -> dict[str, Any]:
        asked.extend(names)
        args[-1]({"event": "progress", "case": names[0]})
        found = {}
        for name in names:
            outcome = "stalls" if name == "mixed/tiny-b8" else "done"
            rounds = [{"us_per_token": 10.0 * len(asked) + i} for i in range(2)]
            found[name] = {"case": name, "outcome": outcome, "rounds": rounds, "anchors": [{}] * 3}
            args[-1]({"event": "result", **found[name]})
        return found

    monkeypatch.setattr(run, "_run_worker", fake)
    events: list[run.Event] = []
    names = ["decode/tiny-b8", "mixed/tiny-b8", "scheduler/b8"]
    found = run.run_cases(names, on_event=events.append)
    # One that stalls does so again.
    assert asked == names + 2 * ["decode/tiny-b8", "scheduler/b8"]
    assert [r["us_per_token"] for r in found["decode/tiny-b8"]["rounds"]] == [
        10,
        11,
        40,
        41,
        60,
        61,
    ]
    assert found["decode/tiny-b8"]["metrics"]["us_per_token"] == 40.5
    assert found["decode/tiny-b8"]["processes"] == 3 and len(found["scheduler/b8"]["anchors"]) == 9
    assert found["mixed/tiny-b8"]["outcome"] == "stalls"
    # Each case ends once.
    ended = [event["case"] for event in events if event["event"] == "result"]
    assert sorted(ended) == sorted(names) and ended[0] == "mixed/tiny-b8"
    assert sum(event["event"] == "progress" for event in events) == 7


def test_cases_of_one_setup_share_an_engine() -> None:
    groups = run.by_setup(CASES)
    assert sorted(name for group in groups for name in group) == sorted(CASES)
    for group in groups:
        assert len({CASES[name].setup for name in group}) == 1
    assert len(groups) == len({case.engine_key for case in CASES.values()})


# --- Along history ----------------------------------------------------------------------------


def test_what_asv_gets_of_each_outcome() -> None:
    results = {
        "good": {
            "outcome": "done",
            "processes": 3,
            "rounds": [
                {"us": us, "n": 1234567, "stalls_per_step": us} for us in (123.456789, 125, 124)
            ],
        },
        "stuck": {"outcome": "stalls", "detail": "no token", "unfinished": 3},
        "bad": {"outcome": "failed", "detail": "it broke"},
    }
    samples = {"samples": [123.46, 125.0, 124.0], "number": 1}
    assert history.value(results, "good", "us") == samples
    # A count is exact.
    assert history.value(results, "good", "n") == 1234567
    # Samples are divided among processes, so they are given of the usual number of these only.
    few = {"good": results["good"] | {"processes": 1}}
    assert history.value(few, "good", "us") == 124.0
    del results["good"]["rounds"][1]["stalls_per_step"]
    # What this device does not have, and what is gone or called otherwise.
    assert math.isnan(history.value(results, "good", "stalls_per_step"))
    with pytest.raises(RuntimeError, match="not every round of good has a metric uss"):
        history.value(results, "good", "uss")
    assert math.isnan(history.value(results, "stuck", "us"))
    assert (history.stalled(results, "good"), history.stalled(results, "stuck")) == (0.0, 1.0)
    assert (history.unfinished(results, "good"), history.unfinished(results, "stuck")) == (0, 3)
    for read in (
        lambda: history.value(results, "bad", "x"),
        lambda: history.stalled(results, "bad"),
    ):
        with pytest.raises(RuntimeError, match="it broke"):
            read()
    for case in results:
        history.require(results, case)  # all of them have the API


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(history.ROUNDS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"LAB_ROUNDS must be a whole number .* got '{text}'"):
        history.measure("mixed")


def test_what_does_not_go_on_stalls_only_where_that_is_the_question() -> None:
    died = "the engine has died: "
    for error in (worker.Stalled("no token"), RuntimeError(f"{died}memory leak detected: 3 of 4")):
        assert worker._outcome(CASES["mixed/tiny-b8"], error, 8) == "stalls"
        # They had all their tokens: whatever is left, it is not they.
        assert worker._outcome(CASES["mixed/tiny-b8"], error, 0) == "failed"
        for name in ("decode/tiny-b8", "penalties/plain-b64", "transfers/plain"):
            assert worker._outcome(CASES[name], error, 8) == "failed"
    for text in ("something else", f"{died}list index out of range"):
        assert worker._outcome(CASES["mixed/tiny-b8"], RuntimeError(text), 8) == "failed"


def test_events_reach_whoever_shows_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "events"
    monkeypatch.setenv(history.EVENTS_VARIABLE, str(path))
    monkeypatch.setenv(history.ROUNDS_VARIABLE, "2")
    monkeypatch.delenv(history.PROCESSES_VARIABLE, raising=False)
    seen: dict[str, Any] = {}

    def fake(names: list[str], **options: Any) -> dict[str, Any]:
        seen.update(names=names, rounds=options["rounds"], processes=options["processes"])
        options["on_event"]({"event": "result", "case": names[0], "outcome": "done", "rounds": [1]})
        return {name: {"outcome": "done"} for name in names}

    monkeypatch.setattr(history, "run_cases", fake)
    found = history.measure("mixed")
    names = [f"mixed/{c.name}" for c in QUESTIONS["mixed"] if c.quick]
    assert seen == {"names": names, "rounds": 2, "processes": None}
    assert list(found) == history.cases("mixed")
    event = json.loads(path.read_text())
    assert event["case"] == "mixed/tiny-b8" and "rounds" not in event


def test_an_engine_that_kept_memory_of_another_case_counts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cases of one setup, a small one first: the numbers are those of a case alone."""
    case = CASES["memory/plain-penalties"]
    small = dataclasses.replace(case, batch_size=1)
    monkeypatch.setitem(CASES, "memory/small", small)
    assert run.by_setup(["memory/small", "memory/plain-penalties"]) == [
        ["memory/small"],
        ["memory/plain-penalties"],
    ]
    found = []
    for names in (["memory/plain-penalties"], ["memory/small", "memory/plain-penalties"]):
        sessions: dict[Any, Any] = {}
        scratch = tmp_path / str(len(names))
        scratch.mkdir()
        for name in names:
            last = contest._round(sessions, scratch, name, warm_up=False)["metrics"]
        for session in sessions.values():
            session.close()
        found.append(last)
    assert found[0] == found[1]
    assert found[0]["peak_step_bytes"] > 1e6
