"""Processes that tests start, and end from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil


class Ended(NamedTuple):
    """A process with its exit status, or the signal's negative number, and all that it said."""

    process: int
    status: int
    said: str


def is_alive(process: int) -> bool:
    """Whether a process goes on. An orphan stays a zombie where no init collects it."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.02)


def end_by(
    number: int,
    arguments: Sequence[str],
    told: Path,
    scratch: Path,
    folder: Path | None = None,
    ignored: Sequence[int] = (),
    to_all: bool = False,
) -> Ended:
    """Start Python, wait until it has written a file, and send it a signal.

    Parameters
    ----------
    number : int
        The signal.
    arguments : sequence of str
        Of Python.
    told : Path
        That file; it is there at once and as a whole.
    scratch : Path
        What it is to use for what it has for a time.
    folder : Path, optional
        To start it in.
    ignored : sequence of int
        Signals that it ignores at first. A shell that starts it in the background, or nohup, would have
        it ignore some whatever a test wants.
    to_all : bool
        Whether all that it has started gets the signal too, as with one from a terminal.
    """

    def as_told() -> None:
        for one in (signal.SIGINT, signal.SIGHUP):
            signal.signal(one, signal.SIG_IGN if one in ignored else signal.SIG_DFL)

    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=as_told,
    ) as us:
        try:
            wait_for(lambda: told.is_file() or us.poll() is not None)
            assert us.poll() is None, us.communicate()
            (os.killpg if to_all else os.kill)(us.pid, number)
            said, _ = us.communicate(timeout=30)
        finally:
            us.kill()
    return Ended(us.pid, us.returncode, said)
