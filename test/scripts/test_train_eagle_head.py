"""The draft head's training on models so small that each test takes a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_eagle_head
from eagle_head import data
from eagle_head.data import FeatureReader, Sequence, TextSettings, TextWriter, load_text
from eagle_head.evaluation import simulate
from eagle_head.model import ChainState, DraftHead
from eagle_head.training import (
    TokenLoss,
    TrainSettings,
    choose_draft_vocab,
    fit_linear,
    make_batch,
    train,
)
from eagle_prompts import SPLITS, prompts_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import TorchAttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.model_loader import dummy_weights, load_model

VOCAB, HIDDEN = 96, 32
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with random weights in a file."""
    directory = tmp_path_factory.mktemp("target")
    (directory / "config.json").write_text(json.dumps(TINY))
    config = ModelConfig.from_path(directory)
    weights = dict(dummy_weights(config, LlamaForCausalLM(config).weight_table(), seed=0))
    save_file(
        {n: w for n, w in weights.items() if n != "lm_head.weight"},
        directory / "model.safetensors",
    )
    return directory


@pytest.fixture(scope="module")
def config(target: Path) -> ModelConfig:
    """Of the tiny target."""
    return ModelConfig.from_path(target)


def random_sequences(count: int, seed: int = 0) -> list[Sequence]:
    """Sequences of 12 tokens and more, the first 4 of which are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for i in range(count):
        ids = torch.randint(3, VOCAB, (12 + i % 5,), generator=generator)
        features = torch.randn(len(ids), HIDDEN, generator=generator).half()
        sequences.append(Sequence(ids, 4, features))
    return sequences


def random_head(config: ModelConfig, seed: int = 1) -> DraftHead:
    """A head whose every weight matters, in numbers that float16 can hold."""
    head = DraftHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            offset = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_((offset + 0.2 * noise).half())
    return head


def embedding_and_rows(size: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    """An embedding, and a head for the first `size` tokens."""
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    return embedding, embedding[:size].clone()


# ---- prompts


def test_splits_share_no_prompt() -> None:
    texts = {split: {p.text for p in prompts_of(split)} for split in SPLITS}
    assert len(texts["train"]) > 5000
    assert len(texts["validation"]) == len(texts["test"]) == 32
    for split in ("validation", "test"):
        others = set.union(*(texts[o] for o in SPLITS if o != split))
        assert not texts[split] & others


def test_prompts_are_the_same_at_every_call() -> None:
    assert prompts_of("train") == prompts_of("train")


# ---- text and features


@pytest.fixture
def writer(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextWriter:
    """Writes into an empty cache; its prompts are a few tokens each."""
    monkeypatch.setattr(data, "Tokenizer", lambda path: None)
    monkeypatch.setattr(data, "CHUNK", 4)
    monkeypatch.setattr(data, "encode", lambda _, prompt: [3 + len(prompt.text) % 50, 7, 9])
    settings = TextSettings("tiny", dtype="float32", max_new_tokens=6, batch_size=2)
    return TextWriter(target, tmp_path / "cache", settings)


def test_text_is_written_once_and_the_same_again(writer: TextWriter, tmp_path: Path) -> None:
    paths = writer.write("train", 6)
    assert [p.name for p in paths] == [
        "text-train-00000.safetensors",
        "text-train-00004.safetensors",
    ]
    first = [p.read_bytes() for p in paths]
    times = [p.stat().st_mtime_ns for p in paths]
    texts = [text for path in paths for text in load_text(path)]
    assert len(texts) == 6
    assert all(n == 3 and 4 <= len(ids) <= 9 for ids, n in texts)

    assert writer.write("train", 6) == paths
    assert [p.stat().st_mtime_ns for p in paths] == times, "a finished chunk was written again"

    paths[1].unlink()
    writer.write("train", 6)
    assert paths[0].stat().st_mtime_ns == times[0]
    assert [p.read_bytes() for p in paths] == first


def test_other_settings_make_text_anew(writer: TextWriter, target: Path) -> None:
    (path,) = writer.write("validation", 2)
    before = data.read_fingerprint(path)
    other = TextSettings("tiny", dtype="float32", max_new_tokens=3, batch_size=2)
    assert TextWriter(target, writer.cache, other).write("validation", 2) == [path]
    assert data.read_fingerprint(path) != before
    assert all(len(ids) <= 6 for ids, _ in load_text(path))


def test_more_prompts_than_there_are(writer: TextWriter) -> None:
    with pytest.raises(ValueError, match="32 prompts, 99 are asked for"):
        writer.write("validation", 99)


def test_features_are_those_of_each_sequence_alone(writer: TextWriter, target: Path) -> None:
    paths = writer.write("train", 6)
    together = FeatureReader(target).read(paths, "test")
    for sequence in together:
        (alone,) = data.TeacherForcing(target).run([sequence.ids])
        torch.testing.assert_close(sequence.features, alone.half(), atol=2e-3, rtol=2e-3)
    # The target, greedy, wrote what its features say.
    lm_head = train_eagle_head.load_embed_and_head(target)[1]
    for sequence in together[::2]:
        logits = sequence.features.float() @ lm_head.T
        answer = sequence.ids[sequence.prompt_len :]
        chosen = logits[sequence.prompt_len - 1 : -1].gather(1, answer[:, None])[:, 0]
        best = logits[sequence.prompt_len - 1 : -1].max(dim=1).values
        torch.testing.assert_close(chosen, best, atol=2e-2, rtol=0)


# ---- the head, held against the model that will run it


def package_features(
    model: LlamaForCausalLMEagle, ids: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Output of the package's draft model for one sequence."""
    config, count = model.config, len(ids)
    device = torch.device("cpu")
    heads, head_dim = config.num_key_value_heads, config.head_dim
    pool = MHATokenToKVPool(count, 1, torch.float32, heads, head_dim, 1, device)
    backend = TorchAttentionBackend(pool, config.num_attention_heads, heads, head_dim, device)
    slots = torch.arange(count)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        positions=slots,
        out_cache_loc=slots,
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([count]),
        kv_indices=slots[None],
        seq_lens_cpu=[count],
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[0],
        spec_hidden_states=features,
    )
    with torch.inference_mode():
        backend.init_forward_metadata(batch)
        return model(ids, slots, batch, backend)


