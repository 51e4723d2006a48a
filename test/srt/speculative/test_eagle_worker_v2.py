"""Speculation with tiny random models: the text is the target's, and so is what lies in the pools.

The reference is the target model alone, asked for one token after the other by fresh forwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

# num_steps, topk, num_draft_tokens
CHAINS = [(1, 1, 2), (3, 1, 4), (5, 1, 6)]
TREES = [(1, 4, 5), (2, 2, 7), (3, 2, 4), (3, 4, 16), (4, 3, 10)]
LENS = [5, 1, 12]
GREEDY = {"temperature": 0.0}
SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.02},
]
MIXED = [GREEDY, {"temperature": 1.0, "top_k": 7}, {"temperature": 0.6}]

Make = Callable[..., Any]


def name_of(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))


@pytest.fixture(scope="session")
def plain_text() -> Make:
    """What the target alone writes for some requests; asked once for all shapes of trees."""
    known: dict[Any, list[list[int]]] = {}

    def ask(bench: Any, reqs: list[Any], num_tokens: int) -> list[list[int]]:
        key = (bench.vocab_size, num_tokens, *((tuple(r.prompt), r.seed) for r in reqs))
        if key not in known:
            known[key] = bench.plain(reqs, num_tokens)
        return known[key]

    return ask


# --- The text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", CHAINS + TREES, ids=name_of)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, MIXED], ids=["greedy", "sampled", "mixed"])
def test_text_is_that_of_plain_decoding(
    shape: tuple[int, int, int], params: Any, make_bench: Make, make_reqs: Make, plain_text: Make
) -> None:
    bench = make_bench(*shape)
    seed = 1 + [GREEDY, SAMPLED, MIXED].index(params)
    reqs = make_reqs(LENS, params, seed=seed)
    bench.generate(reqs, 14)
    assert [r.output_ids[:14] for r in reqs] == plain_text(bench, reqs, 14)
    accepted = [n for r in reqs for n in r.accepted]
    assert max(accepted) > 1, "nothing was ever accepted: the test shows nothing"
    if params is not GREEDY:  # greedy text soon goes in circles that the draft knows
        assert min(accepted) == 1, "nothing was ever refused: the test shows nothing"


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 2, 8)], ids=name_of)
@pytest.mark.parametrize("params", [GREEDY, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_text_of_one_request(
    shape: tuple[int, int, int], params: Any, make_bench: Make, make_reqs: Make
) -> None:
    bench = make_bench(*shape)
    reqs = make_reqs([7], params, seed=3)
    bench.generate(reqs, 20)
    assert [r.output_ids[:20] for r in reqs] == bench.plain(reqs, 20)


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 8)], ids=name_of)
def test_draft_with_a_vocabulary_of_its_own(
    shape: tuple[int, int, int], make_bench: Make, make_reqs: Make, plain_text: Make
) -> None:
    bench = make_bench(*shape, draft_vocab_size=20)
    reqs = make_reqs(LENS, {"temperature": 1.0}, seed=4)
    bench.generate(reqs, 20)
    assert [r.output_ids[:20] for r in reqs] == plain_text(bench, reqs, 20)
    assert max(n for r in reqs for n in r.accepted) > 1


@pytest.mark.parametrize("chunk", [1, 5])
def test_text_after_chunked_prefill(
    chunk: int, make_bench: Make, make_reqs: Make, plain_text: Make
) -> None:
    bench = make_bench(3, 2, 8)
    reqs = make_reqs(LENS, {"temperature": 1.0}, seed=5)
    bench.generate(reqs, 12, chunk=chunk)
    assert [r.output_ids[:12] for r in reqs] == plain_text(bench, reqs, 12)


def test_request_that_starts_over(make_bench: Make, make_reqs: Make) -> None:
    """Retraction: prompt and output so far are prefilled again, in a row that others have used."""
    bench = make_bench(3, 2, 8)
    reqs = make_reqs([5, 9], {"temperature": 1.0}, seed=6)
    bench.prefill(reqs)
    for _ in range(3):
        bench.step(reqs)
    reqs[0].row, reqs[1].row = reqs[1].row, 2
    bench.prefill(reqs)
    for _ in range(4):
        bench.step(reqs)
    expected = bench.plain(reqs, 30)
    for req, text in zip(reqs, expected, strict=True):
        assert req.output_ids == text[: len(req.output_ids)]


def test_logit_bias_acts_at_every_node(make_bench: Make, make_reqs: Make) -> None:
    bench = make_bench(3, 2, 8)
    bias = {str(t): -100.0 for t in range(0, 32, 2)}
    params = [GREEDY | {"logit_bias": bias}, {"temperature": 1.0}, {"logit_bias": bias}]
    reqs = make_reqs(LENS, params, seed=7)
    bench.generate(reqs, 12)
    assert [r.output_ids[:12] for r in reqs] == bench.plain(reqs, 12)
    assert all(t % 2 for r in (reqs[0], reqs[2]) for t in r.output_ids)


# --- Distribution -----------------------------------------------------------------------------


HOT = 2.0  # the temperature: a flatter target is farther from its draft


def triple_probabilities(bench: Any, prompt: list[int]) -> torch.Tensor:
    """Exact probabilities of the next three tokens, shape (V * V * V,), from the target's logits."""
    vocab = range(bench.vocab_size)
    probs = {}
    for length in range(3):
        for tail in itertools.product(vocab, repeat=length):
            hidden = bench.target_prefill([*prompt, *tail])
            logits = bench.target.model.compute_logits(hidden[-1:])[0].double()
            probs[tail] = torch.softmax(logits / HOT, 0)
    triples = itertools.product(vocab, repeat=3)
    return torch.stack([probs[()][a] * probs[(a,)][b] * probs[(a, b)][c] for a, b, c in triples])


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Standard score of the statistic; cells with few expected counts are one cell."""
    expected = probs * counts.sum()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    # Wilson and Hilferty's cube root makes the statistic nearly normal.
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 2, 5)], ids=name_of)
def test_distribution_is_the_targets(
    shape: tuple[int, int, int], make_bench: Make, make_reqs: Make
) -> None:
    """Chi-square test on the first three tokens of 3,072 texts that differ in their seed alone.

    The seeds are fixed, so the verdict is too. Power: were one in ten second tokens taken from the
    draft unchecked, the last line shows that the test would notice.
    """
    size, batch = 6, 1024
    bench = make_bench(*shape, vocab_size=size, num_rows=batch + 1, row_len=12)
    counts = torch.zeros(size**3, dtype=torch.int64)
    unchecked = torch.zeros(size**3, dtype=torch.int64)
    accepted = 0
    for seed in range(3):
        reqs = make_reqs([1] * batch, {"temperature": HOT}, seed=100 + seed, vocab_size=size)
        for req in reqs:
            req.prompt = [3]
        bench.prefill(reqs)
        drafted = bench.future_map.topk_index_buf[:batch, 0].tolist()
        while busy := [r for r in reqs if len(r.output_ids) < 3]:
            bench.step(busy)
        for k, (req, draft) in enumerate(zip(reqs, drafted, strict=True)):
            a, b, c = req.output_ids[:3]
            accepted += req.accepted[0] > 1
            counts[(a * size + b) * size + c] += 1
            unchecked[(a * size + (b if k % 10 else draft)) * size + c] += 1
    assert 0.2 < accepted / counts.sum().item() < 0.8
    probs = triple_probabilities(bench, [3])
    assert abs(chi_square(counts, probs)) < 3.0
    assert chi_square(unchecked, probs) > 6.0


# --- What lies in the pools -------------------------------------------------------------------


def kv_of(runner: Any, slots: torch.Tensor) -> torch.Tensor:
    pool = runner.token_to_kv_pool
    layers = [torch.stack(pool.get_kv_buffer(i)) for i in range(pool.layer_num)]
    return torch.stack(layers)[:, :, slots].clone()


def assert_state_is_that_of_a_fresh_prefill(bench: Any, reqs: list[Any], topk: int) -> None:
    """KV of both models for all committed tokens, and what the next draft starts from."""
    state = bench.future_map.resolve_spec(torch.tensor([r.row for r in reqs]))
    for i, req in enumerate(reqs):
        tokens = req.tokens
        n = len(tokens) - 1  # the last token is the root of the next tree and has no KV yet
        assert state.new_seq_lens[i].item() == n
        assert state.verified_id[i].item() == tokens[-1]
        slots, fresh = bench.rows[req.row, :n], bench.rows[-1, :n]
        features = bench.target_prefill(tokens[:-1])
        drafted = bench.draft_prefill(tokens[1:], features)
        for runner in (bench.target, bench.draft):
            torch.testing.assert_close(
                kv_of(runner, slots), kv_of(runner, fresh), atol=2e-4, rtol=1e-4
            )
        torch.testing.assert_close(state.hidden_states[i], drafted[-1], atol=1e-3, rtol=1e-4)
        model = bench.draft.model
        best = torch.softmax(model.compute_logits(drafted[-1:])[0], dim=0).topk(topk)
        ids = best.indices if model.hot_token_id is None else model.hot_token_id[best.indices]
        torch.testing.assert_close(state.topk_p[i], best.values, atol=1e-4, rtol=1e-3)
        assert state.topk_index[i].tolist() == ids.tolist()


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 2, 8), (4, 3, 10)], ids=name_of)
def test_committed_kv_and_draft_state_are_those_of_a_fresh_prefill(
    shape: tuple[int, int, int], draft_vocab_size: int | None, make_bench: Make, make_reqs: Make
) -> None:
    bench = make_bench(*shape, draft_vocab_size=draft_vocab_size)
    reqs = make_reqs(LENS, MIXED, seed=9)
    bench.prefill(reqs)
    for _ in range(4):
        bench.step(reqs)
        assert_state_is_that_of_a_fresh_prefill(bench, reqs, shape[1])
    assert any(n > 2 for r in reqs for n in r.accepted), "no path was moved: the test shows nothing"


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunked_prefill_leaves_the_state_of_a_whole_one(
    chunk: int, make_bench: Make, make_reqs: Make
) -> None:
    bench = make_bench(3, 2, 8)
    reqs = make_reqs(LENS, MIXED, seed=19)
    bench.prefill(reqs, chunk=chunk)
    assert_state_is_that_of_a_fresh_prefill(bench, reqs, topk=2)


def test_a_step_writes_to_nothing_but_its_requests_rows(make_bench: Make, make_reqs: Make) -> None:
    bench = make_bench(3, 3, 12)
    reqs = make_reqs(LENS, seed=10)
    bench.prefill(reqs)
    free = [
        slot
        for row in range(len(bench.rows))
        for slot in (bench.rows[row, len(reqs[row].tokens) + 24 :] if row < 3 else bench.rows[row])
    ]
    free = torch.stack(free)
    before = kv_of(bench.target, free), kv_of(bench.draft, free)
    bench.step(reqs)
    assert torch.equal(kv_of(bench.target, free), before[0])
    assert torch.equal(kv_of(bench.draft, free), before[1])


# --- The draft's attention --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 1, 5), (3, 2, 7), (4, 3, 20), (5, 4, 30)], ids=name_of)
def test_each_draft_node_sees_its_exact_ancestors(
    shape: tuple[int, int, int],
    make_bench: Make,
    make_reqs: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft's feature at a node is that of its branch, run as a plain sequence."""
    bench = make_bench(*shape)
    num_steps, topk, _ = shape
    reqs = make_reqs([6, 2, 9], seed=11)
    bench.prefill(reqs)
    bench.step(reqs)
    state = bench.future_map.resolve_spec(torch.tensor([r.row for r in reqs]))

    steps = []
    forward = bench.draft.forward

    def spy(batch: Any) -> Any:
        output = forward(batch)
        if batch.forward_mode == ForwardMode.DECODE:
            steps.append((batch, output.hidden_states.clone()))
        return output

    monkeypatch.setattr(bench.draft, "forward", spy)
    texts = [list(r.tokens) for r in reqs]
    bench.step(reqs)
    monkeypatch.undo()
    assert len(steps) == num_steps - 1

    for i, text in enumerate(texts):
        prefix = bench.target_prefill(text[:-1])
        # Branches of the beam so far: tokens, and the features beside them.
        branches: list[tuple[list[int], list[torch.Tensor]]] = [([], [])]
        for level, (batch, hidden) in enumerate(steps):
            rows = slice(i * topk, (i + 1) * topk)
            assert batch.positions[rows].tolist() == [len(text) - 1 + level] * topk
            grown = []
            for token, feature, out in zip(
                batch.input_ids[rows].tolist(),
                batch.spec_hidden_states[rows],
                hidden[rows],
                strict=True,
            ):
                tokens, features = parent_of(feature, branches, state.hidden_states[i], level)
                branch = [*tokens, token], [*features, feature]
                expected = bench.draft_prefill(
                    [*text[1:], *branch[0]], torch.cat((prefix, torch.stack(branch[1])))
                )[-1]
                torch.testing.assert_close(out, expected, atol=2e-3, rtol=1e-4)
                grown.append((*branch, out))
            branches = grown


