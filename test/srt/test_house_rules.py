"""The rules of the house (CONTRIBUTING.md, "The floors"), read out of the source with `ast`.

No module is imported. `read_house` turns a source tree into modules with their imports, and each
rule is a function from these to the places that break it, so that every rule is tried on small
houses that break it, and not only on the real one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
PACKAGE = REPO_ROOT / "python" / "sglang"
ROOT = "sglang.srt"

# Rooms of one floor may import each other where no circle comes of it (models use layers).
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"utils", "server_args", "configs"}),
    frozenset({"mem_cache"}),
    frozenset({"sampling", "layers", "models"}),
    frozenset({"model_executor"}),
    frozenset({"managers", "speculative"}),
    frozenset({"entrypoints"}),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# The two files that know the device know each other: the platform names its queue when it is asked.
LATE_UPWARD_IMPORTS = {(f"{ROOT}.utils.common", f"{ROOT}.model_executor.forward_stream")}

# The only door between managers and speculative, and what upstream lets ScheduleBatch call besides.
SPEC_INFO = f"{ROOT}.speculative.spec_info"
SCHEDULE_BATCH = f"{ROOT}.managers.schedule_batch"
EAGLE_INFO = {f"{ROOT}.speculative.eagle_info", f"{ROOT}.speculative.eagle_info_v2"}

DEVICE_FILES = {f"{ROOT}.model_executor.forward_stream", f"{ROOT}.utils.common"}
SERVER_ARGS = f"{ROOT}.server_args"

# What makes the model and what tests it stays out of the runtime.
NOT_AT_RUN_TIME = {"accelerate", "asv", "gguf", "hypothesis", "lab", "pytest", "transformers"}


@dataclass(frozen=True)
class Import:
    """One import of one module."""

    target: str  # a module of the house if there is one, else the name as written
    line: int
    late: bool  # inside a function: not executed when the module is imported


@dataclass
class Module:
    """One source file."""

    name: str
    tree: ast.Module
    is_package: bool
    imports: list[Import] = field(default_factory=list)


House = dict[str, Module]


def read_house(package: Path, name: str = "sglang") -> House:
    """Parse every module below `package`, which is imported as `name`."""
    house: House = {}
    for path in sorted(package.rglob("*.py")):
        parts = [name, *path.relative_to(package).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        dotted = ".".join(parts[:-1] if is_package else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        house[dotted] = Module(dotted, tree, is_package)
    for module in house.values():
        module.imports = list(_imports(module, house))
    return house


def _imports(module: Module, house: House) -> Iterator[Import]:
    for node, late in _executed(module.tree, late=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, late)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, module)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in house else base, node.lineno, late)


def _base_of(node: ast.ImportFrom, module: Module) -> str:
    """Absolute name of the module that a ``from`` import names."""
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _executed(node: ast.AST, late: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Walk a tree less what stands under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _names_type_checking(child.test):
            for other in child.orelse:
                yield other, late
                yield from _executed(other, late)
            continue
        yield child, late
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _executed(child, late or inside)


def _names_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def room_of(module: str) -> str | None:
    """First name below `ROOT`; None for `ROOT` itself and for what lies outside."""
    prefix = ROOT + "."
    return module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else None


def _at(module: Module, line: int, text: str) -> str:
    return f"{module.name}:{line}: {text}"


# --- The rules --------------------------------------------------------------------------------


def upward_imports(house: House) -> list[str]:
    """Imports, also late ones, of a floor above; and rooms that no floor lists."""
    found = []
    for module in house.values():
        room = room_of(module.name)
        if room is None:
            continue
        if room not in FLOOR_OF:
            found.append(_at(module, 1, f"no floor is stated for {room!r}"))
            continue
        for imported in module.imports:
            target = room_of(imported.target)
            if imported.late and (module.name, imported.target) in LATE_UPWARD_IMPORTS:
                continue
            if target is None:
                # `sglang` and `sglang.srt` stand on top of everything.
                if imported.target.split(".")[0] == "sglang":
                    found.append(_at(module, imported.line, f"imports {imported.target}"))
            elif FLOOR_OF.get(target, -1) > FLOOR_OF[room]:
                found.append(_at(module, imported.line, f"{room} imports {target} above it"))
    return found


def circles(house: House) -> list[str]:
    """Circles of imports that are executed when a module is imported."""
    graph = {module.name: sorted(_executes(module, house)) for module in house.values()}
    found, done, path = [], set[str](), list[str]()

    def visit(name: str) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
            return
        if name in done:
            return
        path.append(name)
        for target in graph[name]:
            visit(target)
        path.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)
    return found


def _executes(module: Module, house: House) -> set[str]:
    """Modules that importing `module` executes: its targets and the packages that hold them."""
    targets = set[str]()
    for imported in module.imports:
        parts = imported.target.split(".") if not imported.late else []
        targets |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    # A package that holds the module itself is being executed already.
    holders = {name for name in targets if f"{module.name}.".startswith(f"{name}.")}
    return (targets & house.keys()) - holders


def doors_between_managers_and_speculative(house: House) -> list[str]:
    """Imports between the two that do not go through spec_info.py."""
    found = []
    for module in house.values():
        for imported in module.imports:
            rooms = room_of(module.name), room_of(imported.target)
            if rooms == ("managers", "speculative"):
                allowed = imported.target == SPEC_INFO or (
                    module.name == SCHEDULE_BATCH and imported.target in EAGLE_INFO
                )
            elif rooms == ("speculative", "managers"):
                allowed = module.name == SPEC_INFO
            else:
                continue
            if not allowed:
                found.append(_at(module, imported.line, f"imports {imported.target}"))
    return found


def foreign_imports(house: House) -> list[str]:
    """Imports of packages that the runtime does without."""
    return [
        _at(module, imported.line, f"imports {imported.target}")
        for module in house.values()
        for imported in module.imports
        if imported.target.split(".")[0] in NOT_AT_RUN_TIME
    ]


def device_calls(house: House) -> list[str]:
    """Streams, events, pinning and device names outside the two files that know the device."""
    found = []
    for module in house.values():
        if room_of(module.name) is None or module.name in DEVICE_FILES:
            continue
        for line, text in _device_words(module.tree):
            # ServerArgs says which device names there are.
            if not (module.name == SERVER_ARGS and text == "the name 'cuda'"):
                found.append(_at(module, line, text))
    return found


def _device_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                yield node.lineno, "torch.cuda"
            case ast.Import() if any(a.name.startswith("torch.cuda") for a in node.names):
                yield node.lineno, "torch.cuda"
            case ast.ImportFrom(module=str(source)) if source.startswith("torch.cuda") or (
                source == "torch" and any(a.name in ("cuda", "Stream", "Event") for a in node.names)
            ):
                yield node.lineno, "torch.cuda"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="threading" | "asyncio"))):
                pass  # threading.Event() is no device's
            case ast.Call(func=ast.Attribute(attr="Stream" | "Event" | "cuda" as name)):
                yield node.lineno, f".{name}(...)"
            case ast.keyword(arg="pin_memory", value=value):
                if not _asks_whether_to_pin(value):
                    yield node.lineno, "pin_memory= something else than is_pin_memory_available()"
            case ast.Attribute(attr="pin_memory") | ast.Name(id="pin_memory"):
                yield node.lineno, "pin_memory"
            case ast.Constant(value=str(text)) if text == "cuda" or text.startswith("cuda:"):
                yield node.lineno, "the name 'cuda'"


def _asks_whether_to_pin(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Name(id="is_pin_memory_available")):
            return True
    return False


# --- The real house ---------------------------------------------------------------------------

Rule = Callable[[House], list[str]]
RULES: tuple[Rule, ...] = (
    upward_imports,
    circles,
    doors_between_managers_and_speculative,
    foreign_imports,
    device_calls,
)


@pytest.fixture(scope="module")
def house() -> House:
    return read_house(PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule, house: House) -> None:
    assert f"{ROOT}.utils.common" in house  # the tree was really read
    broken = rule(house)
    assert not broken, "\n" + "\n".join(broken)


def test_the_laboratory_needs_no_test_runner() -> None:
    """benchmark/lab measures every commit with today's instruments, under asv and under pytest."""
    lab = read_house(REPO_ROOT / "benchmark" / "lab", "lab")
    broken = [
        _at(module, imported.line, f"imports {imported.target}")
        for module in lab.values()
        for imported in module.imports
        if imported.target.split(".")[0] in ("asv", "asv_runner", "pytest")
    ]
    assert not broken, "\n" + "\n".join(broken)


