"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.layers.logits_processor import compute_token_logprobs
from sglang.srt.utils.common import ceil_div

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_FILTER_ELEMENTS = 1 << 18
"""Weights that are filtered at once, so that a CPU's cache holds the temporaries, 32 bytes for each."""

_FILTER_PARTS = 8
"""Parts that a batch is filtered in at most, because every part launches kernels of its own ..."""

_MAX_FILTER_ELEMENTS = 1 << 22
"""... unless parts would be larger than this, with 128 MiB of temporaries."""

_BLOCK = 256
"""Tokens in a block of the vocabulary, see `_pick`."""

_MAX_DIGIT_BITS = 15
"""Most bits of a weight that `_beyond` looks at together."""

_ZERO_KEY = 0x3F7FFFFF
"""The float32 before 1, read as an integer. Weights are 0, or at least 1."""


class Sampler:
    """Greedy and random choice of tokens.

    **The same token everywhere.** A row's token depends on its logits, its parameters, its seed and the
    position of the token, and on nothing else: not on the other rows, their number or their order, not
    on the device's way of adding up. Randomness is a hash of (seed, position), see `uniform`; a row's
    only sums are sums of integers that float64 holds exactly, see `_token_weights`.

    **Filters.** As in upstream, all of them look at the same softmax: of the tokens in order of
    probability, the lower id first among equals, ``top_k`` keeps that many, ``top_p`` those before
    which the probabilities add up to no more than it, and ``min_p`` those at least that likely relative
    to the first. What all three keep is sampled from, by inverting the cumulative distribution in order
    of token ids.
    """

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int] | None,
        token_ids_logprobs: list[list[int] | None] | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Choose one token for each row of ``logits_output.next_token_logits``.

        Penalties and bias are in the logits already (`SamplingBatchInfo.apply_logits_bias`); the logits
        are not changed. Rows with ``top_k == 1`` get the first of the largest logits.

        Parameters
        ----------
        logits_output : LogitsProcessorOutput
            Gets the logprobs: the log-softmax of the logits divided by the temperature, penalties and
            bias included, filters not. Greedy rows have temperature 1.
        sampling_info : SamplingBatchInfo
            One row for each row of the logits.
        return_logprob : bool
            Whether logprobs are computed.
        top_logprobs_nums, token_ids_logprobs : list, one entry for each row, or None
            See `compute_token_logprobs`. Read only for logprobs.
        positions : Tensor, shape (rows,), int64
            Absolute position that the chosen token will have in its sequence.

        Returns
        -------
        Tensor, shape (rows,), int64
        """
        logits = logits_output.next_token_logits
        next_token_ids = self.sample(logits, sampling_info, positions)
        if return_logprob:
            logprobs = compute_token_logprobs(
                logits,
                next_token_ids,
                top_logprobs_nums,
                token_ids_logprobs,
                temperatures=None if sampling_info.is_all_greedy else sampling_info.temperatures,
            )
            logits_output.set_next_token_logprobs(logprobs, top_logprobs_nums, token_ids_logprobs)
        return next_token_ids

    __call__ = forward

    def sample(
        self, logits: torch.Tensor, sampling_info: SamplingBatchInfo, positions: torch.Tensor
    ) -> torch.Tensor:
        """The tokens alone: (rows, vocab_size) to (rows,), int64."""
        if sampling_info.is_all_greedy:
            return torch.argmax(logits, dim=-1)
        weights = _token_weights(logits, sampling_info.temperatures)
        if sampling_info.need_filter:
            weights = _filter_rows(weights, sampling_info)
        sampled = _pick(weights, uniform(sampling_info.sampling_seed, positions))
        if not sampling_info.has_greedy:
            return sampled
        return torch.where(sampling_info.top_ks == 1, torch.argmax(logits, dim=-1), sampled)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) for each (seed, position), the same on every device.

    The output number ``position`` of SplitMix64 (Steele, Lea, Flood 2014, with Stafford's variant 13 of
    the finalizer), started at a hash of the seed, so that neighbouring seeds do not share a sequence.
    Integer products wrap around. Right shifts are made logical by masking, for lack of unsigned types.

    Parameters
    ----------
    seeds, positions : Tensor, shape (rows,), int64

    Returns
    -------
    Tensor, shape (rows,), float64
        Multiples of 2**-53.
    """
    state = _finalize(seeds + _GOLDEN_GAMMA)
    bits = _finalize(state + (positions + 1) * _GOLDEN_GAMMA)
    return _logical_shift(bits, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


_GOLDEN_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _logical_shift(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)


def _finalize(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def _weight_bits(vocab_size: int) -> int:
    """b, where the largest weight is 2**b and the sum of a row at most 2**52."""
    return 52 - (vocab_size - 1).bit_length()


def _token_weights(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Probabilities of each row, up to a factor, as integers.

    ``exp((x - max) / T)``, in float32, is rounded to a multiple of 2**-b. The weights are integers of
    at most 2**b, so float64 adds them up exactly, in any order: a sum does not depend on how a device,
    or a batch of another size, splits it. No token of weight 0 can be chosen, and no mass is lost.

    At V = 152,064 this changes the distribution by 4e-8 to 1e-6 in total variation (3e-6 at worst, with
    all tokens but one just below the last bit), where float32 rounding of ``exp`` alone makes 2e-8 to
    4e-8. A cumulative sum in float32 is off by 7e-4 in the same measure and swallows up to 48,000
    tokens.

    Parameters
    ----------
    logits : Tensor, shape (rows, vocab_size), float32
    temperatures : Tensor, shape (rows, 1), float32

    Returns
    -------
    Tensor, shape (rows, vocab_size), float32
        The largest of each row is exactly 2**b.
    """
    # The maximum goes first: a huge logit over a small temperature would be an infinity.
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures).exp_()
    return weights.mul_(2.0 ** _weight_bits(logits.shape[-1])).round_()


def _pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution at `u`, in order of token ids.

    First among sums of blocks, then inside one block, so that no running sum of the whole vocabulary is
    made. All sums are exact, so this finds what a running sum would.

    Parameters
    ----------
    weights : Tensor, shape (rows, vocab_size), float32
        As `_token_weights` makes them. Should a row have no weight or NaN, which only broken logits
        bring about, some token of the vocabulary comes out.
    u : Tensor, shape (rows,), float64
        In [0, 1).

    Returns
    -------
    Tensor, shape (rows,), int64
    """
    vocab_size = weights.shape[-1]
    if vocab_size % _BLOCK:
        weights = F.pad(weights, (0, -vocab_size % _BLOCK))
    blocks = weights.view(len(weights), -1, _BLOCK)
    block_ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum_(dim=-1)
    # Below the total: u is at most 1 - 2**-53, and so its product with an integer up to 2**52 rounds to
    # less than the integer.
    target = (u.unsqueeze(1) * block_ends[:, -1:]).floor_()
    block = (block_ends <= target).sum(dim=-1, keepdim=True).clamp_(max=block_ends.shape[1] - 1)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, _BLOCK)).squeeze(1).double()
    ends = inside.cumsum(dim=-1)
    start = block_ends.gather(1, block) - ends[:, -1:]
    offset = (start + ends <= target).sum(dim=-1, keepdim=True)
    return (block * _BLOCK + offset).squeeze(1).clamp_(max=vocab_size - 1)


def _filter_rows(weights: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Set `weights` to 0 in place where filters drop tokens, in the rows that have filters."""
    rows = info.filtered_rows
    params = (info.top_ks, info.top_ps, info.min_ps)
    if rows is None:
        filtered = weights
    else:
        filtered, params = weights[rows], tuple(param[rows] for param in params)
    at_once = _rows_at_once(*filtered.shape)
    for start in range(0, len(filtered), at_once):
        part = slice(start, start + at_once)
        _filter(filtered[part], *(param[part] for param in params), info)
    return weights if rows is None else weights.index_copy_(0, rows, filtered)


def _rows_at_once(num_rows: int, vocab_size: int) -> int:
    """How many rows to filter together; changes no token."""
    few_parts = min(ceil_div(num_rows, _FILTER_PARTS), _MAX_FILTER_ELEMENTS // vocab_size)
    return max(1, few_parts, _FILTER_ELEMENTS // vocab_size)


def _filter(
    weights: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    info: SamplingBatchInfo,
) -> torch.Tensor:
    """Set `weights` to 0 in place where top-k, top-p or min-p drop a token.

    Each of the three keeps a prefix of the same order, so it does not matter which one comes first.
    """
    limits = []
    if info.need_top_p_sampling:
        masses = weights.double()
        limits.append(_Limit(masses, (top_ps * masses.sum(dim=-1)).unsqueeze(1), by_weight=True))
    if info.need_top_k_sampling:
        ones = weights.new_ones((), dtype=torch.float64).expand_as(weights)
        limits.append(_Limit(ones, top_ks.double().unsqueeze(1) - 1, by_weight=False))
    if limits:
        weights.masked_fill_(_beyond(weights, limits), 0.0)
    if info.need_min_p_sampling:
        lowest = min_ps * 2.0 ** _weight_bits(weights.shape[-1])
        weights.masked_fill_(weights < lowest.unsqueeze(1), 0.0)
    return weights


@dataclass(eq=False)
class _Limit:
    """A limit on how far down the order by weight tokens are kept.

    Attributes
    ----------
    takes : Tensor, shape (rows, vocab_size), float64
        What each token uses up: its weight, or 1.
    left : Tensor, shape (rows, 1), float64
        A token is kept if the tokens before it have used up no more than this.
    by_weight : bool
        Whether `takes` is the weight.
    """

    takes: torch.Tensor
    left: torch.Tensor
    by_weight: bool


def _beyond(weights: torch.Tensor, limits: list[_Limit]) -> torch.Tensor:
    """Which tokens are beyond a limit if they come by weight, lower ids first among equals.

    This does not sort the vocabulary, which takes many times as long, but looks for the weight at which
    the limits are used up. Bits of positive float32 numbers are in the order of the numbers, so this
    weight is found digit by digit: a histogram over the uppermost bits tells in which bin it lies, one
    over the next bits of what is in that bin, in which part of the bin, and so on. All sums are exact.

    Parameters
    ----------
    weights : Tensor, shape (rows, vocab_size), float32
        As `_token_weights` makes them.
    limits : list of _Limit
        At least one. Used up by the call.

    Returns
    -------
    Tensor, shape (rows, vocab_size), bool
    """
    # Weights of 0 get key 0, those of 1 key 1. The clamp also keeps NaN from indexing outside.
    top_key = (_weight_bits(weights.shape[-1]) << 23) + 1
    keys = weights.view(torch.int32).long().sub_(_ZERO_KEY).clamp_(0, top_key)
    key_bits = top_key.bit_length()
    digit_bits = _digit_bits(key_bits, weights.shape[-1])
    *lower_shifts, shift = range(0, key_bits, digit_bits)
    bins = keys >> shift
    cut = _find_cut(bins, (top_key >> shift) + 1, limits)
    for shift in reversed(lower_shifts):
        # Inside the bin now. Tokens outside take nothing, wherever their lower bits put them.
        is_inside = torch.bitwise_right_shift(keys, shift + digit_bits, out=bins) == cut
        for limit in limits:
            limit.takes = limit.takes.mul_(is_inside) if limit.by_weight else is_inside.double()
        torch.bitwise_right_shift(keys, shift, out=bins).bitwise_and_((1 << digit_bits) - 1)
        cut = (cut << digit_bits) | _find_cut(bins, 1 << digit_bits, limits)

    # Of those that weigh the same at the cut, as many are kept as every limit has room for.
    cut_weight = (cut + _ZERO_KEY).int().view(torch.float32)
    room = torch.full_like(cut, weights.shape[-1], dtype=torch.float64)
    for limit in limits:
        fitting = limit.left / cut_weight if limit.by_weight else limit.left
        room = torch.minimum(room, fitting.floor() + 1)
    is_equal = keys == cut
    rank = torch.cumsum(is_equal, dim=-1, out=bins)
    return is_equal.logical_and_(rank > room.long()).logical_or_(keys < cut)


def _digit_bits(key_bits: int, vocab_size: int) -> int:
    """Bits of a digit: few digits, and not many more bins than a row has tokens."""
    most = min(max(vocab_size.bit_length(), 4), _MAX_DIGIT_BITS)
    return ceil_div(key_bits, ceil_div(key_bits, most))


def _find_cut(bins: torch.Tensor, num_bins: int, limits: list[_Limit]) -> torch.Tensor:
    """The lowest bin that is still reached from above, and what is left of the limits there.

    Parameters
    ----------
    bins : Tensor, shape (rows, vocab_size), int64
        The bin of each token.
    num_bins : int
    limits : list of _Limit
        Get what is left in ``left``.

    Returns
    -------
    Tensor, shape (rows, 1), int64
    """
    is_reached, above = None, []
    for limit in limits:
        histogram = limit.left.new_zeros((len(bins), num_bins))
        upward = histogram.scatter_add_(1, bins, limit.takes).cumsum(dim=-1)
        above.append(upward[:, -1:] - upward)
        within = above[-1] <= limit.left
        is_reached = within if is_reached is None else is_reached.logical_and_(within)
    cut = (num_bins - is_reached.sum(dim=-1, keepdim=True)).clamp_(max=num_bins - 1)
    for limit, taken in zip(limits, above, strict=True):
        limit.left = limit.left - taken.gather(1, cut)
    return cut
