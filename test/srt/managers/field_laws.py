"""Merging and filtering, told by the tables of rules, and requests to try them on.

The one law: whatever merges, filters, mixes and decode steps a batch has been through, each of its
fields is what its rule makes of the fields of batches in which each request ran alone. Building a batch
of a union and merging two batches are two ways there; so are building of what remains, and filtering.

The tables are read from the source of this checkout, so that they can be held against another package.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

CPU = torch.device("cpu")
VOCAB = 24
PACKAGE = Path(__file__).resolve().parents[3] / "python" / "sglang"

Rules = dict[str, tuple[str, str]]

# What a rule says of a field in a batch of several requests.
WORDS = {
    "any": "whether it holds for any request",
    "all": "whether it holds for all requests",
    "concatenate": "one entry a request, in their order",
    "sum": "of the requests' own",
    "derived": "made anew from other fields by each merge and filter",
    "reset": "given up by merge and filter, made by the next preparation",
    "rebuilt-per-step": "of the forward that was prepared last",
    "shared": "the same for all batches of an engine, or the left side's",
}


def read_rules(file: str, name: str) -> Rules:
    """The table `name` in a file of the package, from the source of this checkout."""
    for node in ast.parse((PACKAGE / file).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            table = ast.literal_eval(node.value)
            return {k: (v, "") if isinstance(v, str) else v for k, v in table.items()}
    raise LookupError(f"{file} has no table {name}")


BATCH_RULES = read_rules("srt/managers/schedule_batch.py", "SCHEDULE_BATCH_RULES")
SAMPLING_RULES = read_rules("srt/sampling/sampling_batch_info.py", "SAMPLING_BATCH_INFO_RULES")
DRAFT_RULES = read_rules("srt/speculative/eagle_info.py", "EAGLE_DRAFT_INPUT_RULES")
VERIFY_RULES = read_rules("srt/speculative/eagle_info.py", "EAGLE_VERIFY_INPUT_RULES")


# --- Requests -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A request of some kind."""

    prompt_len: int
    is_scoring: bool
    params: tuple[tuple[str, Any], ...]
    top_logprobs: int | None
    token_ids: tuple[int, ...] | None
    hidden_states: bool
    stream: bool
    seed: int


def _some(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.none(), strategy)


_PARAMS = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0]),
    "top_p": _some(st.sampled_from([0.3, 0.9])),
    "top_k": _some(st.sampled_from([1, 5])),
    "min_p": _some(st.sampled_from([0.1])),
    "frequency_penalty": _some(st.sampled_from([-0.5, 0.25, 1.0])),
    "presence_penalty": _some(st.sampled_from([-0.25, 0.5])),
    "repetition_penalty": _some(st.sampled_from([0.5, 1.5])),
    "min_new_tokens": _some(st.sampled_from([1, 3])),
    "stop_token_ids": _some(st.just([3, 5])),
    "logit_bias": _some(st.sampled_from([{"4": 2.0}, {"0": -1.0, "23": 1.0}])),
}

ASKS = st.builds(
    Ask,
    prompt_len=st.integers(1, 6),
    is_scoring=st.booleans(),
    params=st.fixed_dictionaries(_PARAMS).map(
        lambda p: tuple((k, _hashable(v)) for k, v in p.items() if v is not None)
    ),
    top_logprobs=st.one_of(st.none(), st.integers(0, 3)),
    token_ids=st.one_of(st.none(), st.just((1, 2))),
    hidden_states=st.booleans(),
    stream=st.booleans(),
    seed=st.integers(0, 1000),
)


