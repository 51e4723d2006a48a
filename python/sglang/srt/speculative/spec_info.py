"""What the managers know about speculative decoding."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

import torch


class SpeculativeAlgorithm(Enum):
    """The kinds of speculation that an engine can be asked for."""

    NONE = auto()
    EAGLE = auto()

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeAlgorithm:
        """Parse ``ServerArgs.speculative_algorithm``; None means no speculation."""
        return cls.NONE if name is None else cls[name.upper()]

    def is_none(self) -> bool:
        return self is SpeculativeAlgorithm.NONE

    def is_eagle(self) -> bool:
        return self is SpeculativeAlgorithm.EAGLE

    def create_worker(self) -> type:
        """The class that runs batches of an engine that speculates.

        Raises
        ------
        ValueError
            Without speculation.
        """
        if self.is_eagle():
            from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

            return EAGLEWorkerV2
        raise ValueError(f"{self} has no worker of its own")

    def create_draft_input(self, **values: torch.Tensor) -> SpecInput:
        """What a batch of such an engine carries from step to step, see `EagleDraftInput`."""
        if self.is_eagle():
            from sglang.srt.speculative.eagle_info import EagleDraftInput

            return EagleDraftInput(**values)
        raise ValueError(f"{self} has no draft input")


class SpecInput(Protocol):
    """What a batch carries from one speculative step to the next."""

    def filter_batch(self, new_indices: torch.Tensor) -> None:
        """Keep the requests at `new_indices`, shape (kept,), int64."""

    def merge_batch(self, spec_info: SpecInput) -> None:
        """Append another batch's state behind this one's."""
