"""Sparse penalties against a float64 reference, and what they promise about memory, copies and bits.

Everything here holds for each backend. On the CPU these are torch and numba; where
``TRITON_INTERPRET=1`` is set before Triton is imported it is Triton, interpreted
(test_sparse_penalties_interpreted.py does that in a process of its own). On a GPU torch and Triton run
on it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from penalty_reference import CPU, Rig, assert_row, make_logits, read_list, way_of
from penalty_scenarios import (
    ALL,
    CHAIN,
    SCENARIOS,
    MakeRig,
    branching_trees,
    growing_lists,
    long_lists,
    mixed_batches,
    random_story,
)

from sglang.srt.sampling.penaltylib import sparse_layout, sparse_ops, sparse_planner
from sglang.srt.sampling.penaltylib.sparse_layout import BIAS, ENTRY_BYTES, FIRST_PAGE, PAGE, STOP
from sglang.srt.sampling.penaltylib.sparse_penalties import (
    PenaltyCapacityError,
    PenaltyPlanner,
    PenaltyPool,
    PenaltyRequest,
    PenaltyState,
    PenaltyStepError,
)
from sglang.srt.sampling.penaltylib.torch_ops import TorchPenaltyOps

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = [
    pytest.param(
        (backend, "cuda", dtype), marks=pytest.mark.gpu, id=f"{backend}-gpu-{str(dtype)[6:]}"
    )
    for backend, dtype in (
        ("torch", torch.float32),
        ("triton", torch.float32),
        ("triton", torch.float16),
        ("triton", torch.bfloat16),
    )
]
BACKENDS = ["triton"] if IS_INTERPRETED else ["torch", "numba"]
HERE = [pytest.param((backend, "cpu", torch.float32), id=f"{backend}-cpu") for backend in BACKENDS]


@pytest.fixture(params=HERE if IS_INTERPRETED else HERE + GPU)
def make_rig(request: pytest.FixtureRequest) -> MakeRig:
    backend, device, dtype = request.param
    return partial(Rig, backend, device=torch.device(device), dtype=dtype)


# --- Against the reference --------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[MakeRig], None], make_rig: MakeRig) -> None:
    scenario(make_rig)


@pytest.mark.parametrize("decade", range(1 if IS_INTERPRETED else 6))
def test_random_stories(decade: int, make_rig: MakeRig) -> None:
    for seed in range(3 if IS_INTERPRETED else 10):
        random_story(make_rig, 10 * decade + seed)


@pytest.mark.parametrize("vocab_size", [512, 32000, 152064])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_vocabularies_and_types(vocab_size: int, dtype: torch.dtype, make_rig: MakeRig) -> None:
    if IS_INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter's bfloat16 arithmetic is wrong")
    draw = random.Random(vocab_size)
    rig = make_rig(vocab_size=vocab_size, max_draft_tokens=5)
    rig.dtype = dtype
    seen = [draw.randrange(vocab_size) for _ in range(300)] + [0, vocab_size - 1] * 3
    rig.admit(0, seen, logit_bias={seen[0]: 0.33, 1: -3.25}, **ALL)
    rig.admit(3, seen[:5], min_new_tokens=6, stop_token_ids={vocab_size - 1}, **ALL)
    rig.decode([3, 0], [vocab_size - 1, 1])
    drafts = [[1, vocab_size - 1, 0, 0, seen[7]]] * 2
    rig.verify([3, 0], drafts, [CHAIN[:5]] * 2, [[vocab_size - 1, 0]] * 2, [1, 2])


@pytest.mark.parametrize("num_nodes", [16, 33, 64])
def test_large_trees(num_nodes: int, make_rig: MakeRig) -> None:
    draw = random.Random(num_nodes)
    rig = make_rig(vocab_size=512, max_draft_tokens=64)
    batch = [1] if IS_INTERPRETED else [1, 0, 4]
    for slot in (0, 1, 4):
        rig.admit(slot, range(slot, 200), min_new_tokens=205, stop_token_ids={7}, **ALL)
    parents = [[-1, *(draw.randrange(n) for n in range(1, num_nodes))] for _ in batch]
    drafts = [[draw.randrange(300) for _ in range(num_nodes)] for _ in batch]
    tokens = [[draw.randrange(300) for _ in range(num_nodes)] for _ in batch]
    rig.verify(batch, drafts, parents, tokens, [num_nodes, 1, 9][: len(batch)])
    rig.assert_counts()
    rig.decode(batch, [5] * len(batch))


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 33, 64])
def test_ancestors(num_nodes: int, make_rig: MakeRig) -> None:
    """Parents before children, behind them, and chains."""
    rig, draw = make_rig(), random.Random(num_nodes)
    early = [-1, *(draw.randrange(n) for n in range(1, num_nodes))]
    late = [-1 if p < 0 else num_nodes - 1 - p for p in reversed(early)]
    trees = [early, list(range(-1, num_nodes - 1)), late]
    mask = rig.state.ancestors_from_parents(torch.tensor(trees, device=rig.device))
    assert mask.dtype == torch.bool
    for tree, parents in zip(mask.cpu(), trees):
        for node in range(num_nodes):
            assert sorted(way_of(parents, node)) == tree[node].nonzero().flatten().tolist()


def test_ten_thousand_tokens_are_counted_exactly(make_rig: MakeRig) -> None:
    draw = random.Random(1)
    vocab_size = 300 if IS_INTERPRETED else 1500
    rig = make_rig(vocab_size=vocab_size, num_slots=2)
    rig.admit(1, **ALL)
    while len(rig.outputs[1]) < 10_000:
        num = min(64, 10_000 - len(rig.outputs[1]))
        tokens = [int(vocab_size * draw.random() ** 3) for _ in range(64)]
        step = rig.planner.plan([1], max_tokens=64)
        rig.state.begin(step)
        lens = torch.tensor([num], device=rig.device)
        rig.state.commit(step, torch.tensor([tokens], device=rig.device), lens)
        rig.outputs[1].extend(tokens[:num])
        rig.planner.settle(step, [num])
    rig.assert_counts()
    assert sum(read_list(rig.state.tables, 1)[0].values()) == 10_000
    rig.decode([1], [0])


class _Machine(RuleBasedStateMachine):
    """Requests come, decode, are verified, retracted and end, in batches in any order."""

    slots = 4
    tokens = st.one_of(st.integers(0, 5), st.integers(-1, 300))

    @initialize(backend=st.sampled_from(BACKENDS))
    def start(self, backend: str) -> None:
        self.rig = Rig(backend, 300, 6, self.slots, initial_entries=PAGE)

    @rule(data=st.data(), history=st.sampled_from([0, 1, 125, 255]))
    def admit(self, data: st.DataObject, history: int) -> None:
        free = sorted(set(range(self.slots)) - set(self.rig.requests))
        if not free:
            return
        penalty = st.sampled_from([0.0, 0.5, -1.5, 2.0])
        self.rig.admit(
            data.draw(st.sampled_from(free)),
            range(history),
            frequency_penalty=data.draw(penalty),
            presence_penalty=data.draw(penalty),
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.7])),
            logit_bias=data.draw(st.dictionaries(self.tokens, st.sampled_from([2.0, -3.0]))),
            min_new_tokens=history + data.draw(st.integers(0, 4)),
            stop_token_ids=data.draw(st.sets(self.tokens, max_size=2)),
        )

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        batch = self._draw_batch(data)
        tokens = data.draw(st.lists(self.tokens, min_size=len(batch), max_size=len(batch)))
        uncommitted = data.draw(st.sets(st.integers(0, len(batch) - 1)))
        self.rig.decode(batch, tokens, sorted(uncommitted))
        self.rig.assert_counts()

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), num_nodes=st.integers(1, 6), width=st.integers(1, 4))
    def verify(self, data: st.DataObject, num_nodes: int, width: int) -> None:
        batch = self._draw_batch(data)

        def rows(size: int) -> list[list[int]]:
            row = st.lists(self.tokens, min_size=size, max_size=size)
            return [data.draw(row) for _ in batch]

        parents = [
            [-1, *(data.draw(st.integers(0, n - 1)) for n in range(1, num_nodes))] for _ in batch
        ]
        lens = [data.draw(st.integers(0, width)) for _ in batch]
        self.rig.verify(batch, rows(num_nodes), parents, rows(width), lens)
        self.rig.assert_counts()

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), how=st.sampled_from(["finish", "retract"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        getattr(self.rig, how)(data.draw(st.sampled_from(sorted(self.rig.requests))))

    def _draw_batch(self, data: st.DataObject) -> list[int]:
        running = sorted(self.rig.requests)
        order = st.permutations(running)
        return data.draw(order)[: data.draw(st.integers(1, len(running)))]


TestMachine = _Machine.TestCase
TestMachine.settings = settings(
    max_examples=4 if IS_INTERPRETED else 60,
    stateful_step_count=8 if IS_INTERPRETED else 25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


# --- Bits -------------------------------------------------------------------------------------


def test_bits_depend_on_nothing_but_the_request(make_rig: MakeRig) -> None:
    """Alone, in any row of any batch, at a node of a tree: the same numbers to the last bit."""
    draw = random.Random(3)
    outputs = {slot: [draw.randrange(400) for _ in range(170 + slot)] for slot in range(6)}
    bias = {7: 0.1, 8: -0.0}
    params = {
        slot: {"frequency_penalty": 0.1 * slot - 0.3, "repetition_penalty": 1.1, "logit_bias": bias}
        for slot in range(5)
    }
    params[5] = {"frequency_penalty": 0.3}  # no flags: alone, its step has none
    rows = make_logits(6, 600, torch.float32, 5)[1]

    def penalize(batch: list[int], stepwise: bool) -> dict[int, torch.Tensor]:
        rig = make_rig()
        for slot in batch:
            rig.admit(slot, outputs[slot][: -1 if stepwise else None], **params[slot])
        if stepwise:
            rig.decode(batch, [outputs[slot][-1] for slot in batch])
        logits = rows[batch].to(rig.device)
        step = rig.planner.plan(batch)
        rig.state.begin(step)
        rig.state.apply(step, logits)
        return dict(zip(batch, logits.cpu()))

    def as_nodes(batch: list[int]) -> dict[int, torch.Tensor]:
        rig = make_rig(max_draft_tokens=4)
        for slot in batch:
            rig.admit(slot, outputs[slot][:-2], **params[slot])
        step = rig.planner.plan(batch, max_tokens=3, num_draft_tokens=4)
        rig.state.begin(step)
        drafts = [[outputs[slot][-3], *outputs[slot][-2:], 11] for slot in batch]
        rig.state.stage(step, torch.tensor(drafts, device=rig.device))
        parents = torch.tensor([[-1, 0, 1, 0]] * len(batch), device=rig.device)
        logits = rows[batch].repeat_interleave(4, 0).to(rig.device)
        rig.state.apply(step, logits, rig.state.ancestors_from_parents(parents))
        return dict(zip(batch, logits.cpu()[2::4]))

    wanted = penalize([0, 1, 2, 3, 4, 5], stepwise=False)
    for got in (
        penalize([5, 3, 0, 4, 1, 2], stepwise=True),
        penalize([5], stepwise=False),
        penalize([2, 5], stepwise=True),
        as_nodes([5, 4]),
        as_nodes([1]),
    ):
        for slot, row in got.items():
            assert torch.equal(row.view(torch.int32), wanted[slot].view(torch.int32))


def test_backends_give_the_same_bits() -> None:
    """Torch and, in a process that interprets it, Triton; torch and numba else."""
    for seed in range(4):
        rigs = [Rig(backend, max_draft_tokens=8) for backend in ("torch", BACKENDS[-1])]
        draw = random.Random(seed)
        history = [draw.randrange(600) for _ in range(300)]
        rows = []
        for rig in rigs:
            rig.admit(0, history, logit_bias={history[0]: 0.3, 9: 1.1}, **ALL)
            rig.admit(1, history[:9], frequency_penalty=-0.123, presence_penalty=1.7)
            rows.append(rig.decode([1, 0], [3, 3]))
            rows.append(rig.verify([0, 1], [[3, 5, 3]] * 2, [[-1, 0, 1]] * 2, [[5, 3]] * 2, [2, 1]))
        half = len(rows) // 2
        for a, b in zip(rows[:half], rows[half:]):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.skipif(IS_INTERPRETED, reason="Triton's programs are no threads")
@pytest.mark.parametrize(
    "scenario",
    [mixed_batches, branching_trees, long_lists, growing_lists],
    ids=lambda s: s.__name__,
)
def test_threads_that_share_the_work(
    scenario: Callable[[MakeRig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    numba_ops = pytest.importorskip("sglang.srt.sampling.penaltylib.numba_ops")
    monkeypatch.setattr(numba_ops, "SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shares = []
    run_shares = numba_ops.NumbaPenaltyOps._run_shares

    def noted(self: object, run: Callable[[int], None], num_shares: int) -> None:
        shares.append(num_shares)
        run_shares(self, run, num_shares)

    monkeypatch.setattr(numba_ops.NumbaPenaltyOps, "_run_shares", noted)
    scenario(partial(Rig, "numba"))
    assert 3 in shares


@pytest.mark.skipif(IS_INTERPRETED, reason="Triton's programs are no threads")
def test_who_goes_on_when_python_ends_its_threads_does_all_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an engine on a thread of its own does when the main thread has ended."""
    numba_ops = pytest.importorskip("sglang.srt.sampling.penaltylib.numba_ops")
    monkeypatch.setattr(numba_ops, "SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    submitted = []
    submit = numba_ops.ThreadPoolExecutor.submit

    def one_only(self: object, *args: object) -> object:
        submitted.append(args)
        if len(submitted) % 2 == 0:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(self, *args)

    monkeypatch.setattr(numba_ops.ThreadPoolExecutor, "submit", one_only)
    mixed_batches(partial(Rig, "numba"))
    assert len(submitted) > 2


@pytest.mark.skipif(IS_INTERPRETED, reason="of numba")
def test_compiled_code_that_cannot_be_kept_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba_ops = pytest.importorskip("sglang.srt.sampling.penaltylib.numba_ops")
    config = numba_ops.numba.config
    compiled = numba_ops._compiled(numba_ops.int64(numba_ops.int64))

    def twice(x):
        return x + x

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "there"))
    folder = Path(numba_ops._cache_folder())
    for _ in range(2):
        assert compiled(twice)(4) == 8
    indices = list(folder.rglob("*.nbi"))
    assert len(indices) == 1
    for text in (b"", indices[0].read_bytes()[:20]):
        indices[0].write_bytes(text)
        assert compiled(twice)(4) == 8
    (tmp_path / "file").touch()
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "file"))
    assert compiled(twice)(4) == 8
    assert str(tmp_path / "file") == config.CACHE_DIR


