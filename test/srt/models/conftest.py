"""A model with a pool under it, driven token list by token list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import TorchAttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.models.model_loader import load_model

CPU = torch.device("cpu")
WIDTH = 96


class Runner:
    """Runs forwards of some requests, whose slots lie scattered in the pool."""

    def __init__(self, model, config: ModelConfig, rows: int = 4) -> None:
        self.model, self.config = model, config
        pool = MHATokenToKVPool(
            rows * WIDTH,
            1,
            config.dtype,
            config.num_key_value_heads,
            config.head_dim,
            config.num_hidden_layers,
            CPU,
        )
        self.backend = TorchAttentionBackend(
            pool, config.num_attention_heads, config.num_key_value_heads, config.head_dim, CPU
        )
        slots = torch.randperm(rows * WIDTH, generator=torch.Generator().manual_seed(0))
        self.slots = slots.view(rows, WIDTH)

    def hidden(
        self,
        mode: ForwardMode,
        rows: Sequence[int],
        tokens: Sequence[torch.Tensor],
        prefixes: Sequence[int],
        *,
        positions: torch.Tensor | None = None,
        custom_mask: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        extra_length: int = 0,
    ) -> torch.Tensor:
        """Output of the model for `tokens` of the requests in `rows`, behind what is in the pool."""
        places = [torch.arange(p, p + len(t)) for t, p in zip(tokens, prefixes)]
        totals = [p + len(t) for t, p in zip(tokens, prefixes)]
        ragged = mode.is_extend()
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.cat(list(tokens)),
            positions=torch.cat(places) if positions is None else positions,
            out_cache_loc=torch.cat([self.slots[r, p] for r, p in zip(rows, places)]),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(totals),
            kv_indices=self.slots[list(rows), : max(totals) + extra_length].clone(),
            seq_lens_cpu=totals,
            extend_seq_lens_cpu=[len(t) for t in tokens] if ragged else None,
            extend_prefix_lens_cpu=list(prefixes) if ragged else None,
            custom_mask=custom_mask,
            spec_hidden_states=features,
        )
        with torch.inference_mode():
            self.backend.init_forward_metadata(batch)
            return self.model.forward(batch.input_ids, batch.positions, batch, self.backend)

    def logits(self, *args, **kwargs) -> torch.Tensor:
        """Logits of every token of `hidden`."""
        with torch.inference_mode():
            return self.model.compute_logits(self.hidden(*args, **kwargs))


@pytest.fixture(scope="session")
def make_runner() -> Callable[..., Runner]:
    """``make_runner(path, dtype, load_format=..., seed=...)`` loads a model and returns a `Runner`."""

    def make(
        path: str | Path, dtype: torch.dtype = torch.float32, rows: int = 4, **options
    ) -> Runner:
        config = ModelConfig.from_path(path, dtype=dtype)
        return Runner(load_model(config, **options), config, rows)

    return make
