"""What the whole Engine of a release does, on a machine without a GPU, and whether ours does the same.

`merge_proof` runs the situation of #21840 from end to end. `texts_proof` compares greedy texts and
logprobs with this project's engine. ``benchmark/lab/upstream_engine.py`` says what is asked.

Each engine runs in a session of processes of its own, with a time limit, and the whole of it is killed
at the end: an Engine that finds a leak kills the process that started it, and its children may stay.

Examples
--------
::

    PYTHONPATH=scripts .venv/bin/python -m upstream.engine_proof merge .cache/upstream/0.5.14/python \
        --python .cache/upstream/venv-transformers5/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from upstream.releases import REPO_ROOT, UPSTREAM

MODEL: Final = REPO_ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
PROMPTS: Final = Path(__file__).with_name("prompts.json")
# Logprobs. Both engines compute in float32 and add in different orders, which was seen to make up to
# 1.1e-4. Candidates that are closer than this may change places.
TOLERANCE: Final = 1e-3

Outcome = Literal["finishes", "dies", "hangs", "not triggered"]

_LEAK: Final = re.compile(r"\S*: (\w+ memory leak detected!.*)|\] (\w+ memory leak detected!.*)")
# The situation that has to come about: while nothing else runs, a scoring prompt is prefilled, and next
# a short one, which finds the scoring request in `running_batch`: its result is not known yet.
_PREFILL: Final = re.compile(r"(Prefill batch,.*#new-token: (\d+),.*#running-req: (\d+),.*)")
_LONG: Final = 1000
_STARTED: Final = "upstream_engine: round"
# How long a killed process may take to go.
_GONE_S: Final = 10.0


class ProofError(RuntimeError):
    """Nothing was proved, for a reason that is not the question's; the message is for a person."""


