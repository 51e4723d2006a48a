"""The command that shows what a decode step copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import audit_transfers
from lab.audit_transfers import PENALTIES, audit, main
from lab.transfer_ledger import Transfer


def test_a_plain_step_copies_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "3", "--batch-size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    totals = {k: found[k] for k in ("device", "steps", "blocking", "allowed", "asynchronous")}
    assert totals == dict(device="fakegpu", steps=3, blocking=0, allowed=3, asynchronous=3)
    # Two tokens of eight bytes in each of three steps.
    assert found["bytes"] == 48
    assert [(r["kind"], r["calls"]) for r in found["rows"]] == [("SYNC", 3), ("D2H", 3)]


@pytest.mark.parametrize("kind", PENALTIES)
def test_any_penalty_copies_the_tokens_once(kind: str) -> None:
    found = audit(penalties=kind, steps=2, disable_overlap_schedule=True)
    copies = [t for t in found.transfers if t.kind == "H2D"]
    assert [(t.function, t.blocking) for t in copies] == [
        ("cumulate_penalty_output_tokens", False)
    ] * (0 if kind == "none" else 2)


def test_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Admission, prefill and end too; loading the model is over before."""
    assert main(["--phase", "all", "--steps", "1", "--batch-size", "1", "--penalties", "all"]) == 0
    out = capsys.readouterr().out
    assert "sampling_batch_info.py" in out and "load_model" not in out
    assert audit(phase="all", steps=1).blocking() == []


def test_what_blocks_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Transfer("D2H", "item", 4, False, True, "a.py:1", "f", "b.py:2", "MainThread", 3)
    monkeypatch.setattr(
        audit_transfers, "audit", lambda *a, **k: audit_transfers.Audit([transfer], 1, "fakegpu")
    )
    assert main([]) == 1


@pytest.mark.parametrize("option", ["--steps", "--batch-size"])
def test_bad_numbers_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


# --- Along history ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain-penalties-normal", "chain-penalties"])
def test_a_round_along_history(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab import audit_transfers
    from lab.cases import CASES
    from lab.metrics import WorkNotDone
    from lab.workloads import make_session

    case = CASES[f"transfers/{name}"]
    session = make_session(case.setup, tmp_path)
    found = session.run_round(case)
    assert found["blocking_per_step"] == 0
    # Four requests: their tokens for the penalties and their slots, 8 bytes each, or slots, lengths
    # and what a verification may need.
    wanted = (2, 64) if "plain" in name else (3, 192)
    assert (found["transfers_per_step"], found["transfer_bytes_per_step"]) == wanted

    few = audit_transfers.Audit([], 7, "privateuseone")
    monkeypatch.setattr(audit_transfers, "audit", lambda *args, **kwargs: few)
    with pytest.raises(WorkNotDone, match="7 decode steps were seen, not 8"):
        session.run_round(case)
    # The best numbers there are would be those of a ledger that sees nothing.
    few.steps = 8
    with pytest.raises(WorkNotDone, match="the ledger sees nothing"):
        session.run_round(case)


def test_requests_without_their_tokens_are_no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab import audit_transfers
    from lab.metrics import WorkNotDone

    check = audit_transfers.check_results
    monkeypatch.setattr(
        audit_transfers, "check_results", lambda results, lens, most: check(results[1:], lens, most)
    )
    with pytest.raises(WorkNotDone):
        audit_transfers.audit(steps=2)


@pytest.mark.parametrize(("asked", "has"), [("all", False), ("none", True)])
def test_an_audit_of_other_penalties_than_were_asked_for(
    asked: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lab import audit_transfers
    from lab.metrics import WorkNotDone

    monkeypatch.setattr(audit_transfers, "has_penalties", lambda scheduler: has)
    with pytest.raises(WorkNotDone, match=rf"penalties '{asked}' had {'some' if has else 'none'}"):
        audit_transfers.audit(penalties=asked, steps=2)


def test_slots_that_are_left_behind_are_named() -> None:
    from types import SimpleNamespace

    from lab.metrics import WorkNotDone, check_pools

    free = iter([9, 9, 10, 10])
    scheduler = SimpleNamespace(
        max_total_num_tokens=10,
        req_to_token_pool=SimpleNamespace(size=4, available_size=lambda: 4),
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: next(free)),
    )
    with pytest.raises(WorkNotDone, match="9 KV slots and 4 rows are free at rest, of 10 and 4"):
        check_pools(scheduler)
    check_pools(scheduler, timeout=5.0)  # the last forward gives them back
