"""What one forward needs: tensors that no one writes to while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib.sparse_penalties import PenaltyStep
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpecInput


class ForwardMode(IntEnum):
    """What kind of work a batch is."""

    EXTEND = auto()
    """New tokens of a prompt behind a cached prefix, ragged."""
    DECODE = auto()
    """One new token for each request."""
    MIXED = auto()
    """EXTEND for some requests and one new token for the others, ragged."""
    IDLE = auto()
    """Nothing."""
    TARGET_VERIFY = auto()
    """The target model scores a draft tree: the same number of tokens for each request."""
    DRAFT_EXTEND_V2 = auto()
    """The draft model takes in what was verified: the same number of tokens for each request."""

    def is_extend(self) -> bool:
        """Whether requests bring a ragged number of new tokens."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_mixed(self) -> bool:
        return self == ForwardMode.MIXED

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self == ForwardMode.DRAFT_EXTEND_V2


class CaptureHiddenMode(IntEnum):
    """Which hidden states the logits processor hands on."""

    NULL = auto()
    """None."""
    LAST = auto()
    """Those of the last token of each request."""
    FULL = auto()
    """Those of every token of the forward."""

    def need_capture(self) -> bool:
        return self != CaptureHiddenMode.NULL

    def is_full(self) -> bool:
        return self == CaptureHiddenMode.FULL


@dataclass
class ForwardBatch:
    """One forward's input.

    ``T`` is the number of tokens of the forward, ``B`` of requests, ``L`` an upper bound of the
    longest sequence that is known on the host without asking the device.

    Attributes
    ----------
    forward_mode : ForwardMode
        See there. Ragged modes use ``extend_*_cpu``; in all others ``T`` is ``B`` times the same number.
    batch_size : int
        ``B``.
    input_ids, positions, out_cache_loc : Tensor, shape (T,), int64
        Token ids, their absolute positions, and the KV slots that their keys and values go to.
    req_pool_indices : Tensor, shape (B,), int64
        Row of each request in `ReqToTokenPool`.
    seq_lens : Tensor, shape (B,), int64
        Length of each sequence, this forward's tokens included. For a draft tree only the committed
        prefix counts, and ``custom_mask`` says what else is visible.
    kv_indices : Tensor, shape (B, L), int64
        KV slot of each position, a copy of the requests' rows. Entries behind a sequence's end are
        arbitrary slots of the pool, which attention masks.
    seq_lens_cpu : list of int
        Upper bounds of ``seq_lens`` (exact without speculation).
    extend_seq_lens_cpu, extend_prefix_lens_cpu : list of int or None
        New tokens and cached tokens of each request, ragged modes only.
    custom_mask : Tensor, shape (B, T // B, L), bool, or None
        Visible positions of each query token. None means causal by position. Not used in ragged modes.
    logits_rows : Tensor, shape (R,), int64, or None
        Tokens of the forward whose logits are wanted, None for all of them. Not used in ragged modes.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    kv_indices: torch.Tensor
    seq_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    custom_mask: torch.Tensor | None = None
    logits_rows: torch.Tensor | None = None

    # Logprobs. Per request: how many top candidates, which tokens, and from which new token on.
    return_logprob: bool = False
    top_logprobs_nums: list[int] | None = None
    token_ids_logprobs: list[list[int] | None] | None = None
    extend_logprob_start_lens_cpu: list[int] | None = None
    # Tokens whose input logprobs are asked for, all requests in a row: token i's is read off the
    # logits of the token before it. Shape (number of pruned input positions,), int64.
    extend_input_logprob_token_ids: torch.Tensor | None = None

    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    sampling_info: SamplingBatchInfo | None = None
    # Sparse penalties of this forward; None without any, and with dense ones.
    penalty_step: PenaltyStep | None = None
    is_prefill_only: bool = False

    return_hidden_states: bool = False

    # Speculation. What the batch carries between steps; features of the target beside `input_ids`,
    # shape (T, hidden_size), for draft models; and for a chunk that does not end its prompt the prompt
    # token behind it, -1 elsewhere, shape (B,).
    spec_info: SpecInput | None = None
    spec_hidden_states: torch.Tensor | None = None
    spec_next_token_ids: torch.Tensor | None = None

    # Filled by the attention backend, once per forward.
    attn_metadata: object | None = field(default=None, repr=False)
