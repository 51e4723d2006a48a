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
_VERSION: Final = re.compile(r"""^(?:__version__|version)\b.*?=\s*['"]([^'"]+)['"]""", re.MULTILINE)


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
    asked = run_git(package, "ls-files", "--error-unmatch", str(_MARK))
    if "dubious ownership" in asked.stderr:
        raise CheckoutError(asked.stderr.strip())
    if asked.returncode != 0:
        return None
    return Path(git(package, "rev-parse", "--show-toplevel")).resolve()


# --- Git ----------------------------------------------------------------------------------------

_REDIRECTIONS: Final = frozenset(
    {"GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
)
# The user's hooks are made for the user's work, and a question for a passphrase would wait for ever.
_QUIETLY: Final = ("-c", f"core.hooksPath={os.devnull}", "-c", "commit.gpgsign=false")
_VARIABLES: Final = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "true",
    # What git says is read by this program.
    "LC_ALL": "C",
    "GIT_LFS_SKIP_SMUDGE": "1",
}


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
    """Run git in `folder`, whatever comes of it. No hook runs and nothing is signed.

    Raises
    ------
    CheckoutError
        If there is no git.
    """
    # A caller that is itself a git hook must not redirect these calls to its own repository.
    variables = {k: v for k, v in os.environ.items() if k not in _REDIRECTIONS} | _VARIABLES
    try:
        return subprocess.run(
            ["git", *_QUIETLY, *arguments],
            cwd=folder,
            env=variables | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise CheckoutError("git is not installed") from error


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
    if run_git(repository, "config", "--bool", "core.sparseCheckout").stdout.strip() == "true":
        raise CheckoutError(
            f"{repository} is a sparse checkout, and what is not there cannot be judged: "
            "git sparse-checkout disable"
        )
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
    """A temporary repository with a commit of another one checked out.

    It reads the other one's objects and has its own for what is new, so that nothing is left behind in
    the other one, whatever happens.
    """
    # By a name, the other repository alone can find it.
    commit = git(repository, "rev-parse", "--verify", f"{commit}^{{commit}}")
    objects = git(repository, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory(prefix="decode-path-") as folder:
        place = Path(folder).resolve() / "tree"
        place.mkdir()
        git(place, "init", "--quiet")
        (place / ".git" / "objects" / "info" / "alternates").write_text(f"{objects}\n")
        shallow = Path(
            git(repository, "rev-parse", "--path-format=absolute", "--git-path", "shallow")
        )
        if shallow.is_file():
            shutil.copyfile(shallow, place / ".git" / "shallow")
        for key in ("user.name", "user.email"):
            if value := run_git(repository, "config", key).stdout.strip():
                git(place, "config", key, value)
        git(place, "config", "core.autocrlf", "false")
        git(place, "checkout", "--quiet", "--detach", commit)
        yield place


def start_of(repository: Path, branch: str) -> str:
    """The commit to go on from: the branch if it is ahead of HEAD, or else HEAD.

    Raises
    ------
    CheckoutError
        If branch and HEAD have gone different ways, or its name is none.
    """
    # Not by --branch, which takes short forms for other branches.
    is_name = run_git(repository, "check-ref-format", f"refs/heads/{branch}").returncode == 0
    if not is_name or branch in ("@", "HEAD") or branch.startswith("-"):
        raise CheckoutError(f"{branch!r} is no name for a branch")
    head = git(repository, "rev-parse", "HEAD")
    found = run_git(repository, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}")
    if found.returncode != 0:
        return head
    tip = found.stdout.strip()
    if _is_behind(repository, head, tip):
        return tip
    if _is_behind(repository, tip, head):
        # It was merged, and history went on.
        return head
    raise CheckoutError(
        f"the branch {branch} of {repository} and what is checked out have gone different ways: "
        f"delete the branch (git branch -D {branch}), or name another one with --branch"
    )


def _is_behind(repository: Path, one: str, other: str) -> bool:
    return run_git(repository, "merge-base", "--is-ancestor", one, other).returncode == 0


def publish(place: Path, repository: Path, branch: str) -> None:
    """Let a branch of a repository be what is checked out in `scratch`'s place, which is ahead of it.

    If the branch is checked out in the repository, its files follow.

    Raises
    ------
    CheckoutError
        If git will not, for instance because the branch is checked out in another working tree.
    """
    commit = git(place, "rev-parse", "HEAD")
    git(place, "update-ref", "refs/heads/result", commit)
    fetch = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance")
    if (
        run_git(repository, "symbolic-ref", "--quiet", "HEAD").stdout.strip()
        == f"refs/heads/{branch}"
    ):
        git(repository, *fetch, str(place), "refs/heads/result")
        git(repository, "merge", "--quiet", "--ff-only", commit)
    else:
        git(repository, *fetch, str(place), f"refs/heads/result:refs/heads/{branch}")


def merge_name(repository: Path, branch: str) -> str:
    """What to call a branch where a tag may have its name."""
    tag = run_git(repository, "rev-parse", "--verify", "--quiet", f"refs/tags/{branch}")
    return branch if tag.returncode != 0 else f"heads/{branch}"


def commit_all(root: Path, message: str, environment: Mapping[str, str] | None = None) -> None:
    """Make a directory a repository of one commit that has everything in it."""
    git(root, "init", "--quiet", "--initial-branch=main")
    for key, value in (
        ("user.name", "Decode path"),
        ("user.email", "nobody@example.invalid"),
        ("core.autocrlf", "false"),
        ("gc.auto", "0"),
    ):
        git(root, "config", key, value)
    # --force: the package may carry a .gitignore, or be what the user's own ignores.
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", message, environment=environment)
