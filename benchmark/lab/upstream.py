"""Objects of real SGLang, on a machine that cannot run the whole of it.

For an interpreter that has what a release imports (see ``requirements/upstream-transformers*.txt``)
and has the release on its path. The configuration of a model and a server are stand-ins; batches,
requests, pools, caches, sampling parameters and draft inputs are upstream's own, and so is the code
that prepares a prefill. What a release has is asked of it, rather than told from its version:
releases from 0.5.3.post3 to 0.5.23 have been seen to work.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

VOCAB_SIZE = 4096


def stub_what_is_absent() -> None:
    """Let a release of SGLang be imported without packages that only a GPU needs."""
    import importlib.abc
    import importlib.machinery
    import importlib.util
    import types

    class AnyAttribute(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything

    class Anything(metaclass=AnyAttribute):
        """Stands for any class, function or decorator."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # Used as a decorator, it leaves what it decorates.
            alone = len(args) == 1 and not kwargs and callable(args[0])
            return args[0] if alone else Anything()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

    class Stub(types.ModuleType):
        __path__: Sequence[str] = ()
        __version__ = "0"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if (self.__name__, name) in (("triton", "runtime"), ("triton.runtime", "driver")):
                raise RuntimeError("no active driver")  # what real Triton says without a GPU
            return Anything

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name.split(".")[0] in absent:
                return importlib.machinery.ModuleSpec(name, self, is_package=True)
            return None

        def create_module(self, spec: Any) -> types.ModuleType:
            return Stub(spec.name)

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    wanted = (
        "torchvision",
        "compressed_tensors",
        "sgl_kernel",
        "triton",
        "IPython",
        "einops",
        # Older releases take activations of it on a CPU without AMX.
        "vllm",
    )
    absent = [name for name in wanted if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder())


def import_release() -> None:
    """Import what batches need, behind `stub_what_is_absent`.

    It comes before the fake device, since some of the code looks at the machine when it is imported.
    """
    from sglang.srt.managers import schedule_batch  # noqa: F401

    _draft_input()


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """Upstream asks whether CUDA is there before it pins memory."""
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        if _has("sglang.srt.platforms.cuda"):
            from sglang.srt import platforms
            from sglang.srt.platforms.cuda import CudaSRTPlatform

            # Such a release asks an object that it chose when it was imported.
            name = "is_pin_memory_available"
            if hasattr(CudaSRTPlatform, name):
                answer = getattr(CudaSRTPlatform, name)
                here = type(platforms.current_platform)
                stack.enter_context(mock.patch.object(here, name, answer))
        yield


def use_server_args(**settings: Any) -> Any:
    """Server arguments at their defaults but for `settings`, as upstream's code finds them.

    They are made without what looks for a GPU and a model. Calling again replaces them.
    """
    if _has("sglang.srt.runtime_context"):
        from sglang.srt import runtime_context

        if hasattr(runtime_context.get_context(), "override_server_args"):
            # The release's own way to make some up, since it guards how they come to be.
            return runtime_context.get_context().override_server_args(**settings).install()
    from sglang.srt import server_args as arguments

    args = object.__new__(arguments.ServerArgs)
    for name, spec in arguments.ServerArgs.__dataclass_fields__.items():
        made = spec.default_factory is not dataclasses.MISSING
        setattr(args, name, spec.default_factory() if made else spec.default)
    for name, value in settings.items():
        setattr(args, name, value)
    arguments.set_global_server_args_for_scheduler(args)
    return args


def start_server(device: str, **settings: Any) -> None:
    """`use_server_args` as batches want them, with `settings` of one's own."""
    # Other backends enter what they allocate by kernels that have to be compiled.
    use_server_args(device=device, attention_backend="torch_native", page_size=1, **settings)


