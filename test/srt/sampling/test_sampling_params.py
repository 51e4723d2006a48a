"""SamplingParams refuses what it must, says why, and keeps everything else as upstream does."""

from __future__ import annotations

import decimal
import enum
import fractions
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

NAN, INF = math.nan, math.inf
DURATIONS = [np.timedelta64(1, "ns"), np.timedelta64(1, "s"), np.timedelta64("NaT")]

FLOAT_RANGES = {  # low, high, is low allowed
    "temperature": (0.0, None, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 2.0, False),
}
INT_FIELDS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed")
FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
FIELDS = (*FLOAT_RANGES, *INT_FIELDS, *FLAGS, "stop", "stop_token_ids", "logit_bias")


class Shy:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


class Two(enum.IntEnum):
    TWO = 2


def refused(**params: object) -> str:
    """The message with which a single field is refused; the same by keyword and as a dict."""
    with pytest.raises(ValueError) as by_keyword:
        SamplingParams(**params)
    with pytest.raises(ValueError) as as_dict:
        SamplingParams.from_dict(params)
    assert str(by_keyword.value) == str(as_dict.value)
    (field,) = params
    assert field in str(by_keyword.value)
    return str(by_keyword.value)


def test_defaults_are_upstreams() -> None:
    params = SamplingParams()
    assert params.max_new_tokens == 128
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1, TOP_K_ALL, 0)
    assert (params.frequency_penalty, params.presence_penalty) == (0, 0)
    assert params.repetition_penalty == 1
    assert (params.min_new_tokens, params.n, params.sampling_seed) == (0, 1, None)
    assert (params.stop_strs, params.stop_token_ids, params.logit_bias) == ([], set(), None)
    assert (params.ignore_eos, params.no_stop_trim) == (False, False)
    assert (params.skip_special_tokens, params.spaces_between_special_tokens) == (True, True)


def test_none_means_the_default() -> None:
    without_limit = dict.fromkeys((f for f in FIELDS if f != "max_new_tokens"), None)
    assert SamplingParams(**without_limit) == SamplingParams()
    # As in upstream: None is no limit, which is not the same as no entry.
    assert SamplingParams(max_new_tokens=None).max_new_tokens is None


@pytest.mark.parametrize("field", FLOAT_RANGES)
def test_float_ranges(field: str) -> None:
    low, high, low_allowed = FLOAT_RANGES[field]
    for value in (low, high, 1e-300, 0.5, 1, np.float32(0.5), np.float64(0.5), np.int32(1)):
        if value is None or (value == low and not low_allowed):
            continue
        kept = getattr(SamplingParams(**{field: value}), field)
        assert type(kept) is float
        assert kept == float(value) or (field == "temperature" and value < 1e-6 and kept == 1.0)
    bad = [NAN, INF, -INF, np.float32(NAN), np.float64(INF), 1e300, 10**400, -(10**400)]
    bad += [math.nextafter(low, -INF), *(() if high is None else (math.nextafter(high, INF),))]
    bad += [] if low_allowed else [low]
    bad += [
        True,
        False,
        np.True_,
        "0.5",
        "",
        b"1",
        [0.5],
        {},
        (),
        1j,
        object(),
        Shy(),
        torch.ones(()),
    ]
    bad += [decimal.Decimal(1), fractions.Fraction(1), np.array(0.5), np.array([0.5])]
    bad += DURATIONS
    for value in bad:
        message = refused(**{field: value})
        assert "got " in message


def test_message_names_field_range_and_value() -> None:
    assert refused(top_p=1.5) == "top_p must be a finite number in (0.0, 1.0], got 1.5"
    assert refused(min_new_tokens=-1) == "min_new_tokens must be an integer of at least 0, got -1"
    assert "got <int>" in refused(top_k=-(10**5000))
    assert "got <Shy>" in refused(stop=Shy())
    assert len(refused(stop="\ud800" * 10_000)) < 300


def test_temperature_zero_is_greedy() -> None:
    for value in (0, 0.0, -0.0, 1e-7):
        params = SamplingParams(temperature=value, top_k=5)
        assert (params.temperature, params.top_k) == (1.0, 1)
    params = SamplingParams(temperature=1e-6)
    assert (params.temperature, params.top_k) == (1e-6, TOP_K_ALL)


@pytest.mark.parametrize("field", INT_FIELDS)
def test_integers(field: str) -> None:
    for value in (1, np.int64(1), np.uint8(1)):
        assert type(getattr(SamplingParams(**{field: value}), field)) is int
    for value in (1.0, np.float64(1), NAN, INF, True, False, np.True_, "1", "", [1], {}, 1j, Shy()):
        refused(**{field: value})
    for value in (torch.ones((), dtype=torch.int64), decimal.Decimal(1), np.array(1), *DURATIONS):
        refused(**{field: value})


