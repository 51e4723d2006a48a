"""A model with its KV pool and attention backend: what runs a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import TorchAttentionBackend
from sglang.srt.layers.logits_processor import (
    LogitsProcessor,
    LogitsProcessorOutput,
    compute_token_logprobs,
)
from sglang.srt.layers.sampler import Sampler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.model_loader import load_model
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib.sparse_penalties import PenaltyState


class ModelRunner:
    """Runs forwards of one model.

    An engine makes its runners from a class that its caller may replace: a subclass with a `forward` of
    its own stands for an accelerator that is not there.

    Parameters
    ----------
    server_args : ServerArgs
    model_config : ModelConfig
        Of the model that this runner runs.
    device : torch.device
    num_kv_slots : int
        Slots of the KV pool, as many as the engine's allocator hands out.
    is_draft_worker : bool
        Whether this is the draft model. It shares slot numbers with the target, not the slots.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        device: torch.device,
        num_kv_slots: int,
        is_draft_worker: bool = False,
    ) -> None:
        self.server_args = server_args
        self.model_config = model_config
        self.device = device
        self.is_draft_worker = is_draft_worker
        self.token_to_kv_pool = MHATokenToKVPool(
            size=num_kv_slots,
            page_size=server_args.page_size,
            dtype=model_config.dtype,
            head_num=model_config.num_key_value_heads,
            head_dim=model_config.head_dim,
            layer_num=model_config.num_hidden_layers,
            device=device,
        )
        self.attn_backend = TorchAttentionBackend(
            self.token_to_kv_pool,
            model_config.num_attention_heads,
            model_config.num_key_value_heads,
            model_config.head_dim,
            device,
        )
        self.logits_processor = LogitsProcessor()
        self.sampler = Sampler()
        # Sparse penalties of all running requests, in an engine that has them.
        self.penalty_state: PenaltyState | None = None
        self.model = self.load_model()

    def load_model(self) -> torch.nn.Module:
        """The model with its weights. Runs once, when the runner is made."""
        return load_model(
            self.model_config,
            load_format="dummy" if self.server_args.load_format == "dummy" else "auto",
            seed=self.server_args.random_seed + self.is_draft_worker,
            device=self.device,
        )

    def forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the model; write keys and values of the batch's tokens; compute its logits."""
        self.attn_backend.init_forward_metadata(forward_batch)
        hidden = self.model.forward(
            forward_batch.input_ids, forward_batch.positions, forward_batch, self.attn_backend
        )
        return self.logits_processor.forward(hidden, self.model, forward_batch)

    def sample(
        self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Penalize the logits, sample a token for each request, and add its logprobs to the output.

        Returns
        -------
        Tensor, shape (B,), int64
        """
        self._penalize(logits_output, forward_batch)
        next_token_ids = self.sampler.forward(
            logits_output,
            forward_batch.sampling_info,
            forward_batch.return_logprob,
            forward_batch.top_logprobs_nums,
            forward_batch.token_ids_logprobs,
            # The sampled token's place is behind the last one that ran.
            forward_batch.seq_lens,
        )
        if self.penalty_state is not None:
            # On the device, where it is known first: no step can miss it. Without overlap it comes
            # from the host instead, with the next step.
            self.penalty_state.commit(forward_batch.penalty_step, next_token_ids)
        return next_token_ids

    def compute_logprobs_only(
        self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
    ) -> None:
        """Add the logprobs of what could follow, for requests that want no token.

        They are of the same distribution, bias and temperature included, as beside requests that do.
        """
        if not forward_batch.return_logprob:
            return
        self._penalize(logits_output, forward_batch)
        wanted = (forward_batch.top_logprobs_nums, forward_batch.token_ids_logprobs)
        # No token is sampled, so the entries of sampled tokens are fillers.
        filler = torch.zeros_like(forward_batch.req_pool_indices)
        sampling_info = forward_batch.sampling_info
        logprobs = compute_token_logprobs(
            logits_output.next_token_logits,
            filler,
            *wanted,
            temperatures=None if sampling_info.is_all_greedy else sampling_info.temperatures,
        )
        logits_output.set_next_token_logprobs(logprobs, *wanted)

    def _penalize(self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> None:
        """Make the logits float32, and penalize and bias them."""
        logits_output.next_token_logits = logits_output.next_token_logits.float()
        forward_batch.sampling_info.apply_logits_bias(logits_output.next_token_logits)
        if self.penalty_state is not None:
            self.penalty_state.apply(forward_batch.penalty_step, logits_output.next_token_logits)
