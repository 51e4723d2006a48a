"""Draft trees as tensors: how one is grown, chosen, and walked once the target has spoken.

All shapes are fixed: the host learns nothing of a tree, so nothing waits for the device. ``B`` is
the number of requests, ``K`` the branching factor (``topk``), ``S`` the depth (``num_steps``),
``D`` the nodes of a tree, its root included (``num_draft_tokens``).

The draft grows candidates level by level. All ``K`` tokens of level 1 are in its beam; each later
level has ``K * K`` candidates, the ``K`` best continuations of every beam entry, of which the ``K``
best are the next beam. Candidates are numbered level by level, and inside a level by beam entry,
then by rank::

    level       1            2                     3
    candidate   0 .. K-1     K .. K+K*K-1          K+K*K .. K+2*K*K-1

so a parent has a lower number than its children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


def num_candidates(num_steps: int, topk: int) -> int:
    """Number of tokens that a draft of `num_steps` levels proposes."""
    return topk + (num_steps - 1) * topk * topk


def max_num_draft_tokens(num_steps: int, topk: int) -> int:
    """Largest tree, root included, that the candidates of a draft can fill."""
    return 1 + num_candidates(num_steps, topk)


class DraftCandidates:
    """The candidates of a draft while it grows, and the beam that it grows from.

    Parameters
    ----------
    topk_p : Tensor, shape (B, K), float32
        Probabilities of the tokens of level 1, best first.
    topk_index : Tensor, shape (B, K), int64
        Those tokens.
    self_masks : Tensor, shape (S - 1, K, W + 2), bool
        From `beam_self_masks`.

    Attributes
    ----------
    beam_scores, beam_tokens : Tensor, shape (B, K)
        Scores (products of probabilities) and tokens of the beam, best first.
    beam_mask : Tensor, shape (B, K, W + 2), bool
        What the beam entries see of the positions behind the prefix, where the beam of level ``i``
        takes the places ``(i - 1) * K .. i * K - 1``: their ancestors and themselves. Padded as by
        `pad_local_mask`.
    """

    def __init__(
        self, topk_p: torch.Tensor, topk_index: torch.Tensor, self_masks: torch.Tensor
    ) -> None:
        batch_size, topk = topk_p.shape
        self.beam_scores = topk_p
        self.beam_tokens = topk_index
        self._self_masks = self_masks
        if len(self_masks) > 0:
            self.beam_mask = self_masks[0].expand(batch_size, -1, -1)
        self._beam_numbers = torch.arange(topk, device=topk_p.device).expand(batch_size, -1)
        self._tokens = [topk_index]
        self._scores = [topk_p]
        self._parents = [torch.full_like(topk_index, -1)]

    def add_level(self, topk_p: torch.Tensor, topk_index: torch.Tensor) -> None:
        """Add the best continuations of the beam.

        Parameters
        ----------
        topk_p : Tensor, shape (B, K, K), float32
            Probabilities of each beam entry's continuations, best first.
        topk_index : Tensor, shape (B, K, K), int64
            Their tokens.
        """
        self._scores.append((self.beam_scores.unsqueeze(-1) * topk_p).flatten(1))
        self._tokens.append(topk_index.flatten(1))
        self._parents.append(self._beam_numbers.unsqueeze(-1).expand_as(topk_index).flatten(1))

    def select_beam(self) -> torch.Tensor:
        """Make the best of the level that was added last the beam.

        Of equal scores the candidate with the lower number wins.

        Returns
        -------
        Tensor, shape (B, K), int64
            The entry of the beam before that each new entry continues.
        """
        topk = self.beam_tokens.shape[1]
        level = len(self._scores)
        scores, order = torch.sort(self._scores[-1], dim=-1, descending=True, stable=True)
        choices = order[:, :topk]
        parents = torch.div(choices, topk, rounding_mode="floor")
        self.beam_scores = scores[:, :topk]
        self.beam_tokens = self._tokens[-1].gather(1, choices)
        self._beam_numbers = choices + num_candidates(level - 1, topk)
        rows = parents.unsqueeze(-1).expand(-1, -1, self.beam_mask.shape[-1])
        self.beam_mask = self.beam_mask.gather(1, rows) | self._self_masks[level - 1]
        return parents

    def build_tree(self, root_tokens: torch.Tensor, num_draft_tokens: int) -> DraftTree:
        """Keep the best candidates of all levels, see `build_tree`."""
        return build_tree(
            root_tokens,
            torch.cat(self._tokens, dim=1),
            torch.cat(self._scores, dim=1),
            torch.cat(self._parents, dim=1),
            num_draft_tokens,
            num_steps=len(self._scores),
        )


def beam_self_masks(num_steps: int, topk: int, device: torch.device) -> torch.Tensor:
    """What the beam entries of each level see besides their ancestors: the prefix and themselves.

    Returns
    -------
    Tensor, shape (S - 1, K, W + 2), bool
        For levels 1 to S - 1, which the draft model reads; ``W = (S - 1) * K`` places behind the
        prefix, padded as by `pad_local_mask`.
    """
    width = (num_steps - 1) * topk
    own = torch.eye(width, dtype=torch.bool, device=device).view(num_steps - 1, topk, width)
    return pad_local_mask(own)


class DraftTree(NamedTuple):
    """A tree of D nodes for each request; node 0 is the root, parents come before children.

    Attributes
    ----------
    tokens : Tensor, shape (B, D), int64
    parents : Tensor, shape (B, D), int64
        Node that each node continues, -1 for the root.
    depth : Tensor, shape (B, D), int64
        Distance from the root.
    ancestor_mask : Tensor, shape (B, D, D), bool
        Whether the node of the last axis is on the way from the root to the node of the axis
        before; both ends are.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    ancestor_mask: torch.Tensor


