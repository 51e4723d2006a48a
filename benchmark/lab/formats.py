"""Numbers as people read them, and what they should know of them."""

from __future__ import annotations

import math
import os


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


def busy_notes(threads: int) -> list[str]:
    """What is to be said before a measurement, where other jobs want the processors that it needs.

    Two threads meet behind each operation. If one of them has to wait for a processor, both do, and each
    of many short operations costs a time slice: such times say nothing.

    Parameters
    ----------
    threads : int
        Of the measurement.
    """
    load = os.getloadavg()[0]
    # One process that has just ended, such as an installer, leaves as much.
    if load + threads <= (os.cpu_count() or 1) + 1:
        return []
    return [
        f"the load is {load:.1f} before {threads} threads of ours begin: they may have to wait for a "
        "processor, and nothing that is measured then is to be trusted"
    ]
