"""All penalizers of a batch, kept in step with its requests."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class BatchedPenalizerOrchestrator:
    """The penalizers of one batch of ``B`` requests.

    A penalizer holds tensors only while a request of the batch needs it. Which request needs which is
    noted on the host when the batch is made, so nothing here looks at the requests again, and the order
    in which a batch updates its requests and its penalizers does not matter.

    State is written in place by `cumulate_output_tokens` alone, on the scheduler thread. Forwards that
    run meanwhile get copies (`accumulate_additive_penalties`, `accumulate_scaling_penalties`).

    Parameters
    ----------
    vocab_size : int
        Columns of the logits.
    batch : ScheduleBatch
        Its ``reqs`` and ``device`` are read, and no reference is kept.
    penalizers : sequence of type
        Classes, in the order in which they act. Multiplicative ones act after all others.

    Attributes
    ----------
    is_required : bool
        Whether any request of the batch needs any penalizer.
    """

    def __init__(
        self, vocab_size: int, batch: ScheduleBatch, penalizers: Sequence[type[_BatchedPenalizer]]
    ) -> None:
        reqs = batch.reqs
        ordered = sorted(penalizers, key=lambda cls: cls.is_multiplicative)
        self.penalizers = {cls: cls(vocab_size, batch.device) for cls in ordered}
        self.is_required = False
        # Bit i of an entry: that request needs penalizer i.
        self._needs = [0] * len(reqs)
        for i, penalizer in enumerate(self.penalizers.values()):
            needed = [penalizer.is_required_by(req) for req in reqs]
            if any(needed):
                penalizer.prepare(reqs)
                self._needs = [
                    bits | yes << i for bits, yes in zip(self._needs, needed, strict=True)
                ]
                self.is_required = True

    def __len__(self) -> int:
        return len(self._needs)

    @property
    def needs_additive(self) -> bool:
        """Whether any request needs a penalizer that adds."""
        return any(not p.is_multiplicative for p in self._prepared())

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        """Count one more token of every request.

        Parameters
        ----------
        output_ids : Tensor, shape (B,), int64
            Tokens of the vocabulary, on the device.
        """
        for penalizer in self._prepared():
            penalizer.cumulate_output_tokens(output_ids)

    def apply(self, logits: torch.Tensor, repeat: int | None = None) -> None:
        """Penalize `logits` in place: additive penalties, then scaling ones.

        Parameters
        ----------
        logits : Tensor, shape (B * repeat, vocab_size), float32
            Rows of one request lie together.
        repeat : int, optional
            Rows of each request, 1 without.
        """
        logits = logits.view(-1, repeat or 1, logits.shape[-1])
        for penalizer in self._prepared():
            penalizer.apply(logits)

    def accumulate_additive_penalties(self, logits: torch.Tensor) -> None:
        """Add the additive penalties to `logits`, shape (B, vocab_size), float32, in place."""
        for penalizer in self._prepared():
            if not penalizer.is_multiplicative:
                penalizer.apply(logits.unsqueeze(1))

    def accumulate_scaling_penalties(self) -> torch.Tensor | None:
        """A copy of the scaling penalties' product, shape (B, vocab_size); None if there are none."""
        result = None
        for penalizer in self._prepared():
            if penalizer.is_multiplicative:
                scaling = penalizer.get_scaling_penalties()
                result = scaling.clone() if result is None else result.mul_(scaling)
        return result

    def filter(self, keep_indices: list[int], keep_indices_device: torch.Tensor) -> None:
        """Keep the requests at `keep_indices`, given as a list and as an int64 tensor."""
        self._needs = [self._needs[i] for i in keep_indices]
        if not self.is_required:
            return
        needed = 0
        for bits in set(self._needs):
            needed |= bits
        for i, penalizer in enumerate(self.penalizers.values()):
            if needed >> i & 1:
                penalizer.filter(keep_indices_device)
            else:
                penalizer.teardown()
        self.is_required = needed != 0

    def merge(self, their: BatchedPenalizerOrchestrator) -> None:
        """Append the requests of `their`, which is not changed."""
        ours = len(self)
        self._needs = self._needs + their._needs
        if not self.is_required and not their.is_required:
            return
        for cls, penalizer in self.penalizers.items():
            penalizer.merge(their.penalizers[cls], ours, len(their))
        self.is_required = True

    def release(self) -> None:
        """Give up all state; the batch has no request left."""
        self._needs = []
        self.is_required = False
        for penalizer in self.penalizers.values():
            penalizer.teardown()

    def _prepared(self) -> list[_BatchedPenalizer]:
        return [p for p in self.penalizers.values() if p.is_prepared()]


