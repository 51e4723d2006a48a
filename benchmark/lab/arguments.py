"""Types of values on a command line, for argparse: what is none of them is refused with a reason."""

from __future__ import annotations

import argparse
import math

from lab.cases import check_name


def positive_int(text: str) -> int:
    """A whole number of at least 1.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def positive_float(text: str) -> float:
    """A finite number above 0.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is none.
    """
    number = _finite(text)
    if number is None or number <= 0:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return number


def non_negative_float(text: str) -> float:
    """A finite number of at least 0.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is none.
    """
    number = _finite(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text!r}")
    return number


def case_name(text: str) -> str:
    """The name of a case that there is.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is none; names those that are called much like it.
    """
    try:
        check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