def _hashable(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


def make_req(ask: Ask, number: int) -> Req:
    """The request `ask` describes, number `number` of its world."""
    params = {k: dict(v) if k == "logit_bias" else v for k, v in ask.params}
    params["max_new_tokens"] = 0 if ask.is_scoring else 20
    if ask.is_scoring:
        params.pop("min_new_tokens", None)
    sampling_params = SamplingParams(**params)
    sampling_params.normalize(None)
    logprob = ask.top_logprobs is not None
    return Req(
        f"r{number}",
        [4 + (number + i) % 18 for i in range(ask.prompt_len)],
        sampling_params,
        eos_token_ids={2},
        vocab_size=VOCAB,
        sampling_seed=ask.seed,
        stream=ask.stream,
        return_logprob=logprob,
        logprob_start_len=0 if logprob else -1,
        top_logprobs_num=ask.top_logprobs or 0,
        token_ids_logprob=list(ask.token_ids) if logprob and ask.token_ids else None,
        return_hidden_states=ask.hidden_states,
        is_prefill_only=ask.is_scoring,
    )


# --- Batches ------------------------------------------------------------------------------------


class World:
    """Pools of an engine, and requests, of which number i always has row i."""

    def __init__(self, asks: Sequence[Ask], speculates: bool = False, page_size: int = 1) -> None:
        self.asks = asks
        self.reqs = [make_req(ask, i) for i, ask in enumerate(asks)]
        self.pool = ReqToTokenPool(len(asks), 256, CPU)
        self.allocator = (
            TokenToKVPoolAllocator(4096, CPU)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(4096, page_size, CPU)
        )
        self.cache = ChunkCache(self.pool, self.allocator)
        self.algorithm = SpeculativeAlgorithm.EAGLE if speculates else SpeculativeAlgorithm.NONE
        self.steps = [0] * len(asks)

    def prepared(self, numbers: Sequence[int]) -> ScheduleBatch:
        """A batch that is about to prefill these requests."""
        reqs = [self.reqs[i] for i in numbers]
        for i, req in zip(numbers, reqs, strict=True):
            self.pool.free_slots.remove(i)
            req.req_pool_idx = i
            req.init_next_round_input()
        batch = ScheduleBatch.init_new(
            reqs,
            self.pool,
            self.allocator,
            self.cache,
            SimpleNamespace(vocab_size=VOCAB),
            enable_overlap=True,
            spec_algorithm=self.algorithm,
            spec_alloc_len=0 if self.algorithm.is_none() else 4,
        )
        batch.prepare_for_extend()
        return batch

    def build(self, numbers: Sequence[int]) -> ScheduleBatch:
        """A batch that has prefilled these requests."""
        batch = self.prepared(numbers)
        self.forwarded(batch)
        return batch

    def forwarded(self, batch: ScheduleBatch) -> None:
        """As if a forward had sampled a token for each request."""
        for req in batch.reqs:
            req.output_ids.append((5 * req.req_pool_idx + 3 * len(req.output_ids)) % VOCAB)
        batch.output_ids = torch.tensor([req.output_ids[-1] for req in batch.reqs])
        if not self.algorithm.is_none():
            batch.spec_info = self.algorithm.create_draft_input(
                future_indices=batch.req_pool_indices
            )

    def decode(self, batch: ScheduleBatch) -> None:
        """A decode step."""
        batch.prepare_for_decode()
        self.count(batch)
        self.forwarded(batch)

    def count(self, batch: ScheduleBatch) -> None:
        """Note that the requests of `batch` take one more step."""
        for req in batch.reqs:
            self.steps[req.req_pool_idx] += 1


def alone(world: World, number: int, prepare: bool = False) -> Any:
    """A batch in which one request of `world` ran alone, as many steps as it did there.

    With `prepare`, what the next step gives its forward.
    """
    own = World(world.asks, not world.algorithm.is_none(), world.allocator.page_size)
    batch = own.build([number])
    for _ in range(world.steps[number]):
        own.decode(batch)
    if prepare:
        batch.prepare_for_decode()
        return batch.get_forward_batch()
    return batch


# --- The law ------------------------------------------------------------------------------------

# Where one request has no entry and another one has: an entry that says nothing.
_FILLERS: dict[str, Callable[[], list[Any]]] = {
    "top_logprobs_nums": lambda: [0],
    "token_ids_logprobs": lambda: [None],
}
# Compared by what they do to logits.
_BY_EFFECT = ("penalizer_orchestrator", "logit_bias")


def expected(rule: str, name: str, values: list[Any]) -> Any:
    """What a rule makes of the fields of single requests."""
    if rule == "any":
        return any(values)
    if rule == "all":
        return all(values)
    if rule == "sum":
        return sum(values)
    assert rule == "concatenate", rule
    if all(v is None for v in values):
        return None
    filled = [_FILLERS[name]() if v is None else v for v in values]
    if isinstance(filled[0], torch.Tensor):
        return torch.cat(filled)
    if isinstance(filled[0], np.ndarray):
        return np.concatenate(filled)
    return [entry for entries in filled for entry in entries]


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of a field are equal: tensors also in type, requests by their rid."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, list) and isinstance(b, list):
        return [getattr(x, "rid", x) for x in a] == [getattr(x, "rid", x) for x in b]
    return type(a) is type(b) and a == b


def broken_rules(
    owner: Any, singles: Sequence[Any], rules: Rules, left: dict[str, Any] | None = None
) -> list[str]:
    """Fields of `owner` that are not what their rules make of `singles`.

    Parameters
    ----------
    owner : object
        Of a dataclass.
    singles : sequence
        The same for each request alone.
    rules : dict
    left : dict, optional
        The shared fields as they were before anything happened.

    Returns
    -------
    list of str
        One line a field.
    """
    broken = []
    for f in dataclasses.fields(owner):
        rule, _ = rules.get(f.name, ("", ""))
        value = getattr(owner, f.name)
        if rule == "shared":
            if left is not None and value is not left[f.name] and value != left[f.name]:
                broken.append(f"{f.name} ({rule}): {value!r} was {left[f.name]!r}")
        elif rule in ("any", "all", "sum", "concatenate") and f.name not in _NESTED | {*_BY_EFFECT}:
            wanted = expected(rule, f.name, [getattr(one, f.name) for one in singles])
            if not is_same(value, wanted):
                broken.append(f"{f.name} ({rule}): {value!r} is not {wanted!r}")
    return broken


_NESTED = {"sampling_info", "spec_info"}


def broken_laws(world: World, batch: ScheduleBatch) -> list[str]:
    """Fields of a batch, and of what it carries, that break their rules."""
    singles = [alone(world, req.req_pool_idx) for req in batch.reqs]
    info, infos = batch.sampling_info, [one.sampling_info for one in singles]
    broken = broken_rules(batch, singles, BATCH_RULES) + broken_rules(info, infos, SAMPLING_RULES)
    if batch.spec_info is not None:
        broken += broken_rules(batch.spec_info, [one.spec_info for one in singles], DRAFT_RULES)
    return broken + wrong_effects(info, infos)


def wrong_effects(info: Any, infos: Sequence[Any]) -> list[str]:
    """Rows that penalties and bias change in another way than when each request is alone."""
    rows = len(infos)
    logits = torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(0))
    together = logits.clone()
    info.apply_logits_bias(together)
    wrong = []
    for i, one in enumerate(infos):
        single = logits[i : i + 1].clone()
        one.apply_logits_bias(single)
        if not torch.equal(together[i], single[0]):
            wrong.append(f"penalties and bias of row {i} (concatenate)")
    if (info.logit_bias is None) != all(one.logit_bias is None for one in infos):
        wrong.append("logit_bias (None if nobody has one)")
    required = info.penalizer_orchestrator.is_required
    if required != any(one.penalizer_orchestrator.is_required for one in infos):
        wrong.append(f"penalizer_orchestrator.is_required (any): {required}")
    if len(info.penalizer_orchestrator) != rows:
        wrong.append(f"len(penalizer_orchestrator) is not {rows}")
    return wrong