class _BatchedPenalizer(abc.ABC):
    """One kind of penalty for a batch of requests, one dense row for each.

    A subclass names its tensors in `state`. Row b of each belongs to request b. A request that does not
    need the penalty has a neutral row, whatever tokens it generates: this is why a penalizer may be
    prepared late, when a request that needs it joins.
    """

    is_multiplicative: ClassVar[bool] = False
    state: ClassVar[tuple[str, ...]]

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._is_prepared = False

    def is_prepared(self) -> bool:
        """Whether the tensors exist."""
        return self._is_prepared

    def prepare(self, reqs: Sequence[Req]) -> None:
        """Make the tensors for requests that have generated nothing yet."""
        self._set_state(self._prepare(reqs))

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        """Count one more token of each request, shape (B,)."""
        self._cumulate_output_tokens(output_ids)

    def apply(self, logits: torch.Tensor) -> None:
        """Penalize `logits`, shape (B, rows of a request, vocab_size), in place."""
        self._apply(logits)

    def filter(self, keep_indices: torch.Tensor) -> None:
        """Keep the rows at `keep_indices`, shape (kept,), int64."""
        for name in self.state:
            setattr(self, name, getattr(self, name)[keep_indices])

    def merge(self, their: _BatchedPenalizer, our_len: int, their_len: int) -> None:
        """Append the rows of `their`; rows that one side has not made are neutral."""
        if not self._is_prepared and not their._is_prepared:
            return
        ours = self._get_state() if self._is_prepared else self._neutral(our_len)
        theirs = their._get_state() if their._is_prepared else self._neutral(their_len)
        self._set_state([torch.cat(pair) for pair in zip(ours, theirs, strict=True)])

    def teardown(self) -> None:
        """Give up the tensors."""
        if self._is_prepared:
            self._is_prepared = False
            for name in self.state:
                delattr(self, name)

    def get_scaling_penalties(self) -> torch.Tensor:
        """Factors of multiplicative penalizers, shape (B, vocab_size); not a copy."""
        raise NotImplementedError

    def _get_state(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.state]

    def _set_state(self, tensors: Sequence[torch.Tensor]) -> None:
        self._is_prepared = True
        for name, tensor in zip(self.state, tensors, strict=True):
            setattr(self, name, tensor)

    def _full(self, rows: int, columns: int, value: float, dtype=torch.float32) -> torch.Tensor:
        return torch.full((rows, columns), value, dtype=dtype, device=self.device)

    @staticmethod
    @abc.abstractmethod
    def is_required_by(req: Req) -> bool:
        """Whether `req` needs this penalty."""

    @abc.abstractmethod
    def _prepare(self, reqs: Sequence[Req]) -> list[torch.Tensor]:
        """Tensors of `state` for requests that have generated nothing."""

    @abc.abstractmethod
    def _neutral(self, rows: int) -> list[torch.Tensor]:
        """Tensors of `state` for requests that do not need the penalty."""

    @abc.abstractmethod
    def _cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        """See `cumulate_output_tokens`."""

    @abc.abstractmethod
    def _apply(self, logits: torch.Tensor) -> None:
        """See `apply`."""
