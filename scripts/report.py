#!/usr/bin/env python3
"""Write one HTML file of what asv measured: plots, before and after each fix, and where that was.

It reads asv's results, names the landmark commits by the trailers in history, and needs no network,
neither here nor in the browser. Several directories of results make one page: each machine in them is
a series of its own.

Examples
--------
::

    python scripts/report.py                                       # what `make report` does
    python scripts/report.py --results .asv/results --results benchmark/results --out page.html
    python scripts/report.py --screenshot page.png --part decode   # and a picture of a question
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

from asv_machine import NONE
from bench import BenchError, landmarks
from prove_fixes import FIXES, ProofError, git

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.append(str(REPO_ROOT / "benchmark"))

from lab.arguments import positive_int  # noqa: E402
from lab.asv_files import FormError, read_benchmarks, read_machine, read_result  # noqa: E402
from lab.cases import PROCESSES  # noqa: E402
from lab.remote import end_on_signals  # noqa: E402
from lab.report import wording  # noqa: E402
from lab.report.data import Commit, Key, Machine, Measured, Question, Results  # noqa: E402
from lab.report.page import anchors, render  # noqa: E402

DEFAULT_RESULTS: Final = (".asv/results", "benchmark/results")
BEFORE_FIXES: Final = "before the fixes"
# What a fix is called on an axis, where its title is too long.
FIX_NAMES: Final = {21840: "merge_batch", 28500: "penalties' copy"}
# Ends the name of the class that has the cases beyond the quick set.
MORE: Final = "More"
# What asv calls the facts of a machine, and what the page does. Others come behind, as they are.
FACTS: Final = {
    "gpu": "GPU",
    "driver": "driver",
    "cuda": "CUDA",
    "cpu": "CPU",
    "num_cpu": "cores",
    "ram": "memory",
    "arch": "architecture",
    "os": "system",
    "python": "Python",
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "numba": "numba",
}
# What is missed where it is not there.
WANTED: Final = ("cpu", "python", "torch", "triton")
GPU_WANTED: Final = ("driver", "cuda")
# Where one of them differs, a machine's numbers are no longer the same measurement.
STATE: Final = ("gpu", "driver", "cuda", "torch", "triton", "os")
SKIPPED_FACTS: Final = {"machine", "version", "setuptools", "wheel", "tqdm", "rich", "jinja2"}


# A benchmark of the suite: question, class and metric.
TRACKED: Final = re.compile(r"(\w+(?:\.\w+)*)\.(\w+)\.track_(\w+)")
# Beside results: what describes their machine, and, a folder above, what was measured.
MACHINE: Final = "machine.json"
BENCHMARKS: Final = "benchmarks.json"

# Name of a machine, and its `STATE`.
State = tuple[str, ...]


class ReportError(RuntimeError):
    """A failure with a message that a person can act on."""


# --- asv's results ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A file of results, what describes its benchmarks, and what describes its machine."""

    results: Any
    benchmarks: Any
    described: Mapping[str, Any]

    @property
    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Where facts stand, first what was true when this was measured."""
        # asv has no public name for what it has installed.
        pins = getattr(self.results, "_requirements", None)
        return self.results.params, pins if isinstance(pins, dict) else {}, self.described

    def fact(self, key: str) -> str:
        """A fact for people; empty where there is no such thing, or where it was not recorded."""
        # A "none" is an answer too, and ends the search.
        return _fact(key, next((s[key] for s in self.sources if s.get(key)), ""))

    @property
    def state(self) -> State:
        """The machine and how it was when this was measured."""
        return (self.results.params["machine"], *(self.fact(key) for key in STATE))


def results_dirs(repo: Path, given: Sequence[Path]) -> list[Path]:
    """The directories to read: those that are named, else the first default that holds something.

    Raises
    ------
    ReportError
        If one of them holds no results.
    """
    if given:
        for path in given:
            if not _holds_results(path):
                raise ReportError(f"there are no results of asv in {path}")
        return list(given)
    for name in DEFAULT_RESULTS:
        if _holds_results(repo / name):
            return [repo / name]
    raise ReportError(f"no results in {' or '.join(DEFAULT_RESULTS)}: run `make bench` first")


def _holds_results(path: Path) -> bool:
    return any(path.glob(f"*/{MACHINE}"))


def load(
    directory: Path, notes: list[str]
) -> tuple[dict[str, Any], list[tuple[Any, dict[str, Any]]]]:
    """Benchmarks of a directory, and its results, each with what describes its machine.

    What is not of asv's form is left out, and `notes` says so.
    """
    benchmarks: dict[str, Any] = {}
    found: list[tuple[Any, dict[str, Any]]] = []
    with _noted(notes):
        benchmarks = read_benchmarks(directory / BENCHMARKS)
        del benchmarks["version"]
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        files = sorted(p for p in folder.glob("*.json") if p.name not in (MACHINE, BENCHMARKS))
        if not files:
            continue
        with _noted(notes, f", with {wording.counted(len(files), 'file')} beside it"):
            machine = read_machine(folder / MACHINE)
            for path in files:
                with _noted(notes):
                    found.append((_load_result(path, machine["machine"]), machine))
    return benchmarks, found


@contextlib.contextmanager
def _noted(notes: list[str], more: str = "") -> Iterator[None]:
    """Go on after a file that is left out, and say which one it is, and why."""
    try:
        yield
    except FormError as error:
        notes.append(f"Left out{more}: {error}.")
        print(f"report: {notes[-1]}", file=sys.stderr)


def _load_result(path: Path, machine: str) -> Any:
    from asv.results import Results as AsvResults

    name = read_result(path)["params"]["machine"]
    if name != machine:
        raise FormError(
            f"{path.parent.name}/{path.name}: params[machine] is {name!r}, not {machine!r}"
        )
    return AsvResults.load(str(path))


def parts(found: Found, key: str) -> tuple[str, str, str] | None:
    """Question, class and metric of a result; None if it is not one number for each case."""
    match = TRACKED.fullmatch(key)
    return match.groups() if match and len(found.results.get_result_params(key)) == 1 else None


def _key(question: str, owner: str, metric: str) -> str:
    return f"{question}.{owner}.track_{metric}"


def values(found: Found) -> Iterator[tuple[str, str, str, str, Measured]]:
    """Question, class, metric, case and number of all that a file has and that still means the same."""
    results = found.results
    for key in sorted(results.get_result_keys(found.benchmarks)):
        of_key = parts(found, key)
        if of_key is None:
            continue
        params = results.get_result_params(key)
        numbers = results.get_result_value(key, params)
        samples = results.get_result_samples(key, params)
        for name, number, own in zip(params[0], numbers, samples, strict=True):
            yield *of_key, name.strip("'"), Measured(number, tuple(own or ()))


def foreign(found: Iterable[Found]) -> int:
    """How many results are not one number for each case."""
    return sum(
        parts(f, key) is None for f in found for key in f.results.get_result_keys(f.benchmarks)
    )


def outdated(found: Iterable[Found]) -> int:
    """How many results are of a version of their benchmark that is not the present one."""
    return sum(
        len(set(f.results.get_all_result_keys()) - f.results.get_result_keys(f.benchmarks))
        for f in found
    )


# --- Machines ---------------------------------------------------------------------------------


def make_machines(found: Sequence[Found]) -> dict[State, Machine]:
    """A machine for each state in which something was measured, those without a GPU first."""
    by_state: dict[State, list[Found]] = {}
    for one in found:
        # Results of outdated benchmarks make no series.
        if next(values(one), None):
            by_state.setdefault(one.state, []).append(one)
    machines = {
        state: _machine(of_state, [other for other in by_state if other[0] == state[0]])
        for state, of_state in by_state.items()
    }
    labels = [machine.label for machine in machines.values()]
    for state, machine in machines.items():
        if labels.count(machine.label) > 1:
            machines[state] = replace(machine, label=f"{machine.label} ({machine.name})")
    return dict(sorted(machines.items(), key=lambda item: (item[1].is_gpu, item[1].label)))


def _machine(found: Sequence[Found], states: Sequence[State]) -> Machine:
    """A machine in one of its states, called by what tells that from the others."""
    keys = {key for one in found for source in one.sources for key in source}
    facts = {
        key: ", ".join(dict.fromkeys(fact for one in found if (fact := one.fact(key))))
        for key in [*FACTS, *sorted(keys - FACTS.keys() - SKIPPED_FACTS)]
    }
    gpu, cores = facts["gpu"], facts["num_cpu"]
    wanted = [*WANTED, *(GPU_WANTED if gpu else ())]
    shown = {
        FACTS.get(key, key): fact or "not recorded"
        for key, fact in facts.items()
        if fact or key in wanted
    }
    name, *state = found[0].state
    label = gpu or (f"CPU, {cores} cores" if cores else "CPU")
    for place, key in enumerate(STATE):
        # The label has the GPU anyway.
        if key != "gpu" and len({other[1 + place] for other in states}) > 1:
            label += f", {FACTS[key]} {state[place] or 'not recorded'}"
    return Machine(name, label, bool(gpu), shown, tuple(state) if len(states) > 1 else ())


def _fact(key: str, value: Any) -> str:
    text = str(value or "").strip()
    if text == NONE:
        return ""
    if key == "ram" and re.fullmatch("[0-9]{1,18}", text):
        return f"{int(text) / 2**30:.1f} GiB"
    # An environment that asv did not make itself has the path of its interpreter for a version.
    return "" if key == "python" and os.sep in text else text


# --- Commits ----------------------------------------------------------------------------------


def make_commits(repo: Path, found: Sequence[Found]) -> tuple[list[Commit], list[str]]:
    """The measured commits, oldest first, and what is to be said of them."""
    dates = {f.results.commit_hash: f.results.date for f in found}
    notes: list[str] = []
    names = _landmark_names(repo, notes)
    history_order = _history(repo)
    commits = [_commit(repo, sha, dates[sha], names, sha in history_order) for sha in dates]
    strangers = [commit.short for commit in commits if not commit.known]
    if strangers:
        notes.append(
            f"Not in the history of this checkout, so by date and without the name of a fix: "
            f"{', '.join(sorted(strangers))}."
        )
    return _ordered(commits, dates, history_order), notes


def _landmark_names(repo: Path, notes: list[str]) -> dict[str, tuple[str, int | None]]:
    """Name of each landmark but HEAD, with its pull request if it is a fix."""
    try:
        marks = landmarks(repo)
    except (BenchError, ProofError) as error:
        notes.append(f"The fixes cannot be named: {error}.")
        return {}
    names: dict[str, tuple[str, int | None]] = {}
    for mark in marks:
        fix = next(
            (f for f in FIXES if any(n.startswith(f"fix #{f.pr}:") for n in mark.names)), None
        )
        if fix is not None:
            names[mark.sha] = (f"#{fix.pr} {FIX_NAMES.get(fix.pr, fix.title)}", fix.pr)
        elif "last base commit" in mark.names:
            names[mark.sha] = (BEFORE_FIXES, None)
    return names


def _history(repo: Path) -> dict[str, int]:
    """The commits of HEAD's history, by their place in it."""
    try:
        shas = git(repo, "rev-list", "--topo-order", "--reverse", "HEAD").split()
    except ProofError:
        return {}
    return {sha: place for place, sha in enumerate(shas)}


