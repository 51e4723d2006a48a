"""docs/penalties.md says numbers. They are those of float64, and those of `PenaltyState`."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from penalty_reference import CPU, read_list, way_of

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib.sparse_penalties import (
    PenaltyPlanner,
    PenaltyPool,
    PenaltyRequest,
    PenaltyState,
)
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE = (Path(__file__).parents[3] / "docs/penalties.md").read_text()
TOKENS = ["a", "b", "c", "end"]
# Columns of the steps, and what each adds to the steps before it.
STEPS = {
    "1 additive": ("frequency_penalty", "presence_penalty"),
    "2 scaling": ("repetition_penalty",),
    "3 bias": ("logit_bias",),
    "4 mask": ("min_new_tokens", "stop_token_ids"),
}


def read_table(first: str, second: str) -> list[dict[str, str]]:
    """The rows of the table whose head begins with these two columns."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} | {second} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def read_request() -> dict[str, Any]:
    return ast.literal_eval(re.search(r"^sampling_params = (\{.*?^\})", PAGE, re.M | re.S)[1])


def read_output(pattern: str) -> list[int]:
    return [TOKENS.index(name) for name in re.search(pattern, PAGE)[1].split()]


def numbers(row: dict[str, str], columns: list[str]) -> list[float]:
    return [float(row[column]) for column in columns]


def penalize(logit: float, token: int, output: list[int], request: dict[str, Any]) -> list[float]:
    """A token's logit after each of the four steps, in Python's own numbers."""
    count, after = output.count(token), []
    if count:
        logit -= request["frequency_penalty"] * count + request["presence_penalty"]
    after.append(logit)
    if count:
        scaling = request["repetition_penalty"]
        logit = logit * scaling if logit < 0 else logit / scaling
    after.append(logit)
    logit += request["logit_bias"].get(token, 0.0)
    after.append(logit)
    if len(output) < request["min_new_tokens"] and token in request["stop_token_ids"]:
        logit = -math.inf
    return [*after, logit]


@pytest.fixture
def asked() -> dict[str, Any]:
    return read_request()


@pytest.fixture
def steps() -> list[dict[str, str]]:
    return read_table("token", "c")


@pytest.fixture
def nodes() -> list[dict[str, str]]:
    return read_table("node", "token")


@pytest.fixture
def logits(steps: list[dict[str, str]]) -> list[float]:
    assert [row["token"] for row in steps] == TOKENS
    return [float(row["logit"]) for row in steps]


@pytest.fixture
def output() -> list[int]:
    return read_output(r"The output so far is `([a-z ]+)`")


