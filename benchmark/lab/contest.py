"""Two sides in turns: pairs of processes that are copies of one, each with another package.

The same code takes another time in another process, by several percent: memory lies elsewhere, and
libraries with it. So one process of each side would tell little. A contest has many, in pairs, and what
is compared is a pair. All are forked from one process that has torch in it already, so that the two of a
pair differ in the package alone; and none takes seconds to start. Within a pair the sides take turns,
case by case, in an order that is the other way round in each second round and each second pair.

Host work alone tells small differences soonest, and processes that run nothing else take little time. So
behind each pair of all cases there are short ones of that. A metric is judged by all pairs that have it,
which count alike.

What is counted and not timed (transfers, bytes) is the same each time, and is asked of each side once,
of the case as it stands.

A round's metrics are those of `lab.metrics`, and ``cpu_us_per_token``: what all threads of the process
have computed, and not waited, which a neighbour on the machine changes far less than the time.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Final

import numpy as np

from lab import verdicts
from lab.cases import CASES, Case
from lab.models import Unsupported
from lab.workloads import make_session, once_more

PRELOADED: Final = ("numpy", "torch", "numba", "safetensors.torch", "tokenizers", "jinja2", "tqdm")
"""What all sides have in common, loaded once. Nothing of it may start a thread or compute."""


@dataclass(frozen=True)
class Turns:
    """How a contest runs a case.

    Attributes
    ----------
    rounds : int
        In each pair. The median of many is what a busy neighbour does not move.
    output_len : int, optional
        Tokens that a request generates, where that is fewer than the case says. Short rounds in turns
        see the same neighbours; long ones do not.
    """

    rounds: int
    output_len: int | None = None


VERSION: Final = 4
"""Of what is measured: to be counted up where `QUICK`, `SHORT`, `GATED` or a round of them gets another
meaning.

Error rates that were measured of one version say nothing of another."""

ROUNDS: Final = 4
"""Of a case that is not of the quick set."""

QUICK: Final = {
    "scheduler/b8": Turns(6, 64),
    "scheduler/b64": Turns(6, 48),
    "decode/tiny-b8": Turns(5, 32),
    "decode/tiny-b32-penalties": Turns(4, 16),
    "mixed/tiny-b8": Turns(4, 16),
    "decode/tiny-b8-chain-penalties": Turns(4, 16),
    "penalties/plain-b64": Turns(4),
}
"""The quick set. Host work that stands alone is measured most exactly, so it comes most often."""

SHORT: Final = {"scheduler/b8": 10}
"""Cases that have short pairs of their own besides, with their rounds there.