# --- Small houses that break one rule each ----------------------------------------------------

Build = Callable[[dict[str, str]], House]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Make a house out of file texts, keyed by their path below ``sglang/srt``."""

    def make(files: dict[str, str]) -> House:
        for name, text in files.items():
            path = tmp_path / "srt" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_house(tmp_path)

    return make


SPEC = "from sglang.srt.speculative"
BROKEN: list[tuple[Rule, dict[str, str], str]] = [
    (upward_imports, {"utils/common.py": "import sglang.srt.managers.scheduler"}, "managers above"),
    (
        upward_imports,
        {"layers/a.py": "def f():\n from ..model_executor import b"},
        "model_executor",
    ),
    (upward_imports, {"mem_cache/a.py": "from sglang import Engine"}, "imports sglang"),
    (upward_imports, {"attic/a.py": ""}, "no floor is stated for 'attic'"),
    (
        upward_imports,  # allowed when it is late only
        {"utils/common.py": "import sglang.srt.model_executor.forward_stream"},
        "model_executor above",
    ),
    (
        circles,
        {
            "layers/a.py": "from sglang.srt.layers import b",
            "layers/b.py": "from .c import x",
            "layers/c.py": "if True:\n from sglang.srt.layers.a import y",
        },
        "layers.a -> sglang.srt.layers.b -> sglang.srt.layers.c -> sglang.srt.layers.a",
    ),
    (
        circles,  # through the __init__ of a package
        {
            "layers/__init__.py": "from sglang.srt.models.a import x",
            "layers/b.py": "",
            "models/a.py": "from sglang.srt.layers.b import y",
        },
        "sglang.srt.layers -> sglang.srt.models.a -> sglang.srt.layers",
    ),
    (
        doors_between_managers_and_speculative,
        {"managers/scheduler.py": f"{SPEC}.eagle_info import A", "speculative/eagle_info.py": ""},
        "managers.scheduler:1",
    ),
    (
        doors_between_managers_and_speculative,
        {"managers/scheduler.py": f"def f():\n {SPEC} import eagle_worker_v2"},
        "managers.scheduler:2",
    ),
    (
        doors_between_managers_and_speculative,
        {"speculative/eagle_info.py": "from sglang.srt.managers.schedule_batch import Req"},
        "speculative.eagle_info:1",
    ),
    (foreign_imports, {"models/a.py": "def f():\n import transformers.models"}, "models.a:2"),
    (device_calls, {"layers/a.py": "import torch\ntorch.cuda.synchronize()"}, "layers.a:2"),
    (device_calls, {"layers/a.py": "from torch import cuda"}, "layers.a:1"),
    (device_calls, {"layers/a.py": "s = torch.Stream()"}, ".Stream"),
    (device_calls, {"layers/a.py": "s = module.Event()"}, ".Event"),
    (device_calls, {"layers/a.py": "x.cuda()"}, ".cuda"),
    (device_calls, {"layers/a.py": "x = y.pin_memory()"}, "pin_memory"),
    (device_calls, {"layers/a.py": "f(pin_memory=True)"}, "pin_memory="),
    (device_calls, {"layers/a.py": "x.to('cuda:0')"}, "'cuda'"),
    (device_calls, {"layers/a.py": "ok = x.device.type == 'cuda'"}, "'cuda'"),
    (device_calls, {"server_args.py": "torch.cuda.is_available()"}, "torch.cuda"),
]


@pytest.mark.parametrize(("rule", "files", "expected"), BROKEN)
def test_a_broken_rule_is_found(
    rule: Rule, files: dict[str, str], expected: str, build: Build
) -> None:
    found = rule(build(files))
    assert len(found) == 1, found
    assert expected in found[0]


ALLOWED: list[tuple[Rule, dict[str, str]]] = [
    (
        upward_imports,
        {
            "mem_cache/a.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n from sglang.srt.managers.schedule_batch import Req",
            "models/llama.py": "import torch\nfrom sglang.srt.layers.attention import A",
            "entrypoints/engine.py": "from sglang.srt.managers.scheduler import Scheduler",
            "mem_cache/b.py": "from ..server_args import ServerArgs",
            "utils/common.py": "def f():\n from sglang.srt.model_executor import forward_stream",
            "model_executor/forward_stream.py": "",
        },
    ),
    (
        circles,
        {
            "layers/a.py": "from sglang.srt.layers import b",
            "layers/b.py": "def f():\n from .a import x\n"
            "import typing\nif typing.TYPE_CHECKING:\n from .a import y",
        },
    ),
    (
        doors_between_managers_and_speculative,
        {
            "managers/schedule_batch.py": f"{SPEC}.eagle_info import A\n{SPEC} import spec_info",
            "managers/scheduler.py": f"{SPEC}.spec_info import SpeculativeAlgorithm",
            "speculative/spec_info.py": "def f():\n from sglang.srt.managers import scheduler",
            "speculative/eagle_info.py": "",
        },
    ),
    (
        device_calls,
        {
            "layers/a.py": '"""A docstring may say cuda."""\nimport threading\n'
            "e = threading.Event()\n"
            "t = torch.tensor(x, pin_memory=is_pin_memory_available(device))\n"
            "raise ValueError('needs a device like cuda')",
            "server_args.py": "ok = device in ('cpu', 'cuda')",
            "utils/common.py": "torch.cuda.synchronize()",
            "model_executor/forward_stream.py": "s = torch.cuda.Stream()",
        },
    ),
]


@pytest.mark.parametrize(("rule", "files"), ALLOWED)
def test_what_the_rule_allows_is_not_found(rule: Rule, files: dict[str, str], build: Build) -> None:
    assert rule(build(files)) == []
