"""A model runner by itself: the same numbers however the work is cut into forwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.generation_result import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

CPU = torch.device("cpu")
SLOTS = 64


@pytest.fixture(scope="module")
def make_runner(tiny_model: Callable[..., str]) -> Callable[..., ModelRunner]:
    path = tiny_model(vocab_size=40, hidden_size=32, intermediate_size=48)

    def make(cls: type[ModelRunner] = ModelRunner, **arguments: Any) -> ModelRunner:
        args = ServerArgs(path, load_format="dummy", **arguments)
        config = ModelConfig.from_path(path, dtype=args.torch_dtype)
        return cls(args, config, CPU, SLOTS)

    return make


@pytest.fixture(scope="module")
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner()


def sampling_info(*params: dict[str, Any]) -> SamplingBatchInfo:
    reqs = [
        SimpleNamespace(sampling_params=SamplingParams(**p), sampling_seed=i, eos_token_ids={2})
        for i, p in enumerate(params)
    ]
    return SamplingBatchInfo.from_schedule_batch(
        SimpleNamespace(reqs=reqs, device=CPU, penalty_planner=None), 40
    )


def extend(ids: list[int], prefix: int, slots: list[int], **fields: Any) -> ForwardBatch:
    """New tokens `ids` of one request behind `prefix` cached ones; `slots` are all of its slots."""
    end = prefix + len(ids)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(ids),
        positions=torch.arange(prefix, end),
        out_cache_loc=torch.tensor(slots[prefix:end]),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([end]),
        kv_indices=torch.tensor([slots[:end]]),
        seq_lens_cpu=[end],
        extend_seq_lens_cpu=[len(ids)],
        extend_prefix_lens_cpu=[prefix],
        sampling_info=sampling_info({"temperature": 0}),
        **fields,
    )


@pytest.fixture(autouse=True)
def _inference_mode():
    with torch.inference_mode():
        yield


IDS = [5, 9, 31, 7, 7, 20, 3, 11]


def test_chunks_give_what_the_whole_gives(runner: ModelRunner) -> None:
    whole = runner.forward(extend(IDS, 0, list(range(8)))).next_token_logits
    slots = [63, 1, 40, 2, 17, 30, 9, 50]
    for begin, end in ((0, 3), (3, 4), (4, 8)):
        output = runner.forward(extend(IDS[begin:end], begin, slots))
    assert output.next_token_logits.dtype == torch.float32
    torch.testing.assert_close(output.next_token_logits, whole, atol=1e-5, rtol=1e-5)


def test_decode_continues_a_prefill(runner: ModelRunner) -> None:
    whole = runner.forward(extend(IDS, 0, list(range(8)))).next_token_logits
    slots = list(range(20, 28))
    runner.forward(extend(IDS[:7], 0, slots))
    batch = extend(IDS[7:], 7, slots)
    batch.forward_mode = ForwardMode.DECODE
    # Longer rows than the sequence is, as speculation and neighbours bring them.
    batch.kv_indices = torch.tensor([[*slots, 0, 1, 2]])
    output = runner.forward(batch)
    torch.testing.assert_close(output.next_token_logits, whole, atol=1e-5, rtol=1e-5)


def test_the_same_seed_gives_the_same_model(make_runner: Callable[..., ModelRunner]) -> None:
    def logits(**arguments: Any) -> torch.Tensor:
        batch = extend(IDS, 0, list(range(8)))
        return make_runner(**arguments).forward(batch).next_token_logits

    assert torch.equal(logits(random_seed=3), logits(random_seed=3))
    assert not torch.allclose(logits(random_seed=3), logits(random_seed=4))


def test_a_bias_is_in_the_logits_before_a_token_is_sampled(runner: ModelRunner) -> None:
    batch = extend(IDS, 0, list(range(8)))
    output = runner.forward(batch)
    plain = runner.sample(output, batch).item()
    assert plain == output.next_token_logits.argmax().item()
    other = (plain + 1) % 40
    batch.sampling_info = sampling_info({"temperature": 0, "logit_bias": {str(other): 1000.0}})
    assert runner.sample(runner.forward(batch), batch).item() == other


def test_a_scoring_forward_gives_logprobs_without_a_token(runner: ModelRunner) -> None:
    batch = extend(IDS, 0, list(range(8)))
    expected = torch.log_softmax(runner.forward(batch).next_token_logits.double(), dim=-1)[0]

    batch = extend(
        IDS,
        0,
        list(range(8)),
        return_logprob=True,
        top_logprobs_nums=[2],
        token_ids_logprobs=[[4, 30]],
        extend_logprob_start_lens_cpu=[8],
        extend_input_logprob_token_ids=torch.tensor([], dtype=torch.int64),
    )
    output = runner.forward(batch)
    runner.compute_logprobs_only(output, batch)
    rows = output.output_logprobs(0)
    assert rows.top_val[0] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-5)
    assert rows.top_idx[0] == expected.topk(2).indices.tolist()
    assert rows.token_ids_val[0] == pytest.approx(expected[[4, 30]].tolist(), abs=1e-5)

    batch.return_logprob = False
    output = runner.forward(batch)
    runner.compute_logprobs_only(output, batch)
    assert output.next_token_logprobs is None


def test_hidden_states_are_captured_as_asked(runner: ModelRunner) -> None:
    def hidden(mode: CaptureHiddenMode) -> torch.Tensor | None:
        batch = extend(IDS, 0, list(range(8)), capture_hidden_mode=mode)
        return runner.forward(batch).hidden_states

    full = hidden(CaptureHiddenMode.FULL)
    assert full.shape == (8, 32)
    torch.testing.assert_close(hidden(CaptureHiddenMode.LAST), full[-1:])
    assert hidden(CaptureHiddenMode.NULL) is None


def test_a_draft_runner_has_weights_of_its_own(
    make_runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    target = make_runner()
    args = target.server_args
    config = json.loads((Path(args.model_path) / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = ModelRunner(args, ModelConfig.from_path(tmp_path), CPU, SLOTS, is_draft_worker=True)
    assert draft.token_to_kv_pool.layer_num == 1
    assert target.token_to_kv_pool.layer_num == 2
    assert draft.token_to_kv_pool.size == target.token_to_kv_pool.size == SLOTS


def test_a_runner_may_bring_a_model_of_its_own(make_runner: Callable[..., ModelRunner]) -> None:
    made = []

    class Other(ModelRunner):
        def load_model(self) -> torch.nn.Module:
            made.append(self.is_draft_worker)
            return super().load_model()

    make_runner(Other)
    assert made == [False]


def test_a_result_is_on_the_host_after_its_copy(runner: ModelRunner) -> None:
    logits = LogitsProcessorOutput(torch.zeros(2, 40), next_token_logprobs=torch.tensor([-1.0, -2]))
    result = GenerationBatchResult(
        logits, torch.tensor([[4, 5], [6, 7]]), accept_lens=torch.tensor([1, 2])
    )
    result.copy_to_host()
    assert result.next_token_ids.tolist() == [[4, 5], [6, 7]]
    assert result.accept_lens.tolist() == [1, 2]
    # Logits are large and nobody on the host reads them.
    assert result.logits_output.next_token_logits is None
    assert result.logits_output.next_token_logprobs.tolist() == [-1.0, -2.0]
