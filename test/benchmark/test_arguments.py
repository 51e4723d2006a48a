"""``lab.arguments``: values of a command line."""

from __future__ import annotations

import argparse
import re

import pytest

from lab.arguments import case_name, positive_float, positive_int


def test_numbers_are_taken() -> None:
    assert [positive_int("1"), positive_int("32")] == [1, 32]
    assert [positive_float("0.5"), positive_float("3"), positive_float("1e3")] == [0.5, 3.0, 1000.0]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "nan", "", "x"])
def test_what_is_no_positive_whole_number_is_refused(text: str) -> None:
    said = f"must be a whole number of at least 1, got {text!r}"
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(said)}$"):
        positive_int(text)


@pytest.mark.parametrize("text", ["0", "-0.5", "nan", "inf", "1e999", "", "x"])
def test_what_is_no_positive_finite_number_is_refused(text: str) -> None:
    said = f"must be a finite number above 0, got {text!r}"
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(said)}$"):
        positive_float(text)


def test_a_case_that_there_is_not_is_refused_with_those_that_are_near() -> None:
    assert case_name("decode/tiny-b8") == "decode/tiny-b8"
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        case_name("decode/tiny-b88")
    said = str(caught.value)
    assert said.startswith("no case 'decode/tiny-b88'; there are decode/tiny-b8, ")
    assert said.endswith("; benchmark/lab/cases.py has all") and len(said) < 200
    with pytest.raises(argparse.ArgumentTypeError, match=r"^no case 'x'; benchmark/lab/cases\.py"):
        case_name("x")
