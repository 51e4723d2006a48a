"""Findings of docs/upstream-audit.md on a release: ``python -m lab.upstream_reports NAME``.

For an interpreter and a path as `lab.upstream` wants them. Each finding does something with objects of
the release and says what was done, what was found and what is right. ``all`` runs every one.

Transfers are those on the fake device, values those on the CPU. What forwards and their results do
between steps is done here.

Examples
--------
::

    python -m lab.upstream_reports --list
    python -m lab.upstream_reports penalties-lag
    python -m lab.upstream_reports all --json

The exit status is 0 if nothing shows, 1 if a finding shows, 2 if one could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from lab import fake_device, upstream, upstream_proofs, upstream_transfers
from lab.transfer_ledger import TransferLedger

EOS = 2
PLAIN_SAMPLED = {"temperature": 1.0}
SAMPLED = PLAIN_SAMPLED | {"top_p": 0.9, "top_k": 50, "min_p": 0.1}
# What the request of the findings on penalties is given, and is said to have sampled.
PROMPT = [21, 22, 23]
OUTPUTS = [31, 32, 31, 33]
STEPS = 3


@dataclass
class Found:
    """What came of a finding.

    Attributes
    ----------
    shows : bool
        Whether the release has it.
    done, found, right : str
        What was done, what came of it, and what should have.
    """

    shows: bool
    done: str
    found: str
    right: str


# --- What findings are made of ----------------------------------------------------------------


def _room() -> upstream.Memory:
    upstream.start_server("cpu")
    return upstream.memory(8, "cpu", row_len=64)


def _prefilled(room: upstream.Memory, *params: Mapping[str, Any], first: int = 0) -> Any:
    """A prefilled batch, ready to decode, with a request for each of `params`."""
    batch = upstream.prefilled(room, [PROMPT] * len(params), params, first=first)
    upstream.sampled(batch)
    return batch


def _built_again(batch: Any) -> Any:
    """What building makes of the requests of a batch."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return ScheduleBatch.init_new(
        batch.reqs,
        batch.req_to_token_pool,
        batch.token_to_kv_pool_allocator,
        batch.tree_cache,
        batch.model_config,
        True,
        batch.spec_algorithm,
    )


def _sampling_info(batch: Any) -> Any:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    return SamplingBatchInfo.from_schedule_batch(batch, upstream.VOCAB_SIZE)


def _decode(batch: Any, outputs: Sequence[int], overlap: bool) -> None:
    """Prepare a step for each of `outputs`, each a token that all requests had sampled before it.

    With overlap a step is prepared before the token that it is to be fed has come to the host.
    """
    batch.enable_overlap = overlap
    for token in outputs:
        upstream.sampled(batch, token)
        if overlap:
            batch.prepare_for_decode()
        for req in batch.reqs:
            req.output_ids.append(token)
        if not overlap:
            batch.prepare_for_decode()


def _penalized(sampling_info: Any, rows: int = 1, value: float = 0.0) -> torch.Tensor:
    """Logits that were all `value`, on the way of the overlap scheduler."""
    logits = torch.full((rows, upstream.VOCAB_SIZE), value)
    sampling_info.copy_for_forward().apply_logits_bias(logits)
    return logits


def _counted(sampling_info: Any, row: int = 0, rows: int = 1) -> dict[int, float]:
    """Times that each token of a request has been counted, by a frequency penalty of 1."""
    logits = _penalized(sampling_info, rows)[row]
    return {token: -logits[token].item() for token in logits.nonzero().flatten().tolist()}


def _rows(found: Mapping[str, Any], file: str, op: str = "") -> list[dict[str, Any]]:
    """What blocks of a ledger's table: in files with that in their path, by operations that begin so."""
    return [
        row
        for row in found["rows"]
        if row["blocking"] and file in row["site"] and row["op"].startswith(op)
    ]


