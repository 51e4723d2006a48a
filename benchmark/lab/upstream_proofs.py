"""What two fixes change in a release of SGLang, on its own objects: ``python -m lab.upstream_proofs``.

For an interpreter and a path as `lab.upstream` wants them. Prints one JSON object, in which a release
before a fix and the same release with it can be compared value by value:

``merge``
    What ``ScheduleBatch.merge_batch`` makes of ``is_prefill_only`` (fix #21840).
``decode``, ``spec_decode``
    What preparing a plain and a speculative decode step copies for the penalties, and whether penalties
    and KV lengths come out as they should (fix #28500).

The exit status is 0 whenever the scenarios could be run, whether what they found is right or wrong.

Transfers are those of one step on the fake device. Values are those of several steps on the CPU. What
forwards and their results do between steps is done here: tokens come in, and a speculative step has
`ACCEPTED` of them accepted. What is right is computed here, in float64, from the tokens that were given,
and by upstream's rule: a step counts one token of a request, its last output, or before any output the
last of its prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from lab import fake_device, upstream
from lab.cases import DRAFT_SHAPES
from lab.transfer_ledger import TransferLedger

# Each request has its own values, so that rows that get mixed up show.
PENALTIES: tuple[dict[str, Any], ...] = tuple(
    {
        "frequency_penalty": 0.25 + 0.125 * i,
        "presence_penalty": 0.5 - 0.1 * i,
        "repetition_penalty": 1.1 + 0.2 * i,
        "min_new_tokens": 1 + i,
        "stop_token_ids": [5, 7 + i],
    }
    for i in range(4)
)
NO_PENALTIES: tuple[dict[str, Any], ...] = ({},) * 4
EOS = 2
PROMPTS = tuple([100 + 10 * i + j for j in range(6 + i)] for i in range(4))
# What each request is said to have sampled. Tokens come again, and one is the last of its prompt.
OUTPUTS = (
    [105, 11, 12, 105, 11],
    [13, 13, 13, 14, 13],
    [15, 16, 15, 16, 17],
    [138, 138, 18, 138, 19],
)
STEPS = 3
ACCEPTED = 2
DRAFT_TOKENS = 4
SPECULATION: dict[str, Any] = DRAFT_SHAPES["chain"] | {
    "speculative_algorithm": "EAGLE",
    "speculative_num_draft_tokens": DRAFT_TOKENS,
}


# --- merge ------------------------------------------------------------------------------------

SCORING, GENERATION = "s", "g"


@dataclass
class Merging:
    """Batches of scoring and generation requests, and what must have become of each request.

    Attributes
    ----------
    room : upstream.Memory
    lengths : dict of str to int
        Prompt length of each request, by name.
    """

    room: upstream.Memory
    lengths: dict[str, int] = field(default_factory=dict)

    def batch(self, kinds: str) -> Any:
        """A prefilled batch with a request for each letter, `SCORING` or `GENERATION`."""
        first = len(self.lengths)
        lengths = [3 + first + i for i in range(len(kinds))]
        params = [{"max_new_tokens": 0 if kind == SCORING else 8} for kind in kinds]
        prompts = [range(10, 10 + length) for length in lengths]
        batch = upstream.prefilled(self.room, prompts, params, first=first)
        self.lengths |= {req.rid: n for req, n in zip(batch.reqs, lengths)}
        if batch.is_prefill_only != all(kind == SCORING for kind in kinds):
            raise RuntimeError(f"a new batch of {kinds!r} has is_prefill_only wrong already")
        upstream.sampled(batch)
        return batch

    def merged(self, one: Any, other: Any) -> Any:
        """`one`, with `other` merged into it."""
        one.merge_batch(other)
        return one

    def finished(self, batch: Any, place: int) -> Any:
        """`batch`, with a request at its end and filtered out."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        batch.reqs[place].finished_reason = FINISH_LENGTH(length=1)
        batch.filter_batch()
        return batch

    def kept(self, batch: Any, *places: int) -> Any:
        """`batch`, with the requests at these places alone."""
        batch.filter_batch(keep_indices=list(places))
        return batch


