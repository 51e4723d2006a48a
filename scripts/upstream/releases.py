"""Releases of SGLang as git repositories, and interpreters in which they run without a GPU.

Everything lies in ``.cache/upstream`` and none of it is ever committed:

- ``VERSION/`` is a repository of one commit with the tag ``vVERSION``. It has what the wheel on PyPI
  has, at the paths of upstream's own repository (``python/sglang``), so that patches apply.
- ``dl/`` holds the wheels. Their SHA-256 must be those of ``checksums.json`` beside this file; of wheels
  that are not listed there, what they were when they first came (``.cache/upstream/checksums.json``).
- ``venv-transformers4`` and ``venv-transformers5`` are environments for older and newer releases, see
  `environment_name`.

What is there is used as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from upstream import checkouts

REPO_ROOT: Final = Path(__file__).resolve().parents[2]
UPSTREAM: Final = REPO_ROOT / ".cache" / "upstream"
PINNED: Final = Path(__file__).with_name("checksums.json")

_PLATFORM: Final = (
    *("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"),
    *("--platform", "manylinux_2_34_x86_64"),
)
_VERSION: Final = re.compile(r"(\d+(?:\.\d+)*)(?:(rc|a|b|\.post|\.dev)(\d+))?")
# From here on the newer environment. A release asks for a version of transformers of its own; these two
# have been seen to run the batches of all, and the Engine of 0.5.10rc0, 0.5.10.post1 and 0.5.14.
_TRANSFORMERS_5: Final = (0, 5, 13)
# A candidate that wants the newer one, which the release behind it does not.
_TRANSFORMERS_5_TOO: Final = "0.5.10rc"
_DATE: Final = "2000-01-01T00:00:00Z"

Say = Callable[[str], None]


class ReleaseError(RuntimeError):
    """Something cannot be had; the message is for a person, and says what to do."""


# --- Releases -----------------------------------------------------------------------------------


def release(version: str, root: Path | None = None, say: Say = print) -> Path:
    """The repository of a release, which is downloaded and unpacked if it is not there.

    Raises
    ------
    ReleaseError
        If it cannot be had, or is another file than it was.
    """
    root = root or UPSTREAM
    tree = root / version
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"{version!r} is no version of SGLang, such as 0.5.14 or 0.5.13.post1")
    if is_there(version, root):
        if not _is_as_it_came(tree, version):
            raise ReleaseError(f"{tree} is not what came from PyPI any more: remove it, or move it")
        say(f"SGLang {version} is there")
        return tree
    wheel = _wheel(version, root / "dl", say)
    found = _pinned(wheel)
    # Under another name first, so that what is there is whole.
    unpacked = root / f".{version}.unpacked"
    for folder in (unpacked, tree):
        shutil.rmtree(folder, ignore_errors=True)
    _unpack(wheel, unpacked)
    _compare(wheel, found, root / "checksums.json")
    _make_repository(unpacked, version)
    unpacked.rename(tree)
    say(f"SGLang {version} is unpacked")
    return tree


def is_there(version: str, root: Path | None = None) -> bool:
    """Whether a release has been fetched, whole."""
    tree = (root or UPSTREAM) / version
    return (tree / ".git").is_dir() and (tree / "python" / "sglang" / "__init__.py").is_file()


def _is_as_it_came(tree: Path, version: str) -> bool:
    """Whether what is checked out is the release and nothing else."""
    tag = checkouts.run_git(tree, "rev-parse", "--verify", "--quiet", f"v{version}^{{commit}}")
    head = checkouts.run_git(tree, "rev-parse", "HEAD")
    changed = checkouts.run_git(tree, "status", "--porcelain", "--untracked-files=no")
    return tag.stdout == head.stdout and changed.returncode == 0 and not changed.stdout


def _wheel(version: str, folder: Path, say: Say) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"sglang-{version}-*.whl"
    if not list(folder.glob(pattern)):
        say(f"downloading SGLang {version}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # The same file everywhere, whose checksum is known. It is the text that is used.
        command += ["--only-binary=:all:", *_PLATFORM, "--dest", str(folder), f"sglang=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise ReleaseError(
                f"SGLang {version} is missing: there is no {pattern} in {folder}, and it is not to be "
                f"had from the package index. Put it there, or try again with a network.\n"
                f"{done.stderr.strip()[-1500:]}"
            )
    wheels = sorted(folder.glob(pattern))
    if not wheels:
        raise ReleaseError(f"pip brought no {pattern} into {folder}")
    return wheels[0]


def _pinned(wheel: Path) -> str:
    """The SHA-256 of a wheel, which must be the one in the repository if that knows it."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pinned = json.loads(PINNED.read_text()).get(wheel.name)
    if pinned not in (None, found):
        raise ReleaseError(
            f"{wheel} has SHA-256 {found}, and not {pinned} as {PINNED.name} says: remove it"
        )
    return found


