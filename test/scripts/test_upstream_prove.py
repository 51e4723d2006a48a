"""What is made of findings: proofs, differences from the data, and the page that is kept of them."""

from __future__ import annotations

import copy
import json
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from upstream import cli, engine_proof, matrix, prove, releases
from upstream.engine_proof import MergeOutcome
from upstream.matrix import Row, differences, expected, page
from upstream.prove import Proof, ProveError, Proven, judge_engine, judge_objects, run_objects
from upstream.sessions import lab_environment
from upstream.status import Status

REPO_ROOT = Path(__file__).resolve().parents[2]
RIGHT = {"right": True}
BOTH_SLOW = {"decode", "spec_decode"}


def merges(wrong: int = 0, not_whole: int = 0) -> dict[str, Any]:
    cases = [{"name": f"case {i}", "right": i >= wrong} for i in range(4)]
    return {"wrong": wrong, "not_whole": not_whole, "cases": cases}


def copies(blocking: int = 0, beside: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "feeds_penalties": True,
        "penalties_block": blocking,
        "with_penalties": {"blocking": blocking + beside, "asynchronous": 1 - blocking},
        "without": {"blocking": beside, "asynchronous": 0},
        "penalties": {"zero": RIGHT, "nonzero": RIGHT},
        "kv": [1, 2],
        "kv_without": [1, 2],
        "fed": [[5, 6]],
        "slots_right": True,
    } | changes


def findings(**changes: Any) -> dict[str, Any]:
    return {"merge": merges(), "decode": copies(), "spec_decode": copies()} | changes


BEFORE = findings(merge=merges(2), decode=copies(1), spec_decode=copies(1, beside=2))


def test_a_defect_that_shows_before_and_is_gone_after() -> None:
    after = findings(spec_decode=copies(beside=2))
    proofs = judge_objects(BEFORE, after, "affected", BOTH_SLOW)
    assert all(proof.holds for proof in proofs)
    assert [(p.scenario, p.pr, p.before, p.after) for p in proofs] == [
        ("merge", 21840, "2 of 4 merges wrong", "0 of 4 merges wrong"),
        ("decode", 28500, "1 blocking, 0 asynchronous", "0 blocking, 1 asynchronous"),
        (
            "spec_decode",
            28500,
            "1 blocking, 0 asynchronous (2 more block without penalties)",
            "0 blocking, 1 asynchronous (2 more block without penalties)",
        ),
    ]


NONE = {"feeds_penalties": False, "fed": []}
ODD = {"zero": RIGHT, "nonzero": {"right": False}}
SLOW_DECODE = findings(merge=merges(2), decode=copies(1))


@pytest.mark.parametrize(
    ("before", "after", "verdict", "slow", "place", "what"),
    [
        (BEFORE, findings(merge=merges(1)), "affected", BOTH_SLOW, 0, "after, wrong are case 0"),
        (
            BEFORE,
            findings(merge=merges(0, 1)),
            "affected",
            BOTH_SLOW,
            0,
            "1 merged batches are not",
        ),
        (findings(), findings(), "affected", set(), 0, "verdict is affected, and before 0 of 4"),
        (BEFORE, findings(), "fixed", BOTH_SLOW, 0, "verdict is fixed, and before 2 of 4"),
        (BEFORE, findings(decode=copies(1)), "affected", BOTH_SLOW, 1, "after, 1 transfers of the"),
        (BEFORE, findings(decode=copies(penalties=ODD)), "affected", BOTH_SLOW, 1, "reference"),
        (
            BEFORE,
            findings(decode=copies(kv=[1, 3])),
            "affected",
            BOTH_SLOW,
            1,
            "KV lengths are oth",
        ),
        (
            BEFORE,
            findings(decode=copies(fed=[[5, 7]])),
            "affected",
            BOTH_SLOW,
            1,
            "tokens are other",
        ),
        (
            BEFORE,
            findings(decode=copies(slots_right=False)),
            "affected",
            BOTH_SLOW,
            1,
            "after, KV s",
        ),
        (
            BEFORE,
            findings(spec_decode=copies(**NONE)),
            "affected",
            BOTH_SLOW,
            2,
            "on one side alone",
        ),
        # Each path is held against its own code.
        (SLOW_DECODE, findings(), "affected", BOTH_SLOW, 2, "its copy is slow, and before, 0"),
        (BEFORE, findings(), "affected", {"decode"}, 2, "or not at all, and before, 1"),
    ],
)
def test_what_does_not_hold(
    before: dict[str, Any],
    after: dict[str, Any],
    verdict: str,
    slow: set[str],
    place: int,
    what: str,
) -> None:
    proofs = judge_objects(before, after, verdict, slow)
    assert not proofs[place].holds
    assert any(what in line for line in proofs[place].wrong), proofs[place].wrong


