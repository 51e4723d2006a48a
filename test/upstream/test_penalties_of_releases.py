"""The real penalizers of a release, loaded beside the installed package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab import upstream_penalties
from lab.upstream_penalties import UpstreamPenalties

pytestmark = pytest.mark.upstream
CPU = torch.device("cpu")
V = 50


def request(frequency: float = 0.5) -> SimpleNamespace:
    return SimpleNamespace(
        frequency_penalty=frequency,
        presence_penalty=0.25,
        repetition_penalty=2.0,
        min_new_tokens=3,
        stop_token_ids=[4, 9],
    )


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def library(request: pytest.FixtureRequest) -> upstream_penalties.Penaltylib:
    if not upstream_penalties.is_there():
        pytest.skip(f"needs SGLang {upstream_penalties.VERSION}: make upstream")
    if request.param and (reason := upstream_penalties.why_eager("cpu")):
        pytest.skip(reason)
    return upstream_penalties.load(compiles=request.param)


def test_a_release_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"SGLang 9\.9\.9 .* `make upstream`"):
        upstream_penalties.Penaltylib(upstream_penalties.folder("9.9.9", tmp_path))


def test_the_installed_package_is_left_alone(library: upstream_penalties.Penaltylib) -> None:
    import sglang
    from sglang.srt.sampling import penaltylib

    assert Path(penaltylib.__file__).is_relative_to(Path(sglang.__file__).parent)
    assert library.orchestrator is not penaltylib.BatchedPenalizerOrchestrator
    assert not [n for n in sys.modules if n.startswith("sglang.srt.sampling") and "upstream" in n]


@pytest.mark.timeout(400)
def test_a_step_without_and_with_overlap(library: upstream_penalties.Penaltylib) -> None:
    state = UpstreamPenalties(library, [request(), request(0.0)], V, CPU)
    for _ in range(2):
        state.cumulate(torch.tensor([1, 2]))
    logits = torch.ones(2, V)
    overlapped = logits.clone()
    state.apply(logits)
    state.accumulate()
    state.apply_accumulated(overlapped)
    wanted = torch.ones(2, V)
    wanted[0, 1] = (1 - 2 * 0.5 - 0.25) * 2
    wanted[1, 2] = (1 - 0.25) / 2
    wanted[:, [4, 9]] = -torch.inf
    assert torch.equal(logits, wanted) and torch.equal(overlapped, wanted)

    logits = torch.ones(6, V)
    state.apply(logits, repeat=3)
    assert torch.equal(logits, wanted.repeat_interleave(3, dim=0))
    state.accumulate()
    logits = torch.ones(6, V)
    state.apply_accumulated(logits, repeat=3)
    assert torch.equal(logits, wanted.repeat_interleave(3, dim=0))

    state.cumulate(torch.tensor([1, 1]))  # the third token: stop tokens are free
    logits = torch.ones(2, V)
    state.apply(logits)
    assert torch.isfinite(logits).all()


def test_a_finish_and_a_join(library: upstream_penalties.Penaltylib) -> None:
    state = UpstreamPenalties(library, [request(), request()], V, CPU)
    held = state.nbytes
    state.cumulate(torch.tensor([1, 2]))
    state.finish_and_join(0, request())
    assert state.nbytes <= held  # one tensor loses a column that upstream makes and does not use
    logits = torch.ones(2, V)
    state.accumulate()
    additive, scaling = state._accumulated
    assert additive[0, 2] == -0.75 and scaling[0, 2] == 2  # who stayed is the first now
    assert (additive[1] == 0).sum() == V - 2 and (scaling[1] == 1).all()

    alone = UpstreamPenalties(library, [request()], V, CPU)
    alone.cumulate(torch.tensor([1]))
    alone.finish_and_join(0, request())
    alone.apply(logits[:1])
    assert (logits[0] == 1).sum() == V - 2


def test_other_names_of_upstream_are_refused(library: upstream_penalties.Penaltylib) -> None:
    with pytest.raises(ImportError, match="managers"):
        library._import("sglang.srt.managers", fromlist=("schedule_batch",))
    assert library._import("math").pi > 3