def test_top_k() -> None:
    assert SamplingParams(top_k=-1).top_k == TOP_K_ALL
    assert SamplingParams(top_k=Two.TWO).top_k == 2
    assert SamplingParams(top_k=10**30).top_k == TOP_K_ALL
    for value in (0, -2, -(10**30)):
        refused(top_k=value)


def test_lengths() -> None:
    assert SamplingParams(max_new_tokens=0).max_new_tokens == 0
    assert SamplingParams(max_new_tokens=10**30).max_new_tokens == 10**30
    assert SamplingParams(max_new_tokens=None, min_new_tokens=10**9).min_new_tokens == 10**9
    assert SamplingParams(max_new_tokens=3, min_new_tokens=3).min_new_tokens == 3
    refused(max_new_tokens=-1)
    with pytest.raises(ValueError, match=r"min_new_tokens .* max_new_tokens \(3\), got 4"):
        SamplingParams(max_new_tokens=3, min_new_tokens=4)
    with pytest.raises(ValueError, match=r"min_new_tokens .* max_new_tokens \(128\), got 129"):
        SamplingParams(min_new_tokens=129)


def test_n_is_one() -> None:
    for value in (0, 2, -1):
        refused(n=value)


def test_sampling_seed_is_an_int64() -> None:
    for value in (-(2**63), 2**63 - 1, 0, -1):
        assert SamplingParams(sampling_seed=value).sampling_seed == value
    for value in (-(2**63) - 1, 2**63, 10**30, np.uint64(2**63)):
        refused(sampling_seed=value)


@pytest.mark.parametrize("field", FLAGS)
def test_flags(field: str) -> None:
    for value in (True, False, np.True_, np.False_):
        assert getattr(SamplingParams(**{field: value}), field) is bool(value)
    for value in (0, 1, "true", "", [], NAN, np.int8(1), torch.tensor(True)):
        refused(**{field: value})


def test_stop() -> None:
    assert SamplingParams(stop="a").stop_strs == ["a"]
    assert SamplingParams(stop=["a", "é"]).stop_strs == ["a", "é"]
    assert SamplingParams(stop=("a",)).stop_strs == ["a"]
    assert SamplingParams(stop=[]).stop_strs == []
    for value in ("", [""], ["a", ""], ["a", None], [1], 1, b"a", {"a": 1}, {"a"}, "\ud800", True):
        refused(stop=value)
    assert refused(stop=["a"] * 100 + [7]).endswith("got 7")


def test_stop_token_ids() -> None:
    assert SamplingParams(stop_token_ids=[1, np.int32(2), 2]).stop_token_ids == {1, 2}
    assert SamplingParams(stop_token_ids={3}).stop_token_ids == {3}
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == set()
    for value in (
        [None],
        [1, None],
        [1.0],
        [True],
        ["1"],
        [-1],
        1,
        "1",
        {1: 2},
        [[1]],
        np.array([1]),
        DURATIONS,
    ):
        refused(stop_token_ids=value)
    assert refused(stop_token_ids=[*range(100), 1.5]).endswith("got 1.5")


def test_logit_bias() -> None:
    bias = SamplingParams(logit_bias={5: 1, "6": -0.5, np.int64(7): np.float32(2)}).logit_bias
    assert bias == {5: 1.0, 6: -0.5, 7: 2.0}
    assert all(type(k) is int and type(v) is float for k, v in bias.items())
    assert SamplingParams(logit_bias={}).logit_bias is None
    keys = (-1, "-1", "+1", " 1", "1 ", "1.0", "", "x", "٣", "²", 1.0, True, None, (1,), "9" * 5000)
    for key in (*keys, DURATIONS[0]):
        refused(logit_bias={key: 1.0})
    for value in (NAN, INF, -INF, 1e300, "1", None, True, [1], 1j, *DURATIONS):
        assert "logit_bias[5]" in refused(logit_bias={5: value})
    for value in ([5], "5", 5, [(5, 1.0)], {5, 6}):
        refused(logit_bias=value)
    assert "once" in refused(logit_bias={5: 1.0, "5": 2.0})


def test_verify_checks_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=[99], logit_bias={0: 1, "99": 2}).verify(100)
    with pytest.raises(ValueError, match=r"stop_token_ids .*\[0, 100\), got 100"):
        SamplingParams(stop_token_ids=[100]).verify(100)
    with pytest.raises(ValueError, match=r"logit_bias .*\[0, 100\), got 100"):
        SamplingParams(logit_bias={"100": 1.0}).verify(100)