On a busy machine the noise of a pair is that of its rounds, and falls with the root of their number; on
an idle one it is between processes."""

SHORT_PAIRS: Final = 3
"""How many of them come behind each pair of all cases."""

QUICK_COUNTS: Final = (
    "transfers/plain-penalties-normal",
    "transfers/plain-penalties",
    "transfers/chain-penalties",
    "transfers/tree-penalties",
    "memory/plain-penalties",
    "memory/tree-penalties",
)
"""What is counted in the quick set."""

GATED: Final = (
    "cpu_us_per_token",
    "us_per_token",
    "itl_p50_ms",
    "host_us_per_step",
    "score_p50_ms",
    "steps_per_token",
    "us_per_step",
    "us_per_join",
    "prepare_us",
    "merge_us",
    "filter_us",
)
"""Metrics that differ from round to round and that verdicts are about; of each, smaller is better."""

COUNTED: Final = (
    "blocking_per_step",
    "transfers_per_step",
    "transfer_bytes_per_step",
    "peak_step_bytes",
    "penalty_state_bytes",
)
"""Those that are counted; again, smaller is better."""

ANSWER_S: Final = 180.0
"""Seconds for a first round, in which code is compiled."""
ROUND_S: Final = 60.0
"""Seconds for one of those that follow."""
TRY_S: Final = 240.0
"""Seconds in which both sides have to show what they can do: one that hangs does not hang it all."""


class ContestError(RuntimeError):
    """A side could not do the work; says which and what."""


class CaseError(ContestError):
    """A side could not do a case.

    Attributes
    ----------
    case : str
    side : Side
    why : str
    is_late : bool
        Whether it has not answered yet.
    """

    def __init__(self, case: str, side: Side, why: str, is_late: bool = False) -> None:
        super().__init__(f"{side.name}, {case}: {why}")
        self.case, self.side, self.why, self.is_late = case, side, why, is_late


@dataclass(frozen=True)
class _Inability:
    """Why a side has no numbers of a case.

    Attributes
    ----------
    why : str
    is_untold : bool
        Whether it could have had some if there had been more time.
    """

    why: str
    is_untold: bool = False


@dataclass(frozen=True)
class Side:
    """One of the two.

    Attributes
    ----------
    name : str
        For people.
    package : str
        Directory that holds its ``sglang``.
    """

    name: str
    package: str


@dataclass
class Pair:
    """What a pair of processes has measured: by case, metrics of each round."""

    base: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    head: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def log_ratios(self) -> dict[str, float]:
        """By "case metric", head by base."""
        found = {}
        for case in self.base:
            base, head = ([_gated(r) for r in side[case]] for side in (self.base, self.head))
            try:
                ratios = verdicts.log_ratios(base, head)
            except ValueError as error:
                raise ContestError(f"{case}: {error}") from error
            found |= {f"{case} {name}": value for name, value in ratios.items()}
        return found


def _gated(found: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name in GATED}


def _serve(channel: Any, package: str, threads: int, scratch: str) -> None:
    """Run rounds of cases as they are asked for, in a process of its own, until it is killed."""
    # At a terminal it is told of an interrupt too, which is whoever asks to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_asker, daemon=True).start()
    os.dup2(2, 1)
    padding = _padding()  # noqa: F841
    sys.path.insert(0, package)
    import torch

    torch.set_num_threads(threads)
    sessions: dict[Any, Any] = {}
    while True:
        try:
            question = channel.recv()
        except (EOFError, OSError):
            return  # whoever asked has gone
        try:
            _import_package(package)
            answer = _round(sessions, Path(scratch), *question)
        except Unsupported as error:
            answer = {"unsupported": str(error)}
        except Exception:
            answer = {"error": traceback.format_exc(limit=-4, chain=False)}
        try:
            channel.send(answer)
        except OSError:
            return


def _end_with_asker() -> None:
    """End this process with the one that asks, also while it hangs in a round.

    It does not show by the parent: that is the server which forked it, and lives as long as it does.
    """
    asker = parent_process()
    assert asker is not None
    asker.join()
    os._exit(1)


def _import_package(package: str) -> None:
    import sglang

    if not Path(sglang.__file__).is_relative_to(package):
        raise ImportError(f"sglang came from {sglang.__file__} and not from {package}")


def _padding() -> list[bytearray]:
    """Memory of random sizes, taken before anything else is.

    Where things lie is worth some percent of a few microseconds' work, and a path that is a letter
    longer moves all of it. So each process has a layout of its own, whose worth is noise like any.
    """
    draw = random.Random()
    return [bytearray(draw.randrange(16, 4096)) for _ in range(draw.randrange(400))]


def _round(sessions: dict[Any, Any], scratch: Path, name: str, warm_up: bool) -> dict[str, Any]:
    case = _shortened(CASES[name], name)
    if case.engine_key not in sessions:
        # One that cannot be had leaves its directory behind.
        directory = tempfile.mkdtemp(dir=scratch)
        sessions[case.engine_key] = make_session(case.setup, Path(directory))
    session = sessions[case.engine_key]
    gc.collect()

    def run() -> dict[str, float]:
        started = time.process_time()
        found = session.run_round(case.shortened() if warm_up else case)
        spent = time.process_time() - started
        if "us_per_token" in found:
            found["cpu_us_per_token"] = 1e6 * spent / (case.batch_size * case.output_len)
        return found

    return {"metrics": once_more(run)}


def _shortened(case: Case, name: str) -> Case:
    """A case as a contest runs it."""
    length = QUICK[name].output_len if name in QUICK else None
    return dataclasses.replace(case, output_len=min(length or case.output_len, case.output_len))


def _schedule(rounds: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Cases, each with the number of its round, spread evenly over a pair."""
    most = max(rounds.values())
    for turn in range(most):
        for case, wanted in rounds.items():
            done = turn * wanted // most
            if (turn + 1) * wanted // most > done:
                yield case, done


def _compare_counts(
    case: str, base: Mapping[str, float], head: Mapping[str, float]
) -> list[verdicts.Verdict]:
    names = [name for name in COUNTED if name in base and name in head]
    return [verdicts.count(f"{case} {name}", base[name], head[name]) for name in names]


