"""Weights: nothing forgotten, nothing made up, and dummies that are fit for use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import model_loader
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.model_loader import dummy_weights, load_model, read_safetensors


@pytest.fixture
def checkpoint(tiny_model):
    """A config, its directory, and random weights under Hugging Face's names."""

    def make(**overrides):
        directory = Path(tiny_model(**overrides))
        config = ModelConfig.from_path(directory)
        weights = dict(dummy_weights(config, LlamaForCausalLM(config).weight_table(), seed=1))
        return config, directory, weights

    return make


def logits(model_or_runner, tokens=(5, 9, 100, 3)):
    tokens = torch.tensor(tokens)
    return model_or_runner.logits(ForwardMode.EXTEND, [0], [tokens], [0])


def test_single_file_and_shards_are_the_same(checkpoint, make_runner):
    _, directory, weights = checkpoint()
    save_file(weights, directory / "model.safetensors")
    single = logits(make_runner(directory))
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: weights[n] for n in part}, directory / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(make_runner(directory)), single)


def test_the_names_are_hugging_face_s(checkpoint):
    transformers = pytest.importorskip("transformers")
    for tied in (True, False):
        config, _, weights = checkpoint(
            tie_word_embeddings=tied, attention_bias=True, mlp_bias=True
        )
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.hf_config))
        expected = {n: p.shape for n, p in model.named_parameters()}
        assert {n: w.shape for n, w in weights.items()} == expected


def test_no_weights(checkpoint):
    config, directory, _ = checkpoint()
    with pytest.raises(FileNotFoundError, match="has neither model"):
        load_model(config)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.st"}}')
    with pytest.raises(FileNotFoundError, match=r"gone\.st is missing"):
        load_model(config)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index(text, checkpoint):
    config, directory, _ = checkpoint()
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is not an index"):
        load_model(config)


def test_a_damaged_file(checkpoint):
    config, directory, weights = checkpoint()
    save_file(weights, directory / "model.safetensors")
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_model(config)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_weight_is_named(name, checkpoint):
    config, _, weights = checkpoint(tie_word_embeddings=False)
    del weights[name]
    with pytest.raises(ValueError, match=f"missing weights: {name}$"):
        LlamaForCausalLM(config).load_weights(weights.items())


def test_many_missing_weights_are_counted(checkpoint):
    config, _, _ = checkpoint()
    with pytest.raises(ValueError, match=r"missing weights: model\.embed.* and 12 more"):
        LlamaForCausalLM(config).load_weights([])


def test_an_unexpected_weight_is_named(checkpoint):
    config, _, weights = checkpoint()
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(ValueError, match=r"unexpected weights: model\.layers\.0.*q_proj\.bias"):
        LlamaForCausalLM(config).load_weights(weights.items())


def test_a_shape_that_does_not_fit_is_named(checkpoint):
    config, _, weights = checkpoint()
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(64, 32)
    match = r"layers\.1\.self_attn\.k_proj\.weight has shape \(64, 32\), expected \(32, 64\)"
    with pytest.raises(ValueError, match=match):
        LlamaForCausalLM(config).load_weights(weights.items())


def test_integers_are_no_weights(checkpoint):
    config, _, weights = checkpoint()
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has type torch\.int8"):
        LlamaForCausalLM(config).load_weights(weights.items())


def test_a_weight_that_comes_twice(checkpoint):
    config, _, weights = checkpoint()
    twice = [*weights.items(), ("model.norm.weight", torch.ones(64))]
    with pytest.raises(ValueError, match=r"model\.norm\.weight comes twice"):
        LlamaForCausalLM(config).load_weights(twice)


def test_copies_of_a_tied_head_and_old_buffers_are_dropped(checkpoint):
    config, _, weights = checkpoint()
    weights["lm_head.weight"] = torch.zeros(128, 64)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    LlamaForCausalLM(config).load_weights(weights.items())


def test_unknown_load_format(checkpoint):
    config, _, _ = checkpoint()
    with pytest.raises(ValueError, match="load_format must be one of auto, dummy, got 'pt'"):
        load_model(config, load_format="pt")


def test_dummies_depend_on_the_seed_alone(tiny_model, make_runner):
    path = tiny_model()
    make = lambda seed, dtype=torch.float32: logits(  # noqa: E731
        make_runner(path, dtype, load_format="dummy", seed=seed)
    )
    torch.manual_seed(0)
    first = make(3)
    torch.manual_seed(1)
    assert torch.equal(make(3), first)
    assert not torch.allclose(make(4), first, atol=0.1)
    half = make(3, torch.bfloat16).float()
    assert (half - first).abs().max() < 0.1 * first.abs().max()


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size": 32, "vocab_size": 1000, "num_hidden_layers": 1},
        {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2},
        {"hidden_size": 128, "vocab_size": 5000, "num_hidden_layers": 12, "attention_bias": True},
        {"hidden_size": 64, "vocab_size": 300, "tie_word_embeddings": False},
    ],
)
def test_dummies_write_varied_text(shape, tiny_model, make_runner):
    runner = make_runner(tiny_model(**shape), load_format="dummy")
    tokens = [1, 2, 3]
    out = logits(runner, tokens)
    assert out.isfinite().all()
    assert 1.0 < out.std() < 6.0
    text = []
    new = out[-1].argmax()[None]
    for step in range(40):
        text.append(int(new))
        out = runner.logits(ForwardMode.DECODE, [0], [new], [3 + step])
        new = out.argmax(-1)
    assert len(set(text)) > 15
    # Another prompt, another text.
    other = logits(runner, [7, 7, 5])
    assert int(other[-1].argmax()) != text[0]


def test_read_safetensors_yields_what_was_written(tmp_path):
    written = {"b": torch.ones(2), "a": torch.zeros(1, dtype=torch.int64)}
    save_file(written, tmp_path / "model.safetensors")
    read = dict(read_safetensors(tmp_path))
    assert read.keys() == written.keys()
    assert all(torch.equal(read[n], written[n]) for n in written)


def test_an_old_safetensors_tells_names_in_another_order(tmp_path, monkeypatch):
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    save_file(weights, tmp_path / "model.safetensors")
    open_file = model_loader.safe_open

    class Old:
        """Without offset_keys, which came later."""

        def __init__(self, *args, **kwargs):
            self.file = open_file(*args, **kwargs)
            self.keys, self.get_tensor = self.file.keys, self.file.get_tensor

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

    monkeypatch.setattr(model_loader, "safe_open", Old)
    assert {n: t.tolist() for n, t in read_safetensors(tmp_path)} == {"a": [1, 1], "b": [0, 0, 0]}
