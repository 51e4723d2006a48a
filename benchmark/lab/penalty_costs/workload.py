"""What is measured: the cells of the grid, and the requests, turns and logits that all subjects get.

A cell says how large a batch is, what it verifies and how much its requests have said. `Workload` makes
the same requests and turns of it each time, and `Logits` has the memory that they are applied to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

KINDS: Final = ("plain", "chain", "tree", "join")
BATCH_SIZES: Final = (1, 8, 64, 256)
VOCAB_SIZES: Final = (32_000, 128_256, 152_064)
SEEN: Final = (16, 256, 2048)
JOIN_SEEN: Final = 256

NUM_TURNS: Final = 8
LOGITS_BYTES: Final = 3 << 30
"""For the logits of one cell in as many copies as fit, one at least."""

OVERLAP_BYTES: Final = 256 << 20
"""With drafts upstream does the same operations with overlap as without. Above so many bytes of logits
it is measured once, for time's sake."""

CELL_BYTES: Final = 8 << 30
"""A subject whose tensors, with the logits of one step, would take more is left out."""


@dataclass(frozen=True)
class Request:
    """What the subjects are told of a request."""

    frequency_penalty: float = 0.2
    presence_penalty: float = 0.1
    repetition_penalty: float = 1.1
    min_new_tokens: int = 1_000_000_000
    stop_token_ids: Collection[int] = (2, 5)


