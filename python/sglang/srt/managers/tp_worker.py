"""Runs a batch without speculation: one forward, one sample."""

from __future__ import annotations

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.generation_result import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner


class TpModelWorker:
    """The worker of engines that do not speculate.

    Parameters
    ----------
    model_runner : ModelRunner
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner

    def forward_batch_generation(self, forward_batch: ForwardBatch) -> GenerationBatchResult:
        """Run the model on `forward_batch` and sample a token for each request.

        A prefill-only batch samples nothing: its tokens are zeros, which no one reads.
        """
        logits_output = self.model_runner.forward(forward_batch)
        if forward_batch.is_prefill_only:
            self.model_runner.compute_logprobs_only(logits_output, forward_batch)
            next_token_ids = torch.zeros_like(forward_batch.req_pool_indices)
        else:
            next_token_ids = self.model_runner.sample(logits_output, forward_batch)
        return GenerationBatchResult(logits_output, next_token_ids)
