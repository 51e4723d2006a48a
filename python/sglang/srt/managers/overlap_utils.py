"""Tokens that exist only on the device yet.

Under overlap a step is prepared before the step that it continues has run. Its input tokens are
placeholders then, which the forward stream replaces by what the earlier forward left in a `FutureMap`.
"""

from __future__ import annotations

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.generation_result import GenerationBatchResult
from sglang.srt.speculative.spec_info import SpecInput, SpeculativeAlgorithm


class FutureMap:
    """The newest result of each running request, one row a request.

    A row is named by the request's ``req_pool_idx``. Forwards run one after the other, so a row holds
    what the last forward with that request left, also when the row has got a new owner since: the new
    owner's prefill is what was written last.

    Parameters
    ----------
    num_rows : int
        Rows of the request pool.
    device : torch.device
    spec_algorithm : SpeculativeAlgorithm
    topk : int
        Draft tokens of the first level that a row keeps.
    hidden_size : int
        Width of the draft model's features.
    dtype : torch.dtype
        Their type.
    """

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        spec_algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.NONE,
        topk: int = 0,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec_algorithm = spec_algorithm
        # The rows that placeholders were last made for, and those.
        self._placeholders: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self.token_ids_buf = torch.zeros(num_rows, dtype=torch.int64, device=device)
        if not spec_algorithm.is_none():
            self.new_seq_lens_buf = torch.zeros(num_rows, dtype=torch.int64, device=device)
            self.topk_p_buf = torch.zeros((num_rows, topk), device=device)
            self.topk_index_buf = torch.zeros((num_rows, topk), dtype=torch.int64, device=device)
            self.hidden_states_buf = torch.zeros(
                (num_rows, hidden_size), dtype=dtype, device=device
            )

    def placeholders(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Token ids that stand for the rows' tokens: negative, so that no real id is one.

        Neither tensor is written to after this: a batch that stays the same gets the same one again.
        """
        if self._placeholders[0] is not req_pool_indices:
            self._placeholders = (req_pool_indices, -1 - req_pool_indices)
        return self._placeholders[1]

    def resolve_future(self, forward_batch: ForwardBatch) -> None:
        """Replace placeholders among the input ids. Runs on the forward stream."""
        if forward_batch.forward_mode.is_decode():
            # Placeholders only.
            forward_batch.input_ids = self.token_ids_buf[forward_batch.req_pool_indices]
            return
        ids = forward_batch.input_ids
        rows = (-1 - ids).clamp(min=0)
        forward_batch.input_ids = torch.where(ids < 0, self.token_ids_buf[rows], ids)

    def draft_input(self, req_pool_indices: torch.Tensor) -> SpecInput:
        """What a batch carries to its next speculative step: where the values will be."""
        return self.spec_algorithm.create_draft_input(future_indices=req_pool_indices)

    def resolve_spec(self, req_pool_indices: torch.Tensor) -> SpecInput:
        """What the rows' next speculative step starts from. Runs on the forward stream."""
        return self.spec_algorithm.create_draft_input(
            verified_id=self.token_ids_buf[req_pool_indices],
            new_seq_lens=self.new_seq_lens_buf[req_pool_indices],
            topk_p=self.topk_p_buf[req_pool_indices],
            topk_index=self.topk_index_buf[req_pool_indices],
            hidden_states=self.hidden_states_buf[req_pool_indices],
        )

    def store_to_map(self, req_pool_indices: torch.Tensor, result: GenerationBatchResult) -> None:
        """Keep what a forward produced. Runs on the forward stream, at the forward's end."""
        if self.spec_algorithm.is_none():
            self.token_ids_buf.index_copy_(0, req_pool_indices, result.next_token_ids)
            return
        draft_input = result.next_draft_input
        for buffer, value in (
            (self.token_ids_buf, draft_input.verified_id),
            (self.new_seq_lens_buf, draft_input.new_seq_lens),
            (self.topk_p_buf, draft_input.topk_p),
            (self.topk_index_buf, draft_input.topk_index),
            (self.hidden_states_buf, draft_input.hidden_states),
        ):
            buffer.index_copy_(0, req_pool_indices, value.to(buffer.dtype))
