"""The fixes on real code: scenarios that run on a tree as it is, and on the tree with the fixes.

The tree with the fixes is a copy. What runs is ``lab.upstream_proofs`` (batches, pools and penalties of
the release, ported fixes, seconds) and, if asked, ``lab.upstream_engine`` (the whole Engine with a real
model, with fixes that are cherry-picked where they fit), in interpreters of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from upstream import engine_proof, pick, port, releases
from upstream.checkouts import CheckoutError, Tree, commit_all, find_tree
from upstream.engine_proof import MergeOutcome
from upstream.releases import REPO_ROOT, UPSTREAM
from upstream.status import FIXES, Status, status

LOGS: Final = UPSTREAM / "logs"
# A scenario takes seconds; importing a release for the first time takes longer.
LIMIT_S: Final = 600.0
ENGINE: Final = ("merge", "texts")

Say = Callable[[str], None]


class ProveError(RuntimeError):
    """A scenario could not be run; the message is for a person."""


@dataclass
class Proof:
    """What a scenario found.

    Attributes
    ----------
    scenario : str
        ``merge``, ``decode``, ``spec_decode``, ``engine merge`` or ``engine texts``.
    pr : int or None
        The fix that it is about.
    before, after : str
        What came of it on the tree as it is, and with the fixes.
    holds : bool
        Whether the defect shows before, if the tree has it, and everything is right after.
    quote : str
        Lines of a log that tell it.
    wrong : list of str
        What is not as it has to be.
    """

    scenario: str
    pr: int | None
    before: str
    after: str
    quote: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"holds": self.holds}


@dataclass
class Proven:
    """Everything about a tree.

    Attributes
    ----------
    how : dict of int to str
        By fix, what the port came to: ``"ported"``, ``"already fixed"``, ``"not affected"`` or
        ``"unknown shape"``.
    before, after : list of Status
    proofs : list of Proof
    """

    how: dict[int, str]
    before: list[Status]
    after: list[Status]
    proofs: list[Proof] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether both fixes are in, and all scenarios came out as they have to."""
        fine = all(one.verdict in ("fixed", "not affected") for one in self.after)
        return fine and all(proof.holds for proof in self.proofs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "how": {str(pr): how for pr, how in self.how.items()},
            "before": [one.as_dict() for one in self.before],
            "after": [one.as_dict() for one in self.after],
            "proofs": [proof.as_dict() for proof in self.proofs],
            "holds": self.holds,
        }


def prove(
    tree: Tree, python: Path, objects: bool = True, engine: Sequence[str] = (), say: Say = print
) -> Proven:
    """Run the scenarios on a tree, before and after.

    Parameters
    ----------
    tree : Tree
        Its files as they are, committed or not. They are not changed.
    python : Path
        An interpreter that has what the tree imports.
    objects : bool
        Whether to make batches and look at them.
    engine : sequence of str
        Of `ENGINE`: what to do with the whole Engine.

    Raises
    ------
    ProveError, engine_proof.ProofError
        If a scenario could not be run.
    """
    verdicts = {one.pr: one.verdict for one in status(tree)}
    with fixed_copy(tree, port_one) as (copy, how):
        say(", ".join(f"#{pr}: {what}" for pr, what in how.items()))
        proven = Proven(how, status(tree), status(copy))
        if objects:
            say("batches of the release, before and after")
            proven.proofs += _prove_objects(tree, copy, python, verdicts)
    if "merge" in engine:
        with fixed_copy(tree, pick_or_port_one) as (copy, how):
            proven.proofs.append(_prove_merge(tree, copy, how, python, verdicts[21840], say))
    if "texts" in engine:
        say("texts of the Engine, and of ours")
        proven.proofs.append(_prove_texts(tree, python))
    return proven


