"""How a case is run.

One round of a case is one call of `Session.run_round`; it checks that the work was really done and
returns the metrics of `lab.metrics`. A session belongs into a process of its own (`lab.worker`): where
a commit cannot do the work of a case, its engine stalls for good, and nothing in its process can end it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import devices, metrics, models
from lab.cases import DRAFT_SHAPES, WARM_UP_LEN, Case, Setup
from lab.metrics import Round, Step

if TYPE_CHECKING:
    from lab.modelled_accelerator import ModelledAccelerator


def sampling_params(case: Case) -> dict[str, Any]:
    """Greedy decoding of exactly ``case.output_len`` tokens."""
    params = {"max_new_tokens": case.output_len, "temperature": 0, "ignore_eos": True}
    if case.penalties:
        params |= {
            "frequency_penalty": 0.2,
            "presence_penalty": 0.1,
            "repetition_penalty": 1.1,
            "min_new_tokens": case.output_len,
            "logit_bias": {"5": -1.0, "7": 0.5},
        }
    return params


def check_round(round_: Round, case: Case, prompt_lens: list[int]) -> None:
    """See that requests that run alone did what a case wants.

    Raises
    ------
    WorkNotDone
        If not.
    """
    metrics.check_results(round_.results, prompt_lens, case.output_len)
    most = 1
    if case.setup.speculative != "none":
        most += DRAFT_SHAPES[case.setup.speculative]["speculative_num_steps"]
        # In the few tokens of a warm-up it may be that no draft is accepted.
        accepts = case.setup.model == "real" and case.output_len > WARM_UP_LEN
        metrics.check_speculation(round_.results, accepts)
    # A request's first token is the prefill's.
    metrics.check_batches(round_, case.batch_size, (case.output_len - 1) // most)


class Probe:
    """Collects the steps of an engine; it is the engine's observer.

    Attributes
    ----------
    scheduler : Scheduler, optional
        The engine's.
    had_penalties : bool, optional
        Whether there were penalties behind any decode step since this was set to None.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.scheduler: Any = None
        self.had_penalties: bool | None = None

    def __call__(self, record: metrics.StepRecord) -> None:
        delivered = time.perf_counter()
        # Before the step is there: whoever waits for the last one may begin another round.
        if not self.had_penalties and record.forward_mode == "DECODE" and self.scheduler:
            self.had_penalties = metrics.has_penalties(self.scheduler)
        self._steps.append(Step(delivered, record))

    def take(self, forward_count: Callable[[], int], timeout: float = 30.0) -> list[Step]:
        """The steps since the last call, once the engine has come to rest.

        Parameters
        ----------
        forward_count : callable
            Number of forwards that the engine has started. It rests when each of them was reported:
            under overlap one more is under way when the last result comes out.
        timeout : float
            Seconds to wait for that.

        Raises
        ------
        WorkNotDone
            If it does not come to rest.
        """
        limit = time.perf_counter() + timeout
        while (self._steps[-1].record.step if self._steps else 0) != forward_count():
            if time.perf_counter() > limit:
                raise metrics.WorkNotDone(
                    f"forward {forward_count()} was started and never reported"
                )
            time.sleep(0.0005)
        taken, self._steps = self._steps, []
        # The last one stays, so that a round without steps finds the engine at rest.
        self._steps = taken[-1:]
        return taken


class Gate:
    """Holds up one prefill forward, so that what arrives meanwhile arrives meanwhile on any machine."""

    def __init__(self) -> None:
        self._armed = False
        self._reached = threading.Event()
        self._open = threading.Event()

    def arm(self) -> None:
        """Hold up the next prefill."""
        self._reached.clear()
        self._open.clear()
        self._armed = True

    def wait_until_reached(self, timeout: float) -> bool:
        """Whether a prefill came to the gate in time."""
        return self._reached.wait(timeout)

    def open(self) -> None:
        """Let it go on."""
        self._armed = False
        self._open.set()

    def pass_through(self) -> None:
        """Called by each prefill forward."""
        if self._armed:
            self._armed = False
            self._reached.set()
            self._open.wait(timeout=30)

    def runner_class(self, base: type) -> type:
        """A model runner whose prefills go through this gate."""
        gate = self

        class GatedModelRunner(base):
            def forward(self, forward_batch: Any) -> Any:
                if forward_batch.forward_mode.is_extend():
                    gate.pass_through()
                return super().forward(forward_batch)

        return GatedModelRunner


