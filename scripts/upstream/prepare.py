#!/usr/bin/env python3
"""Get releases of SGLang, and an environment in which their objects can be made without a GPU.

``.cache/upstream/VERSION`` holds what the wheel on PyPI holds, ``.cache/upstream/dl`` the wheel, and
``.cache/upstream/checksums.json`` its SHA-256 as it was when it first came; a later download has to be
the same. The environment lies beside them. None of it is ever committed. What is there is used as it is.

Examples
--------
::

    python scripts/upstream/prepare.py                # those that the tests use
    python scripts/upstream/prepare.py 0.5.14 0.5.23
    python scripts/upstream/prepare.py --no-env 0.5.9
    python scripts/upstream/prepare.py --remove       # everything, environment too
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

REPO_ROOT: Final = Path(__file__).resolve().parents[2]
UPSTREAM: Final = REPO_ROOT / ".cache" / "upstream"
# What the tests marked `upstream` use.
RELEASES: Final = ("0.5.9", "0.5.13.post1", "0.5.14", "0.5.23")
ENVIRONMENT: Final = "venv-transformers5"
REQUIREMENTS: Final = ("torch.txt", "upstream-transformers5.txt")

_VERSION: Final = re.compile(r"\d+(\.\d+)*((rc|a|b|\.post|\.dev)\d+)?")

Say = Callable[[str], None]


class PrepareError(RuntimeError):
    """A failure with a message that a person can act on; `main` prints it without a traceback."""


def release(version: str, root: Path | None = None, say: Say = print) -> Path:
    """The directory of a release, which is downloaded and unpacked if it is not there.

    Raises
    ------
    PrepareError
        If it cannot be had, or is another file than it was.
    """
    root = root or UPSTREAM
    tree = root / version
    if not _VERSION.fullmatch(version):
        raise PrepareError(f"{version!r} is no version of SGLang, such as 0.5.14 or 0.5.13.post1")
    if (tree / "sglang" / "__init__.py").is_file():
        say(f"SGLang {version} is there")
        return tree
    wheel = _wheel(version, root / "dl", say)
    # Under another name first, so that what is there is whole.
    unpacked = root / f".{version}.unpacked"
    for folder in (unpacked, tree):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    except zipfile.BadZipFile as error:
        raise PrepareError(f"{wheel} is no wheel ({error}): remove it and try again") from error
    if not (unpacked / "sglang" / "__init__.py").is_file():
        raise PrepareError(f"{wheel} has no sglang in it")
    _check(wheel, root / "checksums.json")
    unpacked.rename(tree)
    say(f"SGLang {version} is unpacked")
    return tree


def _wheel(version: str, folder: Path, say: Say) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"sglang-{version}-*.whl"
    if not list(folder.glob(pattern)):
        say(f"downloading SGLang {version}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(folder), f"sglang=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise PrepareError(
                f"SGLang {version} is neither in {folder} nor to be had from the package index:\n"
                f"{done.stderr.strip()[-1500:]}"
            )
    wheels = sorted(folder.glob(pattern))
    if not wheels:
        raise PrepareError(f"pip brought no {pattern} into {folder}")
    return wheels[0]


def _check(wheel: Path, book: Path) -> None:
    """See that a wheel is what it was when it first came."""
    try:
        known = dict(json.loads(book.read_text())) if book.is_file() else {}
    except (ValueError, TypeError) as error:
        raise PrepareError(f"{book} is damaged ({error}): remove it and try again") from error
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if known.setdefault(wheel.name, found) != found:
        raise PrepareError(
            f"{wheel.name} has SHA-256 {found}, and had {known[wheel.name]} when it first came "
            f"({book})"
        )
    # In one step, so that it is never found half written.
    new = book.with_suffix(".new")
    new.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    new.replace(book)


def environment(root: Path | None = None, say: Say = print) -> Path:
    """The interpreter of the environment, which is made if it is not there.

    Raises
    ------
    PrepareError
        If a package cannot be installed.
    """
    folder = (root or UPSTREAM) / ENVIRONMENT
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    requirements = [REPO_ROOT / "requirements" / name for name in REQUIREMENTS]
    wanted = "".join(path.read_text() for path in requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        say(f"the environment is there: {ENVIRONMENT}")
        return python
    say(f"making the environment {ENVIRONMENT}")
    venv.create(folder, with_pip=True, clear=True)
    for path in requirements:
        say(f"installing {path.name}")
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        done = subprocess.run([*command, "-r", str(path)], capture_output=True, text=True)
        if done.returncode != 0:
            raise PrepareError(f"{path.name} cannot be installed:\n{done.stderr.strip()[-1500:]}")
    stamp.write_text(wanted)
    return python


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="prepare.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("versions", nargs="*", default=list(RELEASES), metavar="VERSION")
    parser.add_argument("--no-env", action="store_true", help="releases alone")
    parser.add_argument("--remove", action="store_true", help="remove .cache/upstream")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare; return the exit status."""
    args = parse_args(argv)
    if args.remove:
        shutil.rmtree(UPSTREAM, ignore_errors=True)
        print("removed .cache/upstream")
        return 0
    steps = len(args.versions) + (not args.no_env)
    count = 0

    def say(line: str) -> None:
        print(f"[{count}/{steps}] {line}", flush=True)

    try:
        for version in args.versions:
            count += 1
            release(version, say=say)
        if not args.no_env:
            count += 1
            environment(say=say)
    except PrepareError as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
