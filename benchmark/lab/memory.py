"""What a decode step takes of memory beyond what is there when it starts, and what penalties hold.

On a CPU the bytes of all tensors are followed from the operation that made them until their memory is
given back; what an operation takes for itself and gives back before it ends is not seen. On CUDA the
allocator knows.
"""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab import devices, metrics
from lab.cases import Case, Setup
from lab.sessions import Probe, Session

# Decode steps at either end of a round that are not looked at: they stand beside prefill and end.
EDGE = 2


class Allocations:
    """Bytes of the tensors that operations on the threads that use it have made and not given back.

    Attributes
    ----------
    live, peak : int
        Now, and at most since `reset_peak`.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._known: set[int] = set()
        # A storage may be given back on a thread that is in here.
        self._lock = threading.RLock()

    def attach(self) -> TorchDispatchMode:
        """A context for one thread whose operations are followed."""
        return _Followed(self)

    def reset_peak(self) -> None:
        """Let `peak` begin anew."""
        self.peak = self.live

    def note(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        with self._lock:
            if key in self._known:
                return
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        # PyTorch keeps the Python object of a storage as long as the storage.
        weakref.finalize(storage, self._given_back, key, nbytes).atexit = False

    def _given_back(self, key: int, nbytes: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.live -= nbytes


class _Followed(TorchDispatchMode):
    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self._allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self._allocations.note(leaf)
        return found


class _Boundaries(Probe):
    """Notes what each step took, when it has been handled."""

    def __init__(self, allocations: Allocations | None) -> None:
        super().__init__()
        self._allocations = allocations
        self._before = 0
        self.peaks: list[int] = []
        self.penalty_bytes = 0

    def __call__(self, record: metrics.StepRecord) -> None:
        if record.forward_mode == "DECODE" and record.num_tokens > 0:
            self.peaks.append(self._peak() - self._before)
            self.penalty_bytes = max(self.penalty_bytes, penalty_bytes(self.scheduler))
        self._reset()
        super().__call__(record)

    def forget(self) -> None:
        """Begin anew: whatever is noted from now on is of another round."""
        self.peaks.clear()
        self.penalty_bytes = 0

    def _peak(self) -> int:
        return self._allocations.peak if self._allocations else torch.cuda.max_memory_allocated()

    def _reset(self) -> None:
        if self._allocations:
            self._before = self._allocations.live
            self._allocations.reset_peak()
        else:
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()


def penalty_bytes(scheduler: Any) -> int:
    """Bytes that penalties and logit bias hold between two steps, on any commit.

    Parameters
    ----------
    scheduler : Scheduler
    """
    state = getattr(scheduler, "penalty_state", None)
    if state is not None:
        return state.nbytes
    info = scheduler.running_batch.sampling_info
    names = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")
    tensors = [getattr(info, name, None) for name in names]
    for penalizer in getattr(info.penalizer_orchestrator, "penalizers", {}).values():
        tensors += vars(penalizer).values()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


class MemorySession(Session):
    """Runs rounds of cases of the question ``memory``.

    Parameters
    ----------
    setup : Setup
        Without overlap, else the steps' memory is mixed.
    scratch : Path
        Directory for tiny models.
    """

    def __init__(self, setup: Setup, scratch: Path) -> None:
        if setup.overlap:
            raise ValueError("setup.overlap must be False to tell the steps' memory apart")
        self._allocations = Allocations() if devices.chosen() == "cpu" else None
        overrides = (
            {} if self._allocations is None else {"thread_context": self._allocations.attach}
        )
        self._is_warm = False
        super().__init__(setup, scratch, **overrides)

    def make_probe(self) -> Probe:
        self._boundaries = _Boundaries(self._allocations)
        return self._boundaries

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> metrics.Round:
        self._boundaries.forget()
        return super().generate(prompts, params)

    def run_round(self, case: Case) -> dict[str, float]:
        """Run the case once.

        Returns
        -------
        dict of str to float
            ``peak_step_bytes``: what a decode step takes at most beyond what is there when it starts.
            ``penalty_state_bytes``: see `penalty_bytes`.

        Raises
        ------
        WorkNotDone
            If the engine did something else than the work that was asked for.
        """
        if not self._is_warm:
            self._generate_checked(case)
            self._is_warm = True
        # Else the collector decides in which step something old is given back.
        gc.collect()
        gc.disable()
        try:
            self._generate_checked(case)
        finally:
            gc.enable()
        metrics.check_pools(self.engine.scheduler)
        peaks = self._boundaries.peaks[EDGE:-EDGE]
        if not peaks:
            raise metrics.WorkNotDone(f"{len(self._boundaries.peaks)} decode steps are too few")
        if case.penalties and not self._boundaries.penalty_bytes:
            raise metrics.WorkNotDone("penalties hold nothing, or it is not known where")
        return {
            "peak_step_bytes": float(max(peaks)),
            "penalty_state_bytes": float(self._boundaries.penalty_bytes),
        }
