"""An accelerator that is not there: a device of its own, whose tensors hold real values on the CPU.

It is written in Python on PyTorch's PrivateUse1 backend. A tensor of the fake device has shape, strides
and offset like any other. Its storage is empty and leads to a storage of the CPU, which has the values.
Operations go through one fallback that runs them there; composite ones are taken apart above it, and
views are made beside it, by PyTorch, as on any device. So code that mixes up host and device fails here
as it would on a GPU, and everything else computes what it computes on the CPU. It is slow, and nothing
runs beside the host.

Pinned memory needs a driver. `FakeDeviceMode` keeps its books instead: inside it ``pin_memory=True``,
``pin_memory()`` and ``is_pinned()`` work, on the threads that have entered it, and code that names its
device ``"cuda"`` gets this one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME: Final = "fakegpu"

_CPU: Final = torch.device("cpu")
_aten: Final = torch.ops.aten
_lock = threading.Lock()
_libraries: list[torch.library.Library] = []
_counters: list[list[tuple[str, int]]] = []


def device() -> torch.device:
    """The fake device. The first call makes it known to PyTorch, for the rest of the process."""
    with _lock:
        if not _libraries:
            _setup_privateuseone_for_python_backend(NAME)
            everything, aten = (
                torch.library.Library("_", "IMPL"),
                torch.library.Library("aten", "IMPL"),
            )
            everything.fallback(_run, "PrivateUse1")
            for name, kernel in _KERNELS.items():
                aten.impl(name, kernel, "PrivateUse1")
            _libraries.extend((everything, aten))
    return torch.device(NAME, 0)


def is_fake(value: Any) -> bool:
    """Whether `value` is a tensor of the fake device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def synchronize() -> None:
    """Wait for the device, which never has anything left to do. A ledger sees the call."""


@contextlib.contextmanager
def counted_copies() -> Iterator[list[tuple[str, int]]]:
    """What crosses between host and device, in all threads: ``("H2D" or "D2H", bytes)``.

    Noted where memory is copied, and so a check for whoever infers it from what was called.
    """
    copies: list[tuple[str, int]] = []
    _counters.append(copies)
    try:
        yield copies
    finally:
        _counters[:] = [other for other in _counters if other is not copies]


