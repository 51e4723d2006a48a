"""The fake device: values as on the CPU, a device of its own, and an engine that does not notice."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sglang as sgl
from lab import fake_device
from lab.cases import DRAFT_SHAPES
from lab.fake_device import FakeDeviceMode, is_fake, values_of
from lab.fake_engine import fake_cuda


@pytest.fixture(scope="module")
def device() -> torch.device:
    return fake_device.device()


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6).to(device)


def test_there_and_back(x: torch.Tensor, device: torch.device) -> None:
    assert x.device == device and is_fake(x)
    assert torch.equal(x.cpu(), torch.arange(24.0).reshape(4, 6))
    assert not is_fake(x.cpu())
    assert x.to(torch.float64).dtype == torch.float64
    assert torch.tensor([1, 2], device=device).tolist() == [1, 2]
    assert x.new_empty(3).device == torch.zeros(2, device=device).device == device


def test_views_share_memory_and_copies_do_not(x: torch.Tensor) -> None:
    assert x.t().stride() == (1, 6) and not x.t().is_contiguous()
    x.t().contiguous().zero_()
    assert x.sum().item() == 276
    x[1:3, ::2].add_(100)
    x.unbind(1)[1].mul_(0)
    x.view(-1)[0] = -1
    x.detach()[0, 2] = -2
    x[:][0, 3] = -3
    expected = torch.arange(24.0).reshape(4, 6)
    expected[1:3, ::2] += 100
    expected[:, 1] = 0
    expected[0, :4] = torch.tensor([-1.0, 0, -2, -3])
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(values_of(x[2:, 1:4].t()), expected[2:, 1:4].t())


def test_a_view_in_another_type(x: torch.Tensor) -> None:
    bits = x.view(torch.int32)
    assert torch.equal(bits.cpu(), torch.arange(24.0).reshape(4, 6).view(torch.int32))
    bits.zero_()
    assert not x.any().item()


def test_changes_in_place_of_what_a_tensor_says_of_itself(device: torch.device) -> None:
    w = torch.arange(6.0, device=device).view(2, 3)
    assert w.unsqueeze_(0).shape == (1, 2, 3) and w.shape == (1, 2, 3)
    assert w.squeeze_(0).t_().stride() == (1, 3)
    assert w.cpu().tolist() == [[0, 3], [1, 4], [2, 5]]
    empty = torch.empty(0, device=device)
    empty.resize_(5).fill_(2)
    assert empty.cpu().tolist() == [2] * 5


def test_operations(x: torch.Tensor, device: torch.device) -> None:
    host = x.cpu()
    out = torch.empty(4, 6, device=device)
    assert torch.add(x, x, out=out) is out
    rows = torch.tensor([2, 0], device=device)
    q = torch.randn(1, 2, 3, 4)
    for found, expected in (
        (out, host + host),
        (x @ x.t(), host @ host.t()),
        (x[rows], host[[2, 0]]),
        (torch.where(x > 3, x, 2.0), torch.where(host > 3, host, 2.0)),
        (2 - x, 2 - host),
        (torch.cat([x, x]), torch.cat([host, host])),
        (torch.softmax(x, -1), torch.softmax(host, -1)),
        (
            F.scaled_dot_product_attention(*[q.to(device)] * 3),
            F.scaled_dot_product_attention(q, q, q),
        ),
    ):
        assert is_fake(found)
        torch.testing.assert_close(found.cpu(), expected)
    assert (x.max().item(), bool((x > 22).any()), x[0].tolist()) == (23, True, host[0].tolist())


def test_host_and_device_do_not_mix(x: torch.Tensor) -> None:
    host = torch.ones(4, 6)
    for mix in (
        lambda: x + host,
        lambda: host + x,
        lambda: torch.cat([x, host]),
        lambda: x @ host.t(),
        lambda: x.index_select(0, torch.tensor([0])),
        lambda: x.index_select(0, torch.tensor(0)),
        lambda: torch.where(host > 0, x, x),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mix()
    assert (x + torch.tensor(1.0)).sum().item() == 300  # a number may come from anywhere


def test_what_cannot_be_is_refused(x: torch.Tensor, device: torch.device) -> None:
    rows = torch.tensor([0, 1], device=device)
    host = torch.zeros(4, 6)
    z = torch.tensor([1 + 2j]).to(device)
    for act, kind in (
        (lambda: z.conj(), NotImplementedError),
        (lambda: torch._neg_view(x), NotImplementedError),
        (lambda: x.as_strided((10, 10), (6, 1)), RuntimeError),
        (lambda: x.set_(torch.ones(3, device=device)), NotImplementedError),
        (lambda: x.__setitem__(rows, torch.zeros(2, 6)), RuntimeError),
        (lambda: host.__setitem__(rows, 1.0), RuntimeError),
        (lambda: host[rows], RuntimeError),
    ):
        with pytest.raises(kind):
            act()


def test_a_deep_copy() -> None:
    with FakeDeviceMode():
        x = torch.ones(3, device=fake_device.device())
        twin = copy.deepcopy(x)
        twin.zero_()
        assert x.tolist() == [1, 1, 1] and is_fake(twin)


def test_pinned_memory_is_kept_in_the_books() -> None:
    with FakeDeviceMode():
        made = torch.tensor([1, 2], pin_memory=True)
        assert made.is_pinned() and made[1:].is_pinned()
        plain = torch.tensor([1, 2], pin_memory=False)
        assert not plain.is_pinned()
        pinned = plain.pin_memory()
        assert pinned.is_pinned() and torch.equal(pinned, plain) and pinned is not plain
        assert pinned.pin_memory() is pinned
        assert torch.empty(3, pin_memory=True).is_pinned()


# --- An engine ----------------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "normal": {"disable_overlap_schedule": True},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 8},
    "retraction": {"max_total_tokens": 96, "page_size": 4, "chunked_prefill_size": 8},
    "chain": {"speculative_algorithm": "EAGLE"},
    "tree": {"speculative_algorithm": "EAGLE", **DRAFT_SHAPES["tree"]},
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0, "sampling_seed": 1, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.3},
    {"temperature": 0, "presence_penalty": 0.2, "repetition_penalty": 1.3},
    {"temperature": 0, "min_new_tokens": 3, "logit_bias": {"7": 2.0}},
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gives_the_same_tokens(kind: str, tiny_paths: tuple[str, str]) -> None:
    path, draft = tiny_paths
    arguments = {"max_total_tokens": 512} | KINDS[kind]
    if "speculative_algorithm" in arguments:
        arguments["speculative_draft_model_path"] = draft

    def tokens(device: str, context: Any) -> list[tuple[list[int], int]]:
        with (
            context(),
            sgl.Engine(
                path,
                load_format="dummy",
                skip_tokenizer_init=True,
                device=device,
                dtype="float32",
                thread_context=context,
                **arguments,
            ) as engine,
        ):
            results = engine.generate(
                input_ids=[[5 + i, 9, 7, i] * (1 + i) for i in range(len(PARAMS))],
                sampling_params=[{"max_new_tokens": 16, "ignore_eos": True, **p} for p in PARAMS],
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=2,
            )
        return [(r["output_ids"], r["meta_info"]["retraction_count"]) for r in results]

    expected = tokens("cpu", contextlib.nullcontext)
    with fake_cuda():
        assert tokens("cuda", FakeDeviceMode) == expected
    assert (kind == "retraction") == any(count for _, count in expected)
