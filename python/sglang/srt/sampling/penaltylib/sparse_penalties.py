"""Exact penalties that cost what a request has said, not what the vocabulary could say.

For a request with output tokens ``o_1 .. o_n``, of which ``c(t)`` are t, a row of logits x becomes, in
this order and in float32, whatever type the logits have:

1. ``x(t) -= frequency_penalty * c(t) + presence_penalty`` where ``c(t) > 0``
2. ``x(t) = x(t) * repetition_penalty if x(t) < 0 else x(t) / repetition_penalty`` where ``c(t) > 0``
3. ``x(t) += logit_bias(t)``
4. ``x(t) = -inf`` for stop tokens while ``n < min_new_tokens``

The prompt is not counted. At a node of a draft tree, c and n count the node and its ancestors too,
without the root, which is the last committed token and counted already.

Only tokens that were seen, biased or may stop can change, so a request is a list of these
(`sparse_layout` has its picture), found by the request's slot. Two classes share the work:

- `PenaltyPlanner`, on the scheduler's thread, knows what is asked and bounds what may be written. For
  each forward it makes one `PenaltyStep`, in at most one asynchronous copy, and touches no other tensor.
- `PenaltyState` owns the tensors. It is used on the forward stream alone, in the order in which the
  steps were planned, so that nothing here can race::

    scheduler thread                         forward stream
    plan(A in slot 3, page 8)  -- step 1 ->  begin 1  apply  sample  commit: A writes page 8
    plan(A again)              -- step 2 ->  begin 2  apply  sample  commit: A writes page 8
    A has ended at step 1:                      :
    release(3), admit(B in 3)                   :
    plan(B, page 8 again)      -- step 3 ->  begin 3: B's header, pages and entries   apply ...

  Step 2 still has A, who is gone, and may write what was A's: it was planned, and so runs, before
  the step that gives slot and page to B. What B's step finds of A it overwrites, or it lies behind the
  end of B's list. In `merge_batch` and `filter_batch` nothing moves but slot numbers.
"""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.sampling.penaltylib import sparse_layout as layout
from sglang.srt.sampling.penaltylib.sparse_layout import PAGE, PenaltyTables
from sglang.srt.sampling.penaltylib.sparse_ops import make_ops
from sglang.srt.sampling.penaltylib.sparse_planner import PenaltyPlanner
from sglang.srt.sampling.penaltylib.sparse_step import (
    PenaltyCapacityError,
    PenaltyPool,
    PenaltyRequest,
    PenaltyStep,
    PenaltyStepError,
    PenaltyUpdate,
    check_shape,
)

__all__ = [
    "PenaltyCapacityError",
    "PenaltyPlanner",
    "PenaltyPool",
    "PenaltyRequest",
    "PenaltyState",
    "PenaltyStep",
    "PenaltyStepError",
]

_LOGITS: Final = (torch.float32, torch.float16, torch.bfloat16)


