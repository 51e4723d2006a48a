"""How many tokens a step of speculation yields: by simulation for early looks, else by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_head.data import Sequence, bar, encode
from eagle_head.model import ChainState, DraftHead
from eagle_head.training import make_batch
from eagle_prompts import prompts_of
from sglang import Engine
from sglang.srt.utils.tokenizer import Tokenizer


@dataclass(frozen=True)
class Simulated:
    """What chains of the head would have yielded along given greedy texts.

    Attributes
    ----------
    accept_length : dict of int to float
        Mean accepted length, the target's own token included, by number of draft steps.
    hit_rate : list of float
        Share of right tokens at each depth, of the chains that were right until there.
    """

    accept_length: dict[int, float]
    hit_rate: list[float]

    def __str__(self) -> str:
        lengths = ", ".join(f"K={k} {v:.3f}" for k, v in self.accept_length.items())
        return f"accepted length {lengths}; hits {' '.join(f'{h:.3f}' for h in self.hit_rate)}"


@torch.no_grad()
def simulate(
    head: DraftHead,
    sequences: list[Sequence],
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    hot_token_id: torch.Tensor,
    max_steps: int = 4,
) -> Simulated:
    """Walk along greedy texts as greedy chains of 1 to `max_steps` drafts would.

    Parameters
    ----------
    head : DraftHead
        The head.
    sequences : list of Sequence
        Texts whose answers are greedy.
    embedding, lm_head : Tensor
        The target's embedding, (vocab_size, hidden_size), and its head's rows of the draft vocabulary.
    hot_token_id : Tensor, shape (draft_vocab_size,), int64
        Target id of each of these rows.
    """
    tokens = dict.fromkeys(range(1, max_steps + 1), 0)
    rounds = dict.fromkeys(range(1, max_steps + 1), 0)
    hits, tries = torch.zeros(max_steps), torch.zeros(max_steps)
    for first in range(0, len(sequences), 16):
        group = sequences[first : first + 16]
        right, known = _right_drafts(head, group, embedding, lm_head, hot_token_id, max_steps)
        alive = torch.ones_like(right[0])
        for step in range(max_steps):
            tries[step] += (alive & known[step]).sum()
            alive = alive & right[step]
            hits[step] += (alive & known[step]).sum()
        runs = torch.stack(right).cumprod(dim=0).cumsum(dim=0)
        for steps in tokens:
            for row, sequence in enumerate(group):
                yields = _walk(runs[steps - 1, row].tolist(), sequence, steps)
                tokens[steps] += sum(yields)
                rounds[steps] += len(yields)
    lengths = {k: tokens[k] / max(1, rounds[k]) for k in tokens}
    return Simulated(lengths, (hits / tries.clamp(min=1)).tolist())


def _right_drafts(
    head: DraftHead,
    group: list[Sequence],
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    hot_token_id: torch.Tensor,
    max_steps: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of each draft step, which row's token is the text's, and whether the text goes that far."""
    ids, features, answer = make_batch(group)
    rows = ids.shape[1] - 1
    features = features[:, :rows]
    tokens = ids[:, 1:]
    state = ChainState()
    right, known = [], []
    for step in range(max_steps):
        features = head(embedding[tokens], features, state)
        tokens = hot_token_id[(features @ lm_head.T).argmax(dim=-1)]
        pad = (0, min(step + 1, rows))
        known.append(torch.nn.functional.pad(answer[:, 2 + step :], pad))
        right.append(
            known[-1] & (tokens == torch.nn.functional.pad(ids[:, 2 + step :], pad, value=-1))
        )
    return right, known


def _walk(accepted: list[int], sequence: Sequence, steps: int) -> list[int]:
    """Tokens of each round, of the rounds whose drafts all lie within the text."""
    yields = []
    row = sequence.prompt_len - 1
    while row + 1 + steps < len(sequence.ids) - 1:
        yields.append(accepted[row] + 1)
        row += yields[-1]
    return yields


@dataclass(frozen=True)
class Shape:
    """A draft tree: depth, branches, and nodes that are verified."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __str__(self) -> str:
        if self.topk == 1:
            return f"chain K={self.num_steps}"
        return f"tree K={self.num_steps} topk={self.topk} nodes={self.num_draft_tokens}"


CHAINS = tuple(Shape(k, 1, k + 1) for k in (1, 2, 3, 4))
TREES = (Shape(3, 2, 8), Shape(3, 4, 16))


@dataclass(frozen=True)
class Measured:
    """What the engine said about a shape.

    Attributes
    ----------
    shape : Shape
        The tree.
    accept_length : float
        ``meta_info["spec_accept_length"]`` of all requests, weighted by their verifications.
    kept_length : float
        The same without what a last verification accepted behind a sequence's end.
    lowest, highest : float
        Of a single request.
    verifications : int
        How many there were.
    """

    shape: Shape
    accept_length: float
    kept_length: float
    lowest: float
    highest: float
    verifications: int


def measure(
    model_path: Path,
    draft_path: Path,
    split: str,
    shape: Shape,
    max_new_tokens: int = 96,
    batch_size: int = 16,
    temperature: float = 0.0,
) -> Measured:
    """Answer the prompts of a split with speculation, and read the accepted length."""
    tokenizer = Tokenizer(model_path)
    prompts = [encode(tokenizer, prompt) for prompt in prompts_of(split)]
    params = [
        {"max_new_tokens": max_new_tokens, "temperature": temperature, "sampling_seed": i}
        for i in range(len(prompts))
    ]
    metas = []
    with (
        Engine(
            str(model_path),
            dtype="float32",
            skip_tokenizer_init=True,
            max_running_requests=batch_size,
            max_total_tokens=batch_size * 512,
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(draft_path),
            speculative_num_steps=shape.num_steps,
            speculative_eagle_topk=shape.topk,
            speculative_num_draft_tokens=shape.num_draft_tokens,
        ) as engine,
        bar(len(prompts), f"{split}, {shape}", "seq") as progress,
    ):
        for item in engine.generate(input_ids=prompts, sampling_params=params, stream=True):
            if item["meta_info"]["finish_reason"] is not None:
                metas.append(item["meta_info"])
                progress.update()
    metas = [meta for meta in metas if meta.get("spec_verify_ct")]
    rounds = sum(meta["spec_verify_ct"] for meta in metas)
    lengths = [meta["spec_accept_length"] for meta in metas]
    accepted = sum(meta["spec_accept_length"] * meta["spec_verify_ct"] for meta in metas)
    # The prefill gave the first token.
    kept = sum(meta["completion_tokens"] - 1 for meta in metas)
    return Measured(shape, accepted / rounds, kept / rounds, min(lengths), max(lengths), rounds)


def table(results: list[Measured]) -> str:
    """Results for people, as a Markdown table."""
    lines = [
        "| drafts | accepted length | kept | lowest to highest of a prompt | verifications |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in results:
        lines.append(
            f"| {r.shape} | {r.accept_length:.3f} | {r.kept_length:.3f} "
            f"| {r.lowest:.2f} to {r.highest:.2f} | {r.verifications} |"
        )
    return "\n".join(lines)