def _compare(wheel: Path, found: str, book: Path) -> None:
    """See that a wheel is what it was when it first came."""
    try:
        known = dict(json.loads(book.read_text())) if book.is_file() else {}
    except (ValueError, TypeError) as error:
        raise ReleaseError(f"{book} is damaged ({error}): remove it and try again") from error
    if known.setdefault(wheel.name, found) != found:
        raise ReleaseError(
            f"{wheel.name} has SHA-256 {found}, and had {known[wheel.name]} when it first came "
            f"({book})"
        )
    # In one step, so that it is never found half written.
    new = book.with_suffix(".new")
    new.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    new.replace(book)


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("sglang/")]
            archive.extractall(folder / "python", names)
    except (zipfile.BadZipFile, zlib.error, OSError) as error:
        raise ReleaseError(f"{wheel} is no wheel ({error}): remove it and try again") from error
    if not (folder / "python" / "sglang" / "__init__.py").is_file():
        raise ReleaseError(f"{wheel} has no sglang in it")


def _make_repository(folder: Path, version: str) -> None:
    # The same wheel gives the same commit, wherever and whenever.
    when = {"GIT_AUTHOR_DATE": _DATE, "GIT_COMMITTER_DATE": _DATE}
    checkouts.commit_all(folder, f"SGLang {version} as PyPI has it", when)
    checkouts.git(folder, "tag", f"v{version}")


# --- Environments -------------------------------------------------------------------------------


def _numbers(version: str) -> tuple[int, ...] | None:
    """The leading numbers of a version, ``(0, 5, 13)``, or nothing if it has none."""
    found = _VERSION.match(version)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def environment_name(version: str) -> str:
    """Which environment a release runs in; one without a known version in the newer one."""
    known = _numbers(version)
    old = (
        known is not None
        and known < _TRANSFORMERS_5
        and not version.startswith(_TRANSFORMERS_5_TOO)
    )
    return "venv-transformers4" if old else "venv-transformers5"


def requirements(name: str) -> Sequence[Path]:
    """The files that an environment is made of."""
    folder = REPO_ROOT / "requirements"
    return [folder / file for file in ("torch.txt", name.replace("venv-", "upstream-") + ".txt")]


def interpreter(version: str, root: Path | None = None) -> Path | None:
    """The interpreter of a release's environment if that is there."""
    folder = (root or UPSTREAM) / environment_name(version)
    stamp = folder / ".stamp"
    is_whole = stamp.is_file() and stamp.read_text() == _stamp_of(folder.name)
    return folder / "bin" / "python" if is_whole else None


def _stamp_of(name: str) -> str:
    """What an environment is made of."""
    texts = [path.read_text() for path in requirements(name)]
    return "".join([*texts, f"# Python {sys.version_info.major}.{sys.version_info.minor}\n"])


def environment(version: str, root: Path | None = None, say: Say = print) -> Path:
    """The interpreter of a release's environment, which is made if it is not there.

    Raises
    ------
    ReleaseError
        If a package cannot be installed.
    """
    if (there := interpreter(version, root)) is not None:
        say(f"the environment is there: {environment_name(version)}")
        return there
    folder = (root or UPSTREAM) / environment_name(version)
    say(f"making the environment {folder.name}")
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    for path in requirements(folder.name):
        _install(python, path, say)
    (folder / ".stamp").write_text(_stamp_of(folder.name))
    return python


def _install(python: Path, path: Path, say: Say) -> None:
    """Install a file of requirements, and say how far it is."""
    wanted = sum(not line.startswith(("#", "\n")) for line in path.open())
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "-r", str(path)]
    said: list[str] = []
    seen = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line)
            if line.startswith(("Collecting", "Requirement already")):
                seen += 1
                if seen % 10 == 0:
                    say(f"installing {path.name}: {min(seen, wanted)} of {wanted} packages found")
            elif line.startswith("Installing collected"):
                say(f"installing {path.name}: writing files")
    if pip.returncode != 0:
        raise ReleaseError(f"{path.name} cannot be installed:\n{''.join(said)[-1500:]}")


def remove(root: Path | None = None, environments_only: bool = False) -> None:
    """Remove the environments, or everything: releases, wheels and logs too.

    Raises
    ------
    ReleaseError
        If something cannot be removed.
    """
    root = root or UPSTREAM
    for folder in sorted(root.glob("venv-transformers*")) if environments_only else [root]:
        try:
            if folder.is_dir():
                shutil.rmtree(folder)
        except OSError as error:
            raise ReleaseError(f"{folder} cannot be removed: {error}") from error
