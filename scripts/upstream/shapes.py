"""What the code that the two fixes concern looks like in a tree: recognised, or said to be unknown.

Everything is judged by its meaning, not by its text: expressions are compared as syntax trees, so that
formatting and comments do not matter. `status` reports what this finds, `port` changes it.

Sites of #28500
---------------
A *site* is a call of ``penalizer_orchestrator.cumulate_output_tokens(x)`` outside of the penalties
themselves. By where its tokens come from it is

=============  =================================================================================
``blocking``   a tensor made on the device out of a list: the host waits for the copy
``pageable``   a tensor made on the host, copied with ``non_blocking`` from memory that is not pinned
``pinned``     the same from pinned memory: what the fix does
``on device``  a tensor that is on the device already: nothing is copied
``unknown``    anything else
=============  =================================================================================
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

HELPER: Final = "cumulate_penalty_output_tokens"
FLAG: Final = "is_prefill_only"
SCHEDULE_BATCH: Final = "srt/managers/schedule_batch.py"
SCHEDULER: Final = "srt/managers/scheduler.py"
# Where tokens may be fed to the penalties, beside the penalties themselves.
FOLDERS: Final = ("srt/managers", "srt/speculative", "srt/disaggregation", "srt/multiplex")

Node = TypeVar("Node", bound=cst.CSTNode)
Kind = Literal["blocking", "pageable", "pinned", "on device", "unknown"]
Statements = Sequence[cst.BaseStatement]


class ShapeError(RuntimeError):
    """A file is not what can be read or changed; the message names the place."""


class Source:
    """A Python file, parsed, with the lines of its nodes.

    Parameters
    ----------
    package : Path
        The folder ``sglang``.
    name : str
        The file from there on: ``srt/managers/schedule_batch.py``.

    Raises
    ------
    ShapeError
        If it is not there or is no Python.
    """

    def __init__(self, package: Path, name: str) -> None:
        self.package, self.name, self.path = package, name, package / name
        try:
            module = cst.parse_module(self.path.read_bytes())
        except FileNotFoundError as error:
            raise ShapeError(f"{name} is not there") from error
        except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
            raise ShapeError(f"{name} cannot be parsed: {error}") from error
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)

    def place(self, node: cst.CSTNode) -> str:
        """``sglang/srt/...py:line`` of a node."""
        return f"sglang/{self.name}:{self._positions[node].start.line}"

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.module.code_for_node(node)

    def statement(self, node: cst.BaseStatement) -> ast.stmt | None:
        """A simple statement without its formatting; nothing of a compound one or of several."""
        if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
            return None
        return ast.parse(self.code(node.body[0])).body[0]

    def syntax(self, node: cst.BaseExpression) -> ast.expr:
        """An expression without its formatting."""
        # In brackets a line end is no end.
        return ast.parse(f"({self.code(node)})", mode="eval").body


def canonical(text: str) -> str:
    """An expression's text in the form that `ast.unparse` gives it."""
    return ast.unparse(ast.parse(text, mode="eval"))


def find_class(source: Source, name: str) -> cst.ClassDef | None:
    """A class at the top of a file."""
    for statement in source.module.body:
        if isinstance(statement, cst.ClassDef) and statement.name.value == name:
            return statement
    return None


