"""Draft trees against references that walk Python lists."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.speculative.eagle_tree import (
    AcceptedPath,
    DraftCandidates,
    DraftTree,
    accept_path,
    beam_self_masks,
    build_tree,
    expand_local_mask,
    max_num_draft_tokens,
    num_candidates,
    pad_local_mask,
    path_move_locs,
    visible_columns,
)

CPU = torch.device("cpu")
# Products of these are exact in float32, so that equal scores are equal here and there.
TIED = (0.0, 0.25, 0.5, 1.0)


# --- The reference ----------------------------------------------------------------------------


class Draft:
    """A draft model: the K best tokens behind each path, made up when first asked for."""

    def __init__(self, seed: int, topk: int, tied: bool) -> None:
        self.rng, self.topk, self.tied = random.Random(seed), topk, tied
        self.known: dict[tuple[int, ...], list[tuple[float, int]]] = {}

    def best(self, path: tuple[int, ...]) -> list[tuple[float, int]]:
        if path not in self.known:
            probs = [self._prob() for _ in range(self.topk)]
            tokens = self.rng.sample(range(50), self.topk)
            self.known[path] = list(zip(sorted(probs, reverse=True), tokens, strict=True))
        return self.known[path]

    def _prob(self) -> float:
        if self.tied:
            return self.rng.choice(TIED)
        return torch.tensor(self.rng.random(), dtype=torch.float32).item()


@dataclass
class Candidate:
    number: int
    path: tuple[int, ...]
    score: float


def f32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def best_of(candidates: list[Candidate], count: int) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (-c.score, c.number))[:count]


def reference_candidates(draft: Draft, num_steps: int) -> tuple[list[Candidate], list[list]]:
    """All candidates in order, and the beam of each level."""
    everything, beams = [], []
    beam = [Candidate(-1, (), 1.0)]
    for _ in range(num_steps):
        level = []
        for entry in beam:
            for prob, token in draft.best(entry.path):
                number = len(everything) + len(level)
                level.append(Candidate(number, (*entry.path, token), f32(entry.score * prob)))
        everything += level
        beam = best_of(level, draft.topk)
        beams.append(beam)
    beams[0] = everything[: draft.topk]  # level 1 is its own beam, in the order of the draft
    return everything, beams


def grow(draft: list[Draft], num_steps: int, topk: int) -> tuple[DraftCandidates, list]:
    """Grow a batch of trees as the worker does; also the paths and masks of each beam."""

    def ask(paths: list[list[tuple[int, ...]]]) -> tuple[torch.Tensor, torch.Tensor]:
        found = [[d.best(path) for path in row] for d, row in zip(draft, paths, strict=True)]
        pairs = torch.tensor(found, dtype=torch.float64)
        return pairs[..., 0].float(), pairs[..., 1].long()

    probs, tokens = ask([[()] for _ in draft])
    candidates = DraftCandidates(probs[:, 0], tokens[:, 0], beam_self_masks(num_steps, topk, CPU))
    paths = [[(t,) for t in row] for row in candidates.beam_tokens.tolist()]
    seen = [(paths, candidates)]
    masks = [candidates.beam_mask.clone()] if num_steps > 1 else []
    for step in range(1, num_steps):
        candidates.add_level(*ask(paths))
        if step < num_steps - 1:
            parents = candidates.select_beam().tolist()
            paths = [
                [(*row[p], t) for p, t in zip(ps, ts, strict=True)]
                for row, ps, ts in zip(paths, parents, candidates.beam_tokens.tolist(), strict=True)
            ]
            masks.append(candidates.beam_mask.clone())
            seen.append((paths, candidates))
    return candidates, list(zip([p for p, _ in seen], masks, strict=False))


# --- Growing and choosing ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_steps", "topk", "expected"), [(1, 1, 1), (5, 1, 5), (1, 4, 4), (3, 2, 10), (3, 4, 36)]
)
def test_number_of_candidates(num_steps: int, topk: int, expected: int) -> None:
    assert num_candidates(num_steps, topk) == expected
    assert max_num_draft_tokens(num_steps, topk) == expected + 1


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 4),
    num_steps=st.integers(1, 4),
    topk=st.integers(1, 4),
    tied=st.booleans(),
    data=st.data(),
)
def test_tree_is_the_references(
    seed: int, batch_size: int, num_steps: int, topk: int, tied: bool, data: st.DataObject
) -> None:
    num_draft_tokens = data.draw(st.integers(2, max_num_draft_tokens(num_steps, topk)))
    drafts = [Draft(seed + i, topk, tied) for i in range(batch_size)]
    candidates, _ = grow(drafts, num_steps, topk)
    roots = torch.arange(100, 100 + batch_size)
    tree = candidates.build_tree(roots, num_draft_tokens)

    for row, draft in enumerate(drafts):
        everything, _ = reference_candidates(draft, num_steps)
        kept = best_of(everything, num_draft_tokens - 1)
        paths = [(), *(c.path for c in sorted(kept, key=lambda c: c.number))]
        for path in paths[1:]:
            assert path[:-1] in paths, "a node was kept without its parent"
        assert tree.tokens[row].tolist() == [100 + row, *(p[-1] for p in paths[1:])]
        assert tree.depth[row].tolist() == [len(p) for p in paths]
        assert tree.parents[row].tolist() == [-1, *(paths.index(p[:-1]) for p in paths[1:])]
        assert tree.ancestor_mask[row].tolist() == [
            [path[: len(other)] == other for other in paths] for path in paths
        ]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 3),
    num_steps=st.integers(2, 5),
    topk=st.integers(1, 4),
    tied=st.booleans(),
)
def test_beam_sees_its_exact_ancestors(
    seed: int, batch_size: int, num_steps: int, topk: int, tied: bool
) -> None:
    drafts = [Draft(seed + i, topk, tied) for i in range(batch_size)]
    _, levels = grow(drafts, num_steps, topk)
    assert len(levels) == num_steps - 1
    for row, draft in enumerate(drafts):
        _, beams = reference_candidates(draft, num_steps)
        places: list[tuple[int, ...]] = []
        for (paths, mask), beam in zip(levels, beams, strict=False):
            assert paths[row] == [c.path for c in beam]
            places += paths[row]
            for entry, bits in zip(paths[row], mask[row].tolist(), strict=True):
                assert bits[0] is True
                assert bits[-1] is False
                seen = [place for place, bit in zip(places, bits[1:], strict=False) if bit]
                assert seen == [entry[: i + 1] for i in range(len(entry))]
                assert not any(bits[1 + len(places) :])


def test_chain() -> None:
    tokens = torch.tensor([[5, 6, 7]])
    tree = build_tree(
        torch.tensor([4]), tokens, torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[-1, 0, 1]]), 4, 3
    )
    assert tree.tokens.tolist() == [[4, 5, 6, 7]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]]
    assert tree.depth.tolist() == [[0, 1, 2, 3]]
    assert torch.equal(tree.ancestor_mask[0], torch.ones(4, 4).tril().bool())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 4), topk=st.integers(1, 3))
def test_any_scores_give_a_tree(seed: int, num_steps: int, topk: int) -> None:
    """NaN of a broken draft costs acceptance and nothing else."""
    generator = torch.Generator().manual_seed(seed)
    count = num_candidates(num_steps, topk)
    scores = torch.randn(2, count, generator=generator)
    scores = torch.where(torch.rand(2, count, generator=generator) < 0.3, torch.nan, scores)
    parents = [-1] * topk
    for level in range(1, num_steps):
        first = 0 if level == 1 else num_candidates(level - 1, topk)
        parents += [first + entry for entry in range(topk) for _ in range(topk)]
    size = min(count + 1, 5)
    tree = build_tree(
        torch.zeros(2, dtype=torch.int64),
        torch.arange(count).expand(2, -1),
        scores,
        torch.tensor([parents, parents]),
        size,
        num_steps,
    )
    for row in range(2):
        parents_of, depth = tree.parents[row].tolist(), tree.depth[row].tolist()
        assert parents_of[0] == -1
        assert depth[0] == 0
        for node in range(1, size):
            assert 0 <= parents_of[node] < node
            assert depth[node] == depth[parents_of[node]] + 1 <= num_steps
            seen = {node}
            while node > 0:
                node = parents_of[node]
                seen.add(node)
            assert tree.ancestor_mask[row, max(seen)].nonzero().flatten().tolist() == sorted(seen)


# --- Masks over rows --------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lens=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    width=st.integers(0, 5),
    queries=st.integers(1, 3),
    spare=st.integers(0, 4),
)
def test_local_mask_on_rows(
    seed: int, lens: list[int], width: int, queries: int, spare: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    local = torch.rand(len(lens), queries, width, generator=generator) < 0.5
    row_len = max(lens) + width + spare
    columns = visible_columns(torch.tensor(lens), width, row_len)
    mask = expand_local_mask(pad_local_mask(local), columns)
    assert mask.shape == (len(lens), queries, row_len)
    for b, prefix in enumerate(lens):
        for q in range(queries):
            for j in range(row_len):
                inside = prefix <= j < prefix + width
                expected = j < prefix or (inside and bool(local[b, q, j - prefix]))
                assert bool(mask[b, q, j]) is expected


# --- Acceptance -------------------------------------------------------------------------------


def random_tree(rng: random.Random, size: int, num_steps: int, vocab: int) -> list[list[int]]:
    """Parents and tokens of a tree whose siblings differ."""
    parents, tokens, depth = [-1], [rng.randrange(vocab)], [0]
    while len(parents) < size:
        parent = rng.randrange(len(parents))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(vocab) if t not in taken]
        if depth[parent] < num_steps and free:
            parents.append(parent)
            tokens.append(rng.choice(free))
            depth.append(depth[parent] + 1)
    return [parents, tokens, depth]


def to_tree(rows: list[list[list[int]]]) -> DraftTree:
    parents, tokens, depth = (torch.tensor([row[i] for row in rows]) for i in range(3))
    size = parents.shape[1]
    mask = torch.zeros(len(rows), size, size, dtype=torch.bool)
    for b, row in enumerate(rows):
        for node in range(size):
            at = node
            while at >= 0:
                mask[b, node, at] = True
                at = row[0][at]
    return DraftTree(tokens, parents, depth, mask)


def reference_path(parents: list[int], tokens: list[int], target: list[int]) -> list[int]:
    path = [0]
    while True:
        here = path[-1]
        agreed = [
            node
            for node in range(len(parents))
            if parents[node] == here and tokens[node] == target[here]
        ]
        if not agreed:
            return path
        path.append(agreed[0])


def accepted(rows: list[list[list[int]]], target: list[list[int]], num_steps: int) -> AcceptedPath:
    return accept_path(to_tree(rows), torch.tensor(target), num_steps)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 4),
    num_steps=st.integers(1, 5),
    size=st.integers(2, 12),
    vocab=st.sampled_from([2, 3, 8]),
)
def test_accepted_path_is_the_references(
    seed: int, batch_size: int, num_steps: int, size: int, vocab: int
) -> None:
    rng = random.Random(seed)
    # No more nodes than a tree of that depth and branching has.
    size = min(size, sum(vocab**level for level in range(num_steps + 1)))
    rows = [random_tree(rng, size, num_steps, vocab) for _ in range(batch_size)]
    target = [[rng.randrange(vocab) for _ in range(size)] for _ in rows]
    path = accepted(rows, target, num_steps)
    assert path.nodes.shape == (batch_size, num_steps + 1)
    for b, (parents, tokens, _) in enumerate(rows):
        expected = reference_path(parents, tokens, target[b])
        assert path.accept_lens[b].item() == len(expected)
        assert path.nodes[b].tolist() == expected + [0] * (num_steps + 1 - len(expected))


def test_whole_chain_and_nothing_of_it() -> None:
    chain = [[-1, 0, 1, 2], [9, 1, 2, 3], [0, 1, 2, 3]]
    path = accepted([chain, chain], [[1, 2, 3, 7], [2, 2, 3, 7]], 3)
    assert path.accept_lens.tolist() == [4, 1]
    assert path.nodes.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]


def test_a_node_that_agrees_below_one_that_does_not_is_not_taken() -> None:
    tree = [[-1, 0, 0, 1], [9, 1, 2, 3], [0, 1, 1, 2]]
    path = accepted([tree], [[2, 3, 8, 8]], 2)  # node 3 agrees with node 1, which is wrong
    assert path.accept_lens.tolist() == [2]
    assert path.nodes.tolist() == [[0, 2, 0]]


# --- Moving KV --------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 3),
    num_steps=st.integers(1, 4),
    size=st.integers(2, 9),
)
def test_moved_kv_is_the_paths(seed: int, batch_size: int, num_steps: int, size: int) -> None:
    rng = random.Random(seed)
    width = max(size, num_steps + 1)
    slots = torch.tensor(rng.sample(range(200), batch_size * width)).view(batch_size, width)
    nodes, lens = [], []
    for _ in range(batch_size):
        length = rng.randint(1, min(size, num_steps + 1))
        inner = sorted(rng.sample(range(1, size), length - 1))
        nodes.append([0, *inner] + [0] * (num_steps + 1 - length))
        lens.append(length)
    path = AcceptedPath(torch.tensor(nodes), torch.tensor(lens))
    tgt, src = path_move_locs(slots[:, :size], slots[:, : num_steps + 1], path)

    before = torch.arange(200)
    after = before.clone()
    assert len(set(tgt.tolist())) == batch_size * (num_steps + 1)
    after[tgt] = before[src]
    moved = set()
    for b in range(batch_size):
        for level in range(lens[b]):
            assert after[slots[b, level]] == slots[b, nodes[b][level]]
            moved.add(slots[b, level].item())
    untouched = [slot for slot in range(200) if slot not in moved]
    assert torch.equal(after[untouched], before[untouched])
