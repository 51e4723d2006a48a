"""Rotary embedding against the textbook in float64, and its scalings against transformers."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.layers.rotary_embedding import (
    RotaryEmbedding,
    interleave_rows,
    inverse_frequencies,
)

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}


def halves(x, position, base):
    """Hugging Face's layout: element i is turned with element i + half."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        a, b = float(x[i]), float(x[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = a * math.sin(angle) + b * math.cos(angle)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_equals_the_textbook_after_interleaving(dtype, tolerance):
    heads, width, base = 3, 8, 10000.0
    rotary = RotaryEmbedding(width, base, None, CPU)
    x = torch.randn((4, heads, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([0, 1, 5, 100])
    # interleave_rows re-orders the first dimension, which stands for heads * width.
    pairs = interleave_rows(x.permute(1, 2, 0).reshape(-1, 4), width)
    pairs = pairs.view(heads, width, 4).permute(2, 0, 1).contiguous()
    out = rotary.rotate(pairs, rotary.factors(positions))
    assert out.dtype == dtype
    for t, position in enumerate(positions.tolist()):
        for h in range(heads):
            expected = interleave_rows(halves(x[t, h], position, base), width)
            assert (out[t, h].double() - expected).abs().max() <= tolerance


def test_interleaving_puts_the_halves_side_by_side():
    assert interleave_rows(torch.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_scores_depend_on_the_distance_alone_however_far():
    rotary = RotaryEmbedding(16, 10000.0, None, CPU)
    q, k = torch.randn((2, 1, 16), generator=torch.Generator().manual_seed(1)).unbind(0)

    def score(i, j):
        a = rotary.rotate(q[None], rotary.factors(torch.tensor([i])))
        b = rotary.rotate(k[None], rotary.factors(torch.tensor([j])))
        return float((a * b).sum())

    # No table ends anywhere; float32 angles lose digits, no more.
    assert score(1000, 990) == pytest.approx(score(10, 0), abs=2e-3)
    assert score(100_000, 99_990) == pytest.approx(score(10, 0), abs=0.1)


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3], ids=["default", "linear", "llama3"])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_frequencies_are_those_of_transformers(scaling, base):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        rope_theta=base,
        rope_scaling=dict(scaling) if scaling else None,
        max_position_embeddings=4096,
    )
    expected = modeling.LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(inverse_frequencies(64, base, scaling), expected, rtol=1e-6, atol=0)


def test_llama3_by_hand():
    got = inverse_frequencies(64, 10000.0, LLAMA3)
    plain = inverse_frequencies(64, 10000.0, None)
    for slow, f in zip(got.tolist(), plain.tolist()):
        turns = 512 * f / (2 * math.pi)
        if turns > 4:
            expected = f
        elif turns < 1:
            expected = f / 8
        else:
            share = (turns - 1) / 3
            expected = share * f + (1 - share) * f / 8
        assert slow == pytest.approx(expected, rel=1e-5)
