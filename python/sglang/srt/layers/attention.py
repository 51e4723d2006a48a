"""Attention over the KV pool, in plain PyTorch.

Prompts of a ragged forward are attended one by one. Everything else is a batch of requests that bring
the same few tokens each; they are padded to one length and attended at once. Query heads that share a
KV head are laid beside its query tokens, so keys and values are never repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


# On a CPU, requests are attended in pieces of about this many bytes of keys and values, which stay in
# the cache between gathering and use. Shorter requests of a piece are padded to its longest.
_PIECE_BYTES = 6 << 20


@dataclass
class AttentionSegment:
    """Neighbouring requests of a forward that are attended together.

    Attributes
    ----------
    start, end : int
        Their tokens are rows ``start .. end`` of the forward.
    batch_size, length : int
        Number of requests, ``B``, and of KV slots that each of them is given, ``L``.
    rows : Tensor, shape (2 * B * num_kv_heads * L,), int64
        Where the pool finds keys and values, see `MHATokenToKVPool.gather_rows`.
    mask : Tensor or None
        What is added to the scores: 0 where visible, the least number elsewhere. Of shape (n, L) for a
        prompt's n tokens, None if they are its first ones and so plainly causal. Otherwise of shape
        (B * num_kv_heads, group * tokens, L), or with 1 in the middle if a request brings one token.
    kv : Tensor, shape (2 * B * num_kv_heads * L, head_dim)
        Where layer after layer gathers keys and values.
    is_prompt : bool
        Whether it is one request with many tokens, or many with few.
    """

    start: int
    end: int
    batch_size: int
    length: int
    rows: torch.Tensor
    mask: torch.Tensor | None
    kv: torch.Tensor
    is_prompt: bool


class TorchAttentionBackend:
    """Attention on gathered keys and values.

    Parameters
    ----------
    token_to_kv_pool : MHATokenToKVPool
        Where keys and values are kept.
    num_heads, num_kv_heads, head_dim : int
        Query heads, KV heads, and their width.
    device : torch.device
        Where the pool lives.
    """

    def __init__(
        self,
        token_to_kv_pool: MHATokenToKVPool,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        self.token_to_kv_pool = token_to_kv_pool
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.device = device
        self.scale = 1.0 / math.sqrt(head_dim)
        self._dtype = token_to_kv_pool.dtype
        self._hidden = torch.finfo(self._dtype).min
        slot_bytes = 2 * num_kv_heads * head_dim * self._dtype.itemsize
        self._piece_slots = _PIECE_BYTES // slot_bytes if device.type == "cpu" else None
        # Gathered keys and values of one layer. Forwards run one after the other, so all of them, and
        # all their layers, share it; fresh memory of this size would cost a page fault every 4 KB.
        self._scratch = torch.empty((0, head_dim), dtype=self._dtype, device=device)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Make the index tensors and masks that all layers of a forward share.

        They go to ``forward_batch.attn_metadata``. Call it once, before the first layer, on the
        stream of the forward.
        """
        batch = forward_batch
        if batch.forward_mode.is_extend():
            batch.attn_metadata = self._ragged_segments(batch)
        else:
            # The host knows how long sequences are, unless speculation is under way.
            exact = batch.forward_mode.is_decode() and batch.custom_mask is None
            batch.attn_metadata = self._batch_segments(
                batch.positions,
                batch.kv_indices,
                0,
                batch.seq_lens_cpu if exact else None,
                batch.custom_mask,
            )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Keep this forward's keys and values, then attend.

        Parameters
        ----------
        q : Tensor, shape (T, num_heads, head_dim)
            Queries.
        k, v : Tensor, shape (T, num_kv_heads, head_dim)
            Keys and values, written to ``forward_batch.out_cache_loc``.
        layer_id : int
            Which layer's buffers to use.
        forward_batch : ForwardBatch
            What `init_forward_metadata` was called with.

        Returns
        -------
        Tensor, shape (T, num_heads * head_dim)
        """
        self.token_to_kv_pool.set_kv_buffer(layer_id, forward_batch.out_cache_loc, k, v)
        outs = []
        for segment in forward_batch.attn_metadata:
            kv = self.token_to_kv_pool.gather_kv(layer_id, segment.rows, segment.kv)
            shape = (2, segment.batch_size * self.num_kv_heads, segment.length, self.head_dim)
            keys, values = kv.view(shape).unbind(0)
            attend = self._attend_prompt if segment.is_prompt else self._attend_batch
            outs.append(attend(q[segment.start : segment.end], keys, values, segment))
        if not outs:
            return q.new_empty((0, self.num_heads * self.head_dim))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_prompt(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: AttentionSegment
    ) -> torch.Tensor:
        """One request's queries, (n, num_heads, D), on its keys and values, (num_kv_heads, L, D)."""
        q = q.unflatten(1, (self.num_kv_heads, self.group)).permute(1, 2, 0, 3)
        k, v = (x[:, None].expand(-1, self.group, -1, -1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=segment.mask, is_causal=segment.mask is None
        )
        return out.permute(2, 0, 1, 3).reshape(-1, self.num_heads * self.head_dim)

    def _attend_batch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: AttentionSegment
    ) -> torch.Tensor:
        """A few queries of each request, (T, num_heads, D), on (B * num_kv_heads, L, D)."""
        batch_size, tokens = segment.batch_size, q.shape[0] // segment.batch_size
        # To (B * num_kv_heads, group * tokens, D). For one token a request this is but a view.
        q = q.reshape(batch_size, tokens, self.num_kv_heads, self.group, self.head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(k.shape[0], self.group * tokens, self.head_dim)
        if self._dtype == torch.float32:
            # For so few queries three plain products beat the fused kernel on a CPU by half.
            scores = torch.baddbmm(segment.mask, q, k.transpose(1, 2), alpha=self.scale)
            out = torch.bmm(torch.softmax(scores, dim=-1), v)
        else:
            # The fused kernel keeps scores in float32.
            mask = segment.mask[:, None]
            out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)
        out = out.view(batch_size, self.num_kv_heads, self.group, tokens, self.head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, self.num_heads * self.head_dim)

    def _ragged_segments(self, forward_batch: ForwardBatch) -> list[AttentionSegment]:
        lens = forward_batch.extend_seq_lens_cpu
        prefixes = forward_batch.extend_prefix_lens_cpu
        segments = []
        start = first = 0
        while first < len(lens):
            # Neighbours that bring one token each, such as the running requests of a mixed batch, go
            # together.
            last = first + 1
            while lens[first] == 1 and last < len(lens) and lens[last] == 1:
                last += 1
            end = start + sum(lens[first:last])
            positions = forward_batch.positions[start:end]
            kv_indices = forward_batch.kv_indices[first:last]
            totals = [p + n for p, n in zip(prefixes[first:last], lens[first:last])]
            if lens[first] == 1:
                segments += self._batch_segments(positions, kv_indices, start, totals)
            else:
                kv_indices = kv_indices[:, : totals[0]]
                is_first = prefixes[first] == 0
                segments.append(self._prompt_segment(positions, kv_indices, start, is_first))
            start, first = end, last
        return segments

    def _prompt_segment(
        self, positions: torch.Tensor, kv_indices: torch.Tensor, start: int, is_first: bool
    ) -> AttentionSegment:
        mask = None
        if not is_first:
            slots = torch.arange(kv_indices.shape[1], device=positions.device)
            mask = self._additive(slots <= positions[:, None])
        return self._segment(positions, kv_indices, start, mask, is_prompt=True)

    def _batch_segments(
        self,
        positions: torch.Tensor,
        kv_indices: torch.Tensor,
        start: int,
        seq_lens: list[int] | None,
        visible: torch.Tensor | None = None,
    ) -> list[AttentionSegment]:
        """Requests with the same number of tokens each, in pieces, cut to `seq_lens` where known."""
        batch_size, length = kv_indices.shape
        if batch_size == 0:
            return []
        tokens = positions.shape[0] // batch_size
        step = batch_size
        if self._piece_slots is not None:
            step = max(1, self._piece_slots // length)
        segments = []
        for a in range(0, batch_size, step):
            b = min(a + step, batch_size)
            cut = length if seq_lens is None else min(length, max(seq_lens[a:b]))
            segments.append(
                self._batch_segment(
                    positions[a * tokens : b * tokens],
                    kv_indices[a:b, :cut],
                    start + a * tokens,
                    None if visible is None else visible[a:b],
                )
            )
        return segments

    def _batch_segment(
        self,
        positions: torch.Tensor,
        kv_indices: torch.Tensor,
        start: int,
        visible: torch.Tensor | None,
    ) -> AttentionSegment:
        batch_size, length = kv_indices.shape
        tokens = positions.shape[0] // batch_size
        if visible is None:
            last_visible = positions.view(batch_size, tokens, 1)
            visible = torch.arange(length, device=positions.device) <= last_visible
        # What no query sees may be another request's, and broken: a NaN is not hidden by a mask. So a
        # request's own first token stands there.
        kv_indices = torch.where(visible.any(dim=1), kv_indices, kv_indices[:, :1])
        mask = self._additive(visible)[:, None, None]
        copies = self.group if tokens > 1 else 1
        mask = mask.expand(-1, self.num_kv_heads, copies, -1, -1)
        mask = mask.reshape(batch_size * self.num_kv_heads, copies * tokens, length)
        return self._segment(positions, kv_indices, start, mask, is_prompt=False)

    def _segment(
        self,
        positions: torch.Tensor,
        kv_indices: torch.Tensor,
        start: int,
        mask: torch.Tensor | None,
        is_prompt: bool,
    ) -> AttentionSegment:
        rows = self.token_to_kv_pool.gather_rows(kv_indices)
        return AttentionSegment(
            start=start,
            end=start + positions.shape[0],
            batch_size=kv_indices.shape[0],
            length=kv_indices.shape[1],
            rows=rows,
            mask=mask,
            kv=self._kv_scratch(rows.shape[0]),
            is_prompt=is_prompt,
        )

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        # A finite number: a query that sees nothing must not become NaN, which would stay in the pool.
        hidden = torch.full((), self._hidden, dtype=self._dtype, device=visible.device)
        return torch.where(visible, torch.zeros_like(hidden), hidden)

    def _kv_scratch(self, rows: int) -> torch.Tensor:
        if rows > self._scratch.shape[0]:
            self._scratch = torch.empty(
                (rows + rows // 4, self.head_dim), dtype=self._dtype, device=self.device
            )
        return self._scratch[:rows]
