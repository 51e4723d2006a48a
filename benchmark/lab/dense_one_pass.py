"""Dense penalties done as well as dense ones can be: counts, and one pass over a row of logits.

A fair opponent for penalties that touch only what was seen. Upstream's penalizers each make a pass over
``[B, V]``; here a kernel reads a row's counts, biases and stop mask and its logits once and writes the
logits once. On the CPU it is a Numba kernel of one thread that lets go of the GIL, or plain torch where
Numba is not installed; on a GPU a Triton kernel. It is measured, and used by nothing.

In a draft tree the rows of a request share its counts. What the ancestors of a node add is put right
behind the pass for the few tokens that occur in the tree, from the logits as they were before it. The
Triton kernel compares with these tokens inside the pass instead, in the blocks where one falls.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lab.sharing import in_shares
from lab.upstream_penalties import Params

# Columns of the parameters.
FREQUENCY, PRESENCE, REPETITION = range(3)
BLOCK = 1024
SHARE = 1 << 19
"""Logits that are worth a thread: some 200 us."""

Kernel = Callable[..., None]


class DenseOnePass:
    """Penalties of ``B`` requests, dense.

    Parameters
    ----------
    requests : sequence of Params
    vocab_size : int
    device : torch.device
    backend : {"auto", "numba", "torch", "triton"}

    Attributes
    ----------
    backend : str
        What was chosen.
    counts : Tensor, shape (B, V), int32
    stops : Tensor, shape (B, V), bool
        Which tokens are masked while the output is short.
    biases : Tensor, shape (B, V), float32
    params : Tensor, shape (B, 3), float32
        Frequency, presence and repetition penalty.
    num_output, min_new : Tensor, shape (B,), int32
    """

    def __init__(
        self,
        requests: Sequence[Params],
        vocab_size: int,
        device: torch.device,
        backend: str = "auto",
    ) -> None:
        shape = (len(requests), vocab_size)
        self.backend = _choose(device) if backend == "auto" else backend
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.stops = torch.zeros(shape, dtype=torch.bool, device=device)
        self.biases = torch.zeros(shape, dtype=torch.float32, device=device)
        self.params = torch.tensor(
            [[r.frequency_penalty, r.presence_penalty, r.repetition_penalty] for r in requests],
            dtype=torch.float32,
            device=device,
        )
        self.num_output = torch.zeros(len(requests), dtype=torch.int32, device=device)
        self.min_new = torch.tensor(
            [r.min_new_tokens for r in requests], dtype=torch.int32, device=device
        )
        for row, request in enumerate(requests):
            self.stops[row, sorted(request.stop_token_ids)] = True
        self._none = torch.empty((0, 0, 0), dtype=torch.bool, device=device)
        self._no_drafts = torch.empty((0, 0), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, torch.Tensor))

    def commit(self, tokens: torch.Tensor, lens: torch.Tensor | None = None) -> None:
        """Count tokens, shape (B,) or (B, K), int64, of which the first `lens` of each row count."""
        tokens = tokens.view(len(self.counts), -1)
        weights = torch.ones((), dtype=torch.int32, device=tokens.device).expand(tokens.shape)
        taken: torch.Tensor | int = tokens.shape[1]
        if lens is not None:
            order = torch.arange(tokens.shape[1], device=tokens.device)
            weights = (order < lens.unsqueeze(1)).to(torch.int32)
            taken = lens.to(torch.int32)
        self.counts.scatter_add_(1, tokens, weights)
        self.num_output += taken

    def apply(
        self,
        logits: torch.Tensor,
        draft_tokens: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
    ) -> None:
        """Penalize in place.

        Parameters
        ----------
        logits : Tensor, shape (B, V) or (B * D, V), float32, contiguous
        draft_tokens : Tensor, shape (B, D), int64, optional
            Tokens of the nodes of draft trees, the root first; all inside the vocabulary.
        ancestors : Tensor, shape (B, D, D), bool, optional
            Whether the node of the last axis is that of the axis before or an ancestor of it.
        """
        if draft_tokens is None or ancestors is None:
            draft_tokens, ancestors = self._no_drafts, self._none
        _KERNELS[self.backend](self, logits, draft_tokens, ancestors)


def _choose(device: torch.device) -> str:
    if device.type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else "torch"
    return "numba" if importlib.util.find_spec("numba") else "torch"


# --- torch ------------------------------------------------------------------------------------


def _with_torch(
    state: DenseOnePass, logits: torch.Tensor, drafts: torch.Tensor, ancestors: torch.Tensor
) -> None:
    size, vocab_size = state.counts.shape
    rows = logits.view(size, -1, vocab_size)
    num_output = state.num_output.unsqueeze(1)
    if drafts.numel() == 0:
        is_short = num_output < state.min_new.unsqueeze(1)
        _penalize(rows, state.counts.unsqueeze(1), state, is_short, None)
        return
    # Who is on a node's way, without the root, which is counted already.
    way = ancestors.clone()
    way[:, :, 0] = False
    num_output = num_output + way.sum(-1, dtype=torch.int32)
    is_short = num_output < state.min_new.unsqueeze(1)
    places = drafts.unsqueeze(1).expand(-1, rows.shape[1], -1)
    before = rows.gather(2, places)
    _penalize(rows, state.counts.unsqueeze(1), state, is_short, None)
    same = (drafts.unsqueeze(2) == drafts.unsqueeze(1)).unsqueeze(1)
    extra = (same & way.unsqueeze(2)).sum(-1, dtype=torch.int32)
    counts = state.counts.gather(1, drafts).unsqueeze(1) + extra
    _penalize(before, counts, state, is_short, drafts)
    rows.scatter_(2, places, before)


def _penalize(
    x: torch.Tensor,
    counts: torch.Tensor,
    state: DenseOnePass,
    is_short: torch.Tensor,
    tokens: torch.Tensor | None,
) -> None:
    """Penalize ``x``, shape (B, D, columns), in place; of all columns, or of those at `tokens`."""
    frequency, presence, repetition = (state.params[:, i, None, None] for i in range(3))
    scaled = x - (frequency * counts + presence)
    scaled = torch.where(scaled < 0, scaled * repetition, scaled / repetition)
    biases, stops = state.biases, state.stops
    if tokens is not None:
        biases, stops = biases.gather(1, tokens), stops.gather(1, tokens)
    x.copy_(torch.where(counts > 0, scaled, x)).add_(biases.unsqueeze(1))
    x.masked_fill_(stops.unsqueeze(1) & is_short.unsqueeze(2), float("-inf"))


# --- Numba ------------------------------------------------------------------------------------


@lru_cache
def _numba_kernel() -> Kernel:
    import numba

    inline = numba.njit(inline="always", error_model="numpy")

    @inline
    def penalized(x, count, bias, is_masked, frequency, presence, repetition):
        scaled = x - (frequency * numba.float32(count) + presence)
        scaled = scaled * repetition if scaled < 0 else scaled / repetition
        x = (scaled if count > 0 else x) + bias
        return np.float32(-np.inf) if is_masked else x

    # A division by zero must be a number, not an exception, or the loop is not vectorised.
    @numba.njit(
        "void(f4[:, :, ::1], i4[:, ::1], b1[:, ::1], f4[:, ::1], f4[:, ::1], i4[::1], i4[::1], "
        "i8[:, ::1], b1[:, :, ::1])",
        nogil=True,
        error_model="numpy",
        boundscheck=False,
    )
    def kernel(rows, counts, stops, biases, params, num_output, min_new, drafts, ancestors):
        num_nodes = drafts.shape[1]
        before = np.empty(max(num_nodes, 1), np.float32)
        for b in range(rows.shape[0]):
            frequency, presence, repetition = params[b, 0], params[b, 1], params[b, 2]
            count, stop, bias = counts[b], stops[b], biases[b]
            for d in range(rows.shape[1]):
                row = rows[b, d]
                length = num_output[b]
                for a in range(1, num_nodes):
                    length += ancestors[b, d, a]
                is_short = length < min_new[b]
                for a in range(num_nodes):
                    before[a] = row[drafts[b, a]]
                for j in range(len(row)):
                    row[j] = penalized(
                        row[j],
                        count[j],
                        bias[j],
                        is_short & stop[j],
                        frequency,
                        presence,
                        repetition,
                    )
                for a in range(1, num_nodes):
                    token = drafts[b, a]
                    total = count[token]
                    for other in range(1, num_nodes):
                        total += ancestors[b, d, other] and drafts[b, other] == token
                    row[token] = penalized(
                        before[a],
                        total,
                        bias[token],
                        is_short & stop[token],
                        frequency,
                        presence,
                        repetition,
                    )

    return kernel


def _with_numba(
    state: DenseOnePass, logits: torch.Tensor, drafts: torch.Tensor, ancestors: torch.Tensor
) -> None:
    rows = logits.view(len(state.counts), -1, state.counts.shape[1])
    tensors = (rows, state.counts, state.stops, state.biases, state.params, state.num_output)
    tensors += (state.min_new, drafts, ancestors)
    kernel, arrays = _numba_kernel(), [tensor.numpy() for tensor in tensors]

    def run(begin: int, end: int) -> None:
        kernel(*(array[begin:end] for array in arrays))

    num_shares = min(logits.numel() // SHARE, torch.get_num_threads())
    in_shares(run, len(rows), num_shares)


# --- Triton -----------------------------------------------------------------------------------


@lru_cache
def _triton_kernel() -> Any:
    # In a module of its own: Triton reads a kernel's source, and needs its globals at module level.
    from lab import dense_one_pass_triton

    return dense_one_pass_triton.kernel


def _with_triton(
    state: DenseOnePass, logits: torch.Tensor, drafts: torch.Tensor, ancestors: torch.Tensor
) -> None:
    size, vocab_size = state.counts.shape
    num_nodes = logits.shape[0] // size
    _triton_kernel()[(-(-vocab_size // BLOCK), size)](
        logits,
        state.counts,
        state.stops.view(torch.int8),
        state.biases,
        state.params,
        state.num_output,
        state.min_new,
        drafts,
        ancestors.view(torch.uint8),
        vocab_size,
        NODES=num_nodes,
        IS_TREE=drafts.numel() > 0,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


_KERNELS: dict[str, Kernel] = {
    "numba": _with_numba,
    "torch": _with_torch,
    "triton": _with_triton,
}
