"""Kinds of forwards."""

from __future__ import annotations

import pytest

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

TABLE = {
    ForwardMode.EXTEND: {"is_extend"},
    ForwardMode.MIXED: {"is_extend", "is_mixed"},
    ForwardMode.DECODE: {"is_decode"},
    ForwardMode.IDLE: {"is_idle"},
    ForwardMode.TARGET_VERIFY: {"is_target_verify"},
    ForwardMode.DRAFT_EXTEND_V2: {"is_draft_extend_v2"},
}
QUESTIONS = set().union(*TABLE.values())


@pytest.mark.parametrize("mode", ForwardMode)
def test_each_mode_answers_to_its_own_names(mode: ForwardMode) -> None:
    assert {question for question in QUESTIONS if getattr(mode, question)()} == TABLE[mode]


def test_modes_are_distinct() -> None:
    assert len({int(mode) for mode in ForwardMode}) == len(TABLE)
    assert len({int(mode) for mode in CaptureHiddenMode}) == 3
