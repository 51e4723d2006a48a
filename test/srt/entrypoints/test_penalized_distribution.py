"""Sampled verification keeps the target's penalized distribution, node by node.

Thousands of requests with the same prompt are sampled. What each token's distribution should have been,
given the tokens before it, is computed by Hugging Face in float64 with penalties in plain arithmetic.

A token's place in that distribution is the mass of all tokens that come before it in some order, and a
random share of its own mass (its randomized probability integral transform). If the token was drawn
from the distribution, its place is uniform on [0, 1), whatever was said before. So places that are
sorted into bins make a chi-square test with a known level. In the order of this test come first the
tokens that were said already, the most frequent ones first, and then the stop tokens: what is counted
or masked wrongly shows in the first bins.

A test may choose the tokens that it looks at by what was said before them. How deep in its verification
a token was drawn is such a choice, since the draft is made before. Depth 0 is the root, behind which
everything is committed; tokens at a depth of 1 or more come from inner nodes, which have to count their
way. A stream has one item for each step, and so tells the depths.

The power is stated as a noncentrality: what an engine with a named fault would add to the statistic, on
average, if before each token were said what the right engine said. `ENOUGH` has the noncentralities that
are noticed in 99.9% of samples. Engines that really have such faults show that they are noticed, and
that their noncentralities are what they are said to be. Seeds are fixed, and with them all results.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.sampler import uniform
from sglang.srt.sampling.penaltylib.sparse_layout import MIN_NEW
from sglang.srt.sampling.penaltylib.sparse_penalties import PenaltyState
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

VOCAB = 64
EOS = 2
PROMPT = [30, 41, 52]
LENGTH = 6
NUM_REQUESTS = 6000
NUM_BROKEN = 2500
NUM_BINS = 20
NUM_PAIR_BINS = 6
LEVEL = 1e-4
# The noncentrality that is noticed at LEVEL in 99.9% of samples, by degrees of freedom.
ENOUGH = {19: 85.0, 30: 97.0, 35: 101.0, 999: 360.0, 1023: 360.0}
PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": LENGTH,
    "min_new_tokens": 3,
    "stop_token_ids": [7],
    # Negative, so that what was said is likely to be said again, and a wrong count shows.
    "frequency_penalty": -1.15,
    "presence_penalty": -1.0,
    "repetition_penalty": 0.75,
    # Some requests should stop behind the minimum, so that a wrong length shows.
    "logit_bias": {"7": 4.8, "11": 1.5, "30": -3.0},
}
STOPS = [EOS, *PARAMS["stop_token_ids"]]
SPECULATION = {
    "chain": {"speculative_num_steps": 3},
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 24,
    },
}

# Faults of an engine, and the statistics each of which notices it with the power stated above, with a
# chain and with a tree. "impossible" is no chi-square: there would be tokens that no right engine says.
# A depth that is not named does not tell the fault with this power in samples of this size, be it with
# a chain or with a tree, or there is none at that depth. It is noticed at the depths that are named.
FAULTS: dict[str, tuple[str, ...]] = {
    # Of all tokens
    "no penalties": ("depth 0", "depth 1", "depth 2 and more", "impossible"),
    "latest token missing": ("position 1", "depth 0", "depth 1", "depth 2 and more"),
    "presence twice": ("depth 0", "depth 2 and more"),
    "scaling before additive": ("depth 0", "depth 2 and more"),
    "no bias": ("position 0", "depth 0", "depth 2 and more"),
    "no minimum": ("position 0", "depth 0", "depth 1", "impossible"),
    # Shows only in a verification that follows one of several tokens: with a chain too rare for the
    # depths, but not for the last position.
    "one token counted a verification": ("position 5",),
    # Of inner nodes
    "way not counted": ("depth 1", "depth 2 and more"),
    "way does not make it longer": ("across the minimum", "depth 2 and more"),
    # A node of depth 1 has no ancestor but the root, so that this is no fault there.
    "only itself counted": ("depth 2 and more",),
    "only ancestors counted": ("depth 1", "depth 2 and more"),
    "root counted twice": ("depth 0", "depth 2 and more"),
    "no bias at inner nodes": ("across the minimum", "depth 2 and more"),
    # Of random numbers
    "number of the token before": ("first two", "depths 0 and 1"),
    # Of two depths of a chain, a chance of one in four is not noticed in samples of this size.
    "number of the token before, one in four": ("first two",),
    "number of the token before, one in two": ("first two", "depths 0 and 1"),
}
# How many impossible tokens a fault should make, so that none in a sample has a chance of 1e-9.
ENOUGH_IMPOSSIBLE = 21


@pytest.fixture(scope="module")
def models(paths: Any, llama: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The target, and a draft that likes to say the last token again, as the penalized target does."""
    directory = tmp_path_factory.mktemp("draft") / "repeating"
    shutil.copytree(paths.draft, directory)
    weights = load_file(directory / "model.safetensors")
    embedding = llama.model.embed_tokens.weight.detach()
    head = llama.lm_head.weight.detach()
    # Takes the embedding of a token roughly to the feature from which the head predicts that token.
    again = head.T @ embedding / (head**2).sum(1).mean() / (embedding**2).sum(1).mean()
    fc = weights["fc.weight"].float()
    fc[:, : again.shape[1]] += 6 * again
    save_file(weights | {"fc.weight": fc.half()}, directory / "model.safetensors")
    return {"model_path": paths.target, "speculative_draft_model_path": str(directory)}


