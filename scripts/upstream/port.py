"""The two fixes by their meaning, written into whatever shape a tree has.

Text around the change stays to the letter: the syntax tree is a lossless one (libcst), and only the
statements are replaced that `upstream.shapes` recognised. Where a shape is not known nothing is
changed, and the place is told.
"""

from __future__ import annotations

import difflib
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import libcst as cst

from upstream import shapes
from upstream.checkouts import NO_HOOKS, Tree, git, publish, repository_of, scratch, start_of
from upstream.shapes import FLAG, HELPER, SCHEDULE_BATCH, ShapeError, Site, Source
from upstream.status import FIXES, Status, all_sites, copy_status, merge_status

BRANCH: Final = "decode-path-fixes"
TRAILER: Final = "Upstream-PR: sgl-project/sglang#{pr}"
PIN: Final = "is_pin_memory_available"

Instead = Mapping[Any, Sequence[Any]]

_TITLES: Final = {
    21840: "[Scheduler] Fix is_prefill_only not being updated in merge_batch",
    28500: "[Spec] Make the penalties' H2D copy pinned and non-blocking, in one place",
}
_BODIES: Final = {
    21840: (
        "A batch that is merged out of a scoring batch (max_new_tokens=0) and one\n"
        "that generates kept the flag of the left side. With it decode is skipped\n"
        "while requests are running. The merged batch is prefill-only if and only\n"
        "if both sides are."
    ),
    28500: (
        "Before each decode step with penalties the last token of each request was\n"
        "copied to the device in a way that the host waits for. The tokens are now\n"
        "built in pinned memory and copied with non_blocking=True, in one place:\n"
        f"ScheduleBatch.{HELPER}."
    ),
}


@dataclass
class Ported:
    """What became of one fix.

    Attributes
    ----------
    pr : int
    outcome : str
        ``"ported"``, ``"already fixed"``, ``"not affected"`` or ``"unknown shape"``.
    shapes : list of str
        What was met, each with its place.
    files : dict of str to bytes
        New content by file, from ``sglang`` on.
    commit : str
        The commit on the branch.
    """

    pr: int
    outcome: str
    shapes: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "pr": self.pr,
            "outcome": self.outcome,
            "shapes": self.shapes,
            "files": sorted(self.files),
            "commit": self.commit,
        }


# --- Trees --------------------------------------------------------------------------------------


def port(
    tree: Tree, prs: Sequence[int] = tuple(FIXES), branch: str = BRANCH, dry_run: bool = False
) -> list[Ported]:
    """Commit the fixes to a branch of the tree's repository, one commit each.

    What is checked out stays as it is, unless it is that branch. Where one fix meets an unknown shape
    nothing is committed at all.

    Raises
    ------
    CheckoutError
        If the repository cannot be worked on.
    ShapeError
        If a file is not there or is no Python.
    """
    repository = repository_of(tree)
    start = start_of(repository, branch)
    with scratch(repository, start) as place:
        there = Tree(place / tree.prefix, place)
        done = [_port_and_commit(there, pr) for pr in prs]
        if not dry_run and any(ported.commit for ported in done) and not unknown(done):
            publish(repository, branch, git(place, "rev-parse", "HEAD"))
    return done


def unknown(done: Sequence[Ported]) -> bool:
    """Whether a shape was met that is not known."""
    return any(ported.outcome == "unknown shape" for ported in done)


def _port_and_commit(tree: Tree, pr: int) -> Ported:
    ported = change(tree, pr)
    if ported.outcome == "ported":
        write(tree, ported)
        after = {21840: merge_status, 28500: copy_status}[pr](tree)
        if after.verdict != "fixed":
            raise ShapeError(f"#{pr} was ported, and is {after.verdict} still: {after.reason}")
        assert tree.repository is not None
        git(tree.repository, "add", "--", *(f"{tree.prefix}/{name}" for name in ported.files))
        git(tree.repository, *NO_HOOKS, "commit", "--quiet", "--message", message(ported))
        ported.commit = git(tree.repository, "rev-parse", "HEAD")
    return ported


