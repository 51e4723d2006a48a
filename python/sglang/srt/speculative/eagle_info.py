"""What EAGLE speculation carries from one phase, or one step, to the next."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from sglang.srt.speculative.eagle_info_v2 import EagleDraftInputV2Mixin
from sglang.srt.speculative.eagle_tree import DraftTree


@dataclass
class EagleDraftInput(EagleDraftInputV2Mixin):
    """What the next draft of ``B`` requests starts from.

    On a batch between two steps the values exist only in flight, and ``future_indices`` says where
    the forward will find them. Inside a forward it is the other way round.

    Attributes
    ----------
    verified_id : Tensor, shape (B,), int64
        Last committed token, the root of the next tree. It has no KV yet.
    new_seq_lens : Tensor, shape (B,), int64
        Tokens with committed KV, which is also the position of ``verified_id``.
    topk_p : Tensor, shape (B, topk), float32
        The draft's probabilities of its best tokens behind ``verified_id``, best first.
    topk_index : Tensor, shape (B, topk), int64
        Those tokens, as ids of the target's vocabulary.
    hidden_states : Tensor, shape (B, hidden_size)
        The draft's feature from which they were predicted.
    future_indices : Tensor, shape (B,), int64
        Rows of the `FutureMap`.
    """

    verified_id: torch.Tensor | None = None
    new_seq_lens: torch.Tensor | None = None
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    future_indices: torch.Tensor | None = None

    def filter_batch(self, new_indices: torch.Tensor) -> None:
        """Keep the requests at `new_indices`, shape (kept,), int64, in that order."""
        for name in _TENSOR_FIELDS:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value.index_select(0, new_indices))

    def merge_batch(self, spec_info: EagleDraftInput) -> None:
        """Append the requests of `spec_info`.

        Raises
        ------
        ValueError
            If one side holds values that the other one does not.
        """
        for name in _TENSOR_FIELDS:
            mine, other = getattr(self, name), getattr(spec_info, name)
            if (mine is None) != (other is None):
                raise ValueError(f"cannot merge draft inputs: only one of them has {name}")
            if mine is not None:
                setattr(self, name, torch.cat((mine, other)))


_TENSOR_FIELDS = tuple(f.name for f in fields(EagleDraftInput))


@dataclass
class EagleVerifyInput:
    """A draft tree for each of ``B`` requests, as the target is asked about it.

    Attributes
    ----------
    draft_token : Tensor, shape (B * D,), int64
        Tokens of the nodes, the root (last committed token) first, parents before children.
    parents : Tensor, shape (B, D), int64
        Node that each node continues, -1 for the root.
    depth : Tensor, shape (B, D), int64
        Distance from the root.
    ancestor_mask : Tensor, shape (B, D, D), bool
        Nodes that each node sees: its ancestors, root and itself included.
    draft_token_num : int
        Nodes of a tree, ``D``.
    spec_steps : int
        Greatest depth.
    topk : int
        Most children of a node; 1 makes the tree a chain.
    """

    draft_token: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    ancestor_mask: torch.Tensor
    draft_token_num: int
    spec_steps: int
    topk: int

    @classmethod
    def from_tree(cls, tree: DraftTree, spec_steps: int, topk: int) -> EagleVerifyInput:
        """Ask the target about `tree`, whose depth is at most `spec_steps`."""
        return cls(
            draft_token=tree.tokens.flatten(),
            parents=tree.parents,
            depth=tree.depth,
            ancestor_mask=tree.ancestor_mask,
            draft_token_num=tree.tokens.shape[1],
            spec_steps=spec_steps,
            topk=topk,
        )

    @property
    def tree(self) -> DraftTree:
        """The nodes of each request in a row."""
        tokens = self.draft_token.view(-1, self.draft_token_num)
        return DraftTree(tokens, self.parents, self.depth, self.ancestor_mask)

    def filter_batch(self, new_indices: torch.Tensor) -> None:
        """A verification lives inside one forward and is never filtered."""
        raise NotImplementedError("EagleVerifyInput does not outlive its forward")

    def merge_batch(self, spec_info: EagleVerifyInput) -> None:
        """A verification lives inside one forward and is never merged."""
        raise NotImplementedError("EagleVerifyInput does not outlive its forward")


# What becomes of each field, in the words of ``SCHEDULE_BATCH_RULES`` (managers/schedule_batch.py).
EAGLE_DRAFT_INPUT_RULES: dict[str, str | tuple[str, str]] = {
    "verified_id": "concatenate",
    "new_seq_lens": "concatenate",
    "topk_p": "concatenate",
    "topk_index": "concatenate",
    "hidden_states": "concatenate",
    "future_indices": "concatenate",
}
EAGLE_VERIFY_INPUT_RULES: dict[str, str | tuple[str, str]] = {
    "draft_token": ("rebuilt-per-step", "lives inside one forward"),
    "parents": ("rebuilt-per-step", "lives inside one forward"),
    "depth": ("rebuilt-per-step", "lives inside one forward"),
    "ancestor_mask": ("rebuilt-per-step", "lives inside one forward"),
    "draft_token_num": ("rebuilt-per-step", "lives inside one forward"),
    "spec_steps": ("rebuilt-per-step", "lives inside one forward"),
    "topk": ("rebuilt-per-step", "lives inside one forward"),
}
