"""Sampled verification keeps the target's penalized distribution, node by node.

Thousands of requests with the same prompt and seeds 0, 1, 2 ... are sampled. What each token's
distribution should have been, given the tokens before it, is computed by Hugging Face in float64 with
penalties in plain arithmetic. A token's place in that distribution (its randomized probability integral
transform) is uniform on [0, 1) if it was drawn from it, so the places of one position, sorted into bins,
make a chi-square test with a known level. Tokens that were said already come first in the order of
places: what is counted wrongly shows in the first bins. Seeds are fixed, and with them the result.

The power is stated as the noncentrality that an engine with a named fault would give the statistic.
With 19 degrees of freedom and a level of 1e-4, a noncentrality of 85 is noticed in 99.9% of samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.sampling.penaltylib.sparse_penalties import PenaltyState

VOCAB = 64
EOS = 2
PROMPT = [5, 9, 20]
NUM_REQUESTS = 6000
LENGTH = 5
NUM_BINS = 20
LEVEL = 1e-4
# Whose power against a chi-square of 19 degrees at LEVEL is 99.9%; see test_the_power_is_as_stated.
ENOUGH = 85.0
PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": LENGTH,
    "min_new_tokens": 3,
    "stop_token_ids": [7],
    # Negative, so that what was said is likely to be said again, and a wrong count shows.
    "frequency_penalty": -0.7,
    "presence_penalty": -0.9,
    "repetition_penalty": 0.7,
    "logit_bias": {"11": 1.5, "30": -2.0},
}
SPECULATION = {
    "chain": {"speculative_num_steps": 3},
    # Wide, so that inner nodes are reached although the draft model knows no penalties.
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 8,
        "speculative_num_draft_tokens": 40,
    },
}


def sample(
    paths: Any, thread_context: Any, shape: str, normal: bool
) -> tuple[list[list[int]], float]:
    """Outputs of all requests, and how many tokens a verification has accepted."""
    # Seeds of its own: with the same ones all engines should say the same, and were one sample.
    first = NUM_REQUESTS * (2 * list(SPECULATION).index(shape) + normal)
    with Engine(
        model_path=paths.target,
        skip_tokenizer_init=True,
        disable_overlap_schedule=normal,
        max_total_tokens=8192,
        max_running_requests=128,
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=paths.draft,
        thread_context=thread_context,
        **SPECULATION[shape],
    ) as engine:
        results = engine.generate(
            input_ids=[PROMPT] * NUM_REQUESTS,
            sampling_params=[PARAMS | {"sampling_seed": first + i} for i in range(NUM_REQUESTS)],
        )
    accepted = [result["meta_info"]["spec_accept_length"] for result in results]
    return [result["output_ids"] for result in results], sum(accepted) / len(accepted)


class Truth:
    """The distribution of each token of some outputs, shape (N, LENGTH, VOCAB), float64.

    A fault changes what counts: ``none`` has no penalties, with ``lag`` the latest token is missing,
    with ``presence twice`` that penalty is, ``no minimum`` lets an output end at once.
    """

    def __init__(self, model: Any, outputs: list[list[int]]) -> None:
        self.lengths = torch.tensor([len(output) for output in outputs])
        self.tokens = torch.tensor([output + [0] * (LENGTH - len(output)) for output in outputs])
        prompts = torch.tensor([PROMPT] * len(outputs))
        with torch.no_grad():
            logits = model(torch.cat([prompts, self.tokens], 1)[:, :-1]).logits
        self.logits = logits[:, len(PROMPT) - 1 :]
        self.counts = torch.nn.functional.one_hot(self.tokens, VOCAB).double().cumsum(1).roll(1, 1)
        self.counts[:, 0] = 0  # what was said before the token
        self.order = self.counts.argsort(dim=-1, descending=True, stable=True)

    def probs(self, fault: str = "") -> torch.Tensor:
        counts = self.counts
        if fault == "lag":
            counts = counts.roll(1, 1)
            counts[:, 0] = 0
        if fault == "none":
            return (self.logits / PARAMS["temperature"]).softmax(-1)
        presence = PARAMS["presence_penalty"] * (2 if fault == "presence twice" else 1)
        x = self.logits - PARAMS["frequency_penalty"] * counts - presence * (counts > 0)
        scale = torch.where(counts > 0, PARAMS["repetition_penalty"], 1.0)
        x = torch.where(x < 0, x * scale, x / scale)
        for token, bias in PARAMS["logit_bias"].items():
            x[:, :, int(token)] += bias
        if fault != "no minimum":
            for stop in (EOS, *PARAMS["stop_token_ids"]):
                x[:, : PARAMS["min_new_tokens"], stop] = -torch.inf
        return (x / PARAMS["temperature"]).softmax(-1)

    def places(self, position: int) -> torch.Tensor:
        """Places in [0, 1) of the tokens at a position, of the outputs that have it."""
        is_there = self.lengths > position
        order = self.order[is_there, position]
        probs = self.probs()[is_there, position].gather(1, order)
        token = (
            (order == self.tokens[is_there, position].unsqueeze(1)).int().argmax(1, keepdim=True)
        )
        drawn = torch.rand(len(probs), generator=torch.Generator().manual_seed(position)).double()
        upper = probs.cumsum(1).gather(1, token).squeeze(1)
        return (upper - drawn * probs.gather(1, token).squeeze(1)).clamp(0, 1 - 1e-12)

    def p_values(self) -> list[float]:
        """Of each position's chi-square test."""
        found = []
        for position in range(LENGTH):
            places = self.places(position)
            observed = torch.histc(places, NUM_BINS, 0, 1)
            expected = len(places) / NUM_BINS
            statistic = ((observed - expected) ** 2 / expected).sum()
            found.append(tail(statistic.item()))
        return found

    def noncentrality(self, fault: str) -> list[float]:
        """What the statistic of each position would gain if tokens came from a faulty engine."""
        edges = torch.linspace(0, 1, NUM_BINS + 1).double()
        found = []
        for position in range(LENGTH):
            is_there = self.lengths > position
            order = self.order[is_there, position]
            right, wrong = (self.probs(f)[is_there, position].gather(1, order) for f in ("", fault))
            upper = right.cumsum(1).unsqueeze(-1)
            lower = upper - right.unsqueeze(-1)
            overlap = (upper.minimum(edges[1:]) - lower.maximum(edges[:-1])).clamp(min=0)
            share = overlap / right.unsqueeze(-1).clamp(min=1e-300)
            # A token that should be impossible has its place at one point.
            falls = (share * wrong.unsqueeze(-1)).sum(1).mean(0)
            falls = falls / falls.sum()
            found.append(len(right) * ((falls - 1 / NUM_BINS) ** 2).sum().item() * NUM_BINS)
        return found