def parent_of(
    feature: torch.Tensor, branches: list[Any], root: torch.Tensor, level: int
) -> tuple[list[int], list[torch.Tensor]]:
    """The branch that a node continues: the one whose last output is the node's feature."""
    if level == 0:
        torch.testing.assert_close(feature, root)
        return [], []
    found = [b for b in branches if torch.equal(b[2], feature)]
    assert len(found) == 1
    return found[0][0], found[0][1]


# --- What requests can ask for ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 12)], ids=name_of)
def test_logprobs_of_the_accepted_path(
    shape: tuple[int, int, int], make_bench: Make, make_reqs: Make
) -> None:
    bench = make_bench(*shape)
    reqs = make_reqs(LENS, MIXED, seed=12)
    asked = {
        "return_logprob": True,
        "top_logprobs_nums": [2, 0, 3],
        "token_ids_logprobs": [None, [4, 9], [1]],
    }
    bench.prefill(reqs)
    for _ in range(4):
        texts = [list(r.tokens) for r in reqs]
        result = bench.step(reqs, **asked)
        result.copy_to_host()
        for i, (req, text) in enumerate(zip(reqs, texts, strict=True)):
            new = req.tokens[len(text) :]
            rows = result.logits_output.output_logprobs(i, len(new))
            assert len(rows.token) == len(new)
            hidden = bench.target_prefill(req.tokens[:-1])[len(text) - 1 :]
            logits = bench.target.model.compute_logits(hidden).double()
            logprobs = torch.log_softmax(logits / req.params.temperature, dim=-1)
            for j, token in enumerate(new):
                assert rows.token[j] == pytest.approx(logprobs[j, token].item(), abs=1e-3)
                for val, idx in zip(
                    (rows.top_val or [[]] * len(new))[j],
                    (rows.top_idx or [[]] * len(new))[j],
                    strict=True,
                ):
                    assert val == pytest.approx(logprobs[j, idx].item(), abs=1e-3)
                if rows.token_ids_val is not None:
                    named = asked["token_ids_logprobs"][i]
                    assert rows.token_ids_val[j] == pytest.approx(
                        logprobs[j, named].tolist(), abs=1e-3
                    )


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 12)], ids=name_of)
def test_hidden_states_of_the_accepted_path(
    shape: tuple[int, int, int], make_bench: Make, make_reqs: Make
) -> None:
    bench = make_bench(*shape)
    reqs = make_reqs(LENS, seed=13)
    result = bench.prefill(
        reqs, return_hidden_states=True, capture_hidden_mode=CaptureHiddenMode.FULL
    )
    expected = torch.cat([bench.target_prefill(r.prompt) for r in reqs])
    torch.testing.assert_close(result.logits_output.hidden_states, expected, atol=2e-4, rtol=1e-4)
    for _ in range(3):
        before = [len(r.tokens) for r in reqs]
        result = bench.step(reqs, return_hidden_states=True)
        for i, (req, n) in enumerate(zip(reqs, before, strict=True)):
            count = len(req.tokens) - n
            torch.testing.assert_close(
                result.logits_output.hidden_states[i, :count],
                bench.target_prefill(req.tokens[:-1])[n - 1 :],
                atol=1e-3,
                rtol=1e-4,
            )


