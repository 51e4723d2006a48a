#!/usr/bin/env python3
"""Which fields of SGLang's batches do merge, filter, mix and copy touch? A list for a person to judge.

``ScheduleBatch.is_prefill_only`` was set when a batch was built, and merging two batches forgot it: that
was #21840. What happened to one field can happen to any. This tool reads any SGLang tree (a release in
``.cache/upstream``, a checkout, a fork, this project) without importing it, and prints for each field of
the batch classes what each of those methods does with it:

=====  =======================================================================
``w``  it, or something in it, is assigned, or a method of it is called
``r``  it is read, and not assigned
``.``  it is not touched
=====  =======================================================================

A field is marked (``!``) if merge or filter assigns it and the other one does not; (``?``) if neither
does and building sets it from the requests, so that a merged batch has what one side had. A mark is no
verdict: a field may be the same on both sides, or made anew before it is read.
``docs/upstream-audit.md`` has verdicts on three releases.

Examples
--------
::

    python scripts/upstream/audit_fields.py .cache/upstream/0.5.14
    python scripts/upstream/audit_fields.py --marked ~/sglang/python
    python scripts/upstream/audit_fields.py --json python
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

# Where upstream has the classes.
HOMES: Final = {
    "ScheduleBatch": "managers/schedule_batch.py",
    "SamplingBatchInfo": "sampling/sampling_batch_info.py",
    "EagleDraftInput": "speculative/eagle_info.py",
    "EagleVerifyInput": "speculative/eagle_info.py",
}
CLASSES: Final = tuple(HOMES)
# By column: the methods that count.
ACTS: Final = {
    "merge": ("merge_batch",),
    "filter": ("filter_batch",),
    "mix": ("mix_with_running",),
    "copy": ("copy", "copy_for_forward"),
}
BUILDERS: Final = ("init_new", "from_schedule_batch")
FOLDERS: Final = ("managers", "sampling", "speculative", "disaggregation")


class AuditError(RuntimeError):
    """A failure with a message that a person can act on; `main` prints it without a traceback."""


@dataclass
class FieldAudit:
    """What the methods of a class do with one of its fields.

    Attributes
    ----------
    name : str
    line : int
        Where it is declared.
    touched : dict of str to str
        By column of `ACTS`: ``"w"``, ``"r"`` or ``"."``.
    from_requests : bool
        Whether building the batch sets it from its requests.
    """

    name: str
    line: int
    touched: dict[str, str]
    from_requests: bool

    @property
    def mark(self) -> str:
        """``"!"``, ``"?"`` or nothing, see the module. Without both methods there is nothing to say."""
        if not {"merge", "filter"} <= self.touched.keys():
            return ""
        merge, filter_ = (self.touched.get(act) == "w" for act in ("merge", "filter"))
        if merge != filter_:
            return "!"
        return "?" if self.from_requests and not merge else ""


@dataclass
class ClassAudit:
    """A class of a tree, with its fields in order.

    Attributes
    ----------
    name, file : str
        The class, and its file from ``sglang`` on.
    acts : list of str
        Columns that it has methods for.
    """

    name: str
    file: str
    acts: list[str]
    fields: list[FieldAudit] = field(default_factory=list)


# --- Reading ----------------------------------------------------------------------------------


def find_srt(tree: Path) -> Path:
    """The folder ``srt`` of a tree: a release, a checkout's root or its ``python``, a package.

    Raises
    ------
    AuditError
        If there is none.
    """
    for inside in (".", "srt", "sglang/srt", "python/sglang/srt"):
        if (tree / inside / "managers" / "schedule_batch.py").is_file():
            return tree / inside
    raise AuditError(f"{tree} is no SGLang tree: it has no managers/schedule_batch.py")


def read_classes(srt: Path) -> dict[str, tuple[ast.ClassDef, Path]]:
    """All classes that can be, or be a base of, one of `CLASSES`, by name.

    Names of a module's tuples of strings are replaced by those, so that a loop over one is understood.
    """
    found: dict[str, tuple[ast.ClassDef, Path]] = {}
    for folder in FOLDERS:
        for path in sorted((srt / folder).rglob("*.py")):
            try:
                module = ast.parse(path.read_bytes(), str(path))
            except (SyntaxError, ValueError, OSError) as error:
                print(
                    f"audit_fields: {path} cannot be read and is left out: {error}", file=sys.stderr
                )
                continue
            names = _Names(module)
            for node in module.body:
                if not isinstance(node, ast.ClassDef):
                    continue
                # Where upstream has the class goes before any other of that name.
                if node.name not in found or path == srt / HOMES.get(node.name, ""):
                    found[node.name] = (names.visit(node), path)
    return found


class _Names(ast.NodeTransformer):
    """Puts a module's tuples of strings in the place of their names."""

    def __init__(self, module: ast.Module) -> None:
        self.tuples = {
            target.id: node.value
            for node in module.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List)
            for target in node.targets
            if isinstance(target, ast.Name)
            and all(isinstance(getattr(e, "value", None), str) for e in node.value.elts)
        }

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.tuples.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _lineage(name: str, classes: dict[str, tuple[ast.ClassDef, Path]]) -> Iterator[ast.ClassDef]:
    """A class and its bases, as far as they are known, nearest first, each once."""
    pending, seen = [name], set[str]()
    while pending:
        name = pending.pop(0)
        if name in classes and name not in seen:
            seen.add(name)
            yield classes[name][0]
            pending += [getattr(base, "id", "") for base in classes[name][0].bases]


