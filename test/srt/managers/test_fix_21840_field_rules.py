"""#21840, found by the law that every field of a batch has to keep: nothing here knows the flag.

What a merge must give is told by the table of rules of the present checkout, and by batches in which
each request ran alone.
"""

from __future__ import annotations

from typing import Any

import pytest
from field_laws import ASKS, World, broken_laws
from hypothesis import given, settings
from hypothesis import strategies as st

thorough = settings(max_examples=100, deadline=None, derandomize=True)


@pytest.mark.proves_fix(
    reason=r"fields that break their rule: \['is_prefill_only \(all\): True is not False'\]"
)
@thorough
@given(st.lists(ASKS, min_size=2, max_size=6), st.data())
def test_a_merge_keeps_the_rule_of_each_field(asks: list[Any], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(asks) - 1), label="cut")
    world = World(asks)
    batch, other = world.build(range(cut)), world.build(range(cut, len(asks)))
    batch.merge_batch(other)
    broken = broken_laws(world, batch)
    assert not broken, f"fields that break their rule: {broken}"


@thorough
@given(st.lists(ASKS, min_size=1, max_size=6))
def test_building_keeps_them_too(asks: list[Any]) -> None:
    world = World(asks)
    assert broken_laws(world, world.build(range(len(asks)))) == []
