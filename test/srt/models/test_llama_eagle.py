"""The EAGLE draft model against a draft put together from parts of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.model_loader import load_model

transformers = pytest.importorskip("transformers")

VOCAB, HIDDEN = 80, 48
HOT = torch.tensor([3, 79, 0, 41, 12, 7], dtype=torch.int32)


class Reference:
    """fc, then the layers of a transformers model without its final norm, in float64."""

    def __init__(self, directory, layers=1, hot=HOT, dtype=torch.float16):
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
        )
        self.model = transformers.LlamaModel(config).eval()
        self.fc = torch.nn.Linear(2 * HIDDEN, HIDDEN)
        self.embed = torch.randn(VOCAB, HIDDEN)
        self.head = torch.randn(VOCAB, HIDDEN)
        self.hot = hot
        weights = {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if name.startswith("layers.")
        }
        weights |= {"fc.weight": self.fc.weight.data, "fc.bias": self.fc.bias.data}
        weights = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
        values = config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"]}
        if hot is not None:
            weights["hot_token_id"] = hot
            values["draft_vocab_size"] = len(hot)
        save_file(weights, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(values))
        # The file is in half precision, and what it says is what counts. Buffers are not in it.
        for parameter in (*self.model.parameters(), *self.fc.parameters()):
            parameter.data = parameter.data.to(dtype).double()
        self.model.norm = torch.nn.Identity()

    def features(self, tokens, features):
        with torch.no_grad():
            x = self.fc(torch.cat((self.embed[tokens].double(), features.double()), dim=-1))
            return self.model(inputs_embeds=x[None]).last_hidden_state[0]


def attach(runner, reference):
    runner.model.set_embed_and_head(reference.embed, reference.head)
    return runner


@pytest.mark.parametrize("layers", [1, 2])
def test_features_of_a_prompt_and_of_drafting(layers, tmp_path, make_runner):
    reference = Reference(tmp_path, layers)
    check_features(attach(make_runner(tmp_path), reference), reference)


def check_features(runner, reference):
    tokens, features = torch.randint(0, VOCAB, (20,)), torch.randn(20, HIDDEN)
    expected = reference.features(tokens, features)
    out = runner.hidden(ForwardMode.EXTEND, [1], [tokens[:14]], [0], features=features[:14])
    torch.testing.assert_close(out.double(), expected[:14], rtol=1e-4, atol=1e-4)
    out = runner.hidden(
        ForwardMode.DRAFT_EXTEND_V2, [1], [tokens[14:19]], [14], features=features[14:19]
    )
    torch.testing.assert_close(out.double(), expected[14:19], rtol=1e-4, atol=1e-4)
    out = runner.hidden(ForwardMode.DECODE, [1], [tokens[19:]], [19], features=features[19:])
    torch.testing.assert_close(out.double(), expected[19:], rtol=1e-4, atol=1e-4)


def test_logits_cover_the_draft_s_vocabulary(tmp_path, make_runner):
    reference = Reference(tmp_path)
    model = attach(make_runner(tmp_path), reference).model
    hidden = torch.randn(4, HIDDEN)
    expected = hidden.double() @ reference.head.double()[HOT.long()].T
    torch.testing.assert_close(
        model.compute_logits(hidden).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert model.hot_token_id.dtype == torch.int64
    ids = torch.tensor([[0, 5], [1, 1]])
    assert model.to_target_ids(ids).tolist() == [[3, 7], [79, 79]]


def test_without_a_list_of_tokens_ids_are_the_target_s(tmp_path, make_runner):
    reference = Reference(tmp_path, hot=None)
    model = attach(make_runner(tmp_path), reference).model
    assert model.hot_token_id is None
    hidden = torch.randn(2, HIDDEN)
    expected = hidden.double() @ reference.head.double().T
    torch.testing.assert_close(
        model.compute_logits(hidden).double(), expected, rtol=1e-5, atol=1e-5
    )
    ids = torch.tensor([4, 2])
    assert torch.equal(model.to_target_ids(ids), ids)


def test_a_checkpoint_in_the_form_of_eagle_s_authors(tmp_path, make_runner):
    """No norm at the first layer's input, and a copy of the target's embedding, which is not used."""
    reference = Reference(tmp_path, layers=2)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["layers.0.input_layernorm.weight"]
    weights["embed_tokens.weight"] = torch.full((VOCAB, HIDDEN), 1e4)
    weights["lm_head.weight"] = torch.full((VOCAB, HIDDEN), 1e4)
    save_file(weights, tmp_path / "model.safetensors")
    reference.model.layers[0].input_layernorm = torch.nn.Identity()
    check_features(attach(make_runner(tmp_path), reference), reference)


def test_hot_tokens_outside_the_vocabulary_are_refused(tmp_path):
    Reference(tmp_path, hot=torch.tensor([0, VOCAB], dtype=torch.int64))
    with pytest.raises(ValueError, match="hot_token_id"):
        load_model(ModelConfig.from_path(tmp_path))


def test_a_target_of_another_width_is_refused(tmp_path):
    reference = Reference(tmp_path)
    model = load_model(ModelConfig.from_path(tmp_path))
    with pytest.raises(ValueError, match=r"embedding has shape \(80, 32\)"):
        model.set_embed_and_head(reference.embed[:, :32], reference.head)
    with pytest.raises(ValueError, match=r"head has shape \(79, 48\)"):
        model.set_embed_and_head(reference.embed, reference.head[:-1])


@pytest.mark.parametrize("draft_vocab_size", [None, 16])
def test_dummy(draft_vocab_size, tiny_model):
    path = tiny_model(
        architectures=["LlamaForCausalLMEagle"],
        num_hidden_layers=1,
        draft_vocab_size=draft_vocab_size,
    )
    model = load_model(ModelConfig.from_path(path), load_format="dummy", seed=3)
    assert isinstance(model, LlamaForCausalLMEagle)
    ids = torch.arange(16)
    assert torch.equal(model.to_target_ids(ids), ids)
    assert model.fc.bias.isfinite().all()


def test_another_draft_vocabulary_than_the_list_s(tmp_path):
    Reference(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"draft_vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"hot_token_id has shape \(6,\), expected \(5,\)"):
        load_model(ModelConfig.from_path(tmp_path))
