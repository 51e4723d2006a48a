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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from upstream import shapes
from upstream.checkouts import Tree
from upstream.shapes import FLAG, SCHEDULE_BATCH, SCHEDULER, FlagUse, MergeShape, Site, Source

Verdict = Literal["not affected", "latent", "affected", "fixed", "unknown"]
FIXES: Final = {
    21840: "merge_batch must AND is_prefill_only",
    28500: "the penalties' token copy must be pinned and not block",
}
_MULTIPLEX: Final = "srt/multiplex/multiplexing_mixin.py"
_WORKER: Final = "srt/managers/tp_worker.py"
# Where batches are chosen and merged. Elsewhere the flag is that of one forward.
_SCHEDULING: Final = ("srt/managers", "srt/disaggregation", "srt/multiplex")
# A request's own flag, and that of a forward that has been chosen.
_OF_OTHERS: Final = frozenset({"req", "model_worker_batch", "forward_batch"})


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
    return [status_of(tree, pr) for pr in FIXES]


def status_of(tree: Tree, pr: int) -> Status:
    """The verdict on one fix; see `status`."""
    judges: dict[int, Callable[[Tree], Status]] = {21840: merge_status, 28500: copy_status}
    return judges[pr](tree)


def _naming(tree: Tree, folders: Sequence[str], *words: str) -> Iterator[Source]:
    """The files of some folders in which one of the words occurs."""
    wanted = [word.encode() for word in words]
    for folder in folders:
        for path in sorted((tree.package / folder).rglob("*.py")):
            # A link may lead nowhere, and a folder be called so.
            text = path.read_bytes() if path.is_file() else b""
            if any(word in text for word in wanted):
                yield Source(tree.package, path.relative_to(tree.package).as_posix())


# --- #21840 -------------------------------------------------------------------------------------


def merge_status(tree: Tree) -> Status:
    """Whether ``merge_batch`` loses the flag, and whether the scheduler can come to see that."""
    batch = Source(tree.package, SCHEDULE_BATCH)
    shape = shapes.merge_shape(batch)
    uses = _scheduling_uses(tree)
    if shape.function is None:
        if uses:
            reason = (
                f"{uses[0].place} asks for a flag that no merge_batch in {SCHEDULE_BATCH} knows"
            )
            return Status(21840, "unknown", reason, [use.place for use in uses])
        return Status(21840, "not affected", "batches have no is_prefill_only that could be merged")
    if shape.assigned is not None:
        place = batch.place(shape.assigned)
        if shape.right:
            return Status(21840, "fixed", f"{place} ANDs the flag")
        return Status(
            21840, "unknown", f"{place} sets the flag in another way than the AND of both"
        )
    return _unmerged(tree, shape, uses)


def _scheduling_uses(tree: Tree) -> list[FlagUse]:
    """Where the scheduler reads or sets the flag of a batch."""
    return [
        use
        for source in _naming(tree, _SCHEDULING, FLAG)
        if source.name != SCHEDULE_BATCH
        for use in shapes.flag_uses(source)
        if use.owner not in _OF_OTHERS
    ]


def _unmerged(tree: Tree, shape: MergeShape, uses: Sequence[FlagUse]) -> Status:
    assert shape.function is not None
    lost = f"{shape.source.place(shape.function)} merge_batch keeps the flag of the left side"
    odd = [use for use in uses if use.sets or use.owner not in ("running_batch", "last_batch")]
    if odd:
        what = "sets it" if odd[0].sets else "asks for it in a way that is not known"
        return Status(
            21840, "unknown", f"{lost}, and {odd[0].place} {what}", [u.place for u in odd]
        )
    if running := [use.place for use in uses if use.owner == "running_batch"]:
        reason = f"{lost}, and {running[-1]} skips decode if running_batch has it"
        places = [f"{place} tests running_batch.is_prefill_only" for place in running]
        return Status(21840, "affected", reason, places)
    if not uses:
        return Status(21840, "not affected", f"{lost}, and no scheduler asks for it")
    asks = "asks last_batch and merges no scoring batch into running_batch"
    reason = f"{lost}, but {uses[0].place} {asks}"
    reached = list(_ways_around(tree, shape.source)) or ["no way around it was found"]
    return Status(21840, "latent", reason, reached)


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
            if what == "self.running_batch.merge_batch" and not shapes.flag_uses(source):
                yield f"reached with PD multiplexing (--enable-pdmux): {place} merges any batch{then}"


def _places_with_flag(tree: Tree, name: str) -> list[str]:
    if not (tree.package / name).is_file():
        return []
    return [use.place for use in shapes.flag_uses(Source(tree.package, name))]


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
    for source in _naming(tree, ("srt",), shapes.FEED, shapes.HELPER):
        if not source.name.startswith(f"{shapes.PENALTIES}/"):
            sites += shapes.token_sites(source)
            calls += shapes.helper_calls(source)
    return sites, calls


def slow_paths(tree: Tree) -> set[str]:
    """Of ``decode`` and ``spec_decode``, the steps whose preparation copies tokens in a slow way."""
    sites, calls = all_sites(tree)
    slow = [site for site in sites if site.kind in ("blocking", "pageable")]
    files = [site.source.name for site in slow if not site.is_helper]
    if any(site.is_helper for site in slow):
        files += [place.removeprefix("sglang/").rpartition(":")[0] for place in calls]
    return {"spec_decode" if "/speculative/" in name else "decode" for name in files}


_SAID: Final = {
    "on device": "tokens that are on the device already, which is fine",
    "blocking": "BLOCKING copy",
    "pageable": "copy from PAGEABLE memory",
    "pinned": "pinned, asynchronous copy",
    "unknown": "UNKNOWN",
}


def copy_status(tree: Tree) -> Status:
    """Whether the tokens of the penalties are copied in a way that the host waits for."""
    sites, calls = all_sites(tree)
    by_kind: dict[str, list[Site]] = {}
    for site in sites:
        by_kind.setdefault(site.kind, []).append(site)
    places = [f"{site.place} {site.function}: {_SAID[site.kind]}" for site in sites]
    places += [f"{place} calls the helper" for place in calls]
    if calls or any(site.is_helper for site in sites):
        batch = Source(tree.package, SCHEDULE_BATCH)
        if fault := shapes.helper_fault(batch, sites):
            return Status(28500, "unknown", fault, places)
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
            "no barrier behind the forward was found, so it costs a wait for the schedule stream"
        )
    else:
        behind = f"behind the running forward, where {barrier} lets the schedule stream wait for it"
    return f"the tokens are copied by {where}; {behind}"


def _barrier(tree: Tree) -> str | None:
    """Where the schedule stream is made to wait for the forward stream."""
    if not (tree.package / SCHEDULER).is_file():
        return None
    found = shapes.calls_of(Source(tree.package, SCHEDULER), "wait_stream")
    return next((p for p, what in found if what.endswith("schedule_stream.wait_stream")), None)