def _count(kind: str, nbytes: int) -> None:
    for copies in tuple(_counters):
        copies.append((kind, nbytes))


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of the fake device: a CPU tensor that shares its memory."""
    storage = tensor.untyped_storage()._values
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


# --- Operations -------------------------------------------------------------------------------

INDEXING: Final = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
# Like a GPU, it takes indices from the host, and copies.
_TAKE_HOST_TENSORS: Final = INDEXING | {"copy_", "_to_copy"}
# It takes a tensor of one number from the host where it computes, and not where tensors are looked up or
# put together.
_TAKE_NO_HOST_NUMBERS: Final = frozenset(
    (
        "cat",
        "embedding",
        "gather",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_select",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "stack",
        "take",
    )
)


def _wrap(values: torch.Tensor) -> torch.Tensor:
    """A tensor of the fake device with these values, and the same strides."""
    values = values.resolve_conj().resolve_neg()
    nothing = torch._C._acc.create_empty_tensor([0], values.dtype)
    nothing.untyped_storage()._values = values.untyped_storage()
    return _as_strided(nothing, values.size(), values.stride(), values.storage_offset())


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on the values."""
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    takes_host_tensors = op._overloadpacket.__name__ in _TAKE_HOST_TENSORS
    takes_host_numbers = op._overloadpacket.__name__ not in _TAKE_NO_HOST_NUMBERS

    def take(value: Any) -> Any:
        if is_fake(value):
            values = values_of(value)
            fakes[id(values)] = (value, values)
            return values
        if (
            isinstance(value, torch.Tensor)
            and (value.dim() > 0 or not takes_host_numbers)
            and not takes_host_tensors
        ):
            raise RuntimeError(_MIXED.format(op, NAME, value.device))
        if isinstance(value, torch.device) and value.type == NAME:
            return _CPU
        return value

    def give(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # What an operation was given to write into comes back as it was.
        return fakes[id(value)][0] if id(value) in fakes else _wrap(value)

    if op._overloadpacket.__name__ in INDEXING:
        _check_indexing(op, *args)
    if op is _aten._local_scalar_dense.default:
        _count("D2H", args[0].element_size())
    args = _map(take, _with_tensors(op, args))
    kwargs = {name: _map(take, value) for name, value in kwargs.items()}
    out = op(*args, **kwargs)
    for fake, values in fakes.values():
        if (fake.size(), fake.stride()) != (values.size(), values.stride()):  # resized
            fake.data = _wrap(values)
    return _map(give, out)


_MIXED: Final = (
    "{}: expected all tensors to be on the same device, but found at least two, {} and {}"
)


def _check_indexing(op: Any, target: torch.Tensor, indices: Any, *rest: Any) -> None:
    """Refuse what a GPU refuses, and count what it copies."""
    present = [i for i in indices if i is not None]
    values = rest[0] if rest and op._overloadpacket.__name__ != "index" else None
    if not is_fake(target):
        if any(map(is_fake, present)) or (is_fake(values) and values.numel() != 1):
            raise RuntimeError(_MIXED.format(op, target.device, NAME))
        if is_fake(values):
            _count("D2H", values.nbytes)
        return
    if isinstance(values, torch.Tensor) and not is_fake(values) and values.dim() > 0:
        raise RuntimeError(_MIXED.format(op, NAME, values.device))
    if op._overloadpacket.__name__ != "index":  # whose indices were copied on the way here
        for nbytes in host_index_bytes(present):
            _count("H2D", nbytes)


def host_index_bytes(indices: list[torch.Tensor]) -> list[int]:
    """Bytes of each copy that indices of the host take. A mask becomes numbers, there, first."""
    copies = []
    for index in indices:
        if index.device.type == "cpu":
            is_mask = index.dtype in (torch.bool, torch.uint8)
            nbytes = 8 * int(index.count_nonzero()) if is_mask else index.nbytes
            copies += [nbytes] * (index.dim() if is_mask else 1)
    return copies


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument or a result, or to each of a list of them."""
    if isinstance(value, list | tuple):
        return type(value)(_map(function, x) for x in value)
    return function(value)


def _with_tensors(op: Any, args: tuple) -> list[Any]:
    """Arguments with tensors where Python numbers stand for some."""
    return [
        torch.tensor(value)
        if isinstance(value, bool | int | float) and isinstance(argument.type, torch.TensorType)
        else value
        for value, argument in zip(args, op._schema.arguments, strict=False)
    ]


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    values, place = (values_of(x) if is_fake(x) else x for x in (source, target))
    if is_fake(source) != is_fake(target):
        # As CUDA does it, types change on the device if the host does not wait, else on the host.
        crosses = source if is_fake(target) == bool(non_blocking) else target
        _count("D2H" if is_fake(source) else "H2D", place.numel() * crosses.element_size())
    place.copy_(values)
    return target


# The kernels of the device without memory, which check no bounds: the storage is empty.
_META: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


def _as_strided(
    tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None
) -> torch.Tensor:
    start = tensor.storage_offset() if offset is None else offset
    if 0 not in size:
        end = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        there = tensor.untyped_storage()._values.nbytes() // tensor.element_size()
        if start < 0 or end > there:
            raise RuntimeError(
                f"as_strided: elements up to {end} are asked for, the storage has {there}"
            )
    return _aten.as_strided.default.redispatch(_META, tensor, size, stride, start)


def _as_strided_(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    tensor.data = _as_strided(tensor, *args)
    return tensor


def _attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    # PyTorch chooses how to attend by the kind of hardware, of which it does not know this one.
    return _run(_aten.scaled_dot_product_attention.default, *args, **kwargs)


def _refuse(*args: Any) -> Any:
    raise NotImplementedError(f"{NAME} has no set_, and no conjugate or negative views")


_KERNELS: Final = {
    "_conj": _refuse,
    "_neg_view": _refuse,
    "set_.source_Storage": _refuse,
    "set_.source_Storage_storage_offset": _refuse,
    "set_.source_Tensor": _refuse,
    "_copy_from": _copy_from,
    "as_strided": _as_strided,
    "as_strided_": _as_strided_,
    "scaled_dot_product_attention": _attend,
}


# Functions that make tensors of Python's data.
FROM_DATA: Final = frozenset(("tensor", "as_tensor", "asarray", "new_tensor"))

# --- Pinned memory ----------------------------------------------------------------------------


def _mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Count the memory of `tensor` as page-locked from now on."""
    tensor.untyped_storage()._is_pinned = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` counts as page-locked."""
    return getattr(tensor.untyped_storage(), "_is_pinned", False)


def is_meant(place: Any) -> bool:
    """Whether `place`, a device or its name, means the fake device."""
    return isinstance(place, str | torch.device) and str(place).partition(":")[0] in (NAME, "cuda")


def data_of(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a function of `FROM_DATA` is to make a tensor of."""
    place = 1 if name == "new_tensor" else 0
    return args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Tensors in the lists that another tensor is to be made of. Each of them is one number."""
    if not isinstance(data, list | tuple):
        return []
    found = [x for x in data if isinstance(x, torch.Tensor)]
    return found + [t for x in data if isinstance(x, list | tuple) for t in tensors_in(x)]


def _fetched(data: Any) -> Any:
    """The same lists, with tensors of the host in the place of those of the device."""
    if isinstance(data, list | tuple):
        return type(data)(_fetched(x) for x in data)
    return data.cpu() if is_fake(data) else data


def to_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, torch.dtype | None, bool]:
    """Device or None, type or None, and ``non_blocking``, of a call of ``Tensor.to``."""
    place, dtype = kwargs.get("device"), kwargs.get("dtype")
    flags = [x for x in args[1:] if isinstance(x, bool)]
    for x in (*args[1:], kwargs.get("other")):
        if isinstance(x, torch.Tensor):
            place, dtype = x.device, x.dtype
        elif isinstance(x, torch.dtype):
            dtype = x
        elif isinstance(x, str | torch.device):
            place = x
    return place, dtype, bool(kwargs.get("non_blocking", flags[0] if flags else False))


def is_sequence(index: Any) -> bool:
    """Whether an index is a list of numbers or an array, which PyTorch makes a tensor of."""
    if isinstance(index, torch.Tensor) or not hasattr(index, "__len__"):
        return False
    return not (
        isinstance(index, list) and any(isinstance(i, torch.Tensor | slice | None) for i in index)
    )


def indices_on(place: torch.device, index: Any) -> Any:
    """An index whose lists and arrays have become tensors on a device."""
    if isinstance(index, tuple):
        return tuple(indices_on(place, i) if is_sequence(i) else i for i in index)
    return torch.as_tensor(index, device="cpu").to(place) if is_sequence(index) else index


class FakeDeviceMode(TorchFunctionMode):
    """Pinned memory, and ``"cuda"`` as a name of the fake device, on the thread that enters it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in FROM_DATA and any(map(is_fake, tensors_in(data_of(name, args, kwargs)))):
            # Done inside the call, this does not get past other modes.
            args = tuple(_fetched(x) if isinstance(x, list | tuple) else x for x in args)
        if name in FROM_DATA and kwargs.get("device") is None and name != "new_tensor":
            # What another mode would add to the call, below this one.
            if (default := torch.get_default_device()).type == NAME:
                kwargs["device"] = default
        if is_meant(kwargs.get("device")):
            kwargs["device"] = device()
            if name in FROM_DATA and not is_fake(data_of(name, args, kwargs)):
                kwargs["device"] = "cpu"
                return func(*args, **kwargs).to(device())
        if name == "new_tensor" and is_fake(args[0]) and "device" not in kwargs:
            data, dtype = data_of(name, args, kwargs), kwargs.get("dtype", args[0].dtype)
            return torch.tensor(data, dtype=dtype, device="cpu").to(device())
        if name in ("__getitem__", "__setitem__") and is_fake(args[0]):
            args = (args[0], indices_on(device(), args[1]), *args[2:])
        if name == "to":
            args = tuple(device() if is_meant(x) else x for x in args)
            place, dtype, non_blocking = to_arguments(args, kwargs)
            if is_fake(args[0]) and non_blocking and place and torch.device(place).type == "cpu":
                # PyTorch pins what it copies to.
                host = torch.empty_like(args[0], device="cpu", dtype=dtype or args[0].dtype)
                return _mark_pinned(host).copy_(args[0], non_blocking=True)
        if name == "cuda":
            return args[0].to(device(), non_blocking=to_arguments(args, kwargs)[2])
        if name == "__deepcopy__" and is_fake(args[0]):
            return args[0].clone()
        if name == "is_pinned":
            return is_pinned(args[0])
        if name == "pin_memory":
            return args[0] if is_pinned(args[0]) else _mark_pinned(args[0].clone())
        if "pin_memory" in kwargs:
            pin = kwargs.pop("pin_memory")
            made = func(*args, **kwargs)
            return _mark_pinned(made) if pin else made
        return func(*args, **kwargs)
