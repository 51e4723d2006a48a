"""What a batch with sparse penalties has where one with dense penalties has its penalizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class SparsePenalizerOrchestrator:
    """Takes the latest output tokens from the host to the forward that is being prepared.

    Counts and lists are not here but in `PenaltyState`. Where the host knows every token before it
    prepares the next step, `ScheduleBatch.cumulate_penalty_output_tokens` copies them to the device, and
    they are committed when the forward begins. Under overlap and with speculation it does not know them:
    there the sampler's or verifier's own output is committed, and nothing is required here.

    The device could commit its own output in the normal loop as well. That loop is upstream's reference:
    what the requests hold on the host is what counts in it, here as there, and #28500's copy carries it.

    Parameters
    ----------
    batch : ScheduleBatch
        Its ``reqs``, ``penalty_planner``, ``enable_overlap`` and ``spec_algorithm`` are read.

    Attributes
    ----------
    is_fed_by_host : bool
        Whether tokens that become output come from the host, a step after they were sampled.
    """

    needs_additive = False

    def __init__(self, batch: ScheduleBatch) -> None:
        self._planner = batch.penalty_planner
        self.is_fed_by_host = not batch.enable_overlap and batch.spec_algorithm.is_none()
        self._reqs: list[Req] = list(batch.reqs)
        self._output_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def is_required(self) -> bool:
        """Whether the next decode needs the latest token of any request from the host."""
        if not self.is_fed_by_host or len(self._planner) == 0:
            return False
        return any(req.req_pool_idx in self._planner for req in self._reqs)

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        """Keep the latest token of each request, shape (B,), int64, for the forward."""
        self._output_ids = output_ids

    def take_output_ids(self) -> torch.Tensor | None:
        """Give out what was kept, shape (B,), once."""
        output_ids, self._output_ids = self._output_ids, None
        return output_ids

    def apply(self, logits: torch.Tensor, repeat: int | None = None) -> None:
        """Do nothing: `PenaltyState.apply` penalizes."""

    def accumulate_scaling_penalties(self) -> None:
        """None: a forward takes no penalties along."""

    def filter(self, keep_indices: list[int], keep_indices_device: torch.Tensor) -> None:
        """Keep the requests at `keep_indices`, with their tokens."""
        self._reqs = [self._reqs[i] for i in keep_indices]
        if self._output_ids is not None:
            self._output_ids = self._output_ids[keep_indices_device]

    def merge(self, their: SparsePenalizerOrchestrator) -> None:
        """Append the requests of `their`, with their tokens. A prefill has none: 0 stands there."""
        ours, theirs = self._output_ids, their._output_ids
        if ours is not None or theirs is not None:
            given = theirs if ours is None else ours
            ours = given.new_zeros(len(self)) if ours is None else ours
            theirs = given.new_zeros(len(their)) if theirs is None else theirs
            self._output_ids = torch.cat([ours, theirs])
        self._reqs = self._reqs + their._reqs
