"""The same greedy text as Hugging Face `generate`, in every mode.

The reference is data: scripts/make_reference.py made it, one prompt at a time. Where an engine leaves
it, the reference's margin says whether two logits were next to equal there; nothing else is excused.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from sglang.srt.entrypoints.engine import Engine

REPO_ROOT = Path(__file__).resolve().parents[3]
DRAFT = REPO_ROOT / "assets" / "eagle-smollm2-135m"
REFERENCE = json.loads((REPO_ROOT / "test" / "srt" / "data" / "hf_greedy.json").read_text())
CASES = REFERENCE["cases"]
NEW_TOKENS = 64
# Float32 sums in another order move a logit by about 1e-4.
TIE = 1e-3

MODES = {
    "normal": {"disable_overlap_schedule": True},
    "overlap": {},
    "chain": {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(DRAFT),
        "speculative_num_steps": 3,
    },
    "tree": {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(DRAFT),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 6,
    },
}
# Shorter than every prompt is long, and a multiple of both page sizes.
CHUNK = {"whole": -1, "chunked": 16}
PAGE = (1, 16)
BATCH = (1, 8)
MATRIX = list(itertools.product(MODES, PAGE, CHUNK, BATCH))
# Every pair of settings once; the rest of the matrix is marked matrix.
QUICK = {
    ("normal", 1, "whole", 8),
    ("normal", 16, "chunked", 8),
    ("overlap", 1, "chunked", 8),
    ("overlap", 16, "whole", 8),
    ("chain", 1, "chunked", 8),
    ("chain", 16, "whole", 8),
    ("tree", 1, "whole", 8),
    ("tree", 16, "chunked", 8),
}


def generate(engine: Engine, cases: list[dict], batch: int) -> list[list[int]]:
    """Greedy tokens of each case, `batch` prompts at a time."""
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0}
    outputs = []
    for start in range(0, len(cases), batch):
        prompts = [case["input_ids"] for case in cases[start : start + batch]]
        results = engine.generate(input_ids=prompts, sampling_params=params)
        outputs += [result["output_ids"] for result in results]
    return outputs


def assert_same(outputs: list[list[int]], cases: list[dict]) -> None:
    ties = 0
    for output, case in zip(outputs, cases, strict=True):
        wanted = case["output_ids"]
        if output == wanted:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(output, wanted, strict=False)) if a != b),
            min(len(output), len(wanted)),
        )
        assert at < len(wanted) and case["margins"][at] < TIE, (
            f"token {at} is {output[at : at + 1]}, not {wanted[at : at + 1]}"
        )
        ties += 1
    assert ties <= 1, f"{ties} of {len(cases)} outputs left the reference at a tie"


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "page_size", "chunk", "batch"),
    [
        pytest.param(
            *case, marks=() if case in QUICK else pytest.mark.matrix, id="-".join(map(str, case))
        )
        for case in MATRIX
    ],
)
def test_greedy_text_is_that_of_hugging_face(model_path, mode, page_size, chunk, batch):
    with Engine(
        model_path=model_path,
        page_size=page_size,
        chunked_prefill_size=CHUNK[chunk],
        **MODES[mode],
    ) as engine:
        assert_same(generate(engine, CASES, batch), CASES)


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
def test_one_at_a_time(model_path, mode):
    """Batch 1, on the prompts of a few kinds; the marked matrix has all of them."""
    cases = CASES[:2] + CASES[-1:]
    with Engine(model_path=model_path, **MODES[mode]) as engine:
        assert_same(generate(engine, cases, 1), cases)
