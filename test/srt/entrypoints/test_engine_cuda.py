"""The engine on a GPU says what it says on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.entrypoints.engine import Engine

pytestmark = pytest.mark.gpu

PENALTIES = {
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.2,
    "min_new_tokens": 3,
    "logit_bias": {"5": 1.0},
}
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "chain": {"speculative_num_steps": 3},
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 6,
    },
}


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("normal", [False, True], ids=["overlap", "normal"])
def test_tokens_are_those_of_the_cpu(
    tiny_model: Callable[..., str], tmp_path: Path, normal: bool, page_size: int, speculation: str
) -> None:
    settings = make_settings(tiny_model(), tmp_path, normal, page_size, speculation)
    found = {}
    for device in ("cpu", "cuda"):
        with Engine(device=device, **settings) as engine:
            results = serve(engine)
        found[device] = [result["output_ids"] for result in results]
    assert found["cuda"] == found["cpu"]


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("normal", [False, True], ids=["overlap", "normal"])
def test_serving_waits_nowhere_but_for_results(
    tiny_model: Callable[..., str], tmp_path: Path, normal: bool, speculation: str
) -> None:
    """Whatever waits by the way, on any thread, raises. The wait for an event is none of these."""
    settings = make_settings(tiny_model(), tmp_path, normal, 16, speculation)
    with Engine(device="cuda", **settings) as engine:
        wanted = serve(engine)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = serve(engine)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [r["output_ids"] for r in results] == [r["output_ids"] for r in wanted]


def make_settings(
    model_path: str, tmp_path: Path, normal: bool, page_size: int, speculation: str
) -> dict[str, Any]:
    settings = {
        "model_path": model_path,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "page_size": page_size,
        "chunked_prefill_size": 16,
        "disable_overlap_schedule": normal,
    }
    if speculation != "none":
        config = json.loads((Path(model_path) / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(tmp_path),
            **SPECULATION[speculation],
        }
    return settings


def serve(engine: Engine) -> list[dict[str, Any]]:
    return engine.generate(
        input_ids=[[3 + (i * j) % 90 for j in range(8 + 9 * i)] for i in range(4)],
        sampling_params=[
            {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
            {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True, **PENALTIES},
            {"max_new_tokens": 24, "temperature": 0.8, "sampling_seed": 5},
            {"max_new_tokens": 24, "top_p": 0.9, "top_k": 20, "sampling_seed": 6, **PENALTIES},
        ],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
