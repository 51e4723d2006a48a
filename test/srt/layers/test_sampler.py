"""The sampler: its randomness, its sums, its filters, and that a row never notices its neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers import sampler as sampler_module
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, _filter_rows, _pick, _token_weights, uniform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.common import Platform, register_platform

CPU = torch.device("cpu")
LAST = 1 - 2.0**-53
"""The largest number that `uniform` can give."""


@pytest.fixture(autouse=True)
def _one_thread():
    """Many small operations: threads would wait for each other, on a busy machine for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def info_of(rows: Sequence[dict], vocab_size: int, seeds: Sequence[int] | None = None, device=CPU):
    reqs = [
        SimpleNamespace(
            sampling_params=SamplingParams(**row), sampling_seed=seed, eos_token_ids=set()
        )
        for row, seed in zip(rows, seeds or range(len(rows)), strict=True)
    ]
    return SamplingBatchInfo.from_schedule_batch(
        SimpleNamespace(reqs=reqs, device=device, penalty_planner=None), vocab_size
    )


def sample_row(logits: torch.Tensor, n: int, seed: int = 1, **params: object) -> torch.Tensor:
    """n tokens of one request, at n positions, with the same logits at each."""
    info = info_of([params], len(logits), [seed]).repeat(500)
    parts = torch.arange(n).split(500)
    rows = logits.repeat(500, 1)
    return torch.cat([Sampler().sample(rows, info, part) for part in parts])


def assert_chi_square(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Counts are what was expected, to five standard deviations of chi-square."""
    expected = expected.double()
    assert ((expected > 0) | (counts == 0)).all(), "something impossible happened"
    rare = expected < 8
    pairs = [(counts[~rare].double(), expected[~rare])]
    if rare.any():  # in one cell
        pairs.append((counts[rare].sum().double()[None], expected[rare].sum()[None]))
    observed, wanted = (torch.cat(column) for column in zip(*pairs, strict=True))
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    freedom = max(1, len(wanted) - 1)
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom) + 5, (chi_square, freedom)


# --- Randomness -------------------------------------------------------------------------------


def splitmix(seed: int, position: int) -> float:
    """The definition, in Python's integers."""
    mask = (1 << 64) - 1

    def finalize(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    state = finalize((seed + gamma) & mask)
    return (finalize((state + (position + 1) * gamma) & mask) >> 11) / (1 << 53)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**40))
def test_uniform_is_splitmix64(seed: int, position: int) -> None:
    u = uniform(torch.tensor([seed]), torch.tensor([position]))
    assert u.dtype == torch.float64
    assert u.item() == splitmix(seed, position)
    assert 0 <= u.item() <= LAST


