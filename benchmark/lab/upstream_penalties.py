"""The penalizers of a real release of SGLang, as they lie in ``.cache/upstream``, and a batch of them.

Only the six files of the release's ``penaltylib`` are run, in modules with names of their own, so that
the ``sglang`` which is installed stays what it is. These files ask for each other, and for two functions
of ``sglang.srt.utils``, by absolute names, one of them at run time. An ``__import__`` in the modules'
builtins answers such names; everything else is imported as ever.
"""

from __future__ import annotations

import builtins
import os
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Protocol

import torch

VERSION: Final = "0.5.14"
UPSTREAM: Final = Path(__file__).resolve().parents[2] / ".cache" / "upstream"
_PENALTYLIB: Final = "sglang.srt.sampling.penaltylib"
_PENALIZERS: Final = (
    "BatchedFrequencyPenalizer",
    "BatchedPresencePenalizer",
    "BatchedMinNewTokensPenalizer",
    "BatchedRepetitionPenalizer",
)


class Params(Protocol):
    """What is read of a request."""

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    stop_token_ids: Collection[int]


def folder(version: str = VERSION, root: Path = UPSTREAM) -> Path:
    """Where a release's penalizers lie, whether they do or not."""
    return root / version / "python" / Path(*_PENALTYLIB.split("."))


def is_there(version: str = VERSION) -> bool:
    """Whether the release has been fetched."""
    return (folder(version) / "orchestrator.py").is_file()