def test_a_numba_that_does_not_work_leaves_it_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise ImportError("Numba needs another NumPy")

    monkeypatch.setattr(sparse_ops, "find_spec", lambda name: True)
    monkeypatch.setattr(sparse_ops, "import_module", broken)
    assert type(PenaltyState(PenaltyPool(1, 10), CPU)._ops) is TorchPenaltyOps
    assert "Numba needs another NumPy" in caplog.text


@pytest.mark.skipif(IS_INTERPRETED, reason="of numba")
def test_code_of_another_layout_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    numba_ops = pytest.importorskip("sglang.srt.sampling.penaltylib.numba_ops")
    folder = numba_ops._cache_folder()
    monkeypatch.setattr(sparse_layout, "BIAS", 1 << 28)
    assert numba_ops._cache_folder() != folder


# --- Costs ------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of what is copied to the device."""
    sizes: list[int] = []
    copy = sparse_planner.to_device_async

    def noted(data: np.ndarray, *rest: object) -> torch.Tensor:
        sizes.append(data.size)
        return copy(data, *rest)

    monkeypatch.setattr(sparse_planner, "to_device_async", noted)
    yield sizes


def test_what_has_no_penalties_costs_nothing(
    make_rig: MakeRig, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(max_draft_tokens=4)
    assert not rig.admit(0)
    assert not rig.admit(1, stop_token_ids={3})
    assert not rig.admit(2, [5] * 9, min_new_tokens=9, stop_token_ids={3})
    assert not rig.admit(3, min_new_tokens=5)
    assert rig.planner.plan([0, 1, 2, 3]) is None
    assert rig.admit(4, **ALL)
    assert rig.planner.plan([0, 1], max_tokens=3, num_draft_tokens=4) is None
    assert not copies
    monkeypatch.setattr(rig.state, "_ops", None)  # whoever launches something fails
    rig.state.begin(None)
    rig.state.stage(None, torch.zeros(2, 4))
    rig.state.apply(None, torch.zeros(2, 600))
    rig.state.commit(None, torch.zeros(2))
    rig.planner.settle(None)
    monkeypatch.undo()
    step = rig.planner.plan([0, 4, 1])
    assert step.num_rows == 1 and step.index.tolist()[0] == [1]


def test_a_step_is_one_copy_and_most_are_none(make_rig: MakeRig, copies: list[int]) -> None:
    rig = make_rig(vocab_size=2000)
    for slot in range(4):
        rig.admit(slot, range(slot), logit_bias={5: 1.0}, min_new_tokens=2, **ALL)
    rig.decode([0, 1, 2, 3], [1, 2, 3, 4])
    assert len(copies) == 1
    for _ in range(100):
        rig.planner.settle(rig.planner.plan([0, 1, 2, 3]))
    assert len(copies) == 1
    for _ in range(100):
        rig.planner.settle(rig.planner.plan([0, 1, 2, 3]))
    assert 2 <= len(copies) <= 5  # lists that may have filled a page get another
    del copies[:]
    rig.planner.plan([3, 1])  # another batch: rows, slots, limits and pages of two
    assert copies == [8]


def test_the_torch_backend_waits_for_no_device() -> None:
    fake_device = pytest.importorskip("lab.fake_device")
    from lab.transfer_ledger import TransferLedger
    from sglang.srt.utils import common

    class Fake(common.Platform):
        def is_pin_memory_available(self) -> bool:
            return True

    device = fake_device.device()
    common.register_platform(Fake(device.type, device))
    with fake_device.FakeDeviceMode():
        rig = Rig("torch", max_draft_tokens=4, device=device)
        logits, tree_logits, tokens, drafts, parents, lens = (
            torch.tensor(values).to(device)
            for values in (
                [[0.5] * 600] * 3,
                [[0.5] * 600] * 12,
                [1, 2, 3],
                [[1, 2, 3, 4]] * 3,
                [[-1, 0, 1, 0]] * 3,
                [1, 2, 4],
            )
        )
        with TransferLedger() as ledger:
            rig.admit(0, range(200), logit_bias={3: 1.0}, **ALL)
            rig.admit(2, min_new_tokens=2, stop_token_ids={3}, **ALL)
            for _ in range(3):
                step = rig.planner.plan([0, 1, 2])
                rig.state.begin(step)
                rig.state.apply(step, logits)
                rig.state.commit(step, tokens)
                step = rig.planner.plan([0, 1, 2], max_tokens=4, num_draft_tokens=4)
                rig.state.begin(step)
                rig.state.stage(step, drafts)
                rig.state.apply(step, tree_logits, rig.state.ancestors_from_parents(parents))
                rig.state.commit(step, drafts, lens)
    assert not ledger.blocking(), ledger.report()
    assert 0 < len(ledger.transfers) <= 6, ledger.report()


def test_memory_follows_what_was_said(make_rig: MakeRig) -> None:
    """At most 32 bytes a token and 64 KiB a request, whatever the vocabulary and the pool's bounds."""
    vocab_size = 152064
    rig = make_rig(vocab_size=vocab_size, num_slots=16, max_draft_tokens=64)
    logits = torch.zeros(1, vocab_size, device=rig.device)
    said = 0
    for slot in range(16):
        assert rig.state.nbytes <= 16 * 64 * 1024 + 32 * said
        rig.admit(slot, range(slot, slot + 700 * slot), **ALL)
        said += 700 * slot
        step = rig.planner.plan([slot], max_tokens=8, num_draft_tokens=64)
        rig.state.begin(step)
        rig.state.apply(step, logits)
        assert rig.state.nbytes <= 16 * 64 * 1024 + 32 * said
    tables = rig.state.tables
    if rig.backend in ("torch", "numba"):
        assert rig.state.nbytes > tables.nbytes, "what a backend keeps for itself counts"
    fixed = PenaltyState(PenaltyPool(16, vocab_size, 64), CPU).nbytes
    assert fixed < 16 * 8 * 1024


def test_room_follows_distinct_tokens_not_tokens(make_rig: MakeRig) -> None:
    """Who says the same again and again keeps a page or two."""
    rig = make_rig(vocab_size=5000, num_slots=2)
    rig.admit(0, **ALL)
    for token in range(1500 if not IS_INTERPRETED else 300):
        step = rig.planner.plan([0])
        rig.outputs[0].append(token % 50)
        rig.planner.settle(step)
    assert len(rig.planner._records[0].pages) == 1


# --- Bounds and order -------------------------------------------------------------------------


def test_a_request_beyond_its_bound_is_named_and_others_go_on(make_rig: MakeRig) -> None:
    rig = make_rig(vocab_size=2000, max_entries_per_request=2 * PAGE)
    with pytest.raises(PenaltyCapacityError, match="'wordy'") as error:
        rig.admit(0, range(300), rid="wordy", **ALL)
    assert error.value.rid == "wordy"
    rig.admit(1, range(255), rid="long", **ALL)
    rig.admit(2, [1, 2], **ALL)
    rig.decode([2, 1], [3, 1999])
    free = rig.planner.num_free_entries
    with pytest.raises(PenaltyCapacityError, match="'long'"):
        rig.planner.plan([2, 1])
    assert rig.planner.num_free_entries == free
    rig.finish(1)
    rig.decode([2], [4])
    rig.admit(1, range(200), **ALL)
    rig.decode([2, 1], [5, 5])
    rig.assert_counts()


def test_a_full_pool_names_who_finds_no_room(make_rig: MakeRig) -> None:
    rig = make_rig(vocab_size=2000, max_entries=3 * PAGE)
    rig.admit(0, range(200), **ALL)
    rig.admit(1, range(100), **ALL)
    rig.admit(2, range(10), rid="late", **ALL)
    rig.decode([0, 1], [1, 1])
    with pytest.raises(PenaltyCapacityError, match="'late'"):
        rig.planner.plan([0, 2, 1])
    rig.decode([0, 1], [2, 2])
    rig.finish(0)
    rig.decode([2, 1], [2, 2])
    rig.assert_counts()
    assert len(rig.state.tables.tokens) == (FIRST_PAGE + 3) * PAGE


def test_a_list_is_never_longer_than_the_vocabulary(make_rig: MakeRig) -> None:
    rig = make_rig(vocab_size=130, max_draft_tokens=8)
    rig.admit(0, range(130), logit_bias={4: 1.0}, **ALL)
    for token in range(4 if IS_INTERPRETED else 40):
        rig.verify([0], [[0, *range(token, token + 7)]], [CHAIN], [[token, 5, 6]], [3])
    rig.assert_counts()
    assert len(rig.planner._records[0].pages) == 2


def test_the_device_writes_within_its_pages_whatever_it_is_told(make_rig: MakeRig) -> None:
    """The guard behind the planner's bound: a planner that gives too little room loses entries only."""
    rig = make_rig(vocab_size=2000, initial_entries=4 * PAGE)
    rig.admit(0, range(127), **ALL)
    rig.admit(1, range(50), **ALL)
    rig.decode([0, 1], [127, 1])
    before = read_list(rig.state.tables, 1)
    rig.planner._capacity[:] = 1 << 40
    for token in range(200, 203):
        step = rig.planner.plan([0, 1])
        rig.state.begin(step)
        rig.state.commit(step, torch.tensor([token, 1], device=rig.device))
    counts, num_output = read_list(rig.state.tables, 1)
    assert counts == before[0] | {1: before[0][1] + 3} and num_output == before[1] + 3
    assert set(read_list(rig.state.tables, 0)[0]) == set(range(128))


@pytest.mark.parametrize("seed", range(5))
def test_no_page_has_two_owners(seed: int) -> None:
    draw = random.Random(seed)
    pool = PenaltyPool(6, 3000, 8, max_entries=20 * PAGE, initial_entries=PAGE)
    planner = PenaltyPlanner(pool, CPU)
    for number in range(300):
        slot = draw.randrange(6)
        if slot in planner:
            if draw.random() < 0.3:
                planner.release(slot)
        else:
            history = range(draw.choice([0, 120, 500]))
            planner.admit(PenaltyRequest(str(number), slot, 1.0, output_ids=history))
        try:
            step = planner.plan(range(6), draw.choice([1, 5]), draw.choice([0, 8]))
        except PenaltyCapacityError as error:
            (slot,) = (s for s, r in planner._records.items() if r.request.rid == error.rid)
            planner.release(slot)
        else:
            if draw.random() < 0.8:
                planner.settle(step)
        owned = [page for record in planner._records.values() for page in record.pages]
        assert sorted(owned + planner._free) == list(range(FIRST_PAGE, planner._num_pages))
        assert planner._num_pages <= pool.max_pages
        assert (planner._in_flight >= 0).all()


def test_a_slot_that_has_a_new_owner_is_not_settled_for_the_old_one() -> None:
    planner = PenaltyPlanner(PenaltyPool(2, 600, 8), CPU)
    planner.admit(PenaltyRequest("old", 0, 1.0))
    step = planner.plan([0], max_tokens=8)
    planner.release(0)
    planner.admit(PenaltyRequest("new", 0, 1.0))
    planner.settle(step, [3])
    assert planner._in_flight[0] == 0 and planner._settled[0] == 0


def test_steps_run_in_the_order_of_their_plans(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.admit(0, **ALL)
    rig.admit(1, **ALL)
    first, second = rig.planner.plan([0]), rig.planner.plan([1])
    with pytest.raises(PenaltyStepError, match="update 2"):
        rig.state.begin(second)
    rig.state.begin(first)
    rig.state.begin(second)
    with pytest.raises(PenaltyStepError, match="step 1 of the penalties is begun behind step 2"):
        rig.state.begin(first)
    # Of steps that change nothing, too.
    third, fourth = rig.planner.plan([1]), rig.planner.plan([1])
    rig.state.begin(fourth)
    for step in (third, fourth):
        with pytest.raises(PenaltyStepError, match="begun behind step 4"):
            rig.state.begin(step)


def test_each_step_is_settled_once_and_in_order() -> None:
    planner = PenaltyPlanner(PenaltyPool(2, 600), CPU)
    planner.admit(PenaltyRequest("r", 0, 1.0))
    first, second = planner.plan([0]), planner.plan([0])
    planner.settle(second)
    for step in (first, second):
        with pytest.raises(PenaltyStepError, match="is settled behind step 2"):
            planner.settle(step)
    assert planner._in_flight[0] == 1 and planner._num_output[0] == 1


def test_what_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(max_draft_tokens=4)
    rig.admit(0, **ALL)
    for slot in (-1, 8):
        with pytest.raises(ValueError, match="outside"):
            rig.planner.admit(PenaltyRequest("x", slot, 1.0))
    with pytest.raises(ValueError, match="still belongs to 'r0'"):
        rig.planner.admit(PenaltyRequest("x", 0, 1.0))
    with pytest.raises(ValueError, match="twice"):
        rig.planner.plan([0, 0])
    with pytest.raises(ValueError, match="slot 8 is outside"):
        rig.planner.plan([0, 8])
    with pytest.raises(ValueError, match="trees of 5"):
        rig.planner.plan([0], num_draft_tokens=5)
    with pytest.raises(ValueError, match="max_tokens"):
        rig.planner.plan([0], max_tokens=65)
    with pytest.raises(ValueError, match="64 nodes"):
        PenaltyPool(1, 10, 65)
    with pytest.raises(ValueError, match="slots"):
        PenaltyPool(0, 10)
    with pytest.raises(ValueError, match="entries at most"):
        PenaltyPool(1, 10, max_entries=1 << 31)
    assert PenaltyPool(1 << 16, 1 << 17).max_pages == (1 << 31) // PAGE - 1
    step = rig.planner.plan([0, 1], num_draft_tokens=3)
    rig.state.begin(step)
    zeros = partial(torch.zeros, device=rig.device)
    for call in (
        lambda: rig.state.apply(step, zeros(2, 599)),
        lambda: rig.state.apply(step, zeros(2, 600), zeros(2, 3, 3, dtype=torch.bool)),
        lambda: rig.state.apply(step, zeros(600, 2).t()),
        lambda: rig.state.apply(step, zeros(6, 600), zeros(2, 4, 4, dtype=torch.bool)),
        lambda: rig.state.stage(step, zeros(2, 4, dtype=torch.int64)),
        lambda: rig.state.commit(step, zeros(3, dtype=torch.int64)),
        lambda: rig.state.commit(step, zeros(2, dtype=torch.int64), zeros(1, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match="must have"):
            call()
    with pytest.raises(
        ValueError, match=r"must be float32, float16 or bfloat16, got torch\.float64"
    ):
        rig.state.apply(step, zeros(2, 600, dtype=torch.float64))
    with pytest.raises(ValueError, match="rows of their own"):
        rig.state.apply(step, zeros(1, 600).expand(2, -1))
    with pytest.raises(ValueError, match="backend"):
        PenaltyState(rig.pool, rig.device, "numpy")


def test_a_released_slot_without_penalties_is_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.planner.release(3)
    rig.admit(3, **ALL)
    assert 3 in rig.planner and len(rig.planner) == 1
    rig.planner.release(3)
    assert 3 not in rig.planner and rig.planner.plan([3]) is None


# --- Steps of a graph -------------------------------------------------------------------------


def test_a_static_step_takes_the_rows_of_others(make_rig: MakeRig) -> None:
    """What a CUDA graph replays: tensors that stay, rows that change, and rows of nobody."""
    rig = make_rig(max_draft_tokens=4)
    rig.admit(0, [1, 2], logit_bias={4: 1.0}, **ALL)
    rig.admit(1, [2], min_new_tokens=3, stop_token_ids={9}, **ALL)
    static = rig.state.static_step(3)
    address = static.index.data_ptr()
    tokens = torch.tensor([5, 6, 7], device=rig.device)
    for batch in ([0, 1, -1], [1, -1, -1], [-1, -1, -1], [-1, 1, 0]):
        step = rig.planner.plan(batch)
        rig.state.begin(step, into=static)
        _, logits = make_logits(3, 600, torch.float32, 1, rig.device)
        given = logits.clone()
        rig.state.apply(static, logits)
        rig.state.commit(static, tokens)
        for row, slot in enumerate(batch):
            if slot < 0:
                assert torch.equal(logits[row], given[row])
                continue
            assert_row(logits[row].cpu(), given[row].cpu(), rig.outputs[slot], rig.requests[slot])
            rig.outputs[slot].append(5 + row)
        rig.assert_counts()
    fed = torch.tensor([8, 8, 7], device=rig.device)
    rig.state.begin(rig.planner.plan([1, 0, -1], fed_tokens=fed), into=static)
    rig.state.commit(static, tokens)  # which the next step will be given
    for slot in (0, 1):
        rig.outputs[slot].append(8)
    rig.assert_counts()
    assert static.index.data_ptr() == address
    small = rig.state.static_step(1)
    with pytest.raises(ValueError, match="2 rows"):
        rig.state.begin(rig.planner.plan([0, 1]), into=small)
    step = rig.planner.plan([0, 1], max_tokens=2, num_draft_tokens=3)
    with pytest.raises(
        ValueError, match=r"a step of \(2, 3\) tokens and nodes for one of \(1, 0\)"
    ):
        rig.state.begin(step, into=static)
    with pytest.raises(ValueError, match="trees of 5 nodes in a pool for 4"):
        rig.state.static_step(1, 1, 5)


@pytest.mark.gpu
def test_a_graph_replays_what_would_run() -> None:
    """Captured once, for two rows, and replayed for whatever rows come."""
    device = torch.device("cuda")
    rig = Rig("triton", device=device, max_entries=8 * PAGE, initial_entries=8 * PAGE)
    static = rig.state.static_step(2)
    logits = torch.zeros(2, 600, device=device)
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    rig.state.apply(static, logits)  # compiles; the rows are nobody's
    rig.state.commit(static, tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.state.apply(static, logits)
        rig.state.commit(static, tokens)
    for slot in (0, 1):
        rig.admit(slot, [slot], min_new_tokens=4, stop_token_ids={9}, **ALL)
    for number, batch in enumerate(([0, 1], [1, -1], [1, 0], [-1, 0])):
        rig.state.begin(rig.planner.plan(batch), into=static)
        given = make_logits(2, 600, torch.float32, number)[1]
        logits.copy_(given)
        tokens.copy_(torch.tensor([5, 6 + number]))
        graph.replay()
        for row, slot in enumerate(batch):
            if slot >= 0:
                assert_row(logits[row].cpu(), given[row], rig.outputs[slot], rig.requests[slot])
                rig.outputs[slot].append([5, 6 + number][row])
        rig.assert_counts()


@pytest.mark.gpu
def test_a_graph_replays_verifications() -> None:
    device = torch.device("cuda")
    parents = [-1, 0, 0, 2]
    rig = Rig(
        "triton",
        max_draft_tokens=4,
        device=device,
        max_entries=8 * PAGE,
        initial_entries=8 * PAGE,
    )
    static = rig.state.static_step(2, max_tokens=3, num_draft_tokens=4)
    mask = rig.state.ancestors_from_parents(torch.tensor([parents] * 2, device=device))
    logits = torch.zeros(8, 600, device=device)
    drafts = torch.zeros(2, 4, dtype=torch.int64, device=device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    lens = torch.zeros(2, dtype=torch.int64, device=device)

    def verify() -> None:
        rig.state.stage(static, drafts)
        rig.state.apply(static, logits, mask)
        rig.state.commit(static, tokens, lens)

    verify()  # compiles; the rows are nobody's
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify()
    for slot in (0, 1):
        rig.admit(slot, [slot], min_new_tokens=4, stop_token_ids={9}, **ALL)
    for number, batch in enumerate(([0, 1], [1, -1], [1, 0], [-1, 0])):
        step = rig.planner.plan(batch, max_tokens=3, num_draft_tokens=4)
        rig.state.begin(step, into=static)
        given = make_logits(8, 600, torch.float32, number)[1]
        drafted = [[0, 5, 6 + number, 5], [1, 7, 7, 8]]
        logits.copy_(given)
        drafts.copy_(torch.tensor(drafted))
        tokens.copy_(torch.tensor([[5, 6, 5], [7, 3, 1]]))
        lens.copy_(torch.tensor([3, 1]))
        graph.replay()
        for row, slot in enumerate(batch):
            if slot < 0:
                continue
            for node in range(4):
                way = [drafted[row][inner] for inner in way_of(parents, node)[1:]]
                place, said = 4 * row + node, [*rig.outputs[slot], *way]
                assert_row(logits[place].cpu(), given[place], said, rig.requests[slot])
            rig.outputs[slot] += [[5, 6, 5], [7]][row]
        rig.planner.settle(step, [3, 1])
        rig.assert_counts()


def test_a_pool_that_starts_at_its_bound_never_moves(make_rig: MakeRig) -> None:
    rig = make_rig(vocab_size=2000, max_entries=20 * PAGE, initial_entries=20 * PAGE)
    addresses = [t.data_ptr() for t in vars(rig.state.tables).values() if torch.is_tensor(t)]
    for slot in range(4):
        rig.admit(slot, range(500), **ALL)
        rig.decode([slot], [1])
    assert addresses == [
        t.data_ptr() for t in vars(rig.state.tables).values() if torch.is_tensor(t)
    ]


def test_an_entry_has_the_stated_size(make_rig: MakeRig) -> None:
    tables = make_rig().state.tables
    sizes = [t.nbytes for t in (tables.tokens, tables.metas, tables.biases)]
    assert sum(sizes) == ENTRY_BYTES * len(tables.tokens)


def test_counting_leaves_flags_alone(make_rig: MakeRig) -> None:
    rig = make_rig()
    ids = [3] * 5 + [4]
    rig.admit(0, ids, logit_bias={3: 1.0}, min_new_tokens=9, stop_token_ids={3, 4}, **ALL)
    rig.decode([0], [3])
    assert read_list(rig.state.tables, 0)[0] == dict(Counter([*ids, 3]))
    tables = rig.state.tables
    first = int(tables.page_table[0, 0]) * PAGE
    found = dict(zip(tables.tokens[first:].tolist(), tables.metas[first:].tolist()))
    assert found[3] == 6 | STOP | BIAS and found[4] == 1 | STOP
