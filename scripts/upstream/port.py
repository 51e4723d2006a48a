"""The two fixes by their meaning, written into whatever shape a tree has.

Text around the change stays to the letter: the syntax tree is a lossless one (libcst), and only the
statements are replaced that `upstream.shapes` recognised. Where a shape is not known nothing is
changed, and the place is told.
"""

from __future__ import annotations

import ast
import difflib
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import libcst as cst

import prove_fixes
from upstream import shapes
from upstream.checkouts import Tree, git, publish, repository_of, scratch, start_of
from upstream.shapes import FLAG, HELPER, PIN, SCHEDULE_BATCH, ShapeError, Site, Source
from upstream.status import FIXES, all_sites, status_of

BRANCH: Final = "decode-path-fixes"
PORTED: Final = "ported"
PORTABLE: Final = "portable"
TRAILER: Final = f"{prove_fixes.TRAILER}: sgl-project/sglang#{{pr}}"

# As upstream formats.
_LINE: Final = 88

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
        ``"ported"``, ``"portable"`` if it was not published, ``"already fixed"``, ``"not affected"`` or
        ``"unknown shape"``.
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
    tree: Tree,
    prs: Sequence[int] = tuple(FIXES),
    branch: str = BRANCH,
    start: str | None = None,
    dry_run: bool = False,
) -> list[Ported]:
    """Commit the fixes to a branch of the tree's repository, one commit each.

    What is checked out stays as it is, unless it is that branch. Where one fix meets an unknown shape
    nothing is committed at all.

    Parameters
    ----------
    tree : Tree
    prs : sequence of int
    branch : str
    start : str, optional
        The commit to go on from. By default the branch if it is ahead of HEAD, or else HEAD.
    dry_run : bool
        Whether to leave the repository as it is. Commits exist nowhere then.

    Raises
    ------
    CheckoutError
        If the repository cannot be worked on.
    ShapeError
        If a file is not there or is no Python.
    """
    repository = repository_of(tree)
    if start is None:
        done = [change(tree, pr) for pr in prs]
        if all(ported.outcome in ("already fixed", "not affected") for ported in done):
            return done
    with scratch(repository, start or start_of(repository, branch)) as place:
        there = Tree(place / tree.prefix, place)
        done = [_port_and_commit(there, pr) for pr in prs]
        if any(ported.commit for ported in done) and not unknown(done) and not dry_run:
            publish(place, repository, branch)
        else:
            for ported in done:
                ported.outcome = PORTABLE if ported.outcome == PORTED else ported.outcome
                ported.commit = ""
    return done


def unknown(done: Sequence[Ported]) -> bool:
    """Whether a shape was met that is not known."""
    return any(ported.outcome == "unknown shape" for ported in done)


def _port_and_commit(tree: Tree, pr: int) -> Ported:
    ported = change(tree, pr)
    if ported.outcome == PORTED:
        write(tree, ported)
        after = status_of(tree, pr)
        if after.verdict != "fixed":
            raise ShapeError(f"#{pr} was ported, and is {after.verdict} still: {after.reason}")
        assert tree.repository is not None
        git(tree.repository, "add", "--", *(f"{tree.prefix}/{name}" for name in ported.files))
        git(tree.repository, "commit", "--quiet", "--message", message(ported))
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
        # A copy, since the second fix is made in files that the first one changed.
        copy = Tree(Path(folder) / "sglang", None)
        shutil.copytree(tree.package / "srt", copy.package / "srt", ignore=_only_python)
        done = []
        for pr in prs:
            done.append(change(copy, pr))
            write(copy, done[-1])
        names = sorted({name for ported in done for name in ported.files})
        text = "".join(_diff(tree, copy, name) for name in names)
    return done, "" if unknown(done) else text


def _only_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or Path(folder, name).is_dir())]


def _diff(before: Tree, after: Tree, name: str) -> str:
    old, new = (_lines(tree.package / name) for tree in (before, after))
    lines = difflib.unified_diff(old, new, f"a/sglang/{name}", f"b/sglang/{name}")
    missing = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + missing for line in lines)


def _lines(path: Path) -> list[str]:
    """Lines as git and patch count them: other signs than a newline end none."""
    text = path.read_bytes().decode(errors="surrogateescape")
    return [f"{line}\n" for line in text.split("\n")[:-1]] + list(
        filter(None, [text.split("\n")[-1]])
    )


