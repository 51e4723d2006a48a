"""The fix commits of this repository on another one, by ``git cherry-pick -x``.

Everything happens in a temporary repository first. Only if all of it went well does a branch get it, so
that the checkout stays as it was, whatever comes. Conflicts are never resolved here: with
``-X theirs`` git takes lines of this project's slice for upstream's, and ends without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import prove_fixes
from upstream.checkouts import (
    CheckoutError,
    Tree,
    git,
    publish,
    repository_of,
    run_git,
    scratch,
    start_of,
)
from upstream.port import BRANCH
from upstream.releases import REPO_ROOT
from upstream.shapes import ShapeError
from upstream.status import FIXES, status_of

CLEAN: Final = "picked"
FITS: Final = "fits"
FIXED: Final = "already fixed"
CONFLICT: Final = "conflict"


@dataclass
class Picked:
    """What became of one fix.

    Attributes
    ----------
    pr : int
    outcome : str
        ``"picked"``, ``"fits"`` if it was not published, ``"already fixed"``, ``"conflict"``, or
        ``"not tried"`` behind a conflict.
    source : str
        The commit of this repository.
    commit : str
        The commit on the branch.
    conflicts : list of str
        Files that conflict.
    """

    pr: int
    outcome: str
    source: str
    commit: str = ""
    conflicts: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class NoSuchCommitError(CheckoutError):
    """This repository's history does not have a fix."""


def fix_commit(pr: int, repository: Path = REPO_ROOT) -> str:
    """This repository's commit of a fix, found by its trailer.

    Raises
    ------
    NoSuchCommitError
        If there is not exactly one, or it touches other files than it should.
    """
    fix = next(fix for fix in prove_fixes.FIXES if fix.pr == pr)
    try:
        return prove_fixes.fix_commit(repository, fix, prove_fixes.trailers(repository))[0]
    except prove_fixes.ProofError as error:
        what = f"this repository's commit of #{pr} is not to be had"
        raise NoSuchCommitError(f"{what}: {error}") from error


def pick(
    tree: Tree,
    prs: Sequence[int] = tuple(FIXES),
    branch: str = BRANCH,
    start: str | None = None,
    dry_run: bool = False,
) -> list[Picked]:
    """Cherry-pick the fixes in order onto a branch of the tree's repository.

    Parameters are those of `upstream.port.port`.

    Raises
    ------
    CheckoutError
        If the repository cannot be worked on, or has another layout than upstream's.
    """
    repository = repository_of(tree)
    if tree.prefix != "python/sglang":
        raise CheckoutError(
            f"the package is at {tree.prefix} of {repository}, and the commits change "
            "python/sglang: take `port` instead"
        )
    if start is None and all(_is_fixed(tree, pr) for pr in prs):
        return [Picked(pr, FIXED, fix_commit(pr)) for pr in prs]
    with scratch(repository, start or start_of(repository, branch)) as place:
        done = apply(Tree(place / tree.prefix, place), prs)
        if any(picked.commit for picked in done) and not conflicts(done) and not dry_run:
            publish(place, repository, branch)
        else:
            for picked in done:
                picked.outcome = FITS if picked.outcome == CLEAN else picked.outcome
                picked.commit = ""
    return done


def conflicts(done: Sequence[Picked]) -> bool:
    """Whether a commit did not fit."""
    return any(picked.outcome == CONFLICT for picked in done)


def apply(tree: Tree, prs: Sequence[int]) -> list[Picked]:
    """Cherry-pick the fixes in order onto what is checked out in a tree; stops at a conflict.

    Raises
    ------
    CheckoutError
        If git fails in another way.
    """
    assert tree.repository is not None
    commits = {pr: fix_commit(pr) for pr in prs}
    git(tree.repository, "fetch", "--quiet", "--no-tags", str(REPO_ROOT), "HEAD")
    done: list[Picked] = []
    for pr, commit in commits.items():
        if conflicts(done):
            done.append(Picked(pr, "not tried", commit))
        elif _is_fixed(tree, pr):
            # Git would say "now empty" at best, and a conflict where the lines around have changed.
            done.append(Picked(pr, FIXED, commit))
        else:
            done.append(_pick_one(tree.repository, pr, commit))
    return done


def _is_fixed(tree: Tree, pr: int) -> bool:
    try:
        return status_of(tree, pr).verdict == "fixed"
    except ShapeError:
        return False


def _pick_one(place: Path, pr: int, commit: str) -> Picked:
    tried = run_git(place, "cherry-pick", "-x", commit)
    if tried.returncode == 0:
        return Picked(pr, CLEAN, commit, git(place, "rev-parse", "HEAD"))
    unmerged = git(place, "diff", "--name-only", "--diff-filter=U").split()
    changed = git(place, "status", "--porcelain", "--untracked-files=no")
    stopped = run_git(place, "rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD")
    if stopped.returncode == 0:
        git(place, "cherry-pick", "--abort")
    if unmerged:
        return Picked(pr, CONFLICT, commit, conflicts=unmerged)
    if stopped.returncode == 0 and not changed:
        return Picked(pr, FIXED, commit)
    raise CheckoutError(f"git cherry-pick failed:\n{tried.stderr.strip()[-2000:]}")