@dataclass(frozen=True)
class Sample:
    """What an engine said.

    Attributes
    ----------
    seed : int
        Of the first request; the others have those behind it.
    outputs : list of list of int
        Tokens of each request.
    depths : list of list of int
        How deep in its verification each of them was drawn, -1 in the prefill.
    """

    seed: int
    outputs: list[list[int]]
    depths: list[list[int]]


def sample(
    models: dict[str, str], thread_context: Any, shape: str, normal: bool, seed: int, num: int
) -> Sample:
    """Sample `num` requests, with seeds from `seed` on."""
    outputs: list[list[int]] = [[] for _ in range(num)]
    depths: list[list[int]] = [[] for _ in range(num)]
    num_items = [0] * num
    with Engine(
        skip_tokenizer_init=True,
        disable_overlap_schedule=normal,
        max_total_tokens=16384,
        max_running_requests=128,
        speculative_algorithm="EAGLE",
        thread_context=thread_context,
        **models,
        **SPECULATION[shape],
    ) as engine:
        for item in engine.generate(
            input_ids=[PROMPT] * num,
            sampling_params=[PARAMS | {"sampling_seed": seed + i} for i in range(num)],
            stream=True,
        ):
            i, tokens, meta = item["index"], item["output_ids"], item["meta_info"]
            # One item for the prefill, and one for each verification.
            assert meta.get("spec_verify_ct", 0) == num_items[i]
            assert meta["retraction_count"] == 0
            num_new = len(tokens) - len(outputs[i])
            depths[i] += range(num_new) if num_items[i] > 0 else [-1]
            outputs[i] = tokens
            num_items[i] += 1
    return Sample(seed, outputs, depths)


class Found(NamedTuple):
    """A chi-square statistic of a sample: its value and degrees of freedom."""

    value: float
    degrees: int

    @property
    def p_value(self) -> float:
        return tail(self.value, self.degrees)


