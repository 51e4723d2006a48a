"""What a backend of the sparse penalties does, and which one there is."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch

from sglang.srt.sampling.penaltylib.sparse_layout import PenaltyTables
from sglang.srt.sampling.penaltylib.torch_ops import TorchPenaltyOps
from sglang.srt.sampling.penaltylib.triton_ops import is_triton_available

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib.sparse_step import PenaltyStep, PenaltyUpdate

logger = logging.getLogger(__name__)


class PenaltyOps(Protocol):
    """The work of `PenaltyState`, on the device's tables. It has checked the arguments.

    All backends give the same bits. None waits for the device.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that are held besides the tables."""

    def update(self, tables: PenaltyTables, update: PenaltyUpdate) -> None:
        """Write pages, headers and entries to where the planner has put them."""

    def ingest(
        self,
        tables: PenaltyTables,
        step: PenaltyStep,
        tokens: torch.Tensor,
        lens: torch.Tensor | None,
        commit: bool,
    ) -> None:
        """Append tokens to the lists.

        Parameters
        ----------
        tables : PenaltyTables
        step : PenaltyStep
        tokens : Tensor, shape (B, K), int64 or int32
            With a stride of 1 along K.
        lens : Tensor, shape (B,), int64 or int32, or None
            How many of them count.
        commit : bool
            Whether they are output, and counted. Else they are the nodes of a draft, the root first, and
            become the lists' tails.
        """

    def apply(
        self,
        tables: PenaltyTables,
        step: PenaltyStep,
        logits: torch.Tensor,
        ancestors: torch.Tensor | None,
    ) -> None:
        """Penalize rows in place.

        Parameters
        ----------
        tables : PenaltyTables
        step : PenaltyStep
        logits : Tensor, shape (B * D, V), float32, float16 or bfloat16
            With a stride of 1 along V. D is 1 without `ancestors`.
        ancestors : Tensor, shape (B, D, D), bool, or None
        """

    def ancestors(self, parents: torch.Tensor) -> torch.Tensor:
        """Who is on whose way, shape (B, D, D), bool, see `PenaltyState.ancestors_from_parents`."""


def make_ops(backend: str, tables: PenaltyTables) -> PenaltyOps:
    """The backend of that name, or with "auto" the best one for where the tables are.

    Raises
    ------
    ValueError
        If there is no backend of that name.
    ImportError
        If it was asked for by its name, and what it needs is missing.
    """
    if backend == "auto":
        backend = _best(tables)
    if backend == "torch":
        return TorchPenaltyOps()
    if backend == "numba":
        from sglang.srt.sampling.penaltylib.numba_ops import NumbaPenaltyOps

        return NumbaPenaltyOps()
    if backend != "triton":
        raise ValueError(f"backend must be auto, torch, triton or numba, got {backend!r}")
    from sglang.srt.sampling.penaltylib.triton_ops.sparse_penalties import TritonPenaltyOps

    return TritonPenaltyOps()


def _best(tables: PenaltyTables) -> str:
    if tables.tokens.is_cuda and is_triton_available():
        return "triton"
    if tables.tokens.is_cpu and find_spec("numba") is not None:
        try:
            import_module("sglang.srt.sampling.penaltylib.numba_ops")
            return "numba"
        except ImportError as error:
            logger.warning("numba is there but does not work, torch penalizes: %s", error)
    return "torch"
