"""Settings of an engine: what is taken, what is filled in, what is refused and how."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import common
from sglang.srt.utils.common import Platform, register_platform

FIELDS = {f.name: f for f in dataclasses.fields(ServerArgs)}
DEFAULTS = {
    "tokenizer_path": None,
    "skip_tokenizer_init": False,
    "load_format": "auto",
    "device": "cpu",
    "dtype": "float32",
    "context_length": None,
    "page_size": 1,
    "max_total_tokens": 16384,
    "max_running_requests": 64,
    "chunked_prefill_size": 2048,
    "max_prefill_tokens": 16384,
    "enable_mixed_chunk": False,
    "disable_overlap_schedule": False,
    "schedule_conservativeness": 1.0,
    "random_seed": 42,
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "penalty_backend": "sparse",
    "log_level": None,
}
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def args(tmp_path: Path) -> Callable[..., ServerArgs]:
    """Make arguments for a directory that exists."""
    return lambda **kwargs: ServerArgs.from_kwargs(**{"model_path": str(tmp_path), **kwargs})


@pytest.fixture
def spec(args: Callable[..., ServerArgs], tmp_path: Path) -> Callable[..., ServerArgs]:
    """Make arguments of an engine that speculates."""
    names = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(tmp_path)}
    return lambda **kwargs: args(**{**names, **kwargs})


# --- What is taken ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEFAULTS)
def test_none_means_the_default(name: str, args: Callable[..., ServerArgs]) -> None:
    assert getattr(args(), name) == DEFAULTS[name]
    assert getattr(args(**{name: None}), name) == DEFAULTS[name]


def test_every_field_has_a_default_here() -> None:
    assert FIELDS.keys() == DEFAULTS.keys() | {"model_path"}


GOOD = {
    "tokenizer_path": ["/somewhere"],
    "skip_tokenizer_init": [True],
    "load_format": ["auto", "safetensors", "dummy"],
    "dtype": ["float32", "float", "bfloat16", "float16", "half"],
    "context_length": [2, 4096],
    "page_size": [1, 16, 64],
    "max_total_tokens": [1, 100000],
    "max_running_requests": [1, 1000],
    "chunked_prefill_size": [-1, 1, 8192],
    "max_prefill_tokens": [1],
    "enable_mixed_chunk": [True],
    "disable_overlap_schedule": [True],
    "schedule_conservativeness": [0.01, 1, 3.5],
    "random_seed": [0, 2**63 - 1],
    "penalty_backend": ["dense", "sparse"],
    "log_level": ["info"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in GOOD.items() for v in values])
def test_good_values_are_kept(name: str, value: Any, args: Callable[..., ServerArgs]) -> None:
    assert getattr(args(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["model_path", "tokenizer_path", "speculative_draft_model_path"])
def test_paths_may_be_path_objects(
    name: str, spec: Callable[..., ServerArgs], tmp_path: Path
) -> None:
    assert getattr(spec(**{name: tmp_path}), name) == str(tmp_path)


# --- What is refused ----------------------------------------------------------------------------

BAD = {
    "model_path": [None, 3, "/no/such/directory", ""],
    "tokenizer_path": [3, ["x"]],
    "skip_tokenizer_init": [1, 0, "yes", []],
    "load_format": ["gguf", "", 3, "AUTO"],
    "device": ["tpu", "", 3, Path("cpu"), "cuda:1", "cpu:0"],
    "dtype": ["int8", "fp32", "", 16, Path("half"), torch.float32],
    "context_length": [0, 1, -5, 2.0, "64", True],
    "page_size": [0, -1, 1.0, "16", True, NAN],
    "max_total_tokens": [0, -1, 2.5, "all", True, INF],
    "max_running_requests": [0, -4, 8.0, "many", False],
    "chunked_prefill_size": [0, -2, 64.0, "no", True],
    "max_prefill_tokens": [0, -1, 16.0, "all", True],
    "enable_mixed_chunk": [1, "true"],
    "disable_overlap_schedule": [0, "false"],
    "schedule_conservativeness": [0, -1.0, NAN, INF, "1.0", True],
    "random_seed": [-1, 2**63, 1.0, "42", True],
    "speculative_algorithm": ["MEDUSA", "", 5, Path("eagle")],
    "speculative_draft_model_path": ["/no/such/directory", 3],
    "speculative_num_steps": [0, -1, 2.0, "3", True],
    "speculative_eagle_topk": [0, -1, 2.0, "3", True],
    "speculative_num_draft_tokens": [0, 1, -1, 4.0, "4", True],
    "penalty_backend": [3, b"sparse", "thin", ""],
    "log_level": [3, b"info", "loud", ""],
}


def test_trees_that_sparse_penalties_cannot_hold(spec: Callable[..., ServerArgs]) -> None:
    from sglang.srt.sampling.penaltylib.sparse_layout import MAX_TOKENS

    large = {"speculative_num_steps": 9, "speculative_eagle_topk": 4}
    spec(speculative_num_draft_tokens=MAX_TOKENS, penalty_backend="sparse", **large)
    spec(speculative_num_draft_tokens=MAX_TOKENS + 1, penalty_backend="dense", **large)
    with pytest.raises(
        ValueError, match=rf"speculative_num_draft_tokens must be at most {MAX_TOKENS}"
    ):
        spec(speculative_num_draft_tokens=MAX_TOKENS + 1, penalty_backend="sparse", **large)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_bad_values_are_refused_by_name(
    name: str, value: Any, spec: Callable[..., ServerArgs], args: Callable[..., ServerArgs]
) -> None:
    make = spec if name.startswith("speculative") else args
    with pytest.raises(ValueError, match=rf"^{name} must|^device must") as caught:
        make(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["page_size", "max_total_tokens", "random_seed"])
def test_a_huge_number_is_refused_by_the_name_of_its_field(
    name: str, args: Callable[..., ServerArgs]
) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must .*got <int>"):
        args(**{name: 10**5000})


def test_every_field_has_bad_values_here() -> None:
    assert BAD.keys() == FIELDS.keys()


def test_unknown_names_are_all_named(args: Callable[..., ServerArgs]) -> None:
    with pytest.raises(ValueError, match="unknown server arguments: pagesize, tp_size"):
        args(tp_size=2, pagesize=1)


def test_a_model_is_required() -> None:
    with pytest.raises(ValueError, match="model_path is required"):
        ServerArgs.from_kwargs(page_size=1)


class Absent(Platform):
    def is_available(self) -> bool:
        return False


def test_a_device_that_is_not_there_is_refused(
    args: Callable[..., ServerArgs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "_platforms", dict(common._platforms))
    register_platform(Absent("cuda", torch.device("cpu")))
    with pytest.raises(ValueError, match="device 'cuda' is not available on this machine"):
        args(device="cuda")


# --- Combinations -------------------------------------------------------------------------------


def test_chunks_are_whole_pages(args: Callable[..., ServerArgs]) -> None:
    assert args(page_size=16, chunked_prefill_size=64).chunked_prefill_size == 64
    assert args(page_size=16, chunked_prefill_size=-1).chunked_prefill_size == -1
    with pytest.raises(ValueError, match=r"multiple of page_size \(16\), got 40"):
        args(page_size=16, chunked_prefill_size=40)


@pytest.mark.parametrize("page_size", [1, 24, 48, 4096])
def test_the_chunks_that_nobody_chose_fit_any_page(
    page_size: int, args: Callable[..., ServerArgs]
) -> None:
    size = args(page_size=page_size).chunked_prefill_size
    assert size % page_size == 0
    assert 2048 <= size < 2048 + page_size


def test_the_pool_holds_a_page(args: Callable[..., ServerArgs]) -> None:
    assert args(page_size=16, max_total_tokens=16).max_total_tokens == 16
    with pytest.raises(ValueError, match="max_total_tokens must be at least page_size, got 15"):
        args(page_size=16, max_total_tokens=15)


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_an_automatic_type_is_float32_on_a_cpu_and_the_checkpoints_elsewhere(
    written: dict[str, str],
    dtype: torch.dtype,
    args: Callable[..., ServerArgs],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert args().torch_dtype == torch.float32
    monkeypatch.setattr(common, "_platforms", dict(common._platforms))
    register_platform(Platform("cuda", torch.device("cpu")))
    assert args(device="cuda").torch_dtype == dtype


@pytest.mark.parametrize("name", [n for n in FIELDS if n.startswith("speculative_")][1:])
def test_speculation_needs_an_algorithm(name: str, args: Callable[..., ServerArgs]) -> None:
    value = "/somewhere" if name.endswith("path") else 2
    with pytest.raises(ValueError, match=f"{name}={value!r} needs speculative_algorithm"):
        args(**{name: value})


def test_an_algorithm_needs_a_draft(args: Callable[..., ServerArgs]) -> None:
    with pytest.raises(ValueError, match="speculative_draft_model_path must be a directory"):
        args(speculative_algorithm="EAGLE")


def test_defaults_of_speculation(spec: Callable[..., ServerArgs]) -> None:
    chain = spec(speculative_algorithm="eagle")
    shape = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    assert chain.speculative_algorithm == "EAGLE"
    assert [getattr(chain, name) for name in shape] == [3, 1, 4]
    assert chain.spec_alloc_len == 4
    tree = spec(speculative_num_steps=2, speculative_eagle_topk=4)
    assert [getattr(tree, name) for name in shape] == [2, 4, 9]
    assert tree.spec_alloc_len == 9


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "slots"),
    [(3, 1, 4, 4), (1, 1, 2, 2), (3, 2, 2, 6), (3, 2, 11, 11), (1, 4, 5, 5), (5, 4, 8, 20)],
)
def test_what_a_speculative_step_writes(
    steps: int, topk: int, nodes: int, slots: int, spec: Callable[..., ServerArgs]
) -> None:
    made = spec(
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    assert made.spec_alloc_len == slots


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "allowed"),
    [
        (3, 1, 3, r"\[4, 4\]"),
        (3, 1, 5, r"\[4, 4\]"),
        (3, 2, 12, r"\[2, 11\]"),
        (1, 3, 5, r"\[2, 4\]"),
    ],
)
def test_a_tree_has_as_many_nodes_as_it_has_candidates(
    steps: int, topk: int, nodes: int, allowed: str, spec: Callable[..., ServerArgs]
) -> None:
    with pytest.raises(
        ValueError, match=f"num_draft_tokens must be in {allowed} with .*got {nodes}"
    ):
        spec(
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=nodes,
        )


def test_a_pool_that_speculation_fills_alone_is_refused(spec: Callable[..., ServerArgs]) -> None:
    assert spec(max_total_tokens=10).spec_alloc_len == 4
    for arguments in ({"max_total_tokens": 9}, {"max_total_tokens": 15, "page_size": 8}):
        with pytest.raises(ValueError, match="max_total_tokens must leave a request two tokens"):
            spec(**arguments)


def test_speculation_does_not_mix(
    spec: Callable[..., ServerArgs], caplog: pytest.LogCaptureFixture
) -> None:
    assert not spec(enable_mixed_chunk=True).enable_mixed_chunk
    assert "enable_mixed_chunk is switched off" in caplog.text
    caplog.clear()
    assert not spec().enable_mixed_chunk
    assert not caplog.text


def test_without_speculation_no_step_writes_ahead(args: Callable[..., ServerArgs]) -> None:
    assert args().spec_alloc_len == 0