def write(tree: Tree, ported: Ported) -> None:
    """Write the changed files."""
    for name, content in ported.files.items():
        (tree.package / name).write_bytes(content)


def message(ported: Ported) -> str:
    """The message of a fix's commit."""
    met = "\n".join(f"- {line}" for line in ported.shapes)
    trailer = TRAILER.format(pr=ported.pr)
    body = f"{_BODIES[ported.pr]}\n\nShape met, as lines were before:\n{met}"
    return f"{_TITLES[ported.pr]}\n\n{body}\n\n{trailer}\n"


def patch(tree: Tree, prs: Sequence[int] = tuple(FIXES)) -> tuple[list[Ported], str]:
    """All fixes as one patch for ``patch -p1`` in the folder above ``sglang``; nothing is written.

    The patch is empty where a shape is not known.
    """
    with tempfile.TemporaryDirectory(prefix="decode-path-") as folder:
        # A copy of what is read, since the second fix is made in files that the first one changed.
        copy = Tree(Path(folder) / "sglang", None)
        for part in (*shapes.FOLDERS, "srt/utils", "srt/utils.py"):
            _copy(tree.package / part, copy.package / part)
        done = []
        for pr in prs:
            done.append(change(copy, pr))
            write(copy, done[-1])
        names = sorted({name for ported in done for name in ported.files})
        text = "".join(_diff(tree, copy, name) for name in names)
    return done, "" if unknown(done) else text


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    elif source.is_file():
        shutil.copyfile(source, target)


def _diff(before: Tree, after: Tree, name: str) -> str:
    old, new = (
        (tree.package / name)
        .read_bytes()
        .decode(errors="surrogateescape")
        .splitlines(keepends=True)
        for tree in (before, after)
    )
    lines = difflib.unified_diff(old, new, f"a/sglang/{name}", f"b/sglang/{name}")
    missing = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + missing for line in lines)


def change(tree: Tree, pr: int) -> Ported:
    """What a fix changes in a tree; nothing is written.

    Raises
    ------
    ShapeError
        If a file is not there or is no Python.
    """
    found, rewrite = {
        21840: (merge_status, _change_merge),
        28500: (copy_status, _change_copies),
    }[pr]
    before: Status = found(tree)
    if before.verdict in ("fixed", "not affected"):
        outcome = "already fixed" if before.verdict == "fixed" else before.verdict
        return Ported(pr, outcome, [before.reason])
    if before.verdict == "unknown":
        return Ported(pr, "unknown shape", [before.reason])
    try:
        ported = rewrite(tree)
        for name, content in ported.files.items():
            compile(content, name, "exec")
    except _UnknownShapeError as error:
        return Ported(pr, "unknown shape", [str(error)])
    return ported


class _UnknownShapeError(Exception):
    """The message has the place."""


# --- #21840 -------------------------------------------------------------------------------------


def _change_merge(tree: Tree) -> Ported:
    shape = shapes.merge_shape(Source(tree.package, SCHEDULE_BATCH))
    assert shape.function is not None
    if shape.anchor is None:
        place = shape.source.place(shape.function)
        raise _UnknownShapeError(f"{place} merge_batch has no line that takes over another flag")
    line = f"self.{FLAG} = self.{FLAG} and {shape.other}.{FLAG}"
    module, anchor = shape.source.module, shape.anchor
    module = _replaced(module, {anchor: [anchor, _statement(module, line)]})
    what = f"{shape.source.place(anchor)}: behind the flags, which are merged as {shape.form}"
    return Ported(21840, "ported", [what], {SCHEDULE_BATCH: module.bytes})


# --- #28500 -------------------------------------------------------------------------------------


