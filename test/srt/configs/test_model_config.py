"""What is read from a model directory, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.model
def test_the_real_model(model_path):
    config = ModelConfig.from_path(model_path)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.num_hidden_layers, config.head_dim) == (30, 64)
    assert config.rope_theta == 100000.0
    assert config.rope_scaling is None
    assert config.context_len == config.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {2}
    assert config.dtype == torch.float32


def test_defaults_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    given = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(given | {"architectures": ["LlamaForCausalLM"]})
    )
    config, expected = ModelConfig.from_path(tmp_path), transformers.LlamaConfig(**given)
    for name in (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
    ):
        assert getattr(config, name) == getattr(expected, name), name


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, {2}),
        ([2, 5], None, {2, 5}),
        (2, 7, {2, 7}),
        ([2, 3], [3, 9], {2, 3, 9}),
        (None, [4], {4}),
        (None, None, set()),
    ],
)
def test_ends_of_sequence(in_config, in_generation, expected, tiny_model):
    directory = Path(tiny_model(eos_token_id=in_config))
    if in_generation is not None:
        (directory / "generation_config.json").write_text(
            json.dumps({"eos_token_id": in_generation})
        )
    assert ModelConfig.from_path(directory).eos_token_ids == expected


def test_length_of_context(tiny_model):
    path = tiny_model(max_position_embeddings=100)
    assert ModelConfig.from_path(path).context_len == 100
    assert ModelConfig.from_path(path, context_length=60).context_len == 60
    for wrong in (101, 0, -1, 1.5, True):
        with pytest.raises(ValueError, match="context_length must be an integer from 1 to 100"):
            ModelConfig.from_path(path, context_length=wrong)


@pytest.mark.parametrize(
    ("scaling", "context_len"),
    [
        ({"rope_type": "linear", "factor": 2.5}, 250),
        ({"type": "linear", "factor": 2.0}, 200),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 50}, 100),
        (LLAMA3, 100),
        ({"rope_type": "default"}, 100),
    ],
)
def test_rope_scaling(scaling, context_len, tiny_model):
    path = tiny_model(max_position_embeddings=100, rope_scaling=scaling)
    config = ModelConfig.from_path(path)
    assert config.context_len == context_len
    kind = scaling.get("rope_type") or scaling["type"]
    if kind == "default":
        assert config.rope_scaling is None
    else:
        assert config.rope_scaling["rope_type"] == kind
        assert config.rope_scaling["factor"] == scaling["factor"]


def test_rope_parameters_of_transformers_5(tiny_model):
    parameters = LLAMA3 | {"rope_theta": 500000.0}
    config = ModelConfig.from_path(tiny_model(rope_parameters=parameters))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == LLAMA3


def test_draft_models(tiny_model):
    eagle = {"architectures": ["LlamaForCausalLMEagle"]}
    assert ModelConfig.from_path(tiny_model(**eagle)).draft_vocab_size is None
    config = ModelConfig.from_path(tiny_model(**eagle, draft_vocab_size=32))
    assert config.draft_vocab_size == 32
    with pytest.raises(ValueError, match="draft_vocab_size must not exceed vocab_size"):
        ModelConfig.from_path(tiny_model(**eagle, draft_vocab_size=129))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            "architectures must be one of LlamaForCausalLM",
        ),
        ({"architectures": []}, "architectures must be a list of one name"),
        ({"architectures": None}, "architectures must be a list of one name"),
        ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
        ({"hidden_size": 65, "head_dim": None}, "hidden_size must be a multiple"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"hidden_size": 0, "head_dim": 16}, "hidden_size must be a positive integer, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": "x"}, "rope_theta must be a positive number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "rope_type of default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' must have a positive factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "must have a positive factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "positive low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor above"),
        ({"rope_scaling": 3}, "rope_scaling must be an object or null, got 3"),
        (
            {"rope_parameters": {"rope_theta": -1}},
            "rope_parameters must have a positive rope_theta",
        ),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (
            {"eos_token_id": 128},
            r"eos_token_id must be token ids below vocab_size \(128\), got 128",
        ),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be token ids"),
        ({"eos_token_id": -1}, "eos_token_id must be token ids"),
        ({"bos_token_id": "<s>"}, "bos_token_id must be an integer or null"),
    ],
)
def test_refused(overrides, message, tiny_model):
    path = tiny_model(**{"head_dim": 16} | overrides)
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_path(path)
    assert "config.json" in str(caught.value)


def test_wrong_value_in_generation_config(tiny_model):
    directory = Path(tiny_model())
    (directory / "generation_config.json").write_text('{"eos_token_id": 500}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        ModelConfig.from_path(directory)


def test_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        ModelConfig.from_path(tmp_path / "nowhere")


def test_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        ModelConfig.from_path(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "must hold a JSON object")]
)
def test_no_json(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_path(tmp_path)


def test_unknown_dtype(tiny_model):
    with pytest.raises(ValueError, match="dtype must be one of"):
        ModelConfig.from_path(tiny_model(), dtype=torch.float64)
