"""Projections of a transformer layer, and what may be fused with them.

On a CPU a decode step is a row of thin matrix products, and PyTorch's ``F.linear`` leaves half of the
memory bandwidth unused. oneDNN does better when the weight has been put into its blocked layout
beforehand, so `prepare` does that, and lets oneDNN apply the activation or the residual to the product
while it is in registers. Everywhere else `prepare` changes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# oneDNN chooses the blocked layout for a number of rows. The layout for 32 rows is as fast as any
# other at one row, and up to twice as fast as the layout for one row at more.
_PACK_ROWS = 32


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN computes with a weight of this type in its own layout, here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight, shape (out, in), into oneDNN's blocked layout. The result is opaque."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)


class Linear(nn.Module):
    """``x @ weight.T + bias``.

    Parameters
    ----------
    in_features, out_features : int
        Widths of input and output.
    bias : bool
        Whether there is a bias.
    dtype : torch.dtype
        Type of weight, input and output.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        weight = torch.empty((out_features, in_features), dtype=dtype)
        # Weights are buffers: nothing is trained, and a device that is written in Python can move them.
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.empty(out_features, dtype=dtype) if bias else None)
        self._packed: torch.Tensor | None = None

    def prepare(self) -> None:
        """Pack the weight where that pays; the plain weight is given up then."""
        if can_pack(self.weight):
            self._packed = pack(self.weight)
            self.weight = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Project `x`, shape (T, in_features), and add `residual`, shape (T, out_features)."""
        if self._packed is None:
            out = F.linear(x, self.weight, self.bias)
            return out if residual is None else residual + out
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self.bias, "add"
        )


class GatedLinear(nn.Module):
    """``silu(x @ gate.T) * (x @ up.T)``, the first half of a Llama MLP.

    Parameters
    ----------
    in_features, out_features : int
        Widths of input and output.
    bias : bool
        Whether both projections have a bias.
    dtype : torch.dtype
        Type of weights, input and output.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty((2 * out_features, in_features), dtype=dtype)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.empty(2 * out_features, dtype=dtype) if bias else None)
        self._packed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def prepare(self) -> None:
        """Pack the weights where that pays; the plain weight is given up then."""
        if can_pack(self.weight):
            gate, up = self.weight.chunk(2)
            self._packed = (pack(gate), pack(up))
            self.weight = None
            if self.bias is not None:
                self._biases = tuple(self.bias.chunk(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project `x`, shape (T, in_features), to shape (T, out_features)."""
        if self._packed is None:
            gate, up = F.linear(x, self.weight, self.bias).chunk(2, dim=-1)
            return F.silu(gate) * up
        (gate, up), (gate_bias, up_bias) = self._packed, self._biases
        gated = torch.ops.mkldnn._linear_pointwise(x, gate, gate_bias, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, gated, up, up_bias, "mul")


class Head(nn.Module):
    """Logits over the vocabulary, by a weight that may be the embedding's.

    Parameters
    ----------
    weight : Tensor, shape (vocab, hidden_size)
        Kept as it is, beside the packed copy, because the embedding or a draft model reads its rows.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self._packed: torch.Tensor | None = None

    def prepare(self) -> None:
        """Make the packed copy where that pays."""
        if can_pack(self.weight):
            self._packed = pack(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, shape (rows, vocab), of `x`, shape (rows, hidden_size)."""
        if self._packed is None:
            return F.linear(x, self.weight)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
