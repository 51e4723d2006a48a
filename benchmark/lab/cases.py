"""What is measured: a case is a workload, and a setup what it runs on.

Questions asked of history have cases each (`QUESTIONS`). Some cases make the *quick* set of a question,
which answers it in the time that a person waits; all of them together are the long answer.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

# Tokens a request in a warm-up; more where several come in one step and steps are counted.
WARM_UP_LEN: Final = 8
MODELLED_WARM_UP_LEN: Final = 24

DRAFT_SHAPES: Final = {
    "chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1},
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 6,
    },
}

PROCESSES: Final = 3
"""In how many processes a case is measured, one after the other: the same code takes another time in
another process, and how far they are apart is what tells noise from a change."""


@dataclass(frozen=True)
class Setup:
    """What cases run on; cases with the same one share an engine.

    Attributes
    ----------
    model : {"real", "tiny", "none"}
        With ``none`` there is no engine, but penalties alone (see `lab.penalty_history`).
    overlap : bool
    speculative : {"none", "chain", "tree"}
    chunked_prefill_size : int, optional
    max_running_requests : int
    max_total_tokens : int, optional
        KV slots, where the engine's default does not hold all requests of a case until they end.
    forwards : {"real", "modelled", "none"}
        ``modelled`` ones take a fixed time on a modelled accelerator (see
        `lab.modelled_accelerator`). With ``none`` each result is made up at once: what is left is the
        host's work.
    vocab_size : int
        Of a tiny model, or columns of the logits where there is no model.
    watch : {"time", "transfers", "memory"}
        What is looked at. Transfers are those that a ledger sees (see `lab.audit_transfers`).
    """

    model: str = "tiny"
    overlap: bool = True
    speculative: str = "none"
    chunked_prefill_size: int | None = None
    max_running_requests: int = 64
    max_total_tokens: int | None = None
    forwards: str = "real"
    vocab_size: int = 4096
    watch: str = "time"

    @property
    def threads(self) -> int:
        """Threads for torch. A tiny model's operations are not worth splitting."""
        return 2 if self.model == "real" else 1


@dataclass(frozen=True)
class Case:
    """A workload on a setup.

    Attributes
    ----------
    name : str
    setup : Setup
    kind : {"decode", "mixed", "modelled", "scheduler", "penalties", "transfers", "memory"}
        ``decode`` runs generation requests alone. ``mixed`` runs them under a stream of scoring
        requests, the first of which is there before them. ``modelled`` is ``decode`` on a modelled
        accelerator. ``scheduler`` is ``decode`` without forwards, and batches that change.
    batch_size : int
        Generation requests.
    output_len : int
        Tokens for each of them.
    penalties : bool
        Whether each has all four penalties, and where there is an engine that is timed a logit bias.
    rounds : int
        How often a measurement repeats it, in each process, if it `varies`.
    forward_ms : float
        How long a forward takes on the modelled accelerator.
    quick : bool
        Whether it belongs to the quick set.
    """

    name: str
    setup: Setup
    kind: str = "decode"
    batch_size: int = 8
    output_len: int = 32
    penalties: bool = False
    rounds: int = 3
    forward_ms: float = 0.0
    quick: bool = False

    def shortened(self) -> Case:
        """The same for a warm-up: fewer tokens, everything else."""
        length = MODELLED_WARM_UP_LEN if self.kind == "modelled" else WARM_UP_LEN
        return dataclasses.replace(self, output_len=min(self.output_len, length))

    @property
    def varies(self) -> bool:
        """Whether its numbers are times. What is counted is the same each time, and needs no anchor."""
        return self.setup.watch == "time"

    @property
    def engine_key(self) -> Setup | Case:
        """Equal for cases that can share an engine: those of one setup.

        But an engine keeps memory that a case made it take, and the next one is spared that.
        """
        return self if self.setup.watch == "memory" else self.setup

    @property
    def anchors(self) -> tuple[str, ...]:
        """Kinds of the anchors that stand beside it.

        The first one is for all times, but for those of the host alone where there is one of the host
        too: what makes the interpreter slower is not what makes reading weights slower.
        """
        return {"real": ("model", "host"), "tiny": ("host",), "none": ("dense",)}[self.setup.model]


# Of decode, those that a person waits for.
_QUICK_DECODE: Final = {
    "real-b1",
    "real-b8",
    "real-b8-penalties",
    "real-b8-chain-penalties",
    "tiny-b8",
    "tiny-b8-normal",
    "tiny-b32-penalties",
    "tiny-b8-chain-penalties",
    "tiny-b8-tree-penalties",
}


