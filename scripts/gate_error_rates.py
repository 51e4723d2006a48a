#!/usr/bin/env python3
"""How often does the gate raise a false alarm, and how often does it miss a slowdown?

Each trial is one comparison by `bench_gate`, of the cases that it has by default, between copies of the
working tree's package in folders of their own. In ``same`` nothing is changed; in ``slow-5`` and
``slow-10`` each decode step's host work has been made 5 or 10 percent longer, by a loop whose length is
measured first, as a share of ``host_us_per_step`` of the case ``scheduler/b8``, where nothing but the
host's work is done. The summary says by how much that case was slower in the trials. The loop stands
in what chooses the step's batch, in what makes its forward batch, or in what handles its results, in
turn. A trial of ``same`` that calls any metric faster or slower, or says that a case fails, is a false
alarm; one of the others that calls none slower, or any faster, is a miss.

Trials are appended to a file, one line of JSON each, with what tells one gate from another: the
version of what is measured (`lab.contest`), the time it had, the pairs that it wanted at least, the time
that it took for them at most, its error rate. A second call goes on where the first one ended, with
trials of the same gate. Two calls at once, with files of their own, are each other's busy neighbour.

A trial has the numbers of its pairs, and its verdicts are those of `lab.verdicts` as it is now: another
rule can be tried on trials that are there.

Examples
--------
::

    python scripts/gate_error_rates.py --out benchmark/gate-trials.jsonl
    python scripts/gate_error_rates.py --out benchmark/gate-trials.jsonl --summary
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
sys.path += [str(REPO_ROOT / "benchmark"), str(REPO_ROOT / "scripts")]

import numpy as np  # noqa: E402

from bench_gate import DEFAULT_CASES, ENOUGH_PAIRS, MOST_MINUTES, compare  # noqa: E402
from lab import contest, verdicts  # noqa: E402
from lab.arguments import positive_float, positive_int  # noqa: E402
from lab.contest import Contest, ContestError, Side  # noqa: E402
from lab.remote import end_on_signals  # noqa: E402

KINDS: Final = {"same": 0.0, "slow-5": 0.05, "slow-10": 0.10}
TRIALS: Final = {"same": 40, "slow-5": 20, "slow-10": 20}
CALIBRATED: Final = "scheduler/b8"
# A turn takes less in a short loop. So it is measured twice, the second time with a loop as long as that
# of the larger slowdown.
CALIBRATION_TURNS: Final = 2000
CALIBRATION_PAIRS: Final = (15, 40)
LOOP_VERSION: Final = 2
"""Of how slowdowns are made: to be counted up where the loop, its places or its measurement change."""
# Where a slowdown is put, one after the other: parts that no metric is about alone, so that the whole
# step's time finds it, or nothing does.
SITES: Final = {
    "choice": ("managers/scheduler.py", "Scheduler.get_next_batch_to_run"),
    "forward batch": ("managers/schedule_batch.py", "ScheduleBatch.get_forward_batch"),
    "results": (
        "managers/scheduler_output_processor_mixin.py",
        "SchedulerOutputProcessorMixin.process_batch_result_decode",
    ),
}
LOOP: Final = """
def _burn(turns):
    for _ in range(turns):
        pass


_fast = {function}


def _slower(self, *args, **kwargs):
    _burn({turns})
    return _fast(self, *args, **kwargs)


