#!/usr/bin/env python3
"""Measure the landmark commits on the machine's own Python, with nothing built and nothing fetched.

Each commit's package is taken out of git and put on ``PYTHONPATH``; the laboratory is that of the
working tree. ``extract`` does only this, for a machine that gets the files but not the history: there,
the packages are taken from ``.cache/landmarks``.

``occupancy``
    Both sides of fix #28500, the commit before it and the fix: how busy the device is under a delay
    kernel (`lab.modelled_accelerator`), and with a real model (`lab.device_occupancy`).
``asv``
    The landmarks, HEAD first, by ``asv run --environment existing --set-commit-hash``, so that asv keeps
    the results under each commit. Without asv, or without the history that asv looks commits up in, the
    same cases are measured by `lab.run`, and nothing is kept for asv.

``discover``
    Write asv's list of benchmarks, ``benchmarks.json``, next to results that came without it.

``--seconds`` ends the two that measure in time: what was not reached is said, and is no failure.

Examples
--------
::

    python scripts/gpu_landmarks.py extract --to .cache/landmarks
    python scripts/gpu_landmarks.py occupancy --json occupancy.json
    python scripts/gpu_landmarks.py asv --machine gpu-h200 --results .asv/results --json asv.json
    python scripts/gpu_landmarks.py discover --results .asv/results
    python scripts/gpu_landmarks.py asv --commit main~3 --only --bench '^decode'
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from asv_machine import make_known
from bench import BenchError, landmarks
from bench_gate import side
from gpu_results import merged
from process_sessions import run_group
from prove_fixes import FIXES, ProofError, fix_commit, git, trailers

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.append(str(REPO_ROOT / "benchmark"))

from lab import asv_files, devices  # noqa: E402
from lab.arguments import positive_float, positive_int  # noqa: E402
from lab.cases import CASES, check_name  # noqa: E402
from lab.history import PROCESSES_VARIABLE, ROUNDS_VARIABLE  # noqa: E402
from lab.remote import end_on_signals, environment  # noqa: E402
from lab.run import by_setup, run_cases  # noqa: E402

SAVED: Final = Path(".cache/landmarks")
INDEX: Final = "landmarks.json"
# Of the fixes, the one whose both sides are compared.
FIX: Final = 28500
# What stands for the suite in a check of some minutes: on a GPU, engines under the delay kernel.
BENCH: Final = r"^overlap\.Overlap\."
DELAYED_CASES: Final = ("overlap/chain-b8-t5ms", "overlap/none-b8-t5ms")
_STEM: Final = re.compile(r"\^?\(?(\w+)")


@dataclass
class Package:
    """A commit's package.

    Attributes
    ----------
    sha : str
    names : list of str
        What the commit is called.
    folder : str
        Directory that holds ``sglang``.
    """

    sha: str
    names: list[str]
    folder: str


@dataclass
class Packages:
    """The landmarks, oldest first, and both sides of the fix.

    Attributes
    ----------
    landmarks : list of Package
    before, after : Package
    """

    landmarks: list[Package]
    before: Package
    after: Package


def has_history(repo: Path) -> bool:
    """Whether the commits are here, and not their files alone."""
    try:
        return git(repo, "rev-parse", "--show-toplevel").strip() == str(repo) and bool(
            trailers(repo)
        )
    except ProofError:
        return False


def _sides(repo: Path) -> tuple[str, str]:
    fix = next(fix for fix in FIXES if fix.pr == FIX)
    sha, parent = fix_commit(repo, fix, trailers(repo))
    return parent, sha


def packages(repo: Path, extra: Sequence[str] = ()) -> Packages:
    """Packages out of git, or, where there is no history, out of `SAVED`.

    Parameters
    ----------
    repo : Path
    extra : sequence of str
        Further commits.

    Raises
    ------
    BenchError, ProofError
        If there are none.
    """
    if not has_history(repo):
        if extra:
            raise BenchError(f"{repo} has no history to look {', '.join(extra)} up in")
        return load(repo / SAVED)
    found = [
        Package(mark.sha, mark.names, side(repo, mark.sha).package)
        for mark in landmarks(repo, extra)
    ]
    before, after = (Package(sha, [sha[:8]], side(repo, sha).package) for sha in _sides(repo))
    return Packages(found, before, after)


def load(folder: Path) -> Packages:
    """Packages that `extract` has put into a folder."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except OSError as error:
        raise BenchError(
            f"there is no history here, or no git, and no {folder / INDEX}: where there is history, run "
            f"`python scripts/gpu_landmarks.py extract --to {SAVED}` and bring that folder along"
        ) from error
    made = {
        sha: Package(sha, names, str(folder / sha / "python"))
        for sha, names in index["names"].items()
    }
    return Packages(
        [made[sha] for sha in index["landmarks"]], made[index["before"]], made[index["after"]]
    )


