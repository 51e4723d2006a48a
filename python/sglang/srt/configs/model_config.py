"""What the engine has to know about a model before it loads a weight."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle")
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelConfig:
    """A model, as its directory describes it. What config.json leaves out, but for the widths and the
    number of layers and heads, has the default of Hugging Face's ``LlamaConfig``.

    Attributes
    ----------
    model_path : Path
        The directory.
    hf_config : dict
        config.json as it is.
    architecture : str
        One of `ARCHITECTURES`.
    vocab_size, hidden_size, intermediate_size : int
        Widths of the logits, of the residual stream, and inside an MLP.
    num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim : int
        Shape of the layers and of their attention.
    rms_norm_eps, rope_theta : float
        Constants of the norms and of the rotary embedding.
    rope_scaling : dict or None
        None, or a dict with ``rope_type`` "linear" or "llama3" and what that kind needs.
    max_position_embeddings : int
        Positions that the model was made for, as config.json has it.
    context_len : int
        Longest sequence that the engine may build.
    tie_word_embeddings, attention_bias, mlp_bias : bool
        Whether the head is the embedding, and which projections have a bias.
    bos_token_id : int or None
        What a prompt begins with.
    eos_token_ids : frozenset of int
        Tokens that end a sequence: those of config.json and those of generation_config.json.
    dtype : torch.dtype
        Type of weights, activations and KV.
    draft_vocab_size : int or None
        Draft models only: how many tokens the draft's logits cover, None for all.
    """

    model_path: Path
    hf_config: dict[str, Any] = field(repr=False)
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    context_len: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    draft_vocab_size: int | None = None

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        context_length: int | None = None,
    ) -> ModelConfig:
        """Read config.json, and generation_config.json where there is one, of a model directory.

        Parameters
        ----------
        path : str or Path
            The directory.
        dtype : torch.dtype
            Type to run the model in, whatever its file has.
        context_length : int or None
            Limit of a sequence; None means the model's own.

        Raises
        ------
        FileNotFoundError
            If the directory or its config.json is absent.
        ValueError
            If the model is one that this engine does not run, or a value makes no sense. The message
            names the file, the field and the value.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise FileNotFoundError(f"model_path {str(path)!r} is not a directory")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {[str(d) for d in DTYPES]}, got {dtype}")
        reader = _Reader(directory / "config.json")
        fields = _read_fields(reader)
        context_len = _context_length(reader, fields, context_length)
        generation = directory / "generation_config.json"
        eos = _token_ids(reader, fields["vocab_size"])
        if generation.is_file():
            eos |= _token_ids(_Reader(generation), fields["vocab_size"])
        return cls(
            model_path=directory,
            hf_config=reader.values,
            context_len=context_len,
            eos_token_ids=frozenset(eos),
            dtype=dtype,
            **fields,
        )


class _Reader:
    """Fields of a JSON file, with errors that say where a wrong value stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.values = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError):
            raise FileNotFoundError(f"{path} is missing") from None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(self.values, dict):
            raise ValueError(f"{path} must hold a JSON object")

    def wrong(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {name} {problem}, got {self.values.get(name)!r}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not _is_number(value) or not value > 0:
            raise self.wrong(name, "must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise self.wrong(name, "must be true or false")
        return bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def _read_fields(reader: _Reader) -> dict[str, Any]:
    values = reader.values
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise reader.wrong("architectures", "must be a list of one name")
    if architectures[0] not in ARCHITECTURES:
        raise reader.wrong("architectures", f"must be one of {', '.join(ARCHITECTURES)}")
    _refuse_variants(reader)
    hidden_size = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.wrong("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if values.get("head_dim") is None and hidden_size % heads:
        raise reader.wrong("hidden_size", f"must be a multiple of num_attention_heads ({heads})")
    head_dim = reader.integer("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise ValueError(
            f"{reader.path}: head_dim must be even for rotary embedding, got {head_dim}"
        )
    rope_theta, rope_scaling = _rope(reader)
    vocab_size = reader.integer("vocab_size")
    draft_vocab_size = None
    if architectures[0] == "LlamaForCausalLMEagle" and values.get("draft_vocab_size") is not None:
        draft_vocab_size = reader.integer("draft_vocab_size")
        if draft_vocab_size > vocab_size:
            raise reader.wrong("draft_vocab_size", f"must not exceed vocab_size ({vocab_size})")
    bos = values.get("bos_token_id")
    if bos is not None and (isinstance(bos, bool) or not isinstance(bos, int)):
        raise reader.wrong("bos_token_id", "must be an integer or null")
    return {
        "architecture": architectures[0],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": reader.integer("max_position_embeddings", 2048),
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "attention_bias": reader.flag("attention_bias"),
        "mlp_bias": reader.flag("mlp_bias"),
        "bos_token_id": bos,
        "draft_vocab_size": draft_vocab_size,
    }


def _refuse_variants(reader: _Reader) -> None:
    """Refuse what would load but compute something else than the model's authors meant."""
    values = reader.values
    if (values.get("hidden_act") or "silu") != "silu":
        raise reader.wrong("hidden_act", "must be 'silu'")
    if values.get("quantization_config"):
        raise reader.wrong("quantization_config", "is not supported")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise reader.wrong("partial_rotary_factor", "must be 1")


def _rope(reader: _Reader) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotary embedding, from the layout of transformers 4 or 5."""
    name = "rope_parameters" if reader.values.get("rope_parameters") else "rope_scaling"
    given = reader.values.get(name)
    if given is not None and not isinstance(given, dict):
        raise reader.wrong(name, "must be an object or null")
    given = dict(given or {})
    theta = given.pop("rope_theta", None)
    if theta is None:
        theta = reader.number("rope_theta", 10000.0)
    elif not _is_number(theta) or theta <= 0:
        raise reader.wrong(name, "must have a positive rope_theta")
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind not in ROPE_TYPES:
        raise reader.wrong(name, f"must have a rope_type of {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return float(theta), None
    needed = {"linear": ("factor",)}.get(
        kind,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    )
    for key in needed:
        if not _is_number(given.get(key)) or given[key] <= 0:
            raise reader.wrong(name, f"of type {kind!r} must have a positive {key}")
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise reader.wrong(name, "must have a high_freq_factor above low_freq_factor")
    return float(theta), {"rope_type": kind, **given}


def _context_length(reader: _Reader, fields: dict[str, Any], wanted: int | None) -> int:
    limit = fields["max_position_embeddings"]
    scaling = fields["rope_scaling"]
    # Linear scaling stretches the positions of config.json, unless it says that they are stretched.
    if scaling and scaling["rope_type"] == "linear":
        if "original_max_position_embeddings" not in scaling:
            limit = int(limit * scaling["factor"])
    if wanted is None:
        return limit
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= limit:
        raise ValueError(
            f"context_length must be an integer from 1 to {limit}, which is what {reader.path} "
            f"allows, got {wanted!r}"
        )
    return wanted


def _token_ids(reader: _Reader, vocab_size: int) -> set[int]:
    value = reader.values.get("eos_token_id")
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise reader.wrong("eos_token_id", f"must be token ids below vocab_size ({vocab_size})")
    return set(ids)
