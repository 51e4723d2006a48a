"""Where SGLang lies in a directory, and git without touching what is checked out there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Where a directory that people name may have the package.
_PLACES: Final = (".", "python/sglang", "sglang", "..")
_MARK: Final = Path("srt/managers/schedule_batch.py")


class CheckoutError(RuntimeError):
    """Something is wrong with a checkout; the message is for a person, and says what to do."""


@dataclass(frozen=True)
class Tree:
    """SGLang's package in a directory.

    Attributes
    ----------
    package : Path
        The folder ``sglang``.
    repository : Path or None
        Root of the git repository that tracks it, if one does.
    """

    package: Path
    repository: Path | None

    @property
    def prefix(self) -> str:
        """The package from the root of the repository on: ``python/sglang``."""
        return self.package.relative_to(self.repository or self.package.parent).as_posix()

    def version(self) -> str | None:
        """The version as the package, its metadata or a tag of the repository tells it."""
        for name in ("_version.py", "version.py"):
            file = self.package / name
            if file.is_file() and (found := _VERSION.search(file.read_text(errors="replace"))):
                return found[1]
        for folder in self.package.parent.glob("sglang-*.dist-info"):
            return folder.name.removeprefix("sglang-").removesuffix(".dist-info")
        if self.repository is not None:
            tags = run_git(self.repository, "describe", "--tags", "--abbrev=0", "--match=v[0-9]*")
            if tags.returncode == 0:
                return tags.stdout.strip().removeprefix("v")
        return None


_VERSION: Final = re.compile(r"""^(?:__version__|version)\b.*?=\s*['"]([^'"]+)['"]""", re.MULTILINE)


def find_tree(directory: Path) -> Tree:
    """The package in a release, in the root or ``python`` of a checkout, or installed.

    Raises
    ------
    CheckoutError
        If there is none.
    """
    if not directory.exists():
        raise CheckoutError(f"{directory} does not exist")
    for place in _PLACES:
        package = (directory / place).resolve()
        if (package / _MARK).is_file():
            return Tree(package, _tracked_by(package))
    raise CheckoutError(
        f"{directory} is no tree of SGLang: none of {_MARK}, sglang/{_MARK} and "
        f"python/sglang/{_MARK} is in it"
    )


def _tracked_by(package: Path) -> Path | None:
    # A virtual environment inside of a checkout lies in a repository that knows nothing of it.
    if run_git(package, "ls-files", "--error-unmatch", str(_MARK)).returncode != 0:
        return None
    return Path(git(package, "rev-parse", "--show-toplevel")).resolve()


# --- Git ----------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run git in `folder` and return what it prints, without the last line's end.

    Raises
    ------
    CheckoutError
        If git fails; with what it said.
    """
    done = run_git(folder, *arguments, environment=environment)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise CheckoutError(f"git {arguments[0]} failed in {folder}:\n{said}")
    return done.stdout.removesuffix("\n")


def run_git(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, whatever comes of it."""
    # A caller that is itself a git hook must not redirect these calls to its own repository.
    variables = {k: v for k, v in os.environ.items() if k not in _REDIRECTIONS}
    # A question would wait for ever, and what git says is read by this program.
    variables |= {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=variables | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise CheckoutError("git is not installed") from error


_REDIRECTIONS: Final = frozenset(
    {"GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
)
# The user's hooks are made for the user's checkout, and would run in a temporary one.
NO_HOOKS: Final = ("-c", f"core.hooksPath={os.devnull}")


def repository_of(tree: Tree) -> Path:
    """The repository of a tree that can be worked on.

    Raises
    ------
    CheckoutError
        If there is none, it has no commit, changes are not committed, or git is busy with something.
    """
    repository = tree.repository
    if repository is None:
        raise CheckoutError(
            f"{tree.package} is not tracked by git, and the fixes come as commits. "
            "`port --diff` shows them as a patch"
        )
    if run_git(repository, "rev-parse", "--verify", "--quiet", "HEAD").returncode != 0:
        raise CheckoutError(f"{repository} has no commit yet")
    where = Path(git(repository, "rev-parse", "--absolute-git-dir"))
    for name in ("CHERRY_PICK_HEAD", "MERGE_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply"):
        if (where / name).exists():
            raise CheckoutError(
                f"{repository} is in the middle of something ({name}): finish or abort it first"
            )
    if changed := git(repository, "status", "--porcelain", "--untracked-files=no"):
        names = ", ".join(line[3:] for line in changed.splitlines()[:5])
        raise CheckoutError(
            f"{repository} has changes that are not committed ({names}): commit or stash them first"
        )
    return repository


@contextlib.contextmanager
def scratch(repository: Path, commit: str) -> Iterator[Path]:
    """A temporary working tree of a commit; what is checked out in the repository stays as it is."""
    with tempfile.TemporaryDirectory(prefix="decode-path-") as folder:
        place = Path(folder).resolve() / "tree"
        git(repository, *NO_HOOKS, "worktree", "add", "--quiet", "--detach", str(place), commit)
        try:
            yield place
        finally:
            run_git(repository, "worktree", "remove", "--force", str(place))
            shutil.rmtree(place, ignore_errors=True)
            run_git(repository, "worktree", "prune")


def start_of(repository: Path, branch: str) -> str:
    """The commit to go on from: the branch if it exists, HEAD if not.

    Raises
    ------
    CheckoutError
        If the branch is not HEAD or ahead of it, or its name is none.
    """
    if run_git(repository, "check-ref-format", "--branch", branch).returncode != 0:
        raise CheckoutError(f"{branch!r} is no name for a branch")
    head = git(repository, "rev-parse", "HEAD")
    found = run_git(repository, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}")
    if found.returncode != 0:
        return head
    tip = found.stdout.strip()
    if run_git(repository, "merge-base", "--is-ancestor", head, tip).returncode != 0:
        raise CheckoutError(
            f"the branch {branch} of {repository} exists and is not ahead of what is checked out: "
            f"delete it (git branch -D {branch}), or name another one with --branch"
        )
    return tip


def publish(repository: Path, branch: str, commit: str) -> None:
    """Let a branch be at a commit that is ahead of it; if it is checked out, its files follow.

    Raises
    ------
    CheckoutError
        If git will not, for instance because the branch is checked out in another working tree.
    """
    current = run_git(repository, "symbolic-ref", "--quiet", "--short", "HEAD").stdout.strip()
    if current == branch:
        git(repository, *NO_HOOKS, "merge", "--quiet", "--ff-only", commit)
    else:
        git(repository, "branch", "--no-track", "--force", branch, commit)


def commit_all(root: Path, message: str, environment: Mapping[str, str] | None = None) -> None:
    """Make a directory a repository of one commit that has everything in it."""
    git(root, "init", "--quiet", "--initial-branch=main")
    for key, value in (
        ("user.name", "Decode path"),
        ("user.email", "nobody@example.invalid"),
        ("commit.gpgsign", "false"),
        ("core.autocrlf", "false"),
        ("gc.auto", "0"),
    ):
        git(root, "config", key, value)
    # --force: the package may carry a .gitignore, or be what the user's own ignores.
    git(root, "add", "--all", "--force")
    git(root, *NO_HOOKS, "commit", "--quiet", "--message", message, environment=environment)
