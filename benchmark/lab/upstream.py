"""Objects of real SGLang, on a machine that cannot run the whole of it.

For an interpreter that has what a release imports (see ``scripts/upstream/prepare.py``) and has the
release on its path. Configuration objects are stand-ins; batches, requests, pools and sampling
parameters are upstream's own.
"""

from __future__ import annotations

import array
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

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
    )
    absent = [name for name in wanted if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder())


def use_server_args(**settings: Any) -> Any:
    """Server arguments at their defaults but for `settings`, as upstream's code finds them.

    They are made without their ``__post_init__``, which looks for a GPU and a model.
    """
    import dataclasses

    from sglang.srt import server_args as arguments

    args = object.__new__(arguments.ServerArgs)
    for name, spec in arguments.ServerArgs.__dataclass_fields__.items():
        made = spec.default_factory is not dataclasses.MISSING
        setattr(args, name, spec.default_factory() if made else spec.default)
    for name, value in settings.items():
        setattr(args, name, value)
    arguments.set_global_server_args_for_scheduler(args)
    return args


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
    import torch

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    use_server_args(device=device, attention_backend="torch_native", **settings)
    pool = ReqToTokenPool(size, row_len, device, enable_memory_saver=False)
    allocator = TokenToKVPoolAllocator(size * row_len, torch.float32, device, None, False)
    cache = ChunkCache(CacheInitParams(True, pool, allocator, page_size=1))
    reqs = [_request(Req, SamplingParams, i, prompt_len, params or {}) for i in range(size)]
    config = SimpleNamespace(
        vocab_size=VOCAB_SIZE, is_encoder_decoder=False, context_len=row_len, is_multimodal=False
    )
    algorithm = SpeculativeAlgorithm.from_string(settings.get("speculative_algorithm"))
    batch = ScheduleBatch.init_new(reqs, pool, allocator, cache, config, True, algorithm)
    pool.alloc(reqs)
    allocator.alloc(size * prompt_len)
    # What prepare_for_extend and the prefill leave behind.
    batch.req_pool_indices = torch.arange(size, dtype=torch.int64, device=device)
    batch.seq_lens_cpu = torch.full((size,), prompt_len, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = size * prompt_len
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB_SIZE)
    return batch


def _request(
    req_class: type, params_class: type, number: int, prompt_len: int, params: Mapping[str, Any]
) -> Any:
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    sampling_params = params_class(**{"max_new_tokens": 512, "temperature": 0, **params})
    sampling_params.normalize(tokenizer)
    ids: Sequence[int] = list(range(prompt_len))
    if hasattr(req_class, "set_extend_input_len"):
        # From 0.5.13 on.
        ids = array.array("q", ids)
    given = {"eos_token_ids": {2}, "vocab_size": VOCAB_SIZE}
    known = inspect.signature(req_class.__init__).parameters
    given = {name: value for name, value in given.items() if name in known}
    req = req_class(f"r{number}", "", ids, sampling_params, **given)
    req.tokenizer = tokenizer
    if isinstance(ids, array.array):
        req.fill_len = prompt_len
        req.set_extend_input_len(prompt_len)
    req.kv_committed_len = req.kv_allocated_len = prompt_len
    return req
