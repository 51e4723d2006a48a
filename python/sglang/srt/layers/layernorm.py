"""Root mean square normalisation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    Parameters
    ----------
    hidden_size : int
        Width of the last dimension.
    eps : float
        Keeps rows of zeros finite.
    dtype : torch.dtype
        Type of the weight and of the input.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(hidden_size, dtype=dtype))
        self._floor: torch.Tensor | None = None
        self._gain: torch.Tensor | None = None

    def prepare(self) -> None:
        """Fold constants where that pays."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            hidden_size = self.weight.shape[0]
            self._floor = torch.tensor(math.sqrt(hidden_size * self.eps))
            self._gain = self.weight * math.sqrt(hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x`, shape (T, hidden_size), into a new tensor."""
        if self._gain is None:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # On a CPU F.rms_norm is a dozen operations, half of a decode step's small ones. With n the
        # length of a row and N its width, sqrt(n**2 / N + eps) is hypot(n, sqrt(N * eps)) / sqrt(N).
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(length, self._floor) * self._gain