def _transfers(done: str, rows: Sequence[Mapping[str, Any]], right: str) -> Found:
    """A finding on transfers, which shows if there are `rows`."""
    calls: Counter[tuple[str, str]] = Counter()
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        file, _, line = row["site"].removeprefix("sglang/srt/").rpartition(":")
        key = f"{row['kind']} {row['op']}", file
        calls[key] += row["calls"]
        lines.setdefault(key, []).append(line)
    listed = [f"{n} {key[0]} at {key[1]}:{','.join(lines[key])}" for key, n in calls.items()]
    places = f": {', '.join(sorted(listed))}" if rows else ""
    return Found(bool(rows), done, f"{calls.total()} blocking{places}", right)


# --- What filter leaves -----------------------------------------------------------------------


def filter_hidden_states() -> Found:
    """filter_batch leaves return_hidden_states set when the request that asked has left."""
    room = _room()
    asked, other = _prefilled(room, {}), _prefilled(room, {}, first=1)
    (req,) = asked.reqs
    req.return_hidden_states = True
    if hasattr(req, "return_hidden_states_mode"):
        from sglang.srt.managers.schedule_batch import get_return_hidden_states_mode

        req.return_hidden_states_mode = get_return_hidden_states_mode(True)
        asked.return_hidden_states_mode = _built_again(asked).return_hidden_states_mode
    asked.return_hidden_states = _built_again(asked).return_hidden_states
    asked.merge_batch(other)
    asked.filter_batch(keep_indices=[1])
    left = asked.return_hidden_states
    return Found(
        bool(left),
        "merged a request that asks for hidden states with one that does not; the first leaves",
        f"return_hidden_states is {left}",
        "False",
    )


def filter_sampling_flags() -> Found:
    """SamplingBatchInfo.filter_batch leaves the flags of requests that have left."""
    wrong: dict[str, tuple[Any, Any]] = {}
    greedy: dict[str, Any] = {}
    for stays, leaves in (
        (greedy, SAMPLED),
        (greedy, PLAIN_SAMPLED),
        (PLAIN_SAMPLED, SAMPLED),
        (PLAIN_SAMPLED, greedy),
    ):
        batch = _prefilled(_room(), stays, leaves)
        batch.filter_batch(keep_indices=[0])
        wrong |= _flags_unlike(batch.sampling_info, _sampling_info(batch))
    return Found(
        bool(wrong),
        "pairs of a greedy, a sampled, and a request with top_p, top_k, min_p; one of each leaves",
        ", ".join(f"{name} {left}" for name, (left, _) in wrong.items()) or "as in a new batch",
        ", ".join(f"{name} {new}" for name, (_, new) in wrong.items()) or "as in a new batch",
    )


