"""What blocks and what does not: each row of the table with the right answer."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lab import fake_device
from lab.transfer_ledger import BlockingTransfer, TransferLedger

Make = Callable[[torch.device], Any]


def on(device: torch.device) -> torch.Tensor:
    return torch.arange(12.0, device=device).reshape(3, 4)


def pinned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


def mask(device: torch.device) -> torch.Tensor:
    return on(device) > 5


def do_if(x: torch.Tensor) -> None:
    if x.sum() > 0:
        pass


# What is done, after `prepare` outside the ledger's view; then (kind, blocks, bytes) of each transfer.
ROWS: dict[str, tuple[Callable[..., Any], Make, list[tuple[str, bool, int]]]] = {
    # Tensors made of Python's data on the device
    "tensor(list, device)": (
        lambda d: torch.tensor([1, 2, 3], device=d),
        lambda d: (d,),
        [("H2D", True, 24)],
    ),
    "tensor(list, dtype, device)": (
        lambda d: torch.tensor([1, 2, 3], dtype=torch.int32, device=d),
        lambda d: (d,),
        [("H2D", True, 12)],
    ),
    "tensor(number, device)": (
        lambda d: torch.tensor(1.0, device=d),
        lambda d: (d,),
        [("H2D", True, 4)],
    ),
    "as_tensor(list, device)": (
        lambda d: torch.as_tensor([1, 2], device=d),
        lambda d: (d,),
        [("H2D", True, 16)],
    ),
    "as_tensor(array, device)": (
        lambda d: torch.as_tensor(np.zeros(3), device=d),
        lambda d: (d,),
        [("H2D", True, 24)],
    ),
    "new_tensor(list)": (lambda x: x.new_tensor([1.0]), lambda d: (on(d),), [("H2D", True, 4)]),
    "tensor(list)": (lambda: torch.tensor([1, 2]), lambda d: (), []),
    "tensor(host tensor, device)": (
        lambda h, d: torch.tensor(h, device=d),
        lambda d: (torch.zeros(3), d),
        [("H2D", True, 12)],
    ),
    "as_tensor(host tensor, device)": (
        lambda h, d: torch.as_tensor(h, device=d),
        lambda d: (torch.zeros(3), d),
        [("H2D", True, 12)],
    ),
    "tensor([numbers of the device])": (
        lambda a, b: torch.tensor([a, b, 1]),
        lambda d: on(d)[0, :2].unbind(),
        [("D2H", True, 4), ("D2H", True, 4)],
    ),
    "tensor([numbers of the device], device)": (
        lambda a, d: torch.tensor([a, 1], device=d),
        lambda d: (on(d)[0, 0], d),
        [("D2H", True, 4), ("H2D", True, 8)],
    ),
    "as_tensor(tensor of the device)": (
        lambda x: torch.as_tensor(x, device=x.device),
        lambda d: (on(d),),
        [],
    ),
    # To the device
    "to(device)": (lambda h, d: h.to(d), lambda d: (torch.zeros(3), d), [("H2D", True, 12)]),
    "cuda()": (lambda h: h.cuda(), lambda d: (torch.zeros(3),), [("H2D", True, 12)]),
    "to(device) from pinned": (lambda h, d: h.to(d), lambda d: (pinned(3), d), [("H2D", True, 12)]),
    "to(device, non_blocking) from pageable": (
        lambda h, d: h.to(d, non_blocking=True),
        lambda d: (torch.zeros(3), d),
        [("H2D", True, 12)],
    ),
    "to(device, non_blocking) from pinned": (
        lambda h, d: h.to(d, non_blocking=True),
        lambda d: (pinned(3), d),
        [("H2D", False, 12)],
    ),
    "to(device=, non_blocking) from pinned": (
        lambda h, d: h.to(device=d, non_blocking=True),
        lambda d: (pinned(3), d),
        [("H2D", False, 12)],
    ),
    "to('cuda', non_blocking) from pinned": (
        lambda h: h.to("cuda", non_blocking=True),
        lambda d: (pinned(3),),
        [("H2D", False, 12)],
    ),
    "to(device, non_blocking) from a part of pinned": (
        lambda h, d: h.to(d, non_blocking=True),
        lambda d: (pinned(4, 3)[1:3], d),
        [("H2D", False, 24)],
    ),
    "to(device, non_blocking) from pinned, transposed": (
        lambda h, d: h.to(d, non_blocking=True),
        lambda d: (pinned(4, 3).t(), d),
        [("H2D", False, 48)],
    ),
    "to(device, non_blocking) from pinned with gaps": (
        lambda h, d: h.to(d, non_blocking=True),
        lambda d: (pinned(4, 3)[:, :2], d),
        [("H2D", True, 32)],
    ),
    "to(device, dtype, non_blocking) from pinned": (
        # The device changes the type.
        lambda h, d: h.to(d, torch.float64, non_blocking=True),
        lambda d: (pinned(3), d),
        [("H2D", False, 12)],
    ),
    "to(device, dtype, True) from pinned": (
        lambda h, d: h.to(d, torch.float64, True),
        lambda d: (pinned(3), d),
        [("H2D", False, 12)],
    ),
    "to(device, dtype)": (
        # The host changes the type.
        lambda h, d: h.to(d, torch.float64),
        lambda d: (torch.zeros(3), d),
        [("H2D", True, 24)],
    ),
    "to(device, dtype, non_blocking) from pinned, transposed": (
        lambda h, d: h.to(d, torch.float64, non_blocking=True),
        lambda d: (pinned(4, 3).t(), d),
        [("H2D", True, 48)],
    ),
    "cuda(None, True) from pinned": (
        lambda h: h.cuda(None, True),
        lambda d: (pinned(3),),
        [("H2D", False, 12)],
    ),
    "copy_(host)": (
        lambda x, h: x.copy_(h),
        lambda d: (on(d), torch.zeros(3, 4)),
        [("H2D", True, 48)],
    ),
    "copy_(pageable, non_blocking)": (
        lambda x, h: x.copy_(h, non_blocking=True),
        lambda d: (on(d), torch.zeros(3, 4)),
        [("H2D", True, 48)],
    ),
    "copy_(pinned, non_blocking)": (
        lambda x, h: x.copy_(h, non_blocking=True),
        lambda d: (on(d), pinned(3, 4)),
        [("H2D", False, 48)],
    ),
    "copy_(pinned, non_blocking) into another layout": (
        lambda x, h: x.t().copy_(h, non_blocking=True),
        lambda d: (on(d), pinned(4, 3)),
        [("H2D", False, 48)],
    ),
    "copy_(pinned, non_blocking) of another type": (
        lambda x, h: x.copy_(h, non_blocking=True),
        lambda d: (on(d), pinned(3, 4, dtype=torch.int64)),
        [("H2D", False, 96)],
    ),
    "copy_(pinned, non_blocking) of one row to all": (
        lambda x, h: x.copy_(h, non_blocking=True),
        lambda d: (on(d), pinned(4)),
        [("H2D", True, 48)],
    ),
    "x[0] = host": (
        lambda x, h: x.__setitem__(0, h),
        lambda d: (on(d), torch.zeros(4)),
        [("H2D", True, 16)],
    ),
    # To the host
    "to('cpu')": (lambda x: x.to("cpu"), lambda d: (on(d),), [("D2H", True, 48)]),
    "cpu()": (lambda x: x.cpu(), lambda d: (on(d),), [("D2H", True, 48)]),
    "tolist()": (lambda x: x.tolist(), lambda d: (on(d),), [("D2H", True, 48)]),
    "item()": (lambda x: x[0, 0].item(), lambda d: (on(d),), [("D2H", True, 4)]),
    "int()": (lambda x: int(x[0, 1]), lambda d: (on(d),), [("D2H", True, 4)]),
    "float()": (lambda x: float(x[0, 1]), lambda d: (on(d),), [("D2H", True, 4)]),
    "bool()": (lambda x: bool(x[0, 1]), lambda d: (on(d),), [("D2H", True, 4)]),
    "if": (do_if, lambda d: (on(d),), [("D2H", True, 1)]),
    "range(tensor)": (
        lambda x: range(x),
        lambda d: (torch.ones(3, dtype=torch.int64, device=d).sum(),),
        [("D2H", True, 8)],
    ),
    "x[:number of the device]": (
        lambda x, n: x[:n],
        lambda d: (on(d), torch.tensor(2, device=d)),
        [("D2H", True, 8)],
    ),
    "arange(number of the device)": (
        lambda n, d: torch.arange(n, device=d),
        lambda d: (torch.tensor(2, device=d), d),
        [("D2H", True, 8)],
    ),
    "allclose": (torch.allclose, lambda d: (on(d), on(d)), [("D2H", True, 1)]),
    "in": (lambda x: 3.0 in x, lambda d: (on(d),), [("D2H", True, 1)]),
    "equal": (torch.equal, lambda d: (on(d), on(d)), [("D2H", True, 1)]),
    "to('cpu', non_blocking)": (
        lambda x: x.to("cpu", non_blocking=True),
        lambda d: (on(d),),
        [("D2H", False, 48)],
    ),
    "to('cpu', dtype, non_blocking)": (
        lambda x: x.to("cpu", torch.float64, non_blocking=True),
        lambda d: (on(d),),
        [("D2H", False, 96)],
    ),
    "to('cpu', dtype)": (
        lambda x: x.to("cpu", torch.float64),
        lambda d: (on(d),),
        [("D2H", True, 48)],
    ),
    "pinned.copy_(x, non_blocking)": (
        lambda h, x: h.copy_(x, non_blocking=True),
        lambda d: (pinned(3, 4), on(d)),
        [("D2H", False, 48)],
    ),
    "pinned.copy_(x)": (
        lambda h, x: h.copy_(x),
        lambda d: (pinned(3, 4), on(d)),
        [("D2H", True, 48)],
    ),
    "pageable.copy_(x, non_blocking)": (
        lambda h, x: h.copy_(x, non_blocking=True),
        lambda d: (torch.zeros(3, 4), on(d)),
        [("D2H", True, 48)],
    ),
    "pinned.copy_(x, non_blocking) of another type": (
        # The device changes the type, the host's side is copied to as it is.
        lambda h, x: h.copy_(x, non_blocking=True),
        lambda d: (pinned(3, 4, dtype=torch.float64), on(d)),
        [("D2H", False, 96)],
    ),
    "pinned with gaps.copy_(x, non_blocking)": (
        lambda h, x: h.copy_(x, non_blocking=True),
        lambda d: (pinned(3, 5)[:, :4], on(d)),
        [("D2H", True, 48)],
    ),
    # Shapes that the device finds out
    "x[mask]": (lambda x, m: x[m], lambda d: (on(d), mask(d)), [("D2H", True, 8)]),
    "x[mask] = number": (lambda x, m: x.__setitem__(m, 1.0), lambda d: (on(d), mask(d)), []),
    "x[mask] = tensor": (
        lambda x, m, v: x.__setitem__(m, v),
        lambda d: (on(d), mask(d), torch.ones(6, device=d)),
        [("D2H", True, 8)],
    ),
    "x[mask] = number of the device": (
        lambda x, m, v: x.__setitem__(m, v),
        lambda d: (on(d), mask(d), torch.ones((), device=d)),
        [("D2H", True, 8)],
    ),
    "bincount": (
        torch.bincount,
        lambda d: (torch.ones(3, dtype=torch.int64, device=d),),
        [("D2H", True, 8)],
    ),
    "nonzero": (lambda m: m.nonzero(), lambda d: (mask(d),), [("D2H", True, 8)]),
    "where(mask)": (lambda m: torch.where(m), lambda d: (mask(d),), [("D2H", True, 8)]),
    "unique": (lambda x: x.unique(), lambda d: (on(d),), [("D2H", True, 8)]),
    "unique_consecutive": (
        lambda x: x.unique_consecutive(),
        lambda d: (on(d),),
        [("D2H", True, 8)],
    ),
    "masked_select": (
        lambda x, m: x.masked_select(m),
        lambda d: (on(d), mask(d)),
        [("D2H", True, 8)],
    ),
    "repeat_interleave(tensor)": (
        lambda x, n: x.repeat_interleave(n, dim=0),
        lambda d: (on(d), torch.ones(3, dtype=torch.int64, device=d)),
        [("D2H", True, 8)],
    ),
    "repeat_interleave(tensor, output_size)": (
        lambda x, n: x.repeat_interleave(n, dim=0, output_size=3),
        lambda d: (on(d), torch.ones(3, dtype=torch.int64, device=d)),
        [],
    ),
    "repeat_interleave(number)": (
        lambda x: x.repeat_interleave(2, dim=0),
        lambda d: (on(d),),
        [],
    ),
    "print": (lambda x: f"{x}", lambda d: (on(d),), [("D2H", True, 48)]),
    "_foreach_copy_": (
        lambda x, h: (torch._foreach_copy_([x], [h]), torch._foreach_copy_([h], [x])),
        lambda d: (on(d), torch.zeros(3, 4)),
        [("H2D", True, 48), ("D2H", True, 48)],
    ),
    "linspace(number of the device)": (
        lambda n, d: torch.linspace(n, 1, 4, device=d),
        lambda d: (torch.tensor(0.0, device=d), d),
        [("D2H", True, 4)],
    ),
    "host[mask] = number of the device": (
        lambda h, v: h.__setitem__(h > 1, v),
        lambda d: (torch.arange(4.0), torch.ones((), device=d)),
        [("D2H", True, 4)],
    ),
    # Indices
    "x[list]": (lambda x: x[[0, 2]], lambda d: (on(d),), [("H2D", True, 16)]),
    "x[list] = number": (
        lambda x: x.__setitem__([0, 2], 1.0),
        lambda d: (on(d),),
        [("H2D", True, 16), ("H2D", True, 4)],
    ),
    "x[:, list]": (lambda x: x[:, [0, 2, 3]], lambda d: (on(d),), [("H2D", True, 24)]),
    "x[array]": (lambda x: x[np.array([0, 2])], lambda d: (on(d),), [("H2D", True, 16)]),
    "x[host tensor]": (
        lambda x, i: x[i],
        lambda d: (on(d), torch.tensor([0, 2])),
        [("H2D", True, 16)],
    ),
    "x[pinned tensor]": (
        lambda x, i: x[i],
        lambda d: (on(d), pinned(2, dtype=torch.int64)),
        [("H2D", True, 16)],
    ),
    "x[host mask]": (
        # The host makes numbers of it.
        lambda x, m: x[m],
        lambda d: (on(d), torch.tensor([True, False, True])),
        [("H2D", True, 16)],
    ),
    "x[host tensor] = number": (
        lambda x, i: x.__setitem__(i, 1.0),
        lambda d: (on(d), torch.tensor([0, 2])),
        [("H2D", True, 16), ("H2D", True, 4)],
    ),
    "x[tensor] = number": (
        # A number is copied where it cannot fill.
        lambda x, i: x.__setitem__(i, 1.0),
        lambda d: (on(d), torch.tensor([0, 2], device=d)),
        [("H2D", True, 4)],
    ),
    "x[1, 2] = number": (
        # And where it is all that there is.
        lambda x: x.__setitem__((1, 2), 1.0),
        lambda d: (on(d),),
        [("H2D", True, 4)],
    ),
    "x[tensor]": (
        lambda x, i: x[i],
        lambda d: (on(d), torch.tensor([0, 2], device=d)),
        [],
    ),
    "x[tensor of one number]": (
        lambda x, i: x[i],
        lambda d: (on(d), torch.tensor(1, device=d)),
        [("D2H", True, 8)],
    ),
    # Numbers of one side that the other one needs
    "masked_fill(mask, number of the device)": (
        lambda x, m, v: x.masked_fill(m, v),
        lambda d: (on(d), mask(d), torch.ones((), device=d)),
        [("D2H", True, 4)],
    ),
    "index_fill_(tensor, number of the device)": (
        lambda x, i, v: x.index_fill_(0, i, v),
        lambda d: (on(d), torch.tensor([0], device=d), torch.ones((), device=d)),
        [("D2H", True, 4)],
    ),
    "multinomial": (
        lambda x: torch.multinomial(x, 1),
        lambda d: (torch.ones(3, device=d),),
        [("D2H", True, 4)],
    ),
    "where(mask, x, number of the host)": (
        torch.where,
        lambda d: (mask(d), on(d), torch.tensor(0.0)),
        [("H2D", True, 4)],
    ),
    # Nothing crosses
    "x[1:, ::2]": (lambda x: x[1:, ::2], lambda d: (on(d),), []),
    "x[0] = number": (lambda x: x.__setitem__(0, 1.0), lambda d: (on(d),), []),
    "fill_": (lambda x: x.fill_(3.0), lambda d: (on(d),), []),
    "zeros, full, arange": (
        lambda d: (
            torch.zeros(3, device=d),
            torch.full((3,), 2, device=d),
            torch.arange(3, device=d),
        ),
        lambda d: (d,),
        [],
    ),
    "arithmetic with numbers": (lambda x: (x + 1) * 2 / 3 - 4, lambda d: (on(d),), []),
    "arithmetic with a host's number": (
        lambda x, h: x + h,
        lambda d: (on(d), torch.tensor(2.0)),
        [],
    ),
    "where(mask, x, number)": (
        lambda x, m: torch.where(m, x, 0.0),
        lambda d: (on(d), mask(d)),
        [],
    ),
    "masked_fill, scatter, gather": (
        lambda x, m, i: (x.masked_fill(m, 0), x.scatter(1, i, 1.0), x.gather(1, i)),
        lambda d: (on(d), mask(d), torch.zeros((3, 1), dtype=torch.int64, device=d)),
        [],
    ),
    "matmul, softmax, argmax, sort, topk": (
        lambda x: (x @ x.t(), x.softmax(-1), x.argmax(-1), x.sort(-1), x.topk(2)),
        lambda d: (on(d),),
        [],
    ),
    "to(dtype), clone, copy_ on the device": (
        lambda x: (x.to(torch.float64), x.clone(), x.copy_(x.clone()), x.to(x.device)),
        lambda d: (on(d),),
        [],
    ),
    "work of the host": (
        lambda h: (h.tolist(), h[h > 0], h.nonzero(), h[[0]], h.sum().item(), h.to(torch.int32)),
        lambda d: (torch.arange(3.0),),
        [],
    ),
    "shapes, strides, views": (
        lambda x: (x.shape, x.numel(), x.view(-1), x.t(), x.unsqueeze(0), len(x), x.is_pinned()),
        lambda d: (on(d),),
        [],
    ),
}


@pytest.fixture(scope="module")
def device() -> torch.device:
    return fake_device.device()


@pytest.mark.parametrize("name", ROWS)
def test_what_blocks(name: str, device: torch.device) -> None:
    act, prepare, expected = ROWS[name]
    with fake_device.FakeDeviceMode():
        arguments = prepare(device)
    with TransferLedger() as ledger, fake_device.counted_copies() as copies:
        act(*arguments)
    found = [(t.kind, t.blocking, t.nbytes) for t in ledger.transfers]
    assert found == expected, ledger.report()
    # What really crossed, but for what happens inside an operation.
    inside = ("(size)", "(number)", "(values)", "equal")
    crossed = [(t.kind, t.nbytes) for t in ledger.transfers if not t.op.endswith(inside)]
    if name != "print":  # which fetches more than what it is called with
        assert crossed == copies
    for transfer in ledger.transfers:
        assert transfer.site.startswith("benchmark/test_transfer_ledger.py:")
        assert transfer.thread == threading.current_thread().name


def fetch(x: torch.Tensor) -> list[float]:
    return x.tolist()


def test_the_line_that_asked_is_named(device: torch.device) -> None:
    x = on(device)
    with TransferLedger() as ledger:
        fetch(x)
    (transfer,) = ledger.transfers
    line = fetch.__code__.co_firstlineno + 1
    assert transfer.site == f"benchmark/test_transfer_ledger.py:{line}"
    assert transfer.function == "fetch"
    assert transfer.via.startswith("benchmark/test_transfer_ledger.py:")
    assert transfer.pinned is False


def test_nothing_is_seen_outside(device: torch.device) -> None:
    x = on(device)
    with TransferLedger() as ledger:
        pass
    fetch(x)
    assert ledger.transfers == []


def test_a_thread_that_starts_inside_is_watched(device: torch.device) -> None:
    x = on(device)
    go, gone = threading.Event(), threading.Event()

    def early() -> None:
        go.wait()
        fetch(x)

    def late() -> None:
        fetch(x)
        gone.wait()
        fetch(x)  # when the ledger is closed

    outside = threading.Thread(target=early)
    outside.start()
    with TransferLedger() as ledger:
        go.set()
        outside.join()
        assert ledger.transfers == []
        inside = threading.Thread(target=late, name="inside")
        inside.start()
        while not ledger.transfers:
            pass
    gone.set()
    inside.join()
    assert [t.thread for t in ledger.transfers] == ["inside"]


def test_a_thread_that_runs_already_can_be_attached_once_or_more(device: torch.device) -> None:
    x = on(device)
    go = threading.Event()
    ledger = TransferLedger()

    def work() -> None:
        go.wait()
        with ledger.attach(), ledger.attach():
            fetch(x)
        fetch(x)

    thread = threading.Thread(target=work)
    thread.start()
    with ledger:
        go.set()
        thread.join()
    assert len(ledger.transfers) == 1


def test_raise_stops_before_the_transfer(device: torch.device) -> None:
    x = on(device)
    message = r"blocking D2H to of 48 bytes to pageable memory at "
    with (
        fake_device.counted_copies() as copies,
        pytest.raises(BlockingTransfer, match=message),
        TransferLedger(mode="raise") as ledger,
    ):
        torch.zeros(2, pin_memory=True).to(device, non_blocking=True)
        fetch(x)
    assert [t.blocking for t in ledger.transfers] == [False, True]
    assert copies == [("H2D", 8)]


def test_what_was_raised_and_lost_is_raised_at_the_end(device: torch.device) -> None:
    x = on(device)
    with (
        pytest.raises(BlockingTransfer, match="fetch"),
        TransferLedger(mode="raise"),
        contextlib.suppress(RuntimeError),
    ):
        fetch(x)


def test_what_is_allowed_may_block(device: torch.device) -> None:
    x = on(device)
    for site in (
        "test_transfer_ledger.py:fetch",
        "benchmark/test_transfer_ledger.py:fetch",
    ):
        with TransferLedger(mode="raise", allow=[site]) as ledger:
            fetch(x)
        assert ledger.blocking() == [] and ledger.transfers[0].allowed
    with TransferLedger(mode="raise", allow=["D2H test_transfer_ledger.py:fetch"]):
        fetch(x)
    for site in (
        "ledger.py:fetch",
        "test_transfer_ledger.py:fetch_all",
        "SYNC test_transfer_ledger.py:fetch",
    ):
        with pytest.raises(BlockingTransfer), TransferLedger(mode="raise", allow=[site]):
            fetch(x)
    with TransferLedger(allow=["test_transfer_ledger.py:test_what_is_allowed_may_block"]) as ledger:
        torch.zeros(2, pin_memory=True).to(device, non_blocking=True)
    assert not ledger.transfers[0].allowed  # it does not block


@pytest.mark.parametrize("site", ["fetch", "a.py", "a.py:18", "a.py:f:3", "", "COPY a.py:f"])
def test_an_entry_of_another_form_is_refused(site: str) -> None:
    with pytest.raises(ValueError, match=r"allow takes 'file\.py:function'"):
        TransferLedger(allow=[site])


def test_inference_mode_hides_nothing(device: torch.device) -> None:
    x = on(device)
    with TransferLedger() as ledger, fake_device.counted_copies() as copies, torch.inference_mode():
        x.cpu()
        torch.zeros(3).to(device)
        x.tolist()
        int(x[0, 0])
        bool((x >= 0).all())
        x.sum().item()
    assert [(t.kind, t.nbytes) for t in ledger.transfers] == copies
    assert len(copies) == 6


def test_open_ledgers_leave_each_other_alone(device: torch.device) -> None:
    before = (threading.Thread.start, torch.cuda.synchronize, fake_device.synchronize)
    steps = [threading.Event() for _ in range(3)]
    seen: list[int] = []

    def first() -> None:
        with TransferLedger() as ledger:
            steps[0].set()
            steps[1].wait()
        seen.append(len(ledger.transfers))
        steps[2].set()

    def second() -> None:
        steps[0].wait()
        with TransferLedger() as ledger:
            steps[1].set()
            steps[2].wait()
            fake_device.synchronize()
        seen.append(len(ledger.transfers))

    threads = [threading.Thread(target=act) for act in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0, 1]
    assert before == (threading.Thread.start, torch.cuda.synchronize, fake_device.synchronize)


def test_ledgers_nest_and_one_is_not_entered_twice(device: torch.device) -> None:
    x = on(device)
    with TransferLedger() as outer, TransferLedger() as inner:
        fetch(x)
        fake_device.synchronize()
    assert [t.kind for t in outer.transfers] == [t.kind for t in inner.transfers] == ["D2H", "SYNC"]
    with outer, pytest.raises(RuntimeError, match="open already"), outer:
        pass
    fetch(x)
    assert len(outer.transfers) == 2


def test_a_default_device_is_a_device(device: torch.device) -> None:
    for order in (0, 1):
        with contextlib.ExitStack() as stack:
            contexts = [torch.device(device), ledger := TransferLedger()]
            for context in contexts[order:] + contexts[:order]:
                stack.enter_context(context)
            assert torch.tensor([1, 2]).device == device
        assert [(t.kind, t.blocking, t.nbytes) for t in ledger.transfers] == [("H2D", True, 16)]


def test_cuda_that_is_only_said_to_be_there_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if torch.cuda.device_count() == 0:
        assert TransferLedger().device_type == fake_device.NAME


def test_waits_are_seen_and_put_back(device: torch.device) -> None:
    before = (torch.cuda.synchronize, torch.cuda.Event.synchronize, fake_device.synchronize)
    with TransferLedger() as ledger:
        torch.cuda.synchronize()
        torch.cuda.Event.synchronize(None)
        torch.cuda.Stream.synchronize(None)
        torch.accelerator.synchronize()
        fake_device.synchronize()
    assert [(t.kind, t.blocking, t.nbytes) for t in ledger.transfers] == [("SYNC", True, 0)] * 5
    assert before == (torch.cuda.synchronize, torch.cuda.Event.synchronize, fake_device.synchronize)


def test_steps(device: torch.device) -> None:
    x = on(device)
    with TransferLedger() as ledger:
        fetch(x)
        ledger.step = lambda: 7
        fetch(x)
        with ledger.in_step(3):
            fetch(x)
        fetch(x)
    assert [t.step for t in ledger.transfers] == [None, 7, 3, 7]


def test_one_row_a_call_site(device: torch.device) -> None:
    x = on(device)
    with TransferLedger(allow=["test_transfer_ledger.py:fetch"]) as ledger:
        for _ in range(3):
            fetch(x)
        torch.zeros(2, pin_memory=True).to(device, non_blocking=True)
        torch.tensor([1], device=device)
    rows = ledger.rows()
    assert [(r["calls"], r["bytes"], r["blocking"], r["allowed"], r["pinned"]) for r in rows] == [
        (3, 144, True, True, False),
        (1, 8, False, False, True),
        (1, 8, True, False, False),
    ]
    totals = json.loads(json.dumps(ledger.as_dict()))
    assert totals["rows"] == rows
    counts = {k: totals[k] for k in ("transfers", "blocking", "allowed", "asynchronous", "bytes")}
    assert counts == dict(transfers=5, blocking=1, allowed=3, asynchronous=1, bytes=160)
    lines = ledger.report().splitlines()
    assert [line.split()[0] for line in lines] == ["what", "allowed", "async", "BLOCKS", "1"]
    assert lines[-1] == "1 blocking, 3 blocking and allowed, 1 asynchronous"
    assert "test_transfer_ledger.py" in lines[1] and "fetch" in lines[1]


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be 'record' or 'raise', got 'log'"):
        TransferLedger(mode="log")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_what_blocks_on_cuda(name: str) -> None:
    act, prepare, expected = ROWS[name]
    arguments = prepare(torch.device("cuda"))
    with TransferLedger(sync_debug=True) as ledger:
        act(*arguments)
    assert [(t.kind, t.blocking, t.nbytes) for t in ledger.transfers] == expected
    assert ledger.compare()["missed"] == []
