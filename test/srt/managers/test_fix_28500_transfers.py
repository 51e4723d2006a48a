"""#28500, seen by the transfer ledger: what a whole engine's decode step copies, and whether it waits.

The engine runs on the fake device with all penalties on, dense ones, which every commit has.
`prove_fixes` holds what these tests say on the parent of the fix against the reasons given here: the
construction that blocks, at its file, with the text of its line.
"""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

import sglang
from lab.audit_transfers import Audit, audit

STEPS = 4
PACKAGE = Path(sglang.__file__).parent
ONE_SITE = r"1 call site blocks: \[.*"


def source(site: str) -> str:
    """The line of the package under test that a site names."""
    file, _, line = site.rpartition(":")
    return linecache.getline(str(PACKAGE.parent / file), int(line)).strip()


def described(row: dict[str, Any]) -> str:
    memory = {True: "pinned", False: "pageable", None: "no"}[row["pinned"]]
    return (
        f"{row['kind']} {row['op']} from {memory} memory, {row['calls'] / STEPS:g} a step, "
        f"at {row['site'].rpartition(':')[0]}, {source(row['site'])}"
    )


def token_rows(found: Audit) -> list[dict[str, Any]]:
    """Copies that feed the penalties."""
    names = ("cumulate_penalty_output_tokens", "prepare_for_decode")
    return [r for r in found.as_dict()["rows"] if r["kind"] == "H2D" and r["function"] in names]


@pytest.mark.parametrize(
    "speculative",
    [
        pytest.param(
            "none",
            marks=pytest.mark.proves_fix(
                reason=ONE_SITE + r"H2D to from pageable memory, 1 a step, "
                r"at sglang/srt/managers/schedule_batch\.py, "
                r"latest_output_ids = torch\.tensor\(last_tokens, dtype=torch\.int64\)\.to\("
            ),
        ),
        *(
            pytest.param(
                shape,
                marks=pytest.mark.proves_fix(
                    reason=ONE_SITE + r"H2D tensor\(data, device\) from pageable memory, 1 a step, "
                    r"at sglang/srt/speculative/eagle_info_v2\.py, output_ids = torch\.tensor\("
                ),
            )
            for shape in ("chain", "tree")
        ),
    ],
)
def test_no_copy_of_a_decode_step_blocks(speculative: str) -> None:
    found = audit(speculative, "all", steps=STEPS, penalty_backend="dense")
    assert found.steps == STEPS
    rows = [r for r in found.as_dict()["rows"] if r["blocking"] and not r["allowed"]]
    # The message is what is looked for on the parent.
    sites = [described(row) for row in rows]
    assert not sites, (
        f"{len(sites)} call site{'s' * (len(sites) != 1)} block{'s' * (len(sites) == 1)}: {sites}"
    )


@pytest.mark.proves_fix(reason=r"the copy is .*pageable.*, not asynchronous from pinned memory")
@pytest.mark.parametrize("speculative", ["none", "chain", "tree"])
def test_the_tokens_go_in_one_pinned_copy_a_step(speculative: str) -> None:
    found = audit(speculative, "all", steps=STEPS, penalty_backend="dense")
    rows = token_rows(found)
    assert len(rows) == 1, rows
    (row,) = rows
    assert row["calls"] == STEPS and row["bytes"] == STEPS * 4 * 8
    assert row["pinned"] and not row["blocking"], (
        f"the copy is {described(row)}, not asynchronous from pinned memory"
    )
    assert row["function"] == "cumulate_penalty_output_tokens"


@pytest.mark.parametrize("speculative", ["none", "chain", "tree"])
def test_without_penalties_nothing_is_copied_for_them(speculative: str) -> None:
    assert token_rows(audit(speculative, "none", steps=STEPS, penalty_backend="dense")) == []