def test_uniform_of_a_seed_is_the_published_generator() -> None:
    """SplitMix64 started at 0 gives 0xE220A8397B1DCDAF first; ours starts at a hash of the seed."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def unshift(y: int, n: int) -> int:
        x = y
        for _ in range(64 // n + 1):
            x = y ^ (x >> n)
        return x

    def unfinalize(x: int) -> int:
        x = unshift(x, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        return unshift(x, 30)

    seed = (unfinalize(0) - gamma) & mask
    seed -= (seed >> 63) << 64
    u = uniform(torch.full((3,), seed), torch.arange(3))
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert u.tolist() == [(x >> 11) / (1 << 53) for x in published]


SEED_GRIDS = {
    "small seeds": torch.arange(512),
    "negative seeds": -torch.arange(512) * 7919,
    "high bits": torch.arange(512) << 54,
    "drawn seeds": torch.randint(
        -(2**62), 2**62, (512,), generator=torch.Generator().manual_seed(0)
    ),
}


@pytest.mark.parametrize("seeds", SEED_GRIDS.values(), ids=SEED_GRIDS)
@pytest.mark.parametrize("stride", [1, 2, 64])
def test_uniform_is_uniform_and_neighbours_are_independent(
    seeds: torch.Tensor, stride: int
) -> None:
    n = 512
    u = uniform(
        seeds.unsqueeze(1).expand(-1, n).reshape(-1), (torch.arange(n) * stride).repeat(len(seeds))
    ).view(len(seeds), n)
    cell = (u * 16).long()
    # Over everything, over the positions of each seed, and over the seeds at each position.
    assert_chi_square(
        torch.bincount((u * 1024).long().view(-1), minlength=1024),
        torch.full((1024,), u.numel() / 1024),
    )
    for table in (cell, cell.T):
        counts = torch.zeros(len(table), 16).scatter_add_(1, table, torch.ones(table.shape))
        chi_square = ((counts - n / 16) ** 2 / (n / 16)).sum(dim=1)
        assert chi_square.mean().sub(15).abs() < 5 * math.sqrt(30 / len(table))
        assert chi_square.max() < 15 + 8 * math.sqrt(30)
    # Pairs of neighbours in position, in seed and across fill the unit square evenly.
    for a, b in (
        (cell[:, :-1], cell[:, 1:]),
        (cell[:-1], cell[1:]),
        (cell[:-1, 1:], cell[1:, :-1]),
        (cell[:-1, :-1], cell[1:, 1:]),
    ):
        pairs = torch.bincount((a * 16 + b).reshape(-1), minlength=256)
        assert_chi_square(pairs, torch.full((256,), a.numel() / 256))
    assert torch.corrcoef(u)[~torch.eye(len(seeds), dtype=torch.bool)].abs().max() < 6 / math.sqrt(
        n
    )
    # Every one of the 53 bits is a fair coin.
    bits = (u * 2.0**53).long().view(-1)
    for k in range(53):
        ones = (bits >> k & 1).sum().item()
        assert abs(ones - u.numel() / 2) < 5.5 * math.sqrt(u.numel()) / 2


# --- Weights and the inverse of their sum -----------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000, 50257])
def test_weights_are_integers_whose_sums_are_exact(vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[1] = 0.0  # the largest sum there is
    weights = _token_weights(logits, torch.tensor([[1.0], [1.0], [0.1]]))
    assert (weights == weights.round()).all() and (weights >= 0).all()
    bits = math.log2(weights.max().item())
    assert bits.is_integer() and (weights.amax(dim=1) == 2.0**bits).all()
    for row in weights:
        total = sum(int(w) for w in row.tolist())
        assert total <= 2**52
        assert row.sum(dtype=torch.float64).item() == total
        assert row.flip(0).double().cumsum(0)[-1].item() == total


def test_weights_are_close_to_float64_probabilities() -> None:
    """At the vocabulary of a large model: 4e-8 to 1e-6 in total variation, 3e-6 at worst."""
    vocab_size = 152_064
    generator = torch.Generator().manual_seed(0)
    flat, peaked, worst = torch.randn(3, vocab_size, generator=generator) * 3
    peaked = peaked * 0.7 - 20
    peaked[5] = 5.0
    worst = torch.full((vocab_size,), -24.0)  # each rounds to 1 instead of 0.65
    worst[-1] = 0.0
    for logits, bound in ((flat, 1e-7), (peaked, 2e-6), (worst, 4e-6)):
        exact = torch.softmax(logits.double(), dim=0)
        weights = _token_weights(logits[None], torch.ones(1, 1))[0].double()
        assert (weights / weights.sum() - exact).abs().sum() / 2 < bound


def pick(weights: Sequence[float], u: float) -> int:
    return _pick(
        torch.tensor([weights], dtype=torch.float32), torch.tensor([u], dtype=torch.float64)
    ).item()


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0, 0, 1, 2, 3, 2**20, 2**36]), min_size=1, max_size=40),
    u=st.one_of(st.floats(0, LAST), st.sampled_from([0.0, LAST, 0.5])),
    scale=st.sampled_from([1, 29]),
)
def test_pick_inverts_the_running_sum(weights: list[int], u: float, scale: int) -> None:
    """Against exact fractions, also across blocks; a token without weight never comes out."""
    weights = [w for w in weights for _ in range(scale)]
    total = sum(weights)
    token = pick(weights, u)
    assert 0 <= token < len(weights)
    if total == 0:
        return
    assert weights[token] > 0
    # Rounding of u * total in float64 moves the target by less than 1.
    low = sum(weights[:token])
    assert low - 1 <= Fraction(u) * total < low + weights[token] + 1
    assert low <= math.floor(u * float(total)) < low + weights[token]


@settings(max_examples=300, deadline=None)
@given(total=st.one_of(st.integers(1, 2**52), st.integers(0, 52).map(lambda k: 2**k)))
def test_the_largest_uniform_number_stays_below_every_total(total: int) -> None:
    for near in {max(1, total - 1), total, min(total + 1, 2**52)}:
        assert math.floor(LAST * float(near)) == near - 1


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 511, 512, 513, 1000])
def test_pick_at_the_ends(vocab_size: int) -> None:
    top = 2.0**36
    for only in {0, vocab_size // 2, vocab_size - 1}:
        weights = [0.0] * vocab_size
        weights[only] = top
        for u in (0.0, 0.5, LAST):
            assert pick(weights, u) == only
        weights[only] = 1.0
        assert pick(weights, LAST) == only
    assert pick([top] * vocab_size, 0.0) == 0
    assert pick([top] * vocab_size, LAST) == vocab_size - 1
    assert [pick([1.0] * 4, k / 4) for k in range(4)] == [0, 1, 2, 3]
    assert [pick([1.0] * 4, math.nextafter(k / 4, 0)) for k in range(1, 5)] == [0, 1, 2, 3]


# --- Filters ----------------------------------------------------------------------------------


def kept(weights: Sequence[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Tokens that the three filters keep, from exact sums over the sorted vocabulary."""
    order = sorted(range(len(weights)), key=lambda t: (-weights[t], t))
    total = sum(map(int, weights))
    # The device knows top_p in float32, and multiplies in float64.
    max_mass = float(torch.tensor(top_p)) * float(total)
    lowest = torch.tensor(weights[order[0]]) * torch.tensor(min_p)
    result, before = [], 0
    for rank, token in enumerate(order):
        if rank < top_k and before <= max_mass and weights[token] >= lowest:
            result.append(token)
        before += int(weights[token])
    return sorted(t for t in result if weights[t] > 0)


