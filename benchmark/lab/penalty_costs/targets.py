"""What the costs are held to, and whether they keep to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lab.penalty_costs.measuring import CellResult
from lab.penalty_costs.workload import Cell


@dataclass(frozen=True)
class Target:
    """Something that has to hold in all cells that it is about.

    Attributes
    ----------
    text : str
    device : {"cpu", "cuda", "any"}
    applies : callable
        Whether a cell belongs to it.
    value : callable
        What is held against `limit`; None where it was not measured.
    limit : float
    at_least : bool
        Whether `limit` is the smallest that will do, and not the largest.
    """

    text: str
    device: str
    applies: Callable[[Cell], bool]
    value: Callable[[CellResult], float | None]
    limit: float
    at_least: bool = True


@dataclass(frozen=True)
class Miss:
    """A cell that misses a target.

    Attributes
    ----------
    cell : Cell
    value : float
    floor : float or None
        What the floor itself reaches in this cell: upstream's time by the floor's, for a target about
        that ratio.
    """

    cell: Cell
    value: float
    floor: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met.

    Attributes
    ----------
    target : Target
    met : bool or None
        None where nothing of it was measured.
    worst : CellResult or None
    value : float or None
        The worst cell's.
    cells : int
        How many were looked at.
    misses : sequence of Miss
        The cells that miss it, the worst first.
    """

    target: Target
    met: bool | None
    worst: CellResult | None = None
    value: float | None = None
    cells: int = 0
    misses: Sequence[Miss] = ()


def _ratio(result: CellResult) -> float | None:
    return result.ratios.get("upstream")


def _smallest_ratio(result: CellResult) -> float | None:
    ratios = [result.ratios[name] for name in ("upstream", "overlap") if name in result.ratios]
    return min(ratios, default=None)


def _by_model(result: CellResult) -> float | None:
    predicted = result.predicted_us.get("sparse")
    return result.device_us / predicted if predicted else None


def _by_memory_bound(result: CellResult) -> float | None:
    """Bytes beyond the logits, by those that may be."""
    cell = result.cell
    if min(result.temporary_bytes.get("sparse", -1), result.state_bytes.get("sparse", -1)) < 0:
        return None
    held = result.state_bytes["sparse"] + result.temporary_bytes["sparse"]
    return held / (cell.batch_size * (32 * cell.seen + 65_536))


def _ratio_of_floor(result: CellResult) -> float | None:
    us = result.us
    return us["upstream"] / us["floor"] if {"upstream", "floor"} <= us.keys() else None


def _is_large(cell: Cell) -> bool:
    return cell.kind == "plain" and cell.batch_size >= 64 and cell.vocab_size >= 128_000


TARGETS: Final = (
    Target("never slower than upstream", "cpu", lambda c: True, _ratio, 1),
    Target(
        "plain, B >= 64, V >= 128k, seen <= 256: >= 15x",
        "cpu",
        lambda c: _is_large(c) and c.seen <= 256,
        _ratio,
        15,
    ),
    Target(
        "plain, B >= 64, V >= 128k, seen 2048: >= 5x",
        "cpu",
        lambda c: _is_large(c) and c.seen == 2048,
        _ratio,
        5,
    ),
    Target(
        "verification, B >= 8: >= 8x",
        "cpu",
        lambda c: c.is_draft and c.batch_size >= 8,
        _ratio,
        8,
    ),
    Target(
        "finish plus join, B = 64, V = 128k: >= 100x",
        "cpu",
        lambda c: c.kind == "join" and c.batch_size == 64 and c.vocab_size == 128_256,
        _ratio,
        100,
    ),
    Target(
        "extra memory <= 32 B a token seen + 64 KiB, a request",
        "any",
        lambda c: c.kind != "join",
        _by_memory_bound,
        1,
        at_least=False,
    ),
    Target(
        "device time <= 1.5x of the predicted floor",
        "cuda",
        lambda c: c.kind != "join",
        _by_model,
        1.5,
        at_least=False,
    ),
    Target(">= 5x faster than upstream everywhere", "cuda", lambda c: True, _smallest_ratio, 5),
)


def verdicts(
    results: Sequence[CellResult], device: str, targets: Sequence[Target] = TARGETS
) -> list[Verdict]:
    """Hold results that were measured on `device` against the targets."""
    return [_verdict(results, device, target) for target in targets]


def _verdict(results: Sequence[CellResult], device: str, target: Target) -> Verdict:
    found = [(target.value(r), r) for r in results if target.applies(r.cell)]
    found = [(value, r) for value, r in found if value is not None and not math.isnan(value)]
    if target.device not in (device, "any") or not found:
        return Verdict(target, None)
    sign = 1 if target.at_least else -1
    found.sort(key=lambda pair: sign * pair[0])
    misses = [
        Miss(result.cell, value, _ratio_of_floor(result) if target.value is _ratio else None)
        for value, result in found
        if sign * value < sign * target.limit
    ]
    value, worst = found[0]
    return Verdict(target, not misses, worst, value, len(found), misses)
