"""Numbers as people read them."""

from __future__ import annotations

import math


def significant(value: float, digits: int = 4) -> str:
    """`value` with so many significant digits, whole numbers in full, never with an exponent.

    Examples
    --------
    >>> significant(12345.6), significant(1.23456), significant(0.000123456, 2)
    ('12,346', '1.235', '0.00012')
    """
    if not math.isfinite(value):
        return str(value)
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else digits - 1
    return f"{value:,.{max(places, 0)}f}"
