"""Training of the draft head, for a fixed number of steps.

The same sequences and settings give the same weights, bit for bit, on the same machine with the same
number of threads: all that is random comes from seeded generators, and no clock decides anything.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from eagle_head.data import Sequence, bar
from eagle_head.model import ChainState, DraftHead
from sglang.srt.configs.model_config import ModelConfig

# Sequences among which those of like length are put together.
_SORT_WINDOW = 256


@dataclass(frozen=True)
class TrainSettings:
    """How the head is trained.

    Attributes
    ----------
    steps, batch_size : int
        Steps of the optimizer, and sequences of each.
    draft_vocab_size : int
        Tokens that the head can draft: those that are most frequent in the training text.
    learning_rate, weight_decay : float
        Of AdamW. The rate rises for 40 steps and then falls along a cosine to a twentieth.
    fc_rate : float
        Share of the learning rate for ``fc``, which starts at a good place.
    unroll : int
        Draft steps of a chain that are trained together by the end; see `chain_steps`.
    step_decay : float
        Weight of a draft step's loss, relative to that of the step before it.
    feature_weight : float
        Weight of the loss of features against that of tokens.
    noise : float
        What is added to the target's features, uniform in plus or minus this (as EAGLE does): in the
        engine they are followed by the head's own, which are not exact.
    frequent, sampled : int
        Softmax over the `frequent` most frequent draft tokens and `sampled` of the others, drawn anew
        for each step, which stand for all others. 0 `sampled`: the whole draft vocabulary.
    later_rows : float
        Share of the positions whose chains are scored at the second and later draft steps.
    ridge : float
        Penalty of the linear fit that ``fc`` starts from.
    seed : int
        Of all that is random.
    """

    steps: int = 320
    batch_size: int = 16
    draft_vocab_size: int = 16384
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    fc_rate: float = 0.2
    unroll: int = 3
    step_decay: float = 0.8
    feature_weight: float = 0.3
    noise: float = 0.1
    frequent: int = 4096
    sampled: int = 2048
    later_rows: float = 0.5
    ridge: float = 300.0
    seed: int = 0

    def chain_steps(self, step: int) -> int:
        """Draft steps that are unrolled at a step: one for 30 % of the time, then one more by one."""
        done = step / self.steps
        if done < 0.3:
            return 1
        return min(self.unroll, 2 + int((done - 0.3) / 0.7 * (self.unroll - 1)))

    def rate(self, step: int) -> float:
        """Learning rate at a step."""
        warm = min(1.0, (step + 1) / 40)
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return self.learning_rate * warm * (0.05 + 0.95 * cosine)


class Batch(NamedTuple):
    """Sequences padded to one length ``L``.

    Attributes
    ----------
    ids : Tensor, shape (B, L), int64
        0 where padded.
    features : Tensor, shape (B, L, hidden_size), float32
        0 where padded.
    answer : Tensor, shape (B, L), bool
        Positions that the target wrote.
    """

    ids: torch.Tensor
    features: torch.Tensor
    answer: torch.Tensor


def make_batch(sequences: list[Sequence]) -> Batch:
    """Pad sequences at their ends."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([s.ids for s in sequences], batch_first=True)
    features = pad([s.features.float() for s in sequences], batch_first=True)
    places = torch.arange(ids.shape[1])
    starts = torch.tensor([s.prompt_len for s in sequences])[:, None]
    ends = torch.tensor([len(s.ids) for s in sequences])[:, None]
    return Batch(ids, features, (places >= starts) & (places < ends))


def batches(sequences: list[Sequence], size: int, seed: int) -> Iterator[list[Sequence]]:
    """Epoch after epoch without end, in batches of sequences of like length."""
    shuffler = random.Random(seed)
    while True:
        pool = list(sequences)
        shuffler.shuffle(pool)
        epoch: list[list[Sequence]] = []
        for first in range(0, len(pool), _SORT_WINDOW):
            window = sorted(pool[first : first + _SORT_WINDOW], key=lambda s: len(s.ids))
            epoch += [window[i : i + size] for i in range(0, len(window), size)]
        shuffler.shuffle(epoch)
        yield from epoch


def choose_draft_vocab(sequences: list[Sequence], vocab_size: int, size: int) -> torch.Tensor:
    """The tokens that occur most in the answers, most frequent first, (size,) int64.

    Of tokens that occur as often as each other the lower id comes first: a byte pair encoding numbers
    frequent tokens first.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for s in sequences:
        counts += torch.bincount(s.ids[s.prompt_len :], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].clone()


@torch.no_grad()
def fit_linear(
    sequences: list[Sequence], embedding: torch.Tensor, penalty: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ridge regression of the next feature on token and feature, in closed form.

    Returns
    -------
    weight : Tensor, shape (hidden_size, 2 * hidden_size)
    bias : Tensor, shape (hidden_size,)
    """
    hidden = embedding.shape[1]
    # Embeddings are small beside features. Without this the penalty would hold them down.
    scale = 1.0 / embedding.square().mean().sqrt()
    gram = torch.zeros(2 * hidden + 1, 2 * hidden + 1, dtype=torch.float64)
    moment = torch.zeros(2 * hidden + 1, hidden, dtype=torch.float64)
    for first in range(0, len(sequences), 32):
        inputs, outputs = [], []
        for s in sequences[first : first + 32]:
            start = max(0, s.prompt_len - 1)
            features = s.features[start:].float()
            embedded = embedding[s.ids[start + 1 :]] * scale
            ones = torch.ones(len(embedded), 1)
            inputs.append(torch.cat((embedded, features[:-1], ones), dim=1))
            outputs.append(features[1:])
        x = torch.cat(inputs)
        gram += x.T @ x
        moment += x.T @ torch.cat(outputs)
    gram += penalty * torch.eye(len(gram), dtype=torch.float64)
    solution = torch.linalg.solve(gram, moment).T.float()
    weight = solution[:, : 2 * hidden].clone()
    weight[:, :hidden] *= scale
    return weight, solution[:, 2 * hidden].clone()


