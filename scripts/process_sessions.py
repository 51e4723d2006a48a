#!/usr/bin/env python3
"""End a command with all that it has started, also when whoever started it is killed.

A process group is not enough: asv puts what it starts into groups of their own. What a command starts
stays in its *session*, unless it begins one itself; workers of the laboratory do, and end with their
parent (`lab.remote.end_with_parent`).

As a program, ``process_sessions.py SESSION`` waits until its standard input ends, and then ends the
session: whoever holds the other end of that pipe may die in any way. Needs Python alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

# What does not go in that time hangs in the kernel, and nothing ends it.
_PATIENCE_S: Final = 5.0


def members(session: int) -> list[int]:
    """Processes of a session that have not ended, on Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # It may have ended meanwhile.
        with contextlib.suppress(OSError, ValueError, IndexError):
            # A name, which may hold anything, stands in brackets before these.
            state, _, _, its_session = (
                path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            )
            if int(its_session) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def end_session(session: int) -> None:
    """Kill all processes of a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    limit = time.monotonic() + _PATIENCE_S
    # One that is killed may have started another one just before.
    while (left := members(session)) and time.monotonic() < limit:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


@contextlib.contextmanager
def ending_with_us(session: int) -> Iterator[None]:
    """Meanwhile, have a session ended if this process ends, be it killed.

    Parameters
    ----------
    session : int
        The process that began it.
    """
    # In a session of its own, as who kills this process may kill its whole group.
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(session)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def run_group(
    command: Sequence[str], env: dict[str, str], folder: Path, seconds: float
) -> tuple[int, str]:
    """Run a command and end all that it started, after so many seconds at the latest.

    Whatever ends this process meanwhile ends the command too.

    Returns
    -------
    int
        Its exit status; 124 if time ran out.
    str
        What it printed.
    """
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        with ending_with_us(child.pid):
            try:
                text, _ = child.communicate(timeout=seconds)
                return child.returncode, text
            except subprocess.TimeoutExpired as error:
                said = error.output or ""
                return 124, said if isinstance(said, str) else said.decode(errors="replace")
            finally:
                end_session(child.pid)
    finally:
        # Also where there could be no watcher.
        child.kill()
        child.wait()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_session(int(sys.argv[1]))