# Name, the requests in it in order, by number, and how it is made. In none does filter_batch take the
# last generation request out of a batch: releases leave the flag as it was then.
Case = tuple[str, list[int], Callable[[Merging], Any]]
CASES: tuple[Case, ...] = (
    ("s+s", [0, 1], lambda m: m.merged(m.batch("s"), m.batch("s"))),
    ("s+g", [0, 1], lambda m: m.merged(m.batch("s"), m.batch("g"))),
    ("g+s", [0, 1], lambda m: m.merged(m.batch("g"), m.batch("s"))),
    ("g+g", [0, 1], lambda m: m.merged(m.batch("g"), m.batch("g"))),
    ("(s+s)+s", [0, 1, 2], lambda m: m.merged(m.merged(m.batch("s"), m.batch("s")), m.batch("s"))),
    ("(s+s)+g", [0, 1, 2], lambda m: m.merged(m.merged(m.batch("s"), m.batch("s")), m.batch("g"))),
    ("(s+g)+s", [0, 1, 2], lambda m: m.merged(m.merged(m.batch("s"), m.batch("g")), m.batch("s"))),
    ("(g+s)+s", [0, 1, 2], lambda m: m.merged(m.merged(m.batch("g"), m.batch("s")), m.batch("s"))),
    ("s+(s+s)", [0, 1, 2], lambda m: m.merged(m.batch("s"), m.merged(m.batch("s"), m.batch("s")))),
    ("s+(s+g)", [0, 1, 2], lambda m: m.merged(m.batch("s"), m.merged(m.batch("s"), m.batch("g")))),
    ("s+(g+s)", [0, 1, 2], lambda m: m.merged(m.batch("s"), m.merged(m.batch("g"), m.batch("s")))),
    ("g+(s+s)", [0, 1, 2], lambda m: m.merged(m.batch("g"), m.merged(m.batch("s"), m.batch("s")))),
    ("ss less one, +s", [1, 2], lambda m: m.merged(m.finished(m.batch("ss"), 0), m.batch("s"))),
    ("ss less one, +g", [1, 2], lambda m: m.merged(m.finished(m.batch("ss"), 0), m.batch("g"))),
    ("s+(ss less one)", [0, 2], lambda m: m.merged(m.batch("s"), m.kept(m.batch("ss"), 1))),
    ("gg less one, +s", [0, 2], lambda m: m.merged(m.finished(m.batch("gg"), 1), m.batch("s"))),
    ("s+(gg less one)", [0, 2], lambda m: m.merged(m.batch("s"), m.finished(m.batch("gg"), 0))),
    ("sg less s, +s", [1, 2], lambda m: m.merged(m.kept(m.batch("sg"), 1), m.batch("s"))),
    ("(s+gs) less s, +s", [1, 3], lambda m: _merge_filter_merge(m)),
)


def _merge_filter_merge(m: Merging) -> Any:
    both = m.merged(m.batch("s"), m.batch("gs"))
    return m.merged(m.kept(both, 1), m.batch("s"))


def merge() -> dict[str, Any]:
    """``is_prefill_only`` after merges, and whether the rest of the batch is merged.

    Returns
    -------
    dict
        ``cases``: of each ``name``, ``expected``, ``found`` and ``right``; ``whole`` tells whether
        requests and lengths are those of both sides, in order. ``wrong`` and ``not_whole`` count.
    """
    upstream.start_server("cpu")
    cases = [_merge_case(*case) for case in CASES]
    return {
        "wrong": sum(not case["right"] for case in cases),
        "not_whole": sum(not case["whole"] for case in cases),
        "cases": cases,
    }


def _merge_case(name: str, members: list[int], make: Callable[[Merging], Any]) -> dict[str, Any]:
    merging = Merging(upstream.memory(8, "cpu", row_len=64))
    batch = make(merging)
    names = [f"r{i}" for i in members]
    lengths = [merging.lengths[name] for name in names]
    expected = all(req.sampling_params.max_new_tokens == 0 for req in batch.reqs)
    rows = batch.req_pool_indices.tolist()
    return {
        "name": name,
        "expected": expected,
        "found": bool(batch.is_prefill_only),
        "right": batch.is_prefill_only == expected,
        "requests": [req.rid for req in batch.reqs],
        "seq_lens": batch.seq_lens.tolist(),
        "whole": [req.rid for req in batch.reqs] == names
        and batch.seq_lens.tolist() == lengths
        and batch.seq_lens_cpu.tolist() == lengths
        and batch.orig_seq_lens.tolist() == lengths
        and len(set(rows)) == len(names),
    }