def why_eager(device: str) -> str | None:
    """Why ``torch.compile`` can compile nothing for `device` here; None where it can."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler: upstream's torch.compile is off, its scaling runs eagerly"
    if device == "cuda":
        import importlib.util

        if importlib.util.find_spec("triton") is None:
            return "no Triton: upstream's torch.compile is off, its scaling runs eagerly"
    return None


class Penaltylib:
    """The modules of a release's ``penaltylib``.

    Parameters
    ----------
    path : Path
        The folder, see `folder`.
    compiles : bool
        Whether ``torch.compile`` is on, as upstream has it. Else it is off, as upstream has it on NPUs.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.

    Attributes
    ----------
    orchestrator : type
        ``BatchedPenalizerOrchestrator``.
    penalizers : tuple of type
        In the order in which the penalties are documented to act. Upstream gives a set of classes, whose
        order, and with it the result, differs from process to process.
    apply_scaling_penalties : callable
        As upstream's.
    """

    def __init__(self, path: Path, compiles: bool = True) -> None:
        if not (path / "orchestrator.py").is_file():
            version = path.parents[len(_PENALTYLIB.split("."))].name
            raise FileNotFoundError(
                f"SGLang {version} is not in .cache/upstream: run `make upstream` to get it"
            )
        self._path = path
        self._modules: dict[str, ModuleType] = {}
        utils = SimpleNamespace(
            get_compiler_backend=lambda *_, **__: "inductor", is_npu=lambda: not compiles
        )
        self._others = {"sglang.srt.utils": utils, "sglang.srt.utils.common": utils}
        self.orchestrator = self._module("orchestrator").BatchedPenalizerOrchestrator
        package = self._module("__init__")
        self.penalizers = tuple(getattr(package, name) for name in _PENALIZERS)
        self.apply_scaling_penalties: Callable[..., None] = self._module(
            "repetition_penalty"
        ).apply_scaling_penalties

    def _module(self, name: str) -> ModuleType:
        if name not in self._modules:
            source = self._path / f"{name}.py"
            # A name that no package has, by which torch.compile may look the module up.
            module = ModuleType(f"lab_upstream_penaltylib_{id(self):x}_{name}")
            vars(module)["__builtins__"] = vars(builtins) | {"__import__": self._import}
            module.__file__ = str(source)
            sys.modules[module.__name__] = self._modules[name] = module
            exec(compile(source.read_text(), str(source), "exec"), vars(module))
        return self._modules[name]

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        if level == 0 and name.partition(".")[0] == "sglang":
            if name in self._others:
                return self._others[name]
            package, _, module = name.rpartition(".")
            if package == _PENALTYLIB and fromlist:
                return self._module(module)
            raise ImportError(f"upstream's penalizers ask for {name}, which is not given to them")
        return builtins.__import__(name, globals, locals, fromlist, level)


@lru_cache
def load(version: str = VERSION, compiles: bool = True) -> Penaltylib:
    """The penalizers of a release.

    Raises
    ------
    FileNotFoundError
        If the release has not been fetched.
    """
    return Penaltylib(folder(version), compiles)


class _Batch:
    """What a ``ScheduleBatch`` is to its penalizers, which keep a weak reference to it."""

    def __init__(self, reqs: list[Any], device: torch.device) -> None:
        self.reqs = reqs
        self.device = device


def _request(params: Params) -> Any:
    # Upstream adds the tokenizer's end-of-sequence token to a request's own stop tokens.
    stops = sorted(params.stop_token_ids)
    sampling = SimpleNamespace(
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=set(stops[:-1]),
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=stops[-1])
    return SimpleNamespace(sampling_params=sampling, tokenizer=tokenizer)


class UpstreamPenalties:
    """The penalties of a batch of ``B`` requests, as an engine of the release uses them.

    Without overlap a step is `cumulate` and `apply`. With overlap it is `cumulate`, `accumulate` on the
    scheduler's side, which copies what the forward needs, and `apply_accumulated` in the forward.

    Parameters
    ----------
    library : Penaltylib
    requests : sequence of Params
    vocab_size : int
    device : torch.device
    """

    def __init__(
        self,
        library: Penaltylib,
        requests: Sequence[Params],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._library = library
        self._vocab_size = vocab_size
        self._batch = _Batch([_request(request) for request in requests], device)
        self._orchestrator = self._orchestrate(self._batch)
        self._accumulated: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def _orchestrate(self, batch: _Batch) -> Any:
        return self._library.orchestrator(self._vocab_size, batch, self._library.penalizers)

    @property
    def nbytes(self) -> int:
        """Bytes that the penalizers hold between steps."""
        held = [
            value.untyped_storage()
            for penalizer in self._orchestrator.penalizers.values()
            for value in vars(penalizer).values()
            if isinstance(value, torch.Tensor)
        ]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    def cumulate(self, ids: torch.Tensor) -> None:
        """Count a token of each request, shape (B,), int64."""
        self._orchestrator.cumulate_output_tokens(ids)

    def apply(self, logits: torch.Tensor, repeat: int | None = None) -> None:
        """Penalize `logits`, shape (B * repeat, V), in place, as without overlap."""
        self._orchestrator.apply(logits, repeat)

    def accumulate(self) -> None:
        """Make the dense tensors that a forward takes along under overlap."""
        shape = (len(self._batch.reqs), self._vocab_size)
        additive = torch.zeros(shape, dtype=torch.float32, device=self._batch.device)
        self._orchestrator.accumulate_additive_penalties(additive)
        self._accumulated = additive, self._orchestrator.accumulate_scaling_penalties()

    def apply_accumulated(self, logits: torch.Tensor, repeat: int | None = None) -> None:
        """Penalize `logits` by what `accumulate` made, which is given up."""
        assert self._accumulated is not None
        additive, scaling = self._accumulated
        self._accumulated = None
        logits.add_(_repeated(additive, repeat))
        if scaling is not None:
            self._library.apply_scaling_penalties(logits, _repeated(scaling, repeat))

    def finish_and_join(self, row: int, request: Params) -> None:
        """Let the request at `row` go, and another one join behind the last."""
        batch = self._batch
        keep = [i for i in range(len(batch.reqs)) if i != row]
        batch.reqs = [batch.reqs[i] for i in keep]
        joining = _Batch([_request(request)], batch.device)
        theirs = self._orchestrate(joining)
        if keep:
            index = torch.tensor(keep, dtype=torch.int64).to(batch.device, non_blocking=True)
            self._orchestrator.filter(index)
            self._orchestrator.merge(theirs)
            batch.reqs = batch.reqs + joining.reqs
        else:
            # An engine drops an empty batch, and the joining one takes its place.
            self._batch, self._orchestrator = joining, theirs


def _repeated(rows: torch.Tensor, repeat: int | None) -> torch.Tensor:
    return rows if repeat is None else torch.repeat_interleave(rows, repeat, dim=0)
