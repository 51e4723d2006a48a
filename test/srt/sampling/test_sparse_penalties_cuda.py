"""What sparse penalties promise of a GPU's streams: no wait, no torn copy, no access out of bounds."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from penalty_reference import Rig
from penalty_scenarios import ALL, CHAIN

from sglang.srt.utils.common import to_device_async

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
TREE = [-1, 0, 0, 1]
# Some 50 ms: far more than the host needs for what it does meanwhile.
DELAY_CYCLES = 100_000_000


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Whoever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_rig(backend: str) -> Rig:
    rig = Rig(backend, max_draft_tokens=8, device=torch.device("cuda"), initial_entries=128)
    rig.admit(0, range(120), logit_bias={3: 1.0}, min_new_tokens=130, stop_token_ids={7}, **ALL)
    rig.admit(2, [5], min_new_tokens=4, stop_token_ids={7, 9}, **ALL)
    rig.admit(3)
    return rig


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_verb_waits(backend: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Over steps of both kinds, requests that join, and lists that grow."""
    device = torch.device("cuda")
    rig = make_rig(backend)
    draw = random.Random(0)
    given = [[draw.randrange(600) for _ in range(3)] for _ in range(24)]
    tokens = torch.tensor(given, device=device)
    drafts = torch.tensor([[1, 2, 3, 4]] * 3, device=device)
    parents = torch.tensor([TREE] * 3, device=device)
    lens = torch.tensor([2, 1, 2], device=device)
    logits = torch.zeros(3, 600, device=device, dtype=dtype)
    tree_logits = torch.zeros(12, 600, device=device, dtype=dtype)
    torch.cuda.synchronize()
    request.getfixturevalue("no_sync")
    slots = [0, 2, 3]
    for number in range(24):
        if number == 12:
            rig.admit(1, range(200), **ALL)
            slots = [0, 2, 1]
        if number % 2:
            step = rig.planner.plan(slots, max_tokens=2, num_draft_tokens=4)
            rig.state.begin(step)
            rig.state.stage(step, drafts)
            rig.state.apply(step, tree_logits, rig.state.ancestors_from_parents(parents))
            rig.state.commit(step, tokens[number].unsqueeze(1).expand(3, 2), lens)
            rig.planner.settle(step, [2, 1, 2])
            counts = (2, 1, 2)
        else:
            step = rig.planner.plan(slots)
            rig.state.begin(step)
            rig.state.apply(step, logits)
            rig.state.commit(step, tokens[number])
            rig.planner.settle(step)
            counts = (1, 1, 1)
        for row, (slot, num) in enumerate(zip(slots, counts)):
            rig.outputs[slot] += [given[number][row]] * num
    torch.cuda.set_sync_debug_mode("default")
    rig.assert_counts()


def test_no_batch_size_makes_another_kernel() -> None:
    """What is compiled for one batch serves all: else requests would wait for the compiler."""
    from sglang.srt.sampling.penaltylib.triton_ops import sparse_penalties as ops

    kernels = (ops.update_kernel, ops.ingest_kernel, ops.apply_kernel)

    def serve(num_rows: int) -> int:
        rig = Rig("triton", num_slots=64, device=torch.device("cuda"))
        slots = list(range(num_rows))
        for slot in slots:
            rig.admit(slot, range(slot), **ALL)
        rig.decode(slots, [5] * num_rows)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    assert len({serve(num_rows) for num_rows in (3, 1, 2, 16, 17, 64)}) == 1


def test_a_source_that_is_refilled_does_not_change_what_arrives() -> None:
    """Page-locked memory comes back to its pool while the copy out of it has not begun."""
    device = torch.device("cuda")
    to_device_async([0] * 64, torch.int64, device)
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    arrived = [to_device_async([i] * 64, torch.int64, device) for i in range(50)]
    torch.cuda.synchronize()
    assert [tensor.tolist() for tensor in arrived] == [[i] * 64 for i in range(50)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_steps_planned_behind_a_delay_arrive_whole(backend: str) -> None:
    """The host is many steps ahead: each step's rows, pages and fed tokens are its own."""
    rig = make_rig(backend)
    torch.cuda._sleep(DELAY_CYCLES)
    draw = random.Random(1)
    for _ in range(30):
        slots = draw.sample([0, 2, 3], draw.randint(1, 3))
        tokens = [draw.randrange(600) for _ in slots]
        fed = to_device_async(tokens, torch.int64, rig.device)
        step = rig.planner.plan(slots, fed_tokens=fed)
        del fed
        rig.state.begin(step)
        rig.planner.settle(step)
        for slot, token in zip(slots, tokens):
            rig.outputs[slot].append(token)
    rig.assert_counts()
    rig.verify([2, 0], [[1, 2, 3, 4]] * 2, [CHAIN[:4]] * 2, [[2, 3]] * 2, [2, 1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, which is not installed")
    tests = f"{HERE / 'test_sparse_penalties.py'}"
    names = "triton-gpu-float32 and (many_tokens or rejected or growing or branching or foreign)"
    pytest_call = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        tests,
        "-k",
        names,
    ]
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    done = subprocess.run(
        [sanitizer, *options, *pytest_call],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTEST_ADDOPTS": ""},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