def test_the_package_runs_the_checkpoint_as_it_was_trained(
    config: ModelConfig, target: Path, tmp_path: Path
) -> None:
    head = random_head(config)
    hot = torch.tensor([5, 3, 90, 17])
    train_eagle_head.write_checkpoint(tmp_path / "head", target, head, hot, {})
    draft = load_model(ModelConfig.from_path(tmp_path / "head"))
    assert isinstance(draft, LlamaForCausalLMEagle)
    assert draft.hot_token_id.tolist() == [3, 5, 17, 90]
    embedding, _ = embedding_and_rows()
    draft.set_embed_and_head(embedding, embedding)

    ids = torch.arange(10, 19)
    features = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(3))
    state = ChainState()
    with torch.no_grad():
        first = head(embedding[ids][None], features[None], state)[0]
        next_ids = torch.arange(30, 39)
        second = head(embedding[next_ids][None], first[None], state)[0]
        third = head(embedding[ids][None], second[None], state)[0]
    torch.testing.assert_close(package_features(draft, ids, features), first, atol=1e-4, rtol=1e-4)
    # The chain of row t is the sequence up to t, then its own tokens with its own features.
    for t in (0, 4, 8):
        chain_ids = torch.cat((ids[: t + 1], next_ids[t, None], ids[t, None]))
        chain_features = torch.cat((features[: t + 1], first[t, None], second[t, None]))
        out = package_features(draft, chain_ids, chain_features)
        torch.testing.assert_close(out[-2], second[t], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out[-1], third[t], atol=1e-4, rtol=1e-4)


def test_a_new_head_is_its_linear_part(config: ModelConfig) -> None:
    head = DraftHead(config)
    x = torch.randn(1, 5, HIDDEN)
    linear = head.fc(torch.cat((x, x), dim=-1))
    torch.testing.assert_close(head(x, x, ChainState()), linear)


