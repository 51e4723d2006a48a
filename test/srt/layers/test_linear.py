"""Projections against float64, packed and plain."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.linear import GatedLinear, Head, Linear, can_pack

ROWS = [1, 3, 32, 65]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randomize(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        scale = tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 1.0
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return module


def inputs(rows, width, dtype, seed=1):
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, expected, dtype):
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= TOLERANCE[dtype] * (1 + expected.abs())).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_linear(prepared, bias, rows, dtype):
    linear = randomize(Linear(48, 40, bias, dtype))
    weight, offset = linear.weight.double(), linear.bias.double() if bias else 0.0
    x, residual = inputs(rows, 48, dtype), inputs(rows, 40, dtype, 2)
    if prepared:
        linear.prepare()
    expected = x.double() @ weight.T + offset
    close(linear(x), expected, dtype)
    kept = residual.clone()
    close(linear(x, residual), expected + residual.double(), dtype)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_gated_linear(prepared, bias, rows, dtype):
    linear = randomize(GatedLinear(48, 40, bias, dtype))
    weight, offset = linear.weight.double(), linear.bias.double() if bias else torch.zeros(80)
    if prepared:
        linear.prepare()
    x = inputs(rows, 48, dtype)
    gate = x.double() @ weight[:40].T + offset[:40]
    up = x.double() @ weight[40:].T + offset[40:]
    close(linear(x), gate / (1 + torch.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_head_keeps_the_plain_weight(dtype):
    weight = randomize(Linear(48, 40, False, dtype)).weight
    head = Head(weight)
    head.prepare()
    x = inputs(5, 48, dtype)
    close(head(x), x.double() @ weight.double().T, dtype)
    assert head.weight is weight


def test_packing_gives_up_the_plain_weight():
    linear = Linear(8, 8, False, torch.float32)
    assert can_pack(linear.weight)
    linear.prepare()
    assert linear.weight is None
    assert not linear.state_dict()


def test_other_devices_and_types_are_not_packed():
    assert not can_pack(torch.empty((8, 8), device="meta"))
    assert not can_pack(torch.empty((8, 8), dtype=torch.float64))
