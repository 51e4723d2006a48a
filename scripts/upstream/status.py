"""Whether a tree of SGLang has what the two fixes are about: one verdict each, with places.

============  ====================================================================================
not affected  what the fix changes is not there
latent        it is there and cannot be reached with the usual settings; what would reach it is told
affected      it happens
fixed         the tree does what the fix does
unknown       the code is not of a shape that this tool knows; a person has to look
============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from upstream import shapes
from upstream.checkouts import Tree
from upstream.shapes import SCHEDULE_BATCH, SCHEDULER, MergeShape, ShapeError, Site, Source

Verdict = Literal["not affected", "latent", "affected", "fixed", "unknown"]
FIXES: Final = {
    21840: "merge_batch must AND is_prefill_only",
    28500: "the penalties' token copy must be pinned and not block",
}
_MULTIPLEX: Final = "srt/multiplex/multiplexing_mixin.py"
_WORKER: Final = "srt/managers/tp_worker.py"


@dataclass
class Status:
    """The verdict on one fix.

    Attributes
    ----------
    pr : int
        Upstream's pull request.
    verdict : str
        See the module.
    reason : str
        One sentence, with ``file:line``.
    places : list of str
        More of them, each with a word.
    """

    pr: int
    verdict: Verdict
    reason: str
    places: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def status(tree: Tree) -> list[Status]:
    """The verdicts on a tree.

    Raises
    ------
    ShapeError
        If a file that has to be there is not, or is no Python.
    """
    return [merge_status(tree), copy_status(tree)]


# --- #21840 -------------------------------------------------------------------------------------


def merge_status(tree: Tree) -> Status:
    """Whether ``merge_batch`` loses the flag, and whether the scheduler can come to see that."""
    batch = Source(tree.package, SCHEDULE_BATCH)
    shape = shapes.merge_shape(batch)
    if shape.function is None:
        return Status(21840, "not affected", "batches have no is_prefill_only that could be merged")
    if shape.assigned is not None:
        place = batch.place(shape.assigned)
        if shape.right:
            return Status(21840, "fixed", f"{place} ANDs the flag")
        return Status(
            21840, "unknown", f"{place} sets the flag in another way than the AND of both"
        )
    scheduler = Source(tree.package, SCHEDULER)
    return _unmerged(tree, shape, shapes.flag_tests(scheduler))


def _unmerged(tree: Tree, shape: MergeShape, tests: dict[str, list[str]]) -> Status:
    assert shape.function is not None
    lost = f"{shape.source.place(shape.function)} merge_batch keeps the flag of the left side"
    if running := tests.get("running_batch"):
        reason = f"{lost}, and {running[-1]} skips decode if running_batch has it"
        places = [f"{place} tests running_batch.is_prefill_only" for place in running]
        return Status(21840, "affected", reason, places)
    if last := tests.get("last_batch"):
        reason = (
            f"{lost}, but {last[0]} asks last_batch and merges no scoring batch into running_batch"
        )
        reached = list(_ways_around(tree, shape.source))
        if not reached:
            reached = ["no way around it was found"]
        return Status(21840, "latent", reason, reached)
    if tests.keys() - {"req"}:
        seen = sorted(place for name, places in tests.items() if name != "req" for place in places)
        return Status(21840, "unknown", f"{lost}, and {seen[0]} asks a batch of another name", seen)
    return Status(21840, "not affected", f"{lost}, and the scheduler does not ask for it")


def _ways_around(tree: Tree, batch: Source) -> Iterator[str]:
    """What merges batches without the scheduler's test, and what the flag does then."""
    skips = _places_with_flag(tree, _WORKER)
    then = f"; then {skips[0]} does not sample" if skips else ""
    mixed = [
        place for place, what in shapes.calls_of(batch, "merge_batch") if what == "self.merge_batch"
    ]
    if mixed and shapes.sets_flag(batch, "mix_with_running") is None:
        yield (
            "reached with mixed chunked prefill (--enable-mixed-chunk): "
            f"{mixed[0]} mix_with_running merges and leaves the flag{then}"
        )
    if (tree.package / _MULTIPLEX).is_file():
        source = Source(tree.package, _MULTIPLEX)
        for place, what in shapes.calls_of(source, "merge_batch"):
            if what == "self.running_batch.merge_batch" and not shapes.flag_tests(source):
                yield f"reached with PD multiplexing (--enable-pdmux): {place} merges any batch{then}"


def _places_with_flag(tree: Tree, name: str) -> list[str]:
    if not (tree.package / name).is_file():
        return []
    found = shapes.flag_tests(Source(tree.package, name))
    return [place for places in found.values() for place in places]


# --- #28500 -------------------------------------------------------------------------------------


def all_sites(tree: Tree) -> tuple[list[Site], list[str]]:
    """Where tokens are fed to the penalties, and where the helper that does it is called.

    Raises
    ------
    ShapeError
        If a file cannot be parsed that seems to have such a place.
    """
    sites: list[Site] = []
    calls: list[str] = []
    for folder in shapes.FOLDERS:
        for path in sorted((tree.package / folder).rglob("*.py")):
            text = path.read_bytes()
            if b"cumulate_output_tokens" in text or shapes.HELPER.encode() in text:
                source = Source(tree.package, path.relative_to(tree.package).as_posix())
                sites += shapes.token_sites(source)
                calls += shapes.helper_calls(source)
    return sites, calls


def copy_status(tree: Tree) -> Status:
    """Whether the tokens of the penalties are copied in a way that the host waits for."""
    sites, calls = all_sites(tree)
    by_kind: dict[str, list[Site]] = {}
    for site in sites:
        by_kind.setdefault(site.kind, []).append(site)
    places = [f"{site.place} {site.function}: {site.kind}" for site in sites]
    places += [f"{place} calls the helper" for place in calls]
    if unknown := by_kind.get("unknown"):
        reason = f"{unknown[0].place} {unknown[0].function} feeds tokens that come from elsewhere"
        return Status(28500, "unknown", reason, places)
    slow = by_kind.get("blocking", []) + by_kind.get("pageable", [])
    if slow:
        return Status(28500, "affected", _why_slow(tree, slow), places)
    if pinned := by_kind.get("pinned"):
        return Status(
            28500, "fixed", f"{pinned[0].place} copies pinned tokens, asynchronously", places
        )
    return Status(28500, "not affected", "no tokens are copied for penalties", places)


def _why_slow(tree: Tree, slow: Sequence[Site]) -> str:
    where = ", ".join(f"{site.place} ({site.kind})" for site in slow)
    barrier = _barrier(tree)
    if barrier is None:
        behind = (
            "the stream that it is on waits for no forward, so it costs a wait and not a forward"
        )
    else:
        behind = f"behind the running forward, since {barrier} lets the schedule stream wait for it"
    return f"the tokens are copied by {where}; {behind}"


def _barrier(tree: Tree) -> str | None:
    """Where the schedule stream is made to wait for the forward stream."""
    if not (tree.package / SCHEDULER).is_file():
        return None
    source = Source(tree.package, SCHEDULER)
    found = shapes.calls_of(source, "wait_stream")
    return next((p for p, what in found if what.endswith("schedule_stream.wait_stream")), None)


__all__ = ["FIXES", "ShapeError", "Status", "Verdict", "all_sites", "status"]
