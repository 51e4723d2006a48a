"""Penalty on tokens that occur in the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
from sglang.srt.utils.common import to_device_async

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class BatchedPresencePenalizer(_BatchedPenalizer):
    """Subtracts ``presence_penalty`` once from each token that occurs."""

    state = ("presence_penalties", "cumulated_presence_penalties")
    presence_penalties: torch.Tensor
    cumulated_presence_penalties: torch.Tensor

    @staticmethod
    def is_required_by(req: Req) -> bool:
        return req.sampling_params.presence_penalty != 0.0

    def _prepare(self, reqs: Sequence[Req]) -> list[torch.Tensor]:
        values = [[req.sampling_params.presence_penalty] for req in reqs]
        return [
            to_device_async(values, torch.float32, self.device),
            self._full(len(reqs), self.vocab_size, 0.0),
        ]

    def _neutral(self, rows: int) -> list[torch.Tensor]:
        return [self._full(rows, 1, 0.0), self._full(rows, self.vocab_size, 0.0)]

    def _cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        self.cumulated_presence_penalties.scatter_(
            1, output_ids.unsqueeze(1), self.presence_penalties
        )

    def _apply(self, logits: torch.Tensor) -> None:
        logits.sub_(self.cumulated_presence_penalties.unsqueeze(1))