# --- decode: what is copied -------------------------------------------------------------------


def transfers(speculative: bool) -> dict[str, Any]:
    """What one step's preparation copies, with penalties and without.

    Returns
    -------
    dict
        ``with_penalties`` and ``without``: ``blocking``, ``asynchronous`` and ``rows`` as the ledger
        has them. ``penalty_rows``: those rows of the first that the second does not have, by file,
        function and operation. ``penalties_block``: how many transfers more block.
    """
    found = {
        name: _watched_step(params, speculative)
        for name, params in (("with_penalties", PENALTIES), ("without", NO_PENALTIES))
    }
    return {
        "penalties_block": found["with_penalties"]["blocking"] - found["without"]["blocking"],
        "penalty_rows": _more(found["with_penalties"]["rows"], found["without"]["rows"]),
        **found,
    }


def _watched_step(params: Sequence[dict[str, Any]], speculative: bool) -> dict[str, Any]:
    with fake_device.FakeDeviceMode():
        batch = _batch(str(fake_device.device()), params, speculative)
    # The kernel is compiled, and no copy.
    with (
        upstream.slot_writer(lambda *args: None),
        TransferLedger(fake_device.NAME) as ledger,
        upstream.a_gpu(),
    ):
        batch.prepare_for_decode()
    told = ledger.as_dict()
    return {name: told[name] for name in ("blocking", "asynchronous", "rows")}


