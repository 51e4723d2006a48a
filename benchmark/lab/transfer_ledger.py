"""Every transfer between host and device, and every wait of the host, with the line that asked for it.

`TransferLedger` watches what PyTorch is called with, on all threads that start inside it. It needs no
GPU: on a machine without one it watches the fake device (see `lab.fake_device`). On a machine with CUDA
it watches that, with the same rules.

When does a transfer block? ``non_blocking=True`` alone does not make a copy asynchronous. What CUDA's
copy kernel does (PyTorch's ``aten/src/ATen/native/cuda/Copy.cu``) is asynchronous only if the host's
memory is page-locked *and* is what gets copied. Pageable memory is staged through a driver's buffer,
behind what the stream was given before, and the host stands still. So it does where the copy changes the
layout and the host's side of it is therefore a temporary, which is pageable. (A type is changed on the
device, if the host does not wait.) How long a small pageable copy holds the host up is up to the driver;
here it counts as blocking.

Examples
--------
>>> with TransferLedger() as ledger:
...     scheduler_step()
>>> print(ledger.report())
>>> assert not ledger.blocking()
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lab import devices, fake_device

H2D: Final = "H2D"
D2H: Final = "D2H"
SYNC: Final = "SYNC"

# Operations whose result has a shape that the device finds out. The host waits for it.
_SIZE_SYNCS: Final = frozenset(
    (
        "nonzero",
        "nonzero_numpy",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
        "repeat_interleave",
    )
)
# Operations that fetch a number of the device, by the place of the argument that it is in. A draw looks
# at its weights first.
_FETCHES: Final = {
    "masked_fill": 2,
    "masked_fill_": 2,
    "index_fill": 3,
    "index_fill_": 3,
    "multinomial": 0,
}
_SYNC_DEBUG: Final = "called a synchronizing CUDA operation"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer or wait.

    Attributes
    ----------
    kind : str
        ``"H2D"``, ``"D2H"`` or ``"SYNC"``.
    op : str
        What was called.
    nbytes : int
        Bytes that cross; 0 for a wait, 8 for a size that the host waits for.
    pinned : bool or None
        Whether the host's side is page-locked; None where there is no tensor on the host.
    blocking : bool
        Whether the host stands still until the device is done with what it was given before.
    site : str
        ``file:line`` of the code that asked for it.
    function : str
        Name of that code's function.
    via : str
        ``file:line`` of its caller.
    thread : str
        Name of the thread.
    step : int or None
        Number of the scheduling step, where the ledger knows one.
    allowed : bool
        Whether it blocks and is meant to.
    """

    kind: str
    op: str
    nbytes: int
    pinned: bool | None
    blocking: bool
    site: str
    function: str
    via: str
    thread: str
    step: int | None = None
    allowed: bool = False

    def __str__(self) -> str:
        memory = {None: "", True: " from pinned memory", False: " from pageable memory"}
        if self.kind == D2H:
            memory = {None: "", True: " to pinned memory", False: " to pageable memory"}
        return (
            f"{'blocking' if self.blocking else 'asynchronous'} {self.kind} {self.op} of {self.nbytes} "
            f"bytes{memory[self.pinned]} at {self.site} ({self.function}, via {self.via}), "
            f"thread {self.thread}, step {self.step}"
        )


class BlockingTransfer(RuntimeError):
    """A transfer blocks and is not meant (mode ``"raise"``).

    Attributes
    ----------
    transfer : Transfer
    """

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(str(transfer))
        self.transfer = transfer