def _change_copies(tree: Tree) -> Ported:
    sites, _ = all_sites(tree)
    slow = [site for site in sites if site.kind in ("blocking", "pageable")]
    for site in slow:
        _must_be_replaceable(site)
    ported = Ported(28500, "ported", [_describe(site) for site in slow])
    # One parse of each file that sites share: nodes are told apart by identity.
    sources = {site.source.name: site.source for site in slow}
    if SCHEDULE_BATCH not in sources:
        sources[SCHEDULE_BATCH] = Source(tree.package, SCHEDULE_BATCH)
    for name, source in sources.items():
        mine = [site for site in slow if site.source is source]
        instead: dict[Any, Sequence[Any]] = {}
        for site in mine:
            instead |= dict.fromkeys(site.statements, ())
            instead[site.statements[0]] = _instead(tree, site)
        module = _replaced(source.module, instead)
        if name == SCHEDULE_BATCH:
            module = _with_helper(tree, source, module, mine)
        module = _without_unused_torch(source, module)
        if module.code != source.module.code:
            ported.files[name] = module.bytes
    return ported


def _must_be_replaceable(site: Site) -> None:
    if site.owner == "self" and not site.function.startswith("ScheduleBatch."):
        raise _UnknownShapeError(
            f"{site.place} {site.function} feeds tokens, and is no ScheduleBatch"
        )
    if name := site.needed_elsewhere():
        raise _UnknownShapeError(f"{site.place} {site.function} needs {name} besides")


def _describe(site: Site) -> str:
    branch = f", in the branch under {site.branch}" if site.branch else ""
    return f"{site.place}: {site.function} builds the tokens itself, {site.kind}{branch}"


def _instead(tree: Tree, site: Site) -> list[Any]:
    module = site.source.module
    if site.is_helper:
        new = _parse(module, _body(tree))
    else:
        new = [_statement(module, f"{site.owner}.{HELPER}()")]
    # What the tree says of the tokens stays there. That they are slow is not true any more.
    said = [
        line
        for statement in site.statements
        for line in cst.ensure_type(statement, cst.SimpleStatementLine).leading_lines
        if (line.comment or statement is site.statements[0])
        and "TODO: this can be slow" not in module.code_for_node(line)
    ]
    return [new[0].with_changes(leading_lines=said), *new[1:]]


_DOCSTRING: Final = '''\
"""Feed each request's last output token, before any its last prompt token."""
# Pinned and non-blocking: the stream of this copy may be behind a whole forward.
'''
_BODY: Final = """\
last_tokens = [
    req.output_ids[-1] if len(req.output_ids) else req.origin_input_ids[-1]
    for req in self.reqs
]
latest_output_ids = torch.tensor(
    last_tokens,
    dtype=torch.int64,
    pin_memory={pin},
).to(self.device, non_blocking=True)
self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(
    latest_output_ids
)
"""


def _body(tree: Tree) -> str:
    return _BODY.format(pin=f"{PIN}(self.device)" if _pin_function(tree)[1] else f"{PIN}()")


def _with_helper(
    tree: Tree, source: Source, module: cst.Module, mine: Sequence[Site]
) -> cst.Module:
    """The module with the helper behind ``prepare_for_decode``, and with what it needs imported."""
    batch = shapes.find_class(source, "ScheduleBatch")
    if batch is None:
        raise _UnknownShapeError(f"sglang/{source.name} has no class ScheduleBatch")
    if shapes.find_method(batch, HELPER) is None:
        if shapes.find_method(batch, "prepare_for_decode") is None:
            raise _UnknownShapeError(f"{source.place(batch)} has no prepare_for_decode")
        (helper,) = _parse(module, f"def {HELPER}(self):\n    pass\n")
        lines = [*_parse(module, _DOCSTRING + _body(tree))]
        helper = helper.with_changes(
            body=cst.IndentedBlock(lines), leading_lines=[cst.EmptyLine(indent=False)]
        )
        module = module.visit(_Behind("ScheduleBatch", "prepare_for_decode", helper))
    elif not any(site.is_helper for site in mine):
        return module
    return _with_import(module, _pin_function(tree)[0])


def _pin_function(tree: Tree) -> tuple[str, bool]:
    """The module that has ``is_pin_memory_available``, and whether it wants a device."""
    for name in ("srt/utils/common.py", "srt/utils.py", "srt/utils/__init__.py"):
        if not (tree.package / name).is_file():
            continue
        source = Source(tree.package, name)
        for statement in source.module.body:
            if isinstance(statement, cst.FunctionDef) and statement.name.value == PIN:
                dotted = f"sglang/{name}".removesuffix(".py").removesuffix("/__init__")
                return dotted.replace("/", "."), bool(statement.params.params)
    raise _UnknownShapeError(f"no {PIN} in sglang/srt/utils")


