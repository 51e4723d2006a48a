"""Scaling of the logits of tokens that occur in the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
from sglang.srt.utils.common import to_device_async

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

MIN_SCALING = 1e-30
"""Smallest scaling in use. One that float32 takes for 0 would make infinities of positive logits, and of
infinities and zeros it would make NaN. This small a scaling is the limit of 0 in all that sampling can
see: negative logits become 0 and positive ones win, in their order."""


def apply_scaling_penalties(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
    """Multiply negative logits and divide the others, in place.

    Parameters
    ----------
    logits : Tensor, float32
        Minus infinity stays minus infinity.
    scaling_penalties : Tensor, float32
        Broadcastable to `logits`, at least `MIN_SCALING`.
    """
    torch.where(logits < 0, logits * scaling_penalties, logits / scaling_penalties, out=logits)


class BatchedRepetitionPenalizer(_BatchedPenalizer):
    """Scales each token that occurs by ``repetition_penalty``, however often it occurs."""

    is_multiplicative = True
    state = ("repetition_penalties", "cumulated_repetition_penalties")
    repetition_penalties: torch.Tensor
    cumulated_repetition_penalties: torch.Tensor

    @staticmethod
    def is_required_by(req: Req) -> bool:
        return req.sampling_params.repetition_penalty != 1.0

    def _prepare(self, reqs: Sequence[Req]) -> list[torch.Tensor]:
        values = [[max(req.sampling_params.repetition_penalty, MIN_SCALING)] for req in reqs]
        return [
            to_device_async(values, torch.float32, self.device),
            self._full(len(reqs), self.vocab_size, 1.0),
        ]

    def _neutral(self, rows: int) -> list[torch.Tensor]:
        return [self._full(rows, 1, 1.0), self._full(rows, self.vocab_size, 1.0)]

    def _cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        self.cumulated_repetition_penalties.scatter_(
            1, output_ids.unsqueeze(1), self.repetition_penalties
        )

    def _apply(self, logits: torch.Tensor) -> None:
        apply_scaling_penalties(logits, self.cumulated_repetition_penalties.unsqueeze(1))

    def get_scaling_penalties(self) -> torch.Tensor:
        return self.cumulated_repetition_penalties