def _commit(
    repo: Path, sha: str, date: int, names: dict[str, tuple[str, int | None]], known: bool
) -> Commit:
    day = datetime.datetime.fromtimestamp(date / 1000, datetime.UTC).date().isoformat()
    try:
        subject = git(repo, "show", "--no-patch", "--format=%s", sha).strip() if known else ""
    except ProofError:
        subject = ""
    if sha in names:
        name, fix = names[sha]
        first, _, rest = name.partition(" ")
        return Commit(sha, name, (first, rest), fix, subject, day, known)
    name = f"{sha[:8]} “{shorten(subject, 60, placeholder=' …')}”" if subject else sha[:8]
    brief = shorten(subject, 26, placeholder=" …")
    return Commit(sha, name, (sha[:8], brief) if subject else (sha[:8],), None, subject, day, known)


def _ordered(
    commits: Sequence[Commit], dates: dict[str, int], history_order: dict[str, int]
) -> list[Commit]:
    """As history has them; a commit that it does not have stands before the first later one."""
    ordered = sorted((c for c in commits if c.known), key=lambda c: history_order[c.sha])
    for stranger in sorted(
        (c for c in commits if not c.known), key=lambda c: (dates[c.sha], c.sha)
    ):
        later = (i for i, c in enumerate(ordered) if dates[c.sha] > dates[stranger.sha])
        ordered.insert(next(later, len(ordered)), stranger)
    return ordered


