"""Which fields merge, filter, mix and copy touch: of a made-up tree, this project, and releases."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO_ROOT / "scripts" / "upstream"))

from audit_fields import AuditError, audit, find_srt, main  # noqa: E402

BATCH = """
from dataclasses import dataclass
from typing import ClassVar

class Mixin:
    def merge_batch(self, other):
        self.both += other.both
        self.merged = self.merged and other.merged
        self.deep.x = other.deep.x
        self.slots[0] = 1
        self.inner.merge_batch(other.inner)
        self._rest(other)

    def _rest(self, other):
        self.helped = other.helped
        self.read_only.shape

@dataclass
class ScheduleBatch(Mixin):
    COUNT: ClassVar[int] = 3
    both: int = 0
    merged: bool = False
    deep: object = None
    slots: object = None
    inner: object = None
    helped: int = 0
    read_only: object = None
    forgotten: bool = False
    listed: bool = False
    constant: int = 0
    looped: int = 0

    @classmethod
    def init_new(cls, reqs, size):
        found = any(req.listed for req in reqs)
        return cls(forgotten=all(r.x for r in reqs), listed=found, constant=size)

    def filter_batch(self, keep):
        self.both = 0
        for name in NAMES:
            setattr(self, name, 1)

    def mix_with_running(self, other):
        self.merge_batch(other)

    def copy(self):
        return ScheduleBatch(both=self.both)

NAMES = ("looped", "slots")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    managers = tmp_path / "python" / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    (managers / "schedule_batch.py").write_text(BATCH)
    return tmp_path


def test_what_methods_do(tree: Path) -> None:
    (one,) = audit(tree)
    assert (one.name, one.file) == ("ScheduleBatch", "sglang/srt/managers/schedule_batch.py")
    assert one.acts == ["merge", "filter", "mix", "copy"]
    found = {f.name: (f.mark, "".join(f.touched.values())) for f in one.fields}
    assert found == {
        "both": ("", "wwwr"),
        "merged": ("!", "w.w."),
        "deep": ("!", "w.w."),
        "slots": ("", "www."),
        "inner": ("!", "w.w."),
        "helped": ("!", "w.w."),
        "read_only": ("", "r.r."),
        # Set from requests when a batch is built, and by nothing else: the kind of #21840.
        "forgotten": ("?", "...."),
        "listed": ("?", "...."),
        "constant": ("", "...."),
        "looped": ("!", ".w.."),
    }


def test_what_is_printed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    whole = capsys.readouterr().out
    assert "ScheduleBatch (sglang/srt/managers/schedule_batch.py): 11 fields, 7 marked" in whole
    assert re.search(r"^  ! merged +w +\. +w +\.$", whole, re.MULTILINE)
    assert main([str(tree), "--marked"]) == 0
    marked = capsys.readouterr().out
    assert "forgotten" in marked and "constant" not in marked
    assert main([str(tree), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert {f["name"]: f["mark"] for f in one["fields"]}["forgotten"] == "?"


@pytest.mark.parametrize("inside", [".", "python", "python/sglang", "python/sglang/srt"])
def test_any_way_into_a_tree(tree: Path, inside: str) -> None:
    assert find_srt(tree / inside).samefile(tree / "python" / "sglang" / "srt")


def test_odd_files_are_left_out(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    managers = tree / "python" / "sglang" / "srt" / "managers"
    (managers / "a_broken.py").write_text("def (")
    (managers / "a_bytes.py").write_bytes(b"x = '\xff'")
    (managers / "a_nul.py").write_bytes(b"x = 1\0")
    (managers / "a_bom.py").write_bytes(b"\xef\xbb\xbfx = 1")
    (managers / "a_folder.py").mkdir()
    # Another class of that name, in a file that comes first, and one that is its own base.
    (managers / "a_double.py").write_text("class ScheduleBatch(ScheduleBatch):\n    x: int = 0\n")
    (one,) = audit(tree)
    assert one.file.endswith("schedule_batch.py")
    err = capsys.readouterr().err
    for name in ("a_broken.py", "a_bytes.py", "a_nul.py", "a_folder.py"):
        assert f"{name} cannot be read and is left out" in err
    assert "a_bom.py" not in err


def test_what_is_not_there_is_said(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = tree / "python" / "sglang" / "srt" / "managers" / "schedule_batch.py"
    batch.write_text(BATCH.replace("def filter_batch", "def keep"))
    assert main([str(tree)]) == 0
    out = capsys.readouterr().out
    assert "0 marked (it has no filter: not judged)" in out
    assert "EagleDraftInput: not found" in out
    batch.write_text("x = 1")
    assert main([str(tree)]) == 1
    assert "has no class ScheduleBatch" in capsys.readouterr().err


def test_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AuditError, match="is no SGLang tree"):
        audit(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert "audit_fields: error:" in capsys.readouterr().err


def test_this_project_has_one_mark() -> None:
    marks = {
        f"{one.name}.{f.name}": f.mark for one in audit(REPO_ROOT) for f in one.fields if f.mark
    }
    assert marks == {"ScheduleBatch.has_grammar": "!"}


@pytest.mark.upstream
@pytest.mark.parametrize("version", ["0.5.9", "0.5.14", "0.5.23"])
def test_the_report_judges_every_mark(version: str) -> None:
    tree = REPO_ROOT / ".cache" / "upstream" / version
    if not tree.is_dir():
        pytest.skip(f"needs .cache/upstream/{version}: python scripts/upstream fetch {version}")
    report = (REPO_ROOT / "docs" / "upstream-audit.md").read_text()
    section = report.split(f"### {version}\n")[1].split("\n#")[0]
    row = re.compile(r"^\| `([\w.]+)` \| (.) \| (\S+?):?(?: cost)? \| (.+) \|$", re.MULTILINE)
    rows = row.findall(section)
    judged = {name: mark for name, mark, _, _ in rows}
    found = {f"{one.name}.{f.name}": f.mark for one in audit(tree) for f in one.fields if f.mark}
    assert judged == found
    assert {verdict for _, _, verdict, _ in rows} <= {"real", "latent", "harmless"}