REQUEST: Final = Request()


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes
    ----------
    kind : {"plain", "chain", "tree", "join"}
    batch_size, vocab_size : int
    seen : int
        Distinct tokens that each request has said.
    """

    kind: str
    batch_size: int
    vocab_size: int
    seen: int = JOIN_SEEN

    @property
    def name(self) -> str:
        """For people, and for a filter."""
        return f"{self.kind}-b{self.batch_size}-v{self.vocab_size}-s{self.seen}"

    @property
    def is_draft(self) -> bool:
        """Whether a step verifies drafts."""
        return self.kind in ("chain", "tree")

    @property
    def parents(self) -> list[int]:
        """Of each node, its parent; a binary tree fills up level by level."""
        if self.kind == "chain":
            return [-1, 0, 1, 2]
        return [(node - 1) // 2 if node else -1 for node in range(16 if self.kind == "tree" else 1)]

    @property
    def num_nodes(self) -> int:
        """Rows of logits of a request."""
        return len(self.parents)

    @property
    def max_tokens(self) -> int:
        """Most tokens that a step commits for a request: the longest way, and one."""
        return max(len(way) for way in self.ways)

    @property
    def ways(self) -> list[list[int]]:
        """Of each node, the nodes from the root to it."""
        ways: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            ways.append([*(ways[parent] if parent >= 0 else []), node])
        return ways

    @property
    def logits_bytes(self) -> int:
        """Of one step."""
        return 4 * self.batch_size * self.num_nodes * self.vocab_size

    def dense_bytes(self, subject: str) -> int:
        """What a dense subject needs for a step, logits included; 0 for sparse."""
        columns = self.batch_size * self.vocab_size
        rows = self.logits_bytes
        if subject == "one_pass":
            return 9 * columns + rows
        if subject in ("upstream", "overlap"):
            # Four tensors; beside the logits two more for a moment, and one repeated for drafts. A
            # finish plus a join holds everything twice, and a third time what is being gathered.
            held = 16 * columns
            if self.kind == "join":
                return 3 * held
            return held + 8 * columns + rows + (rows if self.is_draft else 0)
        return 0


def grid(
    kinds: Iterable[str] = KINDS,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    vocab_sizes: Iterable[int] = VOCAB_SIZES,
    seen: Iterable[int] = SEEN,
) -> list[Cell]:
    """All cells, a finish plus a join once for each size."""
    return [
        Cell(kind, size, vocab, count)
        for kind in kinds
        for size in batch_sizes
        for vocab in vocab_sizes
        for count in ([JOIN_SEEN] if kind == "join" else seen)
    ]


QUICK: Final = (
    Cell("plain", 1, 32_000, 16),
    Cell("plain", 8, 32_000, 256),
    Cell("plain", 64, 128_256, 256),
    Cell("plain", 64, 128_256, 2048),
    Cell("chain", 8, 32_000, 256),
    Cell("chain", 8, 128_256, 256),
    Cell("tree", 8, 32_000, 256),
    Cell("join", 64, 128_256),
)


@dataclass(frozen=True)
class Turn:
    """The input of one step.

    Attributes
    ----------
    tokens : Tensor, shape (B, max_tokens), int64
        What is committed.
    latest : Tensor, shape (B,), int64
        Of these, the last of each row that counts.
    host_tokens : list of list of int
        Those of each row that count.
    lens : Tensor, shape (B,), int64, or None
        How many count; all without drafts.
    host_lens : list of int
    drafts : Tensor, shape (B, D), int64
    host_drafts : list of list of int
    """

    tokens: torch.Tensor
    latest: torch.Tensor
    host_tokens: list[list[int]]
    lens: torch.Tensor | None
    host_lens: list[int]
    drafts: torch.Tensor
    host_drafts: list[list[int]]


class Workload:
    """The requests and turns of a cell, the same each time it is made.

    Attributes
    ----------
    outputs : list of list of int
        What each request has said before the first step.
    turns : list of Turn
    ancestors : Tensor, shape (B, D, D), bool, or None
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        rng = np.random.default_rng([cell.batch_size, cell.vocab_size, cell.seen, cell.num_nodes])
        size = cell.batch_size
        self.cell, self.device = cell, device
        # No stop tokens among them: what is masked stays masked.
        first = max(REQUEST.stop_token_ids) + 1
        seen = np.stack(
            [
                first + rng.choice(cell.vocab_size - first, cell.seen, replace=False, shuffle=False)
                for _ in range(size)
            ]
        )
        twice = seen[:, : cell.seen // 4]
        self.outputs: list[list[int]] = np.concatenate((seen, twice), axis=1).tolist()
        self.turns = [self._turn(rng, seen) for _ in range(NUM_TURNS)]
        self.ancestors = None
        if cell.is_draft:
            mask = torch.zeros(cell.num_nodes, cell.num_nodes, dtype=torch.bool)
            for node, way in enumerate(cell.ways):
                mask[node, way] = True
            self.ancestors = mask.expand(size, -1, -1).contiguous().to(device)

    def _turn(self, rng: np.random.Generator, seen: np.ndarray) -> Turn:
        cell = self.cell
        size = len(seen)
        picks = rng.integers(cell.seen, size=(size, cell.max_tokens))
        tokens = np.take_along_axis(seen, picks, 1)
        lens = np.full(size, 1)
        if cell.is_draft:
            lens = rng.integers(1, cell.max_tokens + 1, size=size)
        drafts = np.take_along_axis(seen, rng.integers(cell.seen, size=(size, cell.num_nodes)), 1)
        first = max(REQUEST.stop_token_ids) + 1
        drafts[:, 1::2] = rng.integers(first, cell.vocab_size, size=drafts[:, 1::2].shape)
        latest = np.take_along_axis(tokens, lens[:, None] - 1, 1)[:, 0]
        return Turn(
            tokens=torch.from_numpy(tokens).to(self.device),
            latest=torch.from_numpy(latest).to(self.device),
            host_tokens=[row[:n] for row, n in zip(tokens.tolist(), lens.tolist())],
            lens=torch.from_numpy(lens).to(self.device) if cell.is_draft else None,
            host_lens=lens.tolist(),
            drafts=torch.from_numpy(drafts).to(self.device),
            host_drafts=drafts.tolist(),
        )


class Logits:
    """One piece of memory that all cells have their logits in.

    Parameters
    ----------
    cells : sequence of Cell
        For the largest of which there is room once, and for others up to `NUM_TURNS` times.
    device : torch.device
    budget : int
        Bytes.
    """

    def __init__(
        self, cells: Sequence[Cell], device: torch.device, budget: int = LOGITS_BYTES
    ) -> None:
        self._budget = budget
        sizes = [cell.logits_bytes * self.copies(cell) for cell in cells if cell.kind != "join"]
        generator = torch.Generator().manual_seed(0)
        # Of a length that no row's is a multiple of.
        self._values = torch.randn(1_000_003, generator=generator).mul_(5).to(device)
        self._memory = torch.empty(max(sizes, default=0) // 4, device=device)
        self._fill(self._memory)

    def copies(self, cell: Cell) -> int:
        """How many steps' logits a cell has."""
        return min(NUM_TURNS, max(1, self._budget // cell.logits_bytes))

    def of(self, cell: Cell) -> list[torch.Tensor]:
        """Logits for steps of `cell`, each of shape (B * D, V)."""
        count, size = self.copies(cell), cell.logits_bytes // 4
        return list(self._memory[: count * size].view(count, -1, cell.vocab_size))

    def refresh(self, logits: torch.Tensor) -> None:
        """Make one step's logits those of an untouched model's output again."""
        self._fill(logits.view(-1))

    def _fill(self, flat: torch.Tensor) -> None:
        for part in flat.split(len(self._values)):
            part.copy_(self._values[: len(part)])