class TransferLedger:
    """Record what crosses between host and device inside the ``with``.

    Threads that are started inside are watched too. One that runs already enters `attach`.

    Parameters
    ----------
    device_type : str, optional
        Type of the device to watch. By default ``"cuda"`` where that is measured (see `lab.devices`),
        else the fake device.
    mode : {"record", "raise"}
        Whether a blocking transfer that is not meant raises `BlockingTransfer` where it happens, and,
        should it get lost there, once more at the end.
    allow : sequence of str
        Sites that may block, see `allow`.
    sync_debug : bool
        On CUDA, ask PyTorch itself for what it takes for synchronising, for `compare`.
    """

    def __init__(
        self,
        device_type: str | None = None,
        mode: str = "record",
        allow: Sequence[str] = (),
        sync_debug: bool = False,
    ) -> None:
        if mode not in ("record", "raise"):
            raise ValueError(f"mode must be 'record' or 'raise', got {mode!r}")
        if device_type is None:
            device_type = "cuda" if devices.chosen() == "cuda" else fake_device.NAME
        self.device_type = device_type
        self.is_fake = device_type == fake_device.NAME
        self.mode = mode
        self.sync_debug = sync_debug
        self.transfers: list[Transfer] = []
        # What PyTorch reported as synchronising, as sites.
        self.sync_debug_sites: list[str] = []
        # Number of the step that the calling thread works on, for whoever knows it.
        self.step: Callable[[], int | None] = lambda: None
        self._allowed: list[str] = []
        self.allow(*([allow] if isinstance(allow, str) else allow))
        self._local = threading.local()
        self._stack: contextlib.ExitStack | None = None
        if self.is_fake:
            fake_device.device()

    # ---- watching

    def __enter__(self) -> TransferLedger:
        if self._stack is not None:
            raise RuntimeError("this ledger is open already")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_patched(self))
            stack.enter_context(self.attach())
            if self.sync_debug and not self.is_fake:
                stack.enter_context(self._sync_debug())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stack.close()
        self._stack = None
        if self.mode == "raise" and kind is None and (blocking := self.blocking()):
            # It was raised where it happened, and may have been lost there: on a thread, say.
            raise BlockingTransfer(blocking[0])

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """Watch the calling thread, once however often this is entered."""
        if self.watches_this_thread():
            yield
            return
        self._local.attached = True
        try:
            with contextlib.ExitStack() as stack:
                if self.is_fake:
                    stack.enter_context(fake_device.FakeDeviceMode())
                stack.enter_context(_Functions(self))
                stack.enter_context(_Operations(self))
                yield
        finally:
            self._local.attached = False

    def watches_this_thread(self) -> bool:
        """Whether the calling thread has been attached."""
        return getattr(self._local, "attached", False)

    @contextlib.contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """What the calling thread does inside belongs to this step."""
        before = getattr(self._local, "step", None)
        self._local.step = step
        try:
            yield
        finally:
            self._local.step = before

    def allow(self, *sites: str) -> None:
        """Let these block.

        Parameters
        ----------
        *sites : str
            ``"file:function"``, where `file` may be the end of a path; or ``"SYNC file:function"`` for
            one kind alone.

        Raises
        ------
        ValueError
            If an entry has another form.
        """
        for site in sites:
            if not re.fullmatch(r"((H2D|D2H|SYNC) )?[^ :]+\.py:[\w<>]*[A-Za-z_>]\w*", site):
                raise ValueError(
                    f"allow takes 'file.py:function', with 'SYNC ' or so before it, got {site!r}"
                )
        self._allowed += sites

    @contextlib.contextmanager
    def _sync_debug(self) -> Iterator[None]:
        """Collect PyTorch's own warnings of what synchronises. Knows no pageable copies."""

        def collect(message: Any, *rest: Any) -> None:
            # The warning itself names the innermost frame, which is one of this module or of torch.
            if _SYNC_DEBUG in str(message):
                self.sync_debug_sites.append(_sites()[0][0])

        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=f".*{_SYNC_DEBUG}")
            warnings.showwarning = collect
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    # ---- the books

    def note(self, kind: str, op: str, nbytes: int, pinned: bool | None, blocking: bool) -> None:
        """Enter a transfer that the calling code asks for.

        Raises
        ------
        BlockingTransfer
            In mode ``"raise"``, if it blocks and is not meant.
        """
        if self._stack is None or (kind == H2D and getattr(self._local, "is_entered", False)):
            return
        (site, function), (via, _) = _sites()
        step = getattr(self._local, "step", None)
        transfer = Transfer(
            kind,
            op,
            int(nbytes),
            pinned,
            blocking,
            site,
            function,
            via,
            threading.current_thread().name,
            self.step() if step is None else step,
        )
        transfer = replace(transfer, allowed=blocking and self._is_allowed(transfer))
        self.transfers.append(transfer)
        if blocking and not transfer.allowed and self.mode == "raise":
            raise BlockingTransfer(transfer)

    def _is_allowed(self, transfer: Transfer) -> bool:
        place = f"{transfer.site.rpartition(':')[0]}:{transfer.function}"
        for entry in self._allowed:
            kind, _, site = entry.rpartition(" ")
            if kind in ("", transfer.kind) and (place == site or place.endswith("/" + site)):
                return True
        return False

    @contextlib.contextmanager
    def _without_copies(self) -> Iterator[None]:
        """Copies to the device that the calling thread makes inside are entered by other means."""
        self._local.is_entered = True
        try:
            yield
        finally:
            self._local.is_entered = False

    @contextlib.contextmanager
    def _filling(self, with_number: bool) -> Iterator[None]:
        """The calling thread assigns a number of Python's, or not."""
        self._local.is_filling = with_number
        try:
            yield
        finally:
            self._local.is_filling = False

    def blocking(self) -> list[Transfer]:
        """Transfers that block and are not meant."""
        return blocking_of(self.transfers)

    def rows(self) -> list[dict[str, Any]]:
        """See `rows_of`."""
        return rows_of(self.transfers)

    def as_dict(self) -> dict[str, Any]:
        """Totals, and a row a call site, for programs."""
        return {"device": self.device_type, **totals_of(self.transfers)}

    def report(self) -> str:
        """A table for people: one row a call site, and totals."""
        return render(self.rows())

    def compare(self) -> dict[str, list[str]]:
        """Where this ledger and PyTorch's ``set_sync_debug_mode`` differ (CUDA, ``sync_debug=True``).

        Returns
        -------
        dict
            ``"missed"``: sites that PyTorch reported and this did not. ``"only_here"``: blocking sites
            that PyTorch did not report; copies of pageable memory with ``non_blocking`` belong here,
            and waits that were asked for.
        """
        ours = {t.site for t in self.transfers if t.blocking}
        theirs = set(self.sync_debug_sites)
        return {"missed": sorted(theirs - ours), "only_here": sorted(ours - theirs)}

    # ---- the rules

    def is_device(self, value: Any) -> bool:
        """Whether `value` is a tensor of the device that is watched."""
        return isinstance(value, torch.Tensor) and value.device.type == self.device_type

    def is_place(self, place: Any) -> bool:
        """Whether `place`, a device, its name, its number or None, is the device that is watched."""
        if place is None:
            return False
        if self.is_fake and fake_device.is_meant(place):
            return True
        return torch.device(place).type == self.device_type

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host is page-locked."""
        return fake_device.is_pinned(tensor) if self.is_fake else tensor.is_pinned()

    def note_copy(
        self, op: str, source: torch.Tensor, target: torch.Tensor, non_blocking: bool
    ) -> None:
        """Enter a copy of `source` to `target`, if it crosses."""
        if self.is_device(source) == self.is_device(target):
            return
        if self.is_device(target) and source.device.type == "cpu":
            pinned = self.is_pinned(source)
            direct = (source.is_contiguous() and source.shape == target.shape) or (
                source.dtype == target.dtype and _same_layout(source, target)
            )
            crosses = source if non_blocking else target
            nbytes = target.numel() * crosses.element_size()
            self.note(H2D, op, nbytes, pinned, not (non_blocking and pinned and direct))
        elif self.is_device(source) and target.device.type == "cpu":
            pinned = self.is_pinned(target)
            direct = target.is_contiguous() or (
                source.dtype == target.dtype and _same_layout(source, target)
            )
            crosses = target if non_blocking else source
            nbytes = target.numel() * crosses.element_size()
            self.note(D2H, op, nbytes, pinned, not (non_blocking and pinned and direct))


class _Functions(TorchFunctionMode):
    """What only the call in Python shows: tensors made of Python's data, on the device."""

    def __init__(self, ledger: TransferLedger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, ledger = getattr(func, "__name__", ""), self.ledger
        if name in fake_device.FROM_DATA:
            data = fake_device.data_of(name, args, kwargs)
            if not ledger.is_fake:  # which fetches them in sight
                for tensor in filter(ledger.is_device, fake_device.tensors_in(data)):
                    ledger.note(D2H, "item", tensor.element_size(), False, True)
            if self._is_for_device(name, args, kwargs) and not ledger.is_device(data):
                # The size is not known before. Nothing has been given out, should this raise.
                with ledger._without_copies():
                    made = func(*args, **kwargs)
                ledger.note(H2D, f"{name}(data, device)", made.nbytes, False, True)
                return made
        elif name in ("__repr__", "__format__") and ledger.is_device(args[0]):
            # It takes all modes off before it fetches what it shows.
            ledger.note(D2H, f"{name} (values)", args[0].nbytes, False, True)
        elif name in ("__getitem__", "__setitem__") and ledger.is_device(args[0]):
            for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                if fake_device.is_sequence(index):
                    nbytes = torch.as_tensor(index, device="cpu").nbytes
                    ledger.note(H2D, f"{name}[list]", nbytes, False, True)
            if ledger.is_fake:
                with ledger._without_copies():
                    args = (args[0], fake_device.indices_on(args[0].device, args[1]), *args[2:])
            is_number = len(args) > 2 and isinstance(args[2], int | float)
            if is_number and _selects_one(args[0], args[1]):
                # Not filled but copied to, since both sides are one number.
                ledger.note(H2D, f"{name}(number)", args[0].element_size(), False, True)
            with ledger._filling(is_number):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_for_device(self, name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
        if kwargs.get("device") is not None:
            return self.ledger.is_place(kwargs["device"])
        if name == "new_tensor":
            return self.ledger.is_device(args[0])
        return torch.get_default_device().type == self.ledger.device_type


def _selects_one(tensor: torch.Tensor, index: Any) -> bool:
    """Whether an index of plain numbers selects a single element."""
    numbers = index if isinstance(index, tuple) else (index,)
    return len(numbers) == tensor.dim() and all(
        isinstance(i, int) and not isinstance(i, bool) for i in numbers
    )


class _Operations(TorchDispatchMode):
    """Everything else: operations as the device gets them."""

    def __init__(self, ledger: TransferLedger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composite(func):
            # Elsewhere such operations are taken apart before they come here.
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        name, ledger = func._overloadpacket.__name__, self.ledger
        if name == "_to_copy":
            self._note_to_copy(args[0], kwargs)
        elif name == "copy_":
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            ledger.note_copy(name, args[1], args[0], bool(non_blocking))
        elif name == "_foreach_copy_":
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            for target, source in zip(args[0], args[1], strict=True):
                ledger.note_copy(name, source, target, bool(non_blocking))
        elif name in ("linspace", "logspace"):
            for x in filter(ledger.is_device, args):
                ledger.note(D2H, name, x.element_size(), False, True)
        elif name == "_local_scalar_dense":
            if ledger.is_device(args[0]):
                ledger.note(D2H, "item", args[0].element_size(), False, True)
        elif name in ("equal", "allclose"):
            if any(ledger.is_device(x) for x in args):
                ledger.note(D2H, name, 1, False, True)
        elif name in _FETCHES:
            place = _FETCHES[name]
            if len(args) > place and ledger.is_device(args[place]):
                ledger.note(D2H, f"{name} (number)", args[place].element_size(), False, True)
        elif name == "where":
            # A number of the host that is a tensor is copied first.
            if any(map(ledger.is_device, args)):
                for x in args:
                    if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                        ledger.note(H2D, "where (number)", x.nbytes, ledger.is_pinned(x), True)
        elif name in _SIZE_SYNCS:
            given_size = name == "repeat_interleave" and kwargs.get("output_size") is not None
            if not given_size and any(ledger.is_device(x) for x in pytree.tree_leaves(args)):
                ledger.note(D2H, f"{name} (size)", 8, False, True)
        elif name in fake_device.INDEXING:
            if ledger.is_device(args[0]):
                self._note_indices(name, args)
            elif name != "index" and ledger.is_device(args[2]):
                ledger.note(D2H, f"{name} of a number", args[2].nbytes, False, True)
        return func(*args, **kwargs)

    def _note_to_copy(self, source: torch.Tensor, kwargs: dict[str, Any]) -> None:
        ledger, place = self.ledger, kwargs.get("device")
        non_blocking = bool(kwargs.get("non_blocking"))
        dtype = kwargs.get("dtype") or source.dtype
        if source.device.type == "cpu" and ledger.is_place(place):
            pinned = ledger.is_pinned(source)
            direct = source.is_contiguous() or (dtype == source.dtype and _is_dense(source))
            nbytes = source.numel() * (source.dtype if non_blocking else dtype).itemsize
            ledger.note(H2D, "to", nbytes, pinned, not (non_blocking and pinned and direct))
        elif ledger.is_device(source) and place is not None and torch.device(place).type == "cpu":
            # With non_blocking PyTorch makes the target itself, page-locked.
            # It lies like the source, if that has no gaps.
            direct = source.is_contiguous() or dtype == source.dtype or not _is_dense(source)
            nbytes = source.numel() * (dtype if non_blocking else source.dtype).itemsize
            ledger.note(D2H, "to", nbytes, non_blocking, not (non_blocking and direct))

    def _note_indices(self, name: str, args: Sequence[Any]) -> None:
        ledger = self.ledger
        value = args[2] if name != "index" and len(args) > 2 else None
        accumulate = bool(args[3]) if name != "index" and len(args) > 3 else False
        # A number from the host fills where the mask says, and no size is asked for.
        is_number = getattr(ledger._local, "is_filling", False)
        is_fill = (
            value is not None
            and (is_number or (value.numel() == 1 and value.device.type == "cpu"))
            and not accumulate
            and all(i is None or i.dtype in (torch.bool, torch.uint8) for i in args[1])
        )
        indices = [index for index in args[1] if index is not None]
        for nbytes in fake_device.host_index_bytes(indices):
            ledger.note(H2D, f"{name}[host index]", nbytes, False, True)
        for index in filter(ledger.is_device, indices):
            if index.dtype in (torch.bool, torch.uint8) and not is_fill:
                ledger.note(D2H, f"{name}[mask] (size)", 8, False, True)
        if value is not None and not is_fill and (is_number or value.device.type == "cpu"):
            ledger.note(H2D, f"{name} (number)", value.nbytes, False, True)


# --- What is replaced while any ledger is open --------------------------------------------------

_open: list[TransferLedger] = []
_patches = contextlib.ExitStack()
_lock = threading.RLock()


@contextlib.contextmanager
def _patched(ledger: TransferLedger) -> Iterator[None]:
    """Let `ledger` know of waits and of new threads. All open ledgers share what is replaced for it."""
    with _lock:
        if not _open:
            _replace(threading.Thread, "start", _watched_start(threading.Thread.start))
            for owner, name in _waits():
                _replace(owner, name, _watched_wait(owner, name))
        _open.append(ledger)
    try:
        yield
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not ledger]
            if not _open:
                _patches.close()


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    before = getattr(owner, name)
    setattr(owner, name, function)
    _patches.callback(setattr, owner, name, before)


def _watched_start(start: Callable[..., None]) -> Callable[..., None]:
    """``Thread.start`` of threads that open ledgers watch."""

    @functools.wraps(start)
    def start_watched(thread: threading.Thread) -> None:
        run, ledgers = thread.run, tuple(_open)

        def watched_run() -> None:
            # A thread may outlive a ledger, which enters nothing more then.
            with contextlib.ExitStack() as stack:
                for ledger in ledgers:
                    stack.enter_context(ledger.attach())
                run()

        thread.run = watched_run
        start(thread)

    return start_watched


def _watched_wait(owner: Any, name: str) -> Callable[..., Any]:
    """A function that waits for the device, which ledgers of the calling thread note."""
    wait = getattr(owner, name)
    text = f"{owner.__name__.removeprefix('lab.')}.{name}"

    @functools.wraps(wait)
    def watched_wait(*args: Any, **kwargs: Any) -> Any:
        watching = [ledger for ledger in tuple(_open) if ledger.watches_this_thread()]
        for ledger in watching:
            ledger.note(SYNC, text, 0, None, True)
        if owner is not fake_device and any(ledger.is_fake for ledger in watching):
            return None
        return wait(*args, **kwargs)

    return watched_wait


def _waits() -> list[tuple[Any, str]]:
    """Functions by which the host waits for the device."""
    waits: list[tuple[Any, str]] = [(fake_device, "synchronize")]
    waits += [(torch.cuda, "synchronize"), (torch.accelerator, "synchronize")]
    waits += [(torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")]
    waits += [(torch.Event, "synchronize"), (torch.Stream, "synchronize")]
    return [(owner, name) for owner, name in waits if _is_settable(owner, name)]


def _is_settable(owner: Any, name: str) -> bool:
    """Whether this attribute of a module or class can be put in another's place."""
    if not hasattr(owner, name):
        return False
    try:
        setattr(owner, name, getattr(owner, name))
    except (TypeError, AttributeError):
        return False
    return True


@functools.cache
def _is_composite(op: Any) -> bool:
    """Whether an operation is made of others."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), "CompositeImplicitAutograd")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements lie in memory without gaps and without sharing it, in whatever order."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether copying one to the other is copying one piece of memory."""
    return a.shape == b.shape and a.stride() == b.stride() and _is_dense(a)


# Files that stand between the code that is watched and PyTorch.
_HERE: Final = (
    __file__,
    fake_device.__file__,
    str(Path(__file__).with_name("fake_engine.py")),
    warnings.__file__,
)
_TORCH: Final = str(Path(torch.__file__).parent) + os.sep


def _sites() -> tuple[tuple[str, str], tuple[str, str]]:
    """``file:line`` and function of the code that called PyTorch, and of its caller."""
    found: list[tuple[str, str]] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if not (name in _HERE or name.startswith((_TORCH, "<")) or "/triton/" in name):
            found.append((f"{short_path(name)}:{frame.f_lineno}", frame.f_code.co_name))
        frame = frame.f_back
    found += [("?", "?")] * (2 - len(found))
    return found[0], found[1]


@functools.cache
def short_path(file: str) -> str:
    """A path from the package's own folder on, or else its last two parts."""
    parts = Path(file).parts
    if "sglang" in parts:
        last = len(parts) - 1 - parts[::-1].index("sglang")
        return "/".join(parts[last:])
    return "/".join(parts[-2:])


def blocking_of(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Those that block and are not meant."""
    return [t for t in transfers if t.blocking and not t.allowed]


def totals_of(transfers: Sequence[Transfer]) -> dict[str, Any]:
    """Counts, bytes, and a row a call site."""
    return {
        "transfers": len(transfers),
        "blocking": len(blocking_of(transfers)),
        "allowed": sum(t.allowed for t in transfers),
        "asynchronous": sum(not t.blocking for t in transfers),
        "bytes": sum(t.nbytes for t in transfers),
        "rows": rows_of(transfers),
    }


def rows_of(transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """One row a call site, in order of appearance; bytes and calls are sums."""
    calls: Counter[tuple] = Counter()
    nbytes: Counter[tuple] = Counter()
    names = ("site", "function", "via", "kind", "op", "pinned", "blocking", "allowed")
    for transfer in transfers:
        key = tuple(getattr(transfer, name) for name in names)
        calls[key] += 1
        nbytes[key] += transfer.nbytes
    return [
        dict(zip(names, key, strict=True)) | {"calls": calls[key], "bytes": nbytes[key]}
        for key in calls
    ]


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `rows_of` as a table with totals."""
    heads = ("what", "kind", "calls", "bytes", "memory", "operation", "where")
    lines = [heads]
    for row in rows:
        what = "allowed" if row["allowed"] else "BLOCKS" if row["blocking"] else "async"
        memory = {None: "-", True: "pinned", False: "pageable"}[row["pinned"]]
        where = f"{row['site']} {row['function']}, via {row['via']}"
        lines.append(
            (what, row["kind"], str(row["calls"]), str(row["bytes"]), memory, row["op"], where)
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    right = (False, False, True, True, False, False, False)
    table = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]
    blocking = sum(r["calls"] for r in rows if r["blocking"] and not r["allowed"])
    meant = sum(r["calls"] for r in rows if r["blocking"] and r["allowed"])
    rest = sum(r["calls"] for r in rows if not r["blocking"])
    table.append(f"{blocking} blocking, {meant} blocking and allowed, {rest} asynchronous")
    return "\n".join(table)
