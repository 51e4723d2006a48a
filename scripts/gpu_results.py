#!/usr/bin/env python3
"""What the workflow decides before a GPU machine measures, and takes from it afterwards.

``plan``
    Which commits to measure, as one line for the output of a step. Only commits of the history that is
    checked out: whatever else somebody asks for would be code from elsewhere, on that machine.
``accept``
    Take asv's results out of what the machine sent into a folder of results. A job has run on that
    machine, so nothing of it is believed: files have the names and sizes that they should have, are JSON
    of the form that asv writes (`lab.asv_files`), and no text in them could become markup on a page:
    none of ``<>&"``, and ``'`` only around a name, as asv writes parameters of benchmarks.
    They are written anew from what was read, and nothing is executed.

Needs Python alone.

Examples
--------
::

    python scripts/gpu_results.py plan --event push --asked ''
    python scripts/gpu_results.py accept incoming results
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmark"))

from lab import asv_files

MACHINE: Final = re.compile(r"gpu-[a-z0-9][a-z0-9-]{0,40}")
SHA: Final = re.compile(r"[0-9a-f]{40}")
RESULT: Final = re.compile(r"([0-9a-f]{8})-existing-py3\.\d{1,2}\.json")
BENCHMARK: Final = re.compile(r"\w{1,40}(\.\w{1,60}){1,3}")
# Letters, digits and what versions and names of processors have: nothing that begins an element of a
# page, or ends an attribute in quotes of either kind. asv writes a parameter as Python does, a name in
# quotes, and these may stand around a name alone: without space and equals sign it makes no attribute.
TEXT: Final = re.compile(r"[A-Za-z0-9 _.,:;@()/+=\[\]#%*~^!?-]{0,200}|'[A-Za-z0-9_.:/-]{1,100}'")

MOST_FILES: Final = 64
MOST_COMMITS: Final = 8
MOST_BYTES: Final = 1 << 20

MACHINE_KEYS: Final = frozenset(
    (
        *("machine", "os", "num_cpu", "arch", "cpu", "ram", "version"),
        *("gpu", "driver", "cuda", "torch", "triton"),
    )
)
RESULT_KEYS: Final = frozenset(
    (
        *("commit_hash", "env_name", "date", "params", "python", "requirements", "env_vars"),
        *("result_columns", "results", "durations", "version"),
    )
)
# What results of a commit have in common, and so have to agree in. ``version`` is that of the form.
SAME_KEYS: Final = ("params", "requirements", "env_vars", "python", "result_columns", "version")


class RefusedError(ValueError):
    """What came is not what may come; the message says what."""


# --- Before -------------------------------------------------------------------------------------


def plan(repo: Path, event: str, asked: str) -> list[str]:
    """Commits to measure; none stands for the landmarks.

    Parameters
    ----------
    repo : Path
    event : {"schedule", "push", "workflow_dispatch"}
        A push measures the commit that is checked out. Who starts the workflow by hand may ask.
    asked : str
        Full hashes, with spaces between them.

    Raises
    ------
    RefusedError
        If something else is asked for.
    """
    if event == "schedule":
        return []
    if event == "push":
        return [_git(repo, "rev-parse", "HEAD")]
    if event != "workflow_dispatch":
        raise RefusedError(f"nothing is measured on {event!r}")
    commits = asked.split()
    if len(commits) > MOST_COMMITS:
        raise RefusedError(f"{len(commits)} commits are too many, {MOST_COMMITS} may be asked for")
    for sha in commits:
        if not SHA.fullmatch(sha):
            raise RefusedError(f"{sha[:60]!r} is no full hash")
        try:
            _git(repo, "merge-base", "--is-ancestor", sha, "HEAD")
        except subprocess.CalledProcessError as error:
            raise RefusedError(f"{sha} is no commit of this history") from error
    return commits


def _git(repo: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repo), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        raise RefusedError(f"git cannot be run: {error.strerror}") from error


# --- Afterwards ---------------------------------------------------------------------------------


def agree(before: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two documents of a commit were measured by the same, and have the same columns."""
    return all(before.get(key) == new.get(key) for key in SAME_KEYS)


