"""Run one decode workload and print what it did: ``python -m sglang.bench_decode --model-path DIR``.

Requests with prompts of one length produce a fixed number of tokens each, once to warm up and then some
times over. Numbers are about decode steps alone: a prefill counts neither as time nor as tokens.

Examples
--------
::

    python -m sglang.bench_decode --model-path DIR --batch-size 1 8 32
    python -m sglang.bench_decode --model-path DIR --batch-size 8 --penalties all --overlap off
    python -m sglang.bench_decode --model-path DIR --speculative tree \\
        --speculative-draft-model-path DRAFT
    python -m sglang.bench_decode --model-path DIR --batch-size 8 --concurrency 24 --json out.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import StepRecord
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.tokenizer import Tokenizer

# What prompts are made of where there is a tokenizer. Random ids would do for time, but an EAGLE head
# can only guess what follows a text.
TEXT = """\
The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed the stairs,
cleaned the glass, and lit the lamp. Ships came and went, carrying grain, wool and letters. In winter
the sea froze near the shore, and children walked on the ice to ask him for stories. He knew many of
them: of islands that nobody had found twice, of a captain who sailed by the sound of bells, and of a
whale that followed the mail boat for a hundred miles. One morning he found a bottle between the rocks.
Inside was a map, drawn by a careful hand, and a note that asked for an answer. He read it three times
before he sat down to write. """

PENALTIES = {"frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.1}
DECODE_MODES = ("DECODE", "MIXED")
MAX_THREADS = 1024
BAR = "{desc}{percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} steps [{elapsed}<{remaining}]"


class WorkNotDone(RuntimeError):
    """The engine did something else than what was to be measured."""


# --- Measuring --------------------------------------------------------------------------------


@dataclass
class Workload:
    """What is run.

    Attributes
    ----------
    batch_size : int
        Most requests that run at a time.
    concurrency : int
        Requests that are sent at once; those that find no place wait for one.
    input_len, output_len : int
        Tokens of each prompt, and tokens that each request produces.
    penalties : bool
        Whether each request has all four penalties.
    """

    batch_size: int
    concurrency: int
    input_len: int
    output_len: int
    penalties: bool

    def sampling_params(self) -> dict[str, Any]:
        """Greedy decoding of exactly ``output_len`` tokens."""
        params = {"max_new_tokens": self.output_len, "temperature": 0, "ignore_eos": True}
        return (
            params | PENALTIES | {"min_new_tokens": self.output_len} if self.penalties else params
        )


@dataclass
class Measurement:
    """One run of a workload: each step with the time at which its results had been handed out."""

    started: float
    steps: list[tuple[float, StepRecord]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    ended: float = 0.0


def percentile(values: Sequence[float], q: float) -> float:
    """The `q`-th percentile, 0 to 100, with linear interpolation."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def decode_metrics(run: Measurement) -> dict[str, float]:
    """Numbers of one run.

    Returns
    -------
    dict of str to float
        - ``tokens_per_s``: tokens of decode steps by their wall time, which is the time since the
          step before had been handed out;
        - ``itl_p50_ms``, ``itl_p99_ms``: that time by the tokens that a request got in the step,
          percentiles over tokens;
        - ``accepted_length``: tokens a request got from a verification; 1 without speculation;
        - ``forward_occupancy``: part of the decode phase, from the first decode forward's start to
          the last one's end, in which a forward ran;
        - ``host_us_per_step``: host time to prepare a step and to handle its results, median;
        - ``total_tokens_per_s``: all tokens by the whole time, prefill included;
        - ``draft_ms``, ``verify_ms``, ``extend_ms``: medians, where the engine tells them.

    Raises
    ------
    WorkNotDone
        If no step decoded.
    """
    before, gaps = run.started, []
    for delivered, record in run.steps:
        if record.forward_mode in DECODE_MODES and record.num_tokens > 0:
            gaps.append((delivered - before, record))
        before = delivered
    if not gaps:
        raise WorkNotDone("no step decoded")
    records = [record for _, record in gaps]
    # A batch may carry requests that have just ended, so a step has at least a token a request.
    latencies = [
        gap / max(record.num_tokens / record.batch_size, 1.0)
        for gap, record in gaps
        for _ in range(record.num_tokens)
    ]
    produced = sum(len(result["output_ids"]) for result in run.results)
    return {
        "tokens_per_s": sum(r.num_tokens for r in records) / sum(gap for gap, _ in gaps),
        "itl_p50_ms": 1e3 * percentile(latencies, 50),
        "itl_p99_ms": 1e3 * percentile(latencies, 99),
        "accepted_length": accepted_length(run.results),
        "forward_occupancy": forward_occupancy([record for _, record in run.steps]),
        "host_us_per_step": 1e6
        * statistics.median(r.prepare_time + r.process_time for r in records),
        "total_tokens_per_s": produced / (run.ended - run.started),
        **phase_metrics(records),
    }


