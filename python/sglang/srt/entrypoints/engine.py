"""The engine: the front door of the package.

Callers' threads check, tokenize and detokenize. The scheduler has a thread of its own and takes
requests while it runs. Between the two stands a `_Router`, which hands each result to its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import (
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
)
from sglang.srt.managers.scheduler import Scheduler, StepRecord
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import show_value
from sglang.srt.utils.tokenizer import IncrementalDetokenizer, Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Delivery = BatchTokenIDOutput | BaseException
Stream = TypeVar("Stream", Iterator[dict[str, Any]], AsyncIterator[dict[str, Any]])


class _Router:
    """Takes the scheduler's results to the requests that wait for them."""

    def __init__(self) -> None:
        # Reentrant: a stream that is collected as garbage, on whatever thread, aborts its request.
        self._lock = threading.RLock()
        self._receivers: dict[str, Callable[[Delivery], None]] = {}
        self.error: BaseException | None = None
        self.closed = False

    def register(
        self, receivers: dict[str, Callable[[Delivery], None]], submit: Callable[[], None]
    ) -> None:
        """Call `submit`, and deliver to `receivers` what comes of it; all of this or nothing.

        Whoever sees a rid registered, or finds the router closed, may count on `submit` being done.

        Raises
        ------
        ValueError
            If a rid is in use.
        RuntimeError
            If the engine has stopped.
        """
        with self._lock:
            if self.error is not None:
                raise RuntimeError(f"the engine has died: {self.error}") from self.error
            if self.closed:
                raise RuntimeError("the engine is shut down")
            taken = sorted(self._receivers.keys() & receivers.keys())
            if taken:
                raise ValueError(f"rid {taken[0]!r} is in use by a request that still runs")
            self._receivers.update(receivers)
            submit()

    def abort(
        self, rid: str, receiver: Callable[[Delivery], None], submit: Callable[[], None]
    ) -> None:
        """Call `submit` if `rid` still is the name of the request that `receiver` waits for."""
        with self._lock:
            if self._receivers.get(rid) is receiver:
                submit()

    def refuse(self) -> None:
        """Take no more requests. Those that run go on."""
        with self._lock:
            self.closed = True

    def deliver(self, output: BatchTokenIDOutput) -> None:
        """Called on the scheduler's thread."""
        with self._lock:
            if output.finished_reason is None:
                receiver = self._receivers.get(output.rid)
            else:
                receiver = self._receivers.pop(output.rid, None)
        if receiver is not None:
            receiver(output)

    def close(self, error: BaseException | None = None) -> None:
        """Take no more requests; those that wait get an error."""
        with self._lock:
            if self.error is None:
                self.error = error
            self.closed = True
            receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver(error or RuntimeError("the engine was shut down"))


def _run_scheduler(scheduler: Scheduler, router: _Router) -> None:
    try:
        scheduler.run()
    except BaseException as error:
        logger.exception("the scheduler has died")
        router.close(error)
    else:
        router.close()


def _stop(scheduler: Scheduler, router: _Router, thread: threading.Thread) -> None:
    router.refuse()
    scheduler.submit_request(AbortReq(None))
    scheduler.stop()
    # Garbage may be collected on a thread of the engine itself, which cannot wait for its own end.
    if threading.get_ident() not in scheduler.own_threads:
        thread.join()