def test_a_path_without_penalties() -> None:
    spec = copies(**NONE)
    before, after = (findings(spec_decode=spec, decode=d) for d in (copies(1), copies()))
    proof = judge_objects(before, after, "fixed", {"decode"})[2]
    assert (proof.before, proof.holds) == ("feeds no penalties", True)


# --- Running ------------------------------------------------------------------------------------


def interpreter(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_what_an_interpreter_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SOMETHING", "1")
    tree = tmp_path / "tree"
    asked = {
        "path": "$PYTHONPATH",
        "mine": "$SGLANG_SOMETHING",
        "args": "$*",
        "safe": "$PYTHONSAFEPATH",
    }
    asked["package"] = str(tree / "sglang" / "__init__.py")
    script = f"cat <<END\n{json.dumps(asked)}\nEND"
    found = run_objects(tree, interpreter(tmp_path, script))
    assert found["path"] == f"{tree}:{REPO_ROOT}/benchmark"
    assert (found["mine"], found["args"], found["safe"]) == ("", "-m lab.upstream_proofs", "1")
    with pytest.raises(ProveError, match="ran, and not what is in"):
        run_objects(tmp_path / "other", interpreter(tmp_path, script))


def test_a_package_in_the_working_directory_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "meant"):
        (tmp_path / name / "sglang").mkdir(parents=True)
        (tmp_path / name / "sglang" / "__init__.py").write_text(f"name = {name!r}")
    monkeypatch.chdir(tmp_path / "here")
    command = [sys.executable, "-c", "import sglang; print(sglang.name)"]
    environment = lab_environment(tmp_path / "meant")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "meant\n"


def test_an_interpreter_that_cannot(tmp_path: Path) -> None:
    with pytest.raises(ProveError, match="could not be run: no such thing"):
        run_objects(tmp_path, interpreter(tmp_path, "echo no such thing >&2; exit 1"))
    with pytest.raises(ProveError, match=r"python lacks a module\n.*torch"):
        said = "ModuleNotFoundError: No module named torch"
        run_objects(tmp_path, interpreter(tmp_path, f"echo {said} >&2; exit 1"))
    with pytest.raises(ProveError, match="cannot be run"):
        run_objects(tmp_path, tmp_path / "nowhere")
    with pytest.raises(ProveError, match="took longer than 0 s"):
        run_objects(tmp_path, interpreter(tmp_path, "exec sleep 60"), limit_s=0.2)


DONE: dict[str, Any] = {"text": "Paris", "same_text": True, "pools_whole": True}


def merge_outcome(outcome: Any, **changes: Any) -> MergeOutcome:
    done = DONE if outcome == "finishes" else {}
    return MergeOutcome(outcome, f"it {outcome}", **(done | changes))


@pytest.mark.parametrize(
    ("before", "after", "verdict", "what"),
    [
        ("dies", merge_outcome("finishes"), "affected", None),
        ("hangs", merge_outcome("finishes"), "affected", None),
        ("finishes", merge_outcome("finishes"), "fixed", None),
        ("not triggered", merge_outcome("not triggered", **DONE), "latent", None),
        ("finishes", merge_outcome("finishes"), "affected", "and before the Engine finishes"),
        ("dies", merge_outcome("finishes"), "fixed", "the verdict is fixed"),
        ("dies", merge_outcome("finishes"), "latent", "the verdict is latent"),
        ("not triggered", merge_outcome("finishes"), "affected", "before the Engine not triggered"),
        ("not triggered", merge_outcome("finishes"), "fixed", "before the Engine not triggered"),
        ("dies", merge_outcome("not triggered", **DONE), "affected", "after, the Engine not trig"),
        ("dies", merge_outcome("dies"), "affected", "after, the Engine dies"),
        ("dies", merge_outcome("finishes", pools_whole=False), "affected", "pools are not whole"),
        ("dies", merge_outcome("finishes", text="Rome"), "affected", "'Rome', and ours 'Paris'"),
        ("dies", merge_outcome("finishes", same_text=False), "affected", "after, the text"),
    ],
)
def test_the_engine_before_and_after(
    before: str, after: MergeOutcome, verdict: str, what: str | None
) -> None:
    proof = judge_engine(merge_outcome(before), after, "Paris", "picked", verdict)
    if what is None:
        assert proof.holds
        assert proof.after == f"picked: {after.outcome}, pools whole, text as ours"
        assert proof.quote == f"it {before}"
    else:
        assert any(what in line for line in proof.wrong), proof.wrong


