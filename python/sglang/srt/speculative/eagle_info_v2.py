"""What the scheduler does for a speculative decode step before its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import alloc_for_spec_decode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.eagle_info import EagleDraftInput


class EagleDraftInputV2Mixin:
    """The scheduler's side of `EagleDraftInput`."""

    def prepare_for_decode(self: EagleDraftInput, batch: ScheduleBatch) -> None:
        """Count penalties and reserve KV for the next draft and verification.

        Under overlap this runs while the step before is in flight, so the host knows the number of
        committed tokens as it was a verification earlier. Twice what one step can write covers it.

        Parameters
        ----------
        batch : ScheduleBatch
            Its requests' ``kv_allocated_len`` and ``kv_committed_len`` are brought up to date.
        """
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.cumulate_penalty_output_tokens()

        cur_kv_lens: list[int] = []
        nxt_kv_lens: list[int] = []
        for req in batch.reqs:
            cur = req.kv_allocated_len
            nxt = max(cur, req.kv_committed_len + 2 * batch.spec_alloc_len)
            cur_kv_lens.append(cur)
            nxt_kv_lens.append(nxt)
            req.kv_allocated_len = nxt
            # Every verification commits at least one token; its result adds the others.
            req.kv_committed_len += 1
        alloc_for_spec_decode(batch, cur_kv_lens, nxt_kv_lens)