class TokenLoss:
    """Cross-entropy of the head's tokens to the target's, over part of the draft vocabulary.

    All logits of a batch would cost more than the head itself. Tokens that are drawn at random stand
    for all that were not, so their share of the softmax is scaled up, for head and target alike.

    Parameters
    ----------
    lm_head : Tensor, shape (draft_vocab_size, hidden_size)
        Rows of the target's head, most frequent token first.
    settings : TrainSettings
        How many tokens to take.
    generator : torch.Generator
        Draws them.
    """

    def __init__(
        self, lm_head: torch.Tensor, settings: TrainSettings, generator: torch.Generator
    ) -> None:
        self._lm_head = lm_head.bfloat16()
        self._frequent = min(settings.frequent, len(lm_head))
        self._sampled = min(settings.sampled, len(lm_head) - self._frequent)
        self._generator = generator
        self._rows = self._lm_head
        self._offset = torch.zeros(len(lm_head))

    def draw(self) -> None:
        """Take other tokens from now on."""
        rest = len(self._lm_head) - self._frequent
        if not self._sampled or self._sampled == rest:
            return
        drawn = torch.randperm(rest, generator=self._generator)[: self._sampled]
        taken = torch.cat((torch.arange(self._frequent), drawn.sort().values + self._frequent))
        self._rows = self._lm_head[taken]
        self._offset = torch.zeros(len(taken))
        self._offset[self._frequent :] = math.log(rest / self._sampled)

    def __call__(self, drafted: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Mean loss of the features that were drafted, both (rows, hidden_size)."""
        with torch.no_grad():
            wanted = self._logits(features).softmax(dim=-1)
        return -(wanted * self._logits(drafted).log_softmax(dim=-1)).sum(dim=-1).mean()

    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(features.bfloat16(), self._rows).float() + self._offset


def chain_loss(
    head: DraftHead,
    batch: Batch,
    embedding: torch.Tensor,
    token_loss: TokenLoss,
    settings: TrainSettings,
    chain_steps: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Loss of the chains that start at every position, along the text that the target wrote."""
    ids, targets, answer = batch
    rows = ids.shape[1] - 1
    state = ChainState()
    noise = torch.rand(targets[:, :rows].shape, generator=generator) * 2 - 1
    features = targets[:, :rows] + settings.noise * noise
    loss = torch.zeros(())
    for step in range(chain_steps):
        # Row t takes the token at t + 1 + step and gives the feature there. Rows at the end run out
        # of text; they go on with padding and are not scored.
        tokens = F.pad(ids[:, 1 + step :], (0, step))
        features = head(embedding[tokens], features, state)
        scored = answer[:, 1 + step :]
        if step and settings.later_rows < 1:
            scored = scored & (torch.rand(scored.shape, generator=generator) < settings.later_rows)
        drafted, wanted = features[:, : rows - step][scored], targets[:, 1 + step :][scored]
        step_loss = token_loss(drafted, wanted)
        step_loss = step_loss + settings.feature_weight * F.smooth_l1_loss(drafted, wanted)
        loss = loss + settings.step_decay**step * step_loss
    return loss


def train(
    config: ModelConfig,
    sequences: list[Sequence],
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    settings: TrainSettings,
    report: Callable[[int, DraftHead], str] | None = None,
    report_every: int = 100,
) -> DraftHead:
    """Train a head.

    Parameters
    ----------
    config : ModelConfig
        The target.
    sequences : list of Sequence
        What it wrote, with features.
    embedding : Tensor, shape (vocab_size, hidden_size)
        The target's embedding.
    lm_head : Tensor, shape (draft_vocab_size, hidden_size)
        Rows of the target's head, most frequent token first.
    settings : TrainSettings
        How.
    report : callable, optional
        Looks at the head every `report_every` steps, and says what it saw. It must not change it.

    Returns
    -------
    DraftHead
    """
    with _deterministic():
        return _train(config, sequences, embedding, lm_head, settings, report, report_every)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Have torch refuse what does not give the same result twice."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _train(
    config: ModelConfig,
    sequences: list[Sequence],
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    settings: TrainSettings,
    report: Callable[[int, DraftHead], str] | None,
    report_every: int,
) -> DraftHead:
    sequences = [s for s in sequences if len(s.ids) - s.prompt_len >= 4]
    head = DraftHead(config, settings.seed, low_precision=True)
    with torch.no_grad():
        weight, bias = fit_linear(sequences, embedding, settings.ridge)
        head.fc.weight.copy_(weight)
        head.fc.bias.copy_(bias)
    generator = torch.Generator().manual_seed(settings.seed)
    token_loss = TokenLoss(lm_head, settings, generator)
    optimizer = torch.optim.AdamW(
        [
            {"params": list(head.fc.parameters()), "share": settings.fc_rate},
            {"params": list(head.layers.parameters()), "share": 1.0},
        ],
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
    )
    source = batches(sequences, settings.batch_size, settings.seed)
    with bar(settings.steps, "train", "step") as progress:
        for step in range(settings.steps):
            if report is not None and step % report_every == 0:
                progress.write(f"step {step}: {report(step, head)}")
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step) * group["share"]
            token_loss.draw()
            batch = make_batch(next(source))
            chain = settings.chain_steps(step)
            loss = chain_loss(head, batch, embedding, token_loss, settings, chain, generator)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            progress.set_postfix(chain=chain, loss=f"{loss.item():.3f}", refresh=False)
            progress.update()
    return head