{function} = _slower
"""


FIELDS: Final[dict[str, Any]] = {
    "kind": str,
    "gate": dict,
    "pairs": int,
    "seconds": (int, float),
    "verdicts": list,
}
"""What each trial has, whatever it ended with."""


class TrialsError(ValueError):
    """A file of trials that cannot be gone on with."""


def copy_package(target: Path, turns: int, site: str = "choice") -> Side:
    """A copy of the package whose decode steps run an empty loop of so many turns besides.

    Parameters
    ----------
    target : Path
        A directory that does not exist.
    turns : int
    site : str
        A key of `SITES`.
    """
    shutil.copytree(
        REPO_ROOT / "python", target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    if turns:
        file, function = SITES[site]
        path = target / "sglang" / "srt" / file
        path.write_text(path.read_text() + LOOP.format(turns=turns, function=function))
    return Side(target.name, str(target))


def calibrate(scratch: Path) -> float:
    """Turns of the loop that take as long as the host work of a decode step."""
    turns, largest = float(CALIBRATION_TURNS), max(KINDS.values())
    plain = copy_package(scratch / "calibrate-plain", 0)
    with contest.forking(threads=1) as context:
        for pairs in CALIBRATION_PAIRS:
            burning = copy_package(scratch / "calibrate-burning", round(turns), "choice")
            found = Contest(context, plain, burning, [CALIBRATED], rounds=10)
            for _ in range(pairs):
                if found.run_pair() is None:
                    raise ContestError("; ".join(found.notes))
            shutil.rmtree(burning.package)
            names, logs = found.log_ratios()
            by = float(np.expm1(np.median(logs[:, names.index(f"{CALIBRATED} host_us_per_step")])))
            if not largest / 3 < by < 1:
                raise ContestError(
                    f"a loop of {turns:.0f} turns made {CALIBRATED} slower by {by:.1%}"
                )
            whole = turns / by
            turns = largest * whole
    shutil.rmtree(plain.package)
    return whole


def run_trials(out: Path, minutes: float, kinds: Sequence[str], most: int | None) -> None:
    """Run the trials that are not in the file yet, of each kind in turn."""
    gate = describe_gate(minutes)
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        scratch = Path(folder)
        whole = calibrate(scratch)
        turns = {kind: round(share * whole) for kind, share in KINDS.items()}
        print(f"turns of the loop: {turns}", flush=True)
        base = copy_package(scratch / "base", 0)
        heads = {
            (kind, site): copy_package(scratch / f"{kind}-{place}", turns[kind], site)
            for kind in kinds
            for place, site in enumerate(SITES)
        }
        while most is None or most > 0:
            of_gate = [trial for trial in read(out) if trial["gate"] == gate]
            done = [t["kind"] for t in of_gate if t.get("loop") == loop_of(t["kind"])]
            left = {kind: TRIALS[kind] - done.count(kind) for kind in kinds}
            # The kind that is furthest behind.
            kind = max(left, key=lambda name: left[name] / TRIALS[name])
            if left[kind] <= 0:
                return
            site = list(SITES)[done.count(kind) % len(SITES)]
            about = {"kind": kind, "gate": gate}
            if kind != "same":
                about |= {"site": site, "turns": turns[kind], "loop": loop_of(kind)}
            trial = about | run_trial(base, heads[kind, site], minutes)
            with out.open("a") as sink:
                sink.write(json.dumps(trial) + "\n")
            print(f"{kind}{f', {site}' if kind != 'same' else ''}: {describe(trial)}", flush=True)
            most = None if most is None else most - 1


def run_trial(base: Side, head: Side, minutes: float) -> dict[str, Any]:
    """What a comparison found, or the error that it ended with."""
    started = time.monotonic()
    load = os.getloadavg()[0]
    found: dict[str, Any] = {"pairs": 0, "verdicts": []}
    try:
        compared = compare(
            base, head, DEFAULT_CASES, minutes, None, lambda *_: None, lambda _: None
        )
        found["pairs"] = len(compared.pairs)
        found["verdicts"] = [_rounded(asdict(verdict)) for verdict in compared.judge()]
        names, logs = compared.log_ratios()
        found["short_pairs"] = len(compared.short)
        # JSON has no NaN.
        rows = [[None if v != v else v for v in row] for row in np.round(logs, 5).tolist()]
        found["metrics"], found["logs"] = names, rows
        found["notes"] = compared.notes
    except ContestError as error:
        found["error"] = str(error)
    found["seconds"] = round(time.monotonic() - started)
    found["load"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    return found


def _rounded(verdict: dict[str, Any]) -> dict[str, Any]:
    """With as many digits as mean something."""
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in verdict.items()}


def describe_gate(minutes: float) -> dict[str, Any]:
    """What tells one gate from another."""
    about = {"version": contest.VERSION, "minutes": minutes}
    about |= {"least_pairs": ENOUGH_PAIRS, "most_minutes": MOST_MINUTES}
    return about | {"alpha": verdicts.ALPHA, "short_pairs": contest.SHORT_PAIRS}


def loop_of(kind: str) -> int | None:
    """What tells the slowdowns of a kind of trial from others; None where there are none."""
    return None if kind == "same" else LOOP_VERSION


def read(out: Path) -> list[dict[str, Any]]:
    """The trials in a file, each with the verdicts that its numbers have now.

    Raises
    ------
    TrialsError
        If there is no such file, or a line is no trial; says which.
    """
    try:
        lines = out.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrialsError(f"{out} is no file of trials: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            trial = json.loads(line)
            for name, kinds in FIELDS.items():
                if not isinstance(trial[name], kinds):
                    raise TypeError(f"{name} is {trial[name]!r}")
            found.append(trial | {"verdicts": judged_again(trial)})
        except (ValueError, TypeError, KeyError) as error:
            raise TrialsError(f"{out}, line {number} is no trial: {error!r}") from error
    return found


def judged_again(trial: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts on the numbers of a trial; those that it has, if there is no pair with numbers."""
    kept = trial["verdicts"]
    if not trial.get("logs"):
        return kept
    # What was not measured in pairs comes first.
    fixed = kept[: len(kept) - len(trial["metrics"])]
    logs = np.array(trial["logs"], dtype=float)
    judged = verdicts.judge(trial["metrics"], logs, alpha=trial["gate"]["alpha"])
    return fixed + [_rounded(asdict(verdict)) for verdict in judged]