class Worker:
    """A process of one side.

    Parameters
    ----------
    context : multiprocessing context
    side : Side
    threads : int
        Of torch.
    """

    def __init__(self, context: Any, side: Side, threads: int) -> None:
        self.side = side
        self._case = ""
        self._scratch = tempfile.TemporaryDirectory(prefix="lab-")
        self._channel, theirs = context.Pipe()
        arguments = (theirs, side.package, threads, self._scratch.name)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, case: str, warm_up: bool = False) -> None:
        """Have it run one round, whose metrics `answer` gets.

        Parameters
        ----------
        case : str
        warm_up : bool
            A shorter one.
        """
        self._case = case
        # Who waits for the answer is told why there is none.
        with suppress(OSError):
            self._channel.send((case, warm_up))

    def answer(self, patience: float = ANSWER_S) -> dict[str, float] | None:
        """Metrics of the round that was asked for; None if the commit has no API for the case.

        Parameters
        ----------
        patience : float
            Seconds to wait for it.

        Raises
        ------
        CaseError
            If the work was not done.
        """
        case = self._case
        try:
            if not self._channel.poll(patience):
                raise CaseError(case, self.side, f"no answer for {patience:.0f} s", is_late=True)
            answer = self._channel.recv()
        except (EOFError, OSError) as error:
            raise CaseError(case, self.side, "the process has died") from error
        if "error" in answer:
            raise CaseError(case, self.side, answer["error"].strip())
        return answer.get("metrics")

    def run(
        self, case: str, warm_up: bool = False, patience: float = ANSWER_S
    ) -> dict[str, float] | None:
        """Have it run one round and wait for the metrics; see `ask` and `answer`."""
        self.ask(case, warm_up)
        return self.answer(patience)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._channel.close()
        self._scratch.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def forking(threads: int) -> Iterator[Any]:
    """A multiprocessing context whose processes are forked from one that has `PRELOADED`."""
    # Equal in all processes: the order of sets, and with it what lies where.
    wanted = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    kept = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    try:
        yield context
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Contest:
    """Compares two sides, pair by pair.

    Parameters
    ----------
    context : multiprocessing context
        Of `forking`.
    base, head : Side
    cases : sequence of str
        Of `lab.cases.CASES`.
    rounds : int, optional
        Of each case, in each pair, instead of what `QUICK` says or `ROUNDS`.
    threads : int

    Attributes
    ----------
    pairs : list of Pair
        Of all cases.
    short : list of Pair
        Of those that have some of their own.
    notes : list of str
        Cases that were left out, and why.
    """

    def __init__(
        self,
        context: Any,
        base: Side,
        head: Side,
        cases: Sequence[str],
        rounds: int | None = None,
        threads: int = 1,
    ) -> None:
        self._context = context
        self.sides = (base, head)
        self._cases = list(cases)
        self._rounds = {
            case: rounds or (QUICK[case].rounds if case in QUICK else ROUNDS) for case in cases
        }
        self._threads = threads
        self._short = {case: rounds or turns for case, turns in SHORT.items() if case in cases}
        self.pairs: list[Pair] = []
        self.short: list[Pair] = []
        self.notes: list[str] = []
        self._fixed: list[verdicts.Verdict] = []

    def prepare(self) -> None:
        """See what both sides can do, count what is counted, and let each compile what it keeps.

        A case that only the head fails at is a verdict, and so is one that there was no time for; one
        that the base fails at, or has no API for, is left out.

        Raises
        ------
        ContestError
            If no case is left that both can do, and no verdict.
        """
        found = self._try()
        for case in list(self._cases):
            base, head = (answers[case] for answers in found)
            if isinstance(base, _Inability):
                self._leave_out(case, self.sides[0], base)
            elif isinstance(head, _Inability):
                self._leave_out(case, self.sides[1], head)
            elif not CASES[case].varies:
                self._cases.remove(case)
                self._fixed += _compare_counts(case, base, head)
        nothing = {verdict.verdict for verdict in self._fixed} <= {verdicts.CANNOT_TELL}
        if not self._cases and nothing:
            raise ContestError("; ".join(["there is no case that both can do", *self.notes]))

    def _leave_out(self, case: str, side: Side, inability: _Inability) -> None:
        self._cases.remove(case)
        why = inability.why
        if inability.is_untold:
            self._fixed.append(verdicts.not_reached(case))
        elif side is not self.sides[0]:
            self._fixed.append(verdicts.failure(case))
        else:
            # Whoever reads this looks after the head, and does not look for a mistake in the base.
            why = why.splitlines()[-1]
        self.notes.append(f"{case} left out: {side.name}: {why}")
        for pair in (*self.pairs, *self.short):
            pair.base.pop(case, None)
            pair.head.pop(case, None)

    def _try(self) -> list[dict[str, dict[str, float] | _Inability]]:
        """Of each side, by case: what a round gave, or why there is none.

        Both sides are at it at once, for nothing is timed yet.
        """
        found: list[dict[str, dict[str, float] | _Inability]] = [{}, {}]
        limit = time.monotonic() + TRY_S
        workers: dict[int, Worker] = {}
        try:
            for case in self._cases:
                if time.monotonic() >= limit:
                    late = _Inability(f"not reached within {TRY_S:.0f} s", is_untold=True)
                    for of_side in found:
                        of_side[case] = late
                    continue
                for i, side in enumerate(self.sides):
                    if i not in workers:
                        workers[i] = Worker(self._context, side, self._threads)
                    # What a case is counted in must be all of it.
                    workers[i].ask(case, CASES[case].varies)
                for i, of_side in enumerate(found):
                    left = max(limit - time.monotonic(), 0.0)
                    try:
                        metrics = workers[i].answer(min(left, ANSWER_S))
                        no_api = _Inability("has no API for it")
                        of_side[case] = no_api if metrics is None else metrics
                    except CaseError as error:
                        of_side[case] = _Inability(error.why, error.is_late and left < ANSWER_S)
                        # Its engine cannot be trusted any more, and may go on for ever.
                        workers.pop(i).close()
        finally:
            for worker in workers.values():
                worker.close()
        return found

    def run_pair(self, tick: Callable[[str], None] = lambda what: None) -> Pair | None:
        """Measure with one more pair of processes, and the short ones behind it.

        `tick` is told of each step.

        Returns
        -------
        Pair or None
            None if a side could not do a case in it. That is left out from now on, as in `prepare`, and
            nothing is kept of this pair.
        """
        rounds = {case: self._rounds[case] for case in self._cases}
        try:
            pair = self._measure_pair(tick, rounds, len(self.pairs))
        except CaseError as error:
            self._leave_out(error.case, error.side, _Inability(error.why))
            return None
        self.pairs.append(pair)
        for _ in range(SHORT_PAIRS):
            short = {case: turns for case, turns in self._short.items() if case in self._cases}
            if not short or len(short) == len(self._cases):
                break  # where there is nothing else, each pair is short
            try:
                self.short.append(self._measure_pair(tick, short, len(self.short)))
            except CaseError as error:
                self._leave_out(error.case, error.side, _Inability(error.why))
        return pair

    def _measure_pair(
        self, tick: Callable[[str], None], rounds: Mapping[str, int], number: int
    ) -> Pair:
        # Which one is started first, and which one has the first turn.
        order = (0, 1) if number % 2 == 0 else (1, 0)
        pair = Pair({case: [] for case in rounds}, {case: [] for case in rounds})
        with ExitStack() as stack:
            workers: dict[int, Worker] = {}
            for i in order:
                worker = Worker(self._context, self.sides[i], self._threads)
                workers[i] = stack.enter_context(worker)
            for case in rounds:
                for i in order:
                    tick(f"warm-up: {case}")
                    workers[i].run(case, warm_up=True)
            for case, turn in _schedule(rounds):
                for i in order if turn % 2 == 0 else order[::-1]:
                    tick(case)
                    found = workers[i].run(case, patience=ROUND_S)
                    assert found is not None
                    (pair.base, pair.head)[i][case].append(found)
        return pair

    def log_ratios(self) -> tuple[list[str], np.ndarray]:
        """Names of the metrics of time that all long pairs have, and their numbers.

        Returns
        -------
        names : list of str
            "case metric".
        logs : ndarray, shape (n, m)
            Logarithms of head by base, a pair each row, the short ones last; NaN where these have none.
        """
        rows = [pair.log_ratios() for pair in self.pairs]
        names = [name for name in (rows or [{}])[0] if all(name in row for row in rows)]
        rows += [pair.log_ratios() for pair in self.short]
        return names, np.array([[row.get(name, np.nan) for name in names] for row in rows])

    def judge(self, tolerance: float = verdicts.TOLERANCE, **how: float) -> list[verdicts.Verdict]:
        """Verdicts on what was counted and on what all pairs have, see `lab.verdicts.judge`.

        Raises
        ------
        ContestError
            If nothing that was measured is what verdicts are about.
        """
        fixed = [verdict.within(tolerance) for verdict in self._fixed]
        if not self.pairs:
            fixed += [verdicts.not_reached(case) for case in self._cases]
        names, logs = self.log_ratios()
        if not names:
            if not fixed:
                raise ContestError(
                    "; ".join(["nothing was measured that verdicts are about", *self.notes])
                )
            return fixed
        return fixed + verdicts.judge(names, logs, tolerance=tolerance, **how)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to be measured in pairs."""
        return not self._cases