class Poison:
    """Stands where nothing may be read before it has been made anew."""

    def _fail(self, *args: Any) -> Any:
        raise AssertionError("a field was read that is rebuilt per step, and had not been")

    __bool__ = __len__ = __iter__ = __getitem__ = __add__ = __radd__ = __eq__ = _fail
    __hash__ = None

    def __getattr__(self, name: str) -> Any:
        self._fail()


def accumulate(batch: ScheduleBatch) -> None:
    """Let a batch hold the penalties of a forward, which a merge or a filter has to give up."""
    batch.sampling_info.update_penalties()


def poison(batch: ScheduleBatch) -> None:
    """Spoil all fields of a batch that its next preparation makes."""
    for name, (rule, _) in BATCH_RULES.items():
        if rule in ("rebuilt-per-step", "reset") and hasattr(batch, name):
            setattr(batch, name, Poison())


def wrong_forward(world: World, batch: ScheduleBatch) -> list[str]:
    """What a prepared decode step gives its forward, and should not, by requests that ran alone."""
    forward = batch.get_forward_batch()
    singles = [alone(world, req.req_pool_idx, prepare=True) for req in batch.reqs]
    wrong = []
    for name in ("input_ids", "positions", "seq_lens", "req_pool_indices", "seq_lens_cpu"):
        wanted = expected("concatenate", name, [getattr(one, name) for one in singles])
        if not is_same(getattr(forward, name), wanted):
            wrong.append(f"{name}: {getattr(forward, name)} is not {wanted}")
    for name in ("return_logprob", "return_hidden_states"):
        if getattr(forward, name) != any(getattr(one, name) for one in singles):
            wrong.append(name)
    if forward.is_prefill_only != all(one.is_prefill_only for one in singles):
        wrong.append("is_prefill_only")
    for i, (req, length) in enumerate(zip(batch.reqs, forward.seq_lens_cpu, strict=True)):
        slots = world.pool.req_to_token[req.req_pool_idx, :length]
        if not torch.equal(forward.kv_indices[i, :length], slots):
            wrong.append(f"kv_indices of row {i}")
        if forward.out_cache_loc is not None and forward.out_cache_loc[i] != slots[-1]:
            wrong.append(f"out_cache_loc of row {i}")
    return wrong


def wrong_derived(info: Any, infos: Sequence[Any]) -> list[str]:
    """Fields that follow from others and do not."""
    filtered = [i for i, one in enumerate(infos) if one.need_filter]
    wanted = filtered if 0 < len(filtered) < len(infos) else None
    found = None if info.filtered_rows is None else info.filtered_rows.tolist()
    return [] if found == wanted else [f"filtered_rows (derived): {found} is not {wanted}"]