def filtered(logits: torch.Tensor, rows: Sequence[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    info = info_of(rows, logits.shape[1])
    weights = _token_weights(logits, info.temperatures)
    return weights.clone(), _filter_rows(weights, info) if info.need_filter else weights


FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(2, 60),
        "top_p": st.one_of(st.floats(0.0625, 1.0), st.sampled_from([1e-30, 0.25, 0.5, 0.999999])),
        "min_p": st.one_of(st.floats(0, 1), st.sampled_from([1e-12, 0.5, 1.0])),
        "temperature": st.sampled_from([0.01, 0.5, 2.0, 100.0]),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(FILTERS, min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([0, 1, 2, 8]),
    spread=st.sampled_from([0.1, 3.0, 20.0]),
)
def test_filters_keep_exactly_what_the_sorted_vocabulary_keeps(
    rows: list[dict], seed: int, levels: int, spread: float
) -> None:
    """Also with many equal logits, as bfloat16 has them, and with tokens that are ruled out."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 50, generator=generator) * spread
    if levels:
        logits = (logits / spread * levels).round() * (spread / levels)
    logits[:, torch.randint(0, 50, (5,), generator=generator)] = -math.inf
    weights, result = filtered(logits, rows)
    for params, before, after in zip(rows, weights, result, strict=True):
        wanted = kept(
            before.tolist(),
            params.get("top_k", 50),
            params.get("top_p", 1.0),
            params.get("min_p", 0.0),
        )
        assert after.nonzero().view(-1).tolist() == wanted
        assert (after[wanted] == before[wanted]).all()


def test_top_k_and_top_p_cut_through_equals() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    _, result = filtered(
        logits, [{"top_k": 3}, {"top_k": 2}, {"top_p": 0.7}, {"top_p": 0.5, "top_k": 4}]
    )
    # Probabilities: 0.110 0.299 0.110 0.299 0.110 0.040
    assert [row.nonzero().view(-1).tolist() for row in result] == [
        [0, 1, 3],
        [1, 3],
        [0, 1, 3],
        [1, 3],
    ]


def test_filters_of_a_large_vocabulary() -> None:
    """Large enough for several parts and both histograms, against a sorted cumulative sum."""
    vocab_size = 50_257
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    logits[6:] = logits[6:].bfloat16().float()
    rows = [
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_k": 3000},
        {"top_k": 40, "top_p": 0.3},
        {"min_p": 0.01, "top_p": 0.95},
        {"top_k": vocab_size + 5},
    ] * 2
    weights, result = filtered(logits, rows)
    order = torch.sort(weights, dim=1, descending=True, stable=True)
    for i, params in enumerate(rows):
        values = order.values[i].double()
        before = values.cumsum(0) - values
        n = (before <= float(torch.tensor(params.get("top_p", 1.0))) * values.sum()).sum()
        n = torch.minimum(n, torch.tensor(params.get("top_k", vocab_size)))
        n = torch.minimum(n, (values >= values[0] * params.get("min_p", 0.0)).sum())
        wanted = torch.zeros(vocab_size)
        wanted[order.indices[i, :n]] = weights[i, order.indices[i, :n]]
        assert torch.equal(result[i], wanted)


# --- Distributions ----------------------------------------------------------------------------

CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    {"top_p": 0.01},
]


def reference_distribution(
    logits: torch.Tensor, temperature=1.0, top_k=10**9, top_p=1.0, min_p=0.0
) -> torch.Tensor:
    """Upstream's joint filters, in float64, by sorting."""
    probs, order = torch.softmax(logits.double() / temperature, dim=0).sort(
        descending=True, stable=True
    )
    drop = torch.arange(len(probs)) >= top_k
    drop |= probs.cumsum(0) - probs > top_p
    drop |= probs < probs[0] * min_p
    probs[drop] = 0.0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


@pytest.mark.parametrize("params", CASES, ids=str)
def test_samples_follow_the_float64_distribution(params: dict) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(7)) * 2
    logits[3] = -math.inf
    n = 15_000
    expected = reference_distribution(logits, **params) * n
    for seed in (1, 2**62 + 5):
        tokens = sample_row(logits, n, seed, **params)
        assert tokens.dtype == torch.int64
        assert_chi_square(torch.bincount(tokens, minlength=40), expected)
    # Over seeds instead of positions.
    info = info_of([params] * 1000, 40, range(1000))
    tokens = Sampler().sample(logits.repeat(1000, 1), info, torch.full((1000,), 17))
    assert_chi_square(torch.bincount(tokens, minlength=40), expected / 15)


def test_consecutive_tokens_are_independent() -> None:
    tokens = sample_row(torch.zeros(8), 20_000)
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert_chi_square(pairs, torch.full((64,), 19_999 / 64))


def test_tokens_without_probability_never_come() -> None:
    logits = torch.full((600,), -math.inf)
    logits[[0, 255, 256, 511, 599]] = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0])
    possible = {0, 255, 256, 511, 599}
    assert set(sample_row(logits, 2000).tolist()) == possible
    assert set(sample_row(logits, 2000, top_k=3).tolist()) == {255, 256, 511}
    logits[[0, 599]] = -math.inf
    assert set(sample_row(logits, 2000).tolist()) == {255, 256, 511}


