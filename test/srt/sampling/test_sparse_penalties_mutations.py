"""Deliberate faults in the sparse penalties, each of which the scenarios have to notice.

A mutant is a module's text with pieces exchanged. Each piece says how often it occurs, so a change of
the module that makes a fault meaningless makes its test fail instead of pass. With
``TRITON_INTERPRET=1`` the faults are those in the kernels.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from penalty_reference import Rig
from penalty_scenarios import (
    MakeRig,
    bias_after_scaling,
    branching_trees,
    changes_of_sign,
    foreign_tokens,
    growing_lists,
    long_chains,
    long_lists,
    many_tokens_a_step,
    mixed_batches,
    plain_decoding,
    rejected_drafts,
    retractions,
    reused_slots,
    short_outputs,
    tokens_from_the_host,
    uncommitted_rows,
)

from sglang.srt.sampling import penaltylib

PACKAGE = Path(penaltylib.__file__).parent
TORCH = "torch_ops.py"
NUMBA = "numba_ops.py"
PLANNER = "sparse_planner.py"
STATE = "sparse_penalties.py"
TRITON = "triton_ops/sparse_penalties.py"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Mutant:
    """A fault, who has to notice it, and its pieces: old text, new text, how often the old occurs."""

    fault: str
    module: str
    scenario: Callable[[MakeRig], None]
    pieces: tuple[tuple[str, str, int], ...]


def fault(
    name: str,
    module: str,
    scenario: Callable[[MakeRig], None],
    *pieces: tuple[str, str] | tuple[str, str, int],
) -> Mutant:
    return Mutant(name, module, scenario, tuple((*piece, 1)[:3] for piece in pieces))


MUTANTS: tuple[Mutant, ...] = (
    # --- torch
    fault(
        "ancestor off by one",
        TORCH,
        long_chains,
        ("[lanes.slots, 1:num_nodes]", "[lanes.slots, : num_nodes - 1]"),
    ),
    fault(
        "root counted twice",
        TORCH,
        long_chains,
        ("[:, :, 1:].to(torch.float32)", ".to(torch.float32)"),
        ("[lanes.slots, 1:num_nodes]", "[lanes.slots, :num_nodes]"),
        ("is_counted &= order > 0", "is_counted &= order >= 0"),
    ),
    fault("ways are cut short", TORCH, long_chains, (").bit_length()", ").bit_length() - 1")),
    fault(
        "siblings count each other",
        TORCH,
        branching_trees,
        (
            "torch.bmm(ancestors[lanes.owners],",
            "torch.bmm(torch.ones_like(ancestors)[lanes.owners],",
        ),
    ),
    fault(
        "committed behind a stale tail",
        TORCH,
        rejected_drafts,
        ("lengths = headers[:, NUM_ENTRIES]\n", "lengths = headers[:, NUM_STAGED]\n"),
    ),
    fault(
        "counts of a stale tail or an old owner",
        TORCH,
        reused_slots,
        ("torch.where(is_new, 0, tables.metas[places])", "tables.metas[places]"),
    ),
    fault(
        "tokens found behind a list's end",
        TORCH,
        rejected_drafts,
        ("stored = torch.where(is_entry, stored, -2)", "pass"),
    ),
    fault(
        "min_new_tokens off by one",
        TORCH,
        short_outputs,
        ("(num_output < headers[", "(num_output <= headers["),
    ),
    fault(
        "nodes do not get nearer to min_new_tokens",
        TORCH,
        long_chains,
        ("num_output + ancestors.sum(-1).to(torch.int32)", "num_output"),
    ),
    fault(
        "bias before scaling",
        TORCH,
        bias_after_scaling,
        (
            "        values = _penalize(values, counts, tables.params[lanes.slots][lanes.owners])\n",
            "",
        ),
        (
            "values + biases, values)\n",
            "values + biases, values)\n"
            "        values = _penalize(values, counts, tables.params[lanes.slots][lanes.owners])\n"
            "        if step.has_flags:\n",
        ),
    ),
    fault(
        "presence per count",
        TORCH,
        plain_decoding,
        (
            "(frequency * counts.to(torch.float32) + presence)",
            "(frequency + presence) * counts.to(torch.float32)",
        ),
    ),
    fault(
        "sign before subtraction",
        TORCH,
        changes_of_sign,
        ("torch.where(scaled < 0,", "torch.where(values < 0,"),
    ),
    fault(
        "scaling before subtraction",
        TORCH,
        plain_decoding,
        (
            "    scaled = values - (frequency * counts.to(torch.float32) + presence)\n"
            "    scaled = torch.where(scaled < 0, scaled * repetition, scaled / repetition)\n",
            "    scaled = torch.where(values < 0, values * repetition, values / repetition)\n"
            "    scaled = scaled - (frequency * counts.to(torch.float32) + presence)\n",
        ),
    ),
    fault(
        "repeated tokens of a step counted once",
        TORCH,
        many_tokens_a_step,
        ("same.sum(-1, dtype=torch.int32)", "is_counted.to(torch.int32)"),
    ),
    fault(
        "repeated tokens of a step appended twice",
        TORCH,
        many_tokens_a_step,
        ("is_counted & ~(same & (order < order.unsqueeze(1))).any(-1)", "is_counted"),
    ),
    fault(
        "lens ignored",
        TORCH,
        many_tokens_a_step,
        ("torch.minimum(lens[lanes.rows], lanes.limits)", "lanes.limits"),
    ),
    fault(
        "uncommitted rows commit",
        TORCH,
        uncommitted_rows,
        ("lanes.limits.clamp(max=num_given)", "torch.full_like(lanes.limits, num_given)"),
    ),
    fault(
        "vocabulary one too long",
        TORCH,
        foreign_tokens,
        ("(tokens < tables.vocab", "(tokens <= tables.vocab"),
    ),
    fault(
        "what is behind a list's end stands for itself",
        TORCH,
        plain_decoding,
        ("torch.where(is_entry, held, pool[firsts].unsqueeze(1))", "held"),
    ),
    fault(
        "rows of other requests",
        TORCH,
        mixed_batches,
        ("tokens = tokens[lanes.rows]", "tokens = tokens[: len(lanes.rows)]"),
    ),
    fault(
        "an owner's header is left to the next one",
        TORCH,
        reused_slots,
        ("_put(tables.headers, parts.slots, parts.headers)", "pass"),
    ),
    # --- planner and state
    fault(
        "page table not updated on growth",
        PLANNER,
        growing_lists,
        ("        if grown:\n            per_slot", "        if False:\n            per_slot"),
    ),
    fault(
        "tokens from the host count twice",
        STATE,
        tokens_from_the_host,
        ("if step is None or step.fed_tokens is not None or not step.commits:", "if step is None:"),
    ),
    fault(
        "tokens from the host are left behind",
        PLANNER,
        tokens_from_the_host,
        ("fed_tokens=fed_tokens)", "fed_tokens=None)"),
    ),
    fault(
        "a request comes in without its header",
        PLANNER,
        reused_slots,
        ("record.write_header(header)", "pass"),
    ),
    fault(
        "an admission is repeated", PLANNER, mixed_batches, ("record.is_admitted = True", "pass")
    ),
    fault(
        "history lost in a retraction",
        PLANNER,
        retractions,
        ("dict(Counter(request.output_ids)) if", "dict.fromkeys(request.output_ids, 0) if"),
    ),
    fault(
        "output length lost in a retraction",
        PLANNER,
        retractions,
        ("header[layout.NUM_OUTPUT] = self.num_output", "pass"),
    ),
    fault(
        "a stop flag replaces a count",
        PLANNER,
        uncommitted_rows,
        ("metas.get(token, 0) | layout.STOP", "layout.STOP"),
    ),
    fault(
        "no room for the tail",
        PLANNER,
        growing_lists,
        (
            "extras = np.maximum(reserves, (num_draft_tokens - 1) * is_counting)",
            "pass",
        ),
    ),
    fault(
        "steps in flight need no room",
        PLANNER,
        growing_lists,
        ("self._in_flight[slots] += rows.reserves", "pass"),
    ),
    fault(
        "a batch of old rows",
        PLANNER,
        branching_trees,
        ("is_same = key == self._last_key", "is_same = key[1:] == (self._last_key or ())[1:]"),
    ),
    fault(
        "growing loses what was there",
        STATE,
        growing_lists,
        ("            new[: len(old)] = old\n", ""),
    ),
    fault(
        "flags are overlooked",
        PLANNER,
        mixed_batches,
        ("any(self._has_flags[rows.slots].tolist())", "all(self._has_flags[rows.slots].tolist())"),
    ),
    # --- numba
    fault(
        "ancestor off by one",
        NUMBA,
        long_chains,
        (
            "staged_counts[draft_entries[slot, inner]] += 1",
            "staged_counts[draft_entries[slot, inner - 1]] += 1",
        ),
    ),
    fault(
        "root counted twice",
        NUMBA,
        long_chains,
        ("for inner in range(1, num_nodes):", "for inner in range(num_nodes):", 2),
        ("(commit or k > 0)", "(commit or k >= 0)"),
    ),
    fault(
        "ways are cut short",
        NUMBA,
        long_chains,
        ("for _ in range(num_nodes):", "for _ in range(num_nodes - 2):"),
    ),
    fault(
        "a node's counts are left to the next one",
        NUMBA,
        branching_trees,
        ("staged_counts[draft_entries[slot, inner]] = 0", "pass"),
    ),
    fault(
        "committed behind a stale tail",
        NUMBA,
        rejected_drafts,
        (
            "length = headers[slot, NUM_ENTRIES]\n        num =",
            "length = headers[slot, NUM_STAGED]\n        num =",
        ),
    ),
    fault(
        "counts of a stale tail or an old owner",
        NUMBA,
        reused_slots,
        ("                    metas[place] = 0\n", ""),
    ),
    fault(
        "min_new_tokens off by one",
        NUMBA,
        short_outputs,
        ("is_short = num_output < headers", "is_short = num_output <= headers"),
    ),
    fault(
        "nodes do not get nearer to min_new_tokens",
        NUMBA,
        long_chains,
        ("                num_output += 1\n", ""),
    ),
    fault(
        "bias before scaling",
        NUMBA,
        bias_after_scaling,
        (
            "                    if page_metas[i] & BIAS:\n"
            "                        values[i] += biases[first + i]\n",
            "",
        ),
        (
            "values[i] = logits[uint64(place + tokens[i])]\n",
            "values[i] = logits[uint64(place + tokens[i])]\n"
            "                if page_metas[i] & BIAS:\n"
            "                    values[i] += biases[first + i]\n",
        ),
    ),
    fault(
        "presence per count",
        NUMBA,
        plain_decoding,
        ("frequency * float32(count) + presence", "(frequency + presence) * float32(count)"),
    ),
    fault(
        "sign before subtraction",
        NUMBA,
        changes_of_sign,
        (
            "values[i] = x * scale if x < 0 else x / scale",
            "values[i] = x * scale if values[i] < 0 else x / scale",
        ),
    ),
    fault(
        "stop tokens alone are no flags",
        NUMBA,
        short_outputs,
        ("if flags & (BIAS | STOP):", "if flags & BIAS:"),
    ),
    fault(
        "a bias is left behind",
        NUMBA,
        bias_after_scaling,
        ("biases[places[i]] = bits[i]", "pass"),
    ),
    fault(
        "an owner's header is left to the next one",
        NUMBA,
        reused_slots,
        ("headers[slots[i], column] = values[i * HEADER + column]", "pass"),
    ),
    fault(
        "a page is given to the list's beginning",
        NUMBA,
        growing_lists,
        ("page_table[slot, ordinal] = pages[i]", "page_table[slot, 0] = pages[i]"),
    ),
    fault(
        "repeated tokens of a step counted once",
        NUMBA,
        many_tokens_a_step,
        ("% PAGE] += 1", "% PAGE] += 0 if token in tokens[row, :k] else 1"),
    ),
    fault("lens ignored", NUMBA, many_tokens_a_step, ("num = max(min(num, lens[row]), 0)", "pass")),
    fault(
        "uncommitted rows commit",
        NUMBA,
        uncommitted_rows,
        ("num = min(num, index[LIMIT, column])", "pass"),
    ),
    fault(
        "vocabulary one too long",
        NUMBA,
        foreign_tokens,
        ("0 <= token < vocab_size", "0 <= token <= vocab_size"),
    ),
    fault(
        "a list's second page unread",
        NUMBA,
        long_lists,
        (
            "return start + hit\n    return -1",
            "return start + hit\n        return -1\n    return -1",
        ),
    ),
    fault(
        "rows of other requests",
        NUMBA,
        mixed_batches,
        ("token = tokens[row, k]", "token = tokens[column, k]"),
    ),
    fault(
        "an old pool is written after growth",
        NUMBA,
        growing_lists,
        ("if self._arrays_of is not tables.biases:", "if self._arrays_of is None:"),
    ),
    # --- Triton
    fault(
        "an owner's header is left to the next one",
        TRITON,
        reused_slots,
        ("    tl.store(headers + slot * HEADER + i % HEADER, value, mask=is_header)\n", ""),
    ),
    fault(
        "a bias is left behind",
        TRITON,
        bias_after_scaling,
        ("    tl.store(biases + place, bits.to(tl.float32, bitcast=True), mask=is_entry)\n", ""),
    ),
    fault(
        "only one page of many is given",
        TRITON,
        long_lists,
        ("is_given = i < num_given", "is_given = i < 1"),
    ),
    fault(
        "ancestor off by one",
        TRITON,
        long_chains,
        ("draft_stride + node, mask=way", "draft_stride + node - 1, mask=way"),
    ),
    fault(
        "root counted twice",
        TRITON,
        long_chains,
        ("is_inner = (node > 0) & (node < num_nodes)", "is_inner = node < num_nodes"),
        ("is_counted = is_counted & (order > 0)", "is_counted = is_counted & (order >= 0)"),
    ),
    fault(
        "ways are cut short",
        TRITON,
        long_chains,
        ("for _ in range(num_nodes):", "for _ in range(num_nodes - 2):"),
    ),
    fault(
        "committed behind a stale tail",
        TRITON,
        rejected_drafts,
        ("behind = length + tl.cumsum", "behind = tl.load(header + NUM_STAGED) + tl.cumsum"),
    ),
    fault(
        "counts of a stale tail or an old owner",
        TRITON,
        reused_slots,
        ("mask=is_written & (is_new_int == 0), other=0)", "mask=is_written, other=0)"),
    ),
    fault(
        "min_new_tokens off by one",
        TRITON,
        short_outputs,
        ("meta * 0 < min_new", "meta * 0 <= min_new"),
    ),
    fault(
        "nodes do not get nearer to min_new_tokens",
        TRITON,
        long_chains,
        ("num_output += tl.sum(way.to(tl.int32), 0)", "num_output += 0"),
    ),
    fault(
        "bias before scaling",
        TRITON,
        bias_after_scaling,
        (
            "        scaled = x - (frequency",
            "        bias = tl.load(biases + places, mask=is_entry & is_biased, other=0.0)\n"
            "        x = tl.where(is_biased, x + bias, x)\n"
            "        scaled = x - (frequency",
        ),
        (
            "        x = tl.where(is_biased, x + bias, x)\n        x = tl.where(is_masked",
            "        x = tl.where(is_masked",
        ),
    ),
    fault(
        "presence per count",
        TRITON,
        plain_decoding,
        (
            "(frequency * counts.to(tl.float32) + presence)",
            "(frequency + presence) * counts.to(tl.float32)",
        ),
    ),
    fault(
        "sign before subtraction",
        TRITON,
        changes_of_sign,
        ("tl.where(scaled < 0,", "tl.where(x < 0,"),
    ),
    fault(
        "repeated tokens of a step counted once",
        TRITON,
        many_tokens_a_step,
        ("counts += repeats", "counts += is_counted.to(tl.int32)"),
    ),
    fault(
        "repeated tokens of a step appended twice",
        TRITON,
        many_tokens_a_step,
        ("is_first = is_counted & (first == order)", "is_first = is_counted"),
    ),
    fault(
        "lens ignored",
        TRITON,
        many_tokens_a_step,
        ("tl.maximum(tl.minimum(num, tl.load(lens + row).to(tl.int32)), 0)", "num + 0"),
    ),
    fault(
        "uncommitted rows commit",
        TRITON,
        uncommitted_rows,
        ("tl.minimum(num, tl.load(column + LIMIT * index_stride))", "num + 0"),
    ),
    fault(
        "vocabulary one too long",
        TRITON,
        foreign_tokens,
        ("(given < vocab_size)", "(given <= vocab_size)"),
    ),
    fault(
        "ids cut to 32 bits",
        TRITON,
        foreign_tokens,
        ("other=-1).to(tl.int64)\n", "other=-1).to(tl.int32)\n"),
    ),
    fault(
        "a list's second block unread",
        TRITON,
        long_lists,
        ("range(0, length * is_counting, BLOCK)", "range(0, is_counting, BLOCK)"),
    ),
    fault(
        "rows of other requests",
        TRITON,
        mixed_batches,
        ("tokens + row * tokens_stride", "tokens + tl.program_id(0) * tokens_stride"),
    ),
)


def test_there_are_enough_faults() -> None:
    for modules in ((TORCH,), (NUMBA,), (PLANNER, STATE), (TRITON,)):
        assert sum(mutant.module in modules for mutant in MUTANTS) >= 10


@pytest.fixture
def mutate(tmp_path: Path) -> Iterator[object]:
    """Import a mutant's module under a name of its own."""
    names = []

    def load(mutant: Mutant) -> ModuleType:
        text = (PACKAGE / mutant.module).read_text(encoding="utf-8")
        for old, new, times in mutant.pieces:
            assert text.count(old) == times, f"{old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        path = tmp_path / "mutant.py"
        path.write_text(text, encoding="utf-8")
        name = f"mutant_{mutant.fault.replace(' ', '_')}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        names.append(name)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


def rig_of(mutant: Mutant, module: ModuleType) -> MakeRig:
    if mutant.module == TORCH:
        return lambda *args, **pool: Rig("torch", *args, ops=module.TorchPenaltyOps(), **pool)
    if mutant.module == NUMBA:
        return lambda *args, **pool: Rig("torch", *args, ops=module.NumbaPenaltyOps(), **pool)
    if mutant.module == TRITON:
        return lambda *args, **pool: Rig("triton", *args, ops=module.TritonPenaltyOps(), **pool)
    return partial(Rig, "torch", module=module)


CHOSEN = [mutant for mutant in MUTANTS if (mutant.module == TRITON) == IS_INTERPRETED]


@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda m: f"{Path(m.module).parts[0]}: {m.fault}")
def test_the_fault_is_noticed(mutant: Mutant, mutate: object) -> None:
    make_rig = rig_of(mutant, mutate(mutant))
    with pytest.raises((AssertionError, IndexError)) as noticed:
        mutant.scenario(make_rig)
    print(f"{mutant.scenario.__name__}: {noticed.type.__name__}: {str(noticed.value)[:60]}")