def drafted(nodes: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    tokens = [TOKENS.index(row["token"]) for row in nodes]
    return tokens, [-1 if row["parent"] == "-" else int(row["parent"]) for row in nodes]


def start(output: list[int], **params: Any) -> tuple[PenaltyPlanner, PenaltyState]:
    pool = PenaltyPool(num_slots=2, vocab_size=len(TOKENS), max_draft_tokens=8)
    planner, state = PenaltyPlanner(pool, CPU), PenaltyState(pool, CPU, "torch")
    request = PenaltyRequest(rid="page", slot=1, output_ids=list(output), **params)
    assert planner.admit(request)
    return planner, state


def test_the_page_and_its_test_mean_the_same_request(
    asked: dict[str, Any], output: list[int]
) -> None:
    SamplingParams(**asked).verify(len(TOKENS))
    assert f"is `{' '.join(TOKENS[t] for t in output)}`, so n = {len(output)}." in PAGE
    for i, name in enumerate(TOKENS):
        assert f"`{name}` is {i}" in PAGE


def test_steps_in_float64(
    asked: dict[str, Any],
    steps: list[dict[str, str]],
    logits: list[float],
    output: list[int],
) -> None:
    for token, row in enumerate(steps):
        assert int(row["c"]) == output.count(token)
        wanted = penalize(logits[token], token, output, asked)
        assert numbers(row, list(STEPS)) == pytest.approx(wanted, abs=1e-12)
    last = [float(row["4 mask"]) for row in steps]
    assert f"Greedy decoding says `{TOKENS[last.index(max(last))]}`" in PAGE
    bare = TOKENS[logits.index(max(logits))]
    assert f"would have been `{bare}`" in " ".join(PAGE.split())


@pytest.mark.parametrize("column", STEPS)
def test_steps_of_the_state(
    column: str,
    asked: dict[str, Any],
    steps: list[dict[str, str]],
    logits: list[float],
    output: list[int],
) -> None:
    """The state has no steps to look between: it gets the parameters of the first ones."""
    columns = list(STEPS)
    names = [n for step in columns[: columns.index(column) + 1] for n in STEPS[step]]
    planner, state = start(output, **{name: asked[name] for name in names})
    row = torch.tensor([logits])
    step = planner.plan([1])
    state.begin(step)
    state.apply(step, row)
    assert row[0].tolist() == pytest.approx([float(r[column]) for r in steps], rel=1e-6, abs=1e-7)


def test_nodes_in_float64(
    asked: dict[str, Any], nodes: list[dict[str, str]], logits: list[float]
) -> None:
    output = read_output(r"is committed: the output is `([a-z ]+)`")
    tokens, parents = drafted(nodes)
    assert tokens[0] == output[-1]
    for node, row in enumerate(nodes):
        assert int(row["node"]) == node
        seen = output + [tokens[n] for n in way_of(parents, node) if n != 0]
        counts = ", ".join(f"{TOKENS[t]} {n}" for t, n in sorted(Counter(seen).items()))
        assert (row["counts"], int(row["n"])) == (counts, len(seen))
        wanted = [penalize(x, t, seen, asked)[-1] for t, x in enumerate(logits)]
        assert numbers(row, TOKENS) == pytest.approx(wanted, abs=1e-12)
        assert row["greedy"] == TOKENS[wanted.index(max(wanted))]


def test_nodes_of_the_state(
    asked: dict[str, Any],
    nodes: list[dict[str, str]],
    logits: list[float],
    output: list[int],
) -> None:
    """The whole story: the first output, `b` committed, the tree verified, its verdict committed."""
    planner, state = start(output, **asked)
    after = read_output(r"is committed: the output is `([a-z ]+)`")
    assert after[:-1] == output
    step = planner.plan([1])
    state.begin(step)
    state.commit(step, torch.tensor(after[-1:]))
    planner.settle(step)

    tokens, parents = drafted(nodes)
    step = planner.plan([1], max_tokens=3, num_draft_tokens=len(nodes))
    state.begin(step)
    state.stage(step, torch.tensor([tokens]))
    rows = torch.tensor([logits] * len(nodes))
    state.apply(step, rows, state.ancestors_from_parents(torch.tensor([parents])))
    for got, row in zip(rows.tolist(), nodes, strict=True):
        assert got == pytest.approx(numbers(row, TOKENS), rel=1e-6, abs=1e-7)

    choice = rows.argmax(-1).tolist()
    verdict, node = [choice[0]], 0
    while children := [n for n, p in enumerate(parents) if p == node and tokens[n] == choice[node]]:
        node = children[0]
        verdict.append(choice[node])
    assert f"committed, `{' '.join(TOKENS[t] for t in verdict)}`" in PAGE
    padded = verdict + [0] * (3 - len(verdict))
    state.commit(step, torch.tensor([padded]), torch.tensor([len(verdict)]))
    counts, num_output = read_list(state.tables, 1)
    everything = after + verdict
    assert ({t: n for t, n in counts.items() if n}, num_output) == (
        Counter(everything),
        len(everything),
    )
    said = ", ".join(f"`{TOKENS[t]}` {n}" for t, n in sorted(Counter(everything).items()))
    shown = " ".join(TOKENS[t] for t in everything)
    assert f"output is `{shown}`: {said}, n = {num_output}." in " ".join(PAGE.split())
    # And what one row for all nodes would have done.
    assert torch.tensor(numbers(nodes[0], TOKENS)).argmax() == TOKENS.index("a")


@pytest.mark.parametrize(
    "row", read_table("parameter", "default"), ids=lambda row: row["parameter"]
)
def test_accepted_ranges(row: dict[str, str]) -> None:
    name = row["parameter"]
    default = getattr(SamplingParams(), name)
    if name == "logit_bias":
        assert (default, row["default"], row["accepted"]) == (None, "none", "finite numbers")
        SamplingParams(logit_bias={1: -1e30, 2: 1e30})
        for value in (math.nan, math.inf, 1e39):
            with pytest.raises(ValueError, match="logit_bias"):
                SamplingParams(logit_bias={1: value})
        return
    assert default == ast.literal_eval(row["default"])
    left, low, high = re.fullmatch(r"([\[(])(.+), (.+)\]", row["accepted"]).groups()
    is_integer = isinstance(default, int)
    low = int(low)
    high = 7 if high == "max_new_tokens" else int(high)
    least = (1 if is_integer else 1e-6) if left == "(" else low
    beyond = 1 if is_integer else 1e-6
    for value in (least, high):
        SamplingParams(max_new_tokens=7, **{name: value})
    for value in (low if left == "(" else low - beyond, high + beyond, True, "1", math.nan):
        with pytest.raises(ValueError, match=name):
            SamplingParams(max_new_tokens=7, **{name: value})


def test_sizes() -> None:
    assert f"{layout.ENTRY_BYTES} bytes an entry, in pages of {layout.PAGE}" in PAGE
    assert f"**Page.** {layout.PAGE} entries of {layout.ENTRY_BYTES} bytes." in PAGE
    assert f"**Header.** {4 * layout.HEADER} bytes." in PAGE
    assert f"At most {layout.MAX_TOKENS} tokens of a draft" in PAGE

    found = re.search(r"B = (\d+) and V = (\d+),(\d+)", PAGE)
    batch, vocab = int(found[1]), int(found[2] + found[3])
    rows = {row["what"]: row for row in read_table("what", "bytes")}
    sizes = {name: int(row["bytes"].replace(",", "")) for name, row in rows.items()}
    for name, size in sizes.items():
        assert rows[name]["MiB"] == f"{size / 2**20:.2f}"
    dense, step, ours, _ = sizes.values()
    assert dense == 3 * batch * vocab * 4
    assert step == 5 * batch * vocab * 4 + batch * vocab
    num_lists, size = re.search(r"here, (\d+) lists of up to ([\d,]+) entries", PAGE).groups()
    assert int(num_lists) == batch
    pool = PenaltyPool(batch, vocab, initial_entries=batch * int(size.replace(",", "")))
    assert PenaltyState(pool, CPU, "torch").nbytes == ours