def test_a_head_that_is_too_large_is_not_written(
    config: ModelConfig, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_eagle_head, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000 are allowed"):
        train_eagle_head.write_checkpoint(tmp_path, target, DraftHead(config), torch.arange(4), {})


# ---- training

SHORT = TrainSettings(
    steps=8,
    batch_size=3,
    draft_vocab_size=40,
    learning_rate=1e-2,
    frequent=16,
    sampled=8,
    ridge=1.0,
)


def test_training_gives_the_same_weights_twice(
    config: ModelConfig, target: Path, tmp_path: Path
) -> None:
    sequences = random_sequences(10)
    embedding, rows = embedding_and_rows(40)
    files = []
    looks: list[int] = []

    def look(step: int, head: DraftHead) -> str:
        looks.append(step)
        return ""

    for i in range(2):
        torch.manual_seed(i)
        # Neither the global seed nor looks at the head may matter.
        head = train(config, sequences, embedding, rows, SHORT, look if i else None, 3)
        output = tmp_path / str(i)
        train_eagle_head.write_checkpoint(output, target, head, torch.arange(40), {"a": 1})
        files.append([(output / n).read_bytes() for n in ("model.safetensors", "config.json")])
    assert files[0] == files[1]
    assert looks == [0, 3, 6]
    assert not torch.are_deterministic_algorithms_enabled()


def test_training_learns(config: ModelConfig) -> None:
    """A text of two tokens in turn, whose features say which: the head must get it right."""
    generator = torch.Generator().manual_seed(0)
    embedding, _ = embedding_and_rows()
    features = torch.randn(2, HIDDEN, generator=generator)
    features += 4 * embedding[[11, 10]]
    ids = torch.tensor([10, 11] * 10)
    sequences = [Sequence(ids, 2, features[ids - 10].half()) for _ in range(4)]
    hot = choose_draft_vocab(sequences, VOCAB, 8)
    settings = TrainSettings(steps=20, batch_size=2, learning_rate=3e-3, frequent=8, ridge=1.0)
    head = train(config, sequences, embedding, embedding[hot], settings)
    result = simulate(head, sequences, embedding, embedding[hot], hot)
    assert result.accept_length == {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0}


def test_chains_get_longer_during_training() -> None:
    lengths = [TrainSettings(steps=100).chain_steps(step) for step in range(100)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1 and lengths[29] == 1 and lengths[30] == 2 and lengths[-1] == 3


def test_draft_vocabulary_is_what_the_target_writes_most() -> None:
    ids = torch.tensor([50, 50, 50, 8, 9, 9, 7])
    sequences = [Sequence(ids, 3, torch.zeros(7, HIDDEN))]
    # The prompt does not count. 7 and 8 come as often as each other, 0 is the first that never comes.
    assert choose_draft_vocab(sequences, VOCAB, 4).tolist() == [9, 7, 8, 0]


def test_linear_fit_finds_a_linear_rule() -> None:
    embedding, _ = embedding_and_rows()
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.1
    bias = torch.randn(HIDDEN, generator=generator)
    sequences = []
    for sequence in random_sequences(60):
        rows = [torch.randn(HIDDEN, generator=generator)]
        for token in sequence.ids[1:]:
            rows.append(weight @ torch.cat((embedding[token], rows[-1])) + bias)
        sequences.append(Sequence(sequence.ids, 1, torch.stack(rows)))
    found_weight, found_bias = fit_linear(sequences, embedding, penalty=1e-6)
    torch.testing.assert_close(found_weight, weight, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found_bias, bias, atol=1e-3, rtol=1e-3)


def naive_loss(drafted: torch.Tensor, wanted: torch.Tensor) -> float:
    """Soft cross-entropy of logits in float64."""
    log_p = drafted.double().log_softmax(-1)
    return float(-(wanted.double().softmax(-1) * log_p).sum(-1).mean())


def test_token_loss_over_all_tokens() -> None:
    _, rows = embedding_and_rows(40)
    a, b = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(5))
    loss = TokenLoss(rows, TrainSettings(frequent=16, sampled=0), torch.Generator())
    loss.draw()
    assert loss(a, b).item() == pytest.approx(naive_loss(a @ rows.T, b @ rows.T), rel=0.03)


def test_tokens_that_are_drawn_stand_for_the_others() -> None:
    """With all tokens alike, each drawn token counts as often as there are tokens for one drawn."""
    _, rows = embedding_and_rows(1)
    rows = rows.expand(40, -1).contiguous()
    settings = TrainSettings(frequent=16, sampled=8)
    loss = TokenLoss(rows, settings, torch.Generator().manual_seed(0))
    loss.draw()
    a = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(5))
    counts = torch.tensor([1.0] * 16 + [3.0] * 8)
    expected = naive_loss(counts.log().expand(6, -1), counts.log().expand(6, -1))
    assert loss(a, a).item() == pytest.approx(expected, rel=1e-4)


