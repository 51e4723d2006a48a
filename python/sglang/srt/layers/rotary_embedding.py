"""Rotary position embedding (Su et al., 2021), with the pairs of a head side by side.

Hugging Face's layout rotates element ``i`` of a head with element ``i + head_dim / 2``. Projections
are re-ordered when they are loaded (`interleave_rows`), so that here a pair is two neighbours, which
is one complex number: turning all heads of queries and keys is one complex product. Scores do not
change, since queries and keys are re-ordered alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def interleave_rows(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Re-order a query or key projection from Hugging Face's halves to neighbouring pairs.

    Parameters
    ----------
    weight : Tensor, shape (heads * head_dim, ...)
        Weight or bias of the projection.
    head_dim : int
        Width of a head.

    Returns
    -------
    Tensor
        Same shape; row ``2 * i + j`` of a head is what row ``i + j * head_dim / 2`` was.
    """
    rest = weight.shape[1:]
    halves = weight.reshape(-1, 2, head_dim // 2, *rest)
    return halves.transpose(1, 2).reshape(-1, *rest)


def inverse_frequencies(head_dim: int, base: float, scaling: dict[str, Any] | None) -> torch.Tensor:
    """Radians that each pair turns per position, shape (head_dim / 2,), float32.

    ``linear`` divides them by the factor. ``llama3`` (Llama 3.1) divides by the factor only what turns
    less than ``low_freq_factor`` times within the original context, leaves alone what turns more than
    ``high_freq_factor`` times, and blends in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * (frequencies / factor)


class RotaryEmbedding:
    """Turns queries and keys by their positions.

    There is no table of positions and so no longest one: the factors of a forward's positions are
    computed once, by `factors`, and all layers share them.

    Parameters
    ----------
    head_dim : int
        Width of a head.
    base : float
        ``rope_theta``.
    scaling : dict or None
        `ModelConfig.rope_scaling`.
    device : torch.device
        Where positions live.
    """

    def __init__(
        self,
        head_dim: int,
        base: float,
        scaling: dict[str, Any] | None,
        device: torch.device,
    ) -> None:
        self.head_dim = head_dim
        self.inv_freq = inverse_frequencies(head_dim, base, scaling).to(device)

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """``exp(i * position * frequency)``, shape (T, 1, head_dim / 2), complex64.

        Parameters
        ----------
        positions : Tensor, shape (T,), int64
            Absolute positions.
        """
        angles = positions.to(torch.float32)[:, None, None] * self.inv_freq
        return torch.complex(angles.cos(), angles.sin())

    def rotate(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Turn `x`, shape (T, heads, head_dim), in float32, into a new tensor of the type of `x`."""
        pairs = x.float().unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs) * factors)
        return turned.flatten(-2).to(x.dtype)
