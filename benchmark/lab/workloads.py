"""Which session runs the cases of a setup.

A session runs rounds of cases, one call of ``run_round(case)`` each, on whichever commit of the package
is installed; it checks that the work was really done and returns the metrics of `lab.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from lab.cases import Case, Setup
from lab.metrics import SmallerBatch


class RunsRounds(Protocol):
    """What every session does.

    Attributes
    ----------
    progress : callable
        Called when there is some.
    """

    progress: Callable[[], None]

    def run_round(self, case: Case) -> dict[str, float]:
        """Run a case once; return its metrics."""

    def close(self) -> None:
        """Give back what is held."""


Answer = TypeVar("Answer")


def once_more(round_: Callable[[], Answer]) -> Answer:
    """Run a round, and another one in its place if its requests came late.

    Whoever hands them in may be interrupted amid that, and the first ones decode alone for a while. An
    engine that does not decode all of them together does so again, and fails.

    Parameters
    ----------
    round_ : callable
        Runs the round, with everything that is measured of it.
    """
    try:
        return round_()
    except SmallerBatch:
        return round_()


def make_session(setup: Setup, scratch: Path) -> RunsRounds:
    """What runs rounds of the cases of a setup.

    Raises
    ------
    Unsupported
        If the installed commit lacks what that needs.
    """
    if setup.model == "none":
        from lab.penalty_history import PenaltySession

        return PenaltySession(setup, scratch)
    if setup.watch == "transfers":
        from lab.audit_transfers import TransferSession

        return TransferSession(setup, scratch)
    if setup.watch == "memory":
        from lab.memory import MemorySession

        return MemorySession(setup, scratch)
    from lab.sessions import Session

    return Session(setup, scratch)
