"""No stop token before the output has a minimum length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
from sglang.srt.utils.common import to_device_async

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_INT32_MAX = (1 << 31) - 1


class BatchedMinNewTokensPenalizer(_BatchedPenalizer):
    """Adds minus infinity to a request's stop tokens until enough tokens have been counted.

    Stop tokens are the request's ``stop_token_ids`` and the model's end-of-sequence tokens.
    """

    state = ("min_new_tokens", "stop_token_penalties", "len_output_tokens")
    min_new_tokens: torch.Tensor
    stop_token_penalties: torch.Tensor
    len_output_tokens: torch.Tensor

    @staticmethod
    def is_required_by(req: Req) -> bool:
        return req.sampling_params.min_new_tokens > 0

    def _prepare(self, reqs: Sequence[Req]) -> list[torch.Tensor]:
        minimum = [[min(req.sampling_params.min_new_tokens, _INT32_MAX)] for req in reqs]
        places = [
            row * self.vocab_size + token_id
            for row, req in enumerate(reqs)
            if self.is_required_by(req)
            for token_id in sorted(req.sampling_params.stop_token_ids | req.eos_token_ids)
            if token_id < self.vocab_size
        ]
        penalties = self._full(len(reqs), self.vocab_size, 0.0)
        penalties.view(-1).index_fill_(
            0, to_device_async(places, torch.int64, self.device), float("-inf")
        )
        return [
            to_device_async(minimum, torch.int32, self.device),
            penalties,
            self._full(len(reqs), 1, 0, torch.int32),
        ]

    def _neutral(self, rows: int) -> list[torch.Tensor]:
        return [
            self._full(rows, 1, 0, torch.int32),
            self._full(rows, self.vocab_size, 0.0),
            self._full(rows, 1, 0, torch.int32),
        ]

    def _cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        self.len_output_tokens.add_(1)

    def _apply(self, logits: torch.Tensor) -> None:
        # A select, not a product: 0 * -inf is NaN. And no boolean index: its size is a sync.
        is_short = self.len_output_tokens < self.min_new_tokens
        logits.add_(torch.where(is_short, self.stop_token_penalties, 0.0).unsqueeze(1))
