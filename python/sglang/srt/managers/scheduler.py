"""The scheduler: which requests run next, and what becomes of what they produced.

Two loops do the same work. `event_loop_normal` finishes a step before it prepares the next.
`event_loop_overlap` prepares and submits step N+1 while forward N runs, and handles the results of N
while forward N+1 runs. A request's end is therefore seen when it is already part of the next step; that
step's result for it is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_stream import ForwardHandle
from sglang.srt.model_executor.generation_result import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.penaltylib.sparse_penalties import (
    PenaltyPlanner,
    PenaltyPool,
    PenaltyState,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.common import ceil_align, get_bool_env_var, get_platform, show_value
from sglang.srt.utils.tokenizer import Tokenizer

# Part of a request's output that admission keeps KV for: at first, at least, and how fast the one
# becomes the other while nothing needs retraction.
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
# Output tokens a request that a retraction counts on for those that stay.
RETRACT_DECODE_STEPS = 20

_SHUTDOWN = object()


@dataclass
class StepRecord:
    """One scheduling step, for observers. Times are in seconds.

    Attributes
    ----------
    step : int
        Counts forwards from 1.
    forward_mode : str
        Name of the `ForwardMode`.
    batch_size : int
        Requests in the forward.
    num_tokens : int
        Output tokens that the step produced and that a request kept.
    prepare_time, process_time : float
        Host time for choosing and preparing the batch, and for handling its results.
    wait_time : float
        Host time spent waiting for the results.
    forward_start, forward_end : float
        When the forward ran, on one clock for all steps of an engine.
    phases : dict of str to float
        Durations inside the forward; speculation fills in draft, verify and extend.
    """

    step: int
    forward_mode: str
    batch_size: int
    num_tokens: int = 0
    prepare_time: float = 0.0
    process_time: float = 0.0
    wait_time: float = 0.0
    forward_start: float = 0.0
    forward_end: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


class Scheduler(SchedulerOutputProcessorMixin):
    """Serves requests until it is told to stop.

    Parameters
    ----------
    server_args : ServerArgs
    send_output : callable
        Takes a `BatchTokenIDOutput`. Called on the scheduler's thread; must not block.
    tokenizer : Tokenizer, optional
        For stop strings.
    model_runner_class : type
        `ModelRunner` or a subclass.
    observer : callable, optional
        Takes a `StepRecord` after each step.
    thread_context : callable
        Makes a context manager that every thread of the engine enters.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        send_output: Callable[[BatchTokenIDOutput], None],
        tokenizer: Tokenizer | None = None,
        model_runner_class: type[ModelRunner] = ModelRunner,
        observer: Callable[[StepRecord], None] | None = None,
        thread_context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self.server_args = server_args
        self.send_output = send_output
        self.tokenizer = tokenizer
        self.observer = observer
        self.enable_overlap = not server_args.disable_overlap_schedule
        self.chunked_prefill_size = (
            None if server_args.chunked_prefill_size == -1 else server_args.chunked_prefill_size
        )
        self.is_mixed_chunk = server_args.enable_mixed_chunk and bool(self.chunked_prefill_size)
        self.spec_algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
        self.spec_alloc_len = server_args.spec_alloc_len
        self.platform = get_platform(server_args.device)
        self.device = self.platform.torch_device

        self.model_config = ModelConfig.from_path(
            server_args.model_path,
            dtype=server_args.torch_dtype,
            context_length=server_args.context_length,
        )
        _require_architecture("model_path", self.model_config, "LlamaForCausalLM")
        self.eos_token_ids = set(self.model_config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self.eos_token_ids.add(tokenizer.eos_token_id)
        self._init_pools()
        with torch.no_grad():
            self._init_workers(model_runner_class)
        self.platform.leave_loading_thread()

        self.thread_context = thread_context
        # Identifiers of the threads that serve this scheduler now.
        self.own_threads: set[int] = set()
        self.forward_stream = self.platform.create_forward_stream(self.enable_overlap)
        self.forward_stream.start(self._engine_thread)

        self.waiting_queue: list[Req] = []
        self.running_batch = self._empty_batch()
        self.cur_batch: ScheduleBatch | None = None
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Req | None = None
        self.result_queue: deque[tuple[ScheduleBatch, ForwardHandle, StepRecord | None]] = deque()
        self.forward_ct = 0
        self.num_retractions = 0

        self.init_new_token_ratio = min(
            INIT_NEW_TOKEN_RATIO * server_args.schedule_conservativeness, 1.0
        )
        self.min_new_token_ratio = self.init_new_token_ratio * MIN_NEW_TOKEN_RATIO_FACTOR
        self.new_token_ratio = self.init_new_token_ratio
        self._seeds = torch.Generator().manual_seed(server_args.random_seed)

        self.check_busy = get_bool_env_var("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY")
        self.check_idle = get_bool_env_var("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", True)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._stopped = False
        # Whether the last pass of the loop found nothing to run and no result to handle.
        self._was_idle = True

    def _init_pools(self) -> None:
        args = self.server_args
        self.max_total_num_tokens = args.max_total_tokens // args.page_size * args.page_size
        self.req_to_token_pool = ReqToTokenPool(
            args.max_running_requests,
            # Room for what speculation allocates beyond the longest sequence.
            ceil_align(self.model_config.context_len + 2 * self.spec_alloc_len, args.page_size),
            self.device,
        )
        if args.page_size == 1:
            allocator = TokenToKVPoolAllocator(self.max_total_num_tokens, self.device)
        else:
            allocator = PagedTokenToKVPoolAllocator(
                self.max_total_num_tokens, args.page_size, self.device
            )
        self.token_to_kv_pool_allocator = allocator
        self.tree_cache = ChunkCache(self.req_to_token_pool, allocator)
        self._init_penalties()

    def _init_penalties(self) -> None:
        """Make the state of sparse penalties, one slot for each row of the request pool."""
        args = self.server_args
        self.penalty_planner: PenaltyPlanner | None = None
        self.penalty_state: PenaltyState | None = None
        self._draft_shape = (0, 0)
        if not self.spec_algorithm.is_none():
            self._draft_shape = (args.speculative_num_steps, args.speculative_num_draft_tokens)
        if args.penalty_backend == "sparse":
            pool = PenaltyPool(
                args.max_running_requests, self.model_config.vocab_size, self._draft_shape[1]
            )
            self.penalty_planner = PenaltyPlanner(pool, self.device)
            self.penalty_state = PenaltyState(pool, self.device)
            self.req_to_token_pool.on_free = self.penalty_planner.release

    def _init_workers(self, model_runner_class: type[ModelRunner]) -> None:
        args = self.server_args
        self.model_runner = model_runner_class(
            args, self.model_config, self.device, self.max_total_num_tokens
        )
        self.model_runner.penalty_state = self.penalty_state
        self.draft_runner = None
        if self.spec_algorithm.is_none():
            self.future_map = FutureMap(args.max_running_requests, self.device)
            self.worker = TpModelWorker(self.model_runner)
            return
        draft_config = ModelConfig.from_path(
            args.speculative_draft_model_path, dtype=self.model_config.dtype
        )
        _require_architecture("speculative_draft_model_path", draft_config, "LlamaForCausalLMEagle")
        self.draft_runner = model_runner_class(
            args, draft_config, self.device, self.max_total_num_tokens, is_draft_worker=True
        )
        self.draft_runner.model.set_embed_and_head(*self.model_runner.model.get_embed_and_head())
        self.future_map = FutureMap(
            args.max_running_requests,
            self.device,
            self.spec_algorithm,
            args.speculative_eagle_topk,
            draft_config.hidden_size,
            draft_config.dtype,
        )
        self.worker = self.spec_algorithm.create_worker()(
            args, self.model_runner, self.draft_runner, self.future_map
        )

    @contextlib.contextmanager
    def _engine_thread(self):
        self.own_threads.add(threading.get_ident())
        try:
            with torch.no_grad(), self.thread_context():
                yield
        finally:
            self.own_threads.discard(threading.get_ident())

    def _empty_batch(self) -> ScheduleBatch:
        return self._new_batch([])

    def _new_batch(self, reqs: list[Req], chunked_req: Req | None = None) -> ScheduleBatch:
        batch = ScheduleBatch.init_new(
            reqs,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            self.enable_overlap,
            self.spec_algorithm,
            self.spec_alloc_len,
            chunked_req,
        )
        batch.penalty_planner = self.penalty_planner
        return batch

    # ---- the loops

    def run(self) -> None:
        """Serve until `stop`. Whatever goes wrong comes out of here."""
        try:
            with self._engine_thread():
                self.platform.enter_schedule_thread(self.enable_overlap)
                if self.enable_overlap:
                    self.event_loop_overlap()
                else:
                    self.event_loop_normal()
        finally:
            self.forward_stream.close()

    def event_loop_normal(self) -> None:
        """Each step: receive, choose, run, handle the results."""
        while self._receive():
            started = time.perf_counter()
            batch = self.get_next_batch_to_run()
            self.cur_batch = batch
            if batch:
                self.process_batch_result(batch.copy(), *self.run_batch(batch, started))
            else:
                self.self_check_during_idle()
            self.last_batch = batch
            if self.check_busy:
                self.self_check_during_busy()

    def event_loop_overlap(self) -> None:
        """Each step: receive, choose, submit, and handle the results of the step before."""
        while self._receive():
            started = time.perf_counter()
            batch = self.get_next_batch_to_run()
            self.cur_batch = batch
            if batch:
                self.result_queue.append((batch.copy(), *self.run_batch(batch, started)))
            if self.last_batch:
                self.process_batch_result(*self.result_queue.popleft())
            elif batch is None:
                self.self_check_during_idle()
            self.last_batch = batch
            if self.check_busy:
                self.self_check_during_busy()

    def submit_request(self, message: TokenizedGenerateReqInput | AbortReq) -> None:
        """Put a message into the scheduler's inbox. Any thread may call this."""
        self._inbox.put(message)

    def stop(self) -> None:
        """Make `run` return once nothing is left to do. Any thread may call this.

        A request that arrives later is refused.
        """
        self._inbox.put(_SHUTDOWN)

    def _receive(self) -> bool:
        """Take in new messages; when idle, wait for one. False once an idle pass has found all done."""
        self.process_input_requests(self.recv_requests())
        return not (self._stopped and self._was_idle and self._has_nothing_to_do())

    def _has_nothing_to_do(self) -> bool:
        return (
            self.last_batch is None
            and not self.waiting_queue
            and self.chunked_req is None
            and self.running_batch.is_empty()
        )

    def recv_requests(self) -> list[Any]:
        """Messages that have come in."""
        messages = []
        if self._was_idle and self.last_batch is None and not self._stopped:
            # Nothing in flight, nor left behind. Where requests are left, the next pass finds room for
            # one or gives one up; should it not, do not wait at full speed.
            if self._has_nothing_to_do():
                messages.append(self._inbox.get())
            else:
                with contextlib.suppress(queue.Empty):
                    messages.append(self._inbox.get(timeout=0.001))
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def process_input_requests(self, messages: list[Any]) -> None:
        """Act on messages in the order in which they came."""
        for message in messages:
            if message is _SHUTDOWN:
                self._stopped = True
            elif isinstance(message, AbortReq):
                self.abort_request(message.rid)
            else:
                self.handle_generate_request(message)

    # ---- requests come and go

    @property
    def max_input_len(self) -> int:
        """Longest prompt that this engine can take, at least one output token included."""
        return min(
            self.model_config.context_len - 1,
            self.max_total_num_tokens - 2 * self.spec_alloc_len - 1,
        )

    def check_request(self, request: TokenizedGenerateReqInput) -> str | None:
        """What is wrong with a request, or None. Reads nothing that changes: any thread may ask."""
        ids, vocab_size = request.input_ids, self.model_config.vocab_size
        if not ids:
            return "input_ids must not be empty"
        bad = [t for t in ids if not _is_id(t, vocab_size)]
        if bad:
            return f"input_ids must be integers in [0, {vocab_size}), got {show_value(bad[0])}"
        if len(ids) > self.max_input_len:
            return (
                f"input_ids has {len(ids)} tokens, but this engine takes at most "
                f"{self.max_input_len} (context length {self.model_config.context_len}, "
                f"max_total_tokens {self.max_total_num_tokens})"
            )
        start, top = request.logprob_start_len, request.top_logprobs_num
        if not _is_int(start) or not -1 <= start <= len(ids):
            return f"logprob_start_len must be in [-1, {len(ids)}], got {show_value(start)}"
        if not _is_int(top) or not 0 <= top <= vocab_size:
            return f"top_logprobs_num must be in [0, {vocab_size}], got {show_value(top)}"
        named = request.token_ids_logprob
        if named is not None:
            if not isinstance(named, list):
                return f"token_ids_logprob must be a list, got {show_value(named)}"
            bad = [t for t in named if not _is_id(t, vocab_size)]
            if bad:
                wanted = f"integers in [0, {vocab_size})"
                return f"token_ids_logprob must hold {wanted}, got {show_value(bad[0])}"
        params = request.sampling_params
        if params.stop_strs and self.tokenizer is None:
            return (
                f"stop={show_value(params.stop_strs)} needs a tokenizer, and this engine has none"
            )
        try:
            params.verify(vocab_size)
        except ValueError as error:
            return str(error)
        # A tokenizer may name an end that the model's vocabulary does not have.
        stops = params.stop_token_ids | self.eos_token_ids
        if params.min_new_tokens > 0 and all(t in stops for t in range(vocab_size)):
            return (
                "min_new_tokens must be 0 where all tokens end the output, "
                f"got {show_value(params.min_new_tokens)}"
            )
        return None

    def _check_all(self, request: TokenizedGenerateReqInput) -> str | None:
        """The same of a request that came past the Engine, whose parameters anyone may have set."""
        try:
            request.sampling_params = request.sampling_params.checked_copy()
        except ValueError as error:
            return str(error)
        return self.check_request(request)

    def handle_generate_request(self, request: TokenizedGenerateReqInput) -> None:
        """Queue a request, or answer with an abort that says what is wrong with it."""
        error = None if request.is_checked else self._check_all(request)
        if self._stopped:
            error = "the engine is shut down"
        if error is not None:
            self.send_output(
                BatchTokenIDOutput(request.rid, [], FINISH_ABORT(error), None, None, {})
            )
            return
        params = copy.copy(request.sampling_params)
        if not request.is_checked:
            params.normalize(self.tokenizer)
        room = min(
            self.model_config.context_len,
            self.max_total_num_tokens - 2 * self.spec_alloc_len,
        ) - len(request.input_ids)
        params.max_new_tokens = (
            room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        )
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
        seed = int(torch.randint(0, 2**62, (1,), generator=self._seeds))
        self.waiting_queue.append(
            Req(
                request.rid,
                request.input_ids,
                params,
                sampling_seed=seed if params.sampling_seed is None else params.sampling_seed,
                eos_token_ids=self.eos_token_ids,
                vocab_size=self.model_config.vocab_size,
                tokenizer=self.tokenizer,
                stream=request.stream,
                return_logprob=request.return_logprob,
                logprob_start_len=request.logprob_start_len if request.return_logprob else -1,
                top_logprobs_num=request.top_logprobs_num,
                token_ids_logprob=request.token_ids_logprob,
                return_hidden_states=request.return_hidden_states,
                # A speculative engine drafts for every request that it has prefilled.
                is_prefill_only=params.max_new_tokens == 0 and self.spec_algorithm.is_none(),
            )
        )

    def abort_request(self, rid: str | None) -> None:
        """Give up the request `rid`, or all of them if None, wherever it is."""
        waiting, self.waiting_queue = self.waiting_queue, []
        for req in waiting:
            if rid is None or req.rid == rid:
                self._finish_now(req, FINISH_ABORT())
            else:
                self.waiting_queue.append(req)
        for req in self._live_reqs():
            if (rid is None or req.rid == rid) and not req.finished():
                # Its forward may be running: the request ends when that result is handled.
                req.to_finish = FINISH_ABORT()

    def _finish_now(self, req: Req, reason: FINISH_ABORT) -> None:
        """End a request outside result processing. A result in flight for it will be dropped."""
        req.finished_reason, req.to_finish = reason, None
        if req.req_pool_idx is not None:
            release_kv_cache(req, self.tree_cache)
        self.stream_output([req])

    def _live_reqs(self) -> list[Req]:
        """Requests that hold, or may hold, KV, each once."""
        batches = [self.running_batch, self.last_batch, self.cur_batch]
        batches += [entry[0] for entry in self.result_queue]
        reqs = [req for batch in batches if batch is not None for req in batch.reqs]
        if self.chunked_req is not None:
            reqs.append(self.chunked_req)
        return list({id(req): req for req in reqs}.values())

    # ---- choosing the next batch

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """The batch of the next step: a prefill where one is possible, else a decode."""
        chunked_req_to_exclude = []
        if self.chunked_req is not None:
            chunked_req_to_exclude.append(self.chunked_req)
            self._stash_chunked_request()

        if self.last_batch and self.last_batch.forward_mode.is_extend():
            if self.last_batch.chunked_req is not None:
                chunked_req_to_exclude.append(self.last_batch.chunked_req)
            self._merge_last_batch(chunked_req_to_exclude)

        # Prefill-only requests are finished by their prefill's result. No decode step filters them. And
        # where one has ended in a full batch, another may take its place now.
        if self.running_batch.is_prefill_only or self.running_batch.batch_is_full:
            self._filter_running_batch()

        batch = self.get_new_batch_prefill()
        if batch is None:
            if self.running_batch.is_empty() or self.running_batch.is_prefill_only:
                return None
            batch = self.running_batch = self.update_running_batch(self.running_batch)
            if batch.is_empty():
                return None
        # Steps are begun in the order in which they were planned, so this one has to be run.
        batch.plan_penalties(*self._draft_shape)
        return batch

    def _stash_chunked_request(self) -> None:
        if self.chunked_req.to_finish is not None:
            req, self.chunked_req = self.chunked_req, None
            self._finish_now(req, req.to_finish)
        else:
            self.tree_cache.cache_unfinished_req(self.chunked_req)

    def _merge_last_batch(self, chunked_req_to_exclude: list[Req]) -> None:
        """Let the requests that the last step prefilled join those that decode."""
        last_bs = self.last_batch.batch_size()
        self.last_batch.filter_batch(chunked_req_to_exclude=chunked_req_to_exclude)
        if self.last_batch.batch_size() < last_bs:
            self.running_batch.batch_is_full = False
        if self.last_batch.is_empty():
            return
        if self.running_batch.is_empty():
            self.running_batch = self.last_batch
        else:
            self.running_batch.merge_batch(self.last_batch)

    def _filter_running_batch(self) -> None:
        before = self.running_batch.batch_size()
        self.running_batch.filter_batch()
        if self.running_batch.batch_size() < before:
            self.running_batch.batch_is_full = False

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """A batch of requests to prefill, or None if none can start or go on."""
        if self.chunked_req is None and (
            self.running_batch.batch_is_full or not self.waiting_queue
        ):
            return None

        running_bs = self.running_batch.batch_size()
        adder = PrefillAdder(
            self.token_to_kv_pool_allocator,
            self.running_batch,
            self.new_token_ratio,
            self.server_args.max_prefill_tokens,
            self.chunked_prefill_size,
            running_bs if self.is_mixed_chunk else 0,
            self.spec_alloc_len,
        )
        if self.chunked_req is not None and not adder.add_chunked_req(self.chunked_req):
            return None
        self._add_waiting_requests(adder)
        if not adder.can_run_list:
            return None

        started = {id(req) for req in adder.can_run_list}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in started]
        self.chunked_req = adder.new_chunked_req
        new_batch = self._new_batch(adder.can_run_list, self.chunked_req)
        new_batch.prepare_for_extend()
        if self.is_mixed_chunk and not self.running_batch.is_empty():
            self._mix_with_running(new_batch)
        return new_batch

    def _add_waiting_requests(self, adder: PrefillAdder) -> None:
        # A chunked request that goes on has its row already.
        free_rows = self.req_to_token_pool.available_size() + len(adder.can_run_list)
        for req in self.waiting_queue:
            if len(adder.can_run_list) >= free_rows:
                self.running_batch.batch_is_full = True
                break
            result = adder.add_one_req(req)
            if result is AddReqResult.CONTINUE:
                continue
            if result is AddReqResult.NO_TOKEN:
                # Only a request's end makes room; while none runs there is none to wait for.
                self.running_batch.batch_is_full = not self.running_batch.is_empty()
            break

    def _mix_with_running(self, new_batch: ScheduleBatch) -> None:
        """Let a prefill carry the running requests' decode step, if there is KV for it."""
        self._filter_running_batch()
        if self.running_batch.is_empty() or not self.running_batch.check_decode_mem():
            return
        self.running_batch.prepare_for_decode()
        new_batch.mix_with_running(self.running_batch)
        new_batch.decoding_reqs = self.running_batch.reqs
        batch_is_full = self.running_batch.batch_is_full
        self.running_batch = self._empty_batch()
        self.running_batch.batch_is_full = batch_is_full

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch:
        """Prepare the running requests for a decode step, retracting some if KV runs out."""
        initial_bs = batch.batch_size()
        batch.filter_batch()
        if batch.is_empty():
            batch.batch_is_full = False
            return batch

        if batch.check_decode_mem():
            decay = (
                self.init_new_token_ratio - self.min_new_token_ratio
            ) / NEW_TOKEN_RATIO_DECAY_STEPS
            self.new_token_ratio = max(self.new_token_ratio - decay, self.min_new_token_ratio)
        else:
            self._make_room(batch)
        if batch.batch_size() < initial_bs:
            batch.batch_is_full = False
        if not batch.is_empty():
            batch.prepare_for_decode()
        return batch

    def _make_room(self, batch: ScheduleBatch) -> None:
        """Retract requests of `batch` until its next decode step fits."""
        for req in batch.retract_decode():
            self._requeue(req)
        if not batch.check_decode_mem() and self.chunked_req is not None:
            # The prompt in progress holds what the last running request needs.
            req, self.chunked_req = self.chunked_req, None
            batch.release_req(req)
            self._requeue(req)
        if not batch.check_decode_mem():
            (req,) = batch.reqs
            self._finish_now(
                req, FINISH_ABORT(f"out of KV: {req.seqlen} tokens need more than the whole pool")
            )
            batch.filter_batch()
            return
        decoded = sum(len(r.output_ids) for r in batch.reqs)
        limit = sum(r.sampling_params.max_new_tokens for r in batch.reqs)
        expected = decoded + RETRACT_DECODE_STEPS * len(batch.reqs)
        self.new_token_ratio = min(1.0, expected / (limit + 1))

    def _requeue(self, req: Req) -> None:
        """Let a retracted request wait for a new start, before those that never ran."""
        self.num_retractions += 1
        if req.to_finish is not None:
            self._finish_now(req, req.to_finish)
        else:
            self.waiting_queue.insert(0, req)

    # ---- running it

    def run_batch(
        self, batch: ScheduleBatch, started: float = 0.0
    ) -> tuple[ForwardHandle, StepRecord | None]:
        """Submit a batch's forward.

        Returns
        -------
        handle : ForwardHandle
            Whose result is a `GenerationBatchResult`.
        record : StepRecord or None
            None without an observer.
        """
        self.forward_ct += 1
        record = None
        if self.observer is not None:
            record = StepRecord(self.forward_ct, batch.forward_mode.name, batch.batch_size())
        forward_batch = batch.get_forward_batch()
        if record is not None:
            record.prepare_time = time.perf_counter() - started
        handle = self.forward_stream.submit(partial(self._forward, forward_batch, record))
        batch.output_ids = self.future_map.placeholders(batch.req_pool_indices)
        if not self.spec_algorithm.is_none():
            batch.spec_info = self.future_map.draft_input(batch.req_pool_indices)
        return handle, record

    def _forward(
        self, forward_batch: ForwardBatch, record: StepRecord | None
    ) -> GenerationBatchResult:
        """What runs on the forward stream."""
        if record is not None:
            record.forward_start = self.forward_stream.mark()
        if self.penalty_state is not None:
            self.penalty_state.begin(forward_batch.penalty_step)
        if forward_batch.input_ids is not None:
            self.future_map.resolve_future(forward_batch)
        result = self.worker.forward_batch_generation(forward_batch)
        self.future_map.store_to_map(forward_batch.req_pool_indices, result)
        result.copy_to_host()
        if record is not None:
            record.forward_end = self.forward_stream.mark()
        return result

    def process_batch_result(
        self, batch: ScheduleBatch, handle: ForwardHandle, record: StepRecord | None = None
    ) -> None:
        """Wait for a batch's results and act on them."""
        self._was_idle = False
        started = time.perf_counter()
        result = handle.wait()
        waited = time.perf_counter()
        if batch.penalty_step is not None:
            self.penalty_planner.settle(batch.penalty_step, result.accept_lens)
        num_tokens = (
            self.process_batch_result_prefill(batch, result)
            if batch.forward_mode.is_extend()
            else self.process_batch_result_decode(batch, result)
        )
        if record is not None:
            record.num_tokens = num_tokens
            record.wait_time = waited - started
            record.process_time = time.perf_counter() - waited
            record.forward_start = self.forward_stream.seconds(record.forward_start)
            record.forward_end = self.forward_stream.seconds(record.forward_end)
            record.phases = result.phases
            self.observer(record)

    # ---- checks

    def self_check_during_idle(self) -> None:
        """Nothing runs, so nothing may be held, whoever waits.

        Raises
        ------
        RuntimeError
            If KV slots or rows of the request pool are not free.
        """
        self._was_idle = True
        if self.check_idle:
            self._check_nothing_is_held()
        if self.waiting_queue or self.chunked_req is not None:
            self._unblock()
        else:
            self.new_token_ratio = self.init_new_token_ratio

    def _check_nothing_is_held(self) -> None:
        slots = rows = penalized = 0
        begun = self.chunked_req
        if begun is not None and begun.req_pool_idx is not None:
            page_size = self.token_to_kv_pool_allocator.page_size
            slots, rows = ceil_align(begun.kv_allocated_len, page_size), 1
            penalized = int(begun.req_pool_idx in (self.penalty_planner or ()))
        free = self.token_to_kv_pool_allocator.available_size()
        if free + slots != self.max_total_num_tokens:
            raise RuntimeError(
                "token_to_kv_pool_allocator memory leak detected: "
                f"{free} of {self.max_total_num_tokens} slots are free when idle, "
                f"and {self.running_batch.reqs} are in the running batch"
            )
        free = self.req_to_token_pool.available_size()
        if free + rows != self.req_to_token_pool.size:
            raise RuntimeError(
                "req_to_token_pool memory leak detected: "
                f"{free} of {self.req_to_token_pool.size} rows are free when idle"
            )
        if self.penalty_planner and len(self.penalty_planner) > penalized:
            raise RuntimeError(
                "penalty pool leak detected: "
                f"{len(self.penalty_planner)} requests have penalties when idle"
            )

    def _unblock(self) -> None:
        """Requests wait although nothing runs that they could wait for: give up the first.

        That is the one whose prompt has begun. It can only have come to this by a leak that nobody looks
        for.
        """
        if not self.running_batch.is_empty() or self.last_batch is not None:
            return
        req, self.chunked_req = self.chunked_req, None
        if req is None:
            req = self.waiting_queue.pop(0)
        self._finish_now(
            req, FINISH_ABORT(f"out of KV: no room for {req.seqlen} tokens in an empty pool")
        )

    def self_check_during_busy(self) -> None:
        """What is free and what requests hold make the whole.

        Raises
        ------
        RuntimeError
            If KV slots or rows are lost or held twice.
        """
        page_size = self.token_to_kv_pool_allocator.page_size
        holders = [req for req in self._live_reqs() if req.req_pool_idx is not None]
        held = sum(ceil_align(req.kv_allocated_len, page_size) for req in holders)
        free = self.token_to_kv_pool_allocator.available_size()
        if free + held != self.max_total_num_tokens:
            raise RuntimeError(
                f"KV slots do not add up: {free} free + {held} held by {holders} "
                f"is not {self.max_total_num_tokens}"
            )
        rows = [req.req_pool_idx for req in holders] + self.req_to_token_pool.free_slots
        if sorted(rows) != list(range(self.req_to_token_pool.size)):
            raise RuntimeError(f"rows of the request pool do not add up: {sorted(rows)}")


def _require_architecture(field: str, config: ModelConfig, architecture: str) -> None:
    if config.architecture != architecture:
        raise ValueError(
            f"{field} must be the directory of a {architecture}, "
            f"got {str(config.model_path)!r} of a {config.architecture}"
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any, vocab_size: int) -> bool:
    return _is_int(value) and 0 <= value < vocab_size
