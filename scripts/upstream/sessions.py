"""Processes of other interpreters: what they get to see, and that none of them stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from upstream.releases import REPO_ROOT, UPSTREAM

# How long a killed process may take to go.
_GONE_S: Final = 10.0


def lab_environment(package_dir: Path) -> dict[str, str]:
    """Variables for the laboratory in another interpreter, with the package that lies in a folder.

    What is in the working directory does not come before it, and a tree of the user's gets no caches.
    """
    path = (package_dir.absolute(), REPO_ROOT / "benchmark")
    # Settings of the caller's own engine are not meant for this one.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    mine = (REPO_ROOT, Path(tempfile.gettempdir()))
    if not any(package_dir.resolve().is_relative_to(place.resolve()) for place in mine):
        variables["PYTHONPYCACHEPREFIX"] = str(UPSTREAM / "pycache")
    return variables | {
        "PYTHONPATH": os.pathsep.join(str(part) for part in path),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def is_package_of(told: str, package_dir: Path) -> bool:
    """Whether what an interpreter told of ``sglang.__file__`` lies in a folder."""
    return Path(told).resolve().parent == (package_dir / "sglang").resolve()


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
