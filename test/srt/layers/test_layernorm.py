"""RMSNorm against float64."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.layernorm import RMSNorm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(width, eps, dtype, prepared):
    norm = RMSNorm(width, eps, dtype)
    norm.weight.copy_(torch.randn(width, generator=torch.Generator().manual_seed(0)))
    if prepared:
        norm.prepare()
    return norm


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_against_float64(scale, eps, prepared, dtype):
    norm = make(96, eps, dtype, prepared)
    x = (torch.randn((7, 96), generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    kept = x.clone()
    out = norm(x)
    rows = x.double()
    expected = rows / ((rows * rows).mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= TOLERANCE[dtype] * (1 + expected.abs())).all()
    assert torch.equal(x, kept)


@pytest.mark.parametrize("prepared", [False, True])
def test_rows_of_zeros_stay_zero(prepared):
    out = make(16, 1e-5, torch.float32, prepared)(torch.zeros(2, 16))
    assert torch.equal(out, torch.zeros(2, 16))
