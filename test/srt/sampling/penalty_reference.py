"""Penalties in float64 from DESIGN's text, and a rig that compares an engine's steps with them.

Nothing of the arithmetic is shared with the package: the reference reads a request's parameters, and
the tokens that the rig has given out for it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib import sparse_penalties

CPU = torch.device("cpu")
SENTINEL = 12345.0
TOLERANCE = 1e-5


def reference_row(
    row: np.ndarray, output: Sequence[int], request: Any
) -> tuple[np.ndarray, np.ndarray]:
    """One row of logits, float64, after `output`, and the magnitudes that rounding may scale with."""
    wanted = row.copy()
    scale = np.abs(row)
    for token, count in Counter(output).items():
        if not 0 <= token < len(row):
            continue
        x = row[token]
        penalty = request.frequency_penalty * count + request.presence_penalty
        size = abs(x) + abs(request.frequency_penalty) * count + abs(request.presence_penalty)
        x = x - penalty
        r = request.repetition_penalty
        wanted[token] = x * r if x < 0 else x / r
        scale[token] = size * max(r, 1 / r)
    for token, bias in request.logit_bias.items():
        if 0 <= token < len(row):
            wanted[token] += bias
            scale[token] += abs(bias)
    if len(output) < request.min_new_tokens:
        for token in request.stop_token_ids:
            if 0 <= token < len(row):
                wanted[token] = -math.inf
    return wanted, scale


def assert_row(got: torch.Tensor, given: torch.Tensor, output: Sequence[int], request: Any) -> None:
    """Compare a row with the reference; what the reference leaves alone must have kept its bits."""
    before = given.double().numpy()
    wanted, scale = reference_row(before, output, request)
    changed = set(output) | set(request.logit_bias) | set(request.stop_token_ids)
    alone = np.ones(len(before), bool)
    alone[[t for t in changed if 0 <= t < len(before)]] = False
    assert torch.equal(_bits(got)[alone], _bits(given)[alone]), "a token that was not seen changed"
    after = got.double().numpy()
    is_finite = np.isfinite(wanted)
    assert np.array_equal(after[~is_finite], wanted[~is_finite], equal_nan=True)
    allowed = TOLERANCE * scale[is_finite] + 1e-30
    if got.dtype != torch.float32:
        info = torch.finfo(got.dtype)
        allowed += info.eps / 2 * np.abs(wanted[is_finite]) + info.smallest_normal * info.eps
    error = np.abs(after[is_finite] - wanted[is_finite])
    assert (error <= allowed).all(), f"off by {error.max()} with {request} after {list(output)}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def make_logits(
    rows: int, vocab_size: int, dtype: torch.dtype, seed: int, device: torch.device = CPU
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits with signed zeros and infinities, inside a buffer of sentinels that is longer."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, vocab_size), generator=generator) * 5
    kind = torch.randint(0, 50, values.shape, generator=generator)
    for i, special in enumerate((0.0, -0.0, -math.inf)):
        values[kind == i] = special
    buffer = torch.full((rows + 2, vocab_size + 16), SENTINEL, dtype=dtype)
    buffer[1:-1, 8:-8] = values.to(dtype)
    buffer = buffer.to(device)
    return buffer, buffer[1:-1, 8:-8]


def assert_sentinels(buffer: torch.Tensor) -> None:
    """Nothing outside the logits was written."""
    edge = torch.tensor(SENTINEL, dtype=buffer.dtype)
    for part in (buffer[0], buffer[-1], buffer[:, :8], buffer[:, -8:]):
        assert (part == edge).all(), "written outside the logits"


class Rig:
    """Requests, planner and state, as an engine would drive them, one step in flight.

    Parameters
    ----------
    backend : str
        "torch", "numba" or "triton".
    vocab_size, max_draft_tokens : int
    module : module
        Where planner and state come from, for mutated ones.
    ops : object, optional
        A backend of its own.
    **pool : int
        More of `PenaltyPool`.
    """

    def __init__(
        self,
        backend: str = "torch",
        vocab_size: int = 600,
        max_draft_tokens: int = 0,
        num_slots: int = 8,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        module: ModuleType = sparse_penalties,
        ops: object = None,
        **pool: int,
    ) -> None:
        self.module = module
        self.backend = backend
        self.pool = module.PenaltyPool(num_slots, vocab_size, max_draft_tokens, **pool)
        self.planner = module.PenaltyPlanner(self.pool, device)
        # A mutated planner has a state that is as it should be.
        state_class = getattr(module, "PenaltyState", sparse_penalties.PenaltyState)
        self.state = state_class(self.pool, device, backend)
        self.state._ops = ops or self.state._ops
        self.device = device
        self.dtype = dtype
        self.requests: dict[int, Any] = {}
        self.outputs: dict[int, list[int]] = {}
        self.in_flight: deque[tuple[Any, list[int] | None]] = deque()
        self.seed = 0

    def admit(self, slot: int, output: Sequence[int] = (), rid: str = "", **params: Any) -> bool:
        """Let a request in that has generated `output` so far."""
        ids = list(output)
        request = self.module.PenaltyRequest(
            rid=rid or f"r{slot}", slot=slot, output_ids=ids, **params
        )
        is_required = self.planner.admit(request)
        self.requests[slot], self.outputs[slot] = request, ids
        return is_required

    def finish(self, slot: int) -> None:
        self.planner.release(slot)
        del self.requests[slot], self.outputs[slot]

    def retract(self, slot: int) -> None:
        """Take a request out of its slot and let it in again with all that it has said."""
        request, output = self.requests[slot], self.outputs[slot]
        self.finish(slot)
        params = {k: v for k, v in vars(request).items() if k not in ("rid", "slot", "output_ids")}
        self.admit(slot, output, rid=request.rid, **params)

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], uncommitted: Sequence[int] = ()
    ) -> torch.Tensor:
        """One plain step; returns the penalized logits."""
        step = self._plan(slots, uncommitted=uncommitted)
        logits = self._apply_and_check(step, [(slot, []) for slot in slots], None)
        self.state.commit(step, torch.tensor(tokens, device=self.device))
        for row, (slot, token) in enumerate(zip(slots, tokens)):
            if row not in uncommitted and slot in self.outputs:
                self.outputs[slot].append(token)
        self._settle(step, None)
        return logits

    def feed(
        self, slots: Sequence[int], tokens: Sequence[int], uncommitted: Sequence[int] = ()
    ) -> None:
        """One plain step to which the host gives the tokens that the one before has sampled."""
        fed = torch.tensor(tokens, device=self.device)
        step = self._plan(slots, uncommitted=uncommitted, fed_tokens=fed)
        for row, (slot, token) in enumerate(zip(slots, tokens)):
            if row not in uncommitted and slot in self.outputs:
                self.outputs[slot].append(token)
        self.assert_counts()
        self._apply_and_check(step, [(slot, []) for slot in slots], None)
        # What this step samples is not counted before it is fed.
        self.state.commit(step, torch.full_like(fed, 9))
        self._settle(step, None)

    def verify(
        self,
        slots: Sequence[int],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        lens: Sequence[int],
    ) -> torch.Tensor:
        """One step of verification: trees, and of `tokens` the first `lens` of each row commit."""
        num_nodes = len(drafts[0])
        step = self._plan(slots, max_tokens=len(tokens[0]), num_draft_tokens=num_nodes)
        self.state.stage(step, torch.tensor(drafts, device=self.device))
        mask = self.state.ancestors_from_parents(torch.tensor(parents, device=self.device))
        nodes = [
            (slot, [draft[node] for node in way_of(parent, node) if node != 0])
            for slot, draft, parent in zip(slots, drafts, parents)
            for node in range(num_nodes)
        ]
        logits = self._apply_and_check(step, nodes, mask)
        self.state.commit(
            step,
            torch.tensor(tokens, device=self.device),
            torch.tensor(lens, device=self.device),
        )
        for slot, row, num in zip(slots, tokens, lens):
            if slot in self.outputs:
                self.outputs[slot].extend(row[:num])
        self._settle(step, list(lens))
        return logits

    def assert_counts(self) -> None:
        """The lists on the device hold what the reference's counts say, and nothing else."""
        tables = self.state.tables
        for slot, request in self.requests.items():
            if slot not in self.planner or not request.counts_tokens:
                continue
            if not self.planner._records[slot].is_admitted:
                continue
            got, num_output = read_list(tables, slot)
            vocab = range(self.pool.vocab_size)
            wanted = {t: n for t, n in Counter(self.outputs[slot]).items() if t in vocab}
            assert {t: n for t, n in got.items() if n} == wanted
            unseen = {t for t, n in got.items() if n == 0}
            assert unseen <= {*request.stop_token_ids, *request.logit_bias}
            assert num_output == len(self.outputs[slot])

    def _plan(self, slots: Sequence[int], **how: Any) -> Any:
        step = self.planner.plan(slots, **how)
        # Under overlap the result of the step before comes when the next one is planned already.
        while len(self.in_flight) > 1:
            self.planner.settle(*self.in_flight.popleft())
        self.state.begin(step)
        return step

    def _settle(self, step: Any, lens: list[int] | None) -> None:
        self.in_flight.append((step, lens))

    def _apply_and_check(
        self, step: Any, rows: list[tuple[int, list[int]]], mask: torch.Tensor | None
    ) -> torch.Tensor:
        self.seed += 1
        buffer, logits = make_logits(
            len(rows), self.pool.vocab_size, self.dtype, self.seed, self.device
        )
        given = logits.clone()
        self.state.apply(step, logits, mask)
        assert_sentinels(buffer.cpu())
        got, given = logits.cpu(), given.cpu()
        for row, (slot, extra) in enumerate(rows):
            if slot in self.requests:
                assert_row(got[row], given[row], self.outputs[slot] + extra, self.requests[slot])
            else:
                assert torch.equal(_bits(got[row]), _bits(given[row])), "nobody's row changed"
        return got.clone()


def way_of(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    way = [node]
    while parents[way[0]] >= 0:
        way.insert(0, parents[way[0]])
    return way


def read_list(tables: layout.PenaltyTables, slot: int) -> tuple[dict[int, int], int]:
    """Tokens of a slot's list with their counts, and its number of output tokens."""
    header = tables.headers[slot].tolist()
    counts = {}
    for entry in range(header[layout.NUM_ENTRIES]):
        page = int(tables.page_table[slot, entry // layout.PAGE])
        place = page * layout.PAGE + entry % layout.PAGE
        token = int(tables.tokens[place])
        assert token not in counts, f"token {token} is in the list twice"
        counts[token] = int(tables.metas[place]) & layout.COUNT_MASK
    return counts, header[layout.NUM_OUTPUT]