# --- Imports ------------------------------------------------------------------------------------


def _with_import(module: cst.Module, home: str) -> cst.Module:
    """The module with the function imported, where the tree's own imports would have it."""
    found = {
        line: part
        for line in module.body
        if isinstance(line, cst.SimpleStatementLine)
        for part in line.body
        if isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar)
    }
    if any(PIN in _names(part) for part in found.values()):
        return module
    dotted = {line: _dotted(part) for line, part in found.items()}
    for line, part in found.items():
        # A comment inside would be lost.
        if dotted[line] == home and "#" not in module.code_for_node(part):
            text = _import_of(home, sorted([*_names(part), PIN]), part.lpar is not None)
            new = _parse(module, text)[0]
            assert isinstance(new, cst.SimpleStatementLine)
            return _replaced(module, {line: [line.with_changes(body=new.body)]})
    before = [line for line, name in dotted.items() if name.startswith("sglang.") and name <= home]
    if not before:
        raise _UnknownShapeError("no import of sglang stands at the top that one more could follow")
    # Blocks of imports are in order each by itself: the nearest name, not the last line.
    nearest = max(before, key=lambda line: dotted[line])
    return _replaced(module, {nearest: [nearest, *_parse(module, _import_of(home, [PIN], False))]})


def _names(part: cst.ImportFrom) -> list[str]:
    """The names of an import as they are written; ``a as b`` too."""
    assert not isinstance(part.names, cst.ImportStar)
    text = cst.Module([])
    return [
        text.code_for_node(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        for alias in part.names
    ]


def _dotted(part: cst.ImportFrom) -> str:
    return cst.Module([]).code_for_node(part.module) if part.module else ""


def _import_of(home: str, names: Sequence[str], in_brackets: bool) -> str:
    """An import as black would write it."""
    line = f"from {home} import {', '.join(names)}\n"
    if not in_brackets and len(line) <= 89:
        return line
    return f"from {home} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"


def _without_unused_torch(source: Source, module: cst.Module) -> cst.Module:
    """The module without ``import torch`` if the change took the last use of it."""
    if module.code == source.module.code:
        return module
    rest = [line for line in module.body if module.code_for_node(line).strip() != "import torch"]
    without = module.with_changes(body=rest)
    return module if re.search(r"\btorch\b", without.code) else without


# --- Changing a syntax tree ---------------------------------------------------------------------


def _parse(module: cst.Module, text: str) -> list[Any]:
    """Statements with the line ends and the indentation of a file."""
    lines = text.replace("\n", module.default_newline)
    return list(cst.parse_module(lines, module.config_for_parsing).body)


def _statement(module: cst.Module, text: str) -> cst.SimpleStatementLine:
    (line,) = _parse(module, text)
    return cst.ensure_type(line, cst.SimpleStatementLine)


def _replaced(module: cst.Module, instead: Instead) -> cst.Module:
    return cst.ensure_type(module.visit(_Blocks(instead)), cst.Module)


class _Blocks(cst.CSTTransformer):
    """Replaces lines by any number of others."""

    def __init__(self, instead: Instead) -> None:
        super().__init__()
        self.instead = instead

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        # Nodes are compared by identity.
        new = self.instead.get(original_node)
        if new is None:
            return updated_node
        return cst.FlattenSentinel(new) if new else cst.RemoveFromParent()


class _Behind(cst.CSTTransformer):
    """Puts a method behind another one of a class."""

    def __init__(self, owner: str, method: str, new: cst.FunctionDef) -> None:
        super().__init__()
        self.owner, self.method, self.new = owner, method, new

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        if updated_node.name.value != self.owner:
            return updated_node
        lines: list[Any] = []
        for line in updated_node.body.body:
            lines.append(line)
            if isinstance(line, cst.FunctionDef) and line.name.value == self.method:
                lines.append(self.new)
        return updated_node.with_changes(body=updated_node.body.with_changes(body=lines))
