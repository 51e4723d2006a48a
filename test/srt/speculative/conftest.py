"""A bench that speculates with tiny models, and plain decoding beside it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.generation_result import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.model_loader import dummy_weights
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

CPU = torch.device("cpu")
ROWS = 16
ROW_LEN = 96
HIDDEN = 32


class TargetRunner(ModelRunner):
    """A random model in which the last token says much, but not all, about the next."""

    def load_model(self) -> torch.nn.Module:
        model = LlamaForCausalLM(self.model_config)
        weights = dict(dummy_weights(self.model_config, model.weight_table(), seed=1))
        for name, weight in weights.items():
            if "o_proj" in name or "down_proj" in name:
                weight *= 0.012
        model.load_weights(weights.items())
        model.prepare()
        return model.eval()


class DraftRunner(ModelRunner):
    """A draft model that knows what the last token says, and adds noise of its own."""

    def load_model(self) -> torch.nn.Module:
        config = self.model_config
        model = LlamaForCausalLMEagle(config)
        weights = dict(dummy_weights(config, model.weight_table(), seed=2))
        # The target's feature of a token is about its embedding, brought to the final norm's gain.
        gain = 3.0 / (0.02**2 * HIDDEN**0.5)
        weights["fc.weight"] = 0.4 * weights["fc.weight"] + gain * torch.eye(HIDDEN, 2 * HIDDEN)
        if config.draft_vocab_size is not None:
            ids = random.Random(3).sample(range(config.vocab_size), config.draft_vocab_size)
            weights["hot_token_id"] = torch.tensor(ids)
        model.load_weights(weights.items())
        model.prepare()
        return model.eval()


@dataclass
class BenchReq:
    """A request: what it asks, and what it got so far."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    row: int
    eos_token_ids: frozenset[int] = frozenset()
    output_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def origin_input_ids(self) -> list[int]:
        return self.prompt

    @property
    def sampling_params(self) -> SamplingParams:
        return self.params

    @property
    def sampling_seed(self) -> int:
        return self.seed

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output_ids


