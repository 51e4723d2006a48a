"""From a forward's result to the requests' output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import BatchTokenIDOutput
from sglang.srt.managers.schedule_batch import Req, ReqLogprobs, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache

if TYPE_CHECKING:
    import torch

    from sglang.srt.layers.logits_processor import LogitsProcessorOutput, LogprobRows
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.generation_result import GenerationBatchResult


class SchedulerOutputProcessorMixin:
    """The part of the scheduler that handles results."""

    def process_batch_result_prefill(
        self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> int:
        """Act on a prefill's result, which may carry decode results too.

        Returns
        -------
        int
            Output tokens that requests kept.
        """
        output = result.logits_output
        next_token_ids = result.next_token_ids.tolist()
        hidden_states = _split_hidden_states(output, batch.extend_lens)
        num_tokens = 0
        self.token_to_kv_pool_allocator.free_group_begin()
        for i, req in enumerate(batch.reqs):
            # Ended or retracted while this forward was in flight.
            if req.finished() or req.is_retracted:
                continue
            if batch.return_logprob and req.return_logprob:
                self._add_input_logprobs(req, output, i, batch.prefix_lens[i], batch.extend_lens[i])
            if req.return_hidden_states and hidden_states is not None:
                _add_hidden_states(req, hidden_states[i].tolist(), batch.prefix_lens[i])
            if req is batch.chunked_req:
                continue
            req.output_ids.append(next_token_ids[i])
            num_tokens += self._settle(req, 1)
            self._add_output_logprobs(req, output, i, 1)
        self.token_to_kv_pool_allocator.free_group_end()
        self.stream_output(batch.reqs, skip=batch.chunked_req)
        return num_tokens

    def process_batch_result_decode(
        self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> int:
        """Act on a decode step's result.

        Returns
        -------
        int
            Output tokens that requests kept.
        """
        output = result.logits_output
        next_token_ids = result.next_token_ids.tolist()
        accept_lens = None if result.accept_lens is None else result.accept_lens.tolist()
        num_tokens = 0
        self.token_to_kv_pool_allocator.free_group_begin()
        for i, req in enumerate(batch.reqs):
            if req.finished_reason is not None or req.is_retracted:
                continue
            if accept_lens is None:
                new = 1
                req.output_ids.append(next_token_ids[i])
            else:
                new = accept_lens[i]
                req.output_ids.extend(next_token_ids[i][:new])
                req.spec_verify_ct += 1
                # `prepare_for_decode` counted one of them.
                req.kv_committed_len += new - 1
            kept = self._settle(req, new)
            num_tokens += kept
            if accept_lens is not None:
                req.spec_accepted_tokens += kept
            if req.return_logprob:
                self._add_output_logprobs(req, output, i, new)
            if req.return_hidden_states and output.hidden_states is not None:
                rows = output.hidden_states[i].tolist()
                req.hidden_states.extend([rows] if accept_lens is None else rows[:kept])
        self.token_to_kv_pool_allocator.free_group_end()
        self.stream_output(batch.reqs)
        return num_tokens

    def _settle(self: Scheduler, req: Req, new: int) -> int:
        """See whether `new` more tokens end a request. Returns how many of them it keeps."""
        before = len(req.output_ids) - new
        req.check_finished(new)
        if req.finished():
            release_kv_cache(req, self.tree_cache)
        return max(len(req.output_ids_through_stop) - before, 0)

    # ---- logprobs

    def _add_input_logprobs(
        self, req: Req, output: LogitsProcessorOutput, i: int, prefix: int, length: int
    ) -> None:
        """Add the logprobs that this forward found of prompt tokens."""
        if req.logprob_start_len < 0 or req.input_logprob_done >= len(req.origin_input_ids):
            return
        prompt, logprobs = req.origin_input_ids, req.logprobs
        first = max(req.input_logprob_done, prefix) + 1
        # Never back: a retracted prompt comes again, and what lies before the start is not asked for.
        req.input_logprob_done = max(req.input_logprob_done, min(prefix + length, len(prompt)))
        if not logprobs.input_token:
            # Nothing stands before the first token that would score it.
            logprobs.input_token.append((None, prompt[req.logprob_start_len]))
            if req.top_logprobs_num > 0:
                logprobs.input_top.append(None)
            if req.token_ids_logprob is not None:
                logprobs.input_token_ids.append(None)
        targets = prompt[first : prefix + length + 1]
        rows = output.input_logprobs(i)
        logprobs.input_token += zip(rows.token[: len(targets)], targets, strict=True)
        _extend_candidates(logprobs.input_top, logprobs.input_token_ids, rows, len(targets))

    def _add_output_logprobs(
        self, req: Req, output: LogitsProcessorOutput, i: int, new: int
    ) -> None:
        """Add the logprobs of a request's `new` last tokens, of which a finished one keeps a part."""
        if not req.return_logprob:
            return
        first = len(req.output_ids) - new
        kept = len(req.output_ids_through_stop) - first
        rows = output.output_logprobs(i, new)
        if kept > 0:
            ids = req.output_ids[first : first + kept]
            req.logprobs.output_token += zip(rows.token[:kept], ids, strict=False)
        # A request that wants no token still wants to know what could follow.
        positions = max(kept, 1 if req.sampling_params.max_new_tokens == 0 else 0)
        _extend_candidates(req.logprobs.output_top, req.logprobs.output_token_ids, rows, positions)

    # ---- output

    def stream_output(self: Scheduler, reqs: list[Req], skip: Req | None = None) -> None:
        """Send results of requests that have ended, or that stream and have something new."""
        for req in reqs:
            if req is skip or req.num_streamed < 0:
                continue
            if req.finished_reason is not None:
                # Seen once more while a step that it was part of is in flight.
                req.num_streamed = -1
            elif req.stream and len(req.output_ids) > req.num_streamed:
                req.num_streamed = len(req.output_ids)
            else:
                continue
            self.send_output(self._output_of(req))

    @staticmethod
    def _output_of(req: Req) -> BatchTokenIDOutput:
        meta = {"retraction_count": req.retraction_count}
        if req.spec_verify_ct:
            meta["spec_verify_ct"] = req.spec_verify_ct
            meta["spec_accept_length"] = req.spec_accepted_tokens / req.spec_verify_ct
        logprobs = None
        if req.return_logprob:
            logprobs = ReqLogprobs(*(list(values) for values in vars(req.logprobs).values()))
        return BatchTokenIDOutput(
            rid=req.rid,
            output_ids=list(req.output_ids_through_stop),
            finished_reason=req.finished_reason,
            logprobs=logprobs,
            hidden_states=list(req.hidden_states) if req.return_hidden_states else None,
            meta=meta,
        )


