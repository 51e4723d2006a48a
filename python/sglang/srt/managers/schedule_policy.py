"""Which waiting requests start, and how much of their prompts."""

from __future__ import annotations

from enum import Enum, auto

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.utils.common import ceil_align

# Output of a request that is counted on at most: most requests end before their limit.
CLIP_MAX_NEW_TOKENS = 4096


class AddReqResult(Enum):
    """What became of an attempt to add a request."""

    CONTINUE = auto()
    """It was added, and there may be room for another."""
    NO_TOKEN = auto()
    """There is not enough KV."""
    OTHER = auto()
    """This forward has as many tokens as it may have."""


class PrefillAdder:
    """Fills one prefill forward with waiting requests.

    Parameters
    ----------
    allocator : BaseTokenToKVPoolAllocator
    running_batch : ScheduleBatch
        Whose requests will need more KV.
    new_token_ratio : float
        Part of a request's remaining output to keep KV for.
    rem_input_tokens : int
        Most prompt tokens in this forward.
    rem_chunk_tokens : int or None
        Most tokens of this forward, beyond which a prompt is split; None does not split.
    mixed_with_decode_tokens : int
        Tokens of running requests that this forward carries too.
    spec_alloc_len : int
        KV slots that one speculative step of a request writes.
    """

    def __init__(
        self,
        allocator: BaseTokenToKVPoolAllocator,
        running_batch: ScheduleBatch,
        new_token_ratio: float,
        rem_input_tokens: int,
        rem_chunk_tokens: int | None,
        mixed_with_decode_tokens: int = 0,
        spec_alloc_len: int = 0,
    ) -> None:
        self.page_size = allocator.page_size
        self.new_token_ratio = new_token_ratio
        self.spec_reserve = 2 * spec_alloc_len
        self.rem_input_tokens = rem_input_tokens - mixed_with_decode_tokens
        self.rem_chunk_tokens = (
            None if rem_chunk_tokens is None else rem_chunk_tokens - mixed_with_decode_tokens
        )
        self.nothing_runs = running_batch.is_empty()
        # KV that a request may take now, and that which is left after what is likely needed later.
        self.cur_rem_tokens = allocator.available_size() - mixed_with_decode_tokens
        self.rem_total_tokens = self.cur_rem_tokens - sum(
            self._reserve(r) for r in running_batch.reqs
        )
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None

    def _reserve(self, req: Req) -> int:
        remaining = req.sampling_params.max_new_tokens - len(req.output_ids)
        return int(min(remaining, CLIP_MAX_NEW_TOKENS) * self.new_token_ratio) + self.spec_reserve

    def _chunk_len(self, req: Req, room: int) -> int:
        """Tokens of `req` that fit in `room`: all, or whole pages."""
        if req.extend_input_len <= room:
            return req.extend_input_len
        # A chunk ends at a page's end, counted from the start of the sequence.
        prefix = len(req.prefix_indices)
        return max((prefix + room) // self.page_size * self.page_size - prefix, 0)

    def _add(self, req: Req, length: int) -> None:
        truncated = length < req.extend_input_len
        req.set_extend_input_len(length)
        self.can_run_list.append(req)
        if truncated:
            self.new_chunked_req = req
        # A page more than the tokens: the last page of the prompt may be begun already.
        taken = ceil_align(length, self.page_size) + self.page_size * (self.page_size > 1)
        self.cur_rem_tokens -= taken
        self.rem_total_tokens -= taken + (0 if truncated else self._reserve(req))
        self.rem_input_tokens -= length
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= length

    def add_chunked_req(self, req: Req) -> bool:
        """Go on with a prompt that was begun in an earlier forward.

        Returns
        -------
        bool
            False if there is no KV for any of it now.
        """
        req.init_next_round_input()
        room = min(self.rem_chunk_tokens, max(self.rem_input_tokens, self.page_size))
        length = self._chunk_len(req, min(room, self.cur_rem_tokens))
        if length <= 0:
            return False
        self._add(req, length)
        return True

    def add_one_req(self, req: Req) -> AddReqResult:
        """Start a waiting request if there is room for it."""
        if self._is_exhausted():
            return AddReqResult.OTHER
        req.init_next_round_input()
        need = ceil_align(req.extend_input_len, self.page_size) + self._reserve(req)
        # With nothing else running the pool is the request's own: waiting would not make more room.
        alone = self.nothing_runs and not self.can_run_list
        if need > self.rem_total_tokens and not alone:
            return AddReqResult.NO_TOKEN

        if self.rem_chunk_tokens is None:
            if req.extend_input_len > self.rem_input_tokens and self.can_run_list:
                return AddReqResult.OTHER
            length = req.extend_input_len
        else:
            room = min(self.rem_chunk_tokens, max(self.rem_input_tokens, self.page_size))
            length = self._chunk_len(req, room)
            if length <= 0 or (length < req.extend_input_len and self.new_chunked_req is not None):
                return AddReqResult.OTHER
        if ceil_align(length, self.page_size) > self.cur_rem_tokens:
            return AddReqResult.NO_TOKEN
        self._add(req, length)
        return AddReqResult.OTHER if self._is_exhausted() else AddReqResult.CONTINUE

    def _is_exhausted(self) -> bool:
        """Whether the forward has as many tokens as it may."""
        if not self.can_run_list:
            return False
        return self.rem_input_tokens <= 0 or (
            self.rem_chunk_tokens is not None and self.rem_chunk_tokens <= 0
        )