def find_method(owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    """A method of a class."""
    for statement in owner.body.body:
        if isinstance(statement, cst.FunctionDef) and statement.name.value == name:
            return statement
    return None


# --- #21840 -------------------------------------------------------------------------------------


@dataclass
class MergeShape:
    """What ``ScheduleBatch.merge_batch`` does about the flag.

    Attributes
    ----------
    source : Source
    function : FunctionDef or None
        None where batches have no such flag, or cannot be merged.
    other : str
        What the function calls the other batch.
    assigned : BaseSmallStatement or None
        The statement that sets the flag.
    right : bool
        Whether that is the AND of both sides.
    anchor : SimpleStatementLine or None
        The last line that takes over a flag of the other side; the fix goes behind it.
    form : str
        How that line does it, for people.
    """

    source: Source
    function: cst.FunctionDef | None = None
    other: str = ""
    assigned: cst.SimpleStatementLine | None = None
    right: bool = False
    anchor: cst.SimpleStatementLine | None = None
    form: str = ""


def merge_shape(source: Source) -> MergeShape:
    """See `MergeShape`."""
    shape = MergeShape(source)
    batch = find_class(source, "ScheduleBatch")
    if batch is None or not _declares(batch, FLAG):
        return shape
    shape.function = find_method(batch, "merge_batch")
    if shape.function is None:
        return shape
    names = [parameter.name.value for parameter in shape.function.params.params]
    shape.other = names[1] if len(names) > 1 else ""
    for line in shape.function.body.body:
        if isinstance(line, cst.SimpleStatementLine):
            _see_flags(shape, line)
    if shape.assigned is None:
        # Deeper down, where it is not set on every way: not a shape to change.
        shape.assigned = next(_lines_that_set(shape.function, f"self.{FLAG}"), None)
    return shape


def _see_flags(shape: MergeShape, line: cst.SimpleStatementLine) -> None:
    if (statement := shape.source.statement(line)) is None:
        return
    for name, form in _taken_over(statement, shape.other):
        if name == FLAG:
            shape.assigned, shape.right = line, form in _RIGHT
        else:
            shape.anchor, shape.form = line, form


# The AND of two booleans.
_RIGHT: Final = ("x = x and y", "x = y and x", "x &= y")


def _taken_over(statement: ast.stmt, other: str) -> Iterator[tuple[str, str]]:
    """The flags that a statement makes of both sides, each with the form of it."""
    match statement:
        case ast.AugAssign(
            target=ast.Attribute(value=ast.Name("self"), attr=name),
            op=ast.BitOr() | ast.BitAnd() as op,
            value=ast.Attribute(value=ast.Name(side), attr=same),
        ) if side == other and same == name:
            yield name, "x |= y" if isinstance(op, ast.BitOr) else "x &= y"
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name("self"), attr=name)],
            value=ast.BoolOp(op=op, values=[left, right]),
        ):
            sides = (ast.unparse(left), ast.unparse(right))
            word = "and" if isinstance(op, ast.And) else "or"
            if sides == (f"self.{name}", f"{other}.{name}"):
                yield name, f"x = x {word} y"
            elif sides == (f"{other}.{name}", f"self.{name}"):
                yield name, f"x = y {word} x"


def _declares(owner: cst.ClassDef, name: str) -> bool:
    for line in owner.body.body:
        if isinstance(line, cst.SimpleStatementLine):
            for part in line.body:
                if (
                    isinstance(part, cst.AnnAssign)
                    and isinstance(part.target, cst.Name)
                    and part.target.value == name
                ):
                    return True
    return False


def _lines_that_set(function: cst.FunctionDef, name: str) -> Iterator[cst.SimpleStatementLine]:
    for line in walk(function, cst.SimpleStatementLine):
        for part in line.body:
            targets = (
                [t.target for t in part.targets]
                if isinstance(part, cst.Assign)
                else [part.target]
                if isinstance(part, cst.AugAssign | cst.AnnAssign)
                else []
            )
            if any(cst.Module([]).code_for_node(target) == name for target in targets):
                yield line


def sets_flag(source: Source, method: str) -> cst.SimpleStatementLine | None:
    """The line of a method of ``ScheduleBatch`` that sets the flag."""
    batch = find_class(source, "ScheduleBatch")
    function = find_method(batch, method) if batch else None
    return next(_lines_that_set(function, f"self.{FLAG}"), None) if function else None