def _more(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `rows` of whose kind there are fewer calls in `others`, each with the surplus."""

    def kind(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["site"].rpartition(":")[0], row["function"], row["op"]

    left: Counter[tuple[str, str, str]] = Counter()
    for row in others:
        left[kind(row)] += row["calls"]
    more = []
    for row in rows:
        known = min(left[kind(row)], row["calls"])
        left[kind(row)] -= known
        if row["calls"] > known:
            more.append(row | {"calls": row["calls"] - known})
    return more


def _batch(device: str, params: Sequence[dict[str, Any]], speculative: bool) -> Any:
    """A prefilled batch of `PROMPTS`, ready to decode."""
    upstream.start_server(device, **(SPECULATION if speculative else {}))
    room = upstream.memory(len(PROMPTS), device, row_len=64)
    algorithm = SPECULATION["speculative_algorithm"] if speculative else None
    batch = upstream.prefilled(room, PROMPTS, params, algorithm)
    if speculative:
        upstream.begin_speculation(batch, DRAFT_TOKENS)
    else:
        upstream.sampled(batch)
    return batch


# --- decode: what comes out -------------------------------------------------------------------


def values(speculative: bool) -> dict[str, Any]:
    """Penalties and KV lengths of `STEPS` steps on the CPU.

    Returns
    -------
    dict
        ``fed``: the tokens that each step gave to the penalties. ``penalties``: see `_penalties`.
        ``kv``: see `_kv_of`, after each step; ``kv_without``: the same of a run without penalties.
        ``slots_right``: see `_slots_right`, after the last step.
    """
    batch = _batch("cpu", PENALTIES, speculative)
    fed, kv, due = [], [], []
    with _tokens_fed_to(batch) as feeds:
        for step, _ in enumerate(_steps(batch, speculative)):
            fed += feeds
            kv.append(_kv_of(batch))
            due.append([_last_token(i, step, speculative) for i in range(len(PROMPTS))])
            feeds.clear()
    without = _batch("cpu", NO_PENALTIES, speculative)
    return {
        "feeds_penalties": bool(fed),
        "fed": fed,
        "penalties": _penalties(batch, due if fed else []),
        "kv": kv,
        "kv_without": [_kv_of(without) for _ in _steps(without, speculative)],
        "slots_right": _slots_right(batch),
    }


@contextlib.contextmanager
def _tokens_fed_to(batch: Any) -> Iterator[list[list[int]]]:
    """The tokens of each call that feeds the penalties, as they come."""
    orchestrator = batch.sampling_info.penalizer_orchestrator
    feed, fed = orchestrator.cumulate_output_tokens, []

    def listened(output_ids: torch.Tensor) -> None:
        fed.append(output_ids.tolist())
        feed(output_ids)

    with mock.patch.object(orchestrator, "cumulate_output_tokens", listened):
        yield fed


def _steps(batch: Any, speculative: bool) -> Iterator[None]:
    """Prepare `STEPS` steps, and do between them what forwards and their results do."""
    with upstream.slot_writer(_write_slots):
        for step in range(STEPS):
            before = [upstream.kv_length(req, "kv_committed_len") for req in batch.reqs]
            batch.prepare_for_decode()
            yield
            for i, req in enumerate(batch.reqs):
                known, come = len(req.output_ids), _outputs_before(step + 1, speculative)
                req.output_ids.extend(OUTPUTS[i][known:come])
            if speculative:
                _accept(batch, before)
            else:
                upstream.sampled(batch)


def _outputs_before(step: int, speculative: bool) -> int:
    """Tokens of a request that have been taken in before a step is prepared.

    Under overlap the first step is prepared before the token of the prefill has come, the second before
    those of the first step have.
    """
    if not speculative:
        return step
    return 0 if step == 0 else 1 + ACCEPTED * (step - 1)


def _last_token(request: int, step: int, speculative: bool) -> int:
    outputs = OUTPUTS[request][: _outputs_before(step, speculative)]
    return outputs[-1] if outputs else PROMPTS[request][-1]


def _accept(batch: Any, committed: list[int | None]) -> None:
    """Let each request accept `ACCEPTED` tokens in the step that was prepared.

    `committed` are the lengths before it was: some releases claim one of the tokens when they prepare.
    """
    batch.seq_lens = batch.seq_lens + ACCEPTED
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + ACCEPTED
    for req, length in zip(batch.reqs, committed):
        if length is not None:
            upstream.set_kv_length(req, "kv_committed_len", length + ACCEPTED)


def _write_slots(
    rows: torch.Tensor,
    table: torch.Tensor,
    first: torch.Tensor,
    behind: torch.Tensor,
    slots: torch.Tensor,
    *rest: Any,
) -> None:
    """Enter slots into rows of the request pool, see `upstream.slot_writer`."""
    done = 0
    for row, start, end in zip(rows.tolist(), first.tolist(), behind.tolist()):
        table[row, start:end] = slots[done : done + end - start].to(table.dtype)
        done += end - start


def _kv_of(batch: Any) -> dict[str, Any]:
    """Lengths of a batch's requests, and how many slots are free. None is what a release has not."""
    told: dict[str, Any] = {
        name: [upstream.kv_length(req, name) for req in batch.reqs]
        for name in ("kv_committed_len", "kv_allocated_len")
    }
    for name in ("seq_lens", "seq_lens_cpu"):
        lengths = getattr(batch, name)
        told[name] = None if lengths is None else lengths.tolist()
    # Before requests knew it, the draft input did.
    lengths = getattr(batch.spec_info, "allocate_lens", None)
    told["allocate_lens"] = None if lengths is None else lengths.tolist()
    told["available"] = batch.token_to_kv_pool_allocator.available_size()
    return told


def _slots_right(batch: Any) -> bool:
    """Whether each row has as many slots as its request is said to have, and the pool lacks those."""
    told, table = _kv_of(batch), batch.req_to_token_pool.req_to_token
    lengths = told["kv_allocated_len"]
    if lengths[0] is None:
        lengths = told["allocate_lens"] or told["seq_lens"]
    rows = table[batch.req_pool_indices]
    used = rows[rows != 0].tolist()
    allocator = batch.token_to_kv_pool_allocator
    return (
        # Slot 0 is nobody's, so that it stands for none.
        [bool((row[:n] != 0).all() and (row[n:] == 0).all()) for row, n in zip(rows, lengths)]
        == [True] * len(lengths)
        and len(used) == len(set(used)) == allocator.size - told["available"]
    )


def _penalties(batch: Any, fed: list[list[int]]) -> dict[str, Any]:
    """What the penalties do to logits after the last step, on the way of the overlap scheduler.

    Parameters
    ----------
    batch : ScheduleBatch
    fed : list of list of int
        Tokens that each step must have counted, one a request.

    Returns
    -------
    dict
        ``tokens``: the ids that are looked at, of each request. ``zero`` and ``nonzero``, of logits that
        were 0 or alternated in sign: the penalized ``logits`` at these ids, rounded to 6 digits, with
        ``"-inf"`` as text; ``max_error``, over the whole vocabulary; ``right``, if that is below 1e-5.
        ``repetition``: whether the release has that penalty. Older ones take it and do nothing.
    """
    from sglang.srt.sampling import penaltylib

    repetition = hasattr(penaltylib, "BatchedRepetitionPenalizer")
    size = (len(PROMPTS), upstream.VOCAB_SIZE)
    signs = torch.arange(size[1]).remainder(2).mul(2).sub(1)
    looked_at = [
        sorted({*PROMPTS[i][-2:], *OUTPUTS[i], EOS, *PENALTIES[i]["stop_token_ids"]})
        for i in range(size[0])
    ]
    found: dict[str, Any] = {"repetition": repetition, "tokens": looked_at}
    for name, start in (("zero", 0.0), ("nonzero", 1.5)):
        logits = (start * signs).expand(size).float().contiguous()
        expected = _penalized(logits.double(), fed, repetition)
        batch.sampling_info.copy_for_forward().apply_logits_bias(logits)
        error = torch.where(logits == expected, 0.0, (logits - expected).abs()).max().item()
        found[name] = {
            "logits": [_listed(logits[i, ids]) for i, ids in enumerate(looked_at)],
            "max_error": error if error < float("inf") else "inf",
            "right": error < 1e-5,
        }
    return found


def _penalized(logits: torch.Tensor, fed: list[list[int]], repetition: bool) -> torch.Tensor:
    """The reference: float64 logits with the penalties of the tokens that were fed."""
    logits = logits.clone()
    for i, params in enumerate(PENALTIES):
        for token, times in Counter(tokens[i] for tokens in fed).items():
            x = logits[i, token].item()
            x -= params["frequency_penalty"] * times + params["presence_penalty"]
            if repetition:
                r = params["repetition_penalty"]
                x = x * r if x < 0 else x / r
            logits[i, token] = x
        if len(fed) < params["min_new_tokens"]:
            logits[i, [EOS, *params["stop_token_ids"]]] = float("-inf")
    return logits


def _listed(values: torch.Tensor) -> list[float | str]:
    return ["-inf" if x == float("-inf") else round(x, 6) for x in values.tolist()]


def decode() -> dict[str, Any]:
    """`transfers` and `values` of plain decode steps."""
    return transfers(speculative=False) | values(speculative=False)


def spec_decode() -> dict[str, Any]:
    """`transfers` and `values` of speculative decode steps."""
    return transfers(speculative=True) | values(speculative=True)


SCENARIOS = {act.__name__: act for act in (merge, decode, spec_decode)}


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the scenarios found as JSON."""
    parser = argparse.ArgumentParser(
        prog="lab.upstream_proofs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario, by default all")
    only = parser.parse_args(argv).only
    try:
        # Releases may have things to say while they are imported.
        with contextlib.redirect_stdout(sys.stderr), torch.inference_mode(False), torch.no_grad():
            upstream.stub_what_is_absent()
            # Functions that a release compiles do the same as they are, sooner.
            torch.compiler.set_stance("force_eager")
            import sglang

            found = {name: act() for name, act in SCENARIOS.items() if only in (None, name)}
    except ImportError as error:
        traceback.print_exc()
        sys.exit(
            f"upstream_proofs: error: {error}. This wants a release of SGLang on the path, and an "
            "interpreter that has what it imports"
        )
    print(json.dumps({"package": sglang.__file__, **found}, indent=2))


if __name__ == "__main__":
    main()
