"""What a request may ask of sampling, checked before anything else sees it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from sglang.srt.utils.common import show_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLING_EPS = 1e-6
"""Temperatures below this are greedy."""

TOP_K_ALL = 1 << 30
"""The ``top_k`` that keeps the whole vocabulary."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    ``None`` means the default. Everything else that is not of the right type, finite and in range is
    refused here, except what depends on the vocabulary, which `verify` checks. A ``bool`` is no number,
    a float is no integer, a string is no number. NumPy scalars count as what they are in Python.

    Parameters
    ----------
    max_new_tokens : int or None, default 128
        Most tokens to generate, at least 0. 0 is a scoring request. None means as many as the context
        holds.
    stop : str or list of str, optional
        Texts that end the output. None of them may be empty.
    stop_token_ids : list of int, optional
        Tokens that end the output, besides the model's end-of-sequence tokens.
    temperature : float, default 1.0
        At least 0. Below 1e-6 means greedy, which is kept as ``top_k=1, temperature=1.0``.
    top_p : float, default 1.0
        In (0, 1].
    top_k : int, default -1
        At least 1, or -1 for the whole vocabulary, which is kept as `TOP_K_ALL`.
    min_p : float, default 0.0
        In [0, 1], relative to the most likely token's probability.
    frequency_penalty, presence_penalty : float, default 0.0
        In [-2, 2].
    repetition_penalty : float, default 1.0
        In (0, 2].
    min_new_tokens : int, default 0
        In [0, max_new_tokens]. No stop token is generated before.
    n : int, default 1
        Outputs of a prompt. Only 1 is served.
    ignore_eos : bool, default False
        Whether end-of-sequence tokens are tokens like any other; as in upstream, so are
        `stop_token_ids`.
    skip_special_tokens, spaces_between_special_tokens : bool, default True
        Passed to the tokenizer when it makes text.
    no_stop_trim : bool, default False
        Whether what ended the output stays in the text.
    logit_bias : dict, optional
        Token id (an int, or a string of decimal digits as JSON has it) to a finite number that is added
        to the token's logit.
    sampling_seed : int, optional
        Any 64-bit signed integer. The same seed and prompt give the same tokens in any batch, up to the
        rounding of logits, and to what penalties do to them.

    Attributes
    ----------
    stop_strs : list of str
    stop_str_max_len : int
        Most tokens that a stop text can span; set by `normalize`.
    stop_token_ids : set of int
    logit_bias : dict of int to float, or None

    Raises
    ------
    ValueError
        Naming the field and the value; also for a name that is no field.
    """

    def __init__(
        self,
        max_new_tokens: int | None = 128,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        top_k: int | None = -1,
        min_p: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        presence_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        min_new_tokens: int | None = 0,
        n: int | None = 1,
        ignore_eos: bool | None = False,
        skip_special_tokens: bool | None = True,
        spaces_between_special_tokens: bool | None = True,
        no_stop_trim: bool | None = False,
        logit_bias: dict[int | str, float] | None = None,
        sampling_seed: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            _refuse_names(unknown)
        self.max_new_tokens = _integer("max_new_tokens", max_new_tokens, None, low=0)
        self.stop_strs = _strings("stop", stop)
        self.stop_token_ids = _token_ids("stop_token_ids", stop_token_ids)
        self.temperature = _number("temperature", temperature, 1.0, low=0.0)
        self.top_p = _number("top_p", top_p, 1.0, low=0.0, high=1.0, low_open=True)
        self.top_k = _top_k(top_k)
        self.min_p = _number("min_p", min_p, 0.0, low=0.0, high=1.0)
        self.frequency_penalty = _number("frequency_penalty", frequency_penalty, 0.0, -2.0, 2.0)
        self.presence_penalty = _number("presence_penalty", presence_penalty, 0.0, -2.0, 2.0)
        self.repetition_penalty = _number(
            "repetition_penalty", repetition_penalty, 1.0, 0.0, 2.0, low_open=True
        )
        self.min_new_tokens = _integer("min_new_tokens", min_new_tokens, 0, low=0)
        self.n = _integer("n", n, 1, low=1, high=1)
        self.ignore_eos = _flag("ignore_eos", ignore_eos, False)
        self.skip_special_tokens = _flag("skip_special_tokens", skip_special_tokens, True)
        self.spaces_between_special_tokens = _flag(
            "spaces_between_special_tokens", spaces_between_special_tokens, True
        )
        self.no_stop_trim = _flag("no_stop_trim", no_stop_trim, False)
        self.logit_bias = _logit_bias(logit_bias)
        self.sampling_seed = _integer("sampling_seed", sampling_seed, None, _INT64_MIN, _INT64_MAX)

        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens ({show_value(self.max_new_tokens)}), "
                f"got {show_value(self.min_new_tokens)}"
            )
        if self.temperature < SAMPLING_EPS:
            self.temperature, self.top_k = 1.0, 1
        self.stop_str_max_len = max((len(s.encode()) for s in self.stop_strs), default=0)

    @classmethod
    def from_dict(cls, params: Mapping[str, Any]) -> SamplingParams:
        """Make parameters of what came in as JSON.

        Raises
        ------
        ValueError
            If `params` is no mapping, or for any field that the constructor refuses.
        """
        if not isinstance(params, Mapping):
            raise ValueError(f"sampling_params must be a dict, got {show_value(params)}")
        unknown = {name: params[name] for name in params if name not in _FIELDS}
        if unknown:
            _refuse_names(unknown)
        return cls(**params)

    def checked_copy(self) -> SamplingParams:
        """The same parameters, of which nothing is shared, made and checked by the constructor.

        Raises
        ------
        ValueError
            If an attribute was set to what the constructor refuses.
        """
        given = {name: getattr(self, name, None) for name in _FIELDS if name != "stop"}
        return type(self)(stop=getattr(self, "stop_strs", None), **given)

    def verify(self, vocab_size: int) -> None:
        """Check what depends on the vocabulary.

        Raises
        ------
        ValueError
            If a stop token or a biased token is not in ``[0, vocab_size)``.
        """
        for field, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token_id in ids or ():
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"{field} must be token ids in [0, {vocab_size}), got {show_value(token_id)}"
                    )

    def normalize(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Learn from the tokenizer how far back a stop text can begin.

        A token that shows holds at least one byte, so a text of n bytes spans at most n of them; the
        tokenizer may have its own opinion where it drops or replaces characters.
        """
        for text in self.stop_strs:
            length = len(text.encode())
            if tokenizer is not None:
                length = max(length, len(tokenizer.encode(text, add_special_tokens=False)))
            self.stop_str_max_len = max(self.stop_str_max_len, length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


_FIELDS = tuple(
    name
    for name, parameter in inspect.signature(SamplingParams).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
)


def _refuse(field: str, wanted: str, value: Any) -> NoReturn:
    raise ValueError(f"{field} must be {wanted}, got {show_value(value)}")


def _refuse_names(unknown: Mapping[Any, Any]) -> NoReturn:
    shown = ", ".join(
        f"{show_value(name)} ({show_value(value)})" for name, value in unknown.items()
    )
    raise ValueError(f"unknown sampling parameters: {shown}; known are {', '.join(_FIELDS)}")


def _is_integer(value: Any) -> bool:
    # NumPy counts durations among its integers.
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def _range_text(low: float | None, high: float | None, low_open: bool = False) -> str:
    if high is None:
        return "" if low is None else f" of at least {low}"
    return f" in {'(' if low_open else '['}{low}, {high}]"


def _integer(
    field: str, value: Any, default: int | None, low: int | None = None, high: int | None = None
) -> int | None:
    if value is None:
        return default
    wanted = "an integer" + _range_text(low, high)
    if not _is_integer(value):
        _refuse(field, wanted, value)
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        _refuse(field, wanted, value)
    return number


def _number(
    field: str,
    value: Any,
    default: float,
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
) -> float:
    if value is None:
        return default
    wanted = "a finite number" + _range_text(low, high, low_open)
    if not (_is_integer(value) or isinstance(value, (float, np.floating))):
        _refuse(field, wanted, value)
    try:
        number = float(value)
    except OverflowError:
        _refuse(field, wanted, value)
    # Sampling runs in float32, so finite means finite there.
    if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
        _refuse(field, wanted, value)
    if (low is not None and (number < low or (low_open and number == low))) or (
        high is not None and number > high
    ):
        _refuse(field, wanted, value)
    return number


def _flag(field: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, (bool, np.bool_)):
        _refuse(field, "true or false", value)
    return bool(value)


def _top_k(value: Any) -> int:
    if value is None:
        return TOP_K_ALL
    if not _is_integer(value) or (value < 1 and value != -1):
        _refuse("top_k", "an integer of at least 1, or -1 for all", value)
    return TOP_K_ALL if value == -1 else min(int(value), TOP_K_ALL)


def _strings(field: str, value: Any) -> list[str]:
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    wanted = "a non-empty string or a list of them"
    if not isinstance(texts, (list, tuple)):
        _refuse(field, wanted, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            _refuse(field, wanted, text)
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse(field, "valid Unicode", text)
    return [str(text) for text in texts]


def _token_ids(field: str, value: Any) -> set[int]:
    if value is None:
        return set()
    if not isinstance(value, (list, tuple, set, frozenset)):
        _refuse(field, "a list of token ids", value)
    for token_id in value:
        if not _is_integer(token_id) or token_id < 0:
            _refuse(field, "a list of token ids", token_id)
    return {int(token_id) for token_id in value}


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        _refuse("logit_bias", "a dict of token id to number", value)
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token_id = _bias_key(key)
        if token_id in bias:
            _refuse("logit_bias", "a dict that names each token once", key)
        if amount is None:
            _refuse(f"logit_bias[{show_value(key)}]", "a finite number", amount)
        bias[token_id] = _number(f"logit_bias[{show_value(key)}]", amount, 0.0)
    return bias or None


def _bias_key(key: Any) -> int:
    if _is_integer(key) and key >= 0:
        return int(key)
    # JSON has no other keys than strings. 18 digits are more than any vocabulary has.
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 18:
        return int(key)
    _refuse("logit_bias", "a dict whose keys are token ids", key)
