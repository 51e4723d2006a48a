"""Both fixes on many releases: verdict, cherry-pick, port and proof of each, as a table.

What has to come out is data, in ``expected.json`` beside this file. A difference is a failure, whether
for better or worse: then a release, this tool or the data has changed, and a person has to look.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from upstream import pick, port, releases
from upstream.checkouts import CheckoutError, find_tree
from upstream.engine_proof import EngineError
from upstream.prove import ProveError, prove
from upstream.releases import ReleaseError
from upstream.shapes import ShapeError
from upstream.status import FIXES, status

EXPECTED: Final = Path(__file__).with_name("expected.json")
COMMAND: Final = "make prove-upstream"
_FAILURES: Final = (CheckoutError, EngineError, ProveError, ReleaseError, ShapeError, OSError)

Say = Callable[[str], None]


@dataclass
class Row:
    """A release.

    Attributes
    ----------
    version : str
    fixes : dict of str to dict
        By number of a fix, ``status``, ``reason``, ``places``, ``pick``, ``port`` and ``shapes``.
    proven : dict
        See `upstream.prove.Proven.as_dict`.
    differences : list of str
        What is not as expected.
    seconds : float
    """

    version: str
    fixes: dict[str, dict[str, Any]] = field(default_factory=dict)
    proven: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


def expected() -> dict[str, Any]:
    """By release, what has to come out."""
    return json.loads(EXPECTED.read_text())


def run(versions: Sequence[str], engine: Sequence[str], say: Say) -> list[Row]:
    """Go through releases.

    Parameters
    ----------
    versions : sequence of str
    engine : sequence of str
        Scenarios with the whole Engine that may run; which do is part of the data of a release.
    say : callable
        Told what happens.
    """
    rows = []
    for count, version in enumerate(versions, 1):

        def tell(line: str, count: int = count, version: str = version) -> None:
            say(f"[{count}/{len(versions)}] {version}: {line}")

        started = time.monotonic()
        try:
            row = _row(version, engine, tell)
            row.differences = differences(row, expected().get(version), engine)
        except _FAILURES as error:
            # The others are not to be lost.
            row = Row(version, differences=[f"could not be done: {error}"])
        row.seconds = time.monotonic() - started
        tell("; ".join(row.differences) if row.differences else f"as expected, {row.seconds:.0f} s")
        rows.append(row)
    return rows


def _row(version: str, engine: Sequence[str], say: Say) -> Row:
    row = Row(version)
    tree = find_tree(releases.release(version, say=say))
    say("verdict, cherry-pick, port")
    # From the release itself, whatever branches someone has made there.
    start = f"v{version}"
    ported = {one.pr: one for one in port.port(tree, start=start, dry_run=True)}
    for one in status(tree):
        (picked,) = pick.pick(tree, [one.pr], start=start, dry_run=True)
        row.fixes[str(one.pr)] = {
            "status": one.verdict,
            "reason": one.reason,
            "places": one.places,
            "pick": picked.outcome,
            "conflicts": picked.conflicts,
            "port": ported[one.pr].outcome,
            "shapes": ported[one.pr].shapes,
        }
    wanted = expected().get(version, {}).get("engine", {})
    scenarios = [name for name in engine if name in wanted]
    python = releases.environment(version, say=say)
    row.proven = prove(tree, python, engine=scenarios, say=say).as_dict()
    return row


def differences(row: Row, wanted: dict[str, Any] | None, engine: Sequence[str]) -> list[str]:
    """What of a release is not as expected, one line each."""
    if wanted is None:
        return [f"{EXPECTED.name} says nothing of {row.version}"]
    told = []
    for pr, fix in row.fixes.items():
        for name, value in wanted[pr].items():
            if fix[name] != value:
                told.append(f"#{pr} {name} is {fix[name]!r}, expected {value!r}")
    proofs = {proof["scenario"]: proof for proof in row.proven["proofs"]}
    due = dict(wanted["proofs"]) | {
        f"engine {name}": value for name, value in wanted["engine"].items() if name in engine
    }
    for name in due.keys() ^ proofs.keys():
        told.append(f"{name} {'was not proven' if name in due else 'is not in the data'}")
    for name in due.keys() & proofs.keys():
        proof = proofs[name]
        # Of what is measured the data has the least that will do.
        if isinstance(due[name], dict):
            told += [
                f"{name}: {key} is {proof['figures'][key]}, expected at least {least}"
                for key, least in due[name].items()
                if not proof["figures"][key] >= least
            ]
        elif [proof["before"], proof["after"]] != due[name]:
            told.append(f"{name}: {proof['before']} -> {proof['after']}, expected {due[name]}")
        told += [f"{name}: {line}" for line in proof["wrong"]]
    if not row.proven["holds"] and not told:
        told.append("with the fixes the verdict is not fixed")
    return told


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(row) for row in rows]


# --- The page -----------------------------------------------------------------------------------


def page(rows: Sequence[Row], now: datetime | None = None) -> str:
    """``docs/upstream-matrix.md``."""
    now = now or datetime.now(UTC)
    rows = [row for row in rows if row.fixes]
    commits = ", ".join(f"`{pick.fix_commit(pr)[:10]}` (#{pr})" for pr in FIXES)
    minutes = sum(row.seconds for row in rows) / 60
    parts = [
        "# The fixes on SGLang's releases\n",
        f"<!-- Generated by `{COMMAND}`. Do not edit. -->\n",
        f"{now:%Y-%m-%d}, by `{COMMAND}`: {len(rows)} releases as PyPI has them, {minutes:.0f} minutes, "
        f"Python {platform.python_version()}, no GPU. The commits are {commits}.\n",
        _LEGEND,
    ]
    for pr, title in FIXES.items():
        parts.append(f"## #{pr}: {title}\n")
        parts.append(_fix_table(rows, pr))
    parts.append("## The whole Engine\n")
    parts += _engine(rows)
    parts.append("## Where, and why\n")
    parts += [_details(row) for row in rows]
    return "\n".join(parts)


_LEGEND: Final = """\
- **verdict**: of `python scripts/upstream status`. *latent* is there and not reached with the usual
  settings.
