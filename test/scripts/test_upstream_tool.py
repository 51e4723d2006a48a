"""Verdict, port and cherry-pick on made-up trees of every shape, and on trees of none.

The trees run: what a port makes of them is executed, and has to feed the tokens that were asked for, in
the way that was asked for.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from upstream import cli, pick, port, shapes
from upstream.checkouts import CheckoutError, Tree, commit_all, find_tree, git
from upstream.port import BRANCH, Ported, change, write
from upstream.shapes import ShapeError, Source, token_sites
from upstream.status import all_sites, copy_status, merge_status, slow_paths, status

# What the plain path looks like in one release or another, and in forks; in words of our own.
PLAIN = {
    "two branches": """
        if self.sampling_info.penalizer_orchestrator.is_required:
            if self.enable_overlap:
                # TODO: this can be slow
                late = torch.tensor([r.output_ids[-1] if len(r.output_ids) else r.origin_input_ids[-1]
                                     for r in self.reqs], dtype=torch.int64, device=self.device)
                self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(late)
            else:
                self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(self.output_ids.to(torch.int64))
""",
    "flat": """
        if self.sampling_info.penalizer_orchestrator.is_required:
            # The device does not have them yet.
            latest = torch.tensor(
                [r.output_ids[-1] if r.output_ids else r.origin_input_ids[-1] for r in self.reqs],
                device=self.device, dtype=torch.int64,  # of another order
            )
            self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(latest)
""",
    "pageable": """
        if self.sampling_info.penalizer_orchestrator.is_required:
            tokens = [
                req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1]
                for req in self.reqs
            ]
            ids = torch.tensor(tokens, dtype=torch.int64).to(device=self.device, non_blocking=True)
            self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(ids)
""",
    "helper": """
        if self.sampling_info.penalizer_orchestrator.is_required:
            self.cumulate_penalty_output_tokens()

    def cumulate_penalty_output_tokens(self):
        tokens = [
            req.output_ids[-1] if len(req.output_ids) else req.origin_input_ids[-1]
            for req in self.reqs
        ]
        ids = torch.tensor(
            tokens, dtype=torch.int64, pin_memory=is_pin_memory_available(self.device)
        ).to(self.device, non_blocking=True)
        self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(ids)
""",
    "helper of pageable memory": """
        if self.sampling_info.penalizer_orchestrator.is_required:
            self.cumulate_penalty_output_tokens()

    def cumulate_penalty_output_tokens(self):
        ids = torch.tensor(
            [req.output_ids[-1] if len(req.output_ids) else req.origin_input_ids[-1]
             for req in self.reqs], dtype=torch.int64
        ).to(self.device, non_blocking=True)
        self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(ids)
""",
    "none": """
        pass
""",
}
SLOW = ("two branches", "flat", "pageable", "helper of pageable memory")
SPEC = {
    "blocking": """
        if batch.sampling_info.penalizer_orchestrator.is_required:
            output_ids = torch.tensor(
                [
                    (req.output_ids[-1] if len(req.output_ids) else req.origin_input_ids[-1])
                    for req in batch.reqs
                ],
                dtype=torch.int64,
                device=batch.device,
            )
            batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(output_ids)
        batch.prepared = torch.zeros(1)
""",
    "helper": """
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.cumulate_penalty_output_tokens()
""",
    "none": """
        pass
""",
}
# The end of merge_batch.
MERGE = {
    "or": "        self.has_grammar |= other.has_grammar\n",
    "long or": "        self.has_grammar = self.has_grammar or other.has_grammar\n",
    "fixed": (
        "        self.has_grammar |= other.has_grammar\n"
        "        self.is_prefill_only = self.is_prefill_only and other.is_prefill_only\n"
    ),
    "fixed the other way": "        self.is_prefill_only &= other.is_prefill_only\n",
    "wrong": "        self.is_prefill_only |= other.is_prefill_only\n",
    "on some ways": "        if other.reqs:\n            self.is_prefill_only = False\n",
    "no flags": "        self.merged = True\n",
}
IMPORTS = {
    "not in order": "from sglang.srt.utils.common import zoo, ceil_align, flatten as fl\n",
    "in brackets of its own": (
        "from sglang.srt.utils.common import (zoo, ceil_align,\n    flatten as fl)\n"
    ),
    "two on a line": "from sglang.srt.utils.common import zoo, ceil_align; import os\n",
    "by another name": "from sglang.srt.utils.common import is_pin_memory_available as pin\n",
    "none of it": "from sglang.srt.utils import flatten\nfrom sglang.srt.utils.cuda import Proxy\n",
    "one": "from sglang.srt.utils.common import ceil_align\n",
    "many": "from sglang.srt.utils.common import (\n    ceil_align,\n    zoo,\n)\n",
    "there": "from sglang.srt.utils.common import ceil_align, is_pin_memory_available\n",
    "commented": "from sglang.srt.utils.common import (\n    ceil_align,  # why\n)\n",
}
SCHEDULER = """
class Scheduler:
    def get_next_batch_to_run(self):
        if not self.{name}.is_prefill_only:
            self.running_batch.merge_batch(self.last_batch)
