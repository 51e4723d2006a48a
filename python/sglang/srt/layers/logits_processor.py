"""From hidden states to logits, and the log-probabilities that requests ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from sglang.srt.utils.common import to_device_async, to_host_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_CHUNK_ELEMENTS = 1 << 25
"""Logits in a chunk of input logprobs: 128 MiB in float32, and as much again for their log-softmax."""


class SupportsLogits(Protocol):
    """The part of a model that the logits processor uses."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states: (rows, hidden_size) to (rows, vocab_size)."""


class LogprobRows(NamedTuple):
    """Logprobs of some tokens of one request, as Python numbers, one entry for each token.

    The four lists behind the first are None where the request did not ask for them.
    """

    token: list[float]
    top_val: list[list[float]] | None
    top_idx: list[list[int]] | None
    token_ids_val: list[list[float]] | None
    token_ids_idx: list[list[int]] | None


@dataclass(eq=False)
class TokenLogprobs:
    """Logprobs at ``N`` positions, on the device.

    Attributes
    ----------
    token : Tensor, shape (N,), float32
        Of one given token at each position.
    top_val, top_idx : Tensor, shape (N, K), float32 and int64, or None
        Of the K most likely tokens, most likely first. K is the most that any request asked for.
    token_ids_val : Tensor, shape (N, M), float32, or None
        Of the tokens that the position's request named, padded to the longest list.
    """

    token: torch.Tensor
    top_val: torch.Tensor | None = None
    top_idx: torch.Tensor | None = None
    token_ids_val: torch.Tensor | None = None

    @classmethod
    def cat(cls, parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Join positions."""
        if len(parts) == 1:
            return parts[0]
        names = ("token", "top_val", "top_idx", "token_ids_val")
        columns = ([getattr(part, name) for part in parts] for name in names)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))


def compute_token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    top_logprobs_nums: Sequence[int],
    token_ids_logprobs: Sequence[Sequence[int] | None],
    row_counts: Sequence[int] | None = None,
    temperatures: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Logprobs of given tokens, the most likely tokens and named tokens, without waiting for the device.

    Parameters
    ----------
    logits : Tensor, shape (N, vocab_size)
        Rows of one request lie together.
    token_ids : Tensor, shape (N,), int64
        The token whose logprob is asked for in each row.
    top_logprobs_nums : sequence of int, length B
        How many of the most likely tokens each request wants.
    token_ids_logprobs : sequence of (sequence of int, or None), length B
        The tokens that each request names.
    row_counts : sequence of int, length B, optional
        How many rows each request has; 1 without. They add up to ``N``.
    temperatures : Tensor, shape (N, 1), float32, optional
        Logits are divided by these first.

    Returns
    -------
    TokenLogprobs
        In float32. Values are at least the smallest float32, never minus infinity.
    """
    spec = _LogprobSpec.make(top_logprobs_nums, token_ids_logprobs, logits)
    if row_counts is None:
        row_counts = [1] * len(top_logprobs_nums)
    logits = logits.float()
    if temperatures is not None:
        # The maximum goes first, so that a huge logit over a small temperature is no infinity.
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    return spec.read(torch.log_softmax(logits, dim=-1), token_ids, row_counts)


@dataclass(eq=False)
class _LogprobSpec:
    """What requests want to know, in the form in which tensors of logprobs are read."""

    top_k: int
    named_ids: torch.Tensor | None  # (B, M), padded with 0

    @classmethod
    def make(
        cls,
        top_logprobs_nums: Sequence[int],
        token_ids_logprobs: Sequence[Sequence[int] | None],
        like: torch.Tensor,
    ) -> _LogprobSpec:
        width = max((len(ids) for ids in token_ids_logprobs if ids is not None), default=0)
        named = None
        if width:
            padded = [[*(ids or ()), *[0] * (width - len(ids or ()))] for ids in token_ids_logprobs]
            named = to_device_async(padded, torch.int64, like.device)
        return cls(max(top_logprobs_nums, default=0), named)

    def read(
        self, logprobs: torch.Tensor, token_ids: torch.Tensor, row_counts: Sequence[int]
    ) -> TokenLogprobs:
        lowest = torch.finfo(logprobs.dtype).min
        result = TokenLogprobs(logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).clamp_(lowest))
        if self.top_k:
            top = logprobs.topk(min(self.top_k, logprobs.shape[1]), dim=-1)
            result.top_val, result.top_idx = top.values.clamp_(lowest), top.indices
        if self.named_ids is not None:
            ids = _spread(self.named_ids, row_counts)
            result.token_ids_val = logprobs.gather(1, ids).clamp_(lowest)
        return result


