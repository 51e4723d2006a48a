"""Requests, why they end, and the batch that carries them from step to step.

A `ScheduleBatch` is the host's view of a batch. The scheduler merges, filters and prepares it; what a
forward needs of it is copied into a `ForwardBatch`, whose tensors no one writes to afterwards. So
nothing here changes a tensor in place that a forward may read: the rows of `ReqToTokenPool` and the
counts of penalizers are written in place, and forwards get copies of them.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import alloc_for_decode, alloc_for_extend, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.sampling.penaltylib.sparse_penalties import (
    PenaltyPlanner,
    PenaltyRequest,
    PenaltyStep,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpecInput, SpeculativeAlgorithm
from sglang.srt.utils.common import is_pin_memory_available, to_device_async
from sglang.srt.utils.tokenizer import Tokenizer


class BaseFinishReason:
    """Why a request ended."""

    def to_json(self) -> dict[str, Any]:
        """The reason as ``meta_info["finish_reason"]`` shows it."""
        raise NotImplementedError


@dataclass
class FINISH_MATCHED_TOKEN(BaseFinishReason):
    """A stop token was produced."""

    matched: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "stop", "matched": self.matched}


@dataclass
class FINISH_MATCHED_STR(BaseFinishReason):
    """The text contains a stop string."""

    matched: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "stop", "matched": self.matched}


@dataclass
class FINISH_LENGTH(BaseFinishReason):
    """As many tokens as were asked for."""

    length: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "length", "length": self.length}


@dataclass
class FINISH_ABORT(BaseFinishReason):
    """The request was refused or given up.

    Upstream's ``status_code`` and ``err_type`` are for its HTTP server; here they are None.
    """

    message: str = "Aborted"

    def to_json(self) -> dict[str, Any]:
        return {"type": "abort", "message": self.message, "status_code": None, "err_type": None}


@dataclass
class ReqLogprobs:
    """Logprobs that a request has collected.

    Entries of ``*_token`` lists are ``(logprob, token id)``. Entries of the other lists are lists of
    such pairs, one list a position. The first input logprob is None: no token stands before it.
    """

    input_token: list = dataclasses.field(default_factory=list)
    input_top: list = dataclasses.field(default_factory=list)
    input_token_ids: list = dataclasses.field(default_factory=list)
    output_token: list = dataclasses.field(default_factory=list)
    output_top: list = dataclasses.field(default_factory=list)
    output_token_ids: list = dataclasses.field(default_factory=list)


class Req:
    """One request from its arrival to its end.

    Parameters
    ----------
    rid : str
        Name of the request, unique among those alive.
    origin_input_ids : list of int
        The prompt.
    sampling_params : SamplingParams
        Verified and normalized.
    sampling_seed : int
        Seed of this request's own random numbers.
    eos_token_ids : set of int
        Tokens that end any text of this model.
    vocab_size : int
    tokenizer : Tokenizer, optional
        Needed for stop strings.
    stream : bool
        Whether results are wanted as they come.
    return_logprob : bool
    logprob_start_len : int
        Position of the prompt from which on input logprobs are wanted; -1 for none.
    top_logprobs_num : int
    token_ids_logprob : list of int, optional
    return_hidden_states : bool
    is_prefill_only : bool
        Whether the request is done with its prefill: no token is wanted.
    """

    def __init__(
        self,
        rid: str,
        origin_input_ids: list[int],
        sampling_params: SamplingParams,
        *,
        sampling_seed: int = 0,
        eos_token_ids: set[int] | None = None,
        vocab_size: int = 0,
        tokenizer: Tokenizer | None = None,
        stream: bool = False,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: list[int] | None = None,
        return_hidden_states: bool = False,
        is_prefill_only: bool = False,
    ) -> None:
        self.rid = rid
        self.origin_input_ids = origin_input_ids
        self.output_ids: list[int] = []
        self.sampling_params = sampling_params
        self.sampling_seed = sampling_seed
        self.eos_token_ids = eos_token_ids or set()
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.stream = stream
        self.is_prefill_only = is_prefill_only

        self.return_logprob = return_logprob
        self.logprob_start_len = logprob_start_len
        self.top_logprobs_num = top_logprobs_num
        self.token_ids_logprob = token_ids_logprob
        self.logprobs = ReqLogprobs()
        # Positions of the prompt below this one have their input logprobs already.
        self.input_logprob_done = max(logprob_start_len, 0)
        self.return_hidden_states = return_hidden_states
        self.hidden_states: list = []

        # The end: a reason, and how many output tokens belong to the result (None: all of them).
        # `to_finish` asks for an end that takes effect when the request's next result is handled.
        self.finished_reason: BaseFinishReason | None = None
        self.finished_len: int | None = None
        self.to_finish: BaseFinishReason | None = None

        # What a prefill runs: tokens up to here, of which the first ones are cached.
        self.fill_ids: list[int] = []
        self.prefix_indices: torch.Tensor | list = []
        self.extend_input_len = 0
        self.extend_logprob_start_len = 0

        # KV, see the chart in mem_cache/memory_pool.py.
        self.req_pool_idx: int | None = None
        self.kv_committed_len = 0
        self.kv_allocated_len = 0

        self.is_retracted = False
        self.retraction_count = 0
        self.spec_verify_ct = 0
        self.spec_accepted_tokens = 0
        self.num_streamed = 0

    @property
    def seqlen(self) -> int:
        """Tokens of prompt and output."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def output_ids_through_stop(self) -> list[int]:
        """Output tokens up to the end, a stop token included."""
        return (
            self.output_ids if self.finished_len is None else self.output_ids[: self.finished_len]
        )

    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.finished_reason is not None

    def pop_kv_cache(self) -> int:
        """Number of KV slots that the request's row holds; from now on it holds none."""
        held = self.kv_allocated_len
        self.kv_committed_len = self.kv_allocated_len = 0
        return held

    def init_next_round_input(self) -> None:
        """Get ready to prefill all that is known of the sequence behind what is cached."""
        self.fill_ids = self.origin_input_ids + self.output_ids
        self.set_extend_input_len(len(self.fill_ids) - len(self.prefix_indices))

    def set_extend_input_len(self, extend_input_len: int) -> None:
        """Prefill `extend_input_len` tokens behind the cached ones in the next forward."""
        self.extend_input_len = extend_input_len
        self.fill_ids = self.fill_ids[: len(self.prefix_indices) + extend_input_len]
        # Input logprobs come from hidden states of prompt tokens; the last one's belongs to the output.
        prefix, start = len(self.prefix_indices), self.input_logprob_done
        wanted = self.logprob_start_len >= 0 and start < len(self.origin_input_ids)
        self.extend_logprob_start_len = (
            min(max(start - prefix, 0), extend_input_len) if wanted else extend_input_len
        )

    def check_finished(self, new_accepted_len: int = 1) -> None:
        """Find out whether the last `new_accepted_len` output tokens end the request."""
        if self.finished():
            return
        self._find_end(new_accepted_len)
        if self.to_finish is not None:
            # What came behind an end that the request would have had is cut off all the same.
            self.finished_reason, self.to_finish = self.to_finish, None

    def _find_end(self, new_accepted_len: int) -> None:
        # The earliest end counts: several tokens may have come at once.
        first_new = len(self.output_ids) - new_accepted_len
        limit = self.sampling_params.max_new_tokens
        end = min(len(self.output_ids), limit)
        for pos in range(first_new, end):
            if self._is_stop_token(self.output_ids[pos]):
                self._finish(FINISH_MATCHED_TOKEN(self.output_ids[pos]), pos + 1)
                return
            if self.sampling_params.stop_strs and self._match_stop_str(pos + 1):
                return
        if len(self.output_ids) >= limit:
            self._finish(FINISH_LENGTH(limit), limit)

    def _finish(self, reason: BaseFinishReason, length: int) -> None:
        self.finished_reason, self.finished_len = reason, length

    def _is_stop_token(self, token_id: int) -> bool:
        params = self.sampling_params
        if params.ignore_eos:
            return False
        return token_id in self.eos_token_ids or (
            params.stop_token_ids is not None and token_id in params.stop_token_ids
        )

    def _match_stop_str(self, length: int) -> bool:
        """Look for a stop string in the text's tail that `length` output tokens end."""
        params = self.sampling_params
        start, missing = length, params.stop_str_max_len + 1
        # Every token that has text brings a byte of it at least.
        while start > 0 and missing > 0:
            start -= 1
            missing -= not self.tokenizer.is_silent(
                self.output_ids[start], params.skip_special_tokens
            )
        text = self.tokenizer.decode(
            self.output_ids[start:length], skip_special_tokens=params.skip_special_tokens
        )
        found = [stop for stop in params.stop_strs if stop in text]
        if found:
            # A token may complete several: the text ends before the first.
            self._finish(FINISH_MATCHED_STR(min(found, key=text.find)), length)
        return bool(found)

    def penalty_request(self) -> PenaltyRequest:
        """What sparse penalties need to know: parameters, and all output there is by now."""
        params = self.sampling_params
        return PenaltyRequest(
            rid=self.rid,
            slot=self.req_pool_idx,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            min_new_tokens=params.min_new_tokens,
            stop_token_ids=params.stop_token_ids | self.eos_token_ids,
            logit_bias=params.logit_bias or {},
            output_ids=self.output_ids,
        )

    def reset_for_retract(self) -> None:
        """Forget the KV: the request starts over with a prefill of prompt and output."""
        self.retraction_count += 1
        self.is_retracted = True
        self.prefix_indices = []
        self.extend_input_len = 0
        self.extend_logprob_start_len = 0

    def __repr__(self) -> str:
        return f"Req(rid={self.rid}, input={len(self.origin_input_ids)}, output={len(self.output_ids)})"