@contextlib.contextmanager
def fixed_copy(
    tree: Tree, fix: Callable[[Tree, int], str]
) -> Iterator[tuple[Tree, dict[int, str]]]:
    """A copy of a tree in which `fix` has fixed what it could, and what came of each fix."""
    with tempfile.TemporaryDirectory(prefix="decode-path-") as folder:
        root = Path(folder).resolve()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(tree.package, root / "python" / "sglang", ignore=ignored)
        commit_all(root, "A copy")
        copy = find_tree(root)
        yield copy, {pr: fix(copy, pr) for pr in FIXES}


def port_one(copy: Tree, pr: int) -> str:
    """Port a fix into a copy."""
    ported = port.change(copy, pr)
    port.write(copy, ported)
    return ported.outcome


def pick_or_port_one(copy: Tree, pr: int) -> str:
    """Cherry-pick a fix onto a copy, or port it if it does not fit."""
    with contextlib.suppress(CheckoutError):
        # A history without the commits cannot be picked from, and the port needs none.
        (picked,) = pick.apply(copy, [pr])
        if picked.outcome in (pick.CLEAN, pick.FIXED):
            return picked.outcome
    return port_one(copy, pr)


# --- Batches ------------------------------------------------------------------------------------


def _prove_objects(tree: Tree, copy: Tree, python: Path, verdicts: dict[int, str]) -> list[Proof]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = [pool.submit(run_objects, t.package.parent, python) for t in (tree, copy)]
        before, after = (run.result() for run in runs)
    return judge_objects(before, after, verdicts)