# --- Questions --------------------------------------------------------------------------------


def make_questions(repo: Path, found: Sequence[Found]) -> dict[str, Question]:
    """Questions with their cases and units, those that the page knows first."""
    questions: dict[str, Question] = {}
    cases: dict[str, dict[str, bool]] = {}
    for one in found:
        for question, owner, metric, case, _ in values(one):
            if question not in questions:
                questions[question] = Question(question, _heading(repo, question))
            place = cases.setdefault(question, {})
            place[case] = place.get(case, False) or not owner.endswith(MORE)
            unit = one.benchmarks[_key(question, owner, metric)].get("unit", "")
            questions[question].units.setdefault(metric, unit)
    for name, question in questions.items():
        order = list(_case_order(name, found))
        question.cases = {case: cases[name][case] for case in order if case in cases[name]}
    known = wording.QUESTION_ORDER
    return dict(
        sorted(
            questions.items(),
            key=lambda item: (known.index(item[0]) if item[0] in known else len(known), item[0]),
        )
    )


def _case_order(question: str, found: Sequence[Found]) -> dict[str, None]:
    """Cases in the order of the suite, the quick ones first; then those that only results have."""
    keys = [
        (match[2].endswith(MORE), key, f.benchmarks[key]["params"])
        for f in found
        for key in f.benchmarks
        if (match := TRACKED.fullmatch(key)) and match[1] == question
    ]
    order: dict[str, None] = {}
    for _, _, params in sorted(keys, key=lambda k: (k[0], k[1])):
        order |= dict.fromkeys(name.strip("'") for name in (params[0] if params else []))
    for f in found:
        order |= dict.fromkeys(case for module, _, _, case, _ in values(f) if module == question)
    return order