@pytest.mark.parametrize("name", ["stop_token_ids", "stop_strs", "logit_bias"])
def test_a_copy_is_checked(name: str) -> None:
    params = SamplingParams(stop=["a", "bc"], stop_token_ids=[1, 2], logit_bias={3: 1.0})
    assert params.checked_copy() == params
    for value in (5, 1.5, "", b"x", [NAN]):
        setattr(params, name, value)
        with pytest.raises(ValueError, match=f"{name.removesuffix('_strs')} must be .*got "):
            params.checked_copy()
    setattr(params, name, None)
    assert not getattr(params.checked_copy(), name)


def test_unknown_names_are_listed() -> None:
    for make in (lambda **d: SamplingParams(**d), lambda **d: SamplingParams.from_dict(d)):
        with pytest.raises(ValueError) as error:
            make(warmth=0.5, top_p=0.5, Stop="x")
        assert "'warmth' (0.5)" in str(error.value)
        assert "'Stop' ('x')" in str(error.value)
        assert "temperature" in str(error.value)
        assert "'top_p'" not in str(error.value)
    with pytest.raises(ValueError, match="self"):
        SamplingParams.from_dict({"self": 1})
    with pytest.raises(ValueError, match="unknown"):
        SamplingParams.from_dict({1: 2, None: 3})
    for junk in (None, 1, "temperature", [("top_p", 1)], SamplingParams()):
        with pytest.raises(ValueError, match="sampling_params must be a dict"):
            SamplingParams.from_dict(junk)


class CharTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [7] * (3 * len(text))


def test_normalize_bounds_the_length_of_stop_texts() -> None:
    params = SamplingParams(stop=["ab", "é" * 5])
    assert params.stop_str_max_len == 10  # bytes: no shown token holds less than one
    params.normalize(None)
    assert params.stop_str_max_len == 10
    params.normalize(CharTokenizer())
    assert params.stop_str_max_len == 15
    params = SamplingParams()
    params.normalize(CharTokenizer())
    assert (params.stop_strs, params.stop_str_max_len) == ([], 0)


def test_equality_and_repr() -> None:
    assert SamplingParams(top_k=3) == SamplingParams.from_dict({"top_k": np.int8(3)})
    assert SamplingParams(top_k=3) != SamplingParams(top_k=4)
    assert "top_k=3" in repr(SamplingParams(top_k=3))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**320), max_value=10**320),
    st.floats(),
    st.floats(width=16).map(np.float16),
    st.integers(-128, 127).map(np.int8),
    st.text(max_size=5),
    st.text(alphabet=st.characters(categories=["Cs", "Nd"]), max_size=3),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
    st.builds(Shy),
    st.sampled_from([torch.zeros(2), np.zeros(2), np.array(None), object, ...]),
)


def can_be_a_key(value: object) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    # The one has no truth value when compared, the other raises beside a NumPy integer of equal hash.
    return not isinstance(value, (torch.Tensor, decimal.Decimal))


hashable = scalars.filter(can_be_a_key)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(hashable, inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@example(params={"logit_bias": {decimal.Decimal(1): 1.0}})
@given(params=st.dictionaries(st.sampled_from(FIELDS), junk, max_size=3))
def test_junk_is_kept_or_refused_with_a_value_error(params: dict[str, object]) -> None:
    try:
        made = SamplingParams.from_dict(params)
        made.verify(1000)
    except ValueError as error:
        assert any(field in str(error) for field in params)
        assert len(str(error)) < 500
        return
    assert math.isfinite(np.float32(made.temperature)) and made.temperature > 0
    assert 0 < made.top_p <= 1 and 0 <= made.min_p <= 1 and made.top_k >= 1
    assert 0 < made.repetition_penalty <= 2
    assert made.max_new_tokens is None or made.min_new_tokens <= made.max_new_tokens
    assert all(0 <= t < 1000 for t in made.stop_token_ids)
    torch.tensor([made.temperature, *(made.logit_bias or {}).values()], dtype=torch.float32)
    torch.tensor([made.top_k], dtype=torch.int32)


@settings(max_examples=100, deadline=None)
@given(params=st.dictionaries(st.one_of(st.sampled_from(FIELDS), hashable), junk, max_size=3))
def test_junk_names_are_refused_with_a_value_error(params: dict[object, object]) -> None:
    try:
        SamplingParams.from_dict(params)
    except ValueError:
        return
    assert set(params) <= set(FIELDS)