# --- The matrix ---------------------------------------------------------------------------------


def a_row(version: str = "0.5.10rc0") -> Row:
    wanted = expected()[version]
    row = Row(version, seconds=30.0)
    for pr in ("21840", "28500"):
        place = "sglang/srt/managers/schedule_batch.py:7"
        row.fixes[pr] = wanted[pr] | {
            "reason": f"{place} is a reason",
            "places": [f"{place} one more"],
            "conflicts": ["a.py"] if wanted[pr]["pick"] == "conflict" else [],
            "shapes": [f"{place}: a shape"],
        }
    proofs = [Proof(name, None, *found) for name, found in wanted["proofs"].items()]
    for name, found in wanted["engine"].items():
        told = found if isinstance(found, list) else ["a", "b"]
        figures = found if isinstance(found, dict) else {}
        proofs.append(Proof(f"engine {name}", None, *told, "a quote", figures=figures))
    verdicts = [Status(pr, "fixed", "") for pr in (21840, 28500)]
    row.proven = Proven({}, [], verdicts, proofs).as_dict()
    return row


@pytest.mark.parametrize("version", expected())
def test_nothing_differs_from_the_data(version: str) -> None:
    assert differences(a_row(version), expected()[version], prove.ENGINE) == []


def test_too_little_that_was_compared_is_told() -> None:
    row = a_row("0.5.14")
    for few in (1199, float("nan")):
        row.proven["proofs"][-1]["figures"]["compared"] = few
        told = differences(row, expected()["0.5.14"], prove.ENGINE)
        assert told == [f"engine texts: compared is {few}, expected at least 1200"]


def test_every_difference_is_told() -> None:
    wanted = expected()["0.5.10rc0"]
    row = a_row()
    row.fixes["21840"] |= {"status": "fixed", "pick": "conflict"}
    row.proven["proofs"][0]["before"] = "7 of 19 merges wrong"
    row.proven["proofs"][1]["wrong"] = ["KV slots are wrong"]
    del row.proven["proofs"][2]
    told = differences(row, wanted, ("merge",))
    assert told[:2] == [
        "#21840 status is 'fixed', expected 'affected'",
        "#21840 pick is 'conflict', expected 'fits'",
    ]
    assert "spec_decode was not proven" in told and "decode: KV slots are wrong" in told
    assert any(line.startswith("merge: 7 of 19") for line in told) and len(told) == 5
    assert differences(row, None, ()) == ["expected.json says nothing of 0.5.10rc0"]
    # Better than expected is a difference, too.
    row = a_row()
    row.fixes["28500"]["pick"] = "fits"
    assert len(differences(row, wanted, ("merge",))) == 1


def test_an_engine_that_was_not_asked_for_is_not_missed() -> None:
    row = a_row()
    row.proven["proofs"] = row.proven["proofs"][:3]
    assert differences(row, expected()["0.5.10rc0"], ()) == []
    assert differences(row, expected()["0.5.10rc0"], ("merge",)) == ["engine merge was not proven"]


def test_a_fix_that_is_not_in_is_told() -> None:
    row = a_row()
    row.proven["holds"] = False
    assert differences(row, expected()["0.5.10rc0"], ("merge",)) == [
        "with the fixes the verdict is not fixed"
    ]


def test_a_page() -> None:
    rows = [a_row("0.5.9"), a_row(), a_row("0.5.14")]
    text = page(rows, datetime(2026, 11, 30, tzinfo=UTC))
    assert "2026-11-30, by `make prove-upstream`: 3 releases" in text
    assert (
        "| 0.5.9 | latent | fits | portable | 8 of 19 merges wrong -> 0 of 19 merges wrong |"
        in text
    )
    assert "`sglang/srt/managers/schedule_batch.py:7` is a reason" in text
    assert "the pick conflicts in `a.py`" in text and "```\na quote\n```" in text
    broken = copy.deepcopy(rows[:1])
    broken[0].proven["proofs"][0] |= {"wrong": ["it is odd"], "holds": False}
    assert "**8 of 19 merges wrong -> 0 of 19 merges wrong: it is odd**" in page(broken)


