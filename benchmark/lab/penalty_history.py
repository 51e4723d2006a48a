"""What penalties cost a step on a commit: the rounds of the question ``penalties``.

A round of a case is `STEPS` steps and `JOINS` finishes plus joins on the best penalties that the
commit has: the sparse ones, or, where there are none yet, its dense penalizers as its overlap loop uses
them. There is no engine. Steps on fresh logits, behind the steps and behind the joins, are held against
float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from lab import devices
from lab.metrics import WorkNotDone
from lab.models import Unsupported
from lab.penalty_costs import (
    REQUEST,
    Block,
    Cell,
    Joiner,
    Logits,
    Sparse,
    Stepper,
    Subject,
    Workload,
    check,
    check_joined,
)

if TYPE_CHECKING:
    from lab.cases import Case, Setup

SEEN: Final = 256
STEPS: Final = 24
JOINS: Final = 4

_PACKAGE: Final = "sglang.srt.sampling"


def make_subject(work: Workload) -> Subject:
    """The penalties of the installed commit.

    Raises
    ------
    Unsupported
        If it has none that this knows how to use.
    """
    if _has(f"{_PACKAGE}.penaltylib.sparse_penalties"):
        return Sparse(work)
    if not _has(f"{_PACKAGE}.sampling_batch_info"):
        raise Unsupported("this commit has no penalties")
    return DenseOfCommit(work)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class _Batch:
    """What a ``ScheduleBatch`` is to a ``SamplingBatchInfo``."""

    penalty_planner = None

    def __init__(self, reqs: list[Any], device: torch.device) -> None:
        self.reqs = reqs
        self.device = device


class _Req:
    """What a ``Req`` is to it."""

    sampling_seed = 0

    def __init__(self) -> None:
        from sglang.srt.sampling.sampling_params import SamplingParams

        own, *ends = sorted(REQUEST.stop_token_ids)
        self.sampling_params = SamplingParams(
            max_new_tokens=REQUEST.min_new_tokens,
            min_new_tokens=REQUEST.min_new_tokens,
            frequency_penalty=REQUEST.frequency_penalty,
            presence_penalty=REQUEST.presence_penalty,
            repetition_penalty=REQUEST.repetition_penalty,
            stop_token_ids={own},
        )
        self.eos_token_ids = set(ends)


class DenseOfCommit(Subject):
    """The commit's own dense penalizers, in its ``SamplingBatchInfo``."""

    counts_first = True
    joins_last = True

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        cell = work.cell
        self.is_exact = not cell.is_draft
        self._repeat = cell.num_nodes if cell.is_draft else None
        self._info = self._sampling_info(cell.batch_size)
        for ids in torch.tensor(work.outputs, device=work.device).t().contiguous():
            self._info.penalizer_orchestrator.cumulate_output_tokens(ids)

    def _sampling_info(self, size: int) -> Any:
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        batch = _Batch([_Req() for _ in range(size)], self.work.device)
        return SamplingBatchInfo.from_schedule_batch(batch, self.work.cell.vocab_size)

    def run(self, planned: Any, turn: Any, logits: torch.Tensor) -> None:
        self._info.penalizer_orchestrator.cumulate_output_tokens(turn.latest)
        self._info.copy_for_forward().apply_logits_bias(logits, self._repeat)

    def join(self, row: int) -> None:
        keep = [i for i in range(self.work.cell.batch_size) if i != row]
        joining = self._sampling_info(1)
        self._info.filter_batch(keep, torch.tensor(keep, device=self.work.device))
        self._info.merge_batch(joining)

    @property
    def nbytes(self) -> int:
        return 0  # not asked for


def timely(stepper: Stepper, steps: int) -> Block:
    """A block of steps that were all launched before the device began with them.

    Parameters
    ----------
    stepper : Stepper
    steps : int
        At most.

    Raises
    ------
    WorkNotDone
        If not even a few are.
    """
    while steps > 1:
        block = stepper(steps)
        devices.synchronize()
        if not block.is_late:
            block.settle()
            return block
        steps //= 2
    raise WorkNotDone("the device did not wait until the steps had been launched")


class PenaltySession:
    """Runs rounds of cases of the question ``penalties``, as `lab.sessions.Session` does of others.

    Parameters
    ----------
    setup : Setup
    scratch : Path
        Not used.

    Raises
    ------
    Unsupported
        If the installed commit has no penalties.
    """

    def __init__(self, setup: Setup, scratch: Path) -> None:
        del scratch
        self._kind = "plain" if setup.speculative == "none" else setup.speculative
        self.progress: Callable[[], None] = lambda: None
        self._device = devices.device()
        make_subject(Workload(Cell(self._kind, 2, 64, 4), self._device))

    def close(self) -> None:
        """Nothing is held."""

    def run_round(self, case: Case) -> dict[str, float]:
        """Run the case once.

        Returns
        -------
        dict of str to float
            ``us_per_step`` and ``us_per_join``.

        Raises
        ------
        WorkNotDone
            If the logits are not what they should be.
        """
        cell = Cell(self._kind, case.batch_size, case.setup.vocab_size, SEEN)
        with torch.inference_mode():
            logits = Logits([cell], self._device)
            subject = make_subject(Workload(cell, self._device))
            stepper = Stepper(subject, logits.of(cell))
            stepper(4)
            block = timely(stepper, STEPS)
            check("the commit", subject, logits)
            joined = Joiner(subject, self._device)(JOINS)
            check_joined("the commit", subject)
        # On a GPU the host is ahead, and its part is done while the device does the step before.
        host_us = 0.0 if self._device.type == "cuda" else block.host_us
        return {
            "us_per_step": host_us + block.device_us,
            "us_per_join": joined.device_us,
        }