@dataclasses.dataclass
class Memory:
    """What batches share: room for requests, room for their tokens, and a cache that keeps no prefix.

    Attributes
    ----------
    pool, allocator, cache
        Upstream's own.
    row_len : int
        Tokens that fit in a request.
    device : str
        Where the tensors live.
    """

    pool: Any
    allocator: Any
    cache: Any
    row_len: int
    device: str


def memory(rows: int, device: str, row_len: int = 1024) -> Memory:
    """Room for `rows` requests of `row_len` tokens each."""
    import torch

    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(rows, row_len, device, enable_memory_saver=False)
    allocator = TokenToKVPoolAllocator(rows * row_len, torch.float32, device, None, False)
    return Memory(pool, allocator, _cache(pool, allocator), row_len, device)


def _cache(pool: Any, allocator: Any) -> Any:
    """The release's cache for servers that keep no prefixes."""
    if not _has("sglang.srt.mem_cache.cache_init_params"):
        from sglang.srt.mem_cache.chunk_cache import ChunkCache

        return ChunkCache(pool, allocator, page_size=1)
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    params = CacheInitParams(True, pool, allocator, page_size=1)
    if _has("sglang.srt.mem_cache.chunk_cache"):
        from sglang.srt.mem_cache.chunk_cache import ChunkCache

        return ChunkCache(params)
    # One cache serves all, also with prefixes switched off.
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params.tree_components = (ComponentType.FULL,)
    return UnifiedRadixCache(params)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # not even the package that it would be in


def schedule_batch(
    size: int,
    device: str,
    params: Mapping[str, Any] | None = None,
    prompt_len: int = 32,
    row_len: int = 1024,
    **settings: Any,
) -> Any:
    """A prefilled ``ScheduleBatch``, ready to decode.

    Parameters
    ----------
    size : int
        Number of requests.
    device : str
        Where its tensors live.
    params : mapping, optional
        Sampling parameters of each request.
    prompt_len, row_len : int
        Tokens of each prompt, and room for a request.
    **settings
        Server arguments; with ``speculative_algorithm`` the batch speculates.
    """
    start_server(device, **settings)
    prompts = [range(prompt_len)] * size
    algorithm = settings.get("speculative_algorithm")
    return prefilled(memory(size, device, row_len), prompts, [params or {}] * size, algorithm)