def build_tree(
    root_tokens: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    num_draft_tokens: int,
    num_steps: int,
) -> DraftTree:
    """Keep the best candidates and hang them below the root.

    The score of a candidate is the product of the probabilities on its way, so none exceeds its
    parent's, and of equal scores the lower number is kept: a candidate is never kept without its
    parent. The result is a tree for arbitrary scores too: a candidate whose parent was not kept
    hangs below the kept candidate, or root, before that parent.

    Parameters
    ----------
    root_tokens : Tensor, shape (B,), int64
        Last committed token of each request.
    tokens, scores, parents : Tensor, shape (B, N)
        Token, score and parent candidate (-1: the root) of all N candidates, parents first.
    num_draft_tokens : int
        D, from 2 to N + 1.
    num_steps : int
        Levels of the candidates.

    Returns
    -------
    DraftTree
        Nodes 1 to D-1 are the kept candidates by number.
    """
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    kept = torch.sort(best[:, : num_draft_tokens - 1], dim=-1).values
    # The node of a kept candidate is the number of kept candidates up to and including it.
    node_of_parent = torch.searchsorted(kept, parents.gather(1, kept), right=True)
    node_parents = F.pad(node_of_parent, (1, 0), value=-1)
    ancestor_mask = _ancestor_mask(node_parents, num_steps)
    return DraftTree(
        tokens=torch.cat((root_tokens.unsqueeze(1), tokens.gather(1, kept)), dim=1),
        parents=node_parents,
        depth=ancestor_mask.sum(-1) - 1,
        ancestor_mask=ancestor_mask,
    )