def test_the_page_of_the_repository_is_that_of_the_data() -> None:
    text = (REPO_ROOT / "docs" / "upstream-matrix.md").read_text()
    for pr in ("21840", "28500"):
        table = text.split(f"## #{pr}")[1].split("\n## ")[0]
        found = {version: tuple(cells) for version, *cells in _cells(table)}
        assert found == {v: tuple(one[pr].values()) for v, one in expected().items()}
    assert "**" not in text.split("## The whole Engine")[0].split("## #")[1]


def test_the_table_of_the_readme_is_that_of_the_data() -> None:
    table = (REPO_ROOT / "README.md").read_text().split("| release | #21840")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| 0.")]
    assert len(rows) > 3
    for version, *cells in rows:
        one = expected()[version]
        assert cells == [*one["21840"].values(), *one["28500"].values()]


def _cells(table: str) -> list[tuple[str, str, str, str]]:
    lines = [
        line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| 0.")
    ]
    return [(cells[0], cells[1], cells[2], cells[3]) for cells in lines]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {version: a_row(version) for version in ("0.5.9", "0.5.14")}
    monkeypatch.setattr(matrix, "_row", lambda version, engine, say: rows[version])
    monkeypatch.setattr(matrix, "expected", lambda: {v: expected()[v] for v in rows})
    monkeypatch.setattr(cli, "_engine", lambda args: prove.ENGINE)
    out = tmp_path / "page.md"
    everything = ["matrix", "--engine", "--write", str(out)]
    assert cli.main([*everything, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["version"] == "0.5.9" and "0.5.9 | latent" in out.read_text()
    assert "2 of 2 releases are as expected" in said.err
    # A part is no page.
    assert cli.main([*everything, "0.5.9"]) == cli.main(["matrix", "--write", str(out)]) == 2
    page_before = out.read_text()
    rows["0.5.14"].fixes["28500"]["status"] = "affected"
    assert cli.main(everything) == cli.NOT_PROVEN
    assert "0.5.14: #28500 status is 'affected', expected 'fixed'" in capsys.readouterr().err
    assert out.read_text() == page_before and (tmp_path / "page.failed.md").is_file()


def test_a_release_that_cannot_be_done_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(version: str, engine: Any, say: Any) -> Row:
        if version == "0.5.9":
            raise ProveError("no such thing")
        return a_row(version)

    monkeypatch.setattr(matrix, "_row", row)
    first, second = matrix.run(["0.5.9", "0.5.14"], prove.ENGINE, lambda line: None)
    assert first.differences == ["could not be done: no such thing"] and second.differences == []
    assert "0.5.14" in page([first, second])


def test_a_proof_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = Proof("merge", 21840, "2 of 4 merges wrong", "0 of 4 merges wrong", "a line of a log")
    before, after = ([Status(21840, verdict, "")] for verdict in ("affected", "fixed"))
    proven = Proven({21840: "ported"}, before, after, [proof])
    monkeypatch.setattr(cli, "find_tree", lambda path: SimpleNamespace(version=lambda: "0.5.14"))
    monkeypatch.setattr(prove, "prove", lambda *args, **kwargs: proven)
    command = ["prove", "--python", "python", str(tmp_path)]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "#21840: affected; ported; then fixed" in said and "merge: a line of a log" in said
    proof.wrong.append("it is odd")
    assert cli.main(command) == cli.NOT_PROVEN
    assert "merge: WRONG: it is odd" in capsys.readouterr().out
    monkeypatch.setattr(engine_proof, "MODEL", tmp_path / "no model")
    assert cli.main(["prove", "--engine", str(tmp_path)]) == cli.FAILED
    assert "make model" in capsys.readouterr().err
    monkeypatch.setattr(engine_proof, "MODEL", tmp_path)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["prove", "--engine", str(tmp_path)]) == cli.FAILED
    assert "has no torch to run this project's engine" in capsys.readouterr().err


def test_what_the_data_is_of() -> None:
    pinned = json.loads(releases.PINNED.read_text())
    wheels = {name.split("-")[1] for name in pinned}
    assert set(expected()) <= wheels
    # Every verdict of the tool, but for those that no release may have.
    verdicts = {one[pr]["status"] for one in expected().values() for pr in ("21840", "28500")}
    assert verdicts == {"latent", "affected", "fixed"}