def accepted_length(results: Sequence[dict[str, Any]]) -> float:
    """Tokens a request got from one verification, bonus token included; 1 without speculation."""
    metas = [result["meta_info"] for result in results]
    verifications = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    if not verifications:
        return 1.0
    # The first token of each is the prefill's.
    tokens = sum(m["completion_tokens"] - 1 for m in metas if m.get("spec_verify_ct", 0))
    return tokens / verifications


def forward_occupancy(records: Sequence[StepRecord]) -> float:
    """Part of the decode phase in which a forward ran, on the forwards' own clock."""
    decodes = [r for r in records if r.forward_mode in DECODE_MODES and r.num_tokens > 0]
    start = min(r.forward_start for r in decodes)
    end = max(r.forward_end for r in decodes)
    busy = sum(max(0.0, min(r.forward_end, end) - max(r.forward_start, start)) for r in records)
    return busy / (end - start) if end > start else 1.0


def phase_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Median milliseconds of the phases inside a forward."""
    names = dict.fromkeys(name for record in records for name in record.phases)
    return {
        f"{name}_ms": 1e3 * statistics.median(r.phases[name] for r in records if name in r.phases)
        for name in names
    }


def check_work(run: Measurement, workload: Workload) -> None:
    """See that every request got its tokens, and that the steps account for all of them.

    Raises
    ------
    WorkNotDone
        If not.
    """
    wanted = ("length", workload.input_len, workload.output_len)
    for i, result in enumerate(run.results):
        meta = result["meta_info"]
        reason = meta["finish_reason"]
        found = (reason["type"], meta["prompt_tokens"], len(result["output_ids"]))
        if found != wanted:
            raise WorkNotDone(
                f"request {i}: {reason}, {found[1]} + {found[2]} tokens, not {wanted}"
            )
        if meta["retraction_count"]:
            raise WorkNotDone(f"request {i} was retracted: --max-total-tokens is too small")
    produced = sum(record.num_tokens for _, record in run.steps)
    expected = workload.concurrency * workload.output_len
    if produced != expected or len(run.results) != workload.concurrency:
        raise WorkNotDone(
            f"{len(run.results)} results, and steps with {produced} tokens; "
            f"{workload.concurrency} and {expected} were wanted"
        )
    together = max(record.batch_size for _, record in run.steps)
    if together < workload.batch_size:
        raise WorkNotDone(
            f"at most {together} requests ran together, not {workload.batch_size}: "
            "--max-total-tokens is too small"
        )


class Bench:
    """An engine that runs a workload.

    Parameters
    ----------
    server_args : dict
        Arguments of `Engine`.
    workload : Workload
    seed : int
        Of the prompts.
    """

    def __init__(self, server_args: dict[str, Any], workload: Workload, seed: int = 0) -> None:
        self.workload = workload
        self._steps: list[tuple[float, StepRecord]] = []
        self._engine = Engine(**server_args, observer=self._observe)
        self._prompts = make_prompts(server_args["model_path"], workload, seed)

    def _observe(self, record: StepRecord) -> None:
        self._steps.append((time.perf_counter(), record))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.shutdown()

    @property
    def progress(self) -> int:
        """Tokens produced since the run began."""
        return sum(record.num_tokens for _, record in list(self._steps))

    def run(self) -> Measurement:
        """Run the workload once, until the engine is at rest, and check that the work was done."""
        self._steps = []
        run = Measurement(time.perf_counter(), steps=self._steps)
        run.results = self._engine.generate(
            input_ids=self._prompts, sampling_params=self.workload.sampling_params()
        )
        run.ended = time.perf_counter()
        self._wait_until_at_rest()
        check_work(run, self.workload)
        return run

    def _wait_until_at_rest(self, timeout: float = 60.0) -> None:
        # Under overlap one more forward is under way when the last result comes out.
        limit = time.perf_counter() + timeout
        while not self._steps or self._steps[-1][1].step != self._engine.scheduler.forward_ct:
            if time.perf_counter() > limit:
                raise WorkNotDone("the engine does not come to rest")
            time.sleep(0.001)


def make_prompts(model_path: str, workload: Workload, seed: int) -> list[list[int]]:
    """A prompt for each request, of ``input_len`` tokens: text, or random ids without a tokenizer."""
    draw = random.Random(seed)
    length = workload.input_len
    if (Path(model_path) / "tokenizer.json").is_file():
        tokenizer = Tokenizer(model_path)
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        ids = ids * (2 + length // len(ids))
        starts = [draw.randrange(len(ids) - length) for _ in range(workload.concurrency)]
        return [ids[start : start + length] for start in starts]
    vocab_size = ModelConfig.from_path(model_path).vocab_size
    return [
        [draw.randrange(vocab_size) for _ in range(length)] for _ in range(workload.concurrency)
    ]


def measure(bench: Bench, warmup: int, repeats: int, tick: Callable[[int], None]) -> dict[str, Any]:
    """Medians over `repeats` runs, after `warmup` runs that do not count.

    Returns
    -------
    dict
        The workload, ``metrics`` and ``runs``, the metrics of each run.
    """
    runs = []
    for i in range(warmup + repeats):
        with ticking(bench, tick):
            run = bench.run()
        if i >= warmup:
            runs.append(decode_metrics(run))
    metrics = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {**dataclasses.asdict(bench.workload), "metrics": metrics, "runs": runs}


@contextmanager
def ticking(bench: Bench, tick: Callable[[int], None]) -> Iterator[None]:
    """Report the tokens of one run while it runs, from a thread that sleeps most of the time."""
    import threading

    done, seen = threading.Event(), 0

    def watch() -> None:
        nonlocal seen
        while not done.wait(0.5):
            now = bench.progress
            tick(max(now - seen, 0))
            seen = max(now, seen)

    bench._steps = []
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        tick(max(bench.progress - seen, 0))


# --- The command line -------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="bench_decode",
        usage="python -m sglang.bench_decode --model-path DIR [options]; --help lists them",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, help="directory in Hugging Face's layout")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--batch-size", type=int, nargs="+", default=[1], help="requests that run together, at most"
    )
    load.add_argument(
        "--concurrency",
        type=int,
        help="requests that are sent at once; beyond the batch size they wait for a place "
        "(default: the batch size)",
    )
    load.add_argument("--input-len", type=int, default=32, help="tokens of a prompt")
    load.add_argument("--output-len", type=int, default=64, help="tokens that a request produces")
    load.add_argument("--penalties", choices=("none", "all"), default="none")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--overlap", choices=("on", "off"), help="overlap loop (default: on)")
    engine.add_argument(
        "--disable-overlap-schedule", action="store_true", help="the same as --overlap off"
    )
    engine.add_argument("--speculative", choices=("none", "chain", "tree"), default="none")
    engine.add_argument(
        "--speculative-draft-model-path", "--draft-path", dest="draft_path", metavar="DIR"
    )
    engine.add_argument("--speculative-num-steps", type=int, help="(default: the engine's)")
    engine.add_argument("--speculative-eagle-topk", type=int, help="(default: 1, tree: 2)")
    engine.add_argument("--speculative-num-draft-tokens", type=int, help="(default: the engine's)")
    engine.add_argument("--device", default="cpu", help="cpu or cuda")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--page-size", type=int, default=1)
    engine.add_argument("--max-total-tokens", type=int, help="KV slots (default: what is needed)")
    engine.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    engine.add_argument("--threads", type=int, help="threads of the CPU (default: torch's choice)")
    run = parser.add_argument_group("measurement")
    run.add_argument("--warmup", type=int, default=1, help="runs that do not count")
    run.add_argument("--repeats", type=int, default=3, help="runs that count; medians are shown")
    run.add_argument("--seed", type=int, default=0, help="of the prompts")
    run.add_argument(
        "--json", metavar="FILE", help="write JSON too; - prints it instead of a table"
    )
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot be run, before anything is loaded.

    Raises
    ------
    ValueError
        Naming the option and the value.
    """
    for name, least in (
        ("input_len", 1),
        ("output_len", 2),
        ("warmup", 0),
        ("repeats", 1),
        ("threads", 1),
        ("concurrency", 1),
        ("page_size", 1),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if value is not None and value >= 2**31:
            raise ValueError(f"--{name.replace('_', '-')} must be below 2**31, got {value}")
    if args.threads is not None and args.threads > MAX_THREADS:
        raise ValueError(f"--threads must be at most {MAX_THREADS}, got {args.threads}")
    for size in args.batch_size:
        if not 1 <= size < 2**31:
            raise ValueError(f"--batch-size must be in [1, 2**31), got {size}")
        if args.concurrency is not None and args.concurrency < size:
            raise ValueError(
                f"--concurrency {args.concurrency} can never fill a batch of --batch-size {size}"
            )
    if args.disable_overlap_schedule and args.overlap == "on":
        raise ValueError("--disable-overlap-schedule and --overlap on contradict each other")
    if args.speculative != "none" and args.draft_path is None:
        raise ValueError(f"--speculative {args.speculative} needs --speculative-draft-model-path")
    if args.speculative == "none":
        for option, value in (
            ("draft-model-path", args.draft_path),
            ("num-steps", args.speculative_num_steps),
            ("eagle-topk", args.speculative_eagle_topk),
            ("num-draft-tokens", args.speculative_num_draft_tokens),
        ):
            if value is not None:
                raise ValueError(f"--speculative-{option} needs --speculative chain or tree")
    topk = args.speculative_eagle_topk
    if args.speculative == "chain" and topk not in (None, 1):
        raise ValueError(f"--speculative chain has --speculative-eagle-topk 1, got {topk}")
    if args.speculative == "tree" and topk is not None and topk < 2:
        raise ValueError(f"--speculative tree needs --speculative-eagle-topk above 1, got {topk}")
    if args.json not in (None, "-"):
        place = Path(args.json).absolute()
        if args.json == "" or place.is_dir() or not os.access(place.parent, os.W_OK):
            raise ValueError(f"--json must be a file that can be written, got {args.json!r}")


def server_args(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Arguments of `Engine`.

    Raises
    ------
    ValueError
        If the engine would refuse them.
    """
    made: dict[str, Any] = {
        "model_path": args.model_path,
        "skip_tokenizer_init": True,
        "load_format": args.load_format,
        "device": args.device,
        "dtype": args.dtype,
        "page_size": args.page_size,
        "max_running_requests": workload.batch_size,
        "disable_overlap_schedule": args.disable_overlap_schedule or args.overlap == "off",
    }
    if args.speculative != "none":
        default_topk = 1 if args.speculative == "chain" else 2
        made |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": args.draft_path,
            "speculative_num_steps": args.speculative_num_steps,
            "speculative_eagle_topk": args.speculative_eagle_topk or default_topk,
            "speculative_num_draft_tokens": args.speculative_num_draft_tokens,
        }
    if args.max_total_tokens is not None:
        made["max_total_tokens"] = args.max_total_tokens
    checked = ServerArgs.from_kwargs(**made)
    if args.max_total_tokens is None:
        made["max_total_tokens"] = _kv_slots(workload, checked)
    _check_length(workload, checked)
    return made


def _kv_slots(workload: Workload, checked: ServerArgs) -> int:
    """So many that no request waits for another one's KV, or is retracted for want of it."""
    longest = workload.input_len + workload.output_len + 2 * checked.spec_alloc_len + 1
    pages = -(-longest // checked.page_size) + 1
    return workload.batch_size * pages * checked.page_size


def _check_length(workload: Workload, checked: ServerArgs) -> None:
    config = ModelConfig.from_path(checked.model_path, dtype=checked.torch_dtype)
    longest = workload.input_len + workload.output_len
    if longest > config.context_len:
        raise ValueError(
            f"--input-len {workload.input_len} and --output-len {workload.output_len} exceed the "
            f"model's context of {config.context_len} tokens"
        )


def make_workloads(args: argparse.Namespace) -> list[Workload]:
    """One workload for each batch size."""
    return [
        Workload(
            batch_size=size,
            concurrency=args.concurrency or size,
            input_len=args.input_len,
            output_len=args.output_len,
            penalties=args.penalties == "all",
        )
        for size in args.batch_size
    ]


def steps_of(workload: Workload) -> float:
    """Decode steps that a workload takes without speculation, and a prefill."""
    return workload.concurrency * workload.output_len / workload.batch_size


def show(found: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """Print the table for people."""
    from rich.console import Console
    from rich.table import Table

    columns = (
        ("tok/s", "tokens_per_s", "{:,.1f}"),
        ("ITL p50", "itl_p50_ms", "{:.2f} ms"),
        ("ITL p99", "itl_p99_ms", "{:.2f} ms"),
        ("accepted length", "accepted_length", "{:.2f}"),
        ("forward occupancy", "forward_occupancy", "{:.1%}"),
        ("host / step", "host_us_per_step", "{:.0f} us"),
        ("tok/s with prefill", "total_tokens_per_s", "{:,.1f}"),
        ("draft", "draft_ms", "{:.2f} ms"),
        ("verify", "verify_ms", "{:.2f} ms"),
        ("draft extend", "extend_ms", "{:.2f} ms"),
    )
    present = [c for c in columns if all(c[1] in entry["metrics"] for entry in found)]
    title = "Decode: " + ", ".join(f"{key} {value}" for key, value in about.items())
    table = Table(title=title, title_justify="left")
    table.add_column("batch size", justify="right")
    table.add_column("concurrency", justify="right")
    for name, _, _ in present:
        table.add_column(name, justify="right")
    for entry in found:
        cells = [form.format(entry["metrics"][key]) for _, key, form in present]
        table.add_row(str(entry["batch_size"]), str(entry["concurrency"]), *cells)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """What the numbers were measured with."""
    overlap = "off" if args.disable_overlap_schedule or args.overlap == "off" else "on"
    return {
        "model": Path(args.model_path).name,
        "device": args.device,
        "threads": torch.get_num_threads(),
        "prompt": args.input_len,
        "output": args.output_len,
        "penalties": args.penalties,
        "speculation": args.speculative,
        "overlap": overlap,
    }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each batch size, with a progress bar on stderr.

    Raises
    ------
    ValueError
        If the arguments make no sense.
    WorkNotDone
        If the engine did something else than what was asked of it.
    """
    from tqdm import tqdm

    check_arguments(args)
    workloads = make_workloads(args)
    engines = [server_args(args, workload) for workload in workloads]
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    # In steps, not tokens: a step of a large batch takes longer, but not as much as it has tokens.
    total = sum(steps_of(w) for w in workloads) * (args.warmup + args.repeats)
    # A log file gets a line now and then, a terminal gets a bar that moves.
    interval = 0.1 if sys.stderr.isatty() else 5.0
    found = []
    with tqdm(total=total, bar_format=BAR, desc="load", mininterval=interval) as bar:
        for workload, engine_args in zip(workloads, engines, strict=True):
            bar.set_description(f"batch {workload.batch_size}: load")
            with Bench(engine_args, workload, args.seed) as bench:
                bar.set_description(f"batch {workload.batch_size}")
                found.append(
                    measure(
                        bench,
                        args.warmup,
                        args.repeats,
                        lambda tokens, size=workload.batch_size: bar.update(tokens / size),
                    )
                )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        found = run(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    except (WorkNotDone, RuntimeError) as error:
        print(f"bench_decode: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench_decode: interrupted", file=sys.stderr)
        return 130
    about = describe(args)
    document = json.dumps({"about": about, "results": found}, indent=2)
    if args.json == "-":
        print(document)
        return 0
    show(found, about)
    if args.json is not None:
        try:
            Path(args.json).write_text(document + "\n")
        except OSError as error:
            print(f"bench_decode: error: --json: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
