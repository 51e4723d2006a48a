"""Every field of a batch has a rule for merge and filter, and keeps it whatever a batch goes through."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from field_laws import (
    ASKS,
    BATCH_RULES,
    DRAFT_RULES,
    SAMPLING_RULES,
    VERIFY_RULES,
    WORDS,
    World,
    accumulate,
    alone,
    broken_laws,
    broken_rules,
    poison,
    wrong_derived,
    wrong_forward,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput

TABLES = {
    ScheduleBatch: BATCH_RULES,
    SamplingBatchInfo: SAMPLING_RULES,
    EagleDraftInput: DRAFT_RULES,
    EagleVerifyInput: VERIFY_RULES,
}
thorough = settings(max_examples=80, deadline=None, derandomize=True)


# --- The tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", TABLES, ids=lambda owner: owner.__name__)
def test_each_field_has_a_rule(owner: type) -> None:
    rules = TABLES[owner]
    assert list(rules) == [f.name for f in dataclasses.fields(owner)]
    for name, (rule, reason) in rules.items():
        assert rule in WORDS, name
        # What is not plain from the name has a reason.
        assert reason or rule in ("any", "all", "concatenate"), f"{name} needs a reason"


def test_fields_that_are_rebuilt_are_few() -> None:
    """No test compares them, so none hides here. That nothing reads them too early is tested below."""
    assert {name for name, (rule, _) in BATCH_RULES.items() if rule == "rebuilt-per-step"} == {
        "forward_mode",
        "chunked_req",
        "input_ids",
        "decode_positions",
        "prefix_lens",
        "extend_lens",
        "extend_num_tokens",
        "decoding_reqs",
        "extend_logprob_start_lens",
        "extend_input_logprob_token_ids",
        "penalty_step",
        "spec_next_token_ids",
    }
    assert "rebuilt-per-step" not in {rule for rule, _ in SAMPLING_RULES.values()}


def test_the_tables_of_the_package_are_those_that_were_read() -> None:
    from sglang.srt.managers.schedule_batch import SCHEDULE_BATCH_RULES
    from sglang.srt.sampling.sampling_batch_info import SAMPLING_BATCH_INFO_RULES
    from sglang.srt.speculative.eagle_info import EAGLE_DRAFT_INPUT_RULES, EAGLE_VERIFY_INPUT_RULES

    given_tables = (
        SCHEDULE_BATCH_RULES,
        SAMPLING_BATCH_INFO_RULES,
        EAGLE_DRAFT_INPUT_RULES,
        EAGLE_VERIFY_INPUT_RULES,
    )
    for table, read in zip(given_tables, TABLES.values(), strict=True):
        assert {k: v if isinstance(v, tuple) else (v, "") for k, v in table.items()} == read


def test_a_verification_is_neither_merged_nor_filtered() -> None:
    assert {rule for rule, _ in VERIFY_RULES.values()} == {"rebuilt-per-step"}
    none = torch.zeros(0)
    verify = EagleVerifyInput(none, none, none, none, 0, 0, 0)
    for act in (verify.merge_batch, verify.filter_batch):
        with pytest.raises(NotImplementedError):
            act(verify)


def test_a_broken_rule_is_found() -> None:
    """The instrument itself: a flag, a tensor, a list and a shared object that go wrong."""

    @dataclasses.dataclass
    class Thing:
        flag: bool
        rows: torch.Tensor
        names: list[str]
        pool: object
        total: int = 0

    rules = {
        "flag": ("all", ""),
        "rows": ("concatenate", ""),
        "names": ("concatenate", ""),
        "pool": ("shared", "x"),
        "total": ("sum", ""),
    }
    pool = object()
    one = Thing(True, torch.tensor([1]), ["a"], pool, 2)
    two = Thing(False, torch.tensor([2]), ["b"], pool, 3)
    right = Thing(False, torch.tensor([1, 2]), ["a", "b"], pool, 5)
    left = vars(one)
    assert broken_rules(right, [one, two], rules, left) == []
    for change in (
        {"flag": True},
        {"rows": torch.tensor([2, 1])},
        {"rows": torch.tensor([1, 2], dtype=torch.int32)},
        {"names": ["a"]},
        {"pool": object()},
        {"total": 4},
    ):
        (line,) = broken_rules(dataclasses.replace(right, **change), [one, two], rules, left)
        assert line.startswith(next(iter(change)))


# --- The law --------------------------------------------------------------------------------------


def check(world: World, batch: ScheduleBatch, numbers: list[int]) -> None:
    assert [req.req_pool_idx for req in batch.reqs] == numbers
    assert broken_laws(world, batch) == []
    infos = [alone(world, i).sampling_info for i in numbers]
    assert wrong_derived(batch.sampling_info, infos) == []


def shared_of(batch: ScheduleBatch) -> dict[str, Any]:
    return {
        name: getattr(batch, name) for name, (rule, _) in BATCH_RULES.items() if rule == "shared"
    }


def check_reset_and_shared(batch: ScheduleBatch, shared: dict[str, Any]) -> None:
    for name, (rule, _) in BATCH_RULES.items():
        if rule == "reset":
            assert getattr(batch, name) is None, name
        if rule == "shared":
            assert getattr(batch, name) is shared[name], name
    for name, (rule, _) in SAMPLING_RULES.items():
        if rule == "reset":
            assert getattr(batch.sampling_info, name) is None, name


@thorough
@given(st.lists(ASKS, min_size=1, max_size=6), st.booleans())
def test_building(asks: list[Any], speculates: bool) -> None:
    world = World(asks, speculates)
    check(world, world.build(range(len(asks))), list(range(len(asks))))


@thorough
@given(st.lists(ASKS, min_size=2, max_size=7), st.booleans(), st.data())
def test_merging_is_building_of_the_union(
    asks: list[Any], speculates: bool, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(asks) - 1), label="cut")
    world = World(asks, speculates)
    batch, other = world.build(range(cut)), world.build(range(cut, len(asks)))
    shared = shared_of(batch)
    accumulate(batch)
    accumulate(other)
    batch.merge_batch(other)
    check(world, batch, list(range(len(asks))))
    check_reset_and_shared(batch, shared)
    whole = World(asks, speculates)
    built = whole.build(range(len(asks)))
    same = [n for n, (rule, _) in BATCH_RULES.items() if rule in ("any", "all")]
    assert [getattr(batch, n) for n in same] == [getattr(built, n) for n in same]


@thorough
@given(st.lists(ASKS, min_size=2, max_size=7), st.booleans(), st.data())
def test_filtering_is_building_of_what_remains(
    asks: list[Any], speculates: bool, data: st.DataObject
) -> None:
    world = World(asks, speculates)
    batch = world.build(range(len(asks)))
    shared = shared_of(batch)
    accumulate(batch)
    numbers = list(range(len(asks)))
    keep = sorted(data.draw(st.sets(st.sampled_from(numbers), min_size=1), label="keep"))
    batch.filter_batch(keep_indices=keep)
    if len(keep) < len(asks):
        check_reset_and_shared(batch, shared)
        check(world, batch, keep)


class Story:
    """A batch that goes through whatever is drawn."""

    def __init__(self, asks: list[Any], speculates: bool, page_size: int) -> None:
        self.world = World(asks, speculates, page_size)
        self.fresh = list(range(len(asks)))
        self.batch, self.numbers = self.built(self.draw_fresh(1))

    def draw_fresh(self, count: int) -> list[int]:
        taken, self.fresh = self.fresh[:count], self.fresh[count:]
        return taken

    def built(self, numbers: list[int]) -> tuple[ScheduleBatch, list[int]]:
        return self.world.build(numbers), numbers

    def merge(self, data: st.DataObject) -> None:
        """With one batch, or with two that were merged before."""
        sides = [self.draw_fresh(data.draw(st.integers(1, 2))) for _ in range(2)]
        others = [self.built(side) for side in sides if side]
        if not others:
            return
        other, numbers = others[0]
        if len(others) == 2:
            other.merge_batch(others[1][0])
            numbers = numbers + others[1][1]
        if data.draw(st.booleans(), label="from the left"):
            other.merge_batch(self.batch)
            self.batch, self.numbers = other, numbers + self.numbers
        else:
            self.batch.merge_batch(other)
            self.numbers = self.numbers + numbers

    def filter(self, data: st.DataObject) -> None:
        places = list(range(len(self.numbers)))
        keep = sorted(data.draw(st.sets(st.sampled_from(places), min_size=1), label="keep"))
        self.batch.filter_batch(keep_indices=keep)
        self.numbers = [self.numbers[i] for i in keep]

    def decode(self, data: st.DataObject) -> None:
        self.world.decode(self.batch)

    def mix(self, data: st.DataObject) -> None:
        """A prefill that carries the batch's decode step. Never of a batch that does not decode."""
        new = self.draw_fresh(data.draw(st.integers(1, 2)))
        speculates = not self.world.algorithm.is_none()
        if not new or speculates or self.batch.is_prefill_only:
            return
        mixed = self.world.prepared(new)
        self.batch.prepare_for_decode()
        self.world.count(self.batch)
        mixed.mix_with_running(self.batch)
        self.world.forwarded(mixed)
        self.batch, self.numbers = mixed, new + self.numbers