class SpecBench:
    """Target, draft and worker over one pool whose slots are dealt out in random order.

    Parameters
    ----------
    directory : Path
        Where config files go.
    num_steps, topk, num_draft_tokens : int
        Shape of the draft tree.
    vocab_size, draft_vocab_size : int
        Of target and draft.
    num_rows : int
        Most requests.
    """

    def __init__(
        self,
        directory: Path,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        vocab_size: int = 32,
        draft_vocab_size: int | None = None,
        num_rows: int = ROWS,
        row_len: int = ROW_LEN,
    ) -> None:
        self.num_steps = num_steps
        self.vocab_size = vocab_size
        args = SimpleNamespace(
            page_size=1,
            load_format="dummy",
            random_seed=0,
            speculative_num_steps=num_steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=num_draft_tokens,
        )
        shape = {"vocab_size": vocab_size}
        target = read_config(directory / "target", "LlamaForCausalLM", shape)
        shape |= {"num_hidden_layers": 1, "draft_vocab_size": draft_vocab_size}
        draft = read_config(directory / "draft", "LlamaForCausalLMEagle", shape)
        slots = num_rows * row_len
        self.target = TargetRunner(args, target, CPU, slots)
        self.draft = DraftRunner(args, draft, CPU, slots, is_draft_worker=True)
        self.draft.model.set_embed_and_head(*self.target.model.get_embed_and_head())
        self.future_map = FutureMap(
            num_rows, CPU, SpeculativeAlgorithm.EAGLE, topk, HIDDEN, torch.float32
        )
        self.worker = EAGLEWorkerV2(args, self.target, self.draft, self.future_map)
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(4))
        self.rows = order.view(num_rows, row_len)
        self.spoil()

    def spoil(self) -> None:
        """Fill both pools with what would be noticed if it were seen."""
        for pool in (self.target.token_to_kv_pool, self.draft.token_to_kv_pool):
            for layer in range(pool.layer_num):
                for buffer in pool.get_kv_buffer(layer):
                    buffer.normal_(0.0, 5.0, generator=torch.Generator().manual_seed(5))

    # ---- batches

    def sampling_info(self, reqs: list[BenchReq]) -> SamplingBatchInfo:
        batch = SimpleNamespace(reqs=reqs, device=CPU, penalty_planner=None)
        info = SamplingBatchInfo.from_schedule_batch(batch, self.vocab_size)
        return info.copy_for_forward()

    def extend_batch(
        self, reqs: list[BenchReq], begin: list[int], end: list[int], **others: Any
    ) -> ForwardBatch:
        """Take in the tokens ``begin .. end - 1`` of each request."""
        spans = list(zip(reqs, begin, end, strict=True))
        positions = [p for _, b, e in spans for p in range(b, e)]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(reqs),
            input_ids=torch.tensor([t for r, b, e in spans for t in r.tokens[b:e]]),
            positions=torch.tensor(positions),
            out_cache_loc=torch.cat([self.rows[r.row, b:e] for r, b, e in spans]),
            req_pool_indices=torch.tensor([r.row for r in reqs]),
            seq_lens=torch.tensor(end),
            kv_indices=torch.stack([self.rows[r.row, : max(end)] for r in reqs]),
            seq_lens_cpu=list(end),
            extend_seq_lens_cpu=[e - b for _, b, e in spans],
            extend_prefix_lens_cpu=list(begin),
            sampling_info=self.sampling_info(reqs),
            spec_next_token_ids=torch.tensor(
                [r.tokens[e] if e < len(r.tokens) else -1 for r, _, e in spans]
            ),
            **others,
        )

    def decode_batch(self, reqs: list[BenchReq], **others: Any) -> ForwardBatch:
        """A speculative step, as the scheduler asks for it: with rows that are too long."""
        longest = max(len(r.tokens) for r in reqs) + 40
        rows = torch.tensor([r.row for r in reqs])
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(reqs),
            input_ids=None,
            positions=None,
            out_cache_loc=None,
            req_pool_indices=rows,
            seq_lens=None,
            kv_indices=self.rows[rows, : min(longest, self.rows.shape[1])],
            seq_lens_cpu=[longest] * len(reqs),
            sampling_info=self.sampling_info(reqs),
            **others,
        )

    def run(self, batch: ForwardBatch) -> GenerationBatchResult:
        result = self.worker.forward_batch_generation(batch)
        self.future_map.store_to_map(batch.req_pool_indices, result)
        return result

    # ---- speculation

    def prefill(
        self, reqs: list[BenchReq], chunk: int | None = None, **others: Any
    ) -> GenerationBatchResult:
        """Take in all tokens, in chunks if asked, and sample the first new one."""
        lens = [len(r.tokens) for r in reqs]
        begin = [0] * len(reqs)
        while True:
            end = [min(n, b + (chunk or n)) for b, n in zip(begin, lens, strict=True)]
            busy = [i for i in range(len(reqs)) if begin[i] < end[i]]
            result = self.run(
                self.extend_batch(
                    [reqs[i] for i in busy],
                    [begin[i] for i in busy],
                    [end[i] for i in busy],
                    **others,
                )
            )
            for row, i in enumerate(busy):
                if end[i] == lens[i]:
                    reqs[i].output_ids.append(result.next_token_ids[row].item())
            begin = end
            if end == lens:
                return result

    def step(self, reqs: list[BenchReq], **others: Any) -> GenerationBatchResult:
        """One round of draft and verification."""
        result = self.run(self.decode_batch(reqs, **others))
        for req, ids, count in zip(
            reqs, result.next_token_ids.tolist(), result.accept_lens.tolist(), strict=True
        ):
            assert 1 <= count <= self.num_steps + 1
            assert all(0 <= token < self.vocab_size for token in ids)
            req.output_ids += ids[:count]
            req.accepted.append(count)
        return result

    def generate(self, reqs: list[BenchReq], num_tokens: int, chunk: int | None = None) -> None:
        """Speculate until every request has `num_tokens` or more; those that have leave the batch."""
        self.prefill(reqs, chunk)
        while busy := [r for r in reqs if len(r.output_ids) < num_tokens]:
            self.step(busy)

    # ---- plain decoding

    def plain(self, reqs: list[BenchReq], num_tokens: int) -> list[list[int]]:
        """What the target alone writes: each token from a fresh forward over all before it."""
        twins = [
            BenchReq(r.prompt, r.params, r.seed, row=len(self.rows) - 1 - i)
            for i, r in enumerate(reqs)
        ]
        for _ in range(num_tokens):
            batch = self.extend_batch(twins, [0] * len(twins), [len(t.tokens) for t in twins])
            tokens = self.target.sample(self.target.forward(batch), batch)
            for twin, token in zip(twins, tokens.tolist(), strict=True):
                twin.output_ids.append(token)
        return [twin.output_ids for twin in twins]

    def target_prefill(self, tokens: list[int]) -> torch.Tensor:
        """The target's features of a text, shape (len(tokens), H); its KV is in the last row."""
        twin = BenchReq(tokens, SamplingParams(), 0, row=len(self.rows) - 1)
        batch = self.extend_batch(
            [twin], [0], [len(tokens)], capture_hidden_mode=CaptureHiddenMode.FULL
        )
        return self.target.forward(batch).hidden_states

    def draft_prefill(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        """The draft's features for tokens beside features; its KV is in the last row."""
        twin = BenchReq(tokens, SamplingParams(), 0, row=len(self.rows) - 1)
        batch = self.extend_batch(
            [twin],
            [0],
            [len(tokens)],
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_hidden_states=features,
        )
        return self.draft.forward(batch).hidden_states


def read_config(directory: Path, architecture: str, overrides: dict[str, Any]) -> ModelConfig:
    config = {
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | overrides))
    return ModelConfig.from_path(directory)


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    """As all threads of the engine have it."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def make_bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SpecBench]:
    """Factory of benches. The same arguments give the same bench, its pools spoilt anew."""
    made: dict[Any, SpecBench] = {}

    def make(*args: Any, **kwargs: Any) -> SpecBench:
        key = (args, tuple(kwargs.items()))
        if key not in made:
            made[key] = SpecBench(tmp_path_factory.mktemp("bench"), *args, **kwargs)
        made[key].spoil()
        return made[key]

    return make


@pytest.fixture
def make_reqs() -> Callable[..., list[BenchReq]]:
    """Factory of requests with random prompts of the given lengths."""

    def make(
        lens: list[int],
        params: list[dict[str, Any]] | dict[str, Any] | None = None,
        seed: int = 0,
        vocab_size: int = 32,
    ) -> list[BenchReq]:
        rng = random.Random(seed)
        if not isinstance(params, list):
            params = [params or {"temperature": 0.0}] * len(lens)
        return [
            BenchReq(
                [rng.randrange(vocab_size) for _ in range(n)],
                SamplingParams(**p),
                seed=rng.randrange(1 << 40),
                row=row,
            )
            for row, (n, p) in enumerate(zip(lens, params, strict=True))
        ]

    return make
