"""A fixed piece of work that is timed beside each round of a workload.

On a shared machine the same code takes a different time each minute. What the machine does to the
anchor, it does to the round beside it too, so their ratio moves far less than either. An anchor never
changes: results of different commits, days and machines are comparable through it.

It runs in a process of its own, ``python -m lab.anchor KIND ...``, for the reason that `lab.remote`
gives.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lab import devices
from lab.remote import answer

KINDS = ("model", "host", "dense")


class Anchor:
    """A fixed workload of plain torch and Python.

    Parameters
    ----------
    kind : {"model", "host", "dense"}
        ``model`` reads weights again and again, as the decode steps of a real model do. ``host`` calls
        thousands of tiny operations, as a scheduler and a tiny model do. ``dense`` passes over logits of
        a vocabulary of 32,000, as dense penalties do.

    Notes
    -----
    ``model`` and ``dense`` are work of the device that is measured (see `lab.devices`), ``host`` is work
    of the host wherever forwards run.

    On the CPU ``model`` reads 85 MB of float32 weights and has a part for the interpreter, and ``dense``
    has 64 rows. On CUDA that would be the time of launching: there ``model`` reads 1 GiB, ``dense`` has
    1024 rows, each operation takes the device many times as long as the host, and what is told is the
    time between two events around all of them.
    """

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        self.kind = kind
        generator = torch.Generator().manual_seed(0)
        device = torch.device("cpu") if kind == "host" else devices.device()
        self._on_cuda = device.type == "cuda"
        outer, inner, count = (8192, 8192, 4) if self._on_cuda else (1536, 576, 24)
        rows = 1024 if self._on_cuda else 64
        self._x = torch.randn(8, inner, generator=generator).to(device)
        if kind == "model":
            weights = (torch.randn(outer, inner, generator=generator) for _ in range(count))
            self._weights = [weight.to(device) for weight in weights]
        if kind == "dense":
            self._logits = torch.randn(rows, 32_000, generator=generator).to(device)
            self._counts = torch.randint(0, 3, (rows, 32_000), generator=generator).to(device)

    def __call__(self) -> float:
        """Do the work.

        Returns
        -------
        float
            Seconds that it took.
        """
        with torch.inference_mode():
            return self._seconds_on_cuda() if self._on_cuda else self._seconds()

    def _seconds(self) -> float:
        started = time.perf_counter()
        if self.kind == "model":
            self._read_weights(passes=18)
            _python_loop(100_000)
        elif self.kind == "dense":
            self._penalize(passes=3)
        else:
            self._small_operations(calls=3000)
            _python_loop(400_000)
        return time.perf_counter() - started

    def _seconds_on_cuda(self) -> float:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        if self.kind == "model":
            self._read_weights(passes=12)
        else:
            self._penalize(passes=6)
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended) / 1e3

    def _read_weights(self, passes: int) -> None:
        for _ in range(passes):
            for weight in self._weights:
                F.linear(self._x, weight)

    def _penalize(self, passes: int) -> None:
        for _ in range(passes):
            x = self._logits - (self._counts * 0.2 + (self._counts > 0) * 0.1)
            x = torch.where(x < 0, x * 1.1, x / 1.1)
            torch.where(self._counts > 0, x, self._logits)

    def _small_operations(self, calls: int) -> None:
        # None of them is large enough to be split among threads.
        rows = torch.arange(7, -1, -1)
        for _ in range(calls):
            y = self._x.index_select(0, rows)
            y = torch.where(y > 0, y, self._x).add_(1).mul_(0.5)
            torch.cat((y, self._x))[:, :64].sum(dim=-1)


def _python_loop(turns: int) -> int:
    """Work for the interpreter alone."""
    seen: dict[int, int] = {}
    for i in range(turns):
        seen[i & 255] = seen.get(i & 255, 0) + i
    return len(seen)


def main(argv: Sequence[str] | None = None) -> None:
    """Run each anchor once for each question; answer with their ``seconds`` by kind."""
    parser = argparse.ArgumentParser(prog="lab.anchor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kinds", choices=KINDS, nargs="+", metavar="KIND")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    def make() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        anchors = {kind: Anchor(kind) for kind in args.kinds}
        for anchor in anchors.values():
            anchor()
        return lambda question: {"seconds": {kind: anchor() for kind, anchor in anchors.items()}}

    answer(make)


if __name__ == "__main__":
    main()
