"""What the head learns from: text that the target wrote, and the target's features of it.

Both are made in chunks that depend on nothing but the settings, and each chunk is a file in the cache
that carries the fingerprint of what it was made from. So a run that was stopped goes on where it was,
more sequences can be added later, and a file that other settings made is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from eagle_prompts import CHAT, OPENING, Prompt, prompts_of
from sglang import Engine
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import TorchAttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.models.model_loader import load_model
from sglang.srt.utils.tokenizer import Tokenizer

CHUNK = 128
# Tokens of one forward that computes features.
FORWARD_TOKENS = 2048


@dataclass(frozen=True)
class TextSettings:
    """How the target writes.

    Attributes
    ----------
    model : str
        Digest of the target's weights, see `model_digest`.
    dtype : str
        What it computes in.
    max_new_tokens : int
        Where a sequence ends at the latest.
    batch_size : int
        Sequences that are written at a time.
    temperature : float
        Of every second training sequence. All others are greedy.
    """

    model: str
    dtype: str = "bfloat16"
    max_new_tokens: int = 128
    batch_size: int = 64
    temperature: float = 0.8


@dataclass(frozen=True)
class Sequence:
    """A prompt and what the target wrote.

    Attributes
    ----------
    ids : Tensor, shape (L,), int64
        Prompt and answer.
    prompt_len : int
        How many of them are the prompt.
    features : Tensor, shape (L, hidden_size), float16
        The target's hidden states after the final norm.
    """

    ids: torch.Tensor
    prompt_len: int
    features: torch.Tensor


def model_digest(model_path: Path) -> str:
    """SHA-256 of a model's weights."""
    with (model_path / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt."""
    if prompt.kind == OPENING:
        return tokenizer.encode(prompt.text)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
    if prompt.kind != CHAT:
        text = text[text.index("<|im_start|>user") :]
    return tokenizer.encode(text, add_special_tokens=False)


def chunk_names(split: str, count: int) -> list[str]:
    """Names of the chunks that hold the first `count` sequences of a split, by the first index."""
    return [f"{split}-{first:05d}" for first in range(0, count, CHUNK)]


class TextWriter:
    """Lets the target answer prompts, chunk by chunk.

    Parameters
    ----------
    model_path : Path
        The target.
    cache : Path
        Where chunks are kept.
    settings : TextSettings
        How to write.
    """

    def __init__(self, model_path: Path, cache: Path, settings: TextSettings) -> None:
        self.model_path = model_path
        self.cache = cache
        self.settings = settings
        self._tokenizer = Tokenizer(model_path)
        # Holds the scheduler between two steps, see `_write`.
        self._gate = threading.Event()

    def write(self, split: str, count: int) -> list[Path]:
        """Make the chunks of a split that are missing; return the paths of all.

        Parameters
        ----------
        split : str
            Which prompts.
        count : int
            How many of them, from the first on.
        """
        prompts = prompts_of(split)[:count]
        if len(prompts) < count:
            raise ValueError(f"{split} has only {len(prompts)} prompts, {count} are asked for")
        paths, missing = [], []
        for first, name in zip(range(0, count, CHUNK), chunk_names(split, count), strict=True):
            requests = self._requests(split, first, prompts[first : first + CHUNK])
            fingerprint = fingerprint_of([asdict(self.settings), requests])
            path = self.cache / f"text-{name}.safetensors"
            paths.append(path)
            if read_fingerprint(path) != fingerprint:
                missing.append((path, fingerprint, requests))
        if missing:
            self._write_all(split, missing)
        return paths

    def _requests(self, split: str, first: int, prompts: list[Prompt]) -> list[dict[str, Any]]:
        requests = []
        for index, prompt in enumerate(prompts, first):
            samples = split == "train" and index % 2 == 1
            params = {
                "max_new_tokens": self.settings.max_new_tokens,
                "temperature": self.settings.temperature if samples else 0.0,
                "sampling_seed": index,
            }
            requests.append({"ids": encode(self._tokenizer, prompt), "params": params})
        return requests

    def _write_all(self, split: str, missing: list[tuple[Path, str, list[dict[str, Any]]]]) -> None:
        settings = self.settings
        longest = max(len(r["ids"]) for _, _, requests in missing for r in requests)
        with (
            Engine(
                str(self.model_path),
                observer=lambda record: self._gate.wait(),
                skip_tokenizer_init=True,
                dtype=settings.dtype,
                max_running_requests=settings.batch_size,
                max_total_tokens=settings.batch_size * (longest + settings.max_new_tokens + 8),
            ) as engine,
            bar(sum(len(requests) for _, _, requests in missing), f"write {split}", "seq") as tick,
        ):
            try:
                for path, fingerprint, requests in missing:
                    outputs = self._write(engine, requests, tick)
                    save_text(path, fingerprint, requests, outputs)
            finally:
                self._gate.set()

    def _write(self, engine: Engine, requests: list[dict[str, Any]], tick: tqdm) -> list[list[int]]:
        """Answer one chunk.

        The batches that a request runs in decide how its logits are rounded, and so, now and then, a
        token. To have the same batches every time, the scheduler is held at a request of its own until
        the whole chunk is in its inbox.
        """
        self._gate.clear()
        first = engine.generate(
            input_ids=[requests[0]["ids"][0]],
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            stream=True,
        )
        answers = engine.generate(
            input_ids=[request["ids"] for request in requests],
            sampling_params=[request["params"] for request in requests],
            stream=True,
        )
        self._gate.set()
        for _ in first:
            pass
        outputs: list[list[int]] = [[] for _ in requests]
        for item in answers:
            outputs[item["index"]] = item["output_ids"]
            if item["meta_info"]["finish_reason"] is not None:
                tick.update()
        return outputs


class FeatureReader:
    """Reads the target's features of finished chunks, all positions of a sequence at once.

    Parameters
    ----------
    model_path : Path
        The target; it runs in float32.
    """

    def __init__(self, model_path: Path) -> None:
        self.model_path = model_path
        self._runner: TeacherForcing | None = None

    def read(self, text_paths: list[Path], what: str) -> list[Sequence]:
        """Sequences of `text_paths` with their features, which come from the cache where they are."""
        missing = []
        for path in text_paths:
            feature_path, fingerprint = self._place(path)
            if read_fingerprint(feature_path) != fingerprint:
                missing.append((path, feature_path, fingerprint))
        if missing:
            self._runner = self._runner or TeacherForcing(self.model_path)
            with bar(len(missing) * CHUNK, f"features {what}", "seq") as tick:
                for path, feature_path, fingerprint in missing:
                    texts = load_text(path)
                    features = torch.cat(
                        [f.half() for f in self._runner.run([ids for ids, _ in texts], tick)]
                    )
                    save(feature_path, fingerprint, {"features": features})
        return [s for path in text_paths for s in self._load(path)]

    def _place(self, text_path: Path) -> tuple[Path, str]:
        """Where a chunk's features are, and what fingerprint they must have."""
        # Not only what the text was made from: two machines may write differently.
        made_from = [read_fingerprint(text_path), digest_of_text([text_path])]
        name = text_path.name.replace("text-", "features-", 1)
        return text_path.with_name(name), fingerprint_of(made_from)

    def _load(self, text_path: Path) -> Iterator[Sequence]:
        texts = load_text(text_path)
        with safe_open(self._place(text_path)[0], framework="pt") as file:
            features = file.get_tensor("features").split([len(ids) for ids, _ in texts])
        for (ids, prompt_len), feature in zip(texts, features, strict=True):
            yield Sequence(ids, prompt_len, feature)


class TeacherForcing:
    """The target's hidden states of given sequences.

    Parameters
    ----------
    model_path : Path
        The target.
    """

    def __init__(self, model_path: Path) -> None:
        config = ModelConfig.from_path(model_path, dtype=torch.float32)
        device = torch.device("cpu")
        self._config = config
        self._device = device
        self._model = load_model(config, device=device)
        self._backend: TorchAttentionBackend | None = None
        self._slots = 0

    def run(self, sequences: list[torch.Tensor], tick: tqdm | None = None) -> list[torch.Tensor]:
        """Hidden states after the final norm, shape (L, hidden_size) float32, of each sequence."""
        features: list[torch.Tensor] = []
        for group in _groups(sequences, FORWARD_TOKENS):
            features += self._forward(group)
            if tick is not None:
                tick.update(len(group))
        return features

    @torch.inference_mode()
    def _forward(self, group: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        lens = [len(ids) for ids in group]
        total = sum(lens)
        backend = self._backend_for(total)
        slots = torch.arange(total)
        rows = torch.nn.utils.rnn.pad_sequence(slots.split(lens), batch_first=True)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(group),
            input_ids=torch.cat(group),
            positions=torch.cat([torch.arange(n) for n in lens]),
            out_cache_loc=slots,
            req_pool_indices=torch.arange(len(group)),
            seq_lens=torch.tensor(lens),
            kv_indices=rows,
            seq_lens_cpu=lens,
            extend_seq_lens_cpu=lens,
            extend_prefix_lens_cpu=[0] * len(group),
        )
        backend.init_forward_metadata(batch)
        return self._model(batch.input_ids, batch.positions, batch, backend).split(lens)

    def _backend_for(self, slots: int) -> TorchAttentionBackend:
        if self._backend is None or slots > self._slots:
            config = self._config
            heads, head_dim = config.num_key_value_heads, config.head_dim
            pool = MHATokenToKVPool(
                slots, 1, config.dtype, heads, head_dim, config.num_hidden_layers, self._device
            )
            self._slots = slots
            self._backend = TorchAttentionBackend(
                pool, config.num_attention_heads, heads, head_dim, self._device
            )
        return self._backend


def _groups(sequences: list[torch.Tensor], most_tokens: int) -> Iterator[list[torch.Tensor]]:
    """Neighbours that have at most `most_tokens` together, but at least one sequence."""
    group: list[torch.Tensor] = []
    total = 0
    for ids in sequences:
        if group and total + len(ids) > most_tokens:
            yield group
            group, total = [], 0
        group.append(ids)
        total += len(ids)
    if group:
        yield group


# ---- files


def fingerprint_of(values: Any) -> str:
    """Digest of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_fingerprint(path: Path) -> str | None:
    """What a file was made from; None if it is absent."""
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("fingerprint")


def save(path: Path, fingerprint: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file of the cache, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(tensors, unfinished, metadata={"fingerprint": fingerprint})
    unfinished.replace(path)


def save_text(
    path: Path, fingerprint: str, requests: list[dict[str, Any]], outputs: list[list[int]]
) -> None:
    """Write a chunk of text."""
    ids = [request["ids"] + output for request, output in zip(requests, outputs, strict=True)]
    tensors = {
        "ids": torch.tensor([token for sequence in ids for token in sequence], dtype=torch.int32),
        "lens": torch.tensor([len(sequence) for sequence in ids]),
        "prompt_lens": torch.tensor([len(request["ids"]) for request in requests]),
    }
    save(path, fingerprint, tensors)


def load_text(path: Path) -> list[tuple[torch.Tensor, int]]:
    """Token ids and prompt length of each sequence of a chunk."""
    with safe_open(path, framework="pt") as file:
        ids = file.get_tensor("ids").long().split(file.get_tensor("lens").tolist())
        return list(zip(ids, file.get_tensor("prompt_lens").tolist(), strict=True))


def digest_of_text(paths: Iterable[Path]) -> str:
    """Digest of all tokens of some chunks, to tell whether two machines trained on the same."""
    digest = hashlib.sha256()
    for path in paths:
        for ids, prompt_len in load_text(path):
            digest.update(json.dumps([prompt_len, ids.tolist()]).encode())
    return digest.hexdigest()


def bar(total: int, what: str, unit: str) -> tqdm:
    """A progress bar that does not flood a log file."""
    return tqdm(total=total, desc=what, unit=unit, mininterval=0.5, maxinterval=10)