# --- Processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes
    ----------
    returncode : int or None
        As `subprocess` has it; None if the time was over.
    seconds : float
    """

    returncode: int | None
    seconds: float


def run_session(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float
) -> Ended:
    """Run a command, at most for `limit_s` seconds, and leave none of its processes behind.

    What it prints goes to the file `log`. Processes that leave the session are not found.
    """
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not (over := _has_ended(process)) and time.monotonic() - started < limit_s:
            time.sleep(0.05)
    finally:
        # The leader is not collected before this, so that its number can be no other process's.
        _kill_session(process.pid)
        process.wait()
    return Ended(process.returncode if over else None, time.monotonic() - started)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, how) is not None


def _kill_session(leader: int) -> None:
    """Kill a session's processes, and wait until they are gone."""
    deadline = time.monotonic() + _GONE_S
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        # Groups that were made within the session, and what was started in the meantime.
        alive = list(_session(leader))
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not alive or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _session(leader: int) -> Iterator[int]:
    """Numbers of a session's processes that are not dead; none on systems without /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may have anything in it: state, parent, group, session.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            yield int(stat.parent.name)


def _ask(
    scenario: str,
    log: Path,
    limit_s: float,
    package_dir: Path | None = None,
    python: Path | None = None,
    **variables: str,
) -> tuple[Ended, dict[str, Any] | None]:
    """Let an engine answer: that of `package_dir`, or else ours. None if it came to no answer."""
    ours = package_dir is None
    path = (package_dir or REPO_ROOT / "python", REPO_ROOT / "benchmark")
    # Settings of the caller's own engine are not meant for this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join(str(p.absolute()) for p in path),
        # No package of the folder from which this is called comes before them.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    # An engine that is killed leaves files behind.
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "answers.json"
        command = [
            *(str(python or sys.executable), "-m", "lab.upstream_engine", scenario),
            *("--engine", "ours" if ours else "upstream", "--model", str(MODEL)),
            *("--prompts", str(PROMPTS), "--out", str(out)),
        ]
        ended = run_session(command, environment | {"TMPDIR": folder}, log, limit_s)
        return ended, json.loads(out.read_text()) if out.is_file() else None


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").rstrip()[-1500:]


# --- #21840, end to end -------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeOutcome:
    """What came of generation requests behind scoring requests.

    Attributes
    ----------
    outcome : str
        ``"finishes"``: all requests end. ``"dies"``: the scheduler finds a leak. ``"hangs"``: a request
        does not end. ``"not triggered"``: all end, and never was a scoring request in `running_batch`
        when another one was prefilled. Schedulers up to 0.5.9 keep it out.
    quote : str
        The lines of the log that tell it.
    text : str, optional
        Answer to the generation request, if there is one.
    same_text : bool
        Whether all rounds gave it, and the engine alone before and after them.
    pools_whole : bool
        Whether an idle engine found no leak, told of no token in use, and served another request.
    seconds : float
        From the start of the process to the end of the last.
    """

    outcome: Outcome
    quote: str
    text: str | None = None
    same_text: bool = False
    pools_whole: bool = False
    seconds: float = 0.0


def merge_proof(
    package_dir: Path, python: Path, log: Path, limit_s: float = 300.0, strict: bool = True
) -> MergeOutcome:
    """Run the scenario ``merge`` of ``lab.upstream_engine`` on a package.

    Parameters
    ----------
    package_dir : Path
        The folder that has ``sglang`` in it.
    python : Path
        An interpreter that has what it imports.
    log : Path
        Where to write what it prints.
    limit_s : float
        Most seconds for all of it.
    strict : bool
        Whether a leak is an error, as by default, or a warning.

    Raises
    ------
    ProofError
        If the engine does not come as far as the scenario.
    """
    check = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": str(int(strict))}
    ended, answers = _ask("merge", log, limit_s, package_dir, python, **check)
    return judge_merge(answers, log.read_text(errors="replace"), ended)


def judge_merge(answers: dict[str, Any] | None, printed: str, ended: Ended) -> MergeOutcome:
    """What the answers, if there are any, and the log of an engine say.

    Raises
    ------
    ProofError
        If it did not come as far as the scenario, or broke in another way.
    """
    leaks = [a or b for a, b in _LEAK.findall(printed)]
    behind, triggered = _behind_scoring(printed)
    quote = "\n".join(line.strip() for line in (triggered or behind)[:1] + leaks[:1])
    if answers is None:
        if leaks:
            return MergeOutcome("dies", quote, seconds=ended.seconds)
        if ended.returncode is None and _STARTED in printed:
            quote = f"{quote}\nstopped after {ended.seconds:.0f} s".strip()
            return MergeOutcome("hangs", quote, seconds=ended.seconds)
        how = "was stopped" if ended.returncode is None else f"ended with {ended.returncode}"
        raise ProofError(f"the engine {how} before it answered:\n{printed.rstrip()[-1500:]}")
    if answers["hangs"]:
        said = [line for line in printed.splitlines() if "no answer within" in line]
        quote = "\n".join(filter(None, [quote, *said]))
        return MergeOutcome("hangs", quote, seconds=ended.seconds)
    told = [answers["alone"], *answers["rounds"], answers["again"]]
    pools = answers["pools"]
    return MergeOutcome(
        "finishes" if triggered else "not triggered",
        quote,
        text=answers["alone"]["text"],
        same_text=len({tuple(answer["output_ids"]) for answer in told}) == 1,
        pools_whole=not leaks and pools["used_tokens"] == 0 and pools["flushed"],
        seconds=ended.seconds,
    )


def _behind_scoring(printed: str) -> tuple[list[str], list[str]]:
    """Lines of the log that tell of a prompt behind a scoring one, and those where the defect shows."""
    prefills = [(line, int(n), int(running)) for line, n, running in _PREFILL.findall(printed)]
    behind = [
        (line, running)
        for (_, before, alone), (line, now, running) in itertools.pairwise(prefills)
        if before >= _LONG and alone == 0 and now < _LONG
    ]
    return [line for line, _ in behind], [line for line, running in behind if running == 1]


def our_text(log: Path, limit_s: float = 120.0) -> str:
    """What this project's engine answers to the generation request, in the same situation.

    Raises
    ------
    ProofError
        If it gives no answer.
    """
    ended, answers = _ask("merge", log, limit_s)
    if answers is None or answers["hangs"]:
        raise ProofError(f"our engine has no answer ({ended.returncode}):\n{_tail(log)}")
    return answers["alone"]["text"]


# --- Texts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where two engines first choose different tokens.

    Attributes
    ----------
    prompt, position : int
        Which prompt, and which token of its continuation.
    ours, theirs : int or None
        The tokens; None behind the end of a text.
    our_margin, their_margin : float
        How much more likely, in logprob, each engine took its own token to be than the other's; infinite
        if that was not even its second best.
    """

    prompt: int
    position: int
    ours: int | None
    theirs: int | None
    our_margin: float
    their_margin: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return max(self.our_margin, self.their_margin) <= TOLERANCE