def _spread(per_request: torch.Tensor, row_counts: Sequence[int]) -> torch.Tensor:
    """Repeat row b of a tensor ``row_counts[b]`` times."""
    if len(set(row_counts)) == 1:
        n = row_counts[0]
        return per_request if n == 1 else per_request.repeat_interleave(n, dim=0)
    rows = [b for b, n in enumerate(row_counts) for _ in range(n)]
    return per_request[to_device_async(rows, torch.int64, per_request.device)]


@dataclass(eq=False)
class LogitsProcessorOutput:
    """What a forward found out, for ``B`` requests.

    With speculation the ``next_token_*`` tensors have one more dimension behind the first: the ``R``
    tokens of the accepted path. Input positions are laid out as `LogitsProcessor` says.

    Attributes
    ----------
    next_token_logits : Tensor, shape (B, vocab_size), float32
        (B * R, vocab_size) for a draft tree. Gone after `copy_to_host`.
    hidden_states : Tensor, shape (B or T, hidden_size), or None
        As ``ForwardBatch.capture_hidden_mode`` asks. Gone after `copy_to_host` unless requests want it.
    next_token_logprobs : Tensor, shape (B,), float32, or None
        Of the sampled tokens.
    next_token_top_logprobs_val, next_token_top_logprobs_idx : Tensor, shape (B, K), or None
        Request b asked for the first ``top_logprobs_nums[b]`` columns.
    next_token_token_ids_logprobs_val : Tensor, shape (B, M), or None
        Request b asked for the first ``len(token_ids_logprobs[b])`` columns.
    input_token_logprobs : Tensor, shape (N,), float32, or None
        All requests' input positions in a row.
    input_top_logprobs_val, input_top_logprobs_idx : Tensor, shape (N, K), or None
    input_token_ids_logprobs_val : Tensor, shape (N, M), or None
    input_logprob_lens : list of int, length B
        Positions of each request in the four above; their sum is ``N``.
    top_logprobs_nums, token_ids_logprobs : list, length B
        What the requests asked for.
    return_hidden_states : bool
        Whether `hidden_states` is for requests and not only for the draft model.
    """

    next_token_logits: torch.Tensor | None
    hidden_states: torch.Tensor | None = None

    next_token_logprobs: torch.Tensor | None = None
    next_token_top_logprobs_val: torch.Tensor | None = None
    next_token_top_logprobs_idx: torch.Tensor | None = None
    next_token_token_ids_logprobs_val: torch.Tensor | None = None

    input_token_logprobs: torch.Tensor | None = None
    input_top_logprobs_val: torch.Tensor | None = None
    input_top_logprobs_idx: torch.Tensor | None = None
    input_token_ids_logprobs_val: torch.Tensor | None = None

    input_logprob_lens: list[int] = field(default_factory=list)
    top_logprobs_nums: list[int] = field(default_factory=list)
    token_ids_logprobs: list[list[int] | None] = field(default_factory=list)
    return_hidden_states: bool = False

    @property
    def next_token_token_ids_logprobs_idx(self) -> list[list[int] | None]:
        """The tokens that each request named. The host knows them; they have no tensor."""
        return self.token_ids_logprobs

    @property
    def input_token_ids_logprobs_idx(self) -> list[list[int] | None]:
        """The tokens that each request named, the same at all of its positions."""
        return self.token_ids_logprobs

    def set_next_token_logprobs(
        self,
        logprobs: TokenLogprobs,
        top_logprobs_nums: Sequence[int],
        token_ids_logprobs: Sequence[Sequence[int] | None],
        rows_per_request: int | None = None,
    ) -> None:
        """Keep the logprobs of sampled tokens.

        Parameters
        ----------
        logprobs : TokenLogprobs
            Of B positions, or of ``B * rows_per_request``.
        top_logprobs_nums, token_ids_logprobs : sequence, length B
            What the requests asked for.
        rows_per_request : int, optional
            Gives the tensors the dimension that speculation adds.
        """
        self.top_logprobs_nums = list(top_logprobs_nums)
        self.token_ids_logprobs = list(token_ids_logprobs)

        def shaped(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or rows_per_request is None:
                return tensor
            return tensor.view(-1, rows_per_request, *tensor.shape[1:])

        self.next_token_logprobs = shaped(logprobs.token)
        self.next_token_top_logprobs_val = shaped(logprobs.top_val)
        self.next_token_top_logprobs_idx = shaped(logprobs.top_idx)
        self.next_token_token_ids_logprobs_val = shaped(logprobs.token_ids_val)

    def set_input_logprobs(self, logprobs: TokenLogprobs, lens: Sequence[int]) -> None:
        """Keep the logprobs of ``sum(lens)`` input positions."""
        self.input_logprob_lens = list(lens)
        self.input_token_logprobs = logprobs.token
        self.input_top_logprobs_val = logprobs.top_val
        self.input_top_logprobs_idx = logprobs.top_idx
        self.input_token_ids_logprobs_val = logprobs.token_ids_val

    def copy_to_host(self) -> None:
        """Start copying what result processing reads, and let go of the rest.

        The values are there when the forward's handle says that it is done.
        """
        self.next_token_logits = None
        if not self.return_hidden_states:
            self.hidden_states = None
        for name in _HOST_TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, to_host_async(tensor))

    def output_logprobs(self, i: int, num_tokens: int = 1) -> LogprobRows:
        """Logprobs of the first `num_tokens` new tokens of request `i`, after the copy is done."""
        return self._rows(
            i,
            slice(0, num_tokens),
            *(
                None if t is None else t[i] if t.dim() > dim else t[i : i + 1]
                for t, dim in (
                    (self.next_token_logprobs, 1),
                    (self.next_token_top_logprobs_val, 2),
                    (self.next_token_top_logprobs_idx, 2),
                    (self.next_token_token_ids_logprobs_val, 2),
                )
            ),
        )

    def input_logprobs(self, i: int) -> LogprobRows:
        """Logprobs at the input positions of request `i` in this forward, after the copy is done."""
        start = sum(self.input_logprob_lens[:i])
        return self._rows(
            i,
            slice(start, start + self.input_logprob_lens[i]),
            self.input_token_logprobs,
            self.input_top_logprobs_val,
            self.input_top_logprobs_idx,
            self.input_token_ids_logprobs_val,
        )

    def _rows(
        self,
        i: int,
        rows: slice,
        token: torch.Tensor | None,
        top_val: torch.Tensor | None,
        top_idx: torch.Tensor | None,
        token_ids_val: torch.Tensor | None,
    ) -> LogprobRows:
        k, ids = self.top_logprobs_nums[i], self.token_ids_logprobs[i]
        values = [] if token is None else token[rows].tolist()
        has_top, has_ids = k > 0, ids is not None
        return LogprobRows(
            token=values,
            top_val=_columns(top_val, rows, k) if has_top else None,
            top_idx=_columns(top_idx, rows, k) if has_top else None,
            token_ids_val=_columns(token_ids_val, rows, len(ids), len(values)) if has_ids else None,
            token_ids_idx=[list(ids)] * len(values) if has_ids else None,
        )


