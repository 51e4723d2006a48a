"""A process that answers questions, one line of JSON each way.

Things that are compared run in processes of their own and take turns. Two of them in one process would
disturb each other even while idle: GNU's OpenMP stops letting threads spin between operations once the
teams of a process have more members than there are processors, which makes a forward slower by half.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BENCHMARK_DIR = Path(__file__).resolve().parents[1]


class RemoteError(RuntimeError):
    """The process could not answer; with what it said."""


def environment(threads: int, package: str | None = None) -> dict[str, str]:
    """The environment of a measuring process: offline, a fixed number of threads, the lab importable.

    Parameters
    ----------
    threads : int
        Threads that torch gets.
    package : str, optional
        Directory that holds ``sglang``, if it is another one than the installed one.
    """
    env = dict(os.environ)
    # Checks of every step cost time, and are on in tests.
    env.pop("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", None)
    # The process has a working directory of its own, which is no place to import from.
    path = [package, BENCHMARK_DIR, *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path if entry)
    env |= {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
    }
    return env


class Remote:
    """Starts ``python -m MODULE OPTIONS`` in an empty directory of its own, and asks it.

    Parameters
    ----------
    module : str
        A module whose ``main`` calls `answer`.
    options : sequence of str
        Its arguments.
    threads : int
        Threads that torch gets there.
    python : str
        Another interpreter than this one.
    package : str, optional
        Directory that holds another ``sglang`` than the installed one.
    """

    def __init__(
        self,
        module: str,
        options: Sequence[str] = (),
        *,
        threads: int,
        python: str = sys.executable,
        package: str | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="lab-")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [python, "-m", module, *options],
            env=environment(threads, package),
            cwd=self._directory.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait until it can answer at once.

        Raises
        ------
        RemoteError
            If it ends instead.
        """
        if not self._ready:
            self._read()
            self._ready = True

    def ask(self, **question: Any) -> dict[str, Any]:
        """Ask, and wait for the answer.

        Raises
        ------
        RemoteError
            If it answers with an error, or ends.
        """
        self.wait_until_ready()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().strip().splitlines() or ["it says nothing"]
            raise RemoteError(said[-1])
        answered = json.loads(line)
        if "error" in answered:
            raise RemoteError(answered["error"])
        return answered

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._directory.cleanup()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def end_with_parent() -> None:
    """Have this process killed when its parent ends, on Linux."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_on_signals() -> None:
    """Have what ends a program raise `SystemExit` in it, so that it leaves nothing behind.

    Whoever has it ignore a hang-up, as ``nohup`` does, means it.
    """
    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]

    def end(number: int, _: object) -> None:
        # Another one would cut short what is done at the end.
        for other in ending:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in ending:
        signal.signal(number, end)


def answer(make_handler: Callable[[], Callable[[Mapping[str, Any]], dict[str, Any]]]) -> None:
    """Make a handler, say that it is ready, and answer with it until the input ends."""
    end_with_parent()
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(text: dict[str, Any]) -> None:
        answers.write(json.dumps(text) + "\n")
        answers.flush()

    handle = make_handler()
    say({"ready": True})
    for line in sys.stdin:
        try:
            say(handle(json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