def _heading(repo: Path, question: str) -> str:
    """The question, as the first line of its file asks it."""
    path = repo / "benchmark" / "asv" / f"{question}.py"
    # What is no word may be a path that leads elsewhere.
    if not (re.fullmatch(r"\w+", question) and path.is_file()):
        return question.capitalize()
    text = ast.get_docstring(ast.parse(path.read_text())) or question.capitalize()
    line = text.partition("\n")[0]
    # What follows the question mark is for readers of the source, but for the number of a fix.
    asked, mark, rest = line.partition("?")
    fixes = " ".join(re.findall(r"\(#\d+\)", rest))
    return f"{asked}{mark} {fixes}".strip()


# --- The command ------------------------------------------------------------------------------


def read(repo: Path, directories: Sequence[Path], processes: int = PROCESSES) -> Results:
    """All that the page needs.

    Raises
    ------
    ReportError
        If there are no results.
    """
    notes: list[str] = []
    benchmarks: dict[str, Any] = {}
    loaded: list[tuple[Any, dict[str, Any]]] = []
    for directory in directories:
        own, of_directory = load(directory, notes)
        # Where directories differ in what a benchmark means, the first one has the word.
        benchmarks = own | benchmarks
        loaded += of_directory
    found = [Found(one, benchmarks, machine) for one, machine in loaded]
    # Facts of a machine in the order in which they became true.
    found.sort(key=lambda f: max((v or 0 for v in f.results.started_at.values()), default=0))
    machines = make_machines(found)
    numbers = [
        (
            f.results.started_at.get(_key(question, owner, metric)) or 0,
            Key(machines[f.state].key, f.results.commit_hash, question, metric, case),
            number,
        )
        for f in found
        for question, owner, metric, case, number in values(f)
    ]
    # What was measured last counts: the benchmark, for its file may have others that are newer.
    measured = {key: number for _, key, number in sorted(numbers, key=lambda n: n[0])}
    if not measured:
        raise ReportError("asv's files hold no results of the present benchmarks: run `make bench`")
    commits, of_commits = make_commits(repo, found)
    notes += of_commits
    commits = [commit for commit in commits if any(key.sha == commit.sha for key in measured)]
    if number := outdated(found):
        notes.append(
            f"{wording.counted(number, 'result')} left out: the benchmarks mean something else by now."
        )
    if number := foreign(found):
        notes.append(f"{wording.counted(number, 'result')} left out: not one number for each case.")
    results = Results(
        list(machines.values()), commits, make_questions(repo, found), measured, processes, notes
    )
    notes += _sample_notes(results)
    return results


