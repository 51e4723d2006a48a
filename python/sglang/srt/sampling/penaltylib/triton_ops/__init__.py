"""Triton kernels of the penalties. Importing this package imports no Triton."""

from __future__ import annotations

import importlib.util


def is_triton_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