def _flags_unlike(left: Any, fresh: Any) -> dict[str, tuple[Any, Any]]:
    """Flags of sampling parameters that differ from those of new ones."""
    pairs = {
        name: (getattr(left, name), value)
        for name, value in vars(fresh).items()
        if isinstance(value, bool)
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def filter_prefill_only() -> Found:
    """filter_batch leaves is_prefill_only False where only scoring requests remain."""
    batch = _prefilled(_room(), {"max_new_tokens": 0}, {"max_new_tokens": 8})
    batch.filter_batch(keep_indices=[0])
    return Found(
        batch.is_prefill_only is False,
        "a scoring and a generation request; the generation request leaves",
        f"is_prefill_only is {batch.is_prefill_only}",
        "True",
    )


# --- What is copied ---------------------------------------------------------------------------


def logit_bias_copies() -> Found:
    """Building a batch copies each number of a logit bias by itself, and waits."""
    rows = _rows(upstream_transfers.bias(), "sampling_batch_info.py", "__setitem__")
    return _transfers(
        f"built the sampling parameters of {upstream_transfers.SIZE} requests with 2 biases each",
        rows,
        "none that blocks",
    )


def spec_lengths_pageable() -> Found:
    """A speculative step copies KV lengths from pageable memory, or waits for lengths."""
    rows = _rows(upstream_proofs.transfers(speculative=True)["without"], "")
    return _transfers(
        "prepared a speculative (EAGLE v2) decode step without penalties", rows, "none that blocks"
    )


def penalties_built_on_device() -> Found:
    """Penalizers of a new batch are made by torch.tensor(..., device=), one wait each."""
    rows = _rows(upstream_transfers.build(), "sampling/penaltylib")
    return _transfers(
        f"built the sampling parameters of {upstream_transfers.SIZE} requests with all penalties",
        rows,
        "none that blocks",
    )


def min_new_tokens_mask() -> Found:
    """Applying min_new_tokens indexes with a boolean mask, and so asks for its size."""
    rows = _rows(upstream_transfers.apply(), "penaltylib/min_new_tokens.py")
    return _transfers("applied all penalties to logits of one step", rows, "nothing crosses")


def prefill_lengths_pageable() -> Found:
    """Preparing a prefill copies its lengths and rows from pageable memory."""
    with TransferLedger(fake_device.NAME) as ledger, upstream.a_gpu():
        upstream.start_server(str(fake_device.device()))
        room = upstream.memory(4, str(fake_device.device()), row_len=64)
        ledger.transfers.clear()
        upstream.prefilled(room, [PROMPT] * 2, [{}] * 2)
    rows = [r for r in _rows(ledger.as_dict(), "") if r["function"] == "alloc_for_extend"]
    return _transfers("prepared a prefill of 2 requests", rows, "none that blocks")


def spec_mix_blocks() -> Found:
    """A prefill that is mixed with speculating requests builds their lengths by torch.tensor."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    done, right = "mixed a prefill with a speculating (EAGLE) request", "none that blocks"
    if not hasattr(SpeculativeAlgorithm, "supports_mixed_chunk"):
        return Found(False, done, "a release that does not mix them", right)
    settings = upstream_proofs.SPECULATION
    algorithm = settings["speculative_algorithm"]
    device = str(fake_device.device())
    with TransferLedger(fake_device.NAME) as ledger, upstream.a_gpu():
        upstream.start_server(device, **settings)
        room = upstream.memory(4, device, row_len=64)
        running = upstream.prefilled(room, [PROMPT], [{}], algorithm)
        upstream.begin_speculation(running, upstream_proofs.DRAFT_TOKENS)
        with upstream.slot_writer(lambda *args: None):
            running.prepare_for_decode()
        prefill = upstream.prefilled(room, [PROMPT], [{}], algorithm, first=1)
        ledger.transfers.clear()
        prefill.mix_with_running(running)
    return _transfers(done, _rows(ledger.as_dict(), ""), right)


# --- Penalties: what is counted ---------------------------------------------------------------


def penalties_lag() -> Found:
    """With overlap, penalties count the last token of the prompt, and lag one token behind."""
    counts = {}
    for overlap in (False, True):
        batch = _prefilled(_room(), {"frequency_penalty": 1.0})
        _decode(batch, OUTPUTS[:STEPS], overlap)
        counts[overlap] = _counted(batch.sampling_info)
    right = {token: float(times) for token, times in Counter(OUTPUTS[:STEPS]).items()}
    return Found(
        counts[True] != right,
        f"prompt {PROMPT}, frequency_penalty 1, sampled {OUTPUTS[:STEPS]}, {STEPS} decode steps",
        f"counted {counts[True]} with overlap, {counts[False]} without",
        f"{dict(sorted(right.items()))}",
    )


def spec_penalties_miss_tokens() -> Found:
    """A speculative step counts one of its accepted tokens, or none."""
    fed = [tokens[0] for tokens in upstream_proofs.values(speculative=True)["fed"]]
    # Those that had come to the host when the last step was prepared.
    known = upstream_proofs.OUTPUTS[0][: 1 + upstream_proofs.ACCEPTED * (upstream_proofs.STEPS - 2)]
    missed = Counter(known) - Counter(fed)
    return Found(
        bool(missed),
        f"{upstream_proofs.STEPS} speculative (EAGLE v2) steps, each accepts "
        f"{upstream_proofs.ACCEPTED} tokens; the host knows outputs {known}",
        f"penalties were fed {fed}: {sum(missed.values())} of {len(known)} outputs missed",
        "each output fed once",
    )


def penalties_after_retraction() -> Found:
    """A retracted request comes back with its output, and penalties that start at nothing."""
    room = _room()
    params = {"frequency_penalty": 1.0, "min_new_tokens": STEPS}
    batch = _prefilled(room, params, params)
    _decode(batch, OUTPUTS[:STEPS], overlap=False)
    upstream.sampled(batch)  # older releases filter it
    before = {req.rid: _counted_and_held(batch, i) for i, req in enumerate(batch.reqs)}
    (req,) = _retract(batch)
    again = _readmitted(req, batch, room)
    after = _counted_and_held(again, 0)
    return Found(
        after != before[req.rid],
        f"{STEPS} decode steps with frequency_penalty 1, min_new_tokens {STEPS}; retracted with "
        f"output {list(req.output_ids)}, prefilled again",
        f"counted {after[0]}, the end is {'masked' if after[1] else 'allowed'}",
        f"counted {before[req.rid][0]}, the end is {'masked' if before[req.rid][1] else 'allowed'}"
        ", as before",
    )


def _counted_and_held(batch: Any, row: int) -> tuple[dict[int, float], bool]:
    """What has been counted of a request, and whether min_new_tokens holds its end back."""
    counted = _counted(batch.sampling_info, row, len(batch.reqs))
    return {token: n for token, n in counted.items() if token != EOS}, EOS in counted


def _retract(batch: Any) -> list[Any]:
    """Let a batch of several give up one request, as for want of memory."""
    args = upstream.use_server_args(device="cpu", attention_backend="torch_native", page_size=1)
    wants = "server_args" in inspect.signature(batch.retract_decode).parameters
    return list(batch.retract_decode(*([args] if wants else []))[0])


def _readmitted(req: Any, batch: Any, room: upstream.Memory) -> Any:
    """A new batch of a request that was retracted, prefilled with what it has put out."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    upstream.begin(req, room.cache)
    again = ScheduleBatch.init_new(
        [req],
        room.pool,
        room.allocator,
        room.cache,
        batch.model_config,
        True,
        batch.spec_algorithm,
    )
    again.prepare_for_extend()
    return again


def frequency_drift() -> Found:
    """A frequency penalty is summed up token by token in float32."""
    penalty, times = 0.1, 2000
    batch = _prefilled(_room(), {"frequency_penalty": penalty})
    token = torch.tensor([OUTPUTS[0]])
    for _ in range(times):
        batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(token)
    (found,) = _counted(batch.sampling_info).values()
    right = times * penalty
    # One product in float32 is off by less than this.
    rounding = torch.finfo(torch.float32).eps * right
    return Found(
        abs(found - right) > 10 * rounding,
        f"frequency_penalty {penalty}, the same token {times} times",
        f"penalty {found:.6f}, off by {abs(found - right):.1e}",
        f"{right:.6f}, off by at most {rounding:.1e}",
    )


# --- Penalties: what they do ------------------------------------------------------------------


def repetition_penalty_ignored() -> Found:
    """repetition_penalty is taken, checked, and does nothing."""
    batch = _prefilled(_room(), {"repetition_penalty": 1.5})
    batch.reqs[0].sampling_params.verify(upstream.VOCAB_SIZE)
    _decode(batch, OUTPUTS[:1], overlap=False)
    found = _penalized(batch.sampling_info, value=3.0)[0, OUTPUTS[0]].item()
    return Found(
        found == 3.0,
        "repetition_penalty 1.5 passes verify(); a token that was put out has logit 3.0",
        f"its logit is {found}",
        "2.0",
    )


def repetition_penalty_zero() -> Found:
    """repetition_penalty 0 is taken, and logits are divided by it."""
    batch = _prefilled(_room(), {"repetition_penalty": 0.0})
    done = "repetition_penalty 0; a token that was put out has logit 3.0"
    try:
        batch.reqs[0].sampling_params.verify(upstream.VOCAB_SIZE)
    except ValueError:
        return Found(False, done, "verify() refuses it", "refused")
    _decode(batch, OUTPUTS[:1], overlap=False)
    found = _penalized(batch.sampling_info, value=3.0)[0, OUTPUTS[0]].item()
    return Found(
        found in (float("inf"), float("-inf")) or found != found,
        done,
        f"verify() takes it, its logit is {found}",
        "refused",
    )


def penalizer_order() -> Found:
    """Without overlap, penalties apply in the order of a set of classes: another one each process."""
    from sglang.srt.managers.scheduler import Scheduler

    params = {"frequency_penalty": 1.0, "repetition_penalty": 2.0}
    batch = _prefilled(_room(), params)
    orchestrator = batch.sampling_info.penalizer_orchestrator
    names = [kind.__name__ for kind in orchestrator.penalizers]
    _decode(batch, OUTPUTS[:1], overlap=False)
    here, turned = (_applied(orchestrator, turn) for turn in (False, True))
    # Where a helper makes the batch's copy in either mode, scaling always comes last.
    direct = not hasattr(Scheduler, "_forward_isolation")
    order = ", ".join(n.removeprefix("Batched").removesuffix("Penalizer") for n in names)
    how = "no overlap: applied in this order" if direct else "both modes: sums first, then factors"
    return Found(
        direct and here != turned,
        "frequency_penalty 1, repetition_penalty 2; a token that was put out has logit 3.0",
        f"order here {order}: {here}; in the opposite order {turned} ({how})",
        "the same in any process",
    )


def _applied(orchestrator: Any, turned: bool) -> float:
    """The logit of a token that was put out, with penalizers in their order or the opposite one."""
    kinds = list(orchestrator.penalizers.items())
    logits = torch.full((1, upstream.VOCAB_SIZE), 3.0)
    with mock.patch.object(orchestrator, "penalizers", dict(kinds[::-1] if turned else kinds)):
        orchestrator.apply(logits)
    return logits[0, OUTPUTS[0]].item()


def min_new_tokens_eos() -> Found:
    """min_new_tokens holds back the tokenizer's end token, but not the others of the model."""
    other, least = 9, 8
    batch = _prefilled(_room(), {"min_new_tokens": least})
    (req,) = batch.reqs
    req.eos_token_ids = {EOS, other}
    logits = torch.zeros(1, upstream.VOCAB_SIZE)
    _sampling_info(batch).penalizer_orchestrator.apply(logits)
    masked = [token for token in (EOS, other) if logits[0, token].item() == float("-inf")]
    req.output_ids.append(other)
    finish = getattr(req, "update_finish_state", None) or req.check_finished
    finish()
    return Found(
        other not in masked,
        f"min_new_tokens {least}, the model ends with {EOS} or {other}, the tokenizer with {EOS}",
        f"masked {masked}; a first token {other} {'ends' if req.finished() else 'does not end'} "
        "the request",
        f"masked {[EOS, other]}",
    )


# --- Pausing ----------------------------------------------------------------------------------


def pause_merges_into_empty() -> Found:
    """pause_generation merges a prefill into a running batch that is empty."""
    from sglang.srt.managers.scheduler import Scheduler

    done = "pause_generation (in_place) behind a prefill while nothing decodes"
    right = "it returns, with a row for each request"
    if not hasattr(Scheduler, "pause_generation"):
        return Found(False, done, "there is no pause_generation", right)
    told = {
        "in a fresh server": _paused(served=False),
        "in one that has served": _paused(served=True),
    }
    text = "; ".join(f"{state}: {wrong or 'right'}" for state, wrong in told.items())
    return Found(any(told.values()), done, text, right)


def _paused(served: bool) -> str:
    """What the scheduler's own pause_generation gets wrong.

    Parameters
    ----------
    served : bool
        Whether the running batch is one whose requests have all left, or the first one.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    room = _room()
    running = ScheduleBatch(reqs=[], batch_is_full=False)
    if served:
        running = _prefilled(room, {}, first=1)
        running.filter_batch(keep_indices=[])
    last = _prefilled(room, {})
    scheduler = mock.MagicMock(
        enable_overlap=True,
        last_batch=last,
        running_batch=running,
        result_queue=deque([(last, None)]),
        chunked_req=None,
        disaggregation_mode=DisaggregationMode.NULL,
    )
    try:
        Scheduler.pause_generation(scheduler, SimpleNamespace(mode="in_place"))
    except AttributeError as error:
        return f"AttributeError: {error}"
    reqs, rows = len(running.reqs), len(running.seq_lens) if running.reqs else 0
    return "" if reqs == rows else f"{reqs} request and {rows} rows in the running batch"


FINDINGS: dict[str, Callable[[], Found]] = {
    act.__name__.replace("_", "-"): act
    for act in (
        filter_hidden_states,
        filter_sampling_flags,
        filter_prefill_only,
        logit_bias_copies,
        spec_lengths_pageable,
        prefill_lengths_pageable,
        spec_mix_blocks,
        penalties_built_on_device,
        min_new_tokens_mask,
        repetition_penalty_ignored,
        repetition_penalty_zero,
        penalties_lag,
        spec_penalties_miss_tokens,
        penalties_after_retraction,
        frequency_drift,
        penalizer_order,
        min_new_tokens_eos,
        pause_merges_into_empty,
    )
}


# --- Command ----------------------------------------------------------------------------------


def reproduce(names: Sequence[str]) -> dict[str, Found | str]:
    """Reproduce findings on the release that is on the path.

    Parameters
    ----------
    names : sequence of str
        Keys of `FINDINGS`.

    Returns
    -------
    dict
        By name, what came of it; of those that could not be run, why.
    """
    found: dict[str, Found | str] = {}
    with torch.inference_mode(False), torch.no_grad():
        upstream.stub_what_is_absent()
        upstream.import_release()
        # Functions that a release compiles do the same as they are, sooner.
        torch.compiler.set_stance("force_eager")
        for name in names:
            try:
                found[name] = FINDINGS[name]()
            except Exception as error:
                found[name] = _told(error)
    return found


def _told(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def _release() -> str:
    try:
        from sglang.version import __version__
    except ImportError:
        return "what is no release"
    return str(__version__)


def _print(found: Mapping[str, Found | str]) -> None:
    for name, one in found.items():
        if isinstance(one, str):
            print(f"{name} on {_release()}: could not be run: {one}")
            continue
        print(f"{name} on {_release()}: {'SHOWS' if one.shows else 'is not there'}")
        for line in ("done", "found", "right"):
            print(f"  {line:5}  {getattr(one, line)}")


def _status(found: Mapping[str, Found | str]) -> int:
    if any(isinstance(one, str) for one in found.values()):
        return 2
    return int(any(isinstance(one, Found) and one.shows for one in found.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Reproduce one finding or all, and print what came of it."""
    parser = argparse.ArgumentParser(
        prog="lab.upstream_reports", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("name", nargs="?", choices=[*FINDINGS, "all"], metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="print the names, and what each is")
    args = parser.parse_args(argv)
    if args.list:
        for name, act in FINDINGS.items():
            print(f"{name:27} {(act.__doc__ or '').splitlines()[0]}")
        return 0
    if args.name is None:
        parser.error("name a finding, or all; --list has the names")
    try:
        # Releases may have things to say while they are imported.
        with contextlib.redirect_stdout(sys.stderr):
            found = reproduce(list(FINDINGS) if args.name == "all" else [args.name])
    except Exception as error:
        parser.error(
            f"{_told(error)}. This wants a release of SGLang on the path, and an interpreter that has "
            "what it imports: see docs/laboratory.md"
        )
    if args.json:
        told = {k: {"error": v} if isinstance(v, str) else asdict(v) for k, v in found.items()}
        print(json.dumps({"release": _release(), "findings": told}, indent=2))
    else:
        _print(found)
    return _status(found)


if __name__ == "__main__":
    sys.exit(main())
