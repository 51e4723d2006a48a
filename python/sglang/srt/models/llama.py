"""The Llama architecture, for inference over a KV pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import GatedLinear, Head, Linear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, interleave_rows
from sglang.srt.models.weight_utils import WeightTable

if TYPE_CHECKING:
    from sglang.srt.layers.attention import TorchAttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class LlamaAttention(nn.Module):
    """Queries, keys and values by one projection, attention, and the way back.

    Parameters
    ----------
    config : ModelConfig
        Shape of the attention.
    layer_id : int
        Which of the pool's layers to use.
    """

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias, dtype = config.attention_bias, config.dtype
        self.qkv_proj = Linear(config.hidden_size, width, bias, dtype)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias, dtype)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryEmbedding,
        factors: torch.Tensor,
        forward_batch: ForwardBatch,
        attn_backend: TorchAttentionBackend,
    ) -> torch.Tensor:
        """Attention of `x`, added to `residual`; all of shape (T, hidden_size)."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        turned = self.num_heads + self.num_kv_heads
        qk = rotary.rotate(qkv[:, :turned], factors)
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, turned:]
        out = attn_backend.forward(q, k, v, self.layer_id, forward_batch)
        return self.o_proj(out, residual)

    def register_weights(self, table: WeightTable, prefix: str) -> None:
        """Say where the checkpoint's tensors of this module go."""
        interleave = lambda w: interleave_rows(w, self.head_dim)  # noqa: E731
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for kind in ("weight", "bias"):
            fused = getattr(self.qkv_proj, kind)
            if fused is None:
                continue
            table.add(f"{prefix}q_proj.{kind}", fused[:q], interleave)
            table.add(f"{prefix}k_proj.{kind}", fused[q : q + kv], interleave)
            table.add(f"{prefix}v_proj.{kind}", fused[q + kv :])
            table.add(f"{prefix}o_proj.{kind}", getattr(self.o_proj, kind))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream.

    Parameters
    ----------
    config : ModelConfig
        Shape of the layer.
    layer_id : int
        Its number.
    """

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.self_attn = LlamaAttention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.gate_up_proj = GatedLinear(hidden, inner, config.mlp_bias, dtype)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, dtype)

    def forward(
        self,
        x: torch.Tensor,
        rotary: RotaryEmbedding,
        factors: torch.Tensor,
        forward_batch: ForwardBatch,
        attn_backend: TorchAttentionBackend,
    ) -> torch.Tensor:
        """Run the layer on `x`, shape (T, hidden_size)."""
        x = self.self_attn(self.input_layernorm(x), x, rotary, factors, forward_batch, attn_backend)
        return self.down_proj(self.gate_up_proj(self.post_attention_layernorm(x)), x)

    def register_weights(self, table: WeightTable, prefix: str) -> None:
        """Say where the checkpoint's tensors of this layer go."""
        table.add(f"{prefix}input_layernorm.weight", self.input_layernorm.weight)
        table.add(f"{prefix}post_attention_layernorm.weight", self.post_attention_layernorm.weight)
        self.self_attn.register_weights(table, f"{prefix}self_attn.")
        for kind in ("weight", "bias"):
            fused = getattr(self.gate_up_proj, kind)
            if fused is None:
                continue
            gate, up = fused.chunk(2)
            table.add(f"{prefix}mlp.gate_proj.{kind}", gate)
            table.add(f"{prefix}mlp.up_proj.{kind}", up)
            table.add(f"{prefix}mlp.down_proj.{kind}", getattr(self.down_proj, kind))


def make_rotary(config: ModelConfig, device: torch.device) -> RotaryEmbedding:
    """The rotary embedding of a model."""
    return RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling, device)


class LlamaModel(nn.Module):
    """Embedding, layers and final norm.

    Parameters
    ----------
    config : ModelConfig
        The model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        embedding = torch.empty((config.vocab_size, config.hidden_size), dtype=config.dtype)
        self.register_buffer("embed_tokens", embedding)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.rotary: RotaryEmbedding | None = None

    def prepare(self) -> None:
        """Get ready to run where the weights are now."""
        self.rotary = make_rotary(self.config, self.embed_tokens.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        attn_backend: TorchAttentionBackend,
    ) -> torch.Tensor:
        """Hidden states after the final norm, shape (T, hidden_size)."""
        x = F.embedding(input_ids, self.embed_tokens)
        factors = self.rotary.factors(positions)
        for layer in self.layers:
            x = layer(x, self.rotary, factors, forward_batch, attn_backend)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """A Llama language model.

    Weights go in with `load_weights`; `prepare`, after they are on their device, makes it ready to run.

    Parameters
    ----------
    config : ModelConfig
        The model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        head = None
        if not config.tie_word_embeddings:
            shape = (config.vocab_size, config.hidden_size)
            head = torch.empty(shape, dtype=config.dtype)
        self.register_buffer("lm_head_weight", head)
        self.lm_head: Head | None = None

    def weight_table(self) -> WeightTable:
        """Where each tensor of a checkpoint goes."""
        table = WeightTable()
        table.add("model.embed_tokens.weight", self.model.embed_tokens)
        for i, layer in enumerate(self.model.layers):
            layer.register_weights(table, f"model.layers.{i}.")
        table.add("model.norm.weight", self.model.norm.weight)
        if self.lm_head_weight is None:
            table.ignore("lm_head.weight")
        else:
            table.add("lm_head.weight", self.lm_head_weight)
        return table

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all weights from a checkpoint.

        Parameters
        ----------
        weights : iterable of (str, Tensor)
            Names as Hugging Face has them.

        Raises
        ------
        ValueError
            If a tensor is missing, unexpected, comes twice or has another shape; names it.
        """
        self.weight_table().load(weights)

    def prepare(self) -> None:
        """Fuse and pack what runs faster so. Call once, after loading and moving."""
        for module in list(self.modules()):
            if isinstance(module, Linear | GatedLinear | RMSNorm):
                module.prepare()
        self.model.prepare()
        self.lm_head = Head(self.get_embed_and_head()[1])
        self.lm_head.prepare()

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and head, both (vocab_size, hidden_size); one tensor where they are tied."""
        embed = self.model.embed_tokens
        return embed, embed if self.lm_head_weight is None else self.lm_head_weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        attn_backend: TorchAttentionBackend,
    ) -> torch.Tensor:
        """Hidden states after the final norm.

        Parameters
        ----------
        input_ids, positions : Tensor, shape (T,), int64
            Tokens and their absolute positions.
        forward_batch : ForwardBatch
            The forward, with ``attn_metadata`` filled by `attn_backend`.
        attn_backend : TorchAttentionBackend
            Attends, and owns the KV pool.

        Returns
        -------
        Tensor, shape (T, hidden_size)
        """
        return self.model(input_ids, positions, forward_batch, attn_backend)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, shape (rows, vocab_size), of hidden states, shape (rows, hidden_size)."""
        return self.lm_head(hidden)