class Engine:
    """Serves a model in this process.

    Parameters
    ----------
    model_path : str
        Directory in Hugging Face's layout.
    observer : callable, optional
        Takes a `StepRecord` after each scheduling step, on the scheduler's thread.
    model_runner_class : type
        `ModelRunner` or a subclass that runs forwards in its own way.
    thread_context : callable
        Makes a context manager that each thread of the engine enters: modes of torch that act on one
        thread only are switched on there.
    **kwargs
        Fields of `ServerArgs`.

    Raises
    ------
    ValueError
        If a setting is not valid; the message names it.

    Examples
    --------
    >>> with Engine(model_path=path) as engine:
    ...     engine.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})[
    ...         "text"
    ...     ]
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        observer: Callable[[StepRecord], None] | None = None,
        model_runner_class: type[ModelRunner] = ModelRunner,
        thread_context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        **kwargs: Any,
    ) -> None:
        if model_path is not None:
            kwargs["model_path"] = model_path
        self.server_args = ServerArgs.from_kwargs(**kwargs)
        if self.server_args.log_level is not None:
            logging.getLogger("sglang").setLevel(self.server_args.log_level.upper())
        self.tokenizer = None
        if not self.server_args.skip_tokenizer_init:
            path = self.server_args.tokenizer_path or self.server_args.model_path
            self.tokenizer = Tokenizer(path)
        self._router = _Router()
        self.scheduler = Scheduler(
            self.server_args,
            self._router.deliver,
            self.tokenizer,
            model_runner_class,
            observer,
            thread_context,
        )
        self._thread = threading.Thread(
            target=_run_scheduler,
            args=(self.scheduler, self._router),
            name="scheduler",
            daemon=True,
        )
        self._thread.start()
        # Also runs when the engine is forgotten, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, _stop, self.scheduler, self._router, self._thread)

    def shutdown(self) -> None:
        """Abort what runs, and return once the engine's threads have ended.

        On a thread of the engine itself, such as in an observer, return at once.
        """
        self._finalizer()
        if threading.get_ident() not in self.scheduler.own_threads:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # ---- generate

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_hidden_states: bool | list[bool] = False,
        stream: bool = False,
        rid: str | list[str] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """Generate text for one prompt or several.

        Parameters
        ----------
        prompt : str or list of str
            Text, or else `input_ids`.
        sampling_params : dict or list of dict, optional
            Fields of `SamplingParams`; one dict goes for all prompts.
        input_ids : list of int or list of list of int
            Token ids, or else `prompt`.
        return_logprob : bool or list of bool
            Whether to return logprobs of output tokens and, from `logprob_start_len` on, of the prompt.
        logprob_start_len : int or list of int, optional
            First position of the prompt to return; -1, the default, for none.
        top_logprobs_num : int or list of int, optional
            Best candidates to return at each position.
        token_ids_logprob : list of int or list of list of int, optional
            Tokens whose logprobs to return at each position.
        return_hidden_states : bool or list of bool
            Whether to return the last layer's output for each token that ran.
        stream : bool
            Return an iterator, whose items hold all that is known so far.
        rid : str or list of str, optional
            Names of the requests, for `abort_request`.

        Returns
        -------
        dict, list of dict, or iterator of dict
            With keys ``text`` (if there is a tokenizer), ``output_ids`` and ``meta_info``. Items of a
            stream of several prompts have an ``index`` too.

        Raises
        ------
        ValueError
            If a request is not valid; nothing of the call is run then.
        RuntimeError
            If the engine has stopped.
        """
        call = _Call(self, locals())
        deliveries: queue.SimpleQueue = queue.SimpleQueue()
        call.start(lambda index: lambda delivery: deliveries.put((index, delivery)))

        def results() -> Iterator[tuple[int, dict[str, Any]]]:
            try:
                while call.unfinished:
                    yield call.receive(*deliveries.get())
            finally:
                call.abort_unfinished()

        if stream:
            items = (call.stream_item(index, item) for index, item in results())
            return call.watch(items)
        final = {}
        for index, item in results():
            final[index] = item
        return call.collect(final)

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_hidden_states: bool | list[bool] = False,
        stream: bool = False,
        rid: str | list[str] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]] | AsyncIterator[dict[str, Any]]:
        """Like `generate`, for coroutines: a stream is an asynchronous iterator."""
        call = _Call(self, locals())
        loop = asyncio.get_running_loop()
        deliveries: asyncio.Queue = asyncio.Queue()

        def receiver(index: int) -> Callable[[Delivery], None]:
            def receive(delivery: Delivery) -> None:
                # The loop may be closed by now: its caller has gone, so no one waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(deliveries.put_nowait, (index, delivery))

            return receive

        call.start(receiver)

        async def results() -> AsyncIterator[tuple[int, dict[str, Any]]]:
            try:
                while call.unfinished:
                    yield call.receive(*await deliveries.get())
            finally:
                call.abort_unfinished()

        if stream:

            async def items() -> AsyncIterator[dict[str, Any]]:
                async with contextlib.aclosing(results()) as stream_of_results:
                    async for index, item in stream_of_results:
                        yield call.stream_item(index, item)

            return call.watch(items())
        final = {}
        async for index, item in results():
            final[index] = item
        return call.collect(final)

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """Give up the request `rid`, or all. It ends with finish reason ``abort`` and what it has.

        Raises
        ------
        ValueError
            If neither is given. A `rid` that no request has is no error: it may just have ended.
        """
        if rid is None and not abort_all:
            raise ValueError("rid is required unless abort_all=True")
        if not isinstance(rid, str | None):
            raise ValueError(f"rid must be a string, got {show_value(rid)}")
        self.scheduler.submit_request(AbortReq(None if abort_all else rid))

    # ---- score

    def score(
        self,
        query: Prompt,
        items: Prompt | Sequence[Prompt],
        label_token_ids: list[int],
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Probability of each label token behind each item.

        Parameters
        ----------
        query : str or list of int
            What all items have in common.
        items : list of str, or list of list of int
            One prompt each, joined with `query`. Text and ids are not mixed.
        label_token_ids : list of int
            The tokens to score.
        apply_softmax : bool
            Normalize over the labels; otherwise probabilities over the whole vocabulary.
        item_first : bool
            Put the item before the query.

        Returns
        -------
        list of list of float
            One list an item, in order of `label_token_ids`.
        """
        if not isinstance(label_token_ids, list) or not label_token_ids:
            raise ValueError(
                "label_token_ids must be a list of at least one token id, "
                f"got {show_value(label_token_ids)}"
            )
        if not isinstance(items, str | list | tuple):
            raise ValueError(f"items must be a string or a list, got {show_value(items)}")
        if isinstance(items, str) or (items and isinstance(items[0], int)):
            items = [items]
        text = isinstance(query, str)
        kind = str if text else list
        for name, value in (("query", query), *(("items", item) for item in items)):
            if not isinstance(value, kind):
                raise ValueError(
                    f"query and items must both be text, or both lists of token ids, "
                    f"got {name} {show_value(value)}"
                )
        prompts = [item + query if item_first else query + item for item in items]
        if not prompts:
            return []
        results = self.generate(
            prompt=prompts if text else None,
            input_ids=None if text else prompts,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            token_ids_logprob=[list(label_token_ids)] * len(prompts),
        )
        return [self._label_scores(result, label_token_ids, apply_softmax) for result in results]

    @staticmethod
    def _label_scores(
        result: dict[str, Any], label_token_ids: list[int], apply_softmax: bool
    ) -> list[float]:
        reason = result["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise RuntimeError(f"a scoring request was aborted: {reason['message']}")
        (pairs,) = result["meta_info"]["output_token_ids_logprobs"]
        by_token = {token: logprob for logprob, token, _ in pairs}
        logprobs = [by_token[token] for token in label_token_ids]
        if not apply_softmax:
            return [math.exp(logprob) for logprob in logprobs]
        # Relative to the largest, which so cannot underflow.
        largest = max(logprobs)
        scores = [math.exp(logprob - largest) for logprob in logprobs]
        total = sum(scores)
        return [score / total for score in scores]


class _Call:
    """One call of `Engine.generate`: its requests, from arguments to results."""

    def __init__(self, engine: Engine, arguments: dict[str, Any]) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        prompts, self.is_single = self._prompts(arguments["prompt"], arguments["input_ids"])
        n = len(prompts)
        self._started = time.perf_counter()
        spread = {
            name: self._spread(name, arguments[name], n)
            for name in (
                "sampling_params",
                "return_logprob",
                "logprob_start_len",
                "top_logprobs_num",
                "return_hidden_states",
                "rid",
            )
        }
        stream = _flag("stream", arguments["stream"])
        wanted_ids = self._spread_ids(arguments["token_ids_logprob"], n)
        self.requests = [
            TokenizedGenerateReqInput(
                rid=uuid.uuid4().hex if spread["rid"][i] is None else spread["rid"][i],
                input_ids=self._encode(prompts[i]),
                sampling_params=self._params(i, spread["sampling_params"][i]),
                stream=stream,
                return_logprob=_flag("return_logprob", spread["return_logprob"][i]),
                logprob_start_len=_default(spread["logprob_start_len"][i], -1),
                top_logprobs_num=_default(spread["top_logprobs_num"][i], 0),
                token_ids_logprob=wanted_ids[i],
                return_hidden_states=_flag(
                    "return_hidden_states", spread["return_hidden_states"][i]
                ),
            )
            for i in range(n)
        ]
        for index, request in enumerate(self.requests):
            error = engine.scheduler.check_request(request)
            if error is not None:
                raise ValueError(self._at(index, error))
            request.is_checked = True
        self.unfinished = set(range(n))
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}

    # ---- arguments

    @staticmethod
    def _prompts(prompt: Any, input_ids: Any) -> tuple[list[Prompt], bool]:
        if (prompt is None) == (input_ids is None):
            raise ValueError("exactly one of prompt and input_ids must be given")
        given = prompt if input_ids is None else input_ids
        if prompt is not None:
            single = isinstance(prompt, str)
            if not single and not (
                isinstance(prompt, list) and all(isinstance(p, str) for p in prompt)
            ):
                raise ValueError(
                    f"prompt must be a string or a list of strings, got {show_value(prompt)}"
                )
        else:
            if not isinstance(input_ids, list):
                raise ValueError(f"input_ids must be a list, got {show_value(input_ids)}")
            single = not (input_ids and isinstance(input_ids[0], list))
            if not single and not all(isinstance(ids, list) for ids in input_ids):
                raise ValueError("input_ids must be a list of integers or a list of such lists")
        return ([given] if single else list(given)), single

    @staticmethod
    def _spread(name: str, value: Any, n: int) -> list[Any]:
        """One value for each of `n` prompts."""
        if not isinstance(value, list):
            return [value] * n
        if len(value) != n:
            raise ValueError(f"{name} has {len(value)} entries for {n} prompts")
        return value

    @classmethod
    def _spread_ids(cls, value: Any, n: int) -> list[Any]:
        if isinstance(value, list) and any(
            isinstance(entry, list) or entry is None for entry in value
        ):
            spread = cls._spread("token_ids_logprob", value, n)
            return [list(ids) if isinstance(ids, list) else ids for ids in spread]
        return [list(value) if isinstance(value, list) else value] * n

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._tokenizer is None:
            raise ValueError("prompt is text, and this engine has no tokenizer: pass input_ids")
        try:
            return self._tokenizer.encode(prompt)
        except TypeError:  # half of a surrogate pair, which UTF-8 has no bytes for
            raise ValueError(
                f"prompt must be valid Unicode, got {show_value(prompt[:100])}"
            ) from None

    def _params(self, index: int, given: Any) -> SamplingParams:
        try:
            if isinstance(given, SamplingParams):
                params = given.checked_copy()
            else:
                params = SamplingParams.from_dict({} if given is None else given)
        except ValueError as error:
            raise ValueError(self._at(index, str(error))) from None
        params.normalize(self._tokenizer)
        return params

    def _at(self, index: int, error: str) -> str:
        """`error`, with the number of the prompt if there are several."""
        return error if self.is_single else f"prompt {index}: {error}"

    # ---- running

    def start(self, make_receiver: Callable[[int], Callable[[Delivery], None]]) -> None:
        """Register the requests and send them off.

        Raises
        ------
        RuntimeError
            If this is a thread of the engine itself, which would wait for its own work.
        """
        if threading.get_ident() in self._engine.scheduler.own_threads:
            raise RuntimeError(
                "generate cannot be called on a thread of the engine, such as an observer's"
            )
        receivers = {}
        for index, request in enumerate(self.requests):
            if not isinstance(request.rid, str) or request.rid in receivers:
                raise ValueError(f"rid must be a string of its own, got {show_value(request.rid)}")
            receivers[request.rid] = make_receiver(index)

        def submit() -> None:
            for request in self.requests:
                self._engine.scheduler.submit_request(request)

        self._engine._router.register(receivers, submit)
        self._receivers = receivers

    def receive(self, index: int, delivery: Delivery) -> tuple[int, dict[str, Any]]:
        """Turn a delivery into a result."""
        if isinstance(delivery, BaseException):
            self.unfinished.clear()
            raise RuntimeError(f"the engine has died: {delivery}") from delivery
        if delivery.finished_reason is not None:
            self.unfinished.discard(index)
        return index, self._result(index, delivery)

    def abort_unfinished(self) -> None:
        """Give up requests whose caller went away."""
        engine = self._engine
        for index in self.unfinished:
            rid = self.requests[index].rid
            submit = partial(engine.scheduler.submit_request, AbortReq(rid))
            # It may have ended unread, and its name may be another request's by now.
            engine._router.abort(rid, self._receivers[rid], submit)
        self.unfinished.clear()

    def watch(self, stream: Stream) -> Stream:
        """Give up what is unfinished when `stream` is forgotten, also if no one ever read from it."""
        weakref.finalize(stream, self.abort_unfinished).atexit = False
        return stream

    def stream_item(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        """A result as a stream shows it."""
        return item if self.is_single else {**item, "index": index}

    def collect(self, final: dict[int, dict[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
        """All results in the order of the prompts."""
        results = [final[i] for i in range(len(self.requests))]
        return results[0] if self.is_single else results

    # ---- results

    def _result(self, index: int, output: BatchTokenIDOutput) -> dict[str, Any]:
        request = self.requests[index]
        reason = output.finished_reason
        meta = {
            "id": output.rid,
            "finish_reason": None if reason is None else reason.to_json(),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(output.output_ids),
            "cached_tokens": 0,
            **output.meta,
            "e2e_latency": time.perf_counter() - self._started,
        }
        if output.logprobs is not None:
            meta.update(self._logprobs(output))
        if output.hidden_states is not None:
            meta["hidden_states"] = output.hidden_states
        result = {"output_ids": output.output_ids, "meta_info": meta}
        if self._tokenizer is not None:
            result["text"] = self._text(index, output)
        return result

    def _text(self, index: int, output: BatchTokenIDOutput) -> str:
        params = self.requests[index].sampling_params
        reason, ids = output.finished_reason, output.output_ids
        if isinstance(reason, FINISH_MATCHED_TOKEN) and not params.no_stop_trim:
            ids = ids[:-1]
        if not self.requests[index].stream:
            text = self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        else:
            detokenizer = self._detokenizers.setdefault(
                index, IncrementalDetokenizer(self._tokenizer, params.skip_special_tokens)
            )
            text = detokenizer.update(ids) if reason is None else detokenizer.finish(ids)
        if isinstance(reason, FINISH_MATCHED_STR) and not params.no_stop_trim:
            return text[: text.find(reason.matched)] if reason.matched in text else text
        if reason is None and params.stop_strs:
            return _without_begun_stop(text, params.stop_strs)
        return text

    def _logprobs(self, output: BatchTokenIDOutput) -> dict[str, Any]:
        logprobs = output.logprobs

        def triple(pair: tuple) -> tuple:
            return (*pair, None)

        def triples(pairs: list | None) -> list | None:
            return None if pairs is None else [triple(pair) for pair in pairs]

        return {
            "input_token_logprobs": triples(logprobs.input_token),
            "input_top_logprobs": [triples(p) for p in logprobs.input_top],
            "input_token_ids_logprobs": [triples(p) for p in logprobs.input_token_ids],
            "output_token_logprobs": triples(logprobs.output_token),
            "output_top_logprobs": [triples(p) for p in logprobs.output_top],
            "output_token_ids_logprobs": [triples(p) for p in logprobs.output_token_ids],
        }


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {show_value(value)}")
    return bool(value)


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _without_begun_stop(text: str, stops: Sequence[str]) -> str:
    """`text` without an end that may turn out to be the beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return text[:-length]
    return text
