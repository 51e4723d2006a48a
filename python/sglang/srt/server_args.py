"""The engine's settings, under upstream's names, checked before anything is built."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang.srt.utils.common import ceil_align, get_platform, show_value

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_LOAD_FORMATS = ("auto", "safetensors", "dummy")
_SPECULATIVE_ALGORITHMS = ("EAGLE",)
_PENALTY_BACKENDS = ("dense", "sparse")
# `sparse_layout.MAX_TOKENS`, which lies on a floor above.
_MOST_SPARSE_NODES = 64


@dataclass
class ServerArgs:
    """Settings of one engine.

    Attributes
    ----------
    model_path : str
        Directory in Hugging Face's layout.
    tokenizer_path : str, optional
        Directory of the tokenizer, the model's by default.
    skip_tokenizer_init : bool
        Take and return token ids only.
    load_format : {"auto", "safetensors", "dummy"}
        ``dummy`` draws random weights from ``random_seed`` and needs only a config.json.
    device : {"cpu", "cuda"}
        Where to run.
    dtype : {"auto", "float32", "bfloat16", "float16"}
        Type of weights, activations and KV. ``auto`` is float32 on the CPU, else the checkpoint's.
    context_length : int, optional
        Longest sequence, prompt and output together. The model's own by default.
    page_size : int
        KV slots that are handed out together.
    max_total_tokens : int, optional
        KV slots in all, rounded down to whole pages.
    max_running_requests : int, optional
        Most requests that hold KV at a time.
    chunked_prefill_size : int
        Most prompt tokens in one forward; -1 does not split prompts.
    max_prefill_tokens : int
        Most prompt tokens in one forward of several prompts.
    enable_mixed_chunk : bool
        Let a prefill forward carry the running requests' decode tokens too, if prompts are split.
    disable_overlap_schedule : bool
        Prepare a step only when the one before it is done.
    schedule_conservativeness : float
        How much KV to keep for tokens that running requests may still produce. Larger retracts less.
    random_seed : int
        Seed of random weights and of requests that bring no ``sampling_seed``.
    speculative_algorithm : {"EAGLE"}, optional
        How to draft tokens.
    speculative_draft_model_path : str, optional
        Directory of the draft model.
    speculative_num_steps : int, optional
        Depth of the draft tree (default 3).
    speculative_eagle_topk : int, optional
        Branches of the draft tree; 1 is a chain (default 1).
    speculative_num_draft_tokens : int, optional
        Nodes of the draft tree that are verified, the root included (default num_steps + 1).
    penalty_backend : {"sparse", "dense"}
        ``sparse`` keeps the tokens that were seen, and is exact in every mode. ``dense`` keeps a row of
        the vocabulary for each request and penalty, and counts as upstream does: for comparison.
    log_level : {"debug", "info", "warning", "error", "critical"}, optional
        Level of the package's logger, which all engines of the process share. None leaves it as it is.

    Raises
    ------
    ValueError
        For a value out of range; the message names the field and the value.
    """

    model_path: str
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    device: str = "cpu"
    dtype: str = "auto"
    context_length: int | None = None
    page_size: int = 1
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    enable_mixed_chunk: bool = False
    disable_overlap_schedule: bool = False
    schedule_conservativeness: float = 1.0
    random_seed: int = 42
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    penalty_backend: str = "sparse"
    log_level: str | None = None

    def __post_init__(self) -> None:
        self._fill_constants()
        self._check_types()
        self._fill_defaults()
        self._check_ranges()
        self._check_speculation()

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """Build from keyword arguments, naming those that do not exist."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise ValueError(f"unknown server arguments: {', '.join(unknown)}")
        if "model_path" not in kwargs:
            raise ValueError("model_path is required")
        return cls(**kwargs)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of weights and activations; ``auto`` is what config.json says, float32 if nothing."""
        if self.dtype != "auto":
            return _DTYPES[self.dtype]
        config = json.loads((Path(self.model_path) / "config.json").read_text())
        return _DTYPES.get(config.get("torch_dtype") or config.get("dtype"), torch.float32)

    @property
    def spec_alloc_len(self) -> int:
        """KV slots that one speculative step of a request writes at most."""
        if self.speculative_algorithm is None:
            return 0
        return max(
            self.speculative_eagle_topk * self.speculative_num_steps,
            self.speculative_num_draft_tokens,
        )

    def _fill_constants(self) -> None:
        # None is the default, as JSON null is.
        for f in dataclasses.fields(self):
            if getattr(self, f.name) is None and f.default not in (None, dataclasses.MISSING):
                setattr(self, f.name, f.default)

    def _fill_defaults(self) -> None:
        if self.dtype == "auto" and self.device == "cpu":
            self.dtype = "float32"
        if self.max_total_tokens is None:
            self.max_total_tokens = 16384
        if self.max_running_requests is None:
            self.max_running_requests = 64
        if self.chunked_prefill_size is None:
            self.chunked_prefill_size = ceil_align(2048, max(self.page_size, 1))

    def _check_types(self) -> None:
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            optional, kind = kind.endswith("| None"), kind.removesuffix(" | None")
            if value is None and optional:
                continue
            if kind == "int":
                ok = isinstance(value, int) and not isinstance(value, bool)
            elif kind == "float":
                ok = isinstance(value, (int, float)) and not isinstance(value, bool)
            elif kind == "bool":
                ok = isinstance(value, bool)
            else:
                if f.name.endswith("_path") and isinstance(value, os.PathLike):
                    value = os.fspath(value)
                    setattr(self, f.name, value)
                ok = isinstance(value, str)
            if not ok:
                raise ValueError(f"{f.name} must be of type {kind}, got {show_value(value)}")

    def _check_ranges(self) -> None:
        self._require(
            "dtype",
            self.dtype == "auto" or self.dtype in _DTYPES,
            f"one of {sorted(_DTYPES)} or auto",
        )
        self._require("load_format", self.load_format in _LOAD_FORMATS, f"one of {_LOAD_FORMATS}")
        backend = self.penalty_backend
        self._require(
            "penalty_backend", backend in _PENALTY_BACKENDS, f"one of {_PENALTY_BACKENDS}"
        )
        self._require("model_path", os.path.isdir(self.model_path), "a directory that exists")
        if ":" in self.device:
            raise ValueError(f"device must be a name without an index, got {self.device!r}")
        if not get_platform(self.device).is_available():
            raise ValueError(f"device {self.device!r} is not available on this machine")
        for name in ("page_size", "max_total_tokens", "max_running_requests", "max_prefill_tokens"):
            self._require(name, 1 <= getattr(self, name) < 2**31, "in [1, 2**31)")
        self._require(
            "max_total_tokens", self.max_total_tokens >= self.page_size, "at least page_size"
        )
        self._require(
            "context_length", self.context_length is None or self.context_length >= 2, "at least 2"
        )
        size = self.chunked_prefill_size
        self._require("chunked_prefill_size", size == -1 or size >= 1, "-1 or at least 1")
        if size != -1 and size % self.page_size:
            raise ValueError(
                f"chunked_prefill_size must be a multiple of page_size ({self.page_size}), got {size}"
            )
        self._require(
            "schedule_conservativeness",
            0 < self.schedule_conservativeness <= 1e9,
            "in (0, 1e9]",
        )
        self._require("random_seed", 0 <= self.random_seed < 2**63, "in [0, 2**63)")
        if self.log_level is not None:
            self.log_level = self.log_level.lower()
            self._require("log_level", self.log_level in _LOG_LEVELS, f"one of {_LOG_LEVELS}")

    def _check_speculation(self) -> None:
        names = ("draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens")
        if self.speculative_algorithm is None:
            for name in names:
                value = getattr(self, f"speculative_{name}")
                if value is not None:
                    raise ValueError(
                        f"speculative_{name}={show_value(value)} needs speculative_algorithm, "
                        "which is not set"
                    )
            return
        self.speculative_algorithm = self.speculative_algorithm.upper()
        self._require(
            "speculative_algorithm",
            self.speculative_algorithm in _SPECULATIVE_ALGORITHMS,
            f"one of {_SPECULATIVE_ALGORITHMS}",
        )
        path = self.speculative_draft_model_path
        self._require(
            "speculative_draft_model_path",
            path is not None and os.path.isdir(path),
            "a directory that exists",
        )
        if self.speculative_num_steps is None:
            self.speculative_num_steps = 3
        if self.speculative_eagle_topk is None:
            self.speculative_eagle_topk = 1
        steps, topk = self.speculative_num_steps, self.speculative_eagle_topk
        self._require("speculative_num_steps", steps >= 1, "at least 1")
        self._require("speculative_eagle_topk", topk >= 1, "at least 1")
        if self.speculative_num_draft_tokens is None:
            self.speculative_num_draft_tokens = steps + 1 if topk == 1 else steps * topk + 1
        most = 1 + topk + (steps - 1) * topk * topk
        least = steps + 1 if topk == 1 else 2
        self._require(
            "speculative_num_draft_tokens",
            least <= self.speculative_num_draft_tokens <= most,
            f"in [{least}, {most}] with speculative_num_steps={steps} and speculative_eagle_topk={topk}",
        )
        if self.penalty_backend == "sparse":
            # One program compares all pairs of a request's nodes.
            self._require(
                "speculative_num_draft_tokens",
                self.speculative_num_draft_tokens <= _MOST_SPARSE_NODES,
                f"at most {_MOST_SPARSE_NODES} with penalty_backend='sparse'",
            )
        slots = self.max_total_tokens // self.page_size * self.page_size
        if slots < 2 * self.spec_alloc_len + 2:
            raise ValueError(
                f"max_total_tokens must leave a request two tokens besides the "
                f"{2 * self.spec_alloc_len} slots that speculation reserves, "
                f"got {self.max_total_tokens}"
            )
        if self.enable_mixed_chunk:
            logger.warning("enable_mixed_chunk is switched off: speculation does not mix")
            self.enable_mixed_chunk = False

    def _require(self, name: str, ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(f"{name} must be {what}, got {show_value(getattr(self, name))}")