def prefilled(
    room: Memory,
    prompts: Sequence[Sequence[int]],
    params: Sequence[Mapping[str, Any]],
    speculative_algorithm: str | None = None,
    first: int = 0,
) -> Any:
    """A ``ScheduleBatch`` whose prefill has been prepared. `start_server` comes first.

    Parameters
    ----------
    room : Memory
        Where its requests and tokens get their places.
    prompts : sequence of sequence of int
        Token ids of each request.
    params : sequence of mapping
        Sampling parameters of each request.
    speculative_algorithm : str, optional
    first : int
        Number of the first request, for its name.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    reqs = [_request(first + i, *given) for i, given in enumerate(zip(prompts, params))]
    for req in reqs:
        begin(req, room.cache)
    config = SimpleNamespace(
        vocab_size=VOCAB_SIZE,
        is_encoder_decoder=False,
        context_len=room.row_len,
        is_multimodal=False,
        is_matryoshka=False,
    )
    algorithm = SpeculativeAlgorithm.from_string(speculative_algorithm)
    batch = ScheduleBatch.init_new(
        reqs, room.pool, room.allocator, room.cache, config, True, algorithm
    )
    batch.prepare_for_extend()
    return batch


def _request(number: int, prompt: Sequence[int], params: Mapping[str, Any]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    sampling_params = SamplingParams(**{"max_new_tokens": 512, "temperature": 0, **params})
    sampling_params.normalize(tokenizer)
    known = inspect.signature(Req.__init__).parameters
    # Releases have one or the other, and add it to outputs of the same type.
    is_array = "array" in str(known["origin_input_ids"].annotation)
    ids = array.array("q", prompt) if is_array else list(prompt)
    given = {"eos_token_ids": {2}, "vocab_size": VOCAB_SIZE}
    given = {name: value for name, value in given.items() if name in known}
    req = Req(f"r{number}", "", ids, sampling_params, **given)
    req.tokenizer = tokenizer
    return req


def begin(req: Any, cache: Any) -> None:
    """Let the next prefill take all that a request has, prompt and output, as admission does."""
    req.init_next_round_input(cache)
    length = len(req.origin_input_ids) + len(req.output_ids)
    if hasattr(req, "set_extend_range"):
        req.set_extend_range(0, length)
    elif hasattr(req, "fill_len"):
        req.fill_len = length
    elif hasattr(req, "extend_end"):
        req.extend_end = length


# Writes the numbers of KV slots into the rows of the request pool:
# (rows, table, first columns, columns behind the last, slots of all rows, ...).
SlotWriter = Callable[..., None]


@contextlib.contextmanager
def slot_writer(write: SlotWriter) -> Iterator[None]:
    """Let `write` do what a compiled kernel does for a speculative step.

    Parameters
    ----------
    write : callable
        Gets, as tensors: rows of the request pool, the pool's table, the first column and the column
        behind the last of each row, and the slots for them, row after row. More follows.
    """
    from sglang.srt.speculative import spec_utils

    owners: list[tuple[Any, str]] = [(spec_utils, "assign_req_to_token_pool_func")]
    if _has("sglang.srt.mem_cache.allocation"):
        from sglang.srt.mem_cache import allocation

        owners.append((allocation, "assign_req_to_token_pool_func"))
    owners = [(owner, name) for owner, name in owners if hasattr(owner, name)]
    with contextlib.ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(mock.patch.object(owner, name, write))
        if not owners:
            # Without a function around it, the kernel gets its grid in brackets first.
            kernel = mock.MagicMock()
            kernel.__getitem__.return_value = write
            stack.enter_context(mock.patch.object(spec_utils, "assign_req_to_token_pool", kernel))
        yield


def begin_speculation(batch: Any, most_tokens: int) -> None:
    """Give a prefilled batch the draft input that the prefill of a draft model leaves behind.

    Parameters
    ----------
    batch : ScheduleBatch
    most_tokens : int
        Tokens that one step may write for a request. Only older releases want to be told.
    """
    draft_input = _draft_input()
    batch.spec_info = draft_input()
    if hasattr(draft_input, "ALLOC_LEN_PER_DECODE"):
        draft_input.ALLOC_LEN_PER_DECODE = most_tokens
    if hasattr(batch.spec_info, "allocate_lens"):
        batch.spec_info.allocate_lens = batch.seq_lens


def _draft_input() -> Any:
    """The class of draft inputs."""
    from sglang.srt.utils import common

    with contextlib.ExitStack() as stack:
        if hasattr(common, "CachedKernel"):
            # It insists that what it wraps is compiled, which no kernel is here.
            stack.enter_context(mock.patch.object(common, "CachedKernel", lambda fn, key_fn: fn))
        from sglang.srt.speculative.eagle_info import EagleDraftInput
    return EagleDraftInput


def sampled(batch: Any, token: int = 0) -> None:
    """Give a batch the tokens that its forward has sampled, where the release looks for them."""
    import torch

    tokens = torch.full((len(batch.reqs),), token, dtype=torch.int64, device=batch.device)
    name = "output_ids" if hasattr(batch, "output_ids") else "input_ids"
    setattr(batch, name, tokens)


def kv_length(req: Any, name: str) -> int | None:
    """``kv_committed_len`` or ``kv_allocated_len`` of a request; None where a release has none."""
    return getattr(_kv_owner(req), name, None)


def set_kv_length(req: Any, name: str, length: int) -> None:
    """Set what `kv_length` reads."""
    setattr(_kv_owner(req), name, length)


def _kv_owner(req: Any) -> Any:
    return getattr(req, "kv", req)