# --- Rows and their neighbours ----------------------------------------------------------------

NEIGHBOURS = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.02, "temperature": 1.3},
    {"temperature": 0.6},
    {"top_p": 0.5, "top_k": 1},
    {"top_p": 0.8, "top_k": 300, "min_p": 0.001, "temperature": 2.0},
]


@pytest.mark.parametrize("vocab_size", [300, 4099, 49_152])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gives_the_same_token_in_any_batch(vocab_size: int, threads: int) -> None:
    n = len(NEIGHBOURS)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(n, vocab_size, generator=generator) * 3
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator).tolist()
    positions = torch.randint(0, 10_000, (n,), generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [
            Sampler()
            .sample(
                logits[i : i + 1].clone(),
                info_of([NEIGHBOURS[i]], vocab_size, [seeds[i]]),
                positions[i : i + 1],
            )
            .item()
            for i in range(n)
        ]
        batches = [
            torch.randperm(n, generator=generator)[: int(size)].tolist()
            for size in (n, n, n, 5, 3, 2)
        ]
        batches += [[0, 5], [1, 6], [2, 3], [0, 1], [0, 2], [0] * 7]
        for rows in batches:
            info = info_of([NEIGHBOURS[i] for i in rows], vocab_size, [seeds[i] for i in rows])
            tokens = Sampler().sample(logits[rows], info, positions[rows])
            assert tokens.tolist() == [alone[i] for i in rows], rows
    finally:
        torch.set_num_threads(before)


def test_parts_and_blocks_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(5)) * 3
    info = info_of([{"top_p": 0.9, "top_k": 100}] * 20, 1000)
    positions = torch.arange(20)
    expected = Sampler().sample(logits, info, positions)
    for name, value in (
        ("_FILTER_ELEMENTS", 1),
        ("_FILTER_PARTS", 1),
        ("_BLOCK", 7),
        ("_MAX_DIGIT_BITS", 3),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sampler_module, name, value)
            assert torch.equal(Sampler().sample(logits, info, positions), expected)


