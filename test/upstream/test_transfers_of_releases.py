"""The transfer ledger on real SGLang, without a GPU.

The figures are facts about the releases: what they copy when a batch of four requests with all penalties
is made, and in a decode step.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from upstream import releases

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"

pytestmark = pytest.mark.upstream


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    version = request.param
    python = releases.interpreter(version)
    if python is None or not releases.is_there(version):
        pytest.skip(f"needs SGLang {version} and its environment: make upstream")
    tree = releases.UPSTREAM / version / "python"
    done = subprocess.run(
        [str(python), "-m", "lab.upstream_transfers"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(BENCHMARK)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def sites(found: dict[str, Any], blocking: bool) -> list[tuple[str, str, int]]:
    """File, operation and calls of each row."""
    return sorted(
        (row["site"].rpartition(":")[0].removeprefix("sglang/srt/"), row["op"], row["calls"])
        for row in found["rows"]
        if row["blocking"] == blocking
    )


PENALIZERS = "sampling/penaltylib"
MADE = "tensor(data, device)"


@pytest.mark.parametrize("seen", ["0.5.14"], indirect=True)
def test_0_5_14_makes_penalties_with_8_blocking_and_4_asynchronous_transfers(
    seen: dict[str, Any],
) -> None:
    found = seen["build"]
    assert (found["blocking"], found["asynchronous"]) == (8, 4)
    assert sites(found, blocking=True) == [
        (f"{PENALIZERS}/frequency_penalty.py", MADE, 1),
        (f"{PENALIZERS}/min_new_tokens.py", MADE, 1),
        # One for each request.
        (f"{PENALIZERS}/min_new_tokens.py", MADE, 4),
        (f"{PENALIZERS}/presence_penalty.py", MADE, 1),
        (f"{PENALIZERS}/repetition_penalty.py", MADE, 1),
    ]
    assert sites(found, blocking=False) == [("sampling/sampling_batch_info.py", "to", 1)] * 4


@pytest.mark.parametrize("seen", ["0.5.14"], indirect=True)
def test_0_5_14_copies_each_number_of_a_logit_bias(seen: dict[str, Any]) -> None:
    """Two for each of four requests."""
    assert sites(seen["bias"], blocking=True) == [
        ("sampling/sampling_batch_info.py", "__setitem__(number)", 8)
    ]


@pytest.mark.parametrize("seen", ["0.5.14"], indirect=True)
def test_0_5_14_decodes_with_one_asynchronous_transfer(seen: dict[str, Any]) -> None:
    found = seen["decode"]
    assert (found["blocking"], found["asynchronous"]) == (0, 1)
    (row,) = found["rows"]
    assert (row["function"], row["pinned"]) == ("cumulate_penalty_output_tokens", True)
    assert seen["apply"]["rows"] == []


@pytest.mark.parametrize("seen", ["0.5.14"], indirect=True)
def test_0_5_14_still_copies_pageable_lengths_in_each_speculative_step(
    seen: dict[str, Any],
) -> None:
    """The tokens go as they should. Two copies beside them say non_blocking and are not pinned."""
    found = seen["spec_decode"]
    assert sites(found, blocking=False) == [("managers/schedule_batch.py", "to", 1)]
    assert sites(found, blocking=True) == [("speculative/eagle_info_v2.py", "to", 1)] * 2


@pytest.mark.parametrize("seen", ["0.5.13.post1"], indirect=True)
def test_0_5_13_post1_blocks_for_the_tokens(seen: dict[str, Any]) -> None:
    assert sites(seen["decode"], blocking=True) == [("managers/schedule_batch.py", MADE, 1)]
    found = seen["spec_decode"]
    assert found["asynchronous"] == 0
    blocking = [r for r in found["rows"] if r["op"] == MADE]
    (row,) = blocking
    assert row["site"].startswith("sglang/srt/speculative/eagle_info_v2.py:")
    assert (row["function"], row["calls"]) == ("prepare_for_decode", 1)


@pytest.mark.parametrize("seen", ["0.5.13.post1"], indirect=True)
def test_0_5_13_post1_waits_for_a_mask_when_it_penalizes(seen: dict[str, Any]) -> None:
    # `logits[mask] += penalties[mask]` asks for the size of the mask three times.
    assert sites(seen["apply"], blocking=True) == [
        (f"{PENALIZERS}/min_new_tokens.py", "index[mask] (size)", 2),
        (f"{PENALIZERS}/min_new_tokens.py", "index_put_[mask] (size)", 1),
    ]
    assert seen["apply"]["asynchronous"] == 0
