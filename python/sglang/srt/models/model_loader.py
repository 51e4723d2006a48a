"""From a model directory to a model that runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.weight_utils import WeightTable

_MODEL_CLASSES: dict[str, type[LlamaForCausalLM] | type[LlamaForCausalLMEagle]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "LlamaForCausalLMEagle": LlamaForCausalLMEagle,
}
LOAD_FORMATS = ("auto", "dummy")


def load_model(
    config: ModelConfig,
    *,
    load_format: str = "auto",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LlamaForCausalLM | LlamaForCausalLMEagle:
    """Build a model, give it weights, move it to its device and make it ready to run.

    Parameters
    ----------
    config : ModelConfig
        The model; its directory is read for "auto".
    load_format : {"auto", "dummy"}
        "auto" reads safetensors, "dummy" makes random weights.
    seed : int
        Of the random weights. They are made on the CPU, so they are the same on every device.
    device : torch.device
        Where to run.

    Raises
    ------
    FileNotFoundError
        If the directory has no safetensors.
    ValueError
        If `load_format` is unknown, or the weights are not the model's.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}"
        )
    with torch.no_grad():
        model = _MODEL_CLASSES[config.architecture](config)
        if load_format == "dummy":
            weights = dummy_weights(config, model.weight_table(), seed)
        else:
            weights = read_safetensors(config.model_path)
        model.load_weights(weights)
        model.to(device)
        model.prepare()
    return model.eval()


def read_safetensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of all weights in a directory, one file or a sharded index.

    Raises
    ------
    FileNotFoundError
        If there is no weight file, or a shard that the index names is absent.
    ValueError
        If the index or a file cannot be read.
    """
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in _names(file):
                    yield name, file.get_tensor(name)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing") from None
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None


def _names(file: Any) -> list[str]:
    """Names of a file's tensors, in the order of the disk where safetensors is new enough to tell."""
    return getattr(file, "offset_keys", file.keys)()


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is not an index of safetensors: {error!r}") from None
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json"
        )
    return [single]


# Standard deviation of dummy embeddings. Against a residual stream of about one it is small, so that a
# tied head does not simply repeat the last token.
_DUMMY_EMBED_STD = 0.02
# Standard deviation of dummy logits: neither flat nor certain.
_DUMMY_LOGIT_STD = 3.0


def dummy_weights(
    config: ModelConfig, table: WeightTable, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights for every tensor of a model.

    They are drawn in float32 on the CPU, one tensor after the other from one generator, so that they
    depend on nothing but the config and `seed`. Projections keep the variance of their input; those
    that add to the residual stream share a variance of a few among the layers; the final norm sets the
    spread of the logits. Queries and keys are twice as large, and so is what attention adds: text then
    depends on positions far back, and greedy decoding does not run in short circles.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    into_residual = 1.0 / math.sqrt(2 * config.num_hidden_layers)
    gains = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 2 * into_residual, "down_proj": into_residual}
    for name, shape in table.items():
        if name == "hot_token_id":
            yield name, torch.arange(shape[0])
        elif name == "model.norm.weight":
            spread = _DUMMY_EMBED_STD * math.sqrt(config.hidden_size)
            yield name, torch.full(shape, _DUMMY_LOGIT_STD / spread)
        elif name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "bias")):
            yield name, _normal(shape, _DUMMY_EMBED_STD, generator)
        else:
            gain = gains.get(name.split(".")[-2], 1.0)
            yield name, _normal(shape, gain / math.sqrt(shape[-1]), generator)


def _normal(shape: torch.Size, std: float, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
