"""What the engine has to know about the device it runs on, in one place.

Nothing outside this file and ``model_executor/forward_stream.py`` names a device, asks for pinned
memory or touches a stream. A device is a `Platform` in a registry, so a test bench can serve
``device="cuda"`` with a device of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch


class Platform:
    """How one kind of device is reached.

    Parameters
    ----------
    name : str
        The name a user asks for (``ServerArgs.device``).
    torch_device : torch.device
        Where tensors of the engine live when that name is asked for.
    """

    def __init__(self, name: str, torch_device: torch.device) -> None:
        self.name = name
        self.torch_device = torch_device

    def is_available(self) -> bool:
        """Whether an engine can run on this device here and now."""
        return True

    def is_pin_memory_available(self) -> bool:
        """Whether page-locked host memory makes copies to this device asynchronous."""
        return False

    def create_forward_stream(self, overlap: bool):
        """The queue on which forwards of one engine run, see `forward_stream.ForwardStream`."""
        from sglang.srt.model_executor.forward_stream import (
            InlineForwardStream,
            ThreadForwardStream,
        )

        return ThreadForwardStream() if overlap else InlineForwardStream()

    def leave_loading_thread(self) -> None:
        """Called once a model is loaded, on the thread that loaded it and will not run it."""
        dissolve_thread_team()
        keep_freed_memory()

    def enter_schedule_thread(self, overlap: bool) -> None:
        """Called on the scheduler's thread before it serves."""
        if overlap:
            use_one_thread()

    def synchronize(self) -> None:
        """Wait for all work submitted to the device. Never called in a decode step."""


class CudaPlatform(Platform):
    """NVIDIA and AMD GPUs, both of which PyTorch calls ``cuda``."""

    def __init__(self) -> None:
        super().__init__("cuda", torch.device("cuda"))

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_pin_memory_available(self) -> bool:
        return torch.cuda.is_available()

    def create_forward_stream(self, overlap: bool):
        from sglang.srt.model_executor.forward_stream import CudaForwardStream

        return CudaForwardStream(overlap)

    def leave_loading_thread(self) -> None:
        pass

    def enter_schedule_thread(self, overlap: bool) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize()


_platforms: dict[str, Platform] = {
    "cpu": Platform("cpu", torch.device("cpu")),
    "cuda": CudaPlatform(),
}
# Device types that tensors of a platform have and no platform has as its name.
_platforms_of_types: dict[str, Platform] = {}


def register_platform(platform: Platform) -> Platform | None:
    """Serve ``platform.name`` with `platform` from now on.

    It serves its ``torch_device.type`` too, unless a platform has that for a name.

    Returns
    -------
    Platform or None
        What served the name before, for the caller to put back.
    """
    previous = _platforms.get(platform.name)
    _platforms[platform.name] = platform
    _platforms_of_types[platform.torch_device.type] = platform
    return previous


def get_platform(device: str | torch.device) -> Platform:
    """The platform that serves `device`.

    Raises
    ------
    ValueError
        If no platform of that name is registered.
    """
    kind = device.type if isinstance(device, torch.device) else device.split(":")[0]
    platform = _platforms.get(kind) or _platforms_of_types.get(kind)
    if platform is None:
        raise ValueError(f"device must be one of {sorted(_platforms)}, got {device!r}")
    return platform


def is_pin_memory_available(device: str | torch.device | None = None) -> bool:
    """Whether host tensors that are copied to `device` should be page-locked."""
    return get_platform("cuda" if device is None else device).is_pin_memory_available()


def to_device_async(
    data: Sequence | np.ndarray | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copy host data to `device` without waiting for what the device is doing.

    Parameters
    ----------
    data : sequence of numbers, ndarray, or Tensor on the host
        Values to copy. They may be changed after the call, but those of an array, which is given away:
        on the CPU it becomes the result's memory.
    dtype : torch.dtype
        Type of the result.
    device : torch.device
        Where to copy them.

    Returns
    -------
    Tensor
        Of the shape of `data`. On a device with page-locked staging, reading it on the stream that is
        current now is ordered behind the copy.
    """
    pin = is_pin_memory_available(device)
    if isinstance(data, torch.Tensor):
        host = data.to(dtype)
        host = host.pin_memory() if pin else host.clone()
    elif isinstance(data, np.ndarray):
        host = torch.from_numpy(data)
        host = host if host.dtype == dtype else host.to(dtype)
        host = host.pin_memory() if pin else host
    else:
        host = torch.tensor(data, dtype=dtype, pin_memory=pin)
    return host.to(device, non_blocking=True)


def to_host_async(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying `tensor` to (page-locked) host memory.

    The values are there once work submitted so far to the current stream is done; reading earlier is
    an error of the caller. A tensor of the host is returned as it is.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(
        tensor.shape, dtype=tensor.dtype, pin_memory=is_pin_memory_available(tensor.device)
    )
    return host.copy_(tensor, non_blocking=True)


# Each Python thread that runs a parallel operation of torch gets an OpenMP team of its own. As soon as
# the teams of a process have more members than it has processors, GNU's runtime stops letting them spin
# between operations, and a forward of many short ones takes a third longer. So only the thread that
# runs forwards shall have a team.


def dissolve_thread_team() -> None:
    """Give up the calling thread's OpenMP team; its next parallel operation makes a new one."""
    pause = _c_function("omp_pause_resource_all")
    if pause is not None:
        soft = 1
        pause(soft)


def use_one_thread() -> None:
    """Run operations that the calling thread starts, and no other thread's, on that thread alone."""
    torch.get_num_threads()  # on its first question a thread is given torch's number: not after this
    set_num_threads = _c_function("omp_set_num_threads")
    if set_num_threads is not None:
        set_num_threads(1)


def keep_freed_memory() -> None:
    """Have malloc keep what forwards free, up to 32 MiB a piece, for the next ones.

    By default GNU's gives a thread's back to the system again and again, and a step of a large batch
    pays hundreds of page faults for getting it anew. Other allocators keep it anyway.
    """
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 512 << 20)


def _c_function(name: str) -> Callable[..., int] | None:
    """A function of a C library that is in the process, such as torch's OpenMP runtime."""
    return getattr(ctypes.CDLL(None), name, None)


def get_bool_env_var(name: str, default: bool = False) -> bool:
    """Read a switch from the environment.

    ``true``, ``yes``, ``on`` and numbers above 0 mean yes, since upstream has levels for some;
    ``false``, ``no``, ``off``, 0 and nothing mean no.

    Raises
    ------
    ValueError
        If it is another word; the message names the variable.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    word = value.strip().lower()
    if word in ("true", "yes", "on") or (word.isdecimal() and int(word) > 0):
        return True
    if word in ("false", "no", "off", "") or word.isdecimal():
        return False
    raise ValueError(f"{name} must be a switch such as 1 or 0, got {value!r}")


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


def ceil_align(a: int, b: int) -> int:
    """Smallest multiple of `b` not below `a`."""
    return ceil_div(a, b) * b


def show_value(value: object) -> str:
    """`value` for an error message: short, and never an error itself."""
    try:
        text = repr(value)
    except Exception:  # huge integers, and objects that cannot be shown
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."
