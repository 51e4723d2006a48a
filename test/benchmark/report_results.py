"""Made-up results in asv's own files, for tests of the page: made-up machines, one of them a GPU."""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CPU, GPU = "made-up-cpu", "made-up-gpu"
# One that `asv_machine.describe` has described, which says of each thing that is not there "none".
DESCRIBED = "made-up-described-cpu"
MACHINES: Final[dict[str, dict[str, str]]] = {
    CPU: {
        "cpu": "Made-up CPU at 2.00GHz",
        "num_cpu": "2",
        "ram": "8589934592",
        "os": "Linux 6.1.0-test",
        "arch": "x86_64",
    },
    GPU: {
        "cpu": "Made-up server CPU",
        "num_cpu": "16",
        "ram": "137438953472",
        "os": "Linux 6.8.0-test",
        "arch": "x86_64",
        "gpu": "Fake GPU (test)",
        "driver": "999.99",
        "cuda": "13.0",
        "torch": "2.13.0+cu130",
        "triton": "3.9.0",
    },
    DESCRIBED: {
        "os": "Linux 6.2.0-test",
        "num_cpu": "4",
        "arch": "x86_64",
        "cpu": "Made-up CPU at 3.00GHz",
        "ram": "17179869184",
        "machine": DESCRIBED,
        "gpu": "none",
        "driver": "none",
        "cuda": "none",
        "torch": "2.13.0+cpu",
        "triton": "none",
    },
}
PROCESSES = 3
STALLS = "stalls"


@dataclass(frozen=True)
class Metric:
    """A metric of the made-up suite.

    Attributes
    ----------
    unit : str
    level : float
        Its value on the first commit, on the CPU.
    noise : float
        Standard deviation between processes, in logarithms; 0 for an exact one.
    effect : dict
        What a commit, by its number, multiplies the value by on each machine.
    """

    unit: str
    level: float
    noise: float
    effect: dict[int, dict[str, float]]


COPY_GONE = {2: {CPU: 0.99, GPU: 0.78}}
# By benchmark class: cases and metrics. A time with a ratio beside it needs the level of both.
SUITE: Final[dict[str, tuple[list[str], dict[str, Metric]]]] = {
    "decode.Decode": (
        ["real-b1", "real-b8", "real-b8-penalties", "tiny-b8"],
        {
            "us_per_token": Metric("us/token", 5230.0, 0.08, COPY_GONE),
            "us_per_token_ratio": Metric("anchors/token", 0.873, 0.012, COPY_GONE),
            "itl_p50_ms": Metric("ms", 37.1, 0.08, COPY_GONE),
            "itl_p50_ms_ratio": Metric("anchors", 6.21, 0.014, COPY_GONE),
            "itl_p99_ms": Metric("ms", 48.9, 0.1, COPY_GONE),
            "itl_p99_ms_ratio": Metric("anchors", 8.17, 0.05, COPY_GONE),
            "forward_idle": Metric("of the decode phase", 0.0042, 0.2, {}),
        },
    ),
    "decode.DecodeMore": (
        ["real-b32", "tiny-b64", "tiny-b64-penalties"],
        {
            "us_per_token": Metric("us/token", 2610.0, 0.08, COPY_GONE),
            "us_per_token_ratio": Metric("anchors/token", 0.436, 0.012, COPY_GONE),
        },
    ),
    "mixed.Mixed": (
        ["real-b4", "tiny-b8"],
        {
            "stalled": Metric("cases", 0.0, 0.0, {}),
            "us_per_token": Metric("us/token", 20500.0, 0.08, {}),
            "us_per_token_ratio": Metric("anchors/token", 3.42, 0.02, {}),
            "score_p50_ms": Metric("ms", 286.0, 0.08, {}),
            "score_p50_ms_ratio": Metric("anchors", 47.7, 0.03, {3: {CPU: 1.09, GPU: 1.0}}),
        },
    ),
    "overlap.Overlap": (
        ["none-b8-t5ms", "chain-b8-t5ms"],
        {
            "model_forwards_per_step": Metric("forwards, modelled", 1.21, 0.004, {2: {CPU: 0.83}}),
            "model_stalls_per_step": Metric("stalls", 1.0, 0.0, {2: {CPU: 0.0}}),
        },
    ),
    "transfers.Transfers": (
        ["decode-b8-penalties", "chain-b8-penalties"],
        {
            "blocking_per_step": Metric("transfers", 2.0, 0.0, {2: {CPU: 0.5, GPU: 0.5}}),
            "bytes_per_step": Metric("bytes", 4096.0, 0.0, {3: {CPU: 0.25, GPU: 0.25}}),
        },
    ),
}
# The metrics that only one machine has.
CPU_ONLY = ("overlap",)
STALLS_BEFORE = {"mixed.Mixed": 1}
SUBJECTS = (
    "Before both fixes",
    "[Scheduler] Fix is_prefill_only not being updated in merge_batch",
    "[Spec] Make the penalties' H2D copy pinned and non-blocking, in one place",
    "Count penalties where the tokens are",
)
TRAILERS = {1: "sgl-project/sglang#21840", 2: "sgl-project/sglang#28500"}


