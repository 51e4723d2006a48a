"""The fixes on real code: scenarios that run on a tree as it is, and on the tree with the fixes.

The tree with the fixes is a copy. What runs is ``lab.upstream_proofs`` (batches, pools and penalties of
the release, ported fixes, seconds) and, if asked, ``lab.upstream_engine`` (the whole Engine with a real
model, and the fix of the flag alone, cherry-picked where it fits), in interpreters of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from upstream import engine_proof, pick, port, releases
from upstream.checkouts import Tree, commit_all, find_tree
from upstream.engine_proof import MergeOutcome
from upstream.releases import UPSTREAM
from upstream.sessions import is_package_of, lab_environment
from upstream.status import FIXES, Status, slow_paths, status

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
    logs : list of str
        The files that have all of it.
    figures : dict of str to float
        What was measured.
    wrong : list of str
        What is not as it has to be.
    """

    scenario: str
    pr: int | None
    before: str
    after: str
    quote: str = ""
    wrong: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

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


def prove(tree: Tree, python: Path, engine: Sequence[str] = (), say: Say = print) -> Proven:
    """Run the scenarios on a tree, before and after.

    Parameters
    ----------
    tree : Tree
        Its files as they are, committed or not. They are not changed.
    python : Path
        An interpreter that has what the tree imports.
    engine : sequence of str
        Of `ENGINE`: what to do with the whole Engine.
    say : callable
        Told what happens.

    Raises
    ------
    ProveError, engine_proof.EngineError
        If a scenario could not be run.
    """
    with fixed_copy(tree, FIXES, port_one) as (copy, how):
        proven = Proven(how, status(tree), status(copy))
        say(", ".join(f"#{pr}: {what}" for pr, what in how.items()))
        say("its own batches, before and after")
        proven.proofs += _prove_objects(tree, copy, python, proven.before)
    if "merge" in engine:
        proven.proofs.append(_prove_merge(tree, python, proven.before[0].verdict, say))
    if "texts" in engine:
        say("texts of the Engine, and of ours")
        proven.proofs.append(_prove_texts(tree, python))
    return proven


@contextlib.contextmanager
def fixed_copy(
    tree: Tree, prs: Sequence[int], fix: Callable[[Tree, int], str]
) -> Iterator[tuple[Tree, dict[int, str]]]:
    """A copy of a tree in which `fix` has fixed what it could, and what came of each fix."""
    with tempfile.TemporaryDirectory(prefix="decode-path-") as folder:
        root = Path(folder).resolve()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(tree.package, root / "python" / "sglang", ignore=ignored)
        commit_all(root, "A copy")
        copy = find_tree(root)
        yield copy, {pr: fix(copy, pr) for pr in prs}


def port_one(copy: Tree, pr: int) -> str:
    """Port a fix into a copy."""
    ported = port.change(copy, pr)
    port.write(copy, ported)
    return ported.outcome


def pick_or_port_one(copy: Tree, pr: int) -> str:
    """Cherry-pick a fix onto a copy, or port it if it does not fit or this history lacks it."""
    with contextlib.suppress(pick.NoSuchCommitError):
        (picked,) = pick.apply(copy, [pr])
        if picked.outcome in (pick.CLEAN, pick.FIXED):
            return picked.outcome
    return port_one(copy, pr)


# --- Batches ------------------------------------------------------------------------------------


def _prove_objects(tree: Tree, copy: Tree, python: Path, before: Sequence[Status]) -> list[Proof]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = [pool.submit(run_objects, t.package.parent, python) for t in (tree, copy)]
        found = [run.result() for run in runs]
    return judge_objects(*found, verdict=before[0].verdict, slow=slow_paths(tree))


