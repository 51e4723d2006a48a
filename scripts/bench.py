#!/usr/bin/env python3
"""Measure the landmark commits with asv and print a table: the metrics, commit by commit.

The landmarks are found in the history of HEAD by their trailer: the commit before the first fix, each
fix, and HEAD. asv makes one environment (once, below ``.asv/env``), installs one commit after the other
into it and measures each with the laboratory of the working tree. Results stay in ``.asv/results``, so
that a second call measures only what is new. The asv site is written to ``.asv/html``. One call measures
at a time; with ``--table`` nothing is written.

By default the quick set of each question is measured (`lab.cases`), with ``--full`` all cases. Of the
decode path's many cases the table shows the quick set alone; the report and the asv site have all.

Examples
--------
::

    python scripts/bench.py                     # what `make bench` does
    python scripts/bench.py --full              # all cases: `make bench-full`
    python scripts/bench.py --rerun             # measure all of them again
    python scripts/bench.py --bench '^decode'   # only some of them (asv's regular expressions)
    python scripts/bench.py --commit main~3     # another commit besides
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from asv_machine import known_as as machine_known_as
from asv_machine import make_known as make_machine_known
from asv_site import SiteError, make_offline
from process_sessions import end_session, ending_with_us, run_group
from prove_fixes import FIXES, TRAILER, ProofError, git, trailers

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.append(str(REPO_ROOT / "benchmark"))

from lab import asv_files  # noqa: E402
from lab.cases import CASES, QUESTIONS  # noqa: E402
from lab.formats import busy_notes, significant  # noqa: E402
from lab.history import PROCESSES_VARIABLE, QUICK_CLASSES, ROUNDS_VARIABLE  # noqa: E402
from lab.models import DRAFT_VARIABLE, MODEL_VARIABLE  # noqa: E402
from lab.remote import end_on_signals  # noqa: E402


class Shown(NamedTuple):
    """A metric as the table shows it.

    Attributes
    ----------
    track : str
        Its ``track_`` method.
    label : str
    convert : callable
        Turns the value that is tracked into the one that is shown.
    digits : int
        Significant ones.
    more_is_better : bool
    """

    track: str
    label: str
    convert: Callable[[float], float] = float
    digits: int = 3
    more_is_better: bool = False


def _inverse(value: float, of: float = 1.0) -> float:
    return of / value if value else math.inf


_LATENCY: Final[tuple[Shown, ...]] = (
    Shown("us_per_token", "tokens/s", lambda us: _inverse(us, 1e6), 4, True),
    Shown("itl_p50_ms", "ITL p50, ms"),
    Shown("itl_p99_ms", "ITL p99, ms"),
)
# By question.
METRICS: Final[dict[str, tuple[Shown, ...]]] = {
    "decode": (
        *_LATENCY,
        Shown("forward_idle", "forward occupancy", lambda x: 1 - x, more_is_better=True),
        Shown("steps_per_token", "accepted length", _inverse, more_is_better=True),
    ),
    "mixed": (
        Shown("unfinished", "generations unfinished", digits=1),
        *_LATENCY,
        Shown("ttft_p50_ms", "first token p50, ms"),
        Shown("score_p50_ms", "scoring p50, ms"),
    ),
    "overlap": (
        Shown("model_forwards_per_step", "MODEL occupancy", _inverse, more_is_better=True),
        Shown("model_itl_p50_ms", "MODEL ITL p50, ms"),
    ),
    "transfers": (
        Shown("blocking_per_step", "blocking transfers/step", digits=2),
        Shown("transfer_bytes_per_step", "bytes/step", digits=4),
    ),
    "penalties": (
        Shown("us_per_step", "penalties, us/step"),
        Shown("us_per_step_ratio", "the same, in anchors"),
        Shown("us_per_join", "finish and join, us"),
    ),
    "scheduler": (
        Shown("host_us_per_step", "host, us/step"),
        Shown("prepare_us", "prepare, us"),
        Shown("merge_us", "merge, us"),
        Shown("filter_us", "filter, us"),
    ),
    "memory": (
        Shown("peak_step_bytes", "peak of a step, MB", lambda n: n / 1e6),
        Shown("penalty_state_bytes", "penalties, MB", lambda n: n / 1e6),
    ),
}
CHANGING_VARIABLES: Final = (ROUNDS_VARIABLE, PROCESSES_VARIABLE, MODEL_VARIABLE, DRAFT_VARIABLE)
QUICK: Final = rf"^\w+\.{QUICK_CLASSES}"
# Of questions with many cases the table shows those of the quick set, and others if asked for.
_MANY: Final = ("decode", "overlap")
# Seconds. asv takes some for the suite, and there is no end to what it may do with odd numbers.
PUBLISH_LIMIT_S: Final = 1800.0


class BenchError(RuntimeError):
    """A failure with a message that a person can act on; `main` prints it without a traceback."""


@dataclass
class Landmark:
    """A commit that is measured, and what it is called."""

    sha: str
    names: list[str] = field(default_factory=list)


# --- Which commits ----------------------------------------------------------------------------


def landmarks(repo: Path, extra: Sequence[str] = ()) -> list[Landmark]:
    """The landmark commits, oldest first.

    Parameters
    ----------
    repo : Path
    extra : sequence of str
        Names of further commits.

    Raises
    ------
    BenchError
        If there is no commit, no such commit, or a trailer that several commits carry.
    """
    commits = trailers(repo)
    named: list[tuple[str, str]] = []
    for i, fix in enumerate(FIXES):
        found = commits.get(f"sgl-project/sglang#{fix.pr}", [])
        if len(found) > 1:
            raise BenchError(f"{len(found)} commits carry '{TRAILER}: ...#{fix.pr}', one may")
        if found:
            if i == 0:
                named.append((_resolve(repo, f"{found[0]}^"), "last base commit"))
            named.append((found[0], f"fix #{fix.pr}: {fix.title}"))
    named += [(_resolve(repo, name), name) for name in extra]
    named.append((_resolve(repo, "HEAD"), "HEAD"))
    by_sha: dict[str, Landmark] = {}
    for sha, name in named:
        by_sha.setdefault(sha, Landmark(sha)).names.append(name)
    order = git(repo, "rev-list", "--topo-order", "--reverse", *by_sha).split()
    return sorted(by_sha.values(), key=lambda landmark: order.index(landmark.sha))


def _resolve(repo: Path, name: str) -> str:
    try:
        return git(repo, "rev-parse", "--verify", f"{name}^{{commit}}").strip()
    except ProofError as error:
        raise BenchError(f"there is no commit {name!r} here to measure") from error


# --- asv --------------------------------------------------------------------------------------


@contextlib.contextmanager
def measuring_alone(repo: Path) -> Iterator[None]:
    """Meanwhile, let no other call measure in this checkout.

    asv has no lock: two calls would install their commits into the same ``.asv/env``, and measure each
    other's.

    Raises
    ------
    BenchError
        If another one measures.
    """
    path = repo / ".asv" / "bench.lock"
    path.parent.mkdir(exist_ok=True)
    # The system gives it back when this process ends, in whatever way.
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise BenchError(
                f"another call measures here, process {lock.read().strip()}, and both would install "
                "into .asv/env: call again when it has ended, or end it"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


class Progress:
    """Shows how far the measurement is: a bar on a terminal, a line now and then elsewhere.

    Parameters
    ----------
    console : rich.console.Console
    cases : int, optional
        Cases that a commit has, if that is known.
    """

    def __init__(self, console: Any, cases: int | None) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._console = console
        self._started = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("asv", total=cases, what="")
        self._stage = "asv"

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """A new stage: an environment, a build, a commit."""
        self._stage = text
        self._bar.update(self._task, description=text, completed=0, what="")
        self._line(text)

    def event(self, event: dict[str, Any]) -> None:
        """An event of the laboratory (see `lab.worker`)."""
        if event["event"] == "result":
            self._bar.advance(self._task, 1)
            self._line(f"  {event['case']}: {event['outcome']}")
        else:
            what = f"{event['case']}: {event['what']} {event['done'] + 1}/{event['total']}"
            self._bar.update(self._task, what=what)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            seconds = time.monotonic() - self._started
            self._console.print(f"[{seconds:6.0f} s] {text}", markup=False, highlight=False)


def run_asv(repo: Path, shas: Sequence[str], options: Sequence[str], progress: Progress) -> int:
    """Run ``asv run`` over the commits and return its exit status.

    Its whole output goes to ``.asv/bench.log``.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        hashes, events = Path(scratch) / "hashes", Path(scratch) / "events"
        hashes.write_text("".join(f"{sha}\n" for sha in shas))
        events.touch()
        command = [sys.executable, "-m", "asv", "run", f"HASHFILE:{hashes}", "--show-stderr"]
        log_path = repo / ".asv" / "bench.log"
        log_path.parent.mkdir(exist_ok=True)
        # A session of its own, so that whatever it started ends with it.
        asv = subprocess.Popen(
            [*command, *options],
            cwd=repo,
            env=os.environ | {"LAB_EVENTS": str(events)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        ended = threading.Event()
        tail = threading.Thread(target=_follow_events, args=(events, progress, ended), daemon=True)
        tail.start()
        try:
            with ending_with_us(asv.pid), log_path.open("w") as log:
                _follow_log(asv, log, shas, progress)
                return asv.wait()
        finally:
            # asv puts what it starts into groups of their own.
            end_session(asv.pid)
            asv.wait()
            ended.set()
            tail.join()


def _follow_log(asv: subprocess.Popen, log: Any, shas: Sequence[str], progress: Progress) -> None:
    assert asv.stdout is not None
    for line in asv.stdout:
        log.write(line)
        log.flush()
        text = line.strip(" ·\n")
        if match := re.search(r"commit ([0-9a-f]{8})", text):
            numbers = [i for i, sha in enumerate(shas, 1) if sha.startswith(match[1])]
            progress.stage(f"commit {match[1]} ({(numbers or [0])[0]} of {len(shas)})")
        elif re.match(r"(Creating|Installing|Building|Discovering)", text):
            progress.stage(text.split(" for virtualenv")[0].split(" into virtualenv")[0])


def _follow_events(path: Path, progress: Progress, ended: threading.Event) -> None:
    with path.open() as events:
        rest = ""
        while True:
            last = ended.is_set()
            *lines, rest = (rest + events.read()).split("\n")
            for line in lines:
                progress.event(json.loads(line))
            if last:
                return
            ended.wait(0.2)


def publish(repo: Path) -> tuple[Path, str]:
    """Write the asv site; return its first page, and what it takes to open it.

    Raises
    ------
    BenchError
        If asv cannot, or among its results are some that it would not come to an end with.
    """
    if odd := odd_files(results_folder(repo)):
        raise BenchError(_odd_told(odd, "the asv site is not written"))
    command = [sys.executable, "-m", "asv", "publish"]
    status, text = run_group(command, dict(os.environ), repo, PUBLISH_LIMIT_S)
    if status != 0:
        raise BenchError(f"asv publish ended with {status}:\n{text[-2000:]}")
    page = repo / ".asv" / "html" / "index.html"
    try:
        make_offline(page.parent, repo / ".cache" / "asv-site")
    except SiteError as error:
        return page, f"asv preview shows it, with a network: {error}"
    return page, "opens without a network"


# --- Results ----------------------------------------------------------------------------------

# By ("question.track_metric", case): a number, NaN where it was skipped or stalls, None where it failed.
Values = dict[tuple[str, str], float | None]


def results_folder(repo: Path) -> Path:
    """Where asv keeps results.

    Raises
    ------
    BenchError
        If asv has no configuration here.
    """
    from asv.config import Config
    from asv.util import UserError

    try:
        return repo / Config.load(str(repo / "asv.conf.json")).results_dir
    except UserError as error:
        raise BenchError(str(error)) from error


def odd_files(results: Path) -> list[str]:
    """What is wrong with each file of a machine that asv would read and that is not as asv writes it."""
    odd = []
    # asv leaves a folder without a machine.json alone, and a file of that name in one with it.
    folders = {path.parent for path in results.rglob("machine.json")}
    found = {path for folder in folders for path in folder.glob("*.json")}
    for path in sorted(path for path in found if path.name != "benchmarks.json"):
        is_machine = path.name == "machine.json"
        try:
            (asv_files.read_machine if is_machine else asv_files.read_result)(path)
        except asv_files.FormError as error:
            odd.append(str(error))
    return odd


def _odd_told(odd: Sequence[str], what: str) -> str:
    return f"{what}: mend these, or move them out of asv's results\n  " + "\n  ".join(odd)


@dataclass
class Found:
    """What asv has of commits.

    Attributes
    ----------
    values : list of dict
        By commit.
    notes : list of str
        What is left out.
    """

    values: list[Values] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load_results(
    repo: Path, machine: str, shas: Sequence[str], regexes: Sequence[str] = ()
) -> Found:
    """What asv has of commits on a machine.

    Where a commit has been measured in several environments, what was measured last counts.

    Parameters
    ----------
    repo : Path
    machine : str
    shas : sequence of str
    regexes : sequence of str
        If there are any, only what one of them is found in, as asv takes them.

    Raises
    ------
    BenchError
        If it cannot be told what the benchmarks are.
    """

    def is_wanted(name: str, called: str) -> bool:
        # Without it nobody can tell why there is no number.
        if not regexes or name.endswith(".track_stalled"):
            return True
        return any(re.search(regex, called) for regex in regexes)

    folder = results_folder(repo)
    found = Found()
    outdated = 0
    benchmarks: Any = None
    for sha in shas:
        numbers: list[tuple[float, str, Any]] = []
        for path in sorted((folder / machine).glob(f"{sha[:8]}-*.json")):
            results = _load(path, machine, sha, found.notes)
            if results is None:
                continue
            if benchmarks is None:
                benchmarks = _benchmarks(folder)
            current = results.get_result_keys(benchmarks)
            outdated += len(results.get_all_result_keys() - current)
            numbers += ((results.started_at[key] or 0, key, results) for key in current)
        values: Values = {}
        for _, key, results in sorted(numbers, key=lambda number: number[:2]):
            params = results.get_result_params(key)
            # Of another suite.
            if len(params) != 1:
                continue
            # The two classes of a question are one table.
            name = re.sub(r"^(\w+)\.\w+\.", r"\1.", key)
            measured = results.get_result_value(key, params)
            values |= {
                (name, case.strip("'")): v
                for case, v in zip(params[0], measured, strict=True)
                if is_wanted(name, f"{key}({case})")
            }
        found.values.append(values)
    if outdated:
        found.notes.append(
            f"{outdated} results are left out: their benchmarks have changed since, and mean "
            "something else"
        )
    return found


def _load(path: Path, machine: str, sha: str, notes: list[str]) -> Any:
    """asv's results in a file; None, with a note, if they are none of this commit's."""
    from asv.results import Results
    from asv.util import UserError

    try:
        document = asv_files.read_result(path)
        if document["commit_hash"] != sha:
            raise asv_files.FormError(f"{path.name}: commit_hash is {document['commit_hash']}")
        return Results.load(str(path), machine_name=machine)
    except (asv_files.FormError, UserError) as error:
        notes.append(f"left out: {error}")
        return None


def _benchmarks(folder: Path) -> Any:
    from asv.benchmarks import Benchmarks
    from asv.config import Config

    try:
        asv_files.read_benchmarks(folder / "benchmarks.json")
    except asv_files.FormError as error:
        raise BenchError(f"{error}; `make bench` has asv write it anew") from error
    conf = Config()
    conf.results_dir = str(folder)
    return Benchmarks.load(conf)


def cell(values: Values, group: str, metric: Shown, case: str) -> tuple[str, float | None]:
    """What the table says of one metric of a case on one commit, and its value as tracked."""
    # Who is unfinished is known just then.
    if values.get((f"{group}.track_stalled", case)) == 1 and metric.track != "unfinished":
        return "[bold red]stalls[/]", None
    key = (f"{group}.track_{metric.track}", case)
    if key not in values:
        return "[dim]not measured[/]", None
    value = values[key]
    if value is None:
        return "[red]failed[/]", None
    if math.isnan(value):
        return "[dim]n/a[/]", None
    return significant(metric.convert(value), metric.digits), value


def rows(
    found: Sequence[Values], asked_for: bool = False
) -> Iterator[tuple[str, str, str, list[str], bool]]:
    """Rows of the table: question, case, metric, a cell a commit, whether the case ends here.

    Parameters
    ----------
    found : sequence of dict
        By commit.
    asked_for : bool
        Whether just these were, so that none of them is one too many.
    """
    for group, shown in METRICS.items():
        keys = dict.fromkeys(key for values in found for key in values)
        cases = dict.fromkeys(case for key, case in keys if key.startswith(f"{group}."))
        quick = [case.name for case in QUESTIONS[group] if case.quick]
        for case in quick if group in _MANY and not asked_for else cases:
            if case not in cases:
                continue
            # Only some may have been asked for.
            known = {key for key, of_case in keys if of_case == case}
            asked = [m for m in shown if f"{group}.track_{m.track}" in known]
            for metric in asked:
                cells = _cells(found, group, metric, case)
                arrow = "↑" if metric.more_is_better else "↓"
                yield group, case, f"{metric.label} {arrow}", cells, metric is asked[-1]


def _cells(found: Sequence[Values], group: str, metric: Shown, case: str) -> list[str]:
    """Cells of a row, each with its change against the first commit that has a number.

    A first number that nothing can be divided by leaves the row without any.
    """
    cells, first = [], None
    for values in found:
        text, value = cell(values, group, metric, case)
        if value is not None:
            shown = metric.convert(value)
            if first and math.isfinite(first) and math.isfinite(shown):
                text += f" [dim]{shown / first:.2f}×[/]"
            first = shown if first is None else first
        cells.append(text)
    return cells


def show(
    marks: Sequence[Landmark], found: Sequence[Values], console: Any, asked_for: bool = False
) -> None:
    """Print the table, of which `rows` tells more."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Decode path, commit by commit", title_justify="left")
    for name in ("question", "case", "metric"):
        table.add_column(name)
    for mark in marks:
        title = "\n".join(escape(name) for name in mark.names)
        table.add_column(f"{title}\n[dim]{mark.sha[:8]}[/]", justify="right", overflow="fold")
    before: tuple[str, str] = ("", "")
    for question, case, metric, cells, last in rows(found, asked_for):
        table.add_row(
            question if question != before[0] else "",
            case if (question, case) != before else "",
            metric,
            *cells,
            end_section=last,
        )
        before = (question, case)
    console.print(table)
    console.print(
        "[dim]↑ more is better, ↓ less. A factor is the change against the first commit with a number; "
        "there is none if that is 0.\n"
        "A time is the median of three processes: between two of them the same code differs by up to a "
        "tenth, and by more on a busy machine; `make report` says by how much. Transfers and memory are "
        "counted, and exact.\n"
        "'stalls': generation requests under scoring requests never end, or an idle engine finds them "
        "left behind, and dies.[/]"
    )


# --- The command ------------------------------------------------------------------------------


def _regex(text: str) -> str:
    try:
        for regex in (text, *chosen([text], full=False)):
            re.compile(regex)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="bench.py", description=summary)
    parser.add_argument("--rerun", action="store_true", help="measure also what has results")
    parser.add_argument(
        "--bench",
        type=_regex,
        action="append",
        default=[],
        metavar="REGEX",
        help="only these benchmarks of the quick set, measured and shown; of all with --full",
    )
    parser.add_argument(
        "--commit", action="append", default=[], metavar="NAME", help="a commit to measure besides"
    )
    parser.add_argument(
        "--full", action="store_true", help="all cases, and not the quick set of each question"
    )
    parser.add_argument(
        "--machine",
        default=os.environ.get("ASV_MACHINE") or None,
        help="what asv calls this machine (default: ASV_MACHINE, else what it knows)",
    )
    parser.add_argument("--table", action="store_true", help="measure nothing, print what there is")
    parser.add_argument("--json", action="store_true", help="print JSON; the rest goes to stderr")
    parser.add_argument(
        "--repo", type=Path, default=REPO_ROOT, help="another checkout than this script's own"
    )
    return parser.parse_args(argv)


def bench(args: argparse.Namespace, repo: Path, shas: list[str], console: Any) -> tuple[Found, int]:
    """Measure commits; return their results and asv's exit status."""
    folder = results_folder(repo)
    asked = chosen(args.bench, args.full) if args.bench else []
    if args.table:
        return load_results(repo, _named(args.machine, machine_known_as), shas, asked), 0
    # Before minutes of measuring: asv would end with a traceback, or not know what it has.
    if odd := odd_files(folder):
        raise BenchError(_odd_told(odd, "asv's results cannot be added to"))
    if git(repo, "status", "--porcelain", "--", "python").strip():
        console.print("python/ has changes that are not committed: they are not measured.")
    machine = _named(args.machine, make_machine_known)
    for note in (*busy_notes(threads=2), *_changed_notes(os.environ)):
        console.print(f"[bold]{note}; what is kept is measured again by --rerun[/]")
    options = ["--record-samples", "--machine", machine]
    options += [] if args.rerun else ["--skip-existing-successful"]
    options += [part for regex in chosen(args.bench, args.full) for part in ("--bench", regex)]
    # Which cases some expression means only asv knows.
    cases = None if args.bench else sum(case.quick or args.full for case in CASES.values())
    with Progress(console, cases) as progress:
        status = run_asv(repo, shas, options, progress)
    return load_results(repo, machine, shas, asked), status


def _changed_notes(environ: Mapping[str, str]) -> list[str]:
    """What is to be said of variables that change what is measured, and are easily left behind."""
    found = [name for name in CHANGING_VARIABLES if environ.get(name)]
    return [
        f"{name}={environ[name]} changes what is measured, and so what is kept" for name in found
    ]


def chosen(regexes: Sequence[str], full: bool) -> list[str]:
    """asv's regular expressions for what is wanted of the quick set, or of all.

    Who names a class of the others, as ``DecodeMore``, wants it.
    """
    if full:
        return list(regexes)
    return [r if "More" in r else _of_quick(r) for r in regexes] or [QUICK]


def _of_quick(regex: str) -> str:
    # Flags of the whole stand first, or not at all.
    flags = match[0] if (match := re.match(r"\(\?[a-zA-Z]+\)", regex)) else ""
    # Looked for ahead, as it may begin with ^ or have alternatives.
    return f"{flags}(?={QUICK})(?=.*(?:{regex.removeprefix(flags)}))"


def _named(name: str | None, find: Callable[[str | None], str]) -> str:
    """What asv calls this machine."""
    try:
        return find(name)
    except (ValueError, OSError) as error:
        raise BenchError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    from rich.console import Console

    args = parse_args(argv)
    started = time.monotonic()
    repo: Path = args.repo.resolve()
    # A log has no width of its own, and the table needs some.
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 150)
    try:
        marks = landmarks(repo, args.commit)
        with contextlib.nullcontext() if args.table else measuring_alone(repo):
            found, status = bench(args, repo, [mark.sha for mark in marks], console)
            for note in found.notes:
                console.print(note, markup=False, highlight=False)
            asked_for = bool(args.bench)
            if not any(rows(found.values, asked_for)):
                if args.table:
                    of = f" of {' or '.join(args.bench)} to be shown" if args.bench else " yet"
                    raise BenchError(f"there are no results{of}: run `make bench` first")
                raise BenchError("asv has no results; its output is in .asv/bench.log")
            show(marks, found.values, console, asked_for)
            if args.json:
                print(json.dumps(_as_json(marks, found.values), indent=2))
            if not args.table:
                page, how = publish(repo)
                seconds = time.monotonic() - started
                console.print(f"asv site: {page} ({how}); {seconds:.0f} s in all", markup=False)
    except (BenchError, ProofError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; results of finished commits are kept", file=sys.stderr)
        return 130
    if status != 0:
        print(f"bench: error: asv run ended with {status}, see .asv/bench.log", file=sys.stderr)
    return status


def _as_json(marks: Sequence[Landmark], found: Sequence[Values]) -> list[dict[str, Any]]:
    return [
        {
            "commit": mark.sha,
            "names": mark.names,
            "results": [
                {"benchmark": key, "case": case, "value": v if v is None or v == v else "NaN"}
                for (key, case), v in values.items()
            ],
        }
        for mark, values in zip(marks, found, strict=True)
    ]


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
