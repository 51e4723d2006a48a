"""What a step of penalties should cost a GPU, on paper: bytes that have to move, and launches.

    microseconds = bytes / (4.3 TB/s) + 2.5 * launches

4.3 TB/s is nine tenths of an H200's memory bandwidth, which is what a streaming kernel gets of it.
2.5 us is what one small kernel after another takes on a busy stream, start to start. It is a floor: each
operation's own reads and writes once, nothing for arithmetic, nothing for the host.

An operation on dense tensors moves what PyTorch's kernel for it moves: each operand once, the result
once, 4 bytes a number. An access to single logits moves a sector of 32 bytes each way, however few of
its bytes are wanted; tokens of one row that fall into one sector share it, so ``n`` random ones of
``V`` touch ``S * (1 - (1 - 1/S)**n)`` of the row's ``S = V / 8`` sectors. A list is read in whole runs,
once an operation: the programs that share it find it in the L2 cache.

=============  =====================================================================================
sparse         commit (or stage): the list's tokens, 4 bytes each; the hits' counts and the header, a
               sector each way. apply: token and count of each entry, 8 bytes (no biases here), and a
               sector of logits read and written for each row of logits. No ``[B, V]`` anywhere.
one_pass       counts, stop mask and biases once a request, 9 bytes a column; each row of logits read
               and written once, 8 bytes a column; a scatter of the tokens.
upstream       as `lab.upstream_penalties` runs it without overlap: each penalizer's pass over [B, V];
               for drafts what it adds in zeros, what it scales by in a copy, and both repeated.
overlap        the same with what a forward takes along in tensors of its own.
=============  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

BYTES_PER_US: Final = 4.3e6
LAUNCH_US: Final = 2.5
SECTOR: Final = 32
HEADER: Final = 32
STOPS: Final = 2


class Shape(Protocol):
    """What is read of a cell."""

    batch_size: int
    vocab_size: int
    seen: int
    num_nodes: int
    max_tokens: int
    is_draft: bool


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes
    ----------
    name : str
    reads, writes : float
        Bytes.
    launches : int
    """

    name: str
    reads: float
    writes: float
    launches: int = 1

    @property
    def nbytes(self) -> float:
        """Bytes moved."""
        return self.reads + self.writes


def floor_us(ops: list[Op]) -> float:
    """Microseconds of the formula."""
    nbytes = sum(op.nbytes for op in ops)
    return nbytes / BYTES_PER_US + LAUNCH_US * sum(op.launches for op in ops)


def sectors(vocab_size: int, tokens: float) -> float:
    """Sectors of a row of float32 that so many random tokens are expected to touch."""
    there = vocab_size * 4 / SECTOR
    return there * (1 - (1 - 1 / there) ** tokens)


def sparse(shape: Shape) -> list[Op]:
    """Penalties by lists."""
    size, entries = shape.batch_size, shape.seen + STOPS
    # A row's column of the index, and its pages.
    about = HEADER + 16 + 4 * -(-entries // 128)
    ops = []
    staged = 0.0
    if shape.is_draft:
        drafts = shape.num_nodes - 1
        staged = drafts / 2  # as the workload drafts: every other token is new
        ops.append(
            Op(
                "stage",
                size * (about + 8 * shape.num_nodes + 4 * entries + SECTOR * drafts),
                size * (SECTOR * drafts + 4 * shape.num_nodes + HEADER),
            )
        )
    touched = sectors(shape.vocab_size, entries + staged) * SECTOR
    way = shape.num_nodes**2 + 4 * shape.num_nodes if shape.is_draft else 0
    ops.append(
        Op(
            "apply",
            size * (about + way + 8 * (entries + staged) + shape.num_nodes * touched),
            size * shape.num_nodes * touched,
        )
    )
    hits = SECTOR * shape.max_tokens
    given = 8 * shape.max_tokens + (8 if shape.is_draft else 0)
    ops.append(Op("commit", size * (about + given + 4 * entries + hits), size * (hits + HEADER)))
    return ops


def one_pass(shape: Shape) -> list[Op]:
    """Dense penalties in one pass."""
    columns = shape.batch_size * shape.vocab_size
    tokens = shape.batch_size * shape.max_tokens
    return [
        Op("pass", columns * (9 + 4 * shape.num_nodes), columns * 4 * shape.num_nodes),
        # Which of them count, and how many, where not all do.
        Op("count", tokens * (8 + SECTOR), tokens * SECTOR, 4 if shape.is_draft else 2),
    ]


def _cumulate(size: int) -> list[Op]:
    scattered = [
        Op(name, size * (12 + SECTOR), size * SECTOR)
        for name in ("frequency scatter_add", "presence scatter", "repetition scatter")
    ]
    return [*scattered, Op("length += 1", 4 * size, 4 * size)]


def _additive(size: int, onto: float) -> list[Op]:
    """What is added, onto a tensor of `onto` bytes."""
    return [
        Op("frequency sub_", 2 * onto, onto),
        Op("presence sub_", 2 * onto, onto),
        Op("length < minimum", 8 * size, size),
        Op("where(short, stops, 0)", onto, onto),
        Op("stops add_", 2 * onto, onto),
    ]


def _carried(shape: Shape) -> list[Op]:
    """Penalties gathered in tensors of their own, then applied to all rows."""
    dense = 4.0 * shape.batch_size * shape.vocab_size
    rows = dense * shape.num_nodes
    additive = _additive(shape.batch_size, dense)
    ops = [*_cumulate(shape.batch_size), Op("zeros", 0, dense), *additive]
    repeated = [Op("repeat_interleave", dense, rows)] if shape.is_draft else []
    return [
        *ops,
        Op("scaling clone", dense, dense),
        *repeated,
        Op("logits add_", 2 * rows, rows),
        *repeated,
        Op("scale", 2 * rows, rows),
    ]


def upstream(shape: Shape) -> list[Op]:
    """Upstream's penalizers without overlap."""
    if shape.is_draft:
        return _carried(shape)
    dense = 4.0 * shape.batch_size * shape.vocab_size
    additive = _additive(shape.batch_size, dense)
    return [*_cumulate(shape.batch_size), *additive, Op("scale", 2 * dense, dense)]


def overlap(shape: Shape) -> list[Op]:
    """Upstream's penalizers with overlap."""
    return _carried(shape)


MODELS: Final[dict[str, Callable[[Shape], list[Op]]]] = {
    "sparse": sparse,
    "one_pass": one_pass,
    "upstream": upstream,
    "overlap": overlap,
}