def run_objects(package_dir: Path, python: Path, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What ``lab.upstream_proofs`` prints about the package in a folder.

    Raises
    ------
    ProveError
        If it does not run, or another package ran.
    """
    command = [str(python), "-m", "lab.upstream_proofs"]
    environment = lab_environment(package_dir)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        raise ProveError(f"the scenarios took longer than {limit_s:.0f} s") from error
    except OSError as error:
        raise ProveError(f"{python} cannot be run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip()
        missing = f"{python} lacks a module\n" if "ModuleNotFoundError" in said else ""
        raise ProveError(f"the scenarios could not be run: {missing}{said[-2000:]}")
    found = json.loads(done.stdout)
    if not is_package_of(found["package"], package_dir):
        raise ProveError(f"{found['package']} ran, and not what is in {package_dir}")
    return found


def judge_objects(
    before: dict[str, Any], after: dict[str, Any], verdict: str, slow: set[str]
) -> list[Proof]:
    """Proofs out of what `run_objects` found before and after.

    Parameters
    ----------
    before, after : dict
    verdict : str
        On #21840, before.
    slow : set of str
        Of ``decode`` and ``spec_decode``, the paths whose copy has to block before.
    """
    proofs = [_judge_merge(before["merge"], after["merge"], verdict)]
    for name in ("decode", "spec_decode"):
        proofs.append(_judge_copy(name, before[name], after[name], name in slow))
    return proofs


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


def _judge_copy(scenario: str, before: dict[str, Any], after: dict[str, Any], slow: bool) -> Proof:
    if not after["feeds_penalties"]:
        proof = Proof(scenario, 28500, "feeds no penalties", "feeds no penalties")
    else:
        proof = Proof(scenario, 28500, _copies(before), _copies(after))
    if before["feeds_penalties"] != after["feeds_penalties"]:
        proof.wrong.append("penalties are fed on one side alone")
    if slow != (before["penalties_block"] > 0):
        copies = "its copy is slow" if slow else "it copies well, or not at all"
        proof.wrong.append(
            f"by the code {copies}, and before, {before['penalties_block']} transfers block"
        )
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
    """What penalties add to the transfers of a step."""
    asynchronous = found["with_penalties"]["asynchronous"] - found["without"]["asynchronous"]
    beside = found["without"]["blocking"]
    return f"{found['penalties_block']} blocking, {asynchronous} asynchronous" + (
        f" ({beside} more block without penalties)" if beside else ""
    )


# --- Engine -------------------------------------------------------------------------------------


def log_of(tree: Tree, name: str) -> Path:
    """Where the log of an Engine is kept: by version, and for trees elsewhere by their place."""
    LOGS.mkdir(parents=True, exist_ok=True)
    place = tree.package.as_posix()
    mark = (
        "" if tree.package.is_relative_to(UPSTREAM) else hashlib.sha256(place.encode()).hexdigest()
    )
    return LOGS / "-".join(filter(None, [tree.version() or "unknown", mark[:8], f"{name}.log"]))


def _prove_merge(tree: Tree, python: Path, verdict: str, say: Say) -> Proof:
    """The Engine with the fix of the flag alone, so that nothing else can be what helps."""
    logs = {when: log_of(tree, f"merge-{when}") for when in ("before", "after")}
    logs["ours"] = LOGS / "ours-merge.log"

    def run(package_dir: Path, when: str) -> MergeOutcome:
        say(f"the Engine {when}: {logs[when]}")
        outcome = engine_proof.merge_proof(package_dir, python, logs[when])
        say(f"the Engine {when}: {outcome.outcome}, {outcome.seconds:.0f} s")
        return outcome

    before = after = run(tree.package.parent, "before")
    how = pick.FIXED if verdict == "fixed" else verdict
    # Where nothing is to be fixed there is nothing else to run.
    if verdict not in ("fixed", "not affected"):
        with fixed_copy(tree, [21840], pick_or_port_one) as (copy, hows):
            how = hows[21840]
            after = run(copy.package.parent, "after")
    say(f"our engine: {logs['ours']}")
    ours = engine_proof.our_text(logs["ours"])
    proof = judge_engine(before, after, ours, how, verdict)
    proof.logs = [str(log) for log in logs.values() if log.is_file()]
    return proof


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
    log = log_of(tree, "texts")
    texts = engine_proof.texts_proof(tree.package.parent, python, log)
    first, second, *rest = texts.lines()
    wrong = [] if texts.agrees else ["the engines do not agree"]
    figures = {
        "compared": texts.compared,
        "output_gap": texts.output_gap,
        "input_gap": texts.input_gap,
    }
    return Proof("engine texts", None, first, second, "\n".join(rest), wrong, [str(log)], figures)


def interpreter_for(tree: Tree, given: Path | None, say: Say) -> Path:
    """The interpreter that was given, or the one of the release's environment."""
    return given or releases.environment(tree.version() or "", say=say)