class PenaltyState:
    """The penalties of all running requests, on the device.

    All methods run on the forward stream (on the CPU: on the thread that runs forwards), launch work
    and wait for nothing. They take None for a step without penalties and do nothing then. A forward
    calls `begin`, then, if it verifies drafts, `stage`, then `apply`, then `commit`.

    Parameters
    ----------
    pool : PenaltyPool
        The planner's.
    device : torch.device
    backend : {"auto", "torch", "triton", "numba"}
        Chosen if they are installed: Triton on a GPU, numba on the CPU; torch else.

    Attributes
    ----------
    tables : PenaltyTables
    """

    def __init__(self, pool: PenaltyPool, device: torch.device, backend: str = "auto") -> None:
        self.pool = pool
        self._num_begun = self._num_updates = 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_entries = pool.initial_pages * PAGE
        self.tables = PenaltyTables(
            vocab_size=pool.vocab_size,
            headers=zeros(pool.num_slots, layout.HEADER),
            page_table=zeros(pool.num_slots, pool.pages_per_slot),
            tokens=zeros(num_entries),
            metas=zeros(num_entries),
            biases=zeros(num_entries, dtype=torch.float32),
            draft_entries=zeros(pool.num_slots, max(pool.max_draft_tokens, 1)),
        )
        self._ops = make_ops(backend, self.tables)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, those of the backend included."""
        return self.tables.nbytes + self._ops.nbytes

    def begin(self, step: PenaltyStep | None, into: PenaltyStep | None = None) -> None:
        """Bring in what the step's forward finds changed: requests, pages of lists that grew, tokens.

        Parameters
        ----------
        step : PenaltyStep or None
            Of this forward.
        into : PenaltyStep, optional
            From `static_step`; gets the rows of `step`. Then the forward uses this one.

        Raises
        ------
        PenaltyStepError
            If the step, or one behind it, was begun before, or one that changes something was left out.
        ValueError
            If `into` has too few rows, or was made for other trees.
        """
        if into is not None:
            self._fill(into, step)
        if step is None:
            return
        if step.number <= self._num_begun:
            raise PenaltyStepError(
                f"step {step.number} of the penalties is begun behind step {self._num_begun}"
            )
        if step.update is not None:
            self._update(step.update)
        self._num_begun = step.number
        if step.fed_tokens is not None:
            self._ops.ingest(self.tables, step, step.fed_tokens.unsqueeze(1), None, commit=True)

    def _update(self, update: PenaltyUpdate) -> None:
        if update.number != self._num_updates + 1:
            raise PenaltyStepError(
                f"update {update.number} of the penalties follows number {self._num_updates}"
            )
        self._num_updates = update.number
        self._resize(update.num_pages)
        self._ops.update(self.tables, update)

    def commit(
        self, step: PenaltyStep | None, tokens: torch.Tensor, lens: torch.Tensor | None = None
    ) -> None:
        """Count tokens that have become output. What was staged is forgotten.

        Parameters
        ----------
        step : PenaltyStep or None
        tokens : Tensor, shape (B,) or (B, max_tokens), int64 or int32
            What the sampler or the verification has chosen.
        lens : Tensor, shape (B,), int64 or int32, optional
            How many tokens of each row count, from the first. All of them by default. Where the planner
            was told that a row commits nothing, nothing counts.

        Notes
        -----
        Does nothing for a step that was given its tokens, or commits nothing.
        """
        if step is None or step.fed_tokens is not None or not step.commits:
            return
        tokens = tokens.unsqueeze(1) if tokens.dim() == 1 else tokens
        check_shape(tokens, (step.batch_size, step.max_tokens), "tokens")
        if lens is not None:
            check_shape(lens, (step.batch_size,), "lens")
            lens = lens.contiguous()
        self._ops.ingest(self.tables, step, _with_unit_stride(tokens), lens, commit=True)

    def stage(self, step: PenaltyStep | None, draft_tokens: torch.Tensor) -> None:
        """Make room for the tokens of draft trees, until they are committed or staged again.

        Parameters
        ----------
        step : PenaltyStep or None
        draft_tokens : Tensor, shape (B, D), int64 or int32
            Tokens of the nodes, the root first.
        """
        if step is None:
            return
        check_shape(draft_tokens, (step.batch_size, step.num_draft_tokens), "draft_tokens")
        self._ops.ingest(self.tables, step, _with_unit_stride(draft_tokens), None, commit=False)

    def apply(
        self,
        step: PenaltyStep | None,
        logits: torch.Tensor,
        ancestors: torch.Tensor | None = None,
    ) -> None:
        """Penalize, bias and mask logits in place, in one pass over the tokens that matter.

        Parameters
        ----------
        step : PenaltyStep or None
        logits : Tensor, shape (B, V) or (B * D, V), float32, float16 or bfloat16
            Rows of the requests; with `ancestors` D rows for each, which lie together, a node each.
        ancestors : Tensor, shape (B, D, D), bool, optional
            Whether the node of the last axis is the node of the axis before or an ancestor of it
            (`DraftTree.ancestor_mask`). What it says of the root is not looked at.
        """
        if step is None:
            return
        num_nodes = 1
        if ancestors is not None:
            num_nodes = step.num_draft_tokens
            check_shape(ancestors, (step.batch_size, num_nodes, num_nodes), "ancestors")
            ancestors = ancestors.contiguous()
        check_shape(logits, (step.batch_size * num_nodes, self.pool.vocab_size), "logits")
        if logits.dtype not in _LOGITS:
            raise ValueError(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
        if logits.stride(1) != 1 or (len(logits) > 1 and logits.stride(0) < logits.shape[1]):
            raise ValueError(
                f"logits must have rows of their own, side by side, got strides {logits.stride()}"
            )
        self._ops.apply(self.tables, step, logits, ancestors)

    def ancestors_from_parents(self, parents: torch.Tensor) -> torch.Tensor:
        """Who is on whose way from the root, for `apply`.

        Parameters
        ----------
        parents : Tensor, shape (B, D), int64 or int32
            Node that each node continues, in any order; negative for roots.

        Returns
        -------
        Tensor, shape (B, D, D), bool
            As ``DraftTree.ancestor_mask``.
        """
        return self._ops.ancestors(parents.contiguous())

    def static_step(
        self, batch_size: int, max_tokens: int = 1, num_draft_tokens: int = 0
    ) -> PenaltyStep:
        """A step whose tensors stay where they are: what a CUDA graph is captured with.

        Before each replay, `begin` puts the rows of the forward's own step into it. Until then, and
        where that has fewer rows, it has rows of nobody, whose programs end at once.

        Raises
        ------
        ValueError
            If the trees are larger than the pool was made for.
        """
        if num_draft_tokens > self.pool.max_draft_tokens:
            raise ValueError(
                f"trees of {num_draft_tokens} nodes in a pool for {self.pool.max_draft_tokens}"
            )
        index = torch.full((4, batch_size), -1, dtype=torch.int32, device=self.tables.tokens.device)
        return PenaltyStep(
            batch_size=batch_size,
            num_rows=batch_size,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            index=index,
            total_pages=0,
            is_padded=True,
        )

    @staticmethod
    def _fill(static: PenaltyStep, step: PenaltyStep | None) -> None:
        static.index.fill_(-1)
        if step is not None:
            if step.num_rows > static.num_rows:
                raise ValueError(f"{step.num_rows} rows for a step of {static.num_rows}")
            shape = (step.max_tokens, step.num_draft_tokens)
            wanted = (static.max_tokens, static.num_draft_tokens)
            if shape != wanted:
                raise ValueError(f"a step of {shape} tokens and nodes for one of {wanted}")
            static.index[:, : step.num_rows].copy_(step.index)
            if step.fed_tokens is not None:
                # They are what this step commits, and `begin` has done it.
                static.index[layout.LIMIT].zero_()

    def _resize(self, num_pages: int) -> None:
        tables, size = self.tables, num_pages * PAGE
        if size <= len(tables.tokens):
            return
        # One after the other, so that little is there twice.
        for name in ("tokens", "metas", "biases"):
            old = getattr(tables, name)
            new = old.new_zeros(size)
            new[: len(old)] = old
            setattr(tables, name, new)


def _with_unit_stride(tokens: torch.Tensor) -> torch.Tensor:
    return tokens if tokens.stride(1) == 1 or tokens.shape[1] == 1 else tokens.contiguous()