def extract(repo: Path, folder: Path, extra: Sequence[str] = ()) -> None:
    """Put the packages into a folder, for `load`."""
    found = packages(repo, extra)
    every = [found.before, found.after, *found.landmarks]
    for package in every:
        target = folder / package.sha / "python"
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"python.{os.getpid()}")
            ignored = shutil.ignore_patterns("__pycache__")
            # Beside it are links out of the folder.
            source = Path(package.folder) / "sglang"
            shutil.copytree(source, partial / "sglang", ignore=ignored)
            partial.rename(target)
    index = {
        "names": {package.sha: package.names for package in every},
        "landmarks": [package.sha for package in found.landmarks],
        "before": found.before.sha,
        "after": found.after.sha,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class Clock:
    """How much of the time there is left.

    Parameters
    ----------
    seconds : float
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; not below 0."""
        return max(self._end - time.monotonic(), 0.0)


# --- Both sides of the fix ----------------------------------------------------------------------


@dataclass
class Occupancy:
    """Of one thing measured on both sides.

    Attributes
    ----------
    what : str
    before, after : float or None
        The part of the time for which a forward was under way on the device; None where it was not
        measured. Between the kernels of a forward that the host launches too slowly the device waits all
        the same: under a delay kernel it does not, as that is one.
    detail : dict of str to dict
        By side, all that was found.
    """

    what: str
    before: float | None = None
    after: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


def occupancy(
    found: Packages,
    device: str,
    clock: Clock,
    cases: Sequence[str] = DELAYED_CASES,
    model_options: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> Iterator[Occupancy]:
    """Measure both sides: the first case under the delay kernel, a model, and the other cases.

    Each is given before it is measured, and filled in when the next one is asked for, so that whoever is
    interrupted has what was found so far.
    """
    for case in cases[:1]:
        yield from _delayed(found, case, clock, say)
    yield from _with_model(found, device, clock, model_options, say)
    for case in cases[1:]:
        yield from _delayed(found, case, clock, say)


def _delayed(
    found: Packages, case: str, clock: Clock, say: Callable[[str], None]
) -> Iterator[Occupancy]:
    result = Occupancy(f"{case.partition('/')[2]}, delayed forwards")
    yield result
    for name, package, seconds in _in_shares(found, clock):
        asked = run_cases([case], package=package.folder, rounds=1, processes=1, seconds=seconds)
        outcome = asked[case]
        result.detail[name] = {k: v for k, v in outcome.items() if k != "rounds"}
        setattr(result, name, outcome.get("metrics", {}).get("fwd_occupancy"))
        say(f"{result.what}, {name} #{FIX}: {_shown(getattr(result, name), outcome)}")


def _in_shares(found: Packages, clock: Clock) -> Iterator[tuple[str, Package, float]]:
    """Both sides, each with its share of the time: one side alone says nothing."""
    for number, (name, package) in enumerate((("before", found.before), ("after", found.after))):
        yield name, package, clock.left / (2 - number)


def _with_model(
    found: Packages,
    device: str,
    clock: Clock,
    options: Sequence[str],
    say: Callable[[str], None],
) -> Iterator[Occupancy]:
    result = Occupancy("chain-b8-penalties, a model's forwards")
    yield result
    for name, package, seconds in _in_shares(found, clock):
        outcome = _run_model(package, device, seconds, options)
        result.detail[name] = outcome
        if "metrics" in outcome:
            setattr(result, name, outcome["metrics"].get("forward_occupancy"))
            result.what = f"chain-b{outcome['batch_size']}-penalties, model {outcome['model']}"
        say(f"{result.what}, {name} #{FIX}: {_shown(getattr(result, name), outcome)}")


def _run_model(
    package: Package, device: str, seconds: float, options: Sequence[str]
) -> dict[str, Any]:
    if seconds <= 0:
        return {"outcome": "not reached", "detail": "there was no time left"}
    with tempfile.TemporaryDirectory(prefix="landmarks-") as scratch:
        out = Path(scratch) / "found.json"
        command = [sys.executable, "-m", "lab.device_occupancy", "--device", device]
        status, text = run_group(
            [*command, "--json", str(out), *options],
            environment(2, package.folder),
            Path(scratch),
            seconds,
        )
        if status == 0 and out.is_file():
            return {"outcome": "done", **json.loads(out.read_text())}
    if status == 124:
        return {"outcome": "not reached", "detail": f"in {seconds:.0f} s: {text[-2000:]}"}
    return {"outcome": "failed", "detail": f"exit status {status}: {text[-2000:]}"}


def _shown(value: float | None, outcome: dict[str, Any]) -> str:
    if value is not None:
        return f"{value:.4f}"
    if "metrics" in outcome:
        return f"{outcome.get('outcome')}, without its occupancy"
    return f"{outcome.get('outcome')} {str(outcome.get('detail', ''))[-500:]}".strip()


# --- The landmarks, by asv ----------------------------------------------------------------------


@dataclass
class Measured:
    """A commit.

    Attributes
    ----------
    sha : str
    names : list of str
    how : {"asv", "lab"}
    outcome : {"done", "failed", "not reached"}
        Failed has also what failed in part; time may have run out with a part of the results there.
    values, without : int
        What this run has found: results that are numbers, and those that are none, skipped, stalled or
        failed.
    seconds : float
    detail : str
    """

    sha: str
    names: list[str]
    how: str
    outcome: str = "not reached"
    values: int = 0
    without: int = 0
    seconds: float = 0.0
    detail: str = ""


def by_importance(marks: Sequence[Package]) -> list[Package]:
    """HEAD, then from the newest on: what has to be known if time runs out."""
    return list(reversed(marks))


def why_no_asv(repo: Path) -> str | None:
    """Say why asv cannot measure here; None where it can."""
    if importlib.util.find_spec("asv") is None:
        return "asv is not installed"
    if not has_history(repo):
        return "there is no history here that asv could look commits up in"
    return None


def write_config(repo: Path, results: Path, folder: Path) -> Path:
    """asv's configuration with absolute paths, for results that are kept elsewhere."""
    from asv.util import load_json

    config = load_json(str(repo / "asv.conf.json"), js_comments=True)
    config |= {
        "repo": str(repo),
        "benchmark_dir": str(repo / config["benchmark_dir"]),
        "env_dir": str(repo / config["env_dir"]),
        "html_dir": str(repo / config["html_dir"]),
        "results_dir": str(results.resolve()),
    }
    path = folder / "asv.conf.json"
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path


def asv_command(config: Path, sha: str, machine: str, bench: Sequence[str]) -> list[str]:
    """How asv is called for a commit."""
    command = [sys.executable, "-m", "asv", "run", "--config", str(config)]
    command += ["--environment", f"existing:{sys.executable}", "--set-commit-hash", sha]
    command += ["--machine", machine, "--show-stderr", "--record-samples"]
    return command + [part for regex in bench for part in ("--bench", regex)]


def asv_environment(folder: str) -> dict[str, str]:
    """The environment of asv, and so of its benchmarks, for a package.

    asv drops PYTHONPATH for environments of its own, and keeps it for existing ones. The folder
    ``benchmark`` may not stand there: asv's name is that of a folder in it.
    """
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    path = [folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return env | {"PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}


def run_asv(
    repo: Path,
    marks: Sequence[Package],
    machine: str,
    results: Path,
    bench: Sequence[str],
    clock: Clock,
    found: list[Measured],
    say: Callable[[str], None] = print,
) -> None:
    """Measure commits with asv; results go below `results`, in the folder of the machine.

    What is told of each commit goes into `found`. asv writes when it is done with a commit, so one that
    is ended by the clock leaves nothing.
    """
    found[:] = [Measured(mark.sha, mark.names, "asv") for mark in marks]
    for mark, one in zip(marks, found, strict=True):
        if clock.left < 5:
            break
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="landmarks-") as scratch:
            # A folder of its own: what is there afterwards was measured now. asv would also put it
            # beside what there is of the commit, whatever that was measured by.
            fresh = Path(scratch) / "results"
            config = write_config(repo, fresh, Path(scratch))
            command = asv_command(config, mark.sha, machine, bench)
            env = asv_environment(mark.folder)
            status, text = run_group(command, env, Path(scratch), clock.left)
            one.values, one.without = settle(fresh, results, machine, mark.sha)
        one.seconds = time.monotonic() - started
        one.outcome = judge(status, one.values)
        if one.outcome == "failed":
            one.detail = f"exit status {status}: {text[-2000:]}"
        say(f"{mark.sha[:8]} {'; '.join(mark.names)}: {_told(one)}")


def judge(status: int, values: int) -> str:
    """What came of a commit.

    Parameters
    ----------
    status : int
        asv's exit status: 2 if any benchmark failed. 124 if time ran out.
    values : int
        Numbers that it has written, which it does last of all.
    """
    if status == 124 and not values:
        return "not reached"
    return "done" if status in (0, 124) and values else "failed"


def discover(repo: Path, results: Path) -> Path:
    """Write what asv knows of the benchmarks into a folder of results; return the file.

    Raises
    ------
    BenchError
        If asv finds none.
    """
    with tempfile.TemporaryDirectory(prefix="landmarks-") as scratch:
        # Into a folder of its own first: asv puts the file of this machine there too.
        config = write_config(repo, Path(scratch) / "results", Path(scratch))
        head = git(repo, "rev-parse", "HEAD").strip()
        command = asv_command(config, head, make_known(), ["just-discover"])
        status, text = run_group(
            command, asv_environment(str(repo / "python")), Path(scratch), 300.0
        )
        found = Path(scratch) / "results" / "benchmarks.json"
        if status != 0 or not found.is_file():
            raise BenchError(f"asv found no benchmarks, exit status {status}: {text[-2000:]}")
        results.mkdir(parents=True, exist_ok=True)
        target = results / found.name
        target.write_text(found.read_text())
    return target


def settle(fresh: Path, results: Path, machine: str, sha: str) -> tuple[int, int]:
    """Put fresh results of a commit beside the others, with the interpreter named by its version.

    asv names an existing environment by the path of its interpreter, and makes that path a parameter:
    an interpreter that moves would begin another line in asv's graphs. What there is of the commit
    already stays, but for what has been measured again, if it was measured by the same (see
    `gpu_results.merged`). A file that is none of asv's is put aside, beside `results`, and a fresh one
    is not kept.

    Returns
    -------
    int
        Fresh results that are numbers.
    int
        Fresh results that are none.
    """
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    environment_name = f"existing-py{version}"
    target = results / machine / f"{sha[:8]}-{environment_name}.json"
    values = without = 0
    for path in sorted((fresh / machine).glob(f"{sha[:8]}-existing-*.json")):
        try:
            document = asv_files.read_result(path)
        except asv_files.FormError as error:
            # Of an asv that was ended while it wrote, or of a number that is none: asv would not come
            # to an end with that among the others.
            print(f"gpu_landmarks: {error}; not kept", file=sys.stderr)
            continue
        numbers, others = count(document)
        values, without = values + numbers, without + others
        document |= {"env_name": environment_name, "python": version}
        document["params"]["python"] = version
        if target.is_file():
            try:
                document = merged(asv_files.read_result(target), document)
            except asv_files.FormError as error:
                # No reason to lose what has just been measured, nor what a person may still mend.
                # Out of asv's results, where they are published from.
                odd = results.with_name(f"{results.name}-odd") / machine
                odd.mkdir(parents=True, exist_ok=True)
                aside = target.replace(odd / f"{target.stem}.{time.time_ns()}.json")
                print(f"gpu_landmarks: {error}; kept as {aside}", file=sys.stderr)
        _replace(target, json.dumps(document) + "\n")
    # What asv says of machine and benchmarks goes with them.
    for name in (f"{machine}/machine.json", "benchmarks.json"):
        if values + without and (fresh / name).is_file():
            _replace(results / name, (fresh / name).read_text())
    return values, without


def _replace(path: Path, text: str) -> None:
    """Write a file which is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def count(document: dict[str, Any]) -> tuple[int, int]:
    """Numbers among results of asv, and results without one."""
    values = without = 0
    for columns in document["results"].values():
        for value in (columns[0] if columns else None) or [None]:
            is_number = isinstance(value, int | float) and not math.isnan(value)
            values += is_number
            without += not is_number
    return values, without


def run_lab(
    marks: Sequence[Package],
    bench: Sequence[str],
    rounds: int | None,
    processes: int | None,
    clock: Clock,
    found: list[Measured],
    everything: dict[str, dict[str, Any]],
    say: Callable[[str], None] = print,
) -> None:
    """Measure the cases of the same questions without asv.

    What is told of each commit goes into `found`, and what was measured into `everything`, by commit.

    Raises
    ------
    BenchError
        If there is no such case.
    """
    questions = {match[1] for regex in bench if (match := _STEM.match(regex))}
    cases = [name for name, case in CASES.items() if _is_chosen(name, case, questions)]
    if not cases:
        raise BenchError(f"there is no case for {', '.join(bench)}")
    found[:] = [Measured(mark.sha, mark.names, "lab") for mark in marks]
    for mark, one in zip(marks, found, strict=True):
        started = time.monotonic()
        results = everything[mark.sha] = {}
        for group in by_setup(cases):
            asked = run_cases(
                group,
                package=mark.folder,
                rounds=rounds,
                processes=processes,
                seconds=clock.left,
            )
            results |= {k: v for k, v in asked.items() if v["outcome"] != "not reached"}
        if results:
            one.seconds = time.monotonic() - started
            one.values = sum(result["outcome"] == "done" for result in results.values())
            one.without = len(results) - one.values
            # One that stalls, or that a commit has no API for, has been found out about.
            failed = [r.get("detail", "") for r in results.values() if r["outcome"] == "failed"]
            others = [r.get("detail", "") for r in results.values() if r["outcome"] != "done"]
            if failed or not one.values:
                one.outcome, one.detail = "failed", str([*failed, *others][0])[-2000:]
            elif len(results) == len(cases):
                one.outcome = "done"
            say(f"{mark.sha[:8]} {'; '.join(mark.names)}: {_told(one)}")


def _is_chosen(name: str, case: Any, questions: set[str]) -> bool:
    question = name.partition("/")[0]
    return (not questions or question in questions) and case.quick


def _told(one: Measured) -> str:
    text = f"{one.outcome}, {one.values} values by {one.how}, {one.seconds:.0f} s"
    if one.without:
        text += f", {one.without} without a number"
    return text + (f"\n{one.detail}" if one.detail else "")


# --- The command --------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="gpu_landmarks.py", description=summary)
    what = parser.add_subparsers(dest="what", required=True)
    taken = what.add_parser("extract", help="take the packages out of git")
    taken.add_argument("--to", type=Path, default=REPO_ROOT / SAVED, metavar="DIR")
    both = what.add_parser("occupancy", help="both sides of fix #28500")
    both.add_argument("--cases", nargs="+", default=list(DELAYED_CASES), metavar="CASE")
    both.add_argument("--model-options", default="", help="for lab.device_occupancy, in one word")
    marks = what.add_parser("asv", help="the landmark commits")
    marks.add_argument("--bench", action="append", default=[], metavar="REGEX")
    marks.add_argument(
        "--machine",
        default=os.environ.get("ASV_MACHINE") or None,
        help="what asv calls this machine (default: ASV_MACHINE, else what it knows)",
    )
    marks.add_argument("--results", type=Path, default=REPO_ROOT / ".asv" / "results")
    marks.add_argument("--rounds", type=positive_int, help="rounds a case, in each process")
    marks.add_argument("--processes", type=positive_int, help="processes a case")
    marks.add_argument("--most", type=positive_int, help="commits at most")
    marks.add_argument("--only", action="store_true", help="only the commits of --commit")
    known = what.add_parser("discover", help="asv's list of benchmarks")
    known.add_argument("--results", type=Path, default=REPO_ROOT / ".asv" / "results")
    for command in (taken, marks):
        command.add_argument("--commit", action="append", default=[], metavar="NAME")
    for command in (both, marks):
        command.add_argument(
            "--device", choices=("cpu", "cuda"), help="LAB_DEVICE, else CUDA if there"
        )
        command.add_argument(
            "--seconds", type=positive_float, default=3600.0, help="end after so many"
        )
        command.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.what == "asv" and args.only and not args.commit:
        marks.error("--only without --commit leaves nothing to measure")
    return args


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")


def _main_occupancy(args: argparse.Namespace) -> int:
    try:
        for case in args.cases:
            check_name(case)
    except ValueError as error:
        raise BenchError(str(error)) from error
    found = packages(REPO_ROOT)
    device = devices.choose(args.device)
    clock, options = Clock(args.seconds), args.model_options.split()
    results: list[Occupancy] = []
    try:
        for result in occupancy(found, device, clock, args.cases, options):
            results.append(result)
    finally:
        document = {"before": found.before.sha, "after": found.after.sha}
        _write(args.json, document | {"results": [asdict(result) for result in results]})
    failed = [
        outcome
        for result in results
        for outcome in result.detail.values()
        if outcome["outcome"] not in ("done", "not reached")
    ]
    return 1 if failed else 0


def _main_asv(args: argparse.Namespace) -> int:
    marks = packages(REPO_ROOT, args.commit).landmarks
    if args.only:
        named = set(args.commit)
        marks = [mark for mark in marks if named & set(mark.names)]
    if not marks:
        raise BenchError("there is no commit to measure")
    marks = by_importance(marks)[: args.most]
    bench = args.bench or [BENCH]
    clock = Clock(args.seconds)
    for name, number in ((ROUNDS_VARIABLE, args.rounds), (PROCESSES_VARIABLE, args.processes)):
        if number is not None:
            os.environ[name] = str(number)
    document: dict[str, Any] = {
        "device": devices.choose(args.device),
        "skipped": why_no_asv(REPO_ROOT),
    }
    found: list[Measured] = []
    try:
        if document["skipped"] is None:
            machine = document["machine"] = make_known(args.machine)
            run_asv(REPO_ROOT, marks, machine, args.results, bench, clock, found)
        else:
            print(f"skipped: {document['skipped']}; the same cases without it", flush=True)
            document["results"] = {}
            run_lab(marks, bench, args.rounds, args.processes, clock, found, document["results"])
    finally:
        _write(args.json, document | {"commits": [asdict(one) for one in found]})
    return 1 if any(one.outcome == "failed" for one in found) else 0


def _asv_error() -> type[Exception]:
    """What asv raises for its user, where there is asv."""
    try:
        from asv.util import UserError
    except ImportError:
        return BenchError
    return UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is asked; return the exit status."""
    args = parse_args(argv)
    try:
        if args.what == "extract":
            extract(REPO_ROOT, args.to, args.commit)
            return 0
        if args.what == "discover":
            print(discover(REPO_ROOT, args.results))
            return 0
        return _main_occupancy(args) if args.what == "occupancy" else _main_asv(args)
    except (BenchError, ProofError, ValueError, _asv_error()) as error:
        print(f"gpu_landmarks: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu_landmarks: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # Any of these ends what was started and leaves what was found. A shell that starts this in the
    # background would have it ignore the first.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_on_signals()
    sys.exit(main())
