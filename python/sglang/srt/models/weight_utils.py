"""Which tensor of a checkpoint goes where, with nothing forgotten and nothing made up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Transform = Callable[[torch.Tensor], torch.Tensor]

# Buffers that old checkpoints carry and that are computed here.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class WeightTable:
    """The tensors that a model wants, by the name that checkpoints give them."""

    def __init__(self) -> None:
        self._targets: dict[str, tuple[torch.Tensor, Transform | None]] = {}
        self._ignored: set[str] = set()
        self._optional: set[str] = set()

    def add(
        self,
        name: str,
        target: torch.Tensor,
        transform: Transform | None = None,
        optional: bool = False,
    ) -> None:
        """Want `name`, of the shape of `target`, and copy it there through `transform`."""
        self._targets[name] = (target, transform)
        if optional:
            self._optional.add(name)

    def ignore(self, name: str) -> None:
        """Accept `name` in a checkpoint, and drop it."""
        self._ignored.add(name)

    def items(self) -> Iterable[tuple[str, torch.Size]]:
        """Names and shapes, in the order in which they were added."""
        return ((name, target.shape) for name, (target, _) in self._targets.items())

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy `weights` to their targets.

        Returns
        -------
        set of str
            The names that were loaded.

        Raises
        ------
        ValueError
            If a tensor is missing, unexpected, comes twice or has another shape; names it.
        """
        loaded: set[str] = set()
        unexpected: list[str] = []
        for name, tensor in weights:
            if name in self._ignored or name.endswith(_IGNORED_SUFFIXES):
                continue
            if name not in self._targets:
                unexpected.append(name)
            elif name in loaded:
                raise ValueError(f"weight {name} comes twice")
            else:
                self._copy(name, tensor)
                loaded.add(name)
        missing = [n for n in self._targets if n not in loaded and n not in self._optional]
        if missing:
            raise ValueError(f"missing weights: {_listed(missing)}")
        if unexpected:
            raise ValueError(f"unexpected weights: {_listed(unexpected)}")
        return loaded

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        target, transform = self._targets[name]
        if tensor.shape != target.shape:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}"
            )
        if tensor.is_floating_point() != target.is_floating_point():
            raise ValueError(f"weight {name} has type {tensor.dtype}, expected {target.dtype}")
        with torch.no_grad():
            target.copy_(tensor if transform is None else transform(tensor))


def _listed(names: list[str], most: int = 8) -> str:
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