class Truth:
    """The distribution of each token of a sample, float64; one row a token, request by request.

    Parameters
    ----------
    model : LlamaForCausalLM
        Of transformers, in float64.
    sample : Sample

    Attributes
    ----------
    groups : dict of str to Tensor, shape (tokens,), bool
        The tokens that each statistic looks at.
    pairs : dict of str to Tensor, shape (tokens,), bool
        Likewise, of statistics that look at the token before each of these, too.
    """

    def __init__(self, model: Any, sample: Sample) -> None:
        num = len(sample.outputs)
        lengths = torch.tensor([len(output) for output in sample.outputs])
        tokens = torch.tensor([o + [0] * (LENGTH - len(o)) for o in sample.outputs])
        depth = torch.tensor([d + [-1] * (LENGTH - len(d)) for d in sample.depths])
        position = torch.arange(LENGTH).expand(num, -1)
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor([PROMPT] * num), tokens], 1)[:, :-1]).logits
        is_there = position < lengths.unsqueeze(1)
        root = position - depth.clamp(min=0)  # that many tokens are committed

        def at_root(counts: torch.Tensor) -> torch.Tensor:
            return counts.gather(1, root.unsqueeze(-1).expand(-1, -1, VOCAB))

        said = torch.nn.functional.one_hot(tokens, VOCAB).double()
        latest = said.roll(1, 1)
        latest[:, 0] = 0
        is_inner = (depth > 0).unsqueeze(-1)
        counts = _before(said)
        way = counts - at_root(counts)
        counts_of = {
            "": counts,
            "latest token missing": counts - latest,
            "one token counted a verification": at_root(_before(said * ~is_inner)) + way,
            "way not counted": counts - way,
            "only itself counted": counts - way + latest * is_inner,
            "only ancestors counted": counts - latest * is_inner,
            "root counted twice": counts + at_root(latest) * (depth >= 0).unsqueeze(-1),
        }
        self.counts = {fault: counts[is_there] for fault, counts in counts_of.items()}
        self.logits = logits[:, len(PROMPT) - 1 :][is_there]
        self.tokens = tokens[is_there].unsqueeze(1)
        self.depth, self.position, self.root = depth[is_there], position[is_there], root[is_there]

        minimum = PARAMS["min_new_tokens"]
        self.groups = {f"position {i}": self.position == i for i in range(LENGTH)} | {
            "depth 0": self.depth == 0,
            "depth 1": self.depth == 1,
            "depth 2 and more": self.depth >= 2,
            "across the minimum": (self.root < minimum) & (self.position >= minimum),
        }
        self.pairs = {"first two": self.position == 1, "depths 0 and 1": self.depth == 1}

        is_stop = torch.zeros(VOCAB).index_fill(0, torch.tensor(STOPS), 0.5)
        self.order = (self.counts[""] + is_stop).argsort(dim=-1, descending=True, stable=True)
        self.right = self.probs("")
        self.mass = self.right.gather(1, self.order)
        self.upper = self.mass.cumsum(1)
        # Each engine has random shares of its own, like seeds: else the results of all had them in
        # common, and were not independent.
        generator = torch.Generator().manual_seed(sample.seed)
        share = torch.rand(len(self.tokens), 1, dtype=torch.float64, generator=generator)
        rank = (self.order == self.tokens).int().argmax(1, keepdim=True)
        places = self.upper.gather(1, rank) - share * self.mass.gather(1, rank)
        self.places = places.squeeze(1).clamp(0, 1 - 1e-12)

    def probs(self, fault: str) -> torch.Tensor:
        """The distribution of each token with an engine that has a fault, shape (tokens, VOCAB)."""
        x = self.logits
        counts = self.counts.get(fault, self.counts[""])
        presence = PARAMS["presence_penalty"] * (2 if fault == "presence twice" else 1)
        additive = (counts > 0) * presence + counts * PARAMS["frequency_penalty"]
        factor = torch.where(counts > 0, PARAMS["repetition_penalty"], 1.0)
        if fault == "no penalties":
            return (x / PARAMS["temperature"]).softmax(-1)
        if fault.startswith("number of the token before"):
            share = {"one in four": 0.25, "one in two": 0.5}.get(fault.partition(", ")[2], 1.0)
            return self.right.lerp(self._with_the_number_before(), share)
        if fault == "scaling before additive":
            x = torch.where(x < 0, x * factor, x / factor) - additive
        else:
            x = x - additive
            x = torch.where(x < 0, x * factor, x / factor)
        bias = torch.zeros(VOCAB, dtype=torch.float64)
        for token, value in PARAMS["logit_bias"].items():
            bias[int(token)] = value
        has_bias = torch.full_like(self.depth, fault != "no bias")
        if fault == "no bias at inner nodes":
            has_bias = self.depth <= 0
        x = x + bias * has_bias.unsqueeze(1)
        length = self.root if fault == "way does not make it longer" else self.position
        is_short = (length < PARAMS["min_new_tokens"]) & (fault != "no minimum")
        is_stop = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(STOPS), True)
        x = x.masked_fill(is_short.unsqueeze(1) & is_stop, -torch.inf)
        return (x / PARAMS["temperature"]).softmax(-1)

    def _with_the_number_before(self) -> torch.Tensor:
        """The distribution of a token that is drawn with the random number of the token before it.

        The sampler inverts the cumulative distribution in order of ids, so the token before it tells
        between which bounds the number lies. First tokens keep their distribution.
        """
        ends = self.right.cumsum(1)
        starts = ends - self.right
        lowest = starts.gather(1, self.tokens).roll(1, 0)
        highest = ends.gather(1, self.tokens).roll(1, 0)
        overlap = (ends.minimum(highest) - starts.maximum(lowest)).clamp(min=0)
        is_first = (self.position == 0).unsqueeze(1)
        return torch.where(is_first, self.right, overlap / (highest - lowest))

    @property
    def num_impossible(self) -> int:
        """Tokens that have no probability."""
        return int((self.right.gather(1, self.tokens) == 0).sum())

    def statistics(self) -> dict[str, Found]:
        """All chi-square statistics of the sample."""
        found = {}
        for name, is_in in self.groups.items():
            observed = torch.histc(self.places[is_in], NUM_BINS, 0, 1)
            found[name] = Found(chi_square(observed, observed.mean()), NUM_BINS - 1)
        for name, table in self._pair_tables():
            if name == "first two":
                found[name] = Found(chi_square(table, table.mean()), NUM_PAIR_BINS**2 - 1)
                continue
            # Whether a draft has the first token of such a pair hangs on that token, so only the second
            # one's place is uniform, given the first one's.
            statistic = chi_square(table, table.mean(1, keepdim=True))
            found[name] = Found(statistic, NUM_PAIR_BINS * (NUM_PAIR_BINS - 1))
        return found

    def _pair_tables(self) -> Iterator[tuple[str, torch.Tensor]]:
        """How often a bin of the token before (rows) and of the token (columns) come together."""
        bins = (self.places * NUM_PAIR_BINS).long()
        cells = bins.roll(1, 0) * NUM_PAIR_BINS + bins
        for name, is_in in self.pairs.items():
            table = torch.bincount(cells[is_in], minlength=NUM_PAIR_BINS**2).double()
            yield name, table.view(NUM_PAIR_BINS, NUM_PAIR_BINS)

    def noncentralities(self, fault: str) -> dict[str, float]:
        """What each statistic would gain, on average, if tokens came from a faulty engine.

        For "impossible" it is how many tokens without probability there would be.
        """
        wrong = self.probs(fault)
        gains = {"impossible": wrong[self.right == 0].sum().item()}
        falls = self._falls(wrong, NUM_BINS)
        for name, is_in in self.groups.items():
            gains[name] = _gain(falls[is_in])
        falls = self._falls(wrong, NUM_PAIR_BINS)
        rows = (self.places * NUM_PAIR_BINS).long().roll(1, 0)
        for name, is_in in self.pairs.items():
            gains[name] = sum(_gain(falls[is_in & (rows == i)]) for i in range(NUM_PAIR_BINS))
        return gains

    def _falls(self, wrong: torch.Tensor, num_bins: int) -> torch.Tensor:
        """Chance that a token of the distribution `wrong` falls into each bin of the right one."""
        wrong = wrong.gather(1, self.order)
        edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)[1:-1]
        edges = edges.repeat(len(wrong), 1)
        cut = torch.searchsorted(self.upper, edges).clamp(max=VOCAB - 1)
        share = 1 - (self.upper.gather(1, cut) - edges) / self.mass.gather(1, cut)
        below = _before(wrong).gather(1, cut) + share.clamp(0, 1) * wrong.gather(1, cut)
        ends = below.new_ones(len(below), 1)
        return torch.cat([below, ends], 1).diff(dim=1, prepend=0 * ends)