@thorough
@given(
    st.lists(ASKS, min_size=2, max_size=9),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.lists(st.sampled_from(["merge", "filter", "decode", "mix"]), max_size=10),
    st.data(),
)
def test_whatever_a_batch_goes_through(
    asks: list[Any], speculates: bool, page_size: int, acts: list[str], data: st.DataObject
) -> None:
    story = Story(asks, speculates, page_size)
    for act in acts:
        getattr(story, act)(data)
        check(story.world, story.batch, story.numbers)
        poison(story.batch)
    # What the next forward is given, of a batch that merged as of requests that ran alone.
    if not speculates:
        story.batch.prepare_for_decode()
        assert wrong_forward(story.world, story.batch) == []


@thorough
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_draft_inputs_with_values(sizes: list[int], data: st.DataObject) -> None:
    """Merging and filtering of what a draft starts from, values and all."""
    total = sum(sizes)
    names = [f.name for f in dataclasses.fields(EagleDraftInput)]
    assert {DRAFT_RULES[name][0] for name in names} == {"concatenate"}
    whole = {
        name: torch.arange(total * 3.0).view(total, 3) + 100 * i for i, name in enumerate(names)
    }
    parts = [
        EagleDraftInput(**{n: part for n, part in zip(names, split, strict=True)})
        for split in zip(*(t.split(sizes) for t in whole.values()), strict=True)
    ]
    merged = parts[0]
    for part in parts[1:]:
        merged.merge_batch(part)
    keep = data.draw(st.lists(st.integers(0, total - 1), min_size=1, unique=True))
    for name in names:
        assert torch.equal(getattr(merged, name), whole[name])
    merged.filter_batch(torch.tensor(keep))
    for name in names:
        assert torch.equal(getattr(merged, name), whole[name][keep])