"""


def schedule_batch(plain: str = "none", merge: str = "fixed", imports: str = "there") -> str:
    return (
        "from __future__ import annotations\n\n"
        "import torch\n\n"
        f"{IMPORTS[imports]}\n\n"
        "class ScheduleBatch:\n"
        "    is_prefill_only: bool = False\n"
        "    has_grammar: bool = False\n\n"
        "    def prepare_for_decode(self):"
        f"{PLAIN[plain]}\n"
        "    def merge_batch(self, other: ScheduleBatch):\n"
        "        self.reqs.extend(other.reqs)\n"
        f"{MERGE[merge]}\n"
        "        if self.spec_info:\n"
        "            self.spec_info.merge_batch(other.spec_info)\n\n"
        "    def mix_with_running(self, running_batch):\n"
        "        self.is_prefill_only = False\n"
        "        self.merge_batch(running_batch)\n"
    )


def make_tree(
    root: Path,
    batch: str,
    spec: str = "none",
    tests: str = "running_batch",
    pin: str = "device=None",
    batch_type: str = "ScheduleBatch",
) -> Tree:
    package = root / "python" / "sglang"
    files = {
        "srt/managers/schedule_batch.py": batch,
        "srt/managers/scheduler.py": SCHEDULER.format(name=tests),
        "srt/utils/common.py": f"def is_pin_memory_available({pin}):\n    return False\n",
        "srt/speculative/eagle_info_v2.py": (
            "from __future__ import annotations\n\nimport torch\n\nclass EagleDraftInputV2Mixin:\n"
            f"    def prepare_for_decode(self, batch: {batch_type}):{SPEC[spec]}"
        ),
        "version.py": '__version__ = "0.5.10.dev7"\n',
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    commit_all(root, "A fork")
    return find_tree(root)


def run_file(tree: Tree, name: str, pinned: list[Any]) -> dict[str, Any]:
    """The names of a file of the tree, executed with utilities that tell what they were asked."""

    def is_pin_memory_available(*args: Any) -> bool:
        pinned.append(args)
        return False

    common = ModuleType("common")
    common.__dict__.update(
        is_pin_memory_available=is_pin_memory_available, ceil_align=None, zoo=None, flatten=None
    )
    stubs = {f"sglang.srt.utils{end}": common for end in ("", ".common")}
    stubs["sglang.srt.utils.cuda"] = ModuleType("cuda")
    stubs["sglang.srt.utils.cuda"].__dict__["Proxy"] = None
    before = {key: sys.modules.get(key) for key in stubs}
    sys.modules.update(stubs)
    try:
        names: dict[str, Any] = {"__name__": "made_up"}
        exec(compile((tree.package / name).read_text(), name, "exec"), names)
        return names
    finally:
        for key, module in before.items():
            sys.modules.pop(key) if module is None else sys.modules.update({key: module})


class Penalties:
    """An orchestrator that keeps what it is fed."""

    is_required = True

    def __init__(self) -> None:
        self.fed: list[torch.Tensor] = []

    def cumulate_output_tokens(self, ids: torch.Tensor) -> None:
        self.fed.append(ids)


def a_batch(kind: type) -> Any:
    batch = kind()
    batch.device, batch.enable_overlap, batch.spec_info = "cpu", True, None
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=Penalties())
    batch.reqs = [
        SimpleNamespace(output_ids=[5, 6], origin_input_ids=[1]),
        SimpleNamespace(output_ids=[], origin_input_ids=[7, 8]),
    ]
    return batch


def apply(tree: Tree, pr: int) -> Ported:
    done = change(tree, pr)
    write(tree, done)
    return done


# --- Verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("merge", "tests", "verdict"),
    [
        ("or", "running_batch", "affected"),
        ("long or", "running_batch", "affected"),
        ("or", "last_batch", "latent"),
        ("or", "batch_of_ours", "unknown"),
        ("or", "req", "not affected"),
        ("fixed", "running_batch", "fixed"),
        ("fixed the other way", "running_batch", "fixed"),
        ("fixed", "last_batch", "fixed"),
        ("wrong", "running_batch", "unknown"),
        ("on some ways", "running_batch", "unknown"),
        ("no flags", "running_batch", "affected"),
    ],
)
def test_verdict_on_the_flag(merge: str, tests: str, verdict: str, tmp_path: Path) -> None:
    text = schedule_batch(merge=merge)
    found = merge_status(make_tree(tmp_path, text, tests=tests))
    assert found.verdict == verdict
    lines = text.split("\n")
    set_here = [
        i for i, line in enumerate(lines, 1) if "self.is_prefill_only" in line and "mix" not in line
    ]
    first = lines.index("    def merge_batch(self, other: ScheduleBatch):") + 1
    where = set_here[0] if set_here[0] > first and merge in SET else first
    assert found.reason.startswith(f"sglang/srt/managers/schedule_batch.py:{where} ")


AND = "        self.is_prefill_only = self.is_prefill_only and other.is_prefill_only\n"
NOT_FIXED = {
    "set once more": (AND, AND + "        self.is_prefill_only = any(r.x for r in self.reqs)\n"),
    "set before": (AND, "        self.is_prefill_only = other.is_prefill_only\n" + AND),
    "set again below a condition": (
        AND,
        AND + "        if self.x:\n            self.is_prefill_only = False\n",
    ),
    "left above it": (AND, "        if not self.reqs:\n            return\n" + AND),
    "set among others": (AND, "        self.is_prefill_only, self.x = other.is_prefill_only, 1\n"),
    "set by name": (AND, "        for n in FLAGS:\n            setattr(self, n, True)\n"),
}


@pytest.mark.parametrize("name", NOT_FIXED)
def test_a_flag_that_is_not_always_the_and_of_both(name: str, tmp_path: Path) -> None:
    old, new = NOT_FIXED[name]
    text = schedule_batch(merge="fixed")
    assert old in text
    tree = make_tree(tmp_path, text.replace(old, new))
    assert merge_status(tree).verdict == "unknown"
    assert change(tree, 21840).outcome == "unknown shape"


def test_who_leaves_early_is_not_ported(tmp_path: Path) -> None:
    line = "        self.reqs.extend(other.reqs)\n"
    early = "        if not self.reqs:\n            return self.adopt(other)\n"
    text = schedule_batch(merge="or").replace(line, early + line)
    assert change(make_tree(tmp_path, text), 21840).outcome == "unknown shape"


def test_two_classes_of_that_name(tmp_path: Path) -> None:
    text = (
        schedule_batch("flat", merge="or") + "\nif True:\n    class ScheduleBatch:\n        pass\n"
    )
    tree = make_tree(tmp_path, text)
    assert [change(tree, pr).outcome for pr in (21840, 28500)] == ["unknown shape"] * 2


def test_of_two_definitions_the_last_one_counts(tmp_path: Path) -> None:
    text = schedule_batch(merge="or")
    again = "    def merge_batch(self, other: ScheduleBatch):\n" + AND
    assert merge_status(make_tree(tmp_path, text + "\n" + again)).verdict == "fixed"


SET = ("fixed", "fixed the other way", "wrong", "on some ways")
ODD_USES = {
    "in a mixin": (
        "mixin.py",
        "def f(self):\n    return self.running_batch.is_prefill_only\n",
        "affected",
    ),
    "by a string": ("mixin.py", 'def f(b):\n    return getattr(b, "is_prefill_only")\n', "unknown"),
    "by another name": ("mixin.py", "def f(b):\n    return b.is_prefill_only\n", "unknown"),
    "set by the scheduler": (
        "mixin.py",
        "def f(self):\n    self.running_batch.is_prefill_only = False\n",
        "unknown",
    ),
    "of a request": ("mixin.py", "def f(req):\n    return req.is_prefill_only\n", "latent"),
}


@pytest.mark.parametrize("name", ODD_USES)
def test_a_flag_that_is_asked_for_elsewhere(name: str, tmp_path: Path) -> None:
    file, text, verdict = ODD_USES[name]
    tree = make_tree(tmp_path, schedule_batch(merge="or"), tests="last_batch")
    (tree.package / "srt" / "managers" / file).write_text(text)
    found = merge_status(tree)
    assert found.verdict == verdict
    assert verdict == "latent" or "mixin.py:2" in found.reason


def test_a_flag_without_an_annotation(tmp_path: Path) -> None:
    text = schedule_batch(merge="or").replace(
        "is_prefill_only: bool = False", "is_prefill_only = False"
    )
    assert merge_status(make_tree(tmp_path, text)).verdict == "affected"


def test_a_flag_that_only_the_scheduler_knows(tmp_path: Path) -> None:
    text = schedule_batch(merge="no flags").replace("is_prefill_only", "other_flag")
    assert merge_status(make_tree(tmp_path, text)).verdict == "unknown"


def test_a_copy_in_a_place_of_its_own(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch("helper"))
    assert copy_status(tree).verdict == "fixed"
    runner = tree.package / "srt" / "model_executor" / "runner.py"
    runner.parent.mkdir()
    runner.write_text("class Runner:\n    def f(self, batch):" + SPEC["blocking"])
    found = copy_status(tree)
    assert found.verdict == "affected" and "model_executor/runner.py:4" in found.reason
    # Nothing says what `batch` is.
    assert change(tree, 28500).outcome == "unknown shape"


def test_what_reaches_a_latent_flag(tmp_path: Path) -> None:
    text = schedule_batch(merge="or").replace("        self.is_prefill_only = False\n", "")
    tree = make_tree(tmp_path, text, tests="last_batch")
    mixin = tree.package / "srt" / "multiplex" / "multiplexing_mixin.py"
    mixin.parent.mkdir()
    mixin.write_text("def f(self):\n    self.running_batch.merge_batch(self.split_prefill_batch)\n")
    mixed, multiplexed = merge_status(tree).places
    line = text.split("\n").index("        self.merge_batch(running_batch)") + 1
    assert "--enable-mixed-chunk" in mixed and f"schedule_batch.py:{line} mix_with_running" in mixed
    assert "--enable-pdmux" in multiplexed and "multiplexing_mixin.py:2 " in multiplexed


@pytest.mark.parametrize(
    ("plain", "spec", "slow"),
    [
        ("two branches", "none", {"decode"}),
        ("two branches", "blocking", {"decode", "spec_decode"}),
        ("helper", "blocking", {"spec_decode"}),
        ("helper", "helper", set()),
        ("helper of pageable memory", "none", {"decode"}),
        ("helper of pageable memory", "helper", {"decode", "spec_decode"}),
    ],
)
def test_which_paths_are_slow(plain: str, spec: str, slow: set[str], tmp_path: Path) -> None:
    assert slow_paths(make_tree(tmp_path, schedule_batch(plain), spec)) == slow


def test_a_flag_that_a_method_of_its_own_merges(tmp_path: Path) -> None:
    text = schedule_batch(merge="or").replace(
        "    def mix_with_running",
        "    def _flags(self, other):\n        self.is_prefill_only &= other.is_prefill_only\n\n"
        "    def mix_with_running",
    )
    tree = make_tree(
        tmp_path,
        text.replace("if self.spec_info:", "self._flags(other)\n        if self.spec_info:"),
    )
    assert merge_status(tree).verdict == "unknown"


def test_a_tree_without_the_flag(tmp_path: Path) -> None:
    text = schedule_batch(merge="no flags").replace("is_prefill_only", "other_flag")
    tree = make_tree(tmp_path, text, tests="req")
    assert merge_status(tree).verdict == "not affected"


@pytest.mark.parametrize(
    ("plain", "spec", "verdict", "kinds"),
    [
        ("two branches", "none", "affected", ["blocking", "on device"]),
        ("two branches", "blocking", "affected", ["blocking", "on device", "blocking"]),
        ("flat", "blocking", "affected", ["blocking", "blocking"]),
        ("pageable", "blocking", "affected", ["pageable", "blocking"]),
        # It calls what is not there.
        ("pageable", "helper", "unknown", ["pageable"]),
        ("helper", "helper", "fixed", ["pinned"]),
        ("helper", "none", "fixed", ["pinned"]),
        ("helper", "blocking", "affected", ["pinned", "blocking"]),
        ("helper of pageable memory", "helper", "affected", ["pageable"]),
        ("none", "none", "not affected", []),
    ],
)
def test_verdict_on_the_copy(
    plain: str, spec: str, verdict: str, kinds: list[str], tmp_path: Path
) -> None:
    tree = make_tree(tmp_path, schedule_batch(plain), spec)
    found = copy_status(tree)
    assert found.verdict == verdict
    sites, calls = all_sites(tree)
    assert [site.kind for site in sites] == kinds
    assert len(found.places) == len(sites) + len(calls)


FEED = "self.sampling_info.penalizer_orchestrator.cumulate_output_tokens"
UNKNOWN = {
    "other tokens": ("r.output_ids[-1] if", "r.output_ids[-2] if"),
    "a filter": ("for r in self.reqs", "for r in self.reqs if r.penalised"),
    "another dtype": ("dtype=torch.int64", "dtype=torch.int32"),
    "another device": ("device=self.device", "device=self.other"),
    "another maker": ("torch.tensor(", "make_tensor("),
    "one statement between": (
        f"                {FEED}(late)",
        f"                log(1)\n                {FEED}(late)",
    ),
    "more arguments": ("(late)", "(late, 1)"),
    "two statements on a line": (f"{FEED}(late)", f"{FEED}(late); log(1)"),
    "on one line with its condition": (f"{FEED}(late)", f"if self.reqs: {FEED}(late)"),
    "by another name": (f"{FEED}(late)", f"feed = {FEED}\n                feed(late)"),
    "by a string": (f"{FEED}(late)", 'getattr(self.sampling_info, "cumulate_output_tokens")(late)'),
    "tokens of the host": ("self.output_ids.to(torch.int64)", "self.tokens_on_the_host"),
    "a value that is used": (f"{FEED}(late)", f"self.x = {FEED}(late)"),
    "starred": ("(late)", "(*late)"),
    "all on one line": ("                late = ", "                x = 1; late = "),
}


HELPERS = {
    "wants tokens": ("(self):\n        tokens", "(self, tokens):\n        tokens"),
    "is static": ("    def cumulate_penalty", "    @staticmethod\n    def cumulate_penalty"),
    "does not always feed": (
        "        self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(ids)",
        "        if self.x:\n            ids = ids\n"
        "            self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(ids)",
    ),
    "is not sure to pin": ("available(self.device)", "available('cpu') and False"),
}


@pytest.mark.parametrize("name", HELPERS)
def test_what_only_bears_the_name_of_the_helper(name: str, tmp_path: Path) -> None:
    old, new = HELPERS[name]
    text = schedule_batch("helper")
    assert old in text
    tree = make_tree(tmp_path, text.replace(old, new), "blocking")
    assert copy_status(tree).verdict == "unknown"
    assert change(tree, 28500).outcome == "unknown shape"


NAMES = {
    "of another module": ("common import ceil_align", "other import is_pin_memory_available, ceil"),
    "of its own": (
        "class ScheduleBatch:",
        "def is_pin_memory_available():\n    pass\n\nclass ScheduleBatch:",
    ),
    "a constant": (
        "class ScheduleBatch:",
        "is_pin_memory_available = False\n\nclass ScheduleBatch:",
    ),
    "torch by another name": ("import torch\n", "import torch as th\n"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_mean_something_else(name: str, tmp_path: Path) -> None:
    old, new = NAMES[name]
    tree = make_tree(tmp_path, schedule_batch("flat", imports="one").replace(old, new, 1))
    assert change(tree, 28500).outcome == "unknown shape"


@pytest.mark.parametrize("pin", ["*, device", "a, b", "**options", "*devices"])
def test_a_function_that_wants_more(pin: str, tmp_path: Path) -> None:
    assert (
        change(make_tree(tmp_path, schedule_batch("flat"), pin=pin), 28500).outcome
        == "unknown shape"
    )


@pytest.mark.parametrize("kind", ["ModelWorkerBatch", "Any", "ScheduleBatch | None"])
def test_what_is_not_known_to_be_a_batch(kind: str, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch("flat"), "blocking", batch_type=kind)
    assert copy_status(tree).verdict == "affected"
    assert change(tree, 28500).outcome == "unknown shape"


PORT_ONLY = {
    "a name that is needed later": (
        f"{FEED}(late)",
        f"{FEED}(late)\n                self.latest = late",
    ),
    "another class": ("class ScheduleBatch:", "class ScheduleBatch:\n    x = 1\n\nclass Mixin:"),
}


@pytest.mark.parametrize("name", PORT_ONLY)
def test_a_known_copy_that_cannot_be_replaced(name: str, tmp_path: Path) -> None:
    old, new = PORT_ONLY[name]
    text = schedule_batch("two branches").replace(old, new, 1)
    tree = make_tree(tmp_path, text)
    assert copy_status(tree).verdict == "affected"
    done = change(tree, 28500)
    assert done.outcome == "unknown shape" and "schedule_batch.py:" in done.shapes[0]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_shape_is_told_with_its_place_and_left(name: str, tmp_path: Path) -> None:
    text = schedule_batch("two branches")
    old, new = UNKNOWN[name]
    assert old in text
    tree = make_tree(tmp_path, text.replace(old, new))
    found = copy_status(tree)
    assert found.verdict == "unknown"
    assert found.reason.startswith("sglang/srt/managers/schedule_batch.py:")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert cli.main(["port", str(tmp_path)]) == cli.UNKNOWN_SHAPE
    assert git(tmp_path, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert (git(tmp_path, "rev-parse", "HEAD"), git(tmp_path, "status", "--porcelain")) == (
        head,
        "",
    )
    assert cli.main(["status", str(tmp_path)]) == cli.UNKNOWN_SHAPE


def test_one_unknown_fix_keeps_the_other_one_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = schedule_batch("two branches", merge="or").replace("output_ids[-1]", "output_ids[-3]")
    make_tree(tmp_path, text)
    assert cli.main(["port", "--json", str(tmp_path)]) == cli.UNKNOWN_SHAPE
    told = json.loads(capsys.readouterr().out)
    assert [one["outcome"] for one in told["fixes"]] == ["portable", "unknown shape"]
    # Nothing is claimed that did not happen.
    assert told["branch"] is None and not any(one["commit"] for one in told["fixes"])
    assert cli.main(["port", str(tmp_path)]) == cli.UNKNOWN_SHAPE
    assert "port --fix 21840" in capsys.readouterr().out
    assert not git(tmp_path, "branch", "--list", BRANCH)
    # The one that is known can be had alone.
    assert cli.main(["port", "--fix", "21840", str(tmp_path)]) == 0
    assert git(tmp_path, "branch", "--list", BRANCH)


# --- Port ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", ["or", "long or"])
@pytest.mark.parametrize("flags", [(a, b) for a in (True, False) for b in (True, False)])
def test_a_ported_merge(merge: str, flags: tuple[bool, bool], tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch(merge=merge))
    assert apply(tree, 21840).outcome == "ported"
    kind = run_file(tree, shapes.SCHEDULE_BATCH, [])["ScheduleBatch"]
    left, right = a_batch(kind), a_batch(kind)
    left.is_prefill_only, right.is_prefill_only = flags
    left.merge_batch(right)
    assert left.is_prefill_only is all(flags)
    assert merge_status(tree).verdict == "fixed"


def test_a_merge_without_a_place_for_the_flag(tmp_path: Path) -> None:
    done = change(make_tree(tmp_path, schedule_batch(merge="no flags")), 21840)
    assert done.outcome == "unknown shape" and "schedule_batch.py:" in done.shapes[0]


@pytest.mark.parametrize("pin", ["device=None", ""])
@pytest.mark.parametrize("imports", IMPORTS)
@pytest.mark.parametrize("plain", SLOW)
def test_a_ported_copy(plain: str, imports: str, pin: str, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch(plain, imports=imports), "blocking", pin=pin)
    done = apply(tree, 28500)
    assert done.outcome == "ported" and copy_status(tree).verdict == "fixed"
    pinned: list[Any] = []
    kind = run_file(tree, shapes.SCHEDULE_BATCH, pinned)["ScheduleBatch"]
    mixin = run_file(tree, "srt/speculative/eagle_info_v2.py", [])["EagleDraftInputV2Mixin"]
    batch = a_batch(kind)
    batch.prepare_for_decode()
    mixin().prepare_for_decode(batch)
    fed = batch.sampling_info.penalizer_orchestrator.fed
    # Output tokens go before prompt tokens.
    assert [(t.tolist(), t.dtype) for t in fed] == [([6, 8], torch.int64)] * 2
    # It is asked with the device where it takes one.
    assert pinned == [("cpu",) if pin else ()] * 2
    # Second time: nothing.
    assert change(tree, 28500).outcome == "already fixed"


@pytest.mark.parametrize("overlap", [True, False])
def test_the_branch_without_overlap_stays(overlap: bool, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch("two branches"))
    apply(tree, 28500)
    batch = a_batch(run_file(tree, shapes.SCHEDULE_BATCH, [])["ScheduleBatch"])
    batch.enable_overlap, batch.output_ids = overlap, torch.tensor([3, 4], dtype=torch.int32)
    batch.prepare_for_decode()
    (fed,) = batch.sampling_info.penalizer_orchestrator.fed
    assert fed.tolist() == ([6, 8] if overlap else [3, 4])


def test_what_a_port_leaves_to_the_letter(tmp_path: Path) -> None:
    text = schedule_batch("flat", merge="or").replace("has_grammar |=", "has_grammar   |=  ")
    text = text.replace("import torch\n", "import  torch  # with a word\n") + "# last, no line end"
    tree = make_tree(tmp_path, text)
    for pr in (21840, 28500):
        apply(tree, pr)
    after = (tree.package / shapes.SCHEDULE_BATCH).read_text()
    removed = PLAIN["flat"].split("# The device does not have them yet.\n")[1]
    flag = "        self.has_grammar   |=   other.has_grammar\n"
    before_helper, _, behind = after.partition(f"\n    def {shapes.HELPER}")
    helper, _, rest = behind.partition("\n\n    def merge_batch")
    # With what was put in taken out again, and what was taken out put in, it is what it was.
    call = f"            self.{shapes.HELPER}()\n"
    line = "        self.is_prefill_only = self.is_prefill_only and other.is_prefill_only\n"
    restored = f"{before_helper}\n\n    def merge_batch{rest}".replace(call, removed)
    restored = restored.replace(flag + line, flag)
    assert restored.replace("\n\n\n    def merge", "\n\n    def merge") == text
    assert helper.startswith("(self):") and helper.count("cumulate_output_tokens") == 1


def test_that_it_was_slow_is_not_said_any_more(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch("two branches"))
    apply(tree, 28500)
    assert "this can be slow" not in (tree.package / shapes.SCHEDULE_BATCH).read_text()


def test_a_port_keeps_tabs_and_line_ends(tmp_path: Path) -> None:
    text = schedule_batch("flat", merge="or").replace("    ", "\t").replace("\n", "\r\n")
    tree = make_tree(tmp_path, "pass\n")
    path = tree.package / shapes.SCHEDULE_BATCH
    path.write_bytes(text.encode())
    for pr in (21840, 28500):
        assert apply(tree, pr).outcome == "ported"
    after = path.read_bytes()
    assert after.count(b"\r\n") == after.count(b"\n")
    added = [line for line in after.split(b"\r\n") if b"cumulate_penalty" in line]
    assert len(added) == 2 and all(line.startswith(b"\t") for line in added)
    ast.parse(after)


def test_a_port_keeps_the_encoding(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "pass\n")
    text = "# -*- coding: latin-1 -*-\n# \xe9t\xe9\n" + schedule_batch("flat", merge="or")
    path = tree.package / shapes.SCHEDULE_BATCH
    path.write_bytes(text.encode("latin-1"))
    for pr in (21840, 28500):
        assert apply(tree, pr).outcome == "ported"
    assert b"# \xe9t\xe9\n" in path.read_bytes()


def test_comments_inside_of_what_is_replaced_stay(tmp_path: Path) -> None:
    text = schedule_batch("pageable").replace(
        "            ids =", "            # One copy.\n            ids ="
    )
    tree = make_tree(tmp_path, text)
    apply(tree, 28500)
    lines = (tree.package / shapes.SCHEDULE_BATCH).read_text().split("\n")
    assert lines[lines.index("            # One copy.") + 1].endswith(
        "self.cumulate_penalty_output_tokens()"
    )


def test_an_import_that_nothing_needs_any_more_goes(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch("flat"), "blocking")
    path = tree.package / "srt/speculative/eagle_info_v2.py"
    apply(tree, 28500)
    assert "import torch" in path.read_text()  # torch.zeros is left
    second = make_tree(tmp_path / "b", schedule_batch("flat"), "blocking")
    path = second.package / "srt/speculative/eagle_info_v2.py"
    path.write_text(path.read_text().replace("        batch.prepared = torch.zeros(1)\n", ""))
    apply(second, 28500)
    assert "torch" not in path.read_text()


NEW = "from sglang.srt.utils.common import is_pin_memory_available\n"
IMPORTED = {
    "none of it": (
        f"from sglang.srt.utils import flatten\n{NEW}from sglang.srt.utils.cuda import Proxy\n"
    ),
    "one": "from sglang.srt.utils.common import ceil_align, is_pin_memory_available\n",
    "many": (
        "from sglang.srt.utils.common import (\n"
        "    ceil_align,\n    is_pin_memory_available,\n    zoo,\n)\n"
    ),
    "there": IMPORTS["there"],
    # Not into a line that would be too long, nor between comments.
    "not in order": IMPORTS["not in order"] + NEW,
    "commented": IMPORTS["commented"] + NEW,
    "in brackets of its own": (
        "from sglang.srt.utils.common import (is_pin_memory_available, zoo, ceil_align,\n"
        "    flatten as fl)\n"
    ),
    "two on a line": (
        "from sglang.srt.utils.common import is_pin_memory_available, zoo, ceil_align; import os\n"
    ),
    "by another name": IMPORTS["by another name"] + NEW,
}


@pytest.mark.parametrize("imports", IMPORTS)
def test_where_an_import_goes(imports: str, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch("flat", imports=imports))
    apply(tree, 28500)
    text = (tree.package / shapes.SCHEDULE_BATCH).read_text()
    found = text.split("import torch\n\n")[1].split("\n\nclass ScheduleBatch")[0]
    assert found == IMPORTED[imports]


# --- Branches -----------------------------------------------------------------------------------


def test_commits_of_a_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, schedule_batch("two branches", merge="or"), "blocking")
    head, before = git(tmp_path, "rev-parse", "HEAD"), git(tmp_path, "status", "--porcelain")
    assert cli.main(["port", str(tmp_path)]) == 0
    assert f"git merge {BRANCH}" in capsys.readouterr().out
    assert (git(tmp_path, "rev-parse", "HEAD"), git(tmp_path, "status", "--porcelain")) == (
        head,
        before,
    )
    subjects = git(
        tmp_path,
        "log",
        "--reverse",
        "--format=%(trailers:key=Upstream-PR,valueonly,separator=)",
        f"main..{BRANCH}",
    )
    assert subjects.split() == ["sgl-project/sglang#21840", "sgl-project/sglang#28500"]
    body = git(tmp_path, "log", "-1", "--format=%b", BRANCH)
    assert "sglang/srt/speculative/eagle_info_v2.py:8: EagleDraftInputV2Mixin" in body
    # The second time there is nothing to do.
    tip = git(tmp_path, "rev-parse", BRANCH)
    assert cli.main(["port", str(tmp_path)]) == 0
    assert "Nothing to do." in capsys.readouterr().out
    assert git(tmp_path, "rev-parse", BRANCH) == tip
    git(tmp_path, "merge", "--quiet", BRANCH)
    assert [one.verdict for one in status(find_tree(tmp_path))] == ["fixed", "fixed"]
    # Nor is there once it is merged and history has gone on.
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "later")
    for verb in ("port", "pick"):
        assert cli.main([verb, str(tmp_path)]) == 0
        assert "Nothing to do." in capsys.readouterr().out
    assert git(tmp_path, "rev-parse", BRANCH) == tip


def test_from_a_commit_that_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    git(tmp_path, "tag", "v0.5.99")
    assert cli.main(["port", str(tmp_path)]) == 0
    git(tmp_path, "merge", "--quiet", BRANCH)
    for verb in (port.port, pick.pick):
        done = verb(find_tree(tmp_path), [21840], start="v0.5.99", dry_run=True)
        assert done[0].outcome in (port.PORTABLE, pick.CONFLICT)
        assert verb(find_tree(tmp_path), [21840])[0].outcome == "already fixed"


def test_a_branch_that_was_merged_is_gone_on_with(tmp_path: Path) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    assert cli.main(["port", "--fix", "21840", str(tmp_path)]) == 0
    git(tmp_path, "merge", "--quiet", BRANCH)
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "later")
    assert cli.main(["port", str(tmp_path)]) == 0
    assert git(tmp_path, "log", "--format=%s", f"main..{BRANCH}").startswith("[Spec]")


@pytest.mark.parametrize("branch", ["@{-1}", "@", "HEAD", "-x", "a b", "refs/../x"])
def test_what_is_no_name_for_a_branch(branch: str, tmp_path: Path) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    git(tmp_path, "checkout", "--quiet", "-b", "feature")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "precious")
    git(tmp_path, "checkout", "--quiet", "main")
    before = git(tmp_path, "for-each-ref")
    assert cli.main(["port", f"--branch={branch}", str(tmp_path)]) == cli.FAILED
    assert git(tmp_path, "for-each-ref") == before


def test_a_tag_with_the_branchs_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    git(tmp_path, "tag", BRANCH)
    assert cli.main(["port", str(tmp_path)]) == 0
    assert f"git merge heads/{BRANCH}" in capsys.readouterr().out
    git(tmp_path, "checkout", "--quiet", "-b", "tagged")
    git(tmp_path, "tag", "tagged")
    assert cli.main(["port", "--branch", "tagged", str(tmp_path)]) == 0
    assert [one.verdict for one in status(find_tree(tmp_path))] == ["fixed", "fixed"]


def test_worktrees_of_the_user_are_left_alone(tmp_path: Path) -> None:
    make_tree(tmp_path / "a", schedule_batch("flat", merge="or"))
    git(tmp_path / "a", "worktree", "add", "--quiet", "-b", "feat", str(tmp_path / "usb"))
    (tmp_path / "usb").rename(tmp_path / "unmounted")
    assert cli.main(["port", str(tmp_path / "a")]) == 0
    (tmp_path / "unmounted").rename(tmp_path / "usb")
    assert git(tmp_path / "usb", "status", "--porcelain") == ""


def test_a_sparse_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"), "blocking")
    git(tmp_path, "sparse-checkout", "set", "python/sglang/srt/managers", "python/sglang/srt/utils")
    assert cli.main(["port", str(tmp_path)]) == cli.FAILED
    assert "sparse checkout" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number: int, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree", schedule_batch("flat", merge="or"))
    (tmp_path / "tmp").mkdir()
    scripts = Path(pick.REPO_ROOT) / "scripts"
    # Stops itself where everything that is temporary is there.
    text = (
        f"import os, signal, sys; sys.path.insert(0, {str(scripts)!r})\n"
        "from upstream import cli, port\n"
        f"port.write = lambda *a: os.kill(os.getpid(), {int(number)}) or signal.pause()\n"
        f"sys.exit(cli.main(['port', {str(tmp_path / 'tree')!r}]))\n"
    )
    variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", text], env=variables, capture_output=True, timeout=60
    )
    assert done.returncode == cli.FAILED and b"interrupted" in done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    assert git(tmp_path / "tree", "for-each-ref", "--format=%(refname)") == "refs/heads/main"


def test_a_shallow_clone(tmp_path: Path) -> None:
    make_tree(tmp_path / "a", schedule_batch("flat", merge="or"))
    for name in ("one", "two"):
        git(tmp_path / "a", "commit", "--quiet", "--allow-empty", "-m", name)
    url = (tmp_path / "a").as_uri()
    subprocess.run(["git", "clone", "-q", "--depth=1", url, str(tmp_path / "b")], check=True)
    for key in ("user.name", "user.email"):
        git(tmp_path / "b", "config", key, "x@y")
    assert cli.main(["port", str(tmp_path / "b")]) == 0
    assert git(tmp_path / "b", "log", "--format=%s", f"main..{BRANCH}").count("\n") == 1
    assert git(tmp_path / "b", "rev-parse", "--is-shallow-repository") == "true"


def test_a_port_to_the_branch_that_is_checked_out(tmp_path: Path) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    assert cli.main(["port", "--branch", "main", str(tmp_path)]) == 0
    assert git(tmp_path, "status", "--porcelain") == ""
    assert [one.verdict for one in status(find_tree(tmp_path))] == ["fixed", "fixed"]


@pytest.mark.parametrize("verb", ["port", "pick"])
def test_a_dirty_tree_is_refused(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_tree(tmp_path, schedule_batch("flat", merge="or"))
    path = tree.package / shapes.SCHEDULE_BATCH
    path.write_text(path.read_text() + "# mine\n")
    assert cli.main([verb, str(tmp_path)]) == cli.FAILED
    assert "python/sglang/srt/managers/schedule_batch.py" in capsys.readouterr().err
    assert path.read_text().endswith("# mine\n")
    # A file of the user's that git does not know is no reason.
    git(tmp_path, "checkout", "--quiet", ".")
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main([verb, "--fix", "21840", str(tmp_path)]) in (0, cli.CONFLICT)


@pytest.mark.parametrize("verb", ["port", "pick"])
def test_a_branch_that_has_gone_elsewhere_is_refused(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    git(tmp_path, "checkout", "--quiet", "-b", BRANCH)
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "elsewhere")
    git(tmp_path, "checkout", "--quiet", "main")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "here")
    assert cli.main([verb, str(tmp_path)]) == cli.FAILED
    assert f"git branch -D {BRANCH}" in capsys.readouterr().err
    assert cli.main([verb, "--branch", "no..name", str(tmp_path)]) == cli.FAILED


def test_a_merge_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    (tmp_path / ".git" / "MERGE_HEAD").write_text(git(tmp_path, "rev-parse", "HEAD") + "\n")
    with pytest.raises(CheckoutError, match="in the middle of something"):
        port.port(find_tree(tmp_path))


def test_hooks_of_the_user_do_not_run(tmp_path: Path) -> None:
    make_tree(tmp_path, schedule_batch("flat", merge="or"))
    names = (
        "pre-commit",
        "commit-msg",
        "post-checkout",
        "prepare-commit-msg",
        "reference-transaction",
    )
    for name in (*names, "post-merge"):
        hook = tmp_path / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\ntouch ran\nexit 1\n")
        hook.chmod(0o755)
    git(tmp_path, "config", "commit.gpgsign", "true")
    assert cli.main(["port", str(tmp_path)]) == 0
    assert cli.main(["port", "--branch", "main", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("**/ran"))


def test_a_package_without_git(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_tree(tmp_path / "fork", schedule_batch("flat", merge="or"), "blocking")
    site = tmp_path / "site-packages"
    site.mkdir()
    made.package.rename(site / "sglang")
    assert (
        find_tree(site).repository is None and find_tree(site / "sglang").package == site / "sglang"
    )
    assert cli.main(["port", str(site)]) == cli.FAILED
    assert "port --diff" in capsys.readouterr().err
    assert cli.main(["port", "--diff", str(site)]) == 0
    patch = capsys.readouterr().out
    assert [one.verdict for one in status(find_tree(site))] == ["affected", "affected"]
    subprocess.run(["git", "apply", "-p1"], input=patch, text=True, cwd=site, check=True)
    assert [one.verdict for one in status(find_tree(site))] == ["fixed", "fixed"]


def test_a_patch_with_signs_that_end_no_line(tmp_path: Path) -> None:
    text = schedule_batch("flat", merge="or").replace(
        "        self.has_grammar |=",
        "        # a\u2028b \x85 c \x0c d\n        self.has_grammar |=",
    )
    tree = make_tree(tmp_path, text)
    _, patch = port.patch(tree)
    command = ["git", "apply", "-p1", "--directory=python"]
    subprocess.run(command, input=patch.encode(), cwd=tmp_path, check=True)
    assert [one.verdict for one in status(find_tree(tmp_path))] == ["fixed", "fixed"]


def test_a_virtual_environment_inside_a_checkout_is_no_part_of_it(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch())
    site = tmp_path / ".venv" / "site-packages" / "sglang"
    site.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(tree.package), str(site)], check=True)
    assert find_tree(site.parent).repository is None
    assert find_tree(tmp_path).repository == tmp_path


def test_what_is_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path)]) == cli.FAILED
    assert "is no tree of SGLang" in capsys.readouterr().err
    assert cli.main(["status", "--json", str(tmp_path / "nowhere")]) == cli.FAILED
    said = capsys.readouterr()
    assert "does not exist" in json.loads(said.out)["error"]


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "def broken(:\n")
    with pytest.raises(ShapeError, match=r"schedule_batch\.py cannot be parsed"):
        status(tree)
    assert cli.main(["status", "--json", str(tmp_path)]) == cli.UNKNOWN_SHAPE
    # Nor is what cannot be read a reason to end otherwise.
    (tree.package / "srt" / "managers" / "nowhere.py").symlink_to(tmp_path / "nowhere")
    (tree.package / "srt" / "managers" / "folder.py").mkdir()
    (tree.package / shapes.SCHEDULE_BATCH).write_text(schedule_batch())
    assert [one.verdict for one in status(tree)] == ["fixed", "not affected"]


def test_the_version_of_a_tree(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch())
    assert tree.version() == "0.5.10.dev7"
    (tree.package / "version.py").unlink()
    assert tree.version() is None
    git(tmp_path, "tag", "v0.5.99")
    assert tree.version() == "0.5.99"


# --- Cherry-pick --------------------------------------------------------------------------------


def fork_of(root: Path, commit: str) -> Path:
    """A repository that has the package as this one had it at a commit, with a history of its own."""
    root.mkdir()
    names = git(pick.REPO_ROOT, "ls-tree", "-r", "--name-only", commit, "python/sglang").split()
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(git(pick.REPO_ROOT, "show", f"{commit}:{name}") + "\n")
    commit_all(root, "A fork")
    return root


def test_both_fixes_picked_where_they_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (pick.fix_commit(pr) for pr in (21840, 28500))
    fork = fork_of(tmp_path / "fork", f"{first}~1")
    objects = git(fork, "count-objects", "-v")
    assert cli.main(["pick", "--dry-run", "--fix", "21840", "--json", str(fork)]) == 0
    assert not git(fork, "branch", "--list", BRANCH)
    assert git(fork, "count-objects", "-v") == objects
    capsys.readouterr()
    assert cli.main(["pick", "--fix", "21840", "--json", str(fork)]) == 0
    (done,) = json.loads(capsys.readouterr().out)["fixes"]
    assert (done["outcome"], done["source"]) == ("picked", first)
    body = git(fork, "log", "-1", "--format=%b", BRANCH)
    assert f"(cherry picked from commit {first})" in body and "Upstream-PR" in body
    assert git(fork, "status", "--porcelain") == "" and git(fork, "log", "--format=%s") == "A fork"
    # The branch is gone on with.
    assert cli.main(["pick", "--fix", "21840", str(fork)]) == 0
    assert "already fixed" in capsys.readouterr().out
    ready = fork_of(tmp_path / "ready", f"{second}~1")
    assert cli.main(["pick", str(ready)]) == 0
    assert capsys.readouterr().out.count("picked as") == 1
    there = git(ready, "show", f"{BRANCH}:python/sglang/srt/managers/schedule_batch.py")
    assert there == git(
        pick.REPO_ROOT, "show", f"{second}:python/sglang/srt/managers/schedule_batch.py"
    )


def test_a_port_to_this_project_before_its_fix_feeds_the_same(tmp_path: Path) -> None:
    """The port and the commit are told apart by words alone: their code is the same."""
    second = pick.fix_commit(28500)
    fork = fork_of(tmp_path / "fork", f"{second}~1")
    assert cli.main(["port", str(fork)]) == 0
    for name in ("managers/schedule_batch.py", "speculative/eagle_info_v2.py"):
        path = f"python/sglang/srt/{name}"
        ours, theirs = (
            _without_words(git(repository, "show", f"{commit}:{path}"))
            for repository, commit in ((pick.REPO_ROOT, second), (fork, BRANCH))
        )
        assert ours == theirs


def _without_words(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef) and node.name == shapes.HELPER:
            node.returns = None
    return ast.unparse(tree).replace("if len(req.output_ids) else", "if req.output_ids else")


def test_a_conflict_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, schedule_batch("two branches", merge="or"), "blocking")
    before = git(tmp_path, "for-each-ref"), git(tmp_path, "status", "--porcelain")
    assert cli.main(["pick", str(tmp_path)]) == cli.CONFLICT
    said = capsys.readouterr().out
    assert "conflict in python/sglang/srt/managers/schedule_batch.py" in said
    assert "port --fix 21840" in said and "not tried" in said
    assert (git(tmp_path, "for-each-ref"), git(tmp_path, "status", "--porcelain")) == before
    assert not (tmp_path / ".git" / "CHERRY_PICK_HEAD").exists()
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1


def test_a_package_at_another_place_is_not_picked_to(tmp_path: Path) -> None:
    made = make_tree(tmp_path / "a", schedule_batch("flat", merge="or"))
    root = tmp_path / "b"
    root.mkdir()
    made.package.rename(root / "sglang")
    commit_all(root, "Of another layout")
    with pytest.raises(CheckoutError, match="take `port` instead"):
        pick.pick(find_tree(root))
    assert not port.unknown(port.port(find_tree(root)))


def test_sites_of_a_file_know_their_function(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, schedule_batch("two branches"))
    first, second = token_sites(Source(tree.package, shapes.SCHEDULE_BATCH))
    assert first.function == "ScheduleBatch.prepare_for_decode" == second.function
    assert (first.kind, second.kind) == ("blocking", "on device")
    assert len(first.statements) == 2 and first.branch == "enable_overlap"
    assert textwrap.dedent(first.source.code(first.statements[0])).lstrip().startswith("# TODO")