def run_objects(package_dir: Path, python: Path, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What ``lab.upstream_proofs`` prints about the package in a folder.

    Raises
    ------
    ProveError
        If it does not run.
    """
    path = os.pathsep.join([str(package_dir.absolute()), str(REPO_ROOT / "benchmark")])
    # Settings of the caller's own engine are not meant for this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    environment |= {"PYTHONPATH": path}
    command = [str(python), "-m", "lab.upstream_proofs"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        raise ProveError(f"the scenarios took longer than {limit_s:.0f} s") from error
    except OSError as error:
        raise ProveError(f"{python} cannot be run: {error}") from error
    if done.returncode != 0:
        raise ProveError(f"the scenarios could not be run:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def judge_objects(
    before: dict[str, Any], after: dict[str, Any], verdicts: dict[int, str]
) -> list[Proof]:
    """Proofs out of what `run_objects` found before and after."""
    merge = _judge_merge(before["merge"], after["merge"], verdicts[21840])
    paths = [_judge_copy(name, before[name], after[name]) for name in ("decode", "spec_decode")]
    slow = any(before[path.scenario]["penalties_block"] for path in paths)
    if slow != (verdicts[28500] == "affected"):
        what = f"{'a' if slow else 'no'} path blocks before"
        paths[0].wrong.append(f"the verdict is {verdicts[28500]}, and {what}")
    return [merge, *paths]


def _judge_merge(before: dict[str, Any], after: dict[str, Any], verdict: str) -> Proof:
    cases = len(after["cases"])
    proof = Proof(
        "merge",
        21840,
        f"{before['wrong']} of {cases} merges wrong",
        f"{after['wrong']} of {cases} merges wrong",
    )
    has_it = verdict in ("affected", "latent")
    if has_it != bool(before["wrong"]):
        proof.wrong.append(f"the verdict is {verdict}, and before {proof.before}")
    wrong = [case["name"] for case in after["cases"] if not case["right"]]
    if wrong:
        proof.wrong.append(f"after, wrong are {', '.join(wrong)}")
    for when, found in (("before", before), ("after", after)):
        if found["not_whole"]:
            proof.wrong.append(f"{when}, {found['not_whole']} merged batches are not whole")
    return proof


def _judge_copy(scenario: str, before: dict[str, Any], after: dict[str, Any]) -> Proof:
    if not after["feeds_penalties"]:
        proof = Proof(scenario, 28500, "feeds no penalties", "feeds no penalties")
    else:
        proof = Proof(scenario, 28500, _copies(before), _copies(after))
    if before["feeds_penalties"] != after["feeds_penalties"]:
        proof.wrong.append("penalties are fed on one side alone")
    if after["penalties_block"] != 0:
        proof.wrong.append(f"after, {after['penalties_block']} transfers of the penalties block")
    for name, what in (("penalties", "penalties"), ("kv", "KV lengths"), ("fed", "tokens")):
        if before[name] != after[name]:
            proof.wrong.append(f"{what} are others than before")
    for when, found in (("before", before), ("after", after)):
        right = [found["penalties"][logits]["right"] for logits in ("zero", "nonzero")]
        if not all(right):
            proof.wrong.append(f"{when}, penalties are not those of the reference")
        if not found["slots_right"] or found["kv"] != found["kv_without"]:
            proof.wrong.append(f"{when}, KV slots are wrong")
    return proof


def _copies(found: dict[str, Any]) -> str:
    rows = found["penalty_rows"]
    blocking = sum(row["calls"] for row in rows if row["blocking"])
    rest = sum(row["calls"] for row in rows if not row["blocking"])
    beside = found["without"]["blocking"]
    return f"{blocking} blocking, {rest} asynchronous" + (
        f" ({beside} more block without penalties)" if beside else ""
    )


# --- Engine -------------------------------------------------------------------------------------


def log_of(tree: Tree, name: str) -> Path:
    """Where the log of an Engine is kept."""
    LOGS.mkdir(parents=True, exist_ok=True)
    return LOGS / f"{tree.version() or 'unknown'}-{name}.log"


def _prove_merge(
    tree: Tree, copy: Tree, how: dict[int, str], python: Path, verdict: str, say: Say
) -> Proof:
    outcomes: dict[str, MergeOutcome] = {}
    for when, t in (("before", tree), ("after", copy)):
        say(f"the Engine {when}")
        log = log_of(tree, f"merge-{when}")
        outcomes[when] = engine_proof.merge_proof(t.package.parent, python, log)
        say(f"the Engine {when}: {outcomes[when].outcome}, {outcomes[when].seconds:.0f} s")
    say("our engine")
    ours = engine_proof.our_text(log_of(tree, "merge-ours"))
    return judge_engine(outcomes["before"], outcomes["after"], ours, how[21840], verdict)


def judge_engine(
    before: MergeOutcome, after: MergeOutcome, ours: str, how: str, verdict: str
) -> Proof:
    """A proof out of what the Engine did before and after, and of our engine's text."""
    proof = Proof("engine merge", 21840, before.outcome, after.outcome, before.quote)
    # Where the defect is latent the scheduler does not come into the situation.
    fine = ("finishes", "not triggered") if verdict == "latent" else ("finishes",)
    wanted = ("dies", "hangs") if verdict == "affected" else fine
    if before.outcome not in wanted:
        proof.wrong.append(f"the verdict is {verdict}, and before the Engine {before.outcome}")
    if after.outcome not in fine:
        proof.wrong.append(f"after, the Engine {after.outcome}: {after.quote}")
        return proof
    if not after.pools_whole:
        proof.wrong.append("after, pools are not whole")
    if not after.same_text or after.text != ours:
        proof.wrong.append(f"after, the text is {after.text!r}, and ours {ours!r}")
    if after.pools_whole and after.same_text and after.text == ours:
        proof.after = f"{how}: {after.outcome}, pools whole, text as ours"
    return proof


def _prove_texts(tree: Tree, python: Path) -> Proof:
    texts = engine_proof.texts_proof(tree.package.parent, python, log_of(tree, "texts"))
    first, second, *rest = texts.lines()
    wrong = [] if texts.agrees else ["the engines do not agree"]
    return Proof("engine texts", None, first, second, "\n".join(rest), wrong)


def interpreter_for(tree: Tree, given: Path | None, say: Say) -> Path:
    """The interpreter that was given, or the one of the release's environment."""
    return given or releases.environment(tree.version() or "", say=say)