def _sample_notes(results: Results) -> list[str]:
    measured, processes = results.measured, results.processes
    numbers = [m for m in measured.values() if m.value is not None and not math.isnan(m.value)]
    notes = []
    if failed := sum(m.value is None for m in measured.values()):
        notes.append(
            f"{wording.counted(failed, 'number')} could not be had: the measurement failed."
        )
    if not any(m.samples for m in numbers):
        # What is counted needs none.
        if any(results.varies(key.question, key.metric) for key in measured):
            notes.append("These results have no samples, so nothing is known of their noise.")
    elif odd := sum(bool(m.samples) and len(m.samples) % processes != 0 for m in numbers):
        notes.append(
            f"{wording.counted(odd, 'number')} with samples that do not divide into {processes} "
            "processes: without a noise band."
        )
    return notes


def _around(element: Any, room: int = 16) -> dict[str, float]:
    """The place of a question on the page, with room around it."""
    box = element.bounding_box()
    return {
        "x": max(box["x"] - room, 0),
        "y": box["y"] + room,
        "width": box["width"] + 2 * room,
        "height": box["height"],
    }


def screenshot(page: Path, picture: Path, part: str) -> None:
    """Take a picture of the page with the Chromium of the system.

    Parameters
    ----------
    page, picture : Path
    part : str
        The id of a question; nothing for the beginning of the page.
    """
    import shutil

    from playwright.sync_api import Error, sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise ReportError("--screenshot needs chromium on the PATH")
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=browser_path,
                args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-sync"],
            )
            tab = browser.new_page(viewport={"width": 1200, "height": 900})
            tab.goto(page.resolve().as_uri())
            found = tab.evaluate_handle("id => document.getElementById(id)", part).as_element()
            if not part:
                tab.screenshot(path=str(picture))
            elif found is None:
                raise ReportError(f"the page has no question {part!r}")
            else:
                tab.screenshot(path=str(picture), full_page=True, clip=_around(found))
            browser.close()
    except Error as error:
        raise ReportError(f"no picture could be taken: {error.message.splitlines()[0]}") from error


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="report.py", description=summary)
    parser.add_argument(
        "--results",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help=f"asv's results; without it, the first of {', '.join(DEFAULT_RESULTS)} that has some",
    )
    parser.add_argument("--out", type=Path, help="the page (.asv/report.html)")
    parser.add_argument(
        "--processes",
        type=positive_int,
        default=PROCESSES,
        help="processes that the samples of a case come from (%(default)s)",
    )
    parser.add_argument("--screenshot", type=Path, metavar="PNG", help="take a picture of it")
    parser.add_argument(
        "--part", default="", metavar="QUESTION", help="of this question, not of the beginning"
    )
    parser.add_argument(
        "--repo", type=Path, default=REPO_ROOT, help="another checkout than this script's own"
    )
    return parser.parse_args(argv)


def write(out: Path, text: str) -> None:
    """Put a page where the one before it was, at once: nobody finds a part of it.

    Raises
    ------
    ReportError
        If it cannot be written there.
    """
    # The name of a file may have bytes that are no text.
    data = text.encode("utf-8", "replace")
    out = out.resolve()
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            # A pipe, say, stays what it is; a directory is refused here.
            out.write_bytes(data)
            return
        try:
            part.write_bytes(data)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"the page cannot be written to {out}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; return the exit status."""
    args = parse_args(argv)
    repo: Path = args.repo.resolve()
    out: Path = args.out or repo / ".asv" / "report.html"
    try:
        results = read(repo, results_dirs(repo, args.results), args.processes)
        write(out, render(results))
        if args.screenshot:
            part = anchors(results.questions).get(args.part, args.part)
            screenshot(out, args.screenshot, part)
    except (ReportError, OSError) as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("report: interrupted", file=sys.stderr)
        return 130
    size = out.stat().st_size / 1e6
    commits = wording.counted(len(results.commits), "commit")
    machines = wording.counted(len(results.machines), "machine")
    print(f"{out}: {commits}, {machines}, {size:.1f} MB")
    return 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
