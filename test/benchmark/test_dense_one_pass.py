"""Dense penalties in one pass, against penalties in float64 that are written out here."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from lab.dense_one_pass import DenseOnePass

CPU = torch.device("cpu")
V = 1300  # not a multiple of the Triton kernel's block
BACKENDS = [
    "torch",
    pytest.param(
        "numba",
        marks=pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="needs Numba"),
    ),
]
TREE = (-1, 0, 0, 1, 1, 2)


def requests() -> list[SimpleNamespace]:
    """With all penalties, with none, with a reward, and short of their minimum by another number."""
    kinds = ((0.2, 0.1, 1.1, 9), (0.0, 0.0, 1.0, 0), (-0.3, 0.0, 0.9, 3), (0.5, -0.2, 1.5, 4))
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
    return [SimpleNamespace(**dict(zip(names, kind)), stop_token_ids=[2, 7]) for kind in kinds]


def expected(
    x: float, token: int, said: list[int], request: SimpleNamespace, bias: float
) -> tuple[float, float]:
    """A logit, and how far from it float32 may be."""
    count = said.count(token)
    size = abs(x) + abs(bias)
    if count:
        x -= request.frequency_penalty * count + request.presence_penalty
        size += abs(request.frequency_penalty) * count + abs(request.presence_penalty)
        x = x * request.repetition_penalty if x < 0 else x / request.repetition_penalty
    x += bias
    if len(said) < request.min_new_tokens and token in request.stop_token_ids:
        x = -math.inf
    return x, 1e-6 * size * 1.5


def check(logits: torch.Tensor, given: torch.Tensor, said: list[list[int]], nodes: int) -> None:
    """Compare every logit; `said` has the tokens of each row of logits."""
    everyone = requests()
    for row, (after, before) in enumerate(zip(logits.tolist(), given.tolist())):
        request = everyone[row // nodes]
        for token, (y, x) in enumerate(zip(after, before)):
            bias = 1.5 if token in (3, 7) and row // nodes == 0 else 0.0
            wanted, allowed = expected(x, token, said[row], request, bias)
            assert y == wanted or abs(y - wanted) <= allowed, (row, token, x, y, wanted)


def make(backend: str, device: torch.device = CPU) -> tuple[DenseOnePass, list[list[int]]]:
    """State after some tokens, and these."""
    state = DenseOnePass(requests(), V, device, backend)
    state.biases[0, [3, 7]] = 1.5
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (4, 3), generator=generator)
    lens = torch.tensor([3, 2, 1, 3])
    state.commit(tokens.to(device), lens.to(device))
    state.commit(torch.tensor([V - 1, 5, 5, 5], device=device))
    said = [row[:n] for row, n in zip(tokens.tolist(), lens.tolist())]
    return state, [[*row, last] for row, last in zip(said, [V - 1, 5, 5, 5])]


def run(backend: str, device: torch.device = CPU) -> None:
    """One row a request, and a tree with tokens that are seen, new, masked, and there twice."""
    state, said = make(backend, device)
    given = torch.randn(4, V, generator=torch.Generator().manual_seed(2)) * 4
    logits = given.clone().to(device)
    state.apply(logits)
    check(logits.cpu(), given, said, 1)

    drafts = torch.tensor([[9, 4, 4, 4, 900, 5], [9, 7, 1299, 3, 3, 2]] * 2)
    ways: list[list[int]] = []
    for node, parent in enumerate(TREE):
        ways.append([*(ways[parent] if parent >= 0 else []), node])
    mask = torch.zeros(4, 6, 6, dtype=torch.bool)
    for node, way in enumerate(ways):
        mask[:, node, way] = True
    given = torch.randn(4 * 6, V, generator=torch.Generator().manual_seed(3)) * 4
    logits = given.clone().to(device)
    state.apply(logits, drafts.to(device), mask.to(device))
    at_nodes = [
        said[row] + [int(drafts[row, n]) for n in way if n != 0] for row in range(4) for way in ways
    ]
    check(logits.cpu(), given, at_nodes, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_logit(backend: str) -> None:
    run(backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_logit_on_a_gpu(backend: str) -> None:
    run(backend, torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
def test_every_logit_in_the_interpreter() -> None:
    """Whether kernels are interpreted is settled for a whole process, so it is another one."""
    code = f"import runpy; runpy.run_path({__file__!r})['run']('triton')"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_counts_are_those_of_the_tokens() -> None:
    state, said = make("torch")
    for row, tokens in enumerate(said):
        wanted = torch.zeros(V, dtype=torch.int32)
        for token, count in Counter(tokens).items():
            wanted[token] = count
        assert torch.equal(state.counts[row], wanted)
    assert state.num_output.tolist() == [len(tokens) for tokens in said]


def test_what_it_holds() -> None:
    held = DenseOnePass(requests(), V, CPU, "torch").nbytes
    assert held == 4 * V * (4 + 1 + 4) + 4 * 3 * 4 + 2 * 4 * 4