def make_repo(path: Path) -> list[str]:
    """A repository whose history has the fixes' trailers; its commits, oldest first."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
        command = ["git", "-C", str(path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    path.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet", "--initial-branch=main")
    shas = []
    for number, subject in enumerate(SUBJECTS):
        body = f"\n\nUpstream-PR: {TRAILERS[number]}" if number in TRAILERS else ""
        git("commit", "--quiet", "--allow-empty", "--message", subject + body)
        shas.append(git("rev-parse", "HEAD"))
    return shas


def draw(metric: Metric, machine: str, commit: int, case: int, rng: random.Random) -> list[float]:
    """Samples of a case, a process after the other; one number for an exact metric."""
    level = metric.level * (1 + 0.35 * case)
    # A GPU takes less of a time, also by its own anchor.
    level *= 0.21 if machine == GPU and metric.noise else 1.0
    for number, factors in metric.effect.items():
        if commit >= number:
            level *= factors.get(machine, 1.0)
    if not metric.noise:
        return [level]
    samples = []
    for _ in range(PROCESSES):
        middle = level * math.exp(rng.gauss(0, metric.noise))
        samples += [middle * math.exp(rng.gauss(0, metric.noise / 3)) for _ in range(5)]
    return samples


def write_results(
    directory: Path,
    shas: list[str],
    *,
    samples: bool = True,
    machines: tuple[str, ...] = (CPU, GPU),
    same: bool = False,
    seed: int = 0,
    states: Mapping[int, Mapping[str, str]] | None = None,
) -> Path:
    """Write what asv would have after measuring all commits on all machines.

    Parameters
    ----------
    directory : Path
    shas : list of str
        Commits, oldest first.
    samples : bool
        Whether samples are kept (``--record-samples``).
    machines : tuple of str
    same : bool
        Whether all commits do the same as the last.
    seed : int
    states : mapping of int to mapping of str to str, optional
        By the number of a commit, the facts that the machines had changed to when it was measured.
    """
    _write_benchmarks(directory)
    for machine in machines:
        rng = random.Random(f"{machine}, {seed}")
        _write_machine(directory, machine)
        for number, sha in enumerate(shas):
            does = len(shas) - 1 if same else number
            facts = MACHINES[machine] | dict((states or {}).get(number, {}))
            _write_commit(directory, machine, facts, sha, number, does, samples, rng)
    return directory


def _write_benchmarks(directory: Path) -> None:
    from asv.benchmarks import Benchmarks

    from asv import util

    benchmarks: dict[str, Any] = {
        f"{owner}.track_{name}": {
            "name": f"{owner}.track_{name}",
            "params": [[repr(case) for case in cases]],
            "param_names": ["case"],
            "unit": metric.unit,
            "type": "track",
            "version": "1",
        }
        for owner, (cases, metrics) in SUITE.items()
        for name, metric in metrics.items()
    }
    path = directory / "benchmarks.json"
    util.write_json(str(path), benchmarks, Benchmarks.api_version)


def _write_machine(directory: Path, machine: str) -> None:
    from asv.machine import Machine

    facts = Machine()
    facts.__dict__.update({"machine": machine, **MACHINES[machine]})
    facts.save(str(directory))


def _write_commit(
    directory: Path,
    machine: str,
    facts: Mapping[str, str],
    sha: str,
    number: int,
    does: int,
    keep: bool,
    rng: random.Random,
) -> None:
    """The results of commit `number`, which does what commit `does` does."""
    from asv.results import Results
    from asv.runner import BenchmarkResult

    requirements = {"torch": "2.13.0", "numpy": "2.4.6"} if machine == CPU else {"numpy": "2.4.6"}
    params = {"machine": machine, **facts, "python": "3.11", **requirements}
    results = Results(
        params, requirements, sha, 1_780_000_000_000 + number * 86_400_000, "3.11", "env", {}
    )
    for owner, (cases, metrics) in SUITE.items():
        if machine == GPU and owner.split(".")[0] in CPU_ONLY:
            continue
        for name, metric in metrics.items():
            stalls = does < STALLS_BEFORE.get(owner, 0)
            values: list[list[float]] = []
            for i in range(len(cases)):
                drawn = draw(metric, machine, does, i, rng)
                if name == "stalled":
                    drawn = [float(stalls)]
                elif stalls:
                    drawn = [math.nan]
                values.append(drawn)
            noisy = metric.noise and not stalls
            result = BenchmarkResult(
                result=[drawn[0] for drawn in values],
                samples=[drawn if noisy else None for drawn in values],
                number=[1 if noisy else None for _ in values],
                errcode=0,
                stderr="",
                profile=None,
            )
            results.add_result(
                {
                    "name": f"{owner}.track_{name}",
                    "version": "1",
                    "params": [[repr(case) for case in cases]],
                },
                result,
                record_samples=keep,
            )
    results.save(str(directory))


def config(repo: Path, results: Path) -> Path:
    """An asv.conf.json for `asv publish` over these results."""
    text = {
        "version": 1,
        "project": "made-up",
        "project_url": "https://example.invalid",
        "repo": ".",
        "branches": ["HEAD"],
        "environment_type": "virtualenv",
        "results_dir": str(results),
        "html_dir": ".asv/html",
        "benchmark_dir": "benchmark/asv",
    }
    path = repo / "asv.conf.json"
    path.write_text(json.dumps(text))
    return path
