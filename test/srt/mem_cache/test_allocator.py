"""Allocators against a ledger: who holds which slot, and in what order a page fills."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)

CPU = torch.device("cpu")


def make(size: int, page_size: int) -> BaseTokenToKVPoolAllocator:
    if page_size == 1:
        return TokenToKVPoolAllocator(size, CPU)
    return PagedTokenToKVPoolAllocator(size, page_size, CPU)


def last_locs(rows: list[list[int]]) -> torch.Tensor:
    """What callers pass: the slot of the last token, anything where there is none."""
    return torch.tensor([row[-1] if row else 12345 for row in rows], dtype=torch.int64)


def pages_of(rows: list[list[int]], page_size: int) -> list[int]:
    """Pages in use, each once for each sequence that has a token in it."""
    return [page for row in rows for page in sorted({slot // page_size for slot in row})]


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences that start, grow and end at random."""

    page_size = 1
    num_pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = make(self.num_pages * self.page_size, self.page_size)
        self.rows: list[list[int]] = []
        self.freed_in_group: list[list[int]] = []
        self.in_group = False

    def grow(self, rows: list[list[int]], by: list[int]) -> bool:
        """Let sequences grow; whether there was room."""
        cur = [len(row) for row in rows]
        nxt = [c + b for c, b in zip(cur, by, strict=True)]
        page = self.page_size
        needed = sum(-(-n // page) - -(-c // page) for c, n in zip(cur, nxt, strict=True))
        free_before = self.allocator.free_pages.tolist()
        assert self.allocator.pages_needed(cur, nxt) == needed
        loc = self.allocator.alloc_extend(cur, nxt, last_locs(rows))
        if needed > len(free_before):
            assert loc is None
            assert self.allocator.free_pages.tolist() == free_before
            return False
        assert loc.dtype == torch.int64
        assert loc.shape == (sum(by),)
        given = loc.tolist()
        for row, count in zip(rows, by, strict=True):
            row += given[:count]
            del given[:count]
        return True

    @rule(by=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def start(self, by: list[int]) -> None:
        rows: list[list[int]] = [[] for _ in by]
        if self.grow(rows, by):
            self.rows += rows

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(range(len(self.rows))), min_size=1, unique=True))
        by = data.draw(st.lists(st.integers(0, 6), min_size=len(some), max_size=len(some)))
        self.grow([self.rows[i] for i in some], by)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.allocator.free(torch.tensor(row, dtype=torch.int64))
        if self.in_group:
            self.freed_in_group.append(row)

    @precondition(lambda self: not self.in_group)
    @rule()
    def begin_group(self) -> None:
        self.allocator.free_group_begin()
        self.in_group = True

    @precondition(lambda self: self.in_group)
    @rule()
    def end_group(self) -> None:
        self.allocator.free_group_end()
        self.in_group, self.freed_in_group = False, []

    @rule()
    def clear(self) -> None:
        self.allocator.clear()
        self.rows, self.freed_in_group, self.in_group = [], [], False

    @invariant()
    def every_page_has_one_owner(self) -> None:
        held = pages_of(self.rows + self.freed_in_group, self.page_size)
        free = self.allocator.free_pages.tolist()
        assert sorted(held + free) == list(range(self.num_pages))
        assert self.allocator.available_size() == len(free) * self.page_size

    @invariant()
    def a_page_fills_before_the_next_begins(self) -> None:
        for row in self.rows:
            assert len(row) == len(set(row))
            for position, slot in enumerate(row):
                assert slot % self.page_size == position % self.page_size
                if position % self.page_size:
                    assert slot == row[position - 1] + 1


class PagesOfTwo(AllocatorMachine):
    page_size = 2


class PagesOfFour(AllocatorMachine):
    page_size = 4


class PagesOfSixteen(AllocatorMachine):
    page_size, num_pages = 16, 5


_SETTINGS = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
for machine in (AllocatorMachine, PagesOfTwo, PagesOfFour, PagesOfSixteen):
    machine.TestCase.settings = _SETTINGS
TestPagesOfOne = AllocatorMachine.TestCase
TestPagesOfTwo = PagesOfTwo.TestCase
TestPagesOfFour = PagesOfFour.TestCase
TestPagesOfSixteen = PagesOfSixteen.TestCase


def test_alloc_takes_single_slots_or_none() -> None:
    allocator = TokenToKVPoolAllocator(5, CPU)
    first, second = allocator.alloc(3), allocator.alloc(2)
    assert sorted(first.tolist() + second.tolist()) == [0, 1, 2, 3, 4]
    assert allocator.alloc(1) is None
    assert allocator.alloc(0).tolist() == []
    allocator.free(first)
    assert allocator.available_size() == 3
    assert sorted(allocator.alloc(3).tolist()) == sorted(first.tolist())


def test_a_page_begun_is_used_up_first() -> None:
    allocator = PagedTokenToKVPoolAllocator(32, 4, CPU)
    row = allocator.alloc_extend([0], [6], last_locs([[]])).tolist()
    assert allocator.available_size() == 32 - 8
    # Two places are left in the second page, so two tokens take no page and a third one takes one.
    row += allocator.alloc_extend([6], [8], last_locs([row])).tolist()
    assert allocator.available_size() == 32 - 8
    assert row[4:8] == list(range(row[4], row[4] + 4))
    row += allocator.alloc_extend([8], [9], last_locs([row])).tolist()
    assert allocator.available_size() == 32 - 12
    assert len({slot // 4 for slot in row}) == 3


def test_one_call_serves_sequences_at_different_places_of_a_page() -> None:
    allocator = PagedTokenToKVPoolAllocator(64, 4, CPU)
    a = allocator.alloc_extend([0], [3], last_locs([[]])).tolist()
    b = allocator.alloc_extend([0], [4], last_locs([[]])).tolist()
    loc = allocator.alloc_extend([3, 4, 0], [9, 5, 2], last_locs([a, b, []])).tolist()
    a, b, c = a + loc[:6], b + loc[6:7], loc[7:]
    for row in (a, b, c):
        assert [slot % 4 for slot in row] == [i % 4 for i in range(len(row))]
    assert len(pages_of([a, b, c], 4)) == len(set(pages_of([a, b, c], 4))) == 3 + 2 + 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_freed_in_a_group_comes_back_at_its_end(page_size: int) -> None:
    allocator = make(4 * page_size, page_size)
    rows = [allocator.alloc_extend([0], [2 * page_size], last_locs([[]])) for _ in range(2)]
    allocator.free_group_begin()
    for row in rows:
        allocator.free(row)
    assert allocator.available_size() == 0
    allocator.free_group_end()
    assert allocator.available_size() == 4 * page_size
    # And a group that nothing is freed in changes nothing.
    allocator.free_group_begin()
    allocator.free_group_end()
    assert allocator.available_size() == 4 * page_size


def test_a_partly_filled_page_is_freed_whole() -> None:
    allocator = PagedTokenToKVPoolAllocator(16, 4, CPU)
    row = allocator.alloc_extend([0], [5], last_locs([[]]))
    assert allocator.available_size() == 8
    allocator.free(row)
    assert sorted(allocator.free_pages.tolist()) == [0, 1, 2, 3]