# ---- evaluation


def test_simulation_agrees_with_drafting_one_chain_at_a_time(config: ModelConfig) -> None:
    head = random_head(config)
    embedding, _ = embedding_and_rows()
    hot = torch.arange(0, VOCAB, 2)
    rows = embedding[hot]
    sequences = random_sequences(4)

    def draft(sequence: Sequence, row: int, steps: int) -> list[int]:
        ids, features = sequence.ids[1 : row + 2], sequence.features[: row + 1].float()
        drafts: list[int] = []
        for _ in range(steps):
            with torch.no_grad():
                out = head(embedding[ids][None], features[None], ChainState())[0, -1]
            drafts.append(int(hot[(rows @ out).argmax()]))
            ids = torch.cat((ids, torch.tensor(drafts[-1:])))
            features = torch.cat((features, out[None]))
        return drafts

    # So that some drafts are right, write the head's own drafts into the texts.
    for sequence in sequences:
        for row in range(3, len(sequence.ids) - 2, 3):
            sequence.ids[row + 2] = draft(sequence, row, 1)[0]

    result = simulate(head, sequences, embedding, rows, hot, max_steps=3)
    for steps, found in result.accept_length.items():
        yields = []
        for sequence in sequences:
            ids, row = sequence.ids.tolist(), sequence.prompt_len - 1
            while row + 2 + steps <= len(ids) - 1:
                wanted = ids[row + 2 : row + 2 + steps]
                drafts = draft(sequence, row, steps)
                right = next((i for i in range(steps) if drafts[i] != wanted[i]), steps)
                yields.append(right + 1)
                row += right + 1
        assert found == pytest.approx(sum(yields) / len(yields))
        assert found > 1.0


def test_batches_mark_the_answers() -> None:
    batch = make_batch(random_sequences(2))
    assert batch.answer.sum(1).tolist() == [8, 9]
    assert batch.answer[0].tolist() == [False] * 4 + [True] * 8 + [False]


# ---- the command line and what is committed


def test_a_missing_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = str(torch.get_num_threads())
    arguments = ["train", "--model", str(tmp_path / "absent"), "--threads", threads]
    assert train_eagle_head.main(arguments) == 1
    assert "no model at" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "all"])
@pytest.mark.parametrize("other", [["--steps", "5"], ["--sequences", "8"], ["--seed", "1"]])
def test_another_head_does_not_take_the_place_of_the_committed_one(
    command: str, other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_eagle_head.parse_args([command, *other])
    assert "--output is required" in capsys.readouterr().err
    assert train_eagle_head.parse_args([command]).output == train_eagle_head.ASSET
    elsewhere = [command, "--output", "x", *other]
    assert train_eagle_head.parse_args(elsewhere).output == Path("x")


@pytest.mark.parametrize("command", ["generate", "train", "evaluate", "all"])
def test_every_stage_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        train_eagle_head.main([command, "--help"])
    assert exit_info.value.code == 0
    assert "--threads" in capsys.readouterr().out


def test_the_committed_head() -> None:
    path = train_eagle_head.ASSET
    weights = path / "model.safetensors"
    assert weights.stat().st_size < 10_000_000
    config = ModelConfig.from_path(path)
    assert config.architecture == "LlamaForCausalLMEagle"
    tensors = load_file(weights)
    hot = tensors.pop("hot_token_id").long()
    assert len(hot) == config.draft_vocab_size
    assert bool((hot[1:] > hot[:-1]).all())
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    assert all(bool(t.isfinite().all()) for t in tensors.values())
    load_model(config)
