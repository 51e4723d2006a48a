"""The draft head, to be trained. `sglang.srt.models.llama_eagle` runs what comes out of it.

Names and layout of its parameters are those of the checkpoint, so a state dict is a checkpoint. It is
written without the package's layers, which are made to infer: they fuse, pack and keep KV in a pool.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import inverse_frequencies


@dataclass
class ChainState:
    """Keys and values of the draft steps so far, each (B, kv_heads, T, head_dim)."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        q_width = config.num_attention_heads * head_dim
        kv_width = config.num_key_value_heads * head_dim
        self.q_proj = nn.Linear(hidden, q_width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], state: ChainState
    ) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        state.keys.append(_rotate(k, rotary))
        state.values.append(v.to(q.dtype))
        out = F.scaled_dot_product_attention(
            _rotate(q, rotary),
            self._all(state.keys),
            self._all(state.values),
            attn_mask=_chain_mask(x.shape[1], len(state.keys)),
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _all(self, steps: list[torch.Tensor]) -> torch.Tensor:
        """Keys or values of all steps, one after the other, repeated for the heads that share them."""
        return torch.cat(steps, dim=2).repeat_interleave(self.group, dim=1)


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], state: ChainState
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, state)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftHead(nn.Module):
    """``layer(fc([embedding of a token; feature before it]))``.

    Parameters
    ----------
    config : ModelConfig
        The target's; the layer has its widths.
    seed : int
        Of the initial weights.
    low_precision : bool
        Whether the layer's products run in bfloat16. The residual stream stays in float32.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, low_precision: bool = False) -> None:
        super().__init__()
        self.config = config
        self.low_precision = low_precision
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([_Layer(config)])
        self.inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Random projections, but nothing is added to the residual stream yet."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            if "o_proj" in name or "down_proj" in name or name == "fc.bias":
                parameter.zero_()

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, state: ChainState
    ) -> torch.Tensor:
        """One draft step of the chains that start at every position of every sequence.

        Row ``t`` sees what the chain of ``t`` would see in the engine: the first step's keys up to
        ``t``, where the features were the target's, and its own keys since.

        Parameters
        ----------
        embedded, features : Tensor, shape (B, T, hidden_size)
            Embedding of each row's token, and the feature of the position before it.
        state : ChainState
            Empty at the first step; this step is added.

        Returns
        -------
        Tensor, shape (B, T, hidden_size)
            Features of the tokens, as the head sees them.
        """
        x = self.fc(torch.cat((embedded, features), dim=-1))
        positions = torch.arange(x.shape[1]) + len(state.keys)
        angles = (positions[:, None] * self.inv_freq).repeat(1, 2)
        rotary = (angles.cos(), angles.sin())
        with _autocast(self.low_precision):
            return self.layers[0](x, rotary, state)


def _autocast(enabled: bool) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def _rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding in Hugging Face's layout; `x` has shape (B, heads, T, head_dim)."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _chain_mask(rows: int, steps: int) -> torch.Tensor:
    """What each row sees of the keys of all steps, (rows, steps * rows) bool.

    Of the first step all up to itself, of later steps only itself.
    """
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    own = torch.eye(rows, dtype=torch.bool)
    return torch.cat([causal] + [own] * (steps - 1), dim=1)