def is_wrong(trial: dict[str, Any]) -> bool:
    """Whether the gate was wrong: a false alarm, a miss, or no answer."""
    if "error" in trial:
        return True
    kinds = [verdict["verdict"] for verdict in trial["verdicts"]]
    if trial["kind"] == "same":
        return not {verdicts.SLOWER, verdicts.FASTER, verdicts.FAILS}.isdisjoint(kinds)
    return verdicts.SLOWER not in kinds or verdicts.FASTER in kinds


def describe(trial: dict[str, Any]) -> str:
    """A trial in a line."""
    if "error" in trial:
        return f"{trial['seconds']} s: {trial['error']}"
    kinds = [verdict["verdict"] for verdict in trial["verdicts"]]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    load = " to ".join(map(str, trial["load"]))
    return f"{trial['pairs']} pairs, {trial['seconds']} s, load {load}: {counts}"


def bounds(wrong: int, trials: int) -> tuple[float, float]:
    """Wilson's interval of a share, 95%."""
    z, p = 1.96, wrong / trials
    middle, half = (
        p + z**2 / (2 * trials),
        z * math.sqrt(p * (1 - p) / trials + (z / trials / 2) ** 2),
    )
    low, high = ((middle + side) / (1 + z**2 / trials) for side in (-half, half))
    # At its ends it is 0 or 1 but for rounding.
    return max(low, 0.0), min(high, 1.0)


def summarise(trials: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about the trials of each gate and kind."""
    by_gate: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        by_gate.setdefault(json.dumps(trial["gate"], sort_keys=True), []).append(trial)
    lines = []
    for gate, of_gate in sorted(by_gate.items()):
        lines.append(f"gate: {gate}")
        for kind in KINDS:
            chosen = [trial for trial in of_gate if trial["kind"] == kind]
            # Trials of other slowdowns are other trials.
            for loop in dict.fromkeys(trial.get("loop") for trial in chosen):
                lines.append(_summary(kind, [t for t in chosen if t.get("loop") == loop]))
    return lines


def slowdown(trial: Mapping[str, Any]) -> float | None:
    """How much slower the case was by which the loop was measured; None where it has no numbers."""
    name = f"{CALIBRATED} host_us_per_step"
    if name not in trial.get("metrics", ()):
        return None
    column = np.array(trial["logs"], dtype=float)[:, trial["metrics"].index(name)]
    return float(np.expm1(np.nanmedian(column)))


def _summary(kind: str, trials: Sequence[dict[str, Any]]) -> str:
    wrong = sum(map(is_wrong, trials))
    low, high = bounds(wrong, len(trials))
    what = "false alarms" if kind == "same" else "missed"
    pairs = statistics.median(trial["pairs"] for trial in trials)
    seconds = statistics.median(trial["seconds"] for trial in trials)
    line = (
        f"{kind}: {wrong} of {len(trials)} {what} (95%: {low:.0%} to {high:.0%}); median "
        f"{pairs:.0f} pairs in {seconds:.0f} s"
    )
    if kind != "same" and (
        slower := [by for trial in trials if (by := slowdown(trial)) is not None]
    ):
        low, high = (f"{by:.1%}" for by in (min(slower), max(slower)))
        line += f"; {CALIBRATED} slower by {statistics.median(slower):.1%} ({low} to {high})"
    errors = sum("error" in trial for trial in trials)
    return line + (f"; {errors} of them ended in an error" if errors else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run trials, or sum them up."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="gate_error_rates.py", description=summary)
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="files of trials")
    parser.add_argument("--minutes", type=positive_float, default=6.0, help="of each comparison")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--most", type=positive_int, help="trials in this call")
    parser.add_argument("--summary", action="store_true", help="only sum up")
    args = parser.parse_args(argv)
    try:
        if not args.summary:
            args.out[0].parent.mkdir(parents=True, exist_ok=True)
            args.out[0].touch()
            run_trials(args.out[0], args.minutes, args.kinds, args.most)
        trials = [trial for out in args.out for trial in read(out)]
    except (TrialsError, ContestError, OSError) as error:
        print(f"gate_error_rates: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gate_error_rates: interrupted", file=sys.stderr)
        return 130
    print("\n".join(summarise(trials)))
    return 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