def _split_hidden_states(
    output: LogitsProcessorOutput, lens: list[int]
) -> tuple[torch.Tensor, ...] | None:
    """Hidden states of each request's new tokens, shape (new tokens, hidden_size)."""
    return None if output.hidden_states is None else output.hidden_states.split(lens)


def _add_hidden_states(req: Req, rows: list[list[float]], first: int) -> None:
    """Add those of the tokens from position `first` on: the prompt's in one list, others one by one.

    What is known is passed over: a retracted request prefills all of its tokens again.
    """
    if not req.hidden_states:
        req.hidden_states.append([])
    prompt = req.hidden_states[0]
    for position, row in enumerate(rows, first):
        if position == len(prompt) + len(req.hidden_states) - 1:
            in_prompt = position < len(req.origin_input_ids)
            (prompt if in_prompt else req.hidden_states).append(row)


def _extend_candidates(top: list, token_ids: list, rows: LogprobRows, positions: int) -> None:
    """Append the candidates of the first `positions` rows, as (logprob, token id) pairs."""
    if rows.top_val is not None:
        for values, ids in zip(rows.top_val[:positions], rows.top_idx[:positions], strict=True):
            top.append(list(zip(values, ids, strict=True)))
    if rows.token_ids_val is not None:
        for values, ids in zip(
            rows.token_ids_val[:positions], rows.token_ids_idx[:positions], strict=True
        ):
            token_ids.append(list(zip(values, ids, strict=True)))