@dataclass
class TextsOutcome:
    """How the texts and logprobs of two engines compare.

    Attributes
    ----------
    prompts : int
    same_input : bool
        Whether both made the same ids of each text.
    compared, left_out : int
        Tokens up to the first difference of each text, and behind it, where nothing can be compared.
    differences : list of Difference
        At most one a prompt.
    output_gap, input_gap : float
        Largest difference of a logprob, over the tokens that are compared, and over prompts and the
        scored text.
    scored : int
        Tokens of the scored text that have a logprob.
    seconds : dict of str to float
        Of each engine, start and end included.
    """

    prompts: int
    same_input: bool
    scored: int
    compared: int = 0
    left_out: int = 0
    differences: list[Difference] = field(default_factory=list)
    output_gap: float = 0.0
    input_gap: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether both engines compute the same, up to the rounding of logits."""
        near = all(difference.near_tie for difference in self.differences)
        return self.same_input and near and max(self.output_gap, self.input_gap) <= TOLERANCE

    def lines(self) -> list[str]:
        """The outcome for a person."""
        told = [
            f"{self.prompts} texts: {self.compared} tokens are the same, {self.left_out} stand behind a "
            f"difference and are not compared; logprobs differ by {self.output_gap:.1e} at most",
            f"prompts and {self.scored} scored tokens: "
            + ("the same ids" if self.same_input else "DIFFERENT ids")
            + f"; logprobs differ by {self.input_gap:.1e} at most",
        ]
        for d in self.differences:
            told.append(
                f"text {d.prompt}, token {d.position}: {d.ours} here, {d.theirs} there; margins "
                f"{d.our_margin:.1e} and {d.their_margin:.1e}: "
                + ("a near-tie" if d.near_tie else "NO near-tie")
            )
        return told


def texts_proof(package_dir: Path, python: Path, log: Path, limit_s: float = 300.0) -> TextsOutcome:
    """Run the scenario ``texts`` of ``lab.upstream_engine`` on our engine and on a package, and compare.

    Parameters are those of `merge_proof`; our engine's log lies beside the other one.

    Raises
    ------
    ProofError
        If one of them gives no answer.
    """
    our_log = log.with_name(f"ours-{log.name}")
    ours, our_end = _texts(our_log, limit_s)
    theirs, their_end = _texts(log, limit_s, package_dir, python)
    outcome = compare(ours, theirs)
    outcome.seconds = {"ours": our_end.seconds, "theirs": their_end.seconds}
    return outcome


def _texts(log: Path, limit_s: float, *package: Path) -> tuple[dict[str, Any], Ended]:
    ended, answers = _ask("texts", log, limit_s, *package)
    if answers is None:
        how = "was stopped" if ended.returncode is None else f"ended with {ended.returncode}"
        raise ProofError(f"the engine {how} before it answered:\n{_tail(log)}")
    return answers, ended


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> TextsOutcome:
    """Compare what two engines answered to the scenario ``texts``."""
    pairs = list(zip(ours["texts"], theirs["texts"], strict=True))
    with_input = [*pairs, (ours["scoring"], theirs["scoring"])]
    outcome = TextsOutcome(
        prompts=len(pairs),
        same_input=all(a["input_ids"] == b["input_ids"] for a, b in with_input),
        scored=len(ours["scoring"]["logprobs"]),
        input_gap=max(_gap(a["logprobs"], b["logprobs"]) for a, b in with_input),
    )
    for number, (a, b) in enumerate(pairs):
        same = _common(a["output_ids"], b["output_ids"])
        longest = max(len(a["output_ids"]), len(b["output_ids"]))
        outcome.compared += same
        outcome.left_out += longest - same
        outcome.output_gap = max(outcome.output_gap, _gap(a["chosen"][:same], b["chosen"][:same]))
        if same < longest:
            outcome.differences.append(_difference(number, same, a, b))
    return outcome


def _gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(ours, theirs)), default=0.0)


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts have in common from the beginning."""
    pairs = enumerate(zip(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _difference(number: int, at: int, a: dict[str, Any], b: dict[str, Any]) -> Difference:
    ours, theirs = (t["output_ids"][at] if at < len(t["output_ids"]) else None for t in (a, b))

    def margin(text: dict[str, Any], mine: int | None, other: int | None) -> float:
        logprobs = {token: lp for lp, token in text["best"][at]} if mine is not None else {}
        if not {mine, other} <= logprobs.keys():
            return float("inf")
        return logprobs[mine] - logprobs[other]

    margins = margin(a, ours, theirs), margin(b, theirs, ours)
    return Difference(number, at, ours, theirs, *margins)


# --- Command line -------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one proof and print what came of it; 1 if it is not what a release with both fixes does."""
    parser = argparse.ArgumentParser(prog="python -m upstream.engine_proof", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("proof", choices=("merge", "texts"))
    parser.add_argument("package_dir", type=Path, help="the folder that has sglang in it")
    parser.add_argument("--python", type=Path, required=True, help="an interpreter for it")
    parser.add_argument("--log", type=Path, default=UPSTREAM / "engine_proof.log")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S")
    parser.add_argument("--warn", action="store_true", help="let a leak be a warning (merge)")
    args = parser.parse_args(argv)
    try:
        if args.proof == "texts":
            texts = texts_proof(args.package_dir, args.python, args.log, args.limit)
            print(*texts.lines(), texts.seconds, sep="\n")
            return int(not texts.agrees)
        merge = merge_proof(args.package_dir, args.python, args.log, args.limit, not args.warn)
        print(f"{merge.outcome} ({merge.seconds:.1f} s)\n{merge.quote}")
        if merge.text is None:
            return 1
        ours = our_text(args.log.with_name(f"ours-{args.log.name}"))
        print(f"the same text each time: {merge.same_text}; ours: {merge.text == ours}")
        print(f"pools whole: {merge.pools_whole}")
        done = merge.outcome == "finishes" and merge.same_text and merge.text == ours
        return int(not (done and merge.pools_whole))
    except ProofError as error:
        print(f"engine_proof: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
