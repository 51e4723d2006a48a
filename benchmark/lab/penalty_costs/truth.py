"""Whether the work was done: rows of logits, held against penalties in float64.

The truth knows nothing of a subject's state. It knows which turns were taken, which requests have gone
and which have come (`Subject.said_so_far`), so the state of all steps and joins has to be right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import torch

from lab.metrics import WorkNotDone
from lab.penalty_costs.subjects import Subject
from lab.penalty_costs.workload import REQUEST, Logits, Request

CHECKED_ROWS: Final = 3


def true_row(
    row: np.ndarray, counts: Mapping[int, int], num_output: int, request: Request
) -> tuple[np.ndarray, np.ndarray]:
    """A row of logits, float64, penalized; and how far from it float32 may be.

    A frequency penalty may be added up by ``c`` roundings of sums up to ``c`` times itself, as
    upstream's is.
    """
    wanted = row.astype(np.float64)
    allowed = np.zeros_like(wanted)
    tokens = np.fromiter(counts, np.int64, len(counts))
    times = np.fromiter(counts.values(), np.float64, len(counts))
    frequency, ratio = request.frequency_penalty, request.repetition_penalty
    x = wanted[tokens] - (frequency * times + request.presence_penalty)
    size = np.abs(wanted[tokens]) + abs(frequency) * times + abs(request.presence_penalty)
    wanted[tokens] = np.where(x < 0, x * ratio, x / ratio)
    drift = abs(frequency) * times**2 * 2.0**-24
    allowed[tokens] = (1e-6 * size + drift) * max(ratio, 1 / ratio)
    if num_output < request.min_new_tokens:
        wanted[list(request.stop_token_ids)] = -math.inf
    return wanted, allowed


def check(name: str, subject: Subject, logits: Logits) -> None:
    """Do one step on fresh logits, and compare rows of it.

    Raises
    ------
    WorkNotDone
        If a row is not what it should be.
    """
    cell = subject.work.cell
    rows = logits.of(cell)[0]
    logits.refresh(rows)
    size, nodes = cell.batch_size, cell.num_nodes
    picked = sorted({(0, 0), (size // 2, nodes // 2), (size - 1, nodes - 1)})[:CHECKED_ROWS]
    _step_and_compare(name, subject, rows, picked)


def check_joined(name: str, subject: Subject) -> None:
    """See that the requests that have come know nothing of those before them, and the others still all.

    Does a step on fresh logits and compares rows of it. By then each request may have come in a join, so
    that none had said anything which could have been lost. The step has made all of them say something:
    one more goes, another one comes, and rows of a second step are compared, the newcomer's and those
    of its neighbours among them.

    Raises
    ------
    WorkNotDone
        If a row is not what it should be, or if any has lost its stop tokens.
    """
    cell, device = subject.work.cell, subject.work.device
    generator = torch.Generator(device).manual_seed(1)
    rows = torch.empty(cell.batch_size * cell.num_nodes, cell.vocab_size, device=device)
    size, last_node = cell.batch_size, cell.num_nodes - 1
    going = size // 2
    # Where it comes; if that is behind the last, those behind the one that goes have moved up.
    coming = size - 1 if subject.joins_last else going
    wanted = {0, going - 1, going, going + 1, coming - 1, coming, size - 1}
    picked = [(row, last_node) for row in sorted(wanted) if 0 <= row < size]
    for is_second in (False, True):
        if is_second:
            subject.join(going)
            subject.note_join(going)
        rows.normal_(std=5, generator=generator)
        _step_and_compare(name, subject, rows, picked)
        stops = rows[:, list(REQUEST.stop_token_ids)]
        if not bool((stops == -math.inf).all()):
            raise WorkNotDone(f"{cell.name}: {name} has lost a request's stop tokens")


def _step_and_compare(
    name: str, subject: Subject, rows: torch.Tensor, picked: Collection[tuple[int, int]]
) -> None:
    """Do the first turn on all `rows`; compare those of `picked`, each a row of the batch and a node."""
    work = subject.work
    cell, turn = work.cell, work.turns[0]
    places = [row * cell.num_nodes + node for row, node in picked]
    given = rows[places].cpu().numpy()
    planned = subject.before(turn)
    subject.run(planned, turn, rows)
    subject.after(planned, turn)
    subject.note(turn)
    got = rows[places].cpu().numpy().astype(np.float64)
    for (row, node), before, after in zip(picked, given, got, strict=True):
        said = subject.said_so_far(row)
        now = subject.said(turn, row) if subject.counts_first else []
        if cell.is_draft and subject.is_exact:
            now = [*now, *(turn.host_drafts[row][n] for n in cell.ways[node] if n != 0)]
        said.update(now)
        wanted, allowed = true_row(before, said, sum(said.values()), REQUEST)
        with np.errstate(invalid="ignore"):
            wrong = ~((np.abs(after - wanted) <= allowed) | (after == wanted))
        if wrong.any():
            token = int(np.flatnonzero(wrong)[0])
            raise WorkNotDone(
                f"{cell.name}: {name} makes {before[token]:.7g} {after[token]:.7g} and not "
                f"{wanted[token]:.7g} at token {token} of row {row}, node {node}; "
                f"{int(wrong.sum())} tokens of this row are wrong"
            )
    subject.taken[0] += 1
