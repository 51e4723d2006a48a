"""The models that workloads run: the real one, and tiny ones with random weights."""

from __future__ import annotations

import inspect
import json
import os
import random
from pathlib import Path
from typing import Any

MODEL_VARIABLE = "LAB_MODEL"
DRAFT_VARIABLE = "LAB_DRAFT"

REPO_ROOT = Path(__file__).resolve().parents[2]
REAL_MODEL = REPO_ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
REAL_DRAFT = REPO_ROOT / "assets" / "eagle-smollm2-135m"

# A forward of a millisecond: what the scheduler costs shows. The vocabulary is large enough for dense
# penalties to cost something.
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_DRAFT = TINY | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}

# Tasks with long answers, so that text does not run out within a round.
TASKS = (
    "Write a story about a lighthouse keeper who finds a message in a bottle.",
    "Explain step by step how bread is made, from the grain to the loaf.",
    "Describe the life of a honey bee through the four seasons.",
    "List ten ideas for a birthday party in the garden and explain each of them.",
    "Tell me about the history of the bicycle.",
    "Write a letter to a friend who is about to move to another city.",
    "Explain how a computer runs a program, for a ten-year-old child.",
    "Compare the advantages of trains and of planes for a journey of 500 kilometres.",
)


class Unsupported(RuntimeError):
    """This commit or this checkout lacks what a case needs."""


def require_engine(*names: str) -> None:
    """See that the installed commit's `sglang.Engine` has these parameters.

    Raises
    ------
    Unsupported
        If it lacks one; says which.
    """
    import sglang

    known = inspect.signature(sglang.Engine.__init__).parameters
    if missing := [name for name in names if name not in known]:
        raise Unsupported(f"this commit's Engine takes no {' and no '.join(missing)}")


def write_tiny_model(directory: Path, draft: bool = False, **overrides: Any) -> str:
    """Write the config.json of a tiny Llama, or of an EAGLE head for it, for ``load_format="dummy"``.

    Returns
    -------
    str
        The directory, which is made if it is absent.
    """
    config = (TINY_DRAFT if draft else TINY) | overrides
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return str(directory)


def real_model() -> str:
    """Directory of SmolLM2-135M-Instruct; ``LAB_MODEL`` names another one.

    Raises
    ------
    FileNotFoundError
        If it is not there.
    """
    path = Path(os.environ.get(MODEL_VARIABLE) or REAL_MODEL)
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(f"the model is not at {path}: run 'make model'")
    return str(path)


def real_draft() -> str:
    """Directory of the EAGLE head for the real model; ``LAB_DRAFT`` names another one.

    Raises
    ------
    Unsupported
        If it is not there.
    """
    path = Path(os.environ.get(DRAFT_VARIABLE) or REAL_DRAFT)
    if not (path / "model.safetensors").is_file():
        raise Unsupported(f"there is no EAGLE head at {path}")
    return str(path)


def chat_prompts(model_path: str, count: int) -> list[list[int]]:
    """Token ids of `count` tasks in the model's chat form, without a system message."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    prompts = []
    for i in range(count):
        task = TASKS[i % len(TASKS)]
        if i >= len(TASKS):
            task += f" This is version {i // len(TASKS) + 1}, so say it in other words."
        text = f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer.encode(text, add_special_tokens=False).ids)
    return prompts


def random_prompts(vocab_size: int, length: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` random ordinary tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]