def merged(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Results of a commit: the new ones, and of those before what was not measured anew.

    asv says in one place for all results of a commit by what they were measured, and what their columns
    are. Where the two differ in any of that, what was before would pass for something else: then it is
    left out.

    Parameters
    ----------
    before, new : dict
        Documents of asv.
    """
    if not agree(before, new):
        return new
    return new | {key: before.get(key, {}) | new[key] for key in ("results", "durations")}


def accept(incoming: Path, results: Path) -> list[str]:
    """Take results; return the names of the files that were written, from `results` on.

    Parameters
    ----------
    incoming : Path
        A folder ``MACHINE/`` with ``machine.json`` and results; beside it may be ``benchmarks.json``,
        which is left: whoever publishes finds it out from the benchmarks.
    results : Path
        A folder of asv's results. What it has of the same commit stays, but for what was measured
        anew, if it was measured by the same (see `merged`).

    Raises
    ------
    RefusedError
        If anything is there that should not be. Then nothing was written.
    """
    files = [path for path in _files(incoming) if path.name != "benchmarks.json"]
    machines = {path.parent.name for path in files}
    if len(machines) != 1:
        raise RefusedError(f"results of one machine may come, not of {sorted(machines)}")
    (machine,) = machines
    if not any(path.name == "machine.json" for path in files):
        raise RefusedError(f"{machine} sent no machine.json")
    written = {}
    for path in files:
        target = results / machine / path.name
        document = _read(path)
        if path.name == "machine.json":
            check_machine(document, machine)
        else:
            check_result(document, machine, path.name)
        _check_texts(document, path.name)
        if target.is_file() and path.name != "machine.json":
            try:
                before = asv_files.read_result(target)
            except asv_files.FormError as error:
                raise RefusedError(f"there already, and to be mended first: {error}") from error
            if not agree(before, document):
                text = "measured by something else before, which is left out"
                print(f"gpu_results: {machine}/{path.name}: {text}", file=sys.stderr)
            document = merged(before, document)
        written[target] = json.dumps(document, indent=1, sort_keys=True) + "\n"
    for target, text in written.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return sorted(f"{machine}/{target.name}" for target in written)


def _files(incoming: Path) -> list[Path]:
    found = sorted(incoming.rglob("*"))
    if len(found) > MOST_FILES:
        raise RefusedError(f"{len(found)} files are too many")
    files = []
    for path in found:
        name = str(path.relative_to(incoming))
        if path.is_symlink():
            raise RefusedError(f"{name!r} is a link")
        if path.is_dir():
            if path.parent != incoming or not MACHINE.fullmatch(path.name):
                raise RefusedError(f"{name!r} is no name of a machine with a GPU")
            continue
        is_result = path.parent != incoming and (
            path.name == "machine.json" or RESULT.fullmatch(path.name)
        )
        if not (is_result or name == "benchmarks.json"):
            raise RefusedError(f"{name!r} is no name of a result")
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise RefusedError(f"{name!r} is no file, or larger than {MOST_BYTES} bytes")
        files.append(path)
    return files


def _read(path: Path) -> dict[str, Any]:
    is_machine = path.name == "machine.json"
    try:
        return (asv_files.read_machine if is_machine else asv_files.read_result)(path)
    except asv_files.FormError as error:
        raise RefusedError(str(error)) from error


def _check_texts(value: Any, name: str) -> None:
    """See that no text is long or has a character that it needs not have."""
    if isinstance(value, str):
        # asv's own names of phases stand in angle brackets.
        if not TEXT.fullmatch(re.sub(r"^<(build|setup_cache [\w.:]{1,80})>$", "", value)):
            raise RefusedError(f"{name!r} has text that no result has: {value[:40]!r}")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key, name)
            _check_texts(item, name)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, name)


def check_machine(document: dict[str, Any], machine: str) -> None:
    """See that this, of asv's form, is the machine's file.

    Raises
    ------
    RefusedError
        If not.
    """
    if document.keys() - MACHINE_KEYS or document.get("machine") != machine:
        raise RefusedError(f"machine.json of {machine} is another machine's, or has other fields")
    if document.get("gpu") in (None, "", "none"):
        raise RefusedError(f"{machine} has no GPU")


def check_result(document: dict[str, Any], machine: str, name: str) -> None:
    """See that these, of asv's form, are the results of the commit that the file's name says.

    Raises
    ------
    RefusedError
        If not.
    """
    if document.keys() != RESULT_KEYS:
        odd = sorted(document.keys() ^ RESULT_KEYS)
        raise RefusedError(f"{name!r} has other fields than asv's: {', '.join(odd)}")
    sha = document["commit_hash"]
    if not (SHA.fullmatch(sha) and name.startswith(f"{sha[:8]}-")):
        raise RefusedError(f"{name!r} is of another commit")
    if f"{sha[:8]}-{document['env_name']}.json" != name:
        raise RefusedError(f"{name!r} is of another environment")
    if document["params"]["machine"] != machine:
        raise RefusedError(f"{name!r} is of another machine than {machine}")
    for benchmark in document["results"]:
        if not BENCHMARK.fullmatch(benchmark):
            raise RefusedError(f"{name!r} has a benchmark called {benchmark[:60]!r}")


# --- The command --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Plan or accept; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpu_results.py", description=(__doc__ or "").partition("\n")[0]
    )
    what = parser.add_subparsers(dest="what", required=True)
    planned = what.add_parser("plan", help="which commits to measure")
    planned.add_argument("--event", required=True)
    planned.add_argument("--asked", default="")
    planned.add_argument("--repo", type=Path, default=Path.cwd())
    accepted = what.add_parser("accept", help="take what a machine sent")
    accepted.add_argument("incoming", type=Path)
    accepted.add_argument("results", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.what == "plan":
            print(f"commits={' '.join(plan(args.repo, args.event, args.asked))}")
        else:
            print("\n".join(accept(args.incoming, args.results)))
    except RefusedError as error:
        print(f"gpu_results: refused: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"gpu_results: error: git says: {error.stderr.strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