def _before(values: torch.Tensor) -> torch.Tensor:
    """Sums of what lies before each place of axis 1."""
    return values.cumsum(1) - values


def _gain(falls: torch.Tensor) -> float:
    """What the statistic of tokens gains that fall into bins with these chances, not uniformly."""
    num, num_bins = falls.shape
    return num * num_bins * ((falls.mean(0) - 1 / num_bins) ** 2).sum().item() if num else 0.0


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's statistic."""
    return ((observed - expected) ** 2 / expected).sum().item()


def tail(statistic: float, degrees: int) -> float:
    """P(chi-square of that many degrees of freedom >= statistic)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def critical_value(degrees: int) -> float:
    """The statistic whose p-value is LEVEL."""
    low, high = 0.0, 10.0 * degrees
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, degrees) > LEVEL else (low, middle)
    return high


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shape", "normal", "seed"),
    # Seeds of their own: with the same ones all engines should say the same, and were one sample.
    [("chain", False, 0), ("tree", False, NUM_REQUESTS), ("tree", True, 2 * NUM_REQUESTS)],
    ids=["chain", "tree", "tree-normal_loop"],
)
def test_the_distribution_is_the_targets(
    shape: str, normal: bool, seed: int, models: Any, referee_model: Any, one_thread: Any
) -> None:
    truth = Truth(referee_model, sample(models, one_thread, shape, normal, seed, NUM_REQUESTS))
    found = truth.statistics()
    p_values = {name: statistic.p_value for name, statistic in found.items()}
    print(shape, {name: round(p, 4) for name, p in p_values.items()})
    assert min(p_values.values()) > LEVEL, p_values
    # Among others, no stop token before the minimum. Some come behind it.
    assert truth.num_impossible == 0
    assert sum(int((truth.tokens == stop).sum()) for stop in STOPS) > NUM_REQUESTS / 10
    # Inner nodes are reached.
    assert (truth.depth == 1).sum() > NUM_REQUESTS / 2
    assert (truth.depth >= 2).sum() > NUM_REQUESTS / 4
    assert max(truth.noncentralities("no fault").values()) < 1e-9
    for fault, names in FAULTS.items():
        gains = truth.noncentralities(fault)
        print(shape, fault, {name: round(gains[name]) for name in names})
        for name in names:
            enough = ENOUGH[found[name].degrees] if name in found else ENOUGH_IMPOSSIBLE
            assert gains[name] > enough, (fault, name, gains)


Break = Callable[[pytest.MonkeyPatch], None]


def break_ways(
    counted: Callable[[torch.Tensor], torch.Tensor],
    lengthened: Callable[[torch.Tensor], torch.Tensor],
) -> Break:
    """Nodes count the tokens of the ways `counted`, and are as far as `lengthened` says.

    Both take what `PenaltyState.apply` takes as ``ancestors``, and give what to believe instead.
    """
    apply = PenaltyState.apply

    def broken(self: Any, step: Any, logits: Any, ancestors: Any = None) -> None:
        if step is None or ancestors is None:
            apply(self, step, logits, ancestors)
            return
        masks = torch.zeros_like(logits)
        apply(self, step, masks, lengthened(ancestors))
        minima = self.tables.headers[:, MIN_NEW].clone()
        self.tables.headers[:, MIN_NEW] = 0
        apply(self, step, logits, counted(ancestors))
        self.tables.headers[:, MIN_NEW] = minima
        # Nothing but the mask makes an infinity of a zero.
        logits.masked_fill_(masks == -torch.inf, -torch.inf)

    return lambda monkeypatch: monkeypatch.setattr(PenaltyState, "apply", broken)


def all_of_it(ancestors: torch.Tensor) -> torch.Tensor:
    return ancestors


def nothing(ancestors: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(ancestors)


def only_itself(ancestors: torch.Tensor) -> torch.Tensor:
    return ancestors & torch.eye(ancestors.shape[-1], dtype=torch.bool)


def only_ancestors(ancestors: torch.Tensor) -> torch.Tensor:
    return ancestors & ~torch.eye(ancestors.shape[-1], dtype=torch.bool)


def break_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a verification's tokens the first one is counted, but all make the output longer."""
    commit = PenaltyState.commit

    def broken(self: Any, step: Any, tokens: Any, lens: Any = None) -> None:
        if tokens.dim() == 2:
            tokens = tokens.clone()
            tokens[:, 1:] = -1  # no token
        commit(self, step, tokens, lens)

    monkeypatch.setattr(PenaltyState, "commit", broken)


