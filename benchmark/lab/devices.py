"""Which device is measured: ``LAB_DEVICE``, else CUDA where there is one, else the CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

DEVICE_VARIABLE: Final = "LAB_DEVICE"
OFF_GPU: Final = "-cpu"
"""Ends what a machine is called as long as its GPU is not used."""


def chosen() -> str:
    """Name of the device that engines and penalties are to be on: ``cpu`` or ``cuda``.

    Raises
    ------
    ValueError
        If ``LAB_DEVICE`` names another one.
    """
    import torch

    # That one is available may have been put about for the sake of code that is watched on another.
    has_one = torch.cuda.device_count() > 0
    name = os.environ.get(DEVICE_VARIABLE) or ("cuda" if has_one else "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"{DEVICE_VARIABLE} must be cpu or cuda, got {name!r}")
    return name


def choose(name: str | None) -> str:
    """Let the whole laboratory be on a device, or on the one that it is on anyway; return its name.

    Parameters
    ----------
    name : str, optional
        ``cpu`` or ``cuda``. Processes that are started from now on take it from the environment.

    Raises
    ------
    ValueError
        If it is neither, or there is no such device.
    """
    import torch

    if name is not None:
        os.environ[DEVICE_VARIABLE] = name
    found = os.environ[DEVICE_VARIABLE] = chosen()
    if found == "cuda" and torch.cuda.device_count() == 0:
        raise ValueError(f"device {found!r}: torch sees no CUDA device")
    return found


def device() -> torch.device:
    """The same as a device of torch."""
    import torch

    return torch.device(chosen())


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if chosen() == "cuda":
        import torch

        torch.cuda.synchronize()