def _decode() -> Iterator[Case]:
    """Each model in each loop, with and without speculation, at each batch size."""
    tokens = {("real", 32): 16, ("real", 8): 24, ("real", 1): 24}
    for model, overlap, shape in product(
        ("real", "tiny"), (True, False), ("none", "chain", "tree")
    ):
        setup = Setup(model, overlap, shape, max_running_requests=32)
        # What #28500 is about is the penalties of a speculating engine, at any batch size.
        for penalties, batch_size in product((False, True), (1, 8, 32)):
            if penalties and shape != "none" and batch_size != 8:
                continue
            parts = [model, f"b{batch_size}", "" if shape == "none" else shape]
            parts += ["penalties" if penalties else "", "" if overlap else "normal"]
            name = "-".join(part for part in parts if part)
            yield Case(
                name,
                setup,
                batch_size=batch_size,
                output_len=tokens.get((model, batch_size), 96),
                penalties=penalties,
                rounds=2 if model == "real" else 3,
                quick=name in _QUICK_DECODE,
            )


def _mixed() -> Iterator[Case]:
    for model, batch_size, output_len in (("real", 4, 16), ("tiny", 8, 96)):
        yield Case(
            f"{model}-b{batch_size}",
            Setup(model, chunked_prefill_size=64, max_running_requests=32),
            "mixed",
            batch_size=batch_size,
            output_len=output_len,
            rounds=2 if model == "real" else 3,
            quick=model == "tiny",
        )


def _overlap() -> Iterator[Case]:
    for shape, batch_size, forward_ms in product(("none", "chain"), (1, 8, 64), (1, 2, 5, 10)):
        yield Case(
            f"{shape}-b{batch_size}-t{forward_ms}ms",
            # Dense penalties are work of the device, which no model does for the host: with a small
            # vocabulary they take little of its time.
            Setup("tiny", speculative=shape, forwards="modelled", vocab_size=512),
            "modelled",
            batch_size=batch_size,
            output_len=64,
            penalties=True,
            rounds=2,
            forward_ms=forward_ms,
            quick=batch_size == 8 and forward_ms != 2,
        )


def _transfers() -> Iterator[Case]:
    for overlap, shape, penalties in product(
        (True, False), ("none", "chain", "tree"), (False, True)
    ):
        parts = ["plain" if shape == "none" else shape, "penalties" if penalties else ""]
        parts += ["" if overlap else "normal"]
        yield Case(
            "-".join(part for part in parts if part),
            Setup("tiny", overlap, shape, watch="transfers"),
            "transfers",
            batch_size=4,
            output_len=8,
            penalties=penalties,
            quick=overlap,
        )


def _penalties() -> Iterator[Case]:
    for shape, batch_size in product(("none", "chain"), (8, 64)):
        yield Case(
            f"{'plain' if shape == 'none' else shape}-b{batch_size}",
            Setup("none", speculative=shape, vocab_size=32_000),
            "penalties",
            batch_size=batch_size,
            penalties=True,
            quick=batch_size == 64,
        )


def _scheduler() -> Iterator[Case]:
    for batch_size in (1, 8, 64, 256):
        yield Case(
            f"b{batch_size}",
            Setup(
                "tiny",
                forwards="none",
                max_running_requests=256,
                # Each needs 160. The smaller batches keep the default, on which their history began.
                max_total_tokens=49_152 if batch_size == 256 else None,
            ),
            "scheduler",
            batch_size=batch_size,
            output_len=128,
            quick=True,
        )


def _memory() -> Iterator[Case]:
    for shape, penalties in product(("none", "chain", "tree"), (False, True)):
        parts = ["plain" if shape == "none" else shape, "penalties" if penalties else ""]
        yield Case(
            "-".join(part for part in parts if part),
            # Without overlap, so that a step's memory is its own.
            Setup("tiny", False, shape, vocab_size=32_000, watch="memory"),
            "memory",
            batch_size=8,
            output_len=32,
            penalties=penalties,
            quick=penalties,
        )


QUESTIONS: Final[dict[str, tuple[Case, ...]]] = {
    "decode": tuple(_decode()),
    "mixed": tuple(_mixed()),
    "overlap": tuple(_overlap()),
    "transfers": tuple(_transfers()),
    "penalties": tuple(_penalties()),
    "scheduler": tuple(_scheduler()),
    "memory": tuple(_memory()),
}
CASES: Final[dict[str, Case]] = {
    f"{question}/{case.name}": case for question, cases in QUESTIONS.items() for case in cases
}
"""By "question/name"."""


def check_name(name: str) -> None:
    """See that there is a case of that name.

    Raises
    ------
    ValueError
        If not; names those that are called much like it.
    """
    if name not in CASES:
        near = difflib.get_close_matches(name, CASES, n=4, cutoff=0.5)
        hint = f"there are {', '.join(near)}; " if near else ""
        raise ValueError(f"no case {name!r}; {hint}benchmark/lab/cases.py has all")