@dataclass
class Paths:
    """Where the models of a setup lie."""

    model: str
    draft: str | None = None
    dummy: bool = False

    @classmethod
    def of(cls, setup: Setup, scratch: Path) -> Paths:
        """Find or, below `scratch`, write the models."""
        speculate = setup.speculative != "none"
        if setup.model == "real":
            return cls(models.real_model(), models.real_draft() if speculate else None)
        size = {"vocab_size": setup.vocab_size}
        draft = scratch / "tiny-draft"
        return cls(
            models.write_tiny_model(scratch / "tiny", **size),
            models.write_tiny_model(draft, draft=True, **size) if speculate else None,
            dummy=True,
        )


def server_args(setup: Setup, paths: Paths) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`."""
    args: dict[str, Any] = {
        "model_path": paths.model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "load_format": "dummy" if paths.dummy else "auto",
        "max_running_requests": setup.max_running_requests,
        "disable_overlap_schedule": not setup.overlap,
    }
    for name in ("chunked_prefill_size", "max_total_tokens"):
        if getattr(setup, name) is not None:
            args[name] = getattr(setup, name)
    if setup.speculative != "none":
        args |= DRAFT_SHAPES[setup.speculative] | {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": paths.draft,
        }
    return args


class Session:
    """An engine that runs rounds of cases.

    Parameters
    ----------
    setup : Setup
    scratch : Path
        Directory for tiny models.
    **overrides
        Further arguments of `sglang.Engine`.

    Raises
    ------
    Unsupported
        If the installed commit lacks a seam that this needs.
    """

    def __init__(self, setup: Setup, scratch: Path, **overrides: Any) -> None:
        import sglang
        from sglang.srt.model_executor.model_runner import ModelRunner

        # The rest of its parameters are the fields of ServerArgs.
        seams = {"thread_context"} & overrides.keys()
        models.require_engine("observer", "model_runner_class", *seams)
        self.setup = setup
        self.paths = Paths.of(setup, scratch)
        self.probe = self.make_probe()
        self.gate = Gate()
        self._mixed_round: _MixedRound | None = None
        self.progress: Callable[[], None] = lambda: None
        self.accelerator: ModelledAccelerator | None = None
        if setup.forwards == "modelled":
            from lab.modelled_accelerator import ModelledAccelerator, blocking_sites

            # On CUDA what blocks does so by itself.
            on_cuda = devices.chosen() == "cuda"
            sites = frozenset() if on_cuda else blocking_sites(setup.speculative, "all")
            self.accelerator = ModelledAccelerator(sites)
            overrides["thread_context"] = self.accelerator.thread_context
            overrides.setdefault("device", self.accelerator.device)
        overrides.setdefault("device", devices.chosen())
        self.engine = sglang.Engine(
            **server_args(setup, self.paths) | overrides,
            observer=self.probe,
            model_runner_class=self.gate.runner_class(ModelRunner),
        )
        self.probe.scheduler = self.engine.scheduler
        if self.accelerator is not None:
            self.accelerator.attach(self.engine)
        if setup.forwards == "none":
            from lab.modelled_accelerator import MadeUpWorker

            self.engine.scheduler.worker = MadeUpWorker(self.engine.scheduler)

    def make_probe(self) -> Probe:
        """What observes the engine."""
        return Probe()

    def close(self) -> None:
        """Shut the engine down.

        Raises
        ------
        RuntimeError
            If it had died by itself, be it behind the last round, where nobody waits for it.
        """
        self.engine.shutdown()
        if (error := self.engine._router.error) is not None:
            raise RuntimeError(f"the engine has died: {error}") from error

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.close()
        else:
            self.engine.shutdown()

    def prompts(self, case: Case) -> list[list[int]]:
        """Prompts of the case's generation requests."""
        if self.setup.model == "real":
            return models.chat_prompts(self.paths.model, case.batch_size)
        return models.random_prompts(self.setup.vocab_size, 32, case.batch_size)

    def run_round(self, case: Case) -> dict[str, float]:
        """Run the case once.

        Returns
        -------
        dict of str to float
            Its metrics.

        Raises
        ------
        SmallerBatch
            If the requests did not all decode together. They may have come late, see `lab.workloads`.
        WorkNotDone
            If the engine did something else than the work that was asked for.
        RuntimeError
            If the engine died of it.
        """
        kinds = {
            "decode": self._decode,
            "modelled": self._modelled,
            "scheduler": self._scheduler,
            "mixed": self._mixed,
        }
        found = kinds[case.kind](case)
        metrics.check_pools(self.engine.scheduler)
        return found

    def take_steps(self) -> list[Step]:
        """The steps of the engine since the last call, once it is at rest."""
        return self.probe.take(lambda: self.engine.scheduler.forward_ct)

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> Round:
        """Run requests alone; return once the engine is at rest, with its steps.

        Raises
        ------
        WorkNotDone
            If the steps do not account for the results.
        """
        self.take_steps()
        round_ = Round(time.perf_counter())
        round_.results = self.engine.generate(input_ids=prompts, sampling_params=params)
        round_.ended = time.perf_counter()
        round_.steps = [s for s in self.take_steps() if s.delivered >= round_.started]
        metrics.check_steps(round_)
        return round_

    def _decode(self, case: Case) -> dict[str, float]:
        return metrics.decode_metrics(self._generate_checked(case))

    def _generate_checked(self, case: Case) -> Round:
        """Run the case's generation requests alone, and see that they were what they should be."""
        prompts = self.prompts(case)
        self.probe.had_penalties = None
        round_ = self.generate(prompts, sampling_params(case))
        check_round(round_, case, [len(p) for p in prompts])
        # Behind the only one, all have ended.
        steps = sum(step.decodes for step in round_.steps)
        if case.penalties and steps > 1 and not self.probe.had_penalties:
            raise metrics.WorkNotDone("a decode step of requests with penalties had none")
        return round_

    def check_penalties(self, case: Case) -> None:
        """See that the largest penalties let a case say something else than none do.

        Those of the case itself may leave few tokens as they are. Its bias and least number of tokens,
        which are applied in a way of their own, stay.

        Raises
        ------
        WorkNotDone
            If not.
        """
        prompts, said = self.prompts(case), []
        for strength in (
            {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
            {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        ):
            round_ = self.generate(prompts, sampling_params(case) | strength)
            metrics.check_results(round_.results, [len(p) for p in prompts], case.output_len)
            said.append([result["output_ids"] for result in round_.results])
        if said[0] == said[1]:
            raise metrics.WorkNotDone("penalties have changed no token")

    def _mixed(self, case: Case) -> dict[str, float]:
        self._mixed_round = _MixedRound(self, case)
        return self._mixed_round.run()

    def unfinished(self, case: Case) -> int:
        """Generation requests of the mixed round under way that have not got all their tokens."""
        if self._mixed_round is None:
            return case.batch_size
        # It may be a warm-up, which is shorter.
        wanted = self._mixed_round.case.output_len
        ended = [
            len(item["output_ids"]) == wanted for item in self._mixed_round.final.copy().values()
        ]
        return case.batch_size - sum(ended)

    def _modelled(self, case: Case) -> dict[str, float]:
        from lab.modelled_accelerator import occupancy_metrics, quick_switches

        accelerator = self.accelerator
        accelerator.forward_s = case.forward_ms / 1e3
        accelerator.take_forward_s()
        accelerator.stalls.clear()
        accelerator.wake_ups.clear()
        with quick_switches():
            round_ = self._generate_checked(case)
        # On CUDA nothing but the device knows of them.
        stalls = None if accelerator.device == "cuda" else accelerator.stalls
        return occupancy_metrics(
            round_.steps, accelerator.take_forward_s(), stalls, accelerator.wake_ups
        )

    def _scheduler(self, case: Case) -> dict[str, float]:
        from lab import hostwork

        host = {"host_us_per_step": self._decode(case)["host_us_per_step"]}
        return host | hostwork.moves(case.batch_size, case.output_len)


@dataclass
class _MixedRound:
    """Generation requests under a stream of scoring requests.

    The first scoring request is prefilling, in two chunks, when the generation requests arrive; that
    is the order of arrival which #21840 is about. From then on one more scoring request comes each
    time that the first generation request has got four more tokens: the same work on any machine.
    """

    session: Session
    case: Case
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    final: dict[int, dict[str, Any]] = field(default_factory=dict)
    scores: list[dict[str, Any]] = field(default_factory=list)
    score_latencies: list[float] = field(default_factory=list)

    PAUSE = 4
    # Less than it takes to be taken for stalled (`lab.worker`), which is something else.
    GATE_TIMEOUT = 15.0

    def __post_init__(self) -> None:
        setup = self.session.setup
        # Made before anything is timed: the first one, and one each time that some tokens have come.
        self._score_prompts = models.random_prompts(
            setup.vocab_size,
            2 * (setup.chunked_prefill_size or 64),
            1 + (self.case.output_len - 1) // self.PAUSE,
            seed=1,
        )
        self._pending = iter(self._score_prompts)

    def run(self) -> dict[str, float]:
        session, case = self.session, self.case
        session.take_steps()
        prompts = session.prompts(case)
        wanted: queue.SimpleQueue = queue.SimpleQueue()
        errors: list[BaseException] = []
        scorer = threading.Thread(target=self._score, args=(wanted, errors), daemon=True)
        scorer.start()
        try:
            started, stream = self._open_with_a_score(wanted, prompts)
            for item in stream:
                self._take(item, wanted)
        finally:
            session.gate.open()
            wanted.put(None)
        scorer.join()
        if errors:
            raise errors[0]
        session.take_steps()
        results = [self.final[i] for i in sorted(self.final)]
        metrics.check_results(results, [len(p) for p in prompts], case.output_len)
        metrics.check_scores(self.scores, self._score_prompts)
        return self._metrics(started)

    def _open_with_a_score(
        self, wanted: queue.SimpleQueue, prompts: list[list[int]]
    ) -> tuple[float, Any]:
        session = self.session
        session.gate.arm()
        self._want_score(wanted)
        if not session.gate.wait_until_reached(self.GATE_TIMEOUT):
            raise metrics.WorkNotDone("the first scoring request was never prefilled")
        stream = session.engine.generate(
            input_ids=prompts, sampling_params=sampling_params(self.case), stream=True
        )
        started = time.perf_counter()
        session.gate.open()
        return started, stream

    def _want_score(self, wanted: queue.SimpleQueue) -> None:
        wanted.put((time.perf_counter(), next(self._pending)))

    def _score(self, wanted: queue.SimpleQueue, errors: list[BaseException]) -> None:
        free_since = 0.0
        while (item := wanted.get()) is not None:
            came, prompt = item
            try:
                result = self.session.engine.generate(
                    input_ids=prompt,
                    sampling_params={"max_new_tokens": 0},
                    return_logprob=True,
                    logprob_start_len=0,
                )
            except RuntimeError as error:
                errors.append(error)
                return
            # One that had to wait for the one before it had come all the same.
            waited = max(0.0, free_since - came)
            self.score_latencies.append(waited + result["meta_info"]["e2e_latency"])
            self.scores.append(result)
            free_since = time.perf_counter()

    def _take(self, item: dict[str, Any], wanted: queue.SimpleQueue) -> None:
        index, now = item["index"], time.perf_counter()
        times = self.arrivals.setdefault(index, [])
        new = len(item["output_ids"]) - len(times)
        times += [now] * new
        self.final[index] = item
        if new:
            self.session.progress()
        if (
            index == 0
            and new
            and len(times) % self.PAUSE == 0
            and len(times) < self.case.output_len
        ):
            self._want_score(wanted)

    def _metrics(self, started: float) -> dict[str, float]:
        latencies = [
            later - earlier
            for times in self.arrivals.values()
            for earlier, later in itertools.pairwise(times)
        ]
        first = [times[0] for times in self.arrivals.values()]
        last = max(times[-1] for times in self.arrivals.values())
        tokens = sum(len(times) - 1 for times in self.arrivals.values())
        # The first one was held up on purpose.
        scores = self.score_latencies[1:]
        return metrics.add_derived(
            {
                "us_per_token": 1e6 * (last - min(first)) / tokens,
                "itl_p50_ms": 1e3 * metrics.percentile(latencies, 50),
                "itl_p99_ms": 1e3 * metrics.percentile(latencies, 99),
                "ttft_p50_ms": 1e3 * metrics.percentile([t - started for t in first], 50),
                "score_p50_ms": 1e3 * metrics.percentile(scores, 50),
            }
        )
