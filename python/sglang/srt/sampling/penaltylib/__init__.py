"""Penalties on tokens that a request has generated."""

from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import (
    BatchedRepetitionPenalizer,
    apply_scaling_penalties,
)
from sglang.srt.sampling.penaltylib.sparse_orchestrator import SparsePenalizerOrchestrator

__all__ = [
    "BatchedFrequencyPenalizer",
    "BatchedMinNewTokensPenalizer",
    "BatchedPenalizerOrchestrator",
    "BatchedPresencePenalizer",
    "BatchedRepetitionPenalizer",
    "SparsePenalizerOrchestrator",
    "apply_scaling_penalties",
]
