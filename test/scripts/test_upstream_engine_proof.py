"""Proofs with the whole Engine, as far as no release is needed: processes, verdicts, comparisons."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from processes import is_alive
from upstream import engine_proof
from upstream.engine_proof import Ended, EngineError, compare, judge_merge, run_session

REPO = Path(__file__).resolve().parents[2]

# ---- processes

# Starts a child that is hard to end, and one in a group of its own, tells their numbers, and goes on as
# the test says.
FAMILY = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
apart = "import os, time; os.setpgid(0, 0); print('apart', flush=True); time.sleep(600)"
first = subprocess.Popen([sys.executable, "-c", stubborn])
second = subprocess.Popen([sys.executable, "-c", apart], stdout=subprocess.PIPE)
second.stdout.readline()
print("family", os.getpid(), first.pid, second.pid, flush=True)
"""
ENDINGS = {
    "stays": ("time.sleep(600)", None, 4.0),
    "dies by its own hand": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, 60.0),
    "leaves its children": ("os._exit(3)", 3, 60.0),
}


def family(log: Path) -> list[int]:
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("family")]
    return [int(pid) for pid in line.split()[1:]]


@pytest.mark.parametrize(("ending", "returncode", "limit_s"), ENDINGS.values(), ids=ENDINGS)
def test_no_process_of_a_session_survives(
    ending: str, returncode: int | None, limit_s: float, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    ended = run_session([sys.executable, "-c", FAMILY + ending], os.environ, log, limit_s)
    assert ended.returncode == returncode
    assert not [pid for pid in family(log) if is_alive(pid)]
    assert (ended.seconds >= limit_s) == (returncode is None)


def test_no_process_survives_an_interruption(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def interrupt() -> None:
        while "family" not in (log.read_text() if log.exists() else ""):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    command = [sys.executable, "-c", FAMILY + "time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt):
        run_session(command, os.environ, log, limit_s=60)
    assert not [pid for pid in family(log) if is_alive(pid)]


def test_a_short_command_ends_as_it_ends_and_is_logged(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['X']); print('no', file=sys.stderr); sys.exit(4)"
    environment = {**os.environ, "X": "yes"}
    ended = run_session([sys.executable, "-c", script], environment, tmp_path / "log", limit_s=60)
    assert ended.returncode == 4
    assert sorted((tmp_path / "log").read_text().split()) == ["no", "yes"]


# ---- what is asked


def python_that(folder: Path, body: str) -> Path:
    """A stand-in for an interpreter, which runs `body` with the command line in `sys.argv`."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    python.chmod(0o755)
    return python


def test_an_engine_finds_its_package_and_none_of_the_callers_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "0")
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    python = python_that(tmp_path, "print(json.dumps([sys.argv, dict(os.environ)])); sys.exit(1)")
    log = tmp_path / "logs" / "merge.log"
    with pytest.raises(EngineError, match="ended with 1 before it answered"):
        engine_proof.merge_proof(tmp_path / "package", python, log)
    argv, environment = json.loads(log.read_text())
    assert argv[1:6] == ["-m", "lab.upstream_engine", "merge", "--engine", "upstream"]
    assert environment["PYTHONPATH"].split(os.pathsep) == [
        str(tmp_path / "package"),
        str(REPO / "benchmark"),
    ]
    settings = {k: v for k, v in environment.items() if k.startswith("SGLANG_")}
    assert settings == {} and environment["PYTHONSAFEPATH"] == "1"
    # What it left behind is gone.
    assert not Path(environment["TMPDIR"]).exists()


def test_an_engine_that_does_not_start_in_time_proves_nothing(tmp_path: Path) -> None:
    python = python_that(tmp_path, "print('loading'); time.sleep(600)")
    with pytest.raises(EngineError, match=r"was stopped before it answered:\nloading"):
        engine_proof.merge_proof(tmp_path, python, tmp_path / "log", limit_s=1.0)


# ---- verdicts on #21840


def prefill(tokens: int, running: int) -> str:
    return (
        f"[2026-01-01 00:00:00] Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, "
        f"token usage: 0.00, #running-req: {running}, #queue-req: 0, cpu graph: False\n"
    )


ALONE = prefill(6, 0)
ROUND = "upstream_engine: round 1\n"
MET = ROUND + prefill(1200, 0) + prefill(6, 1)
MISSED = ROUND + prefill(1200, 0) + prefill(6, 0)
DEATH = (
    "[2026-01-01 00:00:01] Scheduler hit an exception: Traceback (most recent call last):\n"
    "ValueError: token_to_kv_pool_allocator memory leak detected! available_size=4090\n"
)
WARNING = "[2026-01-01 00:00:01] token_to_kv_pool_allocator memory leak detected! x=1\n"
KILLED = Ended(-9, 25.0)
DONE = Ended(0, 40.0)


def answers(**changes: Any) -> dict[str, Any]:
    answer = {"text": " Paris.", "output_ids": [7042, 30]}
    told = {"alone": answer, "rounds": [answer, answer], "again": answer, "hangs": False}
    told |= {"pools": {"used_tokens": 0, "running": 0, "flushed": True}}
    return told | changes


def test_finishes() -> None:
    outcome = judge_merge(answers(), ALONE + MET, DONE)
    assert (outcome.outcome, outcome.text, outcome.seconds) == ("finishes", " Paris.", 40.0)
    assert outcome.same_text and outcome.pools_whole
    assert "#new-token: 6" in outcome.quote and "#running-req: 1" in outcome.quote


def test_dies() -> None:
    outcome = judge_merge(None, ALONE + MET + DEATH, KILLED)
    assert outcome.outcome == "dies"
    told, leak = outcome.quote.splitlines()
    assert "#running-req: 1" in told
    assert leak == "token_to_kv_pool_allocator memory leak detected! available_size=4090"
    assert not outcome.pools_whole


def test_hangs_if_the_engine_says_so() -> None:
    said = "upstream_engine: no answer within 45 s\n"
    told = {"alone": answers()["alone"], "rounds": [], "hangs": True}
    outcome = judge_merge(told, ALONE + MET + WARNING + said, DONE)
    assert outcome.outcome == "hangs"
    assert [line.split()[-1] for line in outcome.quote.splitlines()] == ["False", "x=1", "s"]


def test_hangs_if_it_has_to_be_stopped_within_a_round() -> None:
    outcome = judge_merge(None, ALONE + ROUND, Ended(None, 300.0))
    assert (outcome.outcome, outcome.quote) == ("hangs", "stopped after 300 s")


@pytest.mark.parametrize(
    "printed",
    [
        MISSED,
        # Some other request runs beside the scoring one, so its flag is not the batch's.
        ROUND + prefill(1200, 1) + prefill(6, 2),
        # The scoring prompt comes last.
        ROUND + prefill(6, 0) + prefill(1200, 1),
        "",
    ],
)
def test_not_triggered(printed: str) -> None:
    outcome = judge_merge(answers(), ALONE + printed, DONE)
    assert outcome.outcome == "not triggered"
    assert outcome.same_text and outcome.pools_whole


def test_one_round_that_triggers_is_enough() -> None:
    assert judge_merge(answers(), ALONE + MISSED + MET, DONE).outcome == "finishes"


@pytest.mark.parametrize(
    ("pools", "printed"),
    [
        ({"used_tokens": 6, "running": 0, "flushed": True}, MET),
        ({"used_tokens": 0, "running": 1, "flushed": False}, MET),
        ({"used_tokens": 0, "running": 0, "flushed": True}, MET + WARNING),
    ],
)
def test_pools_that_are_not_whole(pools: dict[str, Any], printed: str) -> None:
    assert not judge_merge(answers(pools=pools), printed, DONE).pools_whole


@pytest.mark.parametrize("where", ["alone", "again", "rounds"])
def test_a_text_that_is_another_one(where: str) -> None:
    other = {"text": " London.", "output_ids": [1, 2]}
    told = answers(**{where: [answers()["alone"], other] if where == "rounds" else other})
    assert not judge_merge(told, MET, DONE).same_text


def test_an_engine_that_breaks_in_another_way_proves_nothing() -> None:
    with pytest.raises(EngineError, match=r"ended with -9 .*\n.*rope_parameters"):
        judge_merge(None, "AttributeError: no attribute 'rope_parameters'", KILLED)


# ---- texts


def text(tokens: list[int], runner_up: int = 9, margin: float = 1.0) -> dict[str, Any]:
    """A continuation whose second best token is `runner_up` everywhere."""
    return {
        "input_ids": [1, 2, 3],
        "logprobs": [-2.0, -3.0],
        "text": "",
        "output_ids": tokens,
        "chosen": [-0.5] * len(tokens),
        "best": [[[-0.5, token], [-0.5 - margin, runner_up]] for token in tokens],
    }


def asked(*texts: dict[str, Any]) -> dict[str, Any]:
    return {"texts": list(texts), "scoring": {"input_ids": [4, 5], "logprobs": [-1.0]}}


def test_the_same_texts() -> None:
    outcome = compare(asked(text([5, 6]), text([7, 8])), asked(text([5, 6]), text([7, 8])), 2)
    assert outcome.agrees
    assert (outcome.prompts, outcome.compared, outcome.left_out) == (2, 4, 0)
    assert (outcome.scored, outcome.input_gap, outcome.output_gap) == (1, 0.0, 0.0)
    assert len(outcome.lines()) == 2


def test_a_near_tie_is_told_and_what_is_behind_it_left_out() -> None:
    ours, theirs = text([5, 6, 7, 8]), text([5, 9, 7, 8])
    ours["best"][1] = [[-0.7, 6], [-0.7004, 9]]
    theirs["best"][1] = [[-0.7, 9], [-0.7001, 6]]
    # Behind the difference nothing counts.
    theirs["chosen"][2] = -8.0
    outcome = compare(asked(ours), asked(theirs), 4)
    assert outcome.agrees
    assert (outcome.compared, outcome.left_out, outcome.output_gap) == (1, 3, 0.0)
    (difference,) = outcome.differences
    assert (difference.position, difference.ours, difference.theirs) == (1, 6, 9)
    assert difference.our_margin == pytest.approx(4e-4)
    assert difference.their_margin == pytest.approx(1e-4)
    assert outcome.lines()[-1].endswith("6 here, 9 there; margins 4.0e-04 and 1.0e-04: a near-tie")


@pytest.mark.parametrize(
    ("our_best", "their_best"),
    [
        ([[-0.7, 6], [-0.9, 9]], [[-0.7, 9], [-0.7001, 6]]),
        ([[-0.7, 6], [-0.7001, 9]], [[-0.7, 9], [-0.9, 6]]),
        # A tie, but with another token.
        ([[-0.7, 6], [-0.7, 4]], [[-0.7, 9], [-0.7, 6]]),
    ],
)
def test_a_difference_that_is_no_near_tie(our_best: list[Any], their_best: list[Any]) -> None:
    ours, theirs = text([5, 6]), text([5, 9])
    ours["best"][1], theirs["best"][1] = our_best, their_best
    outcome = compare(asked(ours), asked(theirs), 2)
    assert not outcome.agrees
    assert "NO near-tie" in outcome.lines()[-1]


def test_a_near_tie_at_the_first_token_of_all_is_no_agreement() -> None:
    ours, theirs = text([6, 5]), text([9, 5])
    ours["best"][0], theirs["best"][0] = [[-0.7, 6], [-0.7, 9]], [[-0.7, 9], [-0.7, 6]]
    outcome = compare(asked(ours), asked(theirs), 2)
    assert outcome.differences[0].near_tie and outcome.compared == 0
    assert not outcome.agrees


@pytest.mark.parametrize("key", ["output_ids", "chosen", "best", "logprobs"])
def test_an_answer_that_is_not_whole(key: str) -> None:
    for whole, side in ((text([5, 6]), "theirs"), (text([5, 6]), "ours")):
        short = copy.deepcopy(whole)
        short[key] = short[key][:1]
        both = [asked(whole), asked(short)]
        with pytest.raises(EngineError, match=f"{side}"):
            compare(*(both if side == "theirs" else both[::-1]), 2)
    empty = asked(text([5, 6])) | {"scoring": {"input_ids": [4], "logprobs": []}}
    with pytest.raises(EngineError, match="left logprobs of input tokens out"):
        compare(empty, empty, 2)


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ("chosen", [-0.5, -0.502]),
        ("logprobs", [-2.0, -3.002]),
        ("input_ids", [1, 2, 4]),
        ("chosen", [-0.5, float("nan")]),
        ("logprobs", [float("nan"), -3.0]),
        ("logprobs", [-2.0, float("nan")]),
    ],
)
def test_what_else_has_to_agree(where: str, changed: list[float]) -> None:
    theirs = copy.deepcopy(text([5, 6]))
    assert compare(asked(text([5, 6])), asked(theirs), 2).agrees
    theirs[where] = changed
    assert not compare(asked(text([5, 6])), asked(theirs), 2).agrees


def test_the_scored_text_has_to_agree() -> None:
    theirs = asked(text([5]))
    theirs["scoring"]["logprobs"] = [-1.5]
    outcome = compare(asked(text([5])), theirs, 1)
    assert outcome.input_gap == 0.5
    assert not outcome.agrees


def test_a_leak_without_the_situation_proves_nothing() -> None:
    for printed in (
        ALONE + DEATH,
        ALONE + MISSED + DEATH,
        prefill(1200, 0) + prefill(6, 1) + DEATH,
    ):
        with pytest.raises(EngineError, match="before it answered"):
            judge_merge(None, printed, KILLED)


def test_the_prompts_are_twenty_texts() -> None:
    asked_for = json.loads(engine_proof.PROMPTS.read_text())
    assert len(set(asked_for["prompts"])) == 20
    assert len(asked_for["scored"]) > 400