def test_nothing_is_handed_out_unasked(make_bench: Make, make_reqs: Make) -> None:
    bench = make_bench(3, 1, 4)
    reqs = make_reqs(LENS, seed=14)
    assert bench.prefill(reqs).logits_output.hidden_states is None
    output = bench.step(reqs).logits_output
    assert output.hidden_states is None
    assert output.next_token_logits is None
    assert output.next_token_logprobs is None


# --- The worker itself ------------------------------------------------------------------------


class NoSync(TorchDispatchMode):
    """Refuses what would make the host wait for a device."""

    WAITS = (
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "resolve_conj",  # tolist() and numpy() begin with it
        "unique",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        assert name not in self.WAITS, f"{name} waits for the device"
        if name in ("index", "index_put"):
            for index in args[1]:
                assert index is None or index.dtype == torch.int64, f"{name} by a mask"
        if name == "repeat_interleave" and "Tensor" in func._overloadname:
            assert kwargs.get("output_size") is not None, f"{name} of unknown size"
        return func(*args, **kwargs)


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 2, 8)], ids=name_of)
def test_a_step_does_not_wait_for_the_device(
    shape: tuple[int, int, int], make_bench: Make, make_reqs: Make
) -> None:
    bench = make_bench(*shape)
    reqs = make_reqs(LENS, MIXED, seed=16)
    lens = [len(r.prompt) for r in reqs]
    batch = bench.extend_batch(reqs, [0] * 3, lens)
    with NoSync():
        bench.run(batch)
    batch = bench.decode_batch(
        reqs, return_logprob=True, top_logprobs_nums=[2] * 3, token_ids_logprobs=[[1]] * 3
    )
    with NoSync():
        bench.run(batch)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0]),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x),
    ],
)
def test_a_wait_is_found(wait: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(AssertionError), NoSync():
        wait(torch.arange(4))


def test_the_batch_is_not_changed(make_bench: Make, make_reqs: Make) -> None:
    bench = make_bench(3, 2, 8)
    reqs = make_reqs(LENS, seed=17)
    for batch in (
        bench.extend_batch(reqs, [0] * 3, [len(r.prompt) for r in reqs]),
        bench.decode_batch(reqs),
    ):
        before = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in vars(batch).items()
        }
        bench.run(batch)
        for name, value in vars(batch).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, before[name]), name
            else:
                assert value is before[name], name


