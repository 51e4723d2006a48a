"""Fixtures of the engine's tests: the real model, tiny models, two threads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
MODEL_DIR = REPO_ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
THREADS = 2

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    """Give torch the two threads that the figures of this project are stated for."""
    import torch

    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _own_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a platform that a test registers serve that test alone."""
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "_platforms", dict(common._platforms))


@pytest.fixture(scope="session")
def model_path() -> str:
    """Directory of SmolLM2-135M-Instruct.

    ``SGLANG_TEST_MODEL_PATH`` names another place, for example for a checkout without ``.cache``.
    """
    directory = Path(os.environ.get("SGLANG_TEST_MODEL_PATH") or MODEL_DIR)
    if not (directory / "model.safetensors").is_file():
        pytest.fail(f"the model is not at {directory}: run 'make model'", pytrace=False)
    return str(directory)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Factory of directories with the config.json of a tiny Llama, for ``load_format="dummy"``.

    Returns
    -------
    callable
        ``tiny_model(**overrides)`` returns the path of a directory of its own. Every key of
        `TINY_LLAMA` can be overridden and any other key of a config.json added; ``head_dim`` is
        ``hidden_size // num_attention_heads`` unless given.

    Examples
    --------
    >>> engine = Engine(model_path=tiny_model(vocab_size=64), load_format="dummy")  # doctest: +SKIP
    """

    def make(**overrides: Any) -> str:
        config = TINY_LLAMA | overrides
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        directory = tmp_path_factory.mktemp("tiny-llama")
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return str(directory)

    return make