def flag_tests(source: Source) -> dict[str, list[str]]:
    """Places that read the flag, by the name of the batch: ``running_batch``, ``last_batch``."""
    found: dict[str, list[str]] = {}
    for node in walk(source.module, cst.Attribute):
        if node.attr.value == FLAG:
            owner = node.value
            name = owner.attr.value if isinstance(owner, cst.Attribute) else source.code(owner)
            found.setdefault(name, []).append(source.place(node))
    return found


def calls_of(source: Source, name: str) -> list[tuple[str, str]]:
    """Calls of a method in a file: place, and the text of what is called."""
    return [
        (source.place(node), source.code(node.func))
        for node in walk(source.module, cst.Call)
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == name
    ]


# --- #28500 -------------------------------------------------------------------------------------


@dataclass
class Site:
    """A place where tokens are fed to the penalties.

    Attributes
    ----------
    source : Source
    function : str
        The function that it is in, with its class: ``ScheduleBatch.prepare_for_decode``.
    kind : str
        Where the tokens come from, see the module.
    owner : str
        The batch: ``self`` or ``batch``.
    definition : FunctionDef
        That function.
    statements : sequence
        Those that make the tokens, and the call.
    branch : str
        The condition around it, if it is a branch of one on overlap: ``"enable_overlap"``.
    """

    source: Source
    function: str
    kind: Kind
    owner: str
    definition: cst.FunctionDef
    statements: Statements
    branch: str = ""

    @property
    def place(self) -> str:
        """``sglang/srt/...py:line`` of what makes the tokens."""
        return self.source.place(self.statements[0])

    @property
    def is_helper(self) -> bool:
        """Whether it is in the one method that everything else should call."""
        return self.function == f"ScheduleBatch.{HELPER}"

    def needed_elsewhere(self) -> str:
        """A name that its statements make and the function needs besides; empty if there is none."""
        for statement in self.statements[:-1]:
            for target in walk(statement, cst.AssignTarget):
                name = self.source.code(target.target)
                inside = sum(_uses(one, name) for one in self.statements)
                if _uses(self.definition, name) > inside:
                    return name
        return ""


def token_sites(source: Source) -> list[Site]:
    """All sites of a file, in order."""
    if "cumulate_output_tokens" not in source.module.code:
        return []
    visitor = _Sites(source)
    source.module.visit(visitor)
    return visitor.sites


@dataclass
class _Sites(cst.CSTVisitor):
    source: Source
    sites: list[Site] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _definitions: list[cst.FunctionDef] = field(default_factory=list)
    _branches: list[str] = field(default_factory=list)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._names.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._names.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._names.append(node.name.value)
        self._definitions.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._names.pop()
        self._definitions.pop()

    def visit_If(self, node: cst.If) -> None:
        self._branches.append(self.source.code(node.test))

    def leave_If(self, original_node: cst.If) -> None:
        self._branches.pop()

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        for at, line in enumerate(node.body):
            call = _feeding_call(line)
            if call is None or not self._definitions:
                continue
            owner = self.source.code(call.func).partition(".sampling_info")[0]
            kind, first = _kind(self.source, node.body, at, call, owner)
            overlap = [b for b in self._branches if b.endswith(".enable_overlap")]
            site = Site(
                self.source,
                ".".join(self._names),
                kind,
                owner,
                self._definitions[-1],
                node.body[first : at + 1],
                overlap[-1].rpartition(".")[2] if overlap else "",
            )
            self.sites.append(site)


def _feeding_call(line: cst.CSTNode) -> cst.Call | None:
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        (part,) = line.body
        if isinstance(part, cst.Expr) and isinstance(part.value, cst.Call):
            function = part.value.func
            if (
                isinstance(function, cst.Attribute)
                and function.attr.value == "cumulate_output_tokens"
            ):
                return part.value
    return None


