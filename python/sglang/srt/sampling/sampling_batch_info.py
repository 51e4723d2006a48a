"""Sampling parameters of a batch, as tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from sglang.srt.utils.common import to_device_async

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

PENALIZERS = (
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
)
"""In the order in which they act, the same in every process."""

# What a row needs of the sampler, as bits of `SamplingBatchInfo.row_needs`.
_SAMPLED, _TOP_P, _TOP_K, _MIN_P, _BIAS = (1 << i for i in range(5))
_FILTERED = _TOP_P | _TOP_K | _MIN_P


@dataclass(eq=False)
class SamplingBatchInfo:
    """Sampling parameters of ``B`` requests, row b for request b.

    Two laws hold for every field: merging what was built of two lists of requests is building it of
    the lists joined, and filtering is building it of the requests that stay. `merge_batch` and
    `filter_batch` make new tensors, so that what a forward holds is never written.

    Attributes
    ----------
    temperatures : Tensor, shape (B, 1), float32
        1 for greedy rows.
    top_ps, min_ps : Tensor, shape (B,), float32
    top_ks : Tensor, shape (B,), int32
        1 means greedy, `TOP_K_ALL` no limit.
    sampling_seed : Tensor, shape (B,), int64
        Each request has one, given or drawn when it was admitted.
    is_all_greedy : bool
        Whether no row is sampled.
    need_top_p_sampling, need_top_k_sampling, need_min_p_sampling : bool
        Whether a sampled row needs that filter. Greedy rows need none.
    need_filter, has_greedy : bool
        Whether any row needs any filter, and whether any row is greedy.
    vocab_size : int
    row_needs : list of int
        What each row needs, on the host, from which the flags above follow. Never changed in place.
    filtered_rows : Tensor, shape (number of rows that need a filter,), int64, or None
        Which rows those are, where they are some but not all.
    penalizer_orchestrator : BatchedPenalizerOrchestrator, SparsePenalizerOrchestrator or None
        None in what a forward gets under overlap.
    acc_additive_penalties, acc_scaling_penalties : Tensor, shape (B, vocab_size), float32, or None
        The penalties of one forward.
    logit_bias : Tensor, shape (B, vocab_size), float32, or None
    device : torch.device
    """

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    sampling_seed: torch.Tensor
    vocab_size: int
    row_needs: list[int]
    device: torch.device
    penalizer_orchestrator: (
        penaltylib.BatchedPenalizerOrchestrator | penaltylib.SparsePenalizerOrchestrator | None
    ) = None
    acc_additive_penalties: torch.Tensor | None = None
    acc_scaling_penalties: torch.Tensor | None = None
    logit_bias: torch.Tensor | None = None

    is_all_greedy: bool = field(init=False)
    need_top_p_sampling: bool = field(init=False)
    need_top_k_sampling: bool = field(init=False)
    need_min_p_sampling: bool = field(init=False)
    need_filter: bool = field(init=False)
    has_greedy: bool = field(init=False)
    filtered_rows: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._set_row_needs(self.row_needs)

    @classmethod
    def from_schedule_batch(cls, batch: ScheduleBatch, vocab_size: int) -> SamplingBatchInfo:
        """Read the sampling parameters of ``batch.reqs``.

        Three copies to the device without penalties and bias, one more where some rows but not all need
        filters; all of them asynchronous. Dense penalties start from nothing: as in upstream, a request
        that comes back from a retraction has lost its counts. With sparse ones there are neither
        penalties nor bias here, only the way of the tokens to them.
        """
        is_sparse = batch.penalty_planner is not None
        params = [req.sampling_params for req in batch.reqs]
        needs = [_needs_of(p) for p in params]
        floats = to_device_async(
            [
                [
                    p.temperature if n & _SAMPLED else 1.0
                    for p, n in zip(params, needs, strict=True)
                ],
                [p.top_p for p in params],
                [p.min_p for p in params],
            ],
            torch.float32,
            batch.device,
        )
        return cls(
            temperatures=floats[0].unsqueeze(1),
            top_ps=floats[1],
            min_ps=floats[2],
            top_ks=to_device_async([p.top_k for p in params], torch.int32, batch.device),
            sampling_seed=to_device_async(
                [req.sampling_seed for req in batch.reqs], torch.int64, batch.device
            ),
            vocab_size=vocab_size,
            row_needs=needs,
            device=batch.device,
            penalizer_orchestrator=(
                penaltylib.SparsePenalizerOrchestrator(batch)
                if is_sparse
                else penaltylib.BatchedPenalizerOrchestrator(vocab_size, batch, PENALIZERS)
            ),
            logit_bias=(
                None if is_sparse else _build_logit_bias(batch.reqs, vocab_size, batch.device)
            ),
        )

    def __len__(self) -> int:
        return len(self.row_needs)

    def update_penalties(self) -> None:
        """Set the penalties of the next forward from what has been counted so far."""
        self.acc_additive_penalties, self.acc_scaling_penalties = self._accumulate_penalties()

    def apply_logits_bias(self, logits: torch.Tensor, repeat: int | None = None) -> None:
        """Penalize and bias `logits` in place: additive penalties, scaling penalties, bias.

        Parameters
        ----------
        logits : Tensor, shape (B * repeat, vocab_size), float32, contiguous
        repeat : int, optional
            Rows of each request, which lie together; 1 without.
        """
        if logits.dtype != torch.float32:
            raise TypeError(f"logits must be float32, got {logits.dtype}")
        rows = logits.view(len(self), repeat or 1, logits.shape[-1])
        if self.acc_additive_penalties is not None:
            rows.add_(self.acc_additive_penalties.unsqueeze(1))
        if self.acc_scaling_penalties is not None:
            penaltylib.apply_scaling_penalties(rows, self.acc_scaling_penalties.unsqueeze(1))
        if self.penalizer_orchestrator is not None and not self._is_accumulated():
            self.penalizer_orchestrator.apply(logits, repeat)
        if self.logit_bias is not None:
            rows.add_(self.logit_bias.unsqueeze(1))

    def filter_batch(self, keep_indices: list[int], keep_indices_device: torch.Tensor) -> None:
        """Keep the requests at `keep_indices`, given as a list and as an int64 tensor."""
        if self.penalizer_orchestrator is not None:
            self.penalizer_orchestrator.filter(keep_indices, keep_indices_device)
        for name in _ROW_TENSORS:
            setattr(self, name, getattr(self, name)[keep_indices_device])
        self._set_row_needs([self.row_needs[i] for i in keep_indices])
        if self.logit_bias is not None:
            is_biased = any(needs & _BIAS for needs in self.row_needs)
            self.logit_bias = self.logit_bias[keep_indices_device] if is_biased else None
        self.acc_additive_penalties = self.acc_scaling_penalties = None

    def merge_batch(self, other: SamplingBatchInfo) -> None:
        """Append the requests of `other`, which is not changed."""
        if self.penalizer_orchestrator is not None:
            self.penalizer_orchestrator.merge(other.penalizer_orchestrator)
        if self.logit_bias is not None or other.logit_bias is not None:
            self.logit_bias = torch.cat([self._bias_rows(), other._bias_rows()])
        for name in _ROW_TENSORS:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        self._set_row_needs(self.row_needs + other.row_needs)
        self.acc_additive_penalties = self.acc_scaling_penalties = None

    def copy_for_forward(self) -> SamplingBatchInfo:
        """What a forward may hold while this object moves on.

        The copy shares tensors with this object, none of which is written in place, and has the
        penalties as they are now instead of the penalizers.
        """
        forward = copy.copy(self)
        forward.update_penalties()
        forward.penalizer_orchestrator = None
        return forward

    def repeat(self, n: int) -> SamplingBatchInfo:
        """A copy with n rows for each request, for logits that penalties and bias are in already.

        Row b becomes rows ``b * n`` to ``b * n + n - 1``.
        """
        rows = len(self) * n
        tensors = {
            name: getattr(self, name).repeat_interleave(n, dim=0, output_size=rows)
            for name in _ROW_TENSORS
        }
        return SamplingBatchInfo(
            **tensors,
            vocab_size=self.vocab_size,
            row_needs=[needs for needs in self.row_needs for _ in range(n)],
            device=self.device,
        )

    def _accumulate_penalties(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        orchestrator = self.penalizer_orchestrator
        if orchestrator is None or not orchestrator.is_required:
            return None, None
        additive = None
        if orchestrator.needs_additive:
            additive = self._zero_rows()
            orchestrator.accumulate_additive_penalties(additive)
        return additive, orchestrator.accumulate_scaling_penalties()

    def _is_accumulated(self) -> bool:
        return self.acc_additive_penalties is not None or self.acc_scaling_penalties is not None

    def _bias_rows(self) -> torch.Tensor:
        return self._zero_rows() if self.logit_bias is None else self.logit_bias

    def _zero_rows(self) -> torch.Tensor:
        return torch.zeros((len(self), self.vocab_size), dtype=torch.float32, device=self.device)

    def _set_row_needs(self, row_needs: list[int]) -> None:
        self.row_needs = row_needs
        kinds = set(row_needs)
        needed = 0
        for needs in kinds:
            needed |= needs
        self.has_greedy = not all(needs & _SAMPLED for needs in kinds)
        self.is_all_greedy = not needed & _SAMPLED
        self.need_top_p_sampling = bool(needed & _TOP_P)
        self.need_top_k_sampling = bool(needed & _TOP_K)
        self.need_min_p_sampling = bool(needed & _MIN_P)
        self.need_filter = bool(needed & _FILTERED)
        self.filtered_rows = None
        if self.need_filter and not all(needs & _FILTERED for needs in kinds):
            rows = [i for i, needs in enumerate(row_needs) if needs & _FILTERED]
            self.filtered_rows = to_device_async(rows, torch.int64, self.device)


_ROW_TENSORS = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def _needs_of(params: SamplingParams) -> int:
    needs = _BIAS if params.logit_bias is not None else 0
    if params.top_k <= 1:
        return needs
    needs |= _SAMPLED
    if params.top_p != 1.0:
        needs |= _TOP_P
    if params.top_k != TOP_K_ALL:
        needs |= _TOP_K
    if params.min_p > 0:
        needs |= _MIN_P
    return needs


def _build_logit_bias(
    reqs: list[Req], vocab_size: int, device: torch.device
) -> torch.Tensor | None:
    entries = [
        (row * vocab_size + token_id, value)
        for row, req in enumerate(reqs)
        if req.sampling_params.logit_bias is not None
        for token_id, value in req.sampling_params.logit_bias.items()
    ]
    if not entries:
        return None
    places, values = zip(*entries, strict=True)
    bias = torch.zeros((len(reqs), vocab_size), dtype=torch.float32, device=device)
    bias.view(-1).scatter_(
        0,
        to_device_async(places, torch.int64, device),
        to_device_async(values, torch.float32, device),
    )
    return bias


# What becomes of each field of a `SamplingBatchInfo`, in the words of ``SCHEDULE_BATCH_RULES``
# (managers/schedule_batch.py). "derived": made anew from other fields by each merge and filter.
SAMPLING_BATCH_INFO_RULES: dict[str, str | tuple[str, str]] = {
    "temperatures": "concatenate",
    "top_ps": "concatenate",
    "top_ks": "concatenate",
    "min_ps": "concatenate",
    "sampling_seed": "concatenate",
    "vocab_size": ("shared", "of the model"),
    "row_needs": "concatenate",
    "device": ("shared", "one device an engine"),
    "penalizer_orchestrator": ("concatenate", "rows of who needs no penalty are neutral or absent"),
    "acc_additive_penalties": ("reset", "penalties of one forward, of a batch that was another"),
    "acc_scaling_penalties": ("reset", "penalties of one forward, of a batch that was another"),
    "logit_bias": ("concatenate", "rows of who has no bias are zero; None if nobody has"),
    "is_all_greedy": "all",
    "need_top_p_sampling": "any",
    "need_top_k_sampling": "any",
    "need_min_p_sampling": "any",
    "need_filter": "any",
    "has_greedy": "any",
    "filtered_rows": ("derived", "numbers of rows, from row_needs; None if all or none are meant"),
}