def test_phases_are_told(make_bench: Make, make_reqs: Make) -> None:
    bench = make_bench(3, 1, 4)
    reqs = make_reqs(LENS, seed=18)
    assert bench.prefill(reqs).phases == {}
    phases = bench.step(reqs).phases
    assert list(phases) == ["draft", "verify", "extend"]
    assert min(phases.values()) > 0


@pytest.mark.parametrize(
    ("num_steps", "topk", "num_draft_tokens", "named"),
    [
        (3, 1, 5, r"speculative_num_draft_tokens must be in \[2, 4\].*got 5"),
        (2, 2, 8, r"speculative_num_draft_tokens must be in \[2, 7\].*got 8"),
        (3, 2, 1, "speculative_num_draft_tokens"),
        (1, 9, 3, "speculative_eagle_topk must be at most .* 8, got 9"),
    ],
)
def test_impossible_trees_are_refused(
    num_steps: int, topk: int, num_draft_tokens: int, named: str
) -> None:
    args = SimpleNamespace(
        speculative_num_steps=num_steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=num_draft_tokens,
    )
    config = SimpleNamespace(vocab_size=32, draft_vocab_size=8)
    runner = SimpleNamespace(model_config=config, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=named):
        EAGLEWorkerV2(args, runner, runner, None)