def change(tree: Tree, pr: int) -> Ported:
    """What a fix changes in a tree; nothing is written.

    Raises
    ------
    ShapeError
        If a file is not there or is no Python.
    """
    before = status_of(tree, pr)
    if before.verdict in ("fixed", "not affected"):
        outcome = "already fixed" if before.verdict == "fixed" else before.verdict
        return Ported(pr, outcome, [before.reason])
    if before.verdict == "unknown":
        return Ported(pr, "unknown shape", [before.reason])
    try:
        ported = {21840: _change_merge, 28500: _change_copies}[pr](tree)
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
        what = "has no line that takes over another flag, or returns above it"
        raise _UnknownShapeError(f"{place} merge_batch {what}")
    line = f"self.{FLAG} = self.{FLAG} and {shape.other}.{FLAG}"
    module, anchor = shape.source.module, shape.anchor
    module = _replaced(module, {anchor: [anchor, _statement(module, line)]})
    what = f"{shape.source.place(anchor)}: behind the flags, which are merged as {shape.form}"
    return Ported(21840, PORTED, [what], {SCHEDULE_BATCH: module.bytes})


# --- #28500 -------------------------------------------------------------------------------------


def _change_copies(tree: Tree) -> Ported:
    sites, _ = all_sites(tree)
    slow = [site for site in sites if site.kind in ("blocking", "pageable")]
    for site in slow:
        _must_be_replaceable(site)
    ported = Ported(28500, PORTED, [_describe(site) for site in slow])
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
        if name == SCHEDULE_BATCH:
            module = _with_helper(tree, source, instead, mine)
        else:
            module = _replaced(source.module, instead)
        module = _without_unused_torch(source, module)
        if module.code != source.module.code:
            ported.files[name] = module.bytes
    return ported


def _must_be_replaceable(site: Site) -> None:
    if not site.owner_is_a_batch():
        what = f"nothing says that {site.owner} is a ScheduleBatch"
        raise _UnknownShapeError(f"{site.place} {site.function} feeds tokens, and {what}")
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


def _with_helper(tree: Tree, source: Source, instead: Instead, mine: Sequence[Site]) -> cst.Module:
    """The module changed, with the helper behind ``prepare_for_decode``, and what it needs imported."""
    batch = shapes.find_class(source, "ScheduleBatch")
    if batch is None:
        raise _UnknownShapeError(f"sglang/{source.name} has not one class ScheduleBatch")
    if shapes.find_method(batch, HELPER) is not None:
        module = _replaced(source.module, instead)
        return _with_import(tree, source, module) if any(s.is_helper for s in mine) else module
    prepare = shapes.find_method(batch, "prepare_for_decode")
    if prepare is None:
        raise _UnknownShapeError(f"{source.place(batch)} has no prepare_for_decode")
    (helper,) = _parse(source.module, f"def {HELPER}(self):\n    pass\n")
    helper = helper.with_changes(
        body=cst.IndentedBlock(_parse(source.module, _DOCSTRING + _body(tree))),
        leading_lines=[cst.EmptyLine(indent=False)],
    )
    return _with_import(tree, source, _replaced(source.module, instead, {prepare: helper}))


def _pin_function(tree: Tree) -> tuple[str, bool]:
    """The module that has ``is_pin_memory_available``, and whether it wants a device."""
    for name in ("srt/utils/common.py", "srt/utils.py", "srt/utils/__init__.py"):
        if not (tree.package / name).is_file():
            continue
        source = Source(tree.package, name)
        for statement in source.module.body:
            if isinstance(statement, cst.FunctionDef) and statement.name.value == PIN:
                dotted = f"sglang/{name}".removesuffix(".py").removesuffix("/__init__")
                return dotted.replace("/", "."), _wants_device(source, statement)
    raise _UnknownShapeError(f"no {PIN} in sglang/srt/utils")


def _wants_device(source: Source, function: cst.FunctionDef) -> bool:
    parameters = function.params
    starred = isinstance(parameters.star_arg, cst.Param) or parameters.star_kwarg
    others = parameters.kwonly_params or starred or function.asynchronous
    if others or len(parameters.params) > 1:
        raise _UnknownShapeError(
            f"{source.place(function)} {PIN} is not called with a device or nothing"
        )
    return bool(parameters.params)


# --- Imports ------------------------------------------------------------------------------------