def audit_class(name: str, classes: dict[str, tuple[ast.ClassDef, Path]], srt: Path) -> ClassAudit:
    """What the methods of a class do with its fields."""
    _, path = classes[name]
    methods: dict[str, ast.FunctionDef] = {}
    fields: dict[str, int] = {}
    for owner in _lineage(name, classes):
        for part in owner.body:
            if isinstance(part, ast.FunctionDef):
                methods.setdefault(part.name, part)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                if "ClassVar" not in ast.unparse(part.annotation):
                    fields.setdefault(part.target.id, part.lineno)
    present = {
        act: [methods[m] for m in names if m in methods]
        for act, names in ACTS.items()
        if any(m in methods for m in names)
    }
    touched = {act: _touched_by(found, methods, set(fields)) for act, found in present.items()}
    built = {
        keyword.arg
        for builder in BUILDERS
        if builder in methods
        for call in ast.walk(methods[builder])
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "cls"
        for keyword in call.keywords
        if _reads_requests(keyword.value, methods[builder])
    }
    audit = ClassAudit(name, f"sglang/srt/{path.relative_to(srt)}", list(present))
    audit.fields = [
        FieldAudit(f, line, {act: done.get(f, ".") for act, done in touched.items()}, f in built)
        for f, line in fields.items()
    ]
    return audit


def _reads_requests(value: ast.expr, builder: ast.FunctionDef) -> bool:
    """Whether an expression, or what a name in it was assigned, reads what requests say."""
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    if isinstance(value, ast.Name):
        for node in ast.walk(builder):
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == value.id for t in node.targets
            ):
                names |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return bool(names & {"req", "r"}) or (isinstance(value, ast.Name) and value.id == "reqs")


def _touched_by(
    functions: Sequence[ast.FunctionDef], methods: dict[str, ast.FunctionDef], fields: set[str]
) -> dict[str, str]:
    """Fields that methods assign (w) or read (r), those of methods that they call on self included."""
    done: dict[str, str] = {}
    seen: set[str] = set()
    pending = list(functions)
    while pending:
        function = pending.pop()
        if function.name in seen:
            continue
        seen.add(function.name)
        for name, is_write in _uses(function):
            if name in fields:
                done[name] = "w" if is_write else done.get(name, "r")
            elif name in methods:
                pending.append(methods[name])
    return done


def _uses(function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """Names of attributes of self that are used, and whether they are changed."""
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    changes_by_name = any(
        isinstance(n, ast.Call) and getattr(n.func, "id", "") == "setattr"
        for n in ast.walk(function)
    )
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            yield node.attr, _is_change(node, parents)
        elif (
            changes_by_name
            and isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and isinstance(parents.get(node), ast.Tuple | ast.List | ast.Set | ast.Dict)
        ):
            yield node.value, True


def _is_change(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether ``self.x``, ``self.x[...]`` or ``self.x.y`` is assigned, or ``self.x.merge()`` called."""
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return True
    parent = parents.get(node)
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return _is_change(parent, parents)
    if isinstance(parent, ast.Attribute):
        if _is_stored(parent, parents):
            return True
        call = parents.get(parent)
        changing = ("merge", "filter", "append", "extend", "update", "clear", "release")
        return (
            isinstance(call, ast.Call)
            and call.func is parent
            and (parent.attr.startswith(changing) or parent.attr.endswith("_"))
        )
    return False


def _is_stored(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this, or an attribute or an element of it, is assigned."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node.ctx, ast.Store):
            return True
        node = parents.get(node)
    return False


def audit(tree: Path) -> list[ClassAudit]:
    """What a tree's batch classes do with their fields.

    Raises
    ------
    AuditError
        If it is no SGLang tree.
    """
    srt = find_srt(tree)
    classes = read_classes(srt)
    if "ScheduleBatch" not in classes:
        raise AuditError(f"{srt} has no class ScheduleBatch")
    return [audit_class(name, classes, srt) for name in CLASSES if name in classes]


# --- The command ------------------------------------------------------------------------------


def render(audits: Sequence[ClassAudit], marked: bool = False) -> str:
    """Tables for people."""
    lines = []
    for one in audits:
        shown = [f for f in one.fields if f.mark or not marked]
        count = sum(bool(f.mark) for f in one.fields)
        found = f"{len(one.fields)} fields, {count} marked"
        lacking = [act for act in ("merge", "filter") if act not in one.acts]
        if lacking:
            found += f" (it has no {' and no '.join(lacking)}: not judged)"
        lines.append(f"{one.name} ({one.file}): {found}")
        width = max((len(f.name) for f in shown), default=0)
        lines.append("  ".join(["    " + "field".ljust(width), *one.acts]))
        for f in shown:
            cells = [f.touched[act].center(len(act)) for act in one.acts]
            lines.append("  ".join([f"  {f.mark or ' '} {f.name.ljust(width)}", *cells]).rstrip())
        lines.append("")
    absent = set(CLASSES) - {one.name for one in audits}
    lines += [f"{name}: not found" for name in CLASSES if name in absent]
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="audit_fields.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="w: assigned, r: read, .: not touched. !: one of merge and filter assigns it and the "
        "other does not. ?: neither does, and building sets it from the requests.",
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="any SGLang tree")
    parser.add_argument("--marked", action="store_true", help="only fields with a mark")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Audit and print; return the exit status."""
    args = parse_args(argv)
    try:
        audits = audit(args.tree)
    except AuditError as error:
        print(f"audit_fields: error: {error}", file=sys.stderr)
        return 1
    if args.json:
        found = [
            asdict(one)
            | {
                "fields": [
                    asdict(f) | {"mark": f.mark} for f in one.fields if f.mark or not args.marked
                ]
            }
            for one in audits
        ]
        print(json.dumps(found, indent=2))
    else:
        print(render(audits, args.marked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