def tail(statistic: float) -> float:
    """P(chi-square with NUM_BINS - 1 degrees of freedom >= statistic)."""
    half = torch.tensor([(NUM_BINS - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shape", "normal"), [("chain", False), ("tree", False), ("tree", True)], ids=str
)
def test_the_distribution_is_the_targets(
    shape: str, normal: bool, paths: Any, referee_model: Any, one_thread: Any
) -> None:
    outputs, accepted = sample(paths, one_thread, shape, normal)
    truth = Truth(referee_model, outputs)
    assert accepted > {"chain": 1.05, "tree": 1.4}[shape], (
        "drafts are hardly ever accepted: inner nodes are not tested"
    )
    p_values = truth.p_values()
    assert min(p_values) > LEVEL, p_values
    # No stop token before the minimum, and some behind it.
    assert PARAMS["min_new_tokens"] < truth.lengths.double().mean() < LENGTH
    assert truth.lengths.min() > PARAMS["min_new_tokens"]
    for fault in ("none", "lag", "presence twice"):
        gains = truth.noncentrality(fault)
        print(shape, fault, [round(g) for g in gains], "accepted", round(accepted, 2))
        assert max(gains) > ENOUGH, (fault, gains)


@pytest.mark.timeout(400)
def test_a_draft_that_does_not_count_its_way_is_noticed(
    paths: Any, referee_model: Any, one_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As upstream does: all nodes get the root's penalties."""
    apply = PenaltyState.apply

    def of_the_root(self: Any, step: Any, logits: Any, ancestors: Any = None) -> None:
        apply(self, step, logits, None if ancestors is None else torch.zeros_like(ancestors))

    monkeypatch.setattr(PenaltyState, "apply", of_the_root)
    outputs, _ = sample(paths, one_thread, "tree", normal=False)
    assert min(Truth(referee_model, outputs).p_values()) < LEVEL / 1000


def test_the_power_is_as_stated() -> None:
    """Simulated: the statistic with a noncentrality of ENOUGH passes the level in 99.9% of cases."""
    low, high = 0.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > LEVEL else (low, middle)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200_000, NUM_BINS - 1, generator=generator).double()
    noise[:, 0] += ENOUGH**0.5
    power = ((noise**2).sum(1) > high).double().mean().item()
    assert power > 0.999, power