def _with_import(tree: Tree, source: Source, module: cst.Module) -> cst.Module:
    """The module with what the helper needs imported, where the tree's own imports would have it."""
    home, _ = _pin_function(tree)
    _must_mean_the_same(source, home)
    found = [
        (line, part)
        for line in module.body
        if isinstance(line, cst.SimpleStatementLine)
        for part in line.body
        if isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar)
    ]
    if any(_brings(part) for _, part in found):
        return module
    for line, part in found:
        if _dotted(part) == home and (joined := _joined(module, part)) is not None:
            parts = [joined if one is part else one for one in line.body]
            return _replaced(module, {line: [line.with_changes(body=parts)]})
    before = [
        one for one in found if _dotted(one[1]).startswith("sglang.") and _dotted(one[1]) <= home
    ]
    if not before:
        raise _UnknownShapeError("no import of sglang stands at the top that one more could follow")
    # Blocks of imports are in order each by itself: the nearest name, not the last line.
    nearest, _ = max(before, key=lambda one: _dotted(one[1]))
    return _replaced(module, {nearest: [nearest, *_parse(module, f"from {home} import {PIN}\n")]})


def _must_mean_the_same(source: Source, home: str) -> None:
    """See that ``torch`` is torch in a file, and the function's name is no other thing's."""
    torch, odd = False, False
    for node in source.tree.body:
        match node:
            case ast.Import(names=names):
                torch |= any(a.name == "torch" and a.asname is None for a in names)
                odd |= any(a.asname == PIN for a in names)
            case ast.ImportFrom(module=module, names=names):
                homes = (home, home.rpartition(".")[0])
                mine = [a for a in names if (a.asname or a.name) == PIN]
                odd |= any(a.name != PIN or module not in homes for a in mine)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                odd |= name == PIN
            case ast.Assign() | ast.AnnAssign():
                odd |= any(
                    isinstance(n, ast.Name) and n.id == PIN and isinstance(n.ctx, ast.Store)
                    for n in ast.walk(node)
                )
    if not torch:
        raise _UnknownShapeError(f"sglang/{source.name} does not import torch at its top")
    if odd:
        raise _UnknownShapeError(f"sglang/{source.name} has another thing called {PIN}")


def _brings(part: cst.ImportFrom) -> bool:
    """Whether an import brings the function under its own name."""
    assert not isinstance(part.names, cst.ImportStar)
    return any(a.evaluated_name == PIN and a.asname is None for a in part.names)


def _joined(module: cst.Module, part: cst.ImportFrom) -> cst.ImportFrom | None:
    """An import with the name among its own, which stay as they are; None if that does not fit."""
    assert not isinstance(part.names, cst.ImportStar)
    names = list(part.names)
    at = next((i for i, alias in enumerate(names) if str(alias.evaluated_name) > PIN), len(names))
    # What stands between two names, as it does there already.
    between: Any = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if part.lpar is not None:
        between = names[max(min(at, len(names) - 1) - 1, 0)].comma
        if len(names) < 2 or "#" in module.code_for_node(part):
            return None
    new = cst.ImportAlias(cst.Name(PIN), comma=between)
    if at == len(names):
        new = new.with_changes(comma=names[-1].comma)
        names[-1] = names[-1].with_changes(comma=between)
    names.insert(at, new)
    joined = part.with_changes(names=names)
    too_long = part.lpar is None and len(module.code_for_node(joined)) > _LINE
    return None if too_long else joined


def _dotted(part: cst.ImportFrom) -> str:
    return cst.Module([]).code_for_node(part.module) if part.module else ""


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


def _replaced(
    module: cst.Module, instead: Instead, behind: Mapping[Any, cst.FunctionDef] | None = None
) -> cst.Module:
    return cst.ensure_type(module.visit(_Blocks(instead, behind or {})), cst.Module)


class _Blocks(cst.CSTTransformer):
    """Replaces lines by any number of others, and puts functions behind others.

    Nodes are compared by identity, so that those that look the same are left alone.
    """

    def __init__(self, instead: Instead, behind: Mapping[Any, cst.FunctionDef]) -> None:
        super().__init__()
        self.instead, self.behind = instead, behind

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        new = self.instead.get(original_node)
        if new is None:
            return updated_node
        return cst.FlattenSentinel(new) if new else cst.RemoveFromParent()

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> Any:
        new = self.behind.get(original_node)
        return updated_node if new is None else cst.FlattenSentinel([updated_node, new])
