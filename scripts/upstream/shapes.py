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
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

HELPER: Final = "cumulate_penalty_output_tokens"
FEED: Final = "cumulate_output_tokens"
FLAG: Final = "is_prefill_only"
PIN: Final = "is_pin_memory_available"
SCHEDULE_BATCH: Final = "srt/managers/schedule_batch.py"
SCHEDULER: Final = "srt/managers/scheduler.py"
# The penalties themselves.
PENALTIES: Final = "srt/sampling/penaltylib"
# What batches and draft inputs call tokens that are on the device.
ON_DEVICE: Final = frozenset({"output_ids", "next_token_ids", "verified_id", "bonus_tokens"})

Node = TypeVar("Node", bound=cst.CSTNode)
Kind = Literal["blocking", "pageable", "pinned", "on device", "unknown"]
Statements = Sequence[cst.BaseStatement]


class ShapeError(RuntimeError):
    """A file is not what can be read or changed; the message names the place."""


class _Parsed:
    """A file's syntax trees. The lossless one is made when it is asked for: most files need none."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.tree = ast.parse(content)

    @functools.cached_property
    def wrapper(self) -> MetadataWrapper:
        return MetadataWrapper(cst.parse_module(self.content), unsafe_skip_copy=True)

    @functools.cached_property
    def positions(self) -> Mapping[cst.CSTNode, CodeRange]:
        return self.wrapper.resolve(PositionProvider)


@functools.lru_cache(maxsize=64)
def _parsed(content: bytes) -> _Parsed:
    # By content: a copy of a tree has the same files.
    return _Parsed(content)


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
            # What is newer than this Python cannot be judged by it.
            self._parsed = _parsed(self.path.read_bytes())
        except OSError as error:
            raise ShapeError(f"{name} cannot be read: {error}") from error
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ShapeError(f"{name} cannot be parsed: {error}") from error
        self.tree = self._parsed.tree

    @property
    def module(self) -> cst.Module:
        """The file as a lossless syntax tree."""
        try:
            return self._parsed.wrapper.module
        except (cst.ParserSyntaxError, ValueError, RecursionError) as error:
            raise ShapeError(f"{self.name} cannot be parsed: {error}") from error

    def mentions(self, word: str) -> bool:
        """Whether a word occurs in the text."""
        return word.encode() in self._parsed.content

    def line(self, node: cst.CSTNode) -> int:
        """Where a node begins."""
        return self._parsed.positions[node].start.line

    def place(self, node: cst.CSTNode) -> str:
        """``sglang/srt/...py:line`` of a node."""
        return f"sglang/{self.name}:{self.line(node)}"

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
    """The one class of that name in a file; None if there is none or are several."""
    nodes = [n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n.name == name]
    if len(nodes) != 1:
        return None
    top = [n for n in source.module.body if isinstance(n, cst.ClassDef) and n.name.value == name]
    return top[0] if top else None


def find_method(owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    """A method of a class: the last definition, which is the one that counts."""
    found = [
        statement
        for statement in owner.body.body
        if isinstance(statement, cst.FunctionDef) and statement.name.value == name
    ]
    return found[-1] if found else None


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
    assigned : SimpleStatementLine or None
        The line that sets the flag.
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
    if batch is None or FLAG not in source.code(batch):
        return shape
    shape.function = find_method(batch, "merge_batch")
    if shape.function is None:
        return shape
    names = [parameter.name.value for parameter in shape.function.params.params]
    shape.other = names[1] if len(names) > 1 else ""
    for line in shape.function.body.body:
        if isinstance(line, cst.SimpleStatementLine):
            _see_flags(shape, line)
    # Deeper down, where it is not set on every way, or elsewhere, or more than once.
    others = [line for line in _lines_that_set_flag(source, batch, shape.function)]
    if shape.assigned is None or len(others) > 1:
        shape.assigned, shape.right = (others[0] if others else None), False
    # Whoever leaves before the end takes the flag as it was.
    last = shape.assigned or shape.anchor
    if last is not None and _leaves_before(source, shape.function, last):
        shape.right, shape.anchor = False, None
    if "setattr" in source.code(shape.function):
        shape.right, shape.assigned = False, shape.assigned or shape.anchor
    return shape


def _leaves_before(source: Source, function: cst.FunctionDef, last: cst.CSTNode) -> bool:
    """Whether a ``return`` stands above a line."""
    limit = source.line(last)
    return any(source.line(node) < limit for node in walk(function, cst.Return))


def _lines_that_set_flag(
    source: Source, batch: cst.ClassDef, function: cst.FunctionDef
) -> Iterator[cst.SimpleStatementLine]:
    """Lines of a method that set the flag, and of methods of the batch that it calls."""
    yield from _lines_that_set(function, f"self.{FLAG}")
    for call in walk(function, cst.Call):
        owner, _, name = source.code(call.func).partition(".")
        called = find_method(batch, name) if owner == "self" else None
        if called is not None and called is not function:
            yield from _lines_that_set(called, f"self.{FLAG}")


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


def _lines_that_set(function: cst.FunctionDef, name: str) -> Iterator[cst.SimpleStatementLine]:
    text = cst.Module([])
    for line in walk(function, cst.SimpleStatementLine):
        targets = [
            target
            for kind in (cst.AssignTarget, cst.AugAssign, cst.AnnAssign)
            for part in walk(line, kind)
            for target in (part.target, *walk(part.target, cst.Attribute))
        ]
        if any(text.code_for_node(target) == name for target in targets):
            yield line


def sets_flag(source: Source, method: str) -> cst.SimpleStatementLine | None:
    """The line of a method of ``ScheduleBatch`` that sets the flag."""
    batch = find_class(source, "ScheduleBatch")
    function = find_method(batch, method) if batch else None
    return next(_lines_that_set(function, f"self.{FLAG}"), None) if function else None


@dataclass(frozen=True)
class FlagUse:
    """A place that reads or sets the flag of a batch or a request.

    Attributes
    ----------
    owner : str
        Whose: the last name before the flag, ``running_batch``. Empty where it is named by a string.
    sets : bool
    place : str
    """

    owner: str
    sets: bool
    place: str


def flag_uses(source: Source) -> list[FlagUse]:
    """Every place of a file that names the flag, but for keyword arguments and fields."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == FLAG:
            owner = ast.unparse(node.value).rpartition(".")[2]
            sets = not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Constant) and node.value == FLAG:
            owner, sets = "", False
        else:
            continue
        found.append(FlagUse(owner, sets, f"sglang/{source.name}:{node.lineno}"))
    return found


