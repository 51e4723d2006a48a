"""What the whole Engine of a release does, on a machine without a GPU, and whether ours does the same.

`merge_proof` runs the situation of #21840 from end to end. `texts_proof` compares greedy texts and
logprobs with this project's engine. ``benchmark/lab/upstream_engine.py`` says what is asked.

Each engine runs in a session of processes of its own, with a time limit, and the whole of it is killed
at the end: an Engine that finds a leak kills the process that started it, and its children may stay.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from upstream.releases import REPO_ROOT
from upstream.sessions import Ended, is_package_of, lab_environment, run_session

MODEL: Final = REPO_ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
PROMPTS: Final = Path(__file__).with_name("prompts.json")
# Logprobs. Both engines compute in float32 and add in different orders, which was seen to make up to
# 1.1e-4. Candidates that are closer than this may change places.
TOLERANCE: Final = 1e-3
# Tokens of each text.
TEXT_LEN: Final = 64

Outcome = Literal["finishes", "dies", "hangs", "not triggered"]

_LEAK: Final = re.compile(r"\S*: (\w+ memory leak detected!.*)|\] (\w+ memory leak detected!.*)")
# The situation that has to come about: while nothing else runs, a scoring prompt is prefilled, and next
# a short one, which finds the scoring request in `running_batch`: its result is not known yet.
_PREFILL: Final = re.compile(r"(Prefill batch,.*#new-token: (\d+),.*#running-req: (\d+),.*)")
_LONG: Final = 1000
_STARTED: Final = "upstream_engine: round"


class EngineError(RuntimeError):
    """Nothing was proved, for a reason that is not the question's; the message is for a person."""


def _ask(
    scenario: str,
    log: Path,
    limit_s: float,
    package_dir: Path | None = None,
    python: Path | None = None,
) -> tuple[Ended, dict[str, Any] | None]:
    """Let an engine answer: that of `package_dir`, or else ours. None if it came to no answer."""
    ours = package_dir is None
    package_dir = package_dir or REPO_ROOT / "python"
    environment = lab_environment(package_dir)
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
        answers = json.loads(out.read_text()) if out.is_file() else None
    if answers is not None and not is_package_of(answers["package"], package_dir):
        raise EngineError(f"{answers['package']} ran, and not what is in {package_dir}")
    return ended, answers


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


def merge_proof(package_dir: Path, python: Path, log: Path, limit_s: float = 300.0) -> MergeOutcome:
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

    Raises
    ------
    EngineError
        If the engine does not come as far as the scenario.
    """
    ended, answers = _ask("merge", log, limit_s, package_dir, python)
    return judge_merge(answers, log.read_text(errors="replace"), ended)


def judge_merge(answers: dict[str, Any] | None, printed: str, ended: Ended) -> MergeOutcome:
    """What the answers, if there are any, and the log of an engine say.

    Raises
    ------
    EngineError
        If it did not come as far as the scenario, or broke in another way.
    """
    leaks = [a or b for a, b in _LEAK.findall(printed)]
    behind, triggered = _behind_scoring(printed)
    quote = "\n".join(line.strip() for line in (triggered or behind)[:1] + leaks[:1])
    if answers is None:
        # A leak without the situation is another defect's.
        if leaks and triggered and _STARTED in printed:
            return MergeOutcome("dies", quote, seconds=ended.seconds)
        if ended.returncode is None and _STARTED in printed:
            quote = f"{quote}\nstopped after {ended.seconds:.0f} s".strip()
            return MergeOutcome("hangs", quote, seconds=ended.seconds)
        how = "was stopped" if ended.returncode is None else f"ended with {ended.returncode}"
        raise EngineError(f"the engine {how} before it answered:\n{printed.rstrip()[-1500:]}")
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


@functools.cache
def our_text(log: Path, limit_s: float = 120.0) -> str:
    """What this project's engine answers to the generation request, in the same situation.

    Raises
    ------
    EngineError
        If it gives no answer.
    """
    ended, answers = _ask("merge", log, limit_s)
    if answers is None or answers["hangs"]:
        raise EngineError(f"our engine has no answer ({ended.returncode}):\n{_tail(log)}")
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
    """

    prompts: int
    same_input: bool
    scored: int
    compared: int = 0
    left_out: int = 0
    differences: list[Difference] = field(default_factory=list)
    output_gap: float = 0.0
    input_gap: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether both engines compute the same, up to the rounding of logits."""
        near = all(difference.near_tie for difference in self.differences)
        gaps = (self.output_gap, self.input_gap)
        # Not a number is not small.
        close = all(math.isfinite(gap) and gap <= TOLERANCE for gap in gaps)
        return self.same_input and near and close and self.compared > 0

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
    EngineError
        If one of them gives no answer.
    """
    our_log = log.with_name(f"ours-{log.name}")
    return compare(_texts(our_log, limit_s), _texts(log, limit_s, package_dir, python))


def _texts(log: Path, limit_s: float, *package: Path) -> dict[str, Any]:
    ended, answers = _ask("texts", log, limit_s, *package)
    if answers is None:
        how = "was stopped" if ended.returncode is None else f"ended with {ended.returncode}"
        raise EngineError(f"the engine {how} before it answered:\n{_tail(log)}")
    return answers


def compare(ours: dict[str, Any], theirs: dict[str, Any], length: int = TEXT_LEN) -> TextsOutcome:
    """Compare what two engines answered to the scenario ``texts``, with `length` tokens to each prompt.

    Raises
    ------
    EngineError
        If one of them did not answer in full.
    """
    for name, answers in (("ours", ours), ("theirs", theirs)):
        _must_be_whole(name, answers, length)
    pairs = list(zip(ours["texts"], theirs["texts"], strict=True))
    with_input = [*pairs, (ours["scoring"], theirs["scoring"])]
    outcome = TextsOutcome(
        prompts=len(pairs),
        same_input=all(a["input_ids"] == b["input_ids"] for a, b in with_input),
        scored=len(ours["scoring"]["logprobs"]),
        input_gap=_worst(
            _gap(a["logprobs"], b["logprobs"]) if a["input_ids"] == b["input_ids"] else math.inf
            for a, b in with_input
        ),
    )
    for number, (a, b) in enumerate(pairs):
        same = _common(a["output_ids"], b["output_ids"])
        longest = max(len(a["output_ids"]), len(b["output_ids"]))
        outcome.compared += same
        outcome.left_out += longest - same
        gap = _gap(a["chosen"][:same], b["chosen"][:same])
        outcome.output_gap = _worst((outcome.output_gap, gap))
        if same < longest:
            outcome.differences.append(_difference(number, same, a, b))
    return outcome


def _must_be_whole(name: str, answers: dict[str, Any], length: int) -> None:
    for number, text in enumerate(answers["texts"]):
        lengths = {len(text[key]) for key in ("output_ids", "chosen", "best")}
        if lengths != {length}:
            raise EngineError(f"text {number} of {name} has {sorted(lengths)} tokens, not {length}")
    for text in (*answers["texts"], answers["scoring"]):
        if len(text["logprobs"]) != len(text["input_ids"]) - 1 or len(text["logprobs"]) < 1:
            raise EngineError(f"{name} left logprobs of input tokens out")


def _gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference; not a number if one of them is none."""
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)


def _worst(gaps: Iterable[float]) -> float:
    gaps = list(gaps)
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


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