def test_exp_does_not_depend_on_where_a_number_lies() -> None:
    """What the promise rests on besides exact sums: elementwise functions give a number one result."""
    x = -torch.rand(5, 10_007, generator=torch.Generator().manual_seed(0)) * 30
    whole = x.exp()
    assert torch.equal(torch.stack([row.clone().exp() for row in x]), whole)
    assert torch.equal(
        torch.cat([part.clone().exp() for part in x.view(-1).split(13)]), whole.view(-1)
    )


def test_draft_trees_sample_as_their_nodes_would_alone() -> None:
    """Rows of a tree share a request's parameters and seed; positions make the difference."""
    rows = [{"top_p": 0.9}, {}, {"temperature": 0}]
    logits = torch.randn(12, 100, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(12) % 4 + 10
    info = info_of(rows, 100, [5, 6, 7])
    tokens = Sampler().sample(logits, info.repeat(4), positions)
    for i in range(12):
        one = info_of([rows[i // 4]], 100, [5 + i // 4])
        assert Sampler().sample(logits[i : i + 1], one, positions[i : i + 1]) == tokens[i]


# --- Greedy rows, edges -----------------------------------------------------------------------


def test_greedy_rows_are_argmax_and_the_first_among_equals() -> None:
    logits = torch.randint(0, 3, (6, 500), generator=torch.Generator().manual_seed(0)).float()
    expected = [row.tolist().index(row.max()) for row in logits]
    greedy, random_row = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}
    for rows in ([greedy] * 6, [greedy] * 5 + [random_row], [{"top_k": 1}] * 5 + [{}]):
        tokens = Sampler().sample(logits, info_of(rows, 500), torch.arange(6))
        assert tokens[:5].tolist() == expected[:5]


def test_greedy_batches_look_at_the_largest_logit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_token_weights", "_filter_rows", "_pick", "uniform"):
        monkeypatch.delattr(sampler_module, name)
    logits = torch.randn(2, 100)
    info = info_of([{"temperature": 0}, {"top_k": 1}], 100)
    assert torch.equal(Sampler().sample(logits, info, torch.arange(2)), logits.argmax(dim=1))


def test_extreme_logits_and_temperatures() -> None:
    """A huge bias, a tiny temperature: differences overflow to minus infinity, and nothing to NaN."""
    logits = torch.tensor([3.39e38, -3.4e38, 3.4e38, 0.0, -math.inf])
    for temperature in (1e-5, 1.0, 1e30):
        output = LogitsProcessorOutput(logits[None].clone())
        info = info_of([{"temperature": temperature}], 5)
        token = Sampler().forward(
            output, info, True, [5], [[1, 4]], torch.zeros(1, dtype=torch.int64)
        )
        assert token.item() in ({2} if temperature <= 1.0 else {0, 1, 2, 3})
        for values in (output.next_token_logprobs, output.next_token_top_logprobs_val):
            assert values.isfinite().all() and (values <= 0).all()
    assert set(sample_row(torch.tensor([-1e4, 0.0, -1e4]), 500, temperature=3e38).tolist()) == {
        0,
        1,
        2,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0}]
)
def test_broken_logits_break_their_own_row_alone(bad: float, params: dict) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    info = info_of([params] * 3, 300)
    expected = Sampler().sample(logits, info, torch.arange(3))
    logits[1] = bad
    tokens = Sampler().sample(logits, info, torch.arange(3))
    assert 0 <= tokens[1] < 300
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_logits_are_not_written() -> None:
    logits = torch.randn(3, 300)
    before = logits.clone()
    info = info_of([{"top_p": 0.9}, {}, {"temperature": 0}], 300)
    Sampler().forward(
        LogitsProcessorOutput(logits), info, True, [2, 0, 1], [None] * 3, torch.arange(3)
    )
    assert torch.equal(logits, before)


# --- Logprobs ---------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_scaled_logits_without_filters() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 7] = -math.inf
    rows = [
        {"temperature": 0.5, "top_k": 2},
        {"temperature": 0},
        {"temperature": 2.0, "top_p": 0.5},
        {},
    ]
    temperatures = torch.tensor([[0.5], [1.0], [2.0], [1.0]]).double()
    exact = torch.log_softmax(logits.double() / temperatures, dim=1)
    output = LogitsProcessorOutput(logits.clone())
    nums, ids = [3, 0, 1, 5], [[7, 1], None, [], [4]]
    tokens = Sampler().forward(output, info_of(rows, 300), True, nums, ids, torch.arange(4))
    output.copy_to_host()
    for i, token in enumerate(tokens.tolist()):
        got = output.output_logprobs(i)
        assert got.token == pytest.approx([exact[i, token].item()], abs=2e-6)
        if nums[i]:
            best = exact[i].topk(nums[i])
            assert got.top_idx == [best.indices.tolist()]
            assert got.top_val[0] == pytest.approx(best.values.tolist(), abs=2e-6)
        else:
            assert got.top_val is None and got.top_idx is None
        if ids[i] is None:
            assert got.token_ids_val is None and got.token_ids_idx is None
        else:
            wanted = exact[i, ids[i]].clamp(min=torch.finfo(torch.float32).min)
            assert got.token_ids_idx == [ids[i]]
            assert got.token_ids_val[0] == pytest.approx(wanted.tolist(), rel=1e-6, abs=2e-6)
    # As in upstream: never minus infinity, which JSON does not have.
    assert output.output_logprobs(0).token_ids_val[0][0] == torch.finfo(torch.float32).min


def test_logprobs_of_a_row_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    alone = LogitsProcessorOutput(logits[:1].clone())
    Sampler().forward(
        alone, info_of([{"temperature": 0.7, "top_k": 1}], 300), True, [0], [None], torch.arange(1)
    )
    both = LogitsProcessorOutput(logits.clone())
    rows = [{"temperature": 0.7, "top_k": 1}, {"temperature": 0.7}]
    Sampler().forward(both, info_of(rows, 300), True, [0, 2], [None, [3]], torch.arange(2))
    torch.testing.assert_close(
        both.next_token_logprobs[:1], alone.next_token_logprobs, rtol=0, atol=1e-6
    )


# --- The device is never waited for -----------------------------------------------------------


@pytest.fixture
def meta():
    """A device without values: whoever asks it for one gets an error instead of a wait."""
    device = torch.device("meta")
    previous = register_platform(Platform("meta", device))
    yield device
    if previous is not None:
        register_platform(previous)


def test_sampling_asks_the_device_for_nothing(meta: torch.device) -> None:
    info = info_of(NEIGHBOURS, 1000, device=meta)
    output = LogitsProcessorOutput(torch.empty(len(NEIGHBOURS), 1000, device=meta))
    positions = torch.empty(len(NEIGHBOURS), dtype=torch.int64, device=meta)
    n = len(NEIGHBOURS)
    for params in (info, info.repeat(1), info.copy_for_forward()):
        tokens = Sampler().forward(output, params, True, [2] * n, [[1, 2]] * n, positions)
        assert tokens.shape == (n,) and tokens.device == meta
    with pytest.raises((RuntimeError, NotImplementedError)):  # that the fixture has teeth
        tokens.tolist()