def _ancestor_mask(parents: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Who is on whose way, see `DraftTree`; `num_steps` bounds the depth."""
    size = parents.shape[1]
    self_mask = torch.eye(size, dtype=torch.bool, device=parents.device)
    rows = parents.clamp(min=0).unsqueeze(-1).expand(-1, -1, size)
    mask = self_mask.expand(parents.shape[0], -1, -1)
    for _ in range(num_steps):
        mask = mask.gather(1, rows) | self_mask
    return mask


def visible_columns(prefix_lens: torch.Tensor, width: int, row_len: int) -> torch.Tensor:
    """Where each position of a row finds its bit in a mask made by `pad_local_mask`.

    Parameters
    ----------
    prefix_lens : Tensor, shape (B,), int64
        Positions that are visible to all queries.
    width : int
        Positions behind the prefix that a local mask speaks about.
    row_len : int
        Positions of a row, L.

    Returns
    -------
    Tensor, shape (B, L), int64
        0 in the prefix, ``1 + i`` at the local position ``i``, ``1 + width`` behind.
    """
    positions = torch.arange(1, row_len + 1, device=prefix_lens.device)
    return (positions - prefix_lens.unsqueeze(1)).clamp(0, width + 1)


def pad_local_mask(local_mask: torch.Tensor) -> torch.Tensor:
    """Put a column that is always visible before a mask and one that never is behind it.

    Shape (..., W) becomes (..., W + 2).
    """
    return F.pad(F.pad(local_mask, (1, 0), value=True), (0, 1), value=False)


def expand_local_mask(padded_mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Attention mask over whole rows from a mask over the positions behind the prefix.

    Parameters
    ----------
    padded_mask : Tensor, shape (B, Q, W + 2), bool
        What each query sees, from `pad_local_mask`.
    columns : Tensor, shape (B, L), int64
        From `visible_columns`.

    Returns
    -------
    Tensor, shape (B, Q, L), bool
    """
    return padded_mask.gather(2, columns.unsqueeze(1).expand(-1, padded_mask.shape[1], -1))


class AcceptedPath(NamedTuple):
    """The nodes on which draft and target agree.

    Attributes
    ----------
    nodes : Tensor, shape (B, S + 1), int64
        Node of each depth, the root first; the root again behind the path's end.
    accept_lens : Tensor, shape (B,), int64
        Nodes of the path, from 1 to S + 1: the tokens that the target commits.
    """

    nodes: torch.Tensor
    accept_lens: torch.Tensor


def accept_path(tree: DraftTree, target_tokens: torch.Tensor, num_steps: int) -> AcceptedPath:
    """Follow the target's tokens through a draft tree.

    A node agrees if its token is the one that the target chose at its parent; the root always does.
    Children of a node have different tokens, so the nodes that agree with all their ancestors form
    one path.

    Parameters
    ----------
    tree : DraftTree
    target_tokens : Tensor, shape (B, D), int64
        The target's token behind each node.
    num_steps : int
        Depth of the tree, S.

    Returns
    -------
    AcceptedPath
    """
    wanted = target_tokens.gather(1, tree.parents.clamp(min=0))
    disagrees = (tree.tokens != wanted) & (tree.parents >= 0)
    accepted = ~(tree.ancestor_mask & disagrees.unsqueeze(1)).any(-1)
    levels = torch.arange(num_steps + 1, device=wanted.device).unsqueeze(1)
    at_level = accepted.unsqueeze(1) & (tree.depth.unsqueeze(1) == levels)
    # `max` names the first of equal values: node 0 where a level has no accepted node.
    found, nodes = at_level.int().max(dim=-1)
    return AcceptedPath(nodes=nodes, accept_lens=found.sum(-1))


def path_move_locs(
    node_locs: torch.Tensor, path_locs: torch.Tensor, path: AcceptedPath
) -> tuple[torch.Tensor, torch.Tensor]:
    """KV slots to copy so that an accepted path lies in consecutive positions.

    Parameters
    ----------
    node_locs : Tensor, shape (B, D), int64
        Slot that holds the KV of each node.
    path_locs : Tensor, shape (B, S + 1), int64
        Slots of the positions from the root's on.
    path : AcceptedPath

    Returns
    -------
    tgt_loc, src_loc : Tensor, shape (B * (S + 1),), int64
        What lies behind the path's end is copied onto itself.
    """
    levels = torch.arange(path_locs.shape[1], device=path_locs.device)
    in_path = levels < path.accept_lens.unsqueeze(1)
    src_locs = torch.where(in_path, node_locs.gather(1, path.nodes), path_locs)
    return path_locs.flatten(), src_locs.flatten()
