"""Verdict, cherry-pick and port on real releases, held against the data of the matrix.

The oldest and the newest of those that `make upstream` brings; `make prove-upstream` goes through all.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from upstream import pick, port, releases
from upstream.checkouts import Tree, find_tree, git
from upstream.matrix import expected
from upstream.status import FIXES, status

pytestmark = pytest.mark.upstream
RELEASES: Final = ("0.5.9", "0.5.23")


@pytest.fixture(scope="module", params=RELEASES)
def tree(request: pytest.FixtureRequest) -> Tree:
    if not releases.is_there(request.param):
        pytest.skip(f"needs SGLang {request.param}: python scripts/upstream fetch {request.param}")
    return find_tree(releases.UPSTREAM / request.param)


def of(tree: Tree) -> dict[str, Any]:
    return expected()[str(tree.version())]


def test_verdicts(tree: Tree) -> None:
    told = status(tree)
    found = {str(one.pr): one.verdict for one in told}
    assert found == {pr: of(tree)[pr]["status"] for pr in found}
    for one in told:
        assert "sglang/srt/" in one.reason and ".py:" in one.reason


@pytest.mark.parametrize("pr", FIXES)
def test_picks(tree: Tree, pr: int) -> None:
    before = git(tree.repository or tree.package, "for-each-ref")
    (done,) = pick.pick(tree, [pr], dry_run=True)
    assert done.outcome == of(tree)[str(pr)]["pick"]
    assert git(tree.repository or tree.package, "for-each-ref") == before


def test_ports(tree: Tree) -> None:
    done = {str(one.pr): one for one in port.port(tree, dry_run=True)}
    assert {pr: one.outcome for pr, one in done.items()} == {
        pr: of(tree)[pr]["port"] for pr in done
    }
    if of(tree)["21840"]["pick"] == "picked":
        # The line is the same, and stands at the same place.
        (picked,) = pick.pick(tree, [21840], dry_run=True)
        assert tree.repository is not None
        assert git(tree.repository, "diff", picked.commit, done["21840"].commit) == ""