- **pick**: what `git cherry-pick -x` of this repository's commit comes to. **port**: what
  `python scripts/upstream port` does.
- **before -> after**: what the release's own objects do as it is, and with the ported fixes. `merge`:
  how many merged batches have `is_prefill_only` wrong. `decode` and `spec_decode`: transfers that the
  penalties add to a step's preparation. After both, penalties and KV lengths are the same as before and
  those of a reference.
- What *blocks without penalties* is there with and without the fix: docs/upstream-audit.md has it.

[backporting.md](backporting.md) says how to do this to a tree of your own.
"""


def _fix_table(rows: Sequence[Row], pr: int) -> str:
    names = {21840: ["merge"], 28500: ["decode", "spec_decode"]}[pr]
    head = ["release", "verdict", "pick", "port", *(f"`{name}`, before -> after" for name in names)]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        fix = row.fixes[str(pr)]
        proofs = {proof["scenario"]: proof for proof in row.proven["proofs"]}
        cells = [row.version, fix["status"], fix["pick"], fix["port"]]
        lines.append(_line([*cells, *(_cell(proofs.get(name)) for name in names)]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(proof: dict[str, Any] | None) -> str:
    if proof is None:
        return "not run"
    before, after = proof["before"], proof["after"]
    text = before if before == after else f"{before} -> {after}"
    return text if proof["holds"] else f"**{text}: {'; '.join(proof['wrong'])}**"


def _engine(rows: Sequence[Row]) -> list[str]:
    parts = []
    for row in rows:
        for proof in row.proven["proofs"]:
            if not proof["scenario"].startswith("engine"):
                continue
            name = proof["scenario"].removeprefix("engine ")
            # Texts have no before and after.
            found = _cell(proof).replace(" -> ", "; ") if name == "texts" else _cell(proof)
            parts.append(f"**{row.version}, {_SCENARIOS[name]}** {found}.\n")
            if proof["quote"]:
                parts.append(f"```\n{proof['quote']}\n```\n")
    return parts or ["Not run.\n"]


_SCENARIOS: Final = {
    "merge": "a generation request behind a scoring request.",
    "texts": "20 greedy texts of 64 tokens and a scored one, beside this project's engine.",
}


def _details(row: Row) -> str:
    lines = [f"### {row.version}\n"]
    for pr, fix in row.fixes.items():
        lines.append(f"- #{pr}, {fix['status']}: {_code(fix['reason'])}")
        if fix["status"] == "latent":
            lines += [f"  - {_code(place)}" for place in fix["places"]]
        if fix["port"] == port.PORTABLE:
            lines += [f"  - shape: {_code(shape)}" for shape in fix["shapes"]]
        if fix["conflicts"]:
            lines.append(
                "  - the pick conflicts in " + ", ".join(f"`{c}`" for c in fix["conflicts"])
            )
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """A sentence with its places and names marked as code."""
    return re.sub(r"(sglang/[\w/.]+:\d+|\w+(?:\.\w+)*_\w+(?:\.\w+)*|--[\w-]+)", r"`\1`", text)