@dataclass
class ScheduleBatch:
    """Requests that run together.

    ``B`` is the number of requests. Tensors live on `device`.
    """

    # Requests, pools and cache
    reqs: list[Req]
    req_to_token_pool: ReqToTokenPool = None
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator = None
    tree_cache: ChunkCache = None

    # Configuration
    model_config: ModelConfig = None
    forward_mode: ForwardMode = None
    enable_overlap: bool = False
    device: torch.device = None

    # Whether the running batch has no room for another request
    batch_is_full: bool = False
    # The request whose prompt goes on in the next batch
    chunked_req: Req | None = None

    # Sampling
    sampling_info: SamplingBatchInfo = None

    # Inputs of the next forward, shapes (T,), (B,), (B,), (B,), (T,), int64
    input_ids: torch.Tensor = None
    req_pool_indices: torch.Tensor = None
    seq_lens: torch.Tensor = None
    # The same numbers on the host
    seq_lens_cpu: np.ndarray = None
    # Where the tokens of the next decode step stand, shape (B,), int64
    decode_positions: torch.Tensor = None
    out_cache_loc: torch.Tensor = None
    # The tokens that the last forward sampled, shape (B,), int64: as placeholders of `FutureMap`
    output_ids: torch.Tensor = None

    # Logprobs
    return_logprob: bool = False
    top_logprobs_nums: list[int] | None = None
    token_ids_logprobs: list[list[int] | None] | None = None

    # Extend and mixed chunked prefill
    prefix_lens: list[int] | None = None
    extend_lens: list[int] | None = None
    extend_num_tokens: int | None = None
    decoding_reqs: list[Req] | None = None
    extend_logprob_start_lens: list[int] | None = None
    extend_input_logprob_token_ids: torch.Tensor | None = None

    # Whether a request streams its results, and whether one follows a grammar (none does here:
    # constrained decoding is not part of this slice)
    has_stream: bool = False
    has_grammar: bool = False

    # Speculative decoding
    spec_algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.NONE
    spec_info: SpecInput | None = None
    spec_alloc_len: int = 0
    spec_next_token_ids: torch.Tensor | None = None

    # Sparse penalties: who plans them, if the engine has them, and the plan of the forward that was
    # prepared last
    penalty_planner: PenaltyPlanner | None = None
    penalty_step: PenaltyStep | None = None

    # Whether to return hidden states
    return_hidden_states: bool = False

    # Whether no request of this batch decodes: all of them are done with their prefill
    is_prefill_only: bool = False

    @classmethod
    def init_new(
        cls,
        reqs: list[Req],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        tree_cache: ChunkCache,
        model_config: ModelConfig,
        enable_overlap: bool,
        spec_algorithm: SpeculativeAlgorithm,
        spec_alloc_len: int = 0,
        chunked_req: Req | None = None,
    ) -> ScheduleBatch:
        """A batch of `reqs` that has not run yet."""
        return cls(
            reqs=reqs,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            tree_cache=tree_cache,
            model_config=model_config,
            enable_overlap=enable_overlap,
            device=req_to_token_pool.device,
            chunked_req=chunked_req,
            return_logprob=any(req.return_logprob for req in reqs),
            has_stream=any(req.stream for req in reqs),
            spec_algorithm=spec_algorithm,
            spec_alloc_len=spec_alloc_len,
            return_hidden_states=any(req.return_hidden_states for req in reqs),
            is_prefill_only=all(req.is_prefill_only for req in reqs),
        )

    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.reqs)

    def is_empty(self) -> bool:
        """Whether there is no request."""
        return len(self.reqs) == 0

    # ---- prefill

    def prepare_for_extend(self) -> None:
        """Allocate for, and gather, the tokens that each request prefills next."""
        self.forward_mode = ForwardMode.EXTEND
        reqs = self.reqs
        self.prefix_lens = [len(r.prefix_indices) for r in reqs]
        self.extend_lens = [r.extend_input_len for r in reqs]
        self.extend_num_tokens = sum(self.extend_lens)
        seq_lens = [p + e for p, e in zip(self.prefix_lens, self.extend_lens, strict=True)]

        self.out_cache_loc, self.req_pool_indices = alloc_for_extend(self)
        for req, seq_len in zip(reqs, seq_lens, strict=True):
            req.kv_committed_len = req.kv_allocated_len = seq_len
            req.is_retracted = False

        new_ids = [t for r, p in zip(reqs, self.prefix_lens, strict=True) for t in r.fill_ids[p:]]
        self.input_ids = to_device_async(new_ids, torch.int64, self.device)
        self.seq_lens_cpu = np.array(seq_lens, dtype=np.int64)
        self.seq_lens = to_device_async(seq_lens, torch.int64, self.device)
        self._prepare_logprobs()
        if not self.spec_algorithm.is_none():
            self.spec_next_token_ids = to_device_async(
                [self._next_prompt_token(r) for r in reqs], torch.int64, self.device
            )
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(
            self, self.model_config.vocab_size
        )

    @staticmethod
    def _next_prompt_token(req: Req) -> int:
        """The known token behind a chunk, -1 where the forward samples it."""
        known = req.origin_input_ids + req.output_ids
        return known[len(req.fill_ids)] if len(req.fill_ids) < len(known) else -1

    def _prepare_logprobs(self) -> None:
        if not self.return_logprob:
            return
        self.top_logprobs_nums = [r.top_logprobs_num if r.return_logprob else 0 for r in self.reqs]
        self.token_ids_logprobs = [
            r.token_ids_logprob if r.return_logprob else None for r in self.reqs
        ]
        self.extend_logprob_start_lens = [
            r.extend_logprob_start_len if r.return_logprob else r.extend_input_len
            for r in self.reqs
        ]
        # The hidden state of a token scores the token behind it, which the forward's own ids lack at
        # the end of a chunk. Behind the prompt's end there is none to score: 0 fills the place.
        targets: list[int] = []
        for req, prefix, start in zip(
            self.reqs, self.prefix_lens, self.extend_logprob_start_lens, strict=True
        ):
            first, end = prefix + start + 1, len(req.fill_ids) + 1
            ids = req.origin_input_ids[first:end]
            targets += ids + [0] * (end - first - len(ids))
        self.extend_input_logprob_token_ids = to_device_async(targets, torch.int64, self.device)

    def mix_with_running(self, running_batch: ScheduleBatch) -> None:
        """Let this prefill also carry `running_batch`, which is prepared for its decode step."""
        self.forward_mode = ForwardMode.MIXED
        running_bs = running_batch.batch_size()

        for req in running_batch.reqs:
            req.fill_ids = req.origin_input_ids + req.output_ids
        input_ids = torch.cat([self.input_ids, running_batch.input_ids])
        out_cache_loc = torch.cat([self.out_cache_loc, running_batch.out_cache_loc])

        self.merge_batch(running_batch)
        self.input_ids = input_ids
        self.out_cache_loc = out_cache_loc

        self.prefix_lens.extend(req.kv_committed_len - 1 for req in running_batch.reqs)
        self.extend_lens.extend([1] * running_bs)
        self.extend_num_tokens += running_bs
        if self.return_logprob:
            prefill_bs = len(self.reqs) - running_bs
            if self.extend_logprob_start_lens is None:
                self.extend_logprob_start_lens = self.extend_lens[:prefill_bs]
                self.extend_input_logprob_token_ids = self.input_ids[:0]
            # One new token, from which on no input logprob is wanted.
            self.extend_logprob_start_lens.extend([1] * running_bs)
        self.is_prefill_only = False

    # ---- decode

    def new_tokens_required_next_decode(self, selected_indices: list[int] | None = None) -> int:
        """KV slots that the next decode step takes from the allocator, whole pages counted."""
        allocator = self.token_to_kv_pool_allocator
        reqs = self.reqs if selected_indices is None else [self.reqs[i] for i in selected_indices]
        if self.spec_algorithm.is_none():
            if allocator.page_size == 1:
                return len(reqs)
            return sum(r.kv_allocated_len % allocator.page_size == 0 for r in reqs) * (
                allocator.page_size
            )
        cur = [r.kv_allocated_len for r in reqs]
        nxt = [max(r.kv_allocated_len, self.spec_kv_len(r)) for r in reqs]
        return allocator.pages_needed(cur, nxt) * allocator.page_size

    def spec_kv_len(self, req: Req) -> int:
        """KV slots that a request needs for its next speculative step.

        Twice what one step writes: the host's ``kv_committed_len`` is a step old under overlap.
        """
        return req.kv_committed_len + 2 * self.spec_alloc_len

    def check_decode_mem(self, selected_indices: list[int] | None = None) -> bool:
        """Whether the next decode step finds the KV that it needs."""
        needed = self.new_tokens_required_next_decode(selected_indices)
        return self.token_to_kv_pool_allocator.available_size() >= needed

    def retract_decode(self) -> list[Req]:
        """Take requests out until the next decode step fits or one is left.

        Those with the least output go first: the least work is lost.

        Returns
        -------
        list of Req
            To be started over.
        """
        order = sorted(
            range(len(self.reqs)),
            key=lambda i: (len(self.reqs[i].output_ids), -len(self.reqs[i].origin_input_ids)),
            reverse=True,
        )
        retracted: list[Req] = []
        while len(order) > 1 and not self.check_decode_mem(order):
            req = self.reqs[order.pop()]
            self.release_req(req)
            retracted.append(req)
        self.filter_batch(keep_indices=sorted(order))
        return retracted

    def release_req(self, req: Req) -> None:
        """Free what `req` holds so that it can start over."""
        release_kv_cache(req, self.tree_cache)
        req.reset_for_retract()

    def prepare_for_decode(self) -> None:
        """Allocate for one more token of each request."""
        self.forward_mode = ForwardMode.DECODE

        if not self.spec_algorithm.is_none():
            self.spec_info.prepare_for_decode(self)
            return

        if self.sampling_info.penalizer_orchestrator.is_required:
            self.cumulate_penalty_output_tokens()

        self.input_ids = self.output_ids
        self.output_ids = None
        self.out_cache_loc = alloc_for_decode(self)
        for req in self.reqs:
            req.kv_committed_len += 1
            req.kv_allocated_len += 1
        self.decode_positions = self.seq_lens
        self.seq_lens = self.seq_lens + 1
        self.seq_lens_cpu = self.seq_lens_cpu + 1

    def cumulate_penalty_output_tokens(self) -> None:
        """Feed each request's last output token, before any output its last prompt token.

        The copy is pinned and does not wait: the stream it goes to is behind the running forward.
        """
        last_tokens = [
            req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1] for req in self.reqs
        ]
        latest_output_ids = torch.tensor(
            last_tokens,
            dtype=torch.int64,
            pin_memory=is_pin_memory_available(self.device),
        ).to(self.device, non_blocking=True)
        self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(latest_output_ids)

    def plan_penalties(self, num_steps: int, num_draft_tokens: int) -> None:
        """Plan the sparse penalties of the forward that has been prepared.

        Parameters
        ----------
        num_steps, num_draft_tokens : int
            Depth and nodes of a draft tree; 0 in an engine that does not speculate.

        Raises
        ------
        PenaltyCapacityError
            If a request needs more room than there is.
        """
        planner = self.penalty_planner
        if planner is None:
            return
        orchestrator = self.sampling_info.penalizer_orchestrator
        extend = self.forward_mode.is_extend()
        uncommitted = []
        if extend:
            num_prefills = len(self.reqs) - len(self.decoding_reqs or ())
            for i, req in enumerate(self.reqs[:num_prefills]):
                # Of a prompt that goes on, what is sampled behind this part is no output. And what
                # the host feeds is a step old: a prefill's token comes with the first decode.
                if req is self.chunked_req or orchestrator.is_fed_by_host:
                    uncommitted.append(i)
                if req.req_pool_idx not in planner:
                    planner.admit(req.penalty_request())
        verifies = num_steps > 0 and not extend
        self.penalty_step = planner.plan(
            [req.req_pool_idx for req in self.reqs],
            max_tokens=num_steps + 1 if verifies else 1,
            num_draft_tokens=num_draft_tokens if verifies else 0,
            uncommitted=uncommitted,
            fed_tokens=orchestrator.take_output_ids(),
        )

    # ---- merge and filter

    def filter_batch(
        self,
        chunked_req_to_exclude: list[Req] | None = None,
        keep_indices: list[int] | None = None,
    ) -> None:
        """Keep some of the requests.

        Parameters
        ----------
        chunked_req_to_exclude : list of Req, optional
            Requests whose prefill goes on elsewhere.
        keep_indices : list of int, optional
            Those to keep. By default all that have not finished and are not excluded.
        """
        if keep_indices is None:
            exclude = chunked_req_to_exclude or ()
            keep_indices = [
                i
                for i, req in enumerate(self.reqs)
                if req.finished_reason is None and req not in exclude
            ]
        if len(keep_indices) == len(self.reqs):
            return
        if not keep_indices:
            self.reqs = []
            return

        keep_indices_device = to_device_async(keep_indices, torch.int64, self.device)
        self.reqs = [self.reqs[i] for i in keep_indices]
        self.req_pool_indices = self.req_pool_indices[keep_indices_device]
        self.seq_lens = self.seq_lens[keep_indices_device]
        self.seq_lens_cpu = self.seq_lens_cpu[keep_indices]
        self.out_cache_loc = None
        if self.output_ids is not None:
            self.output_ids = self.output_ids[keep_indices_device]

        self.return_logprob = any(req.return_logprob for req in self.reqs)
        if self.return_logprob:
            self.top_logprobs_nums = [self.top_logprobs_nums[i] for i in keep_indices]
            self.token_ids_logprobs = [self.token_ids_logprobs[i] for i in keep_indices]
        else:
            self.top_logprobs_nums = None
            self.token_ids_logprobs = None
        self.has_stream = any(req.stream for req in self.reqs)
        self.return_hidden_states = any(req.return_hidden_states for req in self.reqs)
        self.is_prefill_only = all(req.is_prefill_only for req in self.reqs)

        self.sampling_info.filter_batch(keep_indices, keep_indices_device)
        if self.spec_info:
            self.spec_info.filter_batch(keep_indices_device)

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Append the requests of `other`.

        Parameters
        ----------
        other : ScheduleBatch
            Is used up.
        """
        self.sampling_info.merge_batch(other.sampling_info)

        self.req_pool_indices = torch.cat([self.req_pool_indices, other.req_pool_indices])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.seq_lens_cpu = np.concatenate([self.seq_lens_cpu, other.seq_lens_cpu])
        self.out_cache_loc = None
        if self.output_ids is not None and other.output_ids is not None:
            self.output_ids = torch.cat([self.output_ids, other.output_ids])

        if self.return_logprob or other.return_logprob:
            self.top_logprobs_nums = (self.top_logprobs_nums or [0] * len(self.reqs)) + (
                other.top_logprobs_nums or [0] * len(other.reqs)
            )
            self.token_ids_logprobs = (self.token_ids_logprobs or [None] * len(self.reqs)) + (
                other.token_ids_logprobs or [None] * len(other.reqs)
            )
        self.reqs = self.reqs + other.reqs

        self.return_logprob |= other.return_logprob
        self.has_stream |= other.has_stream
        self.has_grammar |= other.has_grammar
        self.return_hidden_states |= other.return_hidden_states
        self.is_prefill_only = self.is_prefill_only and other.is_prefill_only

        if self.spec_info:
            self.spec_info.merge_batch(other.spec_info)

    # ---- what others see of a batch

    def get_forward_batch(self) -> ForwardBatch:
        """Copy what one forward needs."""
        extend = self.forward_mode.is_extend()
        speculate = not self.spec_algorithm.is_none() and not extend
        if speculate:
            seq_lens_cpu = [req.kv_allocated_len for req in self.reqs]
        else:
            seq_lens_cpu = self.seq_lens_cpu.tolist()
        rows = self.req_to_token_pool.req_to_token[:, : max(seq_lens_cpu)]
        return ForwardBatch(
            forward_mode=self.forward_mode,
            batch_size=len(self.reqs),
            input_ids=None if speculate else self.input_ids,
            positions=self._positions() if not speculate else None,
            out_cache_loc=self.out_cache_loc,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            kv_indices=rows.index_select(0, self.req_pool_indices),
            seq_lens_cpu=seq_lens_cpu,
            # Copies, since `mix_with_running` appends to the lists.
            extend_seq_lens_cpu=list(self.extend_lens) if extend else None,
            extend_prefix_lens_cpu=list(self.prefix_lens) if extend else None,
            return_logprob=self.return_logprob,
            top_logprobs_nums=self.top_logprobs_nums,
            token_ids_logprobs=self.token_ids_logprobs,
            extend_logprob_start_lens_cpu=self.extend_logprob_start_lens if extend else None,
            extend_input_logprob_token_ids=self.extend_input_logprob_token_ids if extend else None,
            capture_hidden_mode=self._capture_hidden_mode(),
            sampling_info=(
                self.sampling_info.copy_for_forward() if self.enable_overlap else self.sampling_info
            ),
            penalty_step=self.penalty_step,
            is_prefill_only=self.is_prefill_only,
            return_hidden_states=self.return_hidden_states,
            spec_info=self.spec_info,
            spec_next_token_ids=self.spec_next_token_ids if extend else None,
        )

    def _positions(self) -> torch.Tensor:
        if not self.forward_mode.is_extend():
            return self.decode_positions
        positions = [
            position
            for prefix, new in zip(self.prefix_lens, self.extend_lens, strict=True)
            for position in range(prefix, prefix + new)
        ]
        return to_device_async(positions, torch.int64, self.device)

    def _capture_hidden_mode(self) -> CaptureHiddenMode:
        if not self.return_hidden_states:
            return CaptureHiddenMode.NULL
        return CaptureHiddenMode.FULL if self.forward_mode.is_extend() else CaptureHiddenMode.LAST

    def copy(self) -> ScheduleBatch:
        """What result processing needs of this batch, safe from merge and filter."""
        twin = copy.copy(self)
        twin.reqs = list(self.reqs)
        return twin


# What becomes of each field of a `ScheduleBatch`: its rule, and the reason where that is not plain.
# Whatever a batch goes through, an "any", "all" or "concatenate" field is what the rule makes of
# batches in which each request runs alone. "reset": given up by merge and filter, made by the next
# preparation. "rebuilt-per-step": of the forward that was prepared last, and not read before the next
# preparation. "shared": the same object for all batches of an engine, or a note of the scheduler's on
# one of them. Tests hold merge, filter, mix and decode against this table, field by field.
SCHEDULE_BATCH_RULES: dict[str, str | tuple[str, str]] = {
    "reqs": "concatenate",
    "req_to_token_pool": ("shared", "one pool an engine"),
    "token_to_kv_pool_allocator": ("shared", "one allocator an engine"),
    "tree_cache": ("shared", "one cache an engine"),
    "model_config": ("shared", "one model an engine"),
    "forward_mode": ("rebuilt-per-step", "says what the last preparation was"),
    "enable_overlap": ("shared", "a setting of the engine"),
    "device": ("shared", "one device an engine"),
    "batch_is_full": ("shared", "the scheduler's note on running_batch; it resets it on a filter"),
    "chunked_req": ("rebuilt-per-step", "of the prefill whose result is still to come"),
    "sampling_info": "concatenate",
    "input_ids": ("rebuilt-per-step", "a decode step takes output_ids"),
    "req_pool_indices": "concatenate",
    "seq_lens": "concatenate",
    "seq_lens_cpu": "concatenate",
    "decode_positions": ("rebuilt-per-step", "a decode step takes seq_lens before it grows"),
    "out_cache_loc": ("reset", "slots of a forward that has been submitted"),
    "output_ids": "concatenate",
    "return_logprob": "any",
    "top_logprobs_nums": ("concatenate", "0 for who wants no logprobs; None if nobody does"),
    "token_ids_logprobs": ("concatenate", "None for who wants no logprobs; None if nobody does"),
    "prefix_lens": ("rebuilt-per-step", "of a prefill"),
    "extend_lens": ("rebuilt-per-step", "of a prefill"),
    "extend_num_tokens": ("rebuilt-per-step", "of a prefill"),
    "decoding_reqs": ("rebuilt-per-step", "of a mixed prefill"),
    "extend_logprob_start_lens": ("rebuilt-per-step", "of a prefill"),
    "extend_input_logprob_token_ids": ("rebuilt-per-step", "of a prefill"),
    "has_stream": "any",
    "has_grammar": "any",
    "spec_algorithm": ("shared", "a setting of the engine"),
    "spec_info": "concatenate",
    "spec_alloc_len": ("shared", "a setting of the engine"),
    "spec_next_token_ids": ("rebuilt-per-step", "of a prefill"),
    "penalty_planner": ("shared", "one planner an engine"),
    "penalty_step": ("rebuilt-per-step", "of the forward that was prepared last"),
    "return_hidden_states": "any",
    "is_prefill_only": ("all", "one request that decodes is enough for a decode step (#21840)"),
}