def _kind(
    source: Source, lines: Statements, at: int, call: cst.Call, owner: str
) -> tuple[Kind, int]:
    """Where the argument of a call comes from, and the first of the statements that make it."""
    if len(call.args) != 1:
        return "unknown", at
    argument = source.syntax(call.args[0].value)
    if not isinstance(argument, ast.Name):
        return ("on device" if _is_cast(argument) else "unknown"), at
    made = _assigned(source, lines, at - 1)
    if made is None or made[0] != argument.id:
        return "unknown", at
    first, values = at - 1, {}
    # A list with a name of its own stands before the tensor.
    if (before := _assigned(source, lines, at - 2)) is not None:
        if before[0] in {n.id for n in ast.walk(made[1]) if isinstance(n, ast.Name)}:
            values, first = {before[0]: before[1]}, at - 2
    kind = _kind_of_tensor(made[1], values, owner)
    return kind, first if kind != "unknown" else at - 1


def _assigned(source: Source, lines: Statements, at: int) -> tuple[str, ast.expr] | None:
    """Name and value of an assignment."""
    match source.statement(lines[at]) if at >= 0 else None:
        case ast.Assign(targets=[ast.Name(name)], value=value):
            return name, value
    return None


def _is_cast(node: ast.expr) -> bool:
    """``x.y.to(torch.int64)``: of a tensor that is there already."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(), attr="to"), args=[dtype], keywords=[]
        ):
            return ast.unparse(dtype) == "torch.int64"
        case ast.Attribute():
            return True
    return False


def _kind_of_tensor(node: ast.expr, values: dict[str, ast.expr], owner: str) -> Kind:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call() as made, attr="to")):
            device, asynchronous = _destination(node)
        case ast.Call() as made:
            device, asynchronous = None, False
        case _:
            return "unknown"
    if ast.unparse(made.func) != "torch.tensor" or len(made.args) != 1:
        return "unknown"
    options = {k.arg or "**": ast.unparse(k.value) for k in made.keywords}
    tokens = made.args[0]
    tokens = values.get(tokens.id, tokens) if isinstance(tokens, ast.Name) else tokens
    if not _is_last_tokens(tokens, owner) or options.pop("dtype", None) != "torch.int64":
        return "unknown"
    pinned = options.pop("pin_memory", "False")
    made_there = options.pop("device", None)
    if options or f"{owner}.device" not in {device, made_there} or None not in {device, made_there}:
        return "unknown"
    if made_there is not None or not asynchronous:
        return "blocking"
    if pinned == "False":
        return "pageable"
    sure = pinned == "True" or pinned.startswith("is_pin_memory_available(")
    return "pinned" if sure else "unknown"


def _destination(call: ast.Call) -> tuple[str | None, bool]:
    """Device and ``non_blocking`` of a call of ``to``."""
    options = {k.arg: ast.unparse(k.value) for k in call.keywords}
    device = ast.unparse(call.args[0]) if len(call.args) == 1 else options.get("device")
    return device, options.get("non_blocking") == "True"


def _is_last_tokens(node: ast.expr, owner: str) -> bool:
    """Each request's last output token, before any output its last prompt token."""
    match node:
        case ast.ListComp(
            elt=element,
            generators=[ast.comprehension(target=ast.Name(req), iter=reqs, ifs=[], is_async=0)],
        ):
            known = {
                canonical(f"{req}.output_ids[-1] if {test} else {req}.origin_input_ids[-1]")
                for test in (f"len({req}.output_ids)", f"{req}.output_ids")
            }
            return ast.unparse(reqs) == f"{owner}.reqs" and ast.unparse(element) in known
    return False


def helper_calls(source: Source) -> list[str]:
    """Places that call the helper."""
    return [place for place, _ in calls_of(source, HELPER)]


def _uses(root: cst.CSTNode, name: str) -> int:
    return sum(node.value == name for node in walk(root, cst.Name))


def walk(root: cst.CSTNode, kind: type[Node]) -> Iterator[Node]:
    for child in root.children:
        if isinstance(child, kind):
            yield child
        yield from walk(child, kind)