def calls_of(source: Source, name: str) -> list[tuple[str, str]]:
    """Calls of a method in a file: place, and the text of what is called."""
    return [
        (f"sglang/{source.name}:{node.lineno}", ast.unparse(node.func))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
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
    definition : FunctionDef or None
        That function.
    statements : sequence
        Those that make the tokens, and the call; none of an unknown site.
    node : CSTNode
        What stands for it: the first of them, or what names the method.
    always : bool
        Whether it stands in its function under no condition.
    branch : str
        The condition around it, if it is a branch of one on overlap: ``"enable_overlap"``.
    """

    source: Source
    function: str
    kind: Kind
    owner: str
    definition: cst.FunctionDef | None
    statements: Statements
    node: cst.CSTNode
    always: bool
    branch: str = ""

    @property
    def place(self) -> str:
        """``sglang/srt/...py:line`` of what makes the tokens."""
        return self.source.place(self.node)

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
                if self.definition is not None and _uses(self.definition, name) > inside:
                    return name
        return ""

    def owner_is_a_batch(self) -> bool:
        """Whether the owner is known to be a ``ScheduleBatch``, which has the helper."""
        if self.owner == "self":
            is_method = self.function.startswith("ScheduleBatch.") and self.function.count(".") == 1
            return is_method and self.source.name == SCHEDULE_BATCH
        parameters = self.definition.params.params if self.definition else ()
        return any(
            parameter.name.value == self.owner
            and parameter.annotation is not None
            and self.source.code(parameter.annotation.annotation).strip("\"'") == "ScheduleBatch"
            for parameter in parameters
        )


def token_sites(source: Source) -> list[Site]:
    """All sites of a file, in order."""
    if not source.mentions(FEED):
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
    _seen: set[cst.CSTNode] = field(default_factory=set)

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
            self._seen.add(call.func)
            kind, first = _kind(self.source, node.body, at, call, owner)
            always = node is self._definitions[-1].body
            self._add(kind, owner, node.body[first : at + 1], node.body[first], always)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        # In whatever other way the method is named.
        if node.attr.value == FEED and node not in self._seen:
            self._add("unknown", "", (), node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if node.raw_value == FEED:
            self._add("unknown", "", (), node)

    def _add(
        self,
        kind: Kind,
        owner: str,
        statements: Statements,
        node: cst.CSTNode,
        always: bool = False,
    ) -> None:
        overlap = [b for b in self._branches if b.endswith(".enable_overlap")]
        self.sites.append(
            Site(
                self.source,
                ".".join(self._names),
                kind,
                owner,
                self._definitions[-1] if self._definitions else None,
                statements,
                node,
                always,
                overlap[-1].rpartition(".")[2] if overlap else "",
            )
        )


def _feeding_call(line: cst.CSTNode) -> cst.Call | None:
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        (part,) = line.body
        if isinstance(part, cst.Expr) and isinstance(part.value, cst.Call):
            function = part.value.func
            if isinstance(function, cst.Attribute) and function.attr.value == FEED:
                return part.value
    return None


def _kind(
    source: Source, lines: Statements, at: int, call: cst.Call, owner: str
) -> tuple[Kind, int]:
    """Where the argument of a call comes from, and the first of the statements that make it."""
    if len(call.args) != 1 or call.args[0].star or call.args[0].keyword:
        return "unknown", at
    argument = source.syntax(call.args[0].value)
    if not isinstance(argument, ast.Name):
        return ("on device" if _is_on_device(argument) else "unknown"), at
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


def _is_on_device(node: ast.expr) -> bool:
    """``x.output_ids``, or that as int64: a tensor that is there already."""
    match node:
        case ast.Call(func=ast.Attribute(value=tokens, attr="to"), args=[dtype], keywords=[]):
            return ast.unparse(dtype) == "torch.int64" and _is_on_device(tokens)
        case ast.Attribute(attr=name):
            return name in ON_DEVICE
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
    asked = {f"{PIN}()", f"{PIN}({owner}.device)", "True"}
    return "pinned" if pinned in asked else "unknown"


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


def helper_fault(source: Source, sites: Sequence[Site]) -> str:
    """What keeps the method of the helper's name from being one; empty if nothing does.

    Parameters
    ----------
    source : Source
        The file of ``ScheduleBatch``.
    sites : sequence of Site
        Its sites.
    """
    batch = find_class(source, "ScheduleBatch")
    helper = find_method(batch, HELPER) if batch is not None else None
    if helper is None:
        return f"sglang/{source.name} has no {HELPER}"
    parameters = helper.params
    plain = not (helper.decorators or helper.asynchronous or parameters.kwonly_params)
    starred = isinstance(parameters.star_arg, cst.Param) or parameters.star_kwarg
    if not plain or len(parameters.params) != 1 or starred:
        return f"{source.place(helper)} {HELPER} is not called with nothing"
    if not any(site.is_helper and site.always for site in sites):
        return f"{source.place(helper)} {HELPER} does not feed in each case"
    return ""


def helper_calls(source: Source) -> list[str]:
    """Places that call the helper."""
    return [place for place, _ in calls_of(source, HELPER)]


def _uses(root: cst.CSTNode, name: str) -> int:
    return sum(node.value == name for node in walk(root, cst.Name))


def walk(root: cst.CSTNode, kind: type[Node]) -> Iterator[Node]:
    """The nodes of a kind below another one, in the order of the text."""
    waiting = list(reversed(root.children))
    while waiting:
        node = waiting.pop()
        if isinstance(node, kind):
            yield node
        waiting.extend(reversed(node.children))
