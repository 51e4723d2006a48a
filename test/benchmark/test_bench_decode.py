"""``python -m sglang.bench_decode``: its arithmetic, its checks, its command line."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import step_records as records

from lab import metrics as lab_metrics
from sglang import bench_decode
from sglang.bench_decode import Measurement, Workload, WorkNotDone


@pytest.fixture
def plain() -> Measurement:
    return Measurement(0.2, list(records.PLAIN), copy.deepcopy(records.PLAIN_RESULTS), 1.32)


@pytest.fixture
def speculative() -> Measurement:
    results = copy.deepcopy(records.SPECULATIVE_RESULTS)
    return Measurement(1.0, list(records.SPECULATIVE), results, 2.8)


def test_plain_decoding(plain: Measurement) -> None:
    found = bench_decode.decode_metrics(plain)
    assert found["tokens_per_s"] == pytest.approx(4 / 0.3)
    assert found["itl_p50_ms"] == pytest.approx(150)
    assert found["itl_p99_ms"] == pytest.approx(200)
    assert found["accepted_length"] == 1.0
    assert found["forward_occupancy"] == pytest.approx(0.24 / 0.28)
    assert found["host_us_per_step"] == pytest.approx(300)
    assert found["total_tokens_per_s"] == pytest.approx(6 / 1.12)
    assert "draft_ms" not in found


def test_speculative_decoding(speculative: Measurement) -> None:
    found = bench_decode.decode_metrics(speculative)
    assert found["tokens_per_s"] == pytest.approx(5 / 0.7)
    assert found["itl_p50_ms"] == pytest.approx(100)
    assert found["accepted_length"] == pytest.approx(2.5)
    assert found["draft_ms"] == pytest.approx(150)


@pytest.mark.parametrize("which", ["plain", "speculative"])
def test_the_laboratory_finds_the_same(which: str, request: pytest.FixtureRequest) -> None:
    run: Measurement = request.getfixturevalue(which)
    steps = [lab_metrics.Step(t, r) for t, r in run.steps]
    other = lab_metrics.decode_metrics(
        lab_metrics.Round(run.started, run.ended, steps, run.results)
    )
    mine = bench_decode.decode_metrics(run)
    shared = mine.keys() & other.keys()
    assert {"tokens_per_s", "itl_p50_ms", "itl_p99_ms", "forward_occupancy"} <= shared
    for name in shared:
        assert mine[name] == pytest.approx(other[name]), name


def test_no_decode_step_is_no_work(plain: Measurement) -> None:
    plain.steps = plain.steps[:1]
    with pytest.raises(WorkNotDone, match="no step decoded"):
        bench_decode.decode_metrics(plain)


WORKLOAD = Workload(batch_size=2, concurrency=2, input_len=4, output_len=3, penalties=False)


def test_work_that_was_done(plain: Measurement) -> None:
    bench_decode.check_work(plain, WORKLOAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.results[1]["output_ids"].pop(), "request 1"),
        (lambda run: run.results[0]["meta_info"].update(prompt_tokens=9), "request 0"),
        (
            lambda run: run.results[0]["meta_info"].update(finish_reason={"type": "abort"}),
            "request 0: .*abort",
        ),
        (lambda run: run.results[1]["meta_info"].update(retraction_count=1), "retracted"),
        (lambda run: run.steps.pop(1), "4 were wanted|4 tokens; 2 and 6"),
        (lambda run: run.results.pop(), "1 results"),
    ],
)
def test_work_that_was_not_done(plain: Measurement, change: Any, message: str) -> None:
    change(plain)
    with pytest.raises(WorkNotDone, match=message):
        bench_decode.check_work(plain, WORKLOAD)


# --- Arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "--batch-size must be in [1, 2**31), got 0"),
        (["--batch-size", "8", "--concurrency", "4"], "--concurrency 4 can never fill"),
        (["--output-len", "1"], "--output-len must be at least 2"),
        (["--input-len", "0"], "--input-len must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--output-len", "5000"], "context of 4096"),
        (["--overlap", "on", "--disable-overlap-schedule"], "contradict"),
        (["--speculative", "chain"], "needs --speculative-draft-model-path"),
        (["--speculative-draft-model-path", "x"], "needs --speculative chain or tree"),
        (
            ["--speculative", "chain", "--draft-path", "DRAFT", "--speculative-eagle-topk", "2"],
            "has --speculative-eagle-topk 1",
        ),
        (
            ["--speculative", "tree", "--draft-path", "DRAFT", "--speculative-eagle-topk", "1"],
            "above 1",
        ),
        (["--speculative", "tree", "--draft-path", "nowhere"], "draft_model_path"),
        (["--model-path", "nowhere"], "model_path must be a directory that exists"),
        (["--device", "toaster"], "device must be one of"),
        (["--dtype", "float8"], "dtype"),
        (["--max-total-tokens", "0"], "max_total_tokens"),
        (["--json", "no/such/folder/out.json"], "--json must be a file that can be written"),
        (["--json", "."], "--json must be a file that can be written, got '.'"),
        (["--json", ""], "--json must be a file that can be written, got ''"),
        (["--threads", "1000000"], "--threads must be at most 1024, got 1000000"),
        (["--max-total-tokens", str(10**24)], "max_total_tokens"),
        (["--speculative-num-steps", "2"], "--speculative-num-steps needs --speculative"),
        (["--penalties", "some"], "invalid choice"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_loaded(
    arguments: list[str],
    message: str,
    tiny_paths: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_engine(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(bench_decode, "Engine", no_engine)
    model, draft = tiny_paths
    arguments = [draft if word == "DRAFT" else word for word in arguments]
    with pytest.raises(SystemExit) as end:
        bench_decode.main(["--model-path", model, "--load-format", "dummy", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_model_without_weights_is_an_error_that_says_so(
    tiny_paths: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = bench_decode.main(["--model-path", tiny_paths[0]])
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert "safetensors" in capsys.readouterr().err


# --- The whole command ------------------------------------------------------------------------


def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    assert bench_decode.main(arguments) == 0
    streams = capsys.readouterr()
    return streams.out, streams.err


@pytest.mark.parametrize("shape", ["none", "chain", "tree"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_json_of_a_run(
    shape: str, overlap: str, tiny_paths: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, draft = tiny_paths
    arguments = ["--model-path", model, "--load-format", "dummy", "--batch-size", "1", "3"]
    arguments += ["--input-len", "5", "--output-len", "6", "--repeats", "2", "--json", "-"]
    arguments += ["--penalties", "all", "--overlap", overlap, "--speculative", shape]
    if shape != "none":
        arguments += ["--draft-path", draft]
    out, err = call(arguments, capsys)
    document = json.loads(out)
    assert document["about"]["overlap"] == overlap
    assert [entry["batch_size"] for entry in document["results"]] == [1, 3]
    for entry in document["results"]:
        found = entry["metrics"]
        assert len(entry["runs"]) == 2
        assert found["tokens_per_s"] > 0
        assert found["itl_p99_ms"] >= found["itl_p50_ms"] > 0
        assert 0 < found["forward_occupancy"] <= 1
        assert found["accepted_length"] >= 1
        assert ("verify_ms" in found) == (shape != "none")
    assert " steps [" in err  # the bar


def test_waiting_requests_take_the_places_of_those_that_end(
    tiny_paths: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model-path", tiny_paths[0], "--load-format", "dummy", "--repeats", "1"]
    arguments += [
        "--batch-size",
        "2",
        "--concurrency",
        "5",
        "--output-len",
        "4",
        "--page-size",
        "4",
    ]
    out, _ = call([*arguments, "--json", "-"], capsys)
    (entry,) = json.loads(out)["results"]
    assert (entry["batch_size"], entry["concurrency"]) == (2, 5)


def test_a_table_for_people_and_a_file_for_programs(
    tiny_paths: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "sglang.bench_decode", "--model-path", tiny_paths[0]]
    command += ["--load-format", "dummy", "--output-len", "4", "--repeats", "1", "--threads", "1"]
    package = str(Path(bench_decode.__file__).parents[1])
    done = subprocess.run(
        [*command, "--json", str(path)],
        env=os.environ | {"PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for word in ("tok/s", "ITL p50", "ITL p99", "accepted", "occupancy", "threads 1"):
        assert word in done.stdout
    assert json.loads(path.read_text())["results"][0]["batch_size"] == 1


def test_too_little_memory_is_an_error_that_says_so(
    tiny_paths: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model-path", tiny_paths[0], "--load-format", "dummy", "--batch-size", "4"]
    arguments += ["--max-total-tokens", "150", "--output-len", "32"]
    assert bench_decode.main(arguments) == 1
    assert "--max-total-tokens is too small" in capsys.readouterr().err


def test_prompts_are_reproducible_and_within_the_vocabulary(tiny_paths: tuple[str, str]) -> None:
    one, two = (bench_decode.make_prompts(tiny_paths[0], WORKLOAD, seed=7) for _ in range(2))
    assert one == two != bench_decode.make_prompts(tiny_paths[0], WORKLOAD, seed=8)
    assert [len(prompt) for prompt in one] == [4, 4]
    assert all(0 <= token < 4096 for prompt in one for token in prompt)
