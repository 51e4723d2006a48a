"""What a forward hands back to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.utils.common import to_host_async

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.speculative.eagle_info import EagleDraftInput


@dataclass
class GenerationBatchResult:
    """Result of one forward of a batch of ``B`` requests.

    Attributes
    ----------
    logits_output : LogitsProcessorOutput
        Logprobs and hidden states that were asked for.
    next_token_ids : Tensor, shape (B,) or (B, num_steps + 1), int64
        The sampled tokens. With speculation the tokens of the accepted path, of which the first
        ``accept_lens`` count.
    accept_lens : Tensor, shape (B,), int64, or None
        Number of new tokens of each request, speculation only.
    next_draft_input : EagleDraftInput or None
        What the next speculative step starts from.
    phases : dict of str to float
        Durations in seconds inside the forward, by name.
    """

    logits_output: LogitsProcessorOutput
    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor | None = None
    next_draft_input: EagleDraftInput | None = None
    phases: dict[str, float] = field(default_factory=dict)

    def copy_to_host(self) -> None:
        """Start copying all that result processing reads. Called at the end of a forward."""
        self.next_token_ids = to_host_async(self.next_token_ids)
        if self.accept_lens is not None:
            self.accept_lens = to_host_async(self.accept_lens)
        self.logits_output.copy_to_host()