_HOST_TENSORS = (
    "hidden_states",
    "next_token_logprobs",
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "input_token_logprobs",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "input_token_ids_logprobs_val",
)


def _columns(tensor: torch.Tensor | None, rows: slice, k: int, num_rows: int = 0) -> list[list]:
    if tensor is None:  # nobody named a token, but somebody passed an empty list
        return [[] for _ in range(num_rows)]
    return tensor[rows, :k].tolist()


class LogitsProcessor:
    """Computes logits for the rows that need them and for no others.

    In ragged modes (EXTEND, MIXED) logits exist for the last new token of each request, from which the
    next token is sampled; in all other modes for every token, or for those that the batch names.

    **Input logprobs.** Let request b bring ``n`` new tokens behind ``p`` cached ones (this chunk is
    prompt positions p to p + n - 1), and let ``s = extend_logprob_start_lens_cpu[b]``, relative to the
    chunk, 0 <= s <= n. The row of the token at chunk position i gives the logprob of the token at
    *prompt* position p + i + 1. Request b gets ``n - s`` entries, from rows i = s to n - 1, so the last
    one is about the token *behind* the chunk. s = n means none.

    ``extend_input_logprob_token_ids`` must hold exactly these tokens, ``prompt[p + s + 1 : p + n + 1]``
    for each request, with one 0 (or any token id) at the end where the prompt ends with this chunk and
    so has no token there: ``n - s`` ids for each request, all requests in a row.

    With ``logprob_start_len`` absolute, ``s = min(max(logprob_start_len, p) - p, n)``. Then the entries
    of all chunks, joined, are about prompt positions logprob_start_len + 1 to len(prompt), the last of
    which is the filler. Drop it, and put None before the first for the token at logprob_start_len, and
    there is one entry for each of ``prompt[logprob_start_len:]``, as upstream returns them. The 0 entry
    may also be dropped before it is read: it is the last of the chunk that ends the prompt.

    Example: prompt [10 11 12 13 14], logprob_start_len 1, chunks of 2::

        chunk      p  n  s  ids to pass   entries are about positions
        [10 11]    0  2  1  [12]          2
        [12 13]    2  2  0  [13 14]       3 4
        [14]       4  1  0  [0]           (5: filler)

        joined   (2, 3, 4, filler)  ->  returned  (None, 2, 3, 4)  for tokens  (11, 12, 13, 14)

    Requests that decode in a MIXED batch, and requests that want no input logprobs, have ``s = n``.

    Input logprobs are the log-softmax in float32 of the model's logits: no temperature, no penalties,
    no bias. They are computed in chunks of rows, so that a long prompt times a large vocabulary needs
    no more memory than twice `max_logits`.

    Parameters
    ----------
    max_logits : int
        Most logits in a chunk of input logprobs.
    """

    def __init__(self, max_logits: int = _CHUNK_ELEMENTS) -> None:
        self.max_logits = max_logits

    def forward(
        self, hidden_states: torch.Tensor, model: SupportsLogits, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Compute logits and input logprobs.

        Parameters
        ----------
        hidden_states : Tensor, shape (T, hidden_size)
            After the final norm.
        model : object with ``compute_logits``
        forward_batch : ForwardBatch
            Where its mode is ragged, the host lengths are read. Nothing waits for the device.

        Returns
        -------
        LogitsProcessorOutput
            Logits are float32 and belong to the caller, who may write them in place.
        """
        is_ragged = forward_batch.forward_mode.is_extend()
        last = _scored_tokens(hidden_states, forward_batch)
        logits = model.compute_logits(last).float()
        output = LogitsProcessorOutput(
            next_token_logits=logits,
            hidden_states=_captured(hidden_states, last, forward_batch),
            return_hidden_states=forward_batch.return_hidden_states,
        )
        if forward_batch.return_logprob:
            output.top_logprobs_nums = list(forward_batch.top_logprobs_nums)
            output.token_ids_logprobs = list(forward_batch.token_ids_logprobs)
            output.input_logprob_lens = [0] * forward_batch.batch_size
            if is_ragged:
                self._add_input_logprobs(output, hidden_states, model, forward_batch)
        return output

    __call__ = forward

    def _add_input_logprobs(
        self,
        output: LogitsProcessorOutput,
        hidden_states: torch.Tensor,
        model: SupportsLogits,
        forward_batch: ForwardBatch,
    ) -> None:
        lens, spans = _input_logprob_spans(forward_batch)
        if not spans:
            return
        token_ids = forward_batch.extend_input_logprob_token_ids
        if token_ids is None or token_ids.shape != (sum(lens),):
            shape = None if token_ids is None else tuple(token_ids.shape)
            raise ValueError(
                f"extend_input_logprob_token_ids must have shape ({sum(lens)},), got {shape}"
            )
        # Nobody who has no input position decides how wide the results are.
        wanted = [n > 0 for n in lens]
        spec = _LogprobSpec.make(
            [k if w else 0 for k, w in zip(output.top_logprobs_nums, wanted, strict=True)],
            [ids if w else None for ids, w in zip(output.token_ids_logprobs, wanted, strict=True)],
            hidden_states,
        )
        pieces = [hidden_states[begin:end] for begin, end in spans]
        rows = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        rows_at_once = max(1, self.max_logits // output.next_token_logits.shape[-1])
        parts = []
        for start, stop, counts in _row_chunks(lens, rows_at_once):
            logprobs = torch.log_softmax(model.compute_logits(rows[start:stop]).float(), dim=-1)
            parts.append(spec.read(logprobs, token_ids[start:stop], counts))
        output.set_input_logprobs(TokenLogprobs.cat(parts), lens)


def _scored_tokens(hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
    if forward_batch.forward_mode.is_extend():
        return _last_tokens(hidden_states, forward_batch)
    rows = forward_batch.logits_rows
    return hidden_states if rows is None else hidden_states.index_select(0, rows)


def _last_tokens(hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
    lens = forward_batch.extend_seq_lens_cpu
    if len(lens) == 1:
        return hidden_states[lens[0] - 1 : lens[0]]
    ends, end = [], 0
    for n in lens:
        end += n
        ends.append(end - 1)
    return hidden_states[to_device_async(ends, torch.int64, hidden_states.device)]


def _captured(
    hidden_states: torch.Tensor, last: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor | None:
    mode = forward_batch.capture_hidden_mode
    if not mode.need_capture():
        return None
    return hidden_states if mode.is_full() else last


def _input_logprob_spans(forward_batch: ForwardBatch) -> tuple[list[int], list[tuple[int, int]]]:
    """How many input positions each request has, and which token rows they are, empty ones left out."""
    lens, spans, begin = [], [], 0
    for n, s in zip(
        forward_batch.extend_seq_lens_cpu, forward_batch.extend_logprob_start_lens_cpu, strict=True
    ):
        if not 0 <= s <= n:
            raise ValueError(f"extend_logprob_start_lens_cpu must be in [0, {n}], got {s}")
        lens.append(n - s)
        if s < n:
            spans.append((begin + s, begin + n))
        begin += n
    return lens, spans


def _row_chunks(lens: list[int], rows_at_once: int) -> Iterator[tuple[int, int, list[int]]]:
    """Cut ``sum(lens)`` rows into chunks: first row, end, and how many of each request are in it."""
    total = sum(lens)
    for start in range(0, total, rows_at_once):
        stop = min(start + rows_at_once, total)
        counts, begin = [], 0
        for n in lens:
            counts.append(max(0, min(begin + n, stop) - max(begin, start)))
            begin += n
        yield start, stop, counts
