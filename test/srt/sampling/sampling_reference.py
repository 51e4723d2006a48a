"""Requests without an engine, and penalties written down as plainly as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

CPU = torch.device("cpu")


@dataclass
class FakeReq:
    """What sampling reads of a request, and the tokens that were counted for it."""

    sampling_params: SamplingParams
    sampling_seed: int = 0
    eos_token_ids: set[int] = field(default_factory=set)
    counted: list[int] = field(default_factory=list)


def make_req(seed: int = 0, eos: Sequence[int] = (), **params: object) -> FakeReq:
    return FakeReq(SamplingParams(**params), seed, set(eos))


def build(
    reqs: Sequence[FakeReq], vocab_size: int, device: torch.device = CPU
) -> SamplingBatchInfo:
    batch = SimpleNamespace(reqs=list(reqs), device=device, penalty_planner=None)
    return SamplingBatchInfo.from_schedule_batch(batch, vocab_size)


def penalize(logits: Sequence[float], req: FakeReq) -> list[float]:
    """One request's penalties, in Python's float64, one token after the other."""
    params = req.sampling_params
    out = []
    for token, x in enumerate(logits):
        count = req.counted.count(token)
        x -= params.frequency_penalty * count
        if count:
            x -= params.presence_penalty
            if params.repetition_penalty > 0:
                x = x * params.repetition_penalty if x < 0 else x / params.repetition_penalty
            elif x != -math.inf:
                x = 0.0 if x <= 0 else math.inf
        x += (params.logit_bias or {}).get(token, 0.0)
        if token in params.stop_token_ids | req.eos_token_ids:
            if len(req.counted) < params.min_new_tokens:
                x = -math.inf
        out.append(x)
    return out
