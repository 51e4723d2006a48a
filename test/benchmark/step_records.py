"""Step records made by hand, on clocks that make the arithmetic easy."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import StepRecord


def record(step: int, mode: str, batch_size: int, num_tokens: int, **fields: Any) -> StepRecord:
    """A step whose forward ran from ``forward_start`` to ``forward_end``."""
    return StepRecord(step, mode, batch_size, num_tokens, **fields)


# Two requests of three tokens each under overlap. Prefill until 1.0; decode steps delivered at 1.1 and
# 1.3; the forward that was under way when both ended is dropped.
PLAIN: list[tuple[float, StepRecord]] = [
    (
        1.0,
        record(1, "EXTEND", 2, 2, prepare_time=5e-3, forward_start=50.0, forward_end=50.9),
    ),
    (
        1.1,
        record(
            2,
            "DECODE",
            2,
            2,
            prepare_time=1e-4,
            process_time=1e-4,
            wait_time=0.09,
            forward_start=50.91,
            forward_end=50.99,
        ),
    ),
    (
        1.3,
        record(
            3,
            "DECODE",
            2,
            2,
            prepare_time=2e-4,
            process_time=2e-4,
            wait_time=0.19,
            forward_start=51.03,
            forward_end=51.19,
        ),
    ),
    (1.4, record(4, "DECODE", 2, 0, forward_start=51.2, forward_end=51.29)),
]

# One request that gets 1 + 3 + 2 tokens from a prefill and two verifications, with phases.
SPECULATIVE: list[tuple[float, StepRecord]] = [
    (2.0, record(7, "EXTEND", 1, 1, forward_start=1.0, forward_end=1.5)),
    (
        2.3,
        record(
            8,
            "DECODE",
            1,
            3,
            forward_start=1.5,
            forward_end=1.8,
            phases={"draft": 0.10, "verify": 0.15, "extend": 0.05},
        ),
    ),
    (
        2.7,
        record(
            9,
            "DECODE",
            1,
            2,
            forward_start=1.8,
            forward_end=2.2,
            phases={"draft": 0.20, "verify": 0.15, "extend": 0.05},
        ),
    ),
]


def result(prompt_tokens: int, output_ids: list[int], **meta: Any) -> dict[str, Any]:
    """What the engine returns for a request that got all its tokens."""
    return {
        "output_ids": output_ids,
        "meta_info": {
            "finish_reason": {"type": "length", "length": len(output_ids)},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(output_ids),
            "retraction_count": 0,
            **meta,
        },
    }


PLAIN_RESULTS = [result(4, [1, 2, 3]), result(4, [4, 5, 6])]
SPECULATIVE_RESULTS = [result(4, [1, 2, 3, 4, 5, 6], spec_verify_ct=2, spec_accept_length=2.5)]
