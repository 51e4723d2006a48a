"""The EAGLE-1 draft model of a Llama target (Li et al., 2024).

It continues the target's features (hidden states after the final norm) one token ahead: at position
``i`` it takes token ``i + 1`` and the feature at ``i``, and its output stands for the feature at
``i + 1``. Embedding and head are the target's. The first layer may have a norm at its input: EAGLE's
own checkpoints have none there, the head that is committed with this project does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import GatedLinear, Head, Linear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.models.llama import LlamaDecoderLayer, make_rotary
from sglang.srt.models.weight_utils import WeightTable

if TYPE_CHECKING:
    from sglang.srt.layers.attention import TorchAttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class LlamaForCausalLMEagle(nn.Module):
    """Draft model: ``layers(fc([embedding of the token; feature]))``, without a final norm.

    Parameters
    ----------
    config : ModelConfig
        The draft model; widths and vocabulary are the target's.

    Attributes
    ----------
    hot_token_id : Tensor, shape (draft_vocab_size,), int64, or None
        Target id of each draft id, for a draft that scores only frequent tokens. None: all, as they are.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, True, config.dtype)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        hot = None
        if config.draft_vocab_size is not None:
            hot = torch.arange(config.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("hot_token_id", hot)
        self.embed_tokens: torch.Tensor | None = None
        self.lm_head: Head | None = None
        self.rotary: RotaryEmbedding | None = None

    def weight_table(self) -> WeightTable:
        """Where each tensor of a checkpoint goes."""
        table = WeightTable()
        table.add("fc.weight", self.fc.weight)
        table.add("fc.bias", self.fc.bias)
        for i, layer in enumerate(self.layers):
            layer.register_weights(table, f"layers.{i}.")
        first = self.layers[0].input_layernorm
        table.add("layers.0.input_layernorm.weight", first.weight, optional=True)
        # Copies of the target's, which are used instead.
        table.ignore("embed_tokens.weight")
        table.ignore("lm_head.weight")
        if self.hot_token_id is not None:
            # A draft over the whole vocabulary needs no list.
            whole = self.config.draft_vocab_size == self.config.vocab_size
            table.add("hot_token_id", self.hot_token_id, optional=whole)
        return table

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all weights from a checkpoint.

        Raises
        ------
        ValueError
            If a tensor is missing, unexpected, comes twice or has another shape, or a hot token is
            outside the vocabulary; names it.
        """
        loaded = self.weight_table().load(weights)
        if "layers.0.input_layernorm.weight" not in loaded:
            self.layers[0].input_layernorm = nn.Identity()
        hot = self.hot_token_id
        if hot is not None and not 0 <= int(hot.min()) <= int(hot.max()) < self.config.vocab_size:
            raise ValueError(f"hot_token_id has ids outside 0..{self.config.vocab_size - 1}")

    def prepare(self) -> None:
        """Fuse and pack what runs faster so. Call once, after loading and moving."""
        device = self.fc.weight.device
        for module in list(self.modules()):
            if isinstance(module, Linear | GatedLinear | RMSNorm):
                module.prepare()
        self.rotary = make_rotary(self.config, device)

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Share the target's embedding and head, both (vocab_size, hidden_size).

        Raises
        ------
        ValueError
            If they are not of the draft's width and vocabulary.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, weight in (("embedding", embed), ("head", head)):
            if tuple(weight.shape) != expected:
                raise ValueError(
                    f"the target's {name} has shape {tuple(weight.shape)}, but the draft model's "
                    f"(vocab_size, hidden_size) is {expected}"
                )
        self.embed_tokens = embed
        rows = head if self.hot_token_id is None else head.index_select(0, self.hot_token_id)
        self.lm_head = Head(rows)
        self.lm_head.prepare()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        attn_backend: TorchAttentionBackend,
    ) -> torch.Tensor:
        """Features one token ahead, shape (T, hidden_size).

        ``forward_batch.spec_hidden_states``, shape (T, hidden_size), are the features beside
        `input_ids`.
        """
        embedded = F.embedding(input_ids, self.embed_tokens)
        features = forward_batch.spec_hidden_states.to(embedded.dtype)
        x = self.fc(torch.cat((embedded, features), dim=-1))
        factors = self.rotary.factors(positions)
        for layer in self.layers:
            x = layer(x, self.rotary, factors, forward_batch, attn_backend)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft's vocabulary, shape (rows, draft_vocab_size)."""
        return self.lm_head(hidden)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids, any shape, int64."""
        if self.hot_token_id is None:
            return draft_ids
        return F.embedding(draft_ids, self.hot_token_id[:, None]).squeeze(-1)