def break_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes are drawn with the root's random number."""
    sample_nodes = EAGLEWorkerV2._sample_nodes

    def broken(self: Any, output: Any, batch: Any, tree: Any, positions: Any) -> Any:
        return sample_nodes(self, output, batch, tree, positions[:, :1].expand_as(positions))

    monkeypatch.setattr(EAGLEWorkerV2, "_sample_nodes", broken)


# How to make the fault, and statistics of tokens that it does not touch. All of these keep the minimum.
# Upstream gives all nodes the root's penalties, which are the first two faults together.
BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    "way not counted": (break_ways(nothing, all_of_it), ("position 0", "depth 0")),
    "way does not make it longer": (break_ways(all_of_it, nothing), ("position 0", "depth 0")),
    "only itself counted": (
        break_ways(only_itself, all_of_it),
        ("position 0", "depth 0", "depth 1"),
    ),
    "only ancestors counted": (break_ways(only_ancestors, all_of_it), ("position 0", "depth 0")),
    "one token counted a verification": (break_commit, ("position 0", "first two")),
    "number of the token before": (break_numbers, ("position 0", "depth 0", "first two")),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_engine_is_noticed(
    fault: str,
    models: Any,
    referee_model: Any,
    one_thread: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the statistics that are said to notice the fault; tokens that it does not touch are right.

    Fewer requests, which say other things than those of a right engine: of the statistics, those notice
    it that have the power with these.
    """
    make_broken, untouched = BROKEN[fault]
    make_broken(monkeypatch)
    outputs = sample(models, one_thread, "tree", False, 3 * NUM_REQUESTS, NUM_BROKEN)
    truth = Truth(referee_model, outputs)
    found, gains = truth.statistics(), truth.noncentralities(fault)
    p_values = {name: statistic.p_value for name, statistic in found.items()}
    noticing = [
        name
        for name in FAULTS[fault]
        if name in found and name not in untouched and gains[name] > ENOUGH[found[name].degrees]
    ]
    print(fault, {name: (round(gains[name]), f"{p:.1e}") for name, p in p_values.items()})
    assert noticing
    assert max(p_values[name] for name in noticing) < LEVEL, p_values
    assert min(p_values[name] for name in noticing) < LEVEL / 1000, p_values
    for name in noticing:
        expected = found[name].degrees + gains[name]
        deviation = (2 * (expected + gains[name])) ** 0.5
        assert abs(found[name].value - expected) < 5 * deviation, (name, found[name], gains[name])
    assert min(p_values[name] for name in untouched) > LEVEL, p_values
    assert truth.num_impossible == 0


@pytest.mark.timeout(400)
def test_breaking_breaks_nothing_else(
    models: Any, referee_model: Any, one_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose nodes are told the truth in the way in which the others are deceived is right."""
    break_ways(all_of_it, all_of_it)(monkeypatch)
    outputs = sample(models, one_thread, "tree", False, 3 * NUM_REQUESTS, NUM_BROKEN)
    truth = Truth(referee_model, outputs)
    p_values = {name: found.p_value for name, found in truth.statistics().items()}
    assert min(p_values.values()) > LEVEL, p_values
    assert truth.num_impossible == 0


@pytest.mark.parametrize("degrees", ENOUGH)
def test_the_power_is_as_stated(degrees: int) -> None:
    """A chi-square with a noncentrality is a mixture of chi-squares, with weights of Poisson's law."""
    half = torch.tensor(ENOUGH[degrees] / 2, dtype=torch.float64)
    k = torch.arange(2000, dtype=torch.float64)
    weights = (k * half.log() - half - torch.lgamma(k + 1)).exp()
    critical = torch.full_like(k, critical_value(degrees))
    power = (weights * torch.special.gammaincc(degrees / 2 + k, critical / 2)).sum().item()
    assert 0.999 < power < 0.9998, power


def test_random_numbers_are_uniform_and_independent() -> None:
    """Those of a million neighbouring seeds, at the positions that this file samples.

    Noticed with the stated power: densities of 1000 bins that are off by 2%, which gain 400; and pairs
    that have the same number in 1 of 200 cases, which gain 387 or more.
    """
    num, num_bins, num_pair_bins = 1_000_000, 1000, 32
    seeds = torch.arange(num)

    def check_pairs(first: torch.Tensor, second: torch.Tensor) -> None:
        cells = (first * num_pair_bins).long() * num_pair_bins + (second * num_pair_bins).long()
        table = torch.bincount(cells, minlength=num_pair_bins**2).double()
        found = Found(chi_square(table, table.mean()), len(table) - 1)
        assert ENOUGH[found.degrees] < len(cells) * (num_pair_bins - 1) * 0.005**2
        assert found.p_value > LEVEL, found

    before = None
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        numbers = uniform(seeds, torch.full_like(seeds, position))
        observed = torch.histc(numbers, num_bins, 0, 1)
        found = Found(chi_square(observed, observed.mean()), num_bins - 1)
        assert ENOUGH[found.degrees] < num * 0.02**2
        assert found.p_value > LEVEL, (position, found)
        check_pairs(numbers[::2], numbers[1::2])  # of two seeds
        if before is not None:
            check_pairs(before, numbers)
        before = numbers
