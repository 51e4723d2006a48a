"""The Llama model against transformers."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_groups": {"num_key_value_heads": 6},
    "wide_heads": {"head_dim": 32},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
}
TOLERANCE = 2e-5


def save_hugging_face(directory, **overrides):
    """A random model of transformers, large enough in its weights that every part of it matters."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
        }
        | overrides
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(directory)
    return model.double()


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory, make_runner):
    directory = tmp_path_factory.mktemp(request.param)
    reference = save_hugging_face(directory, **VARIANTS[request.param])
    return make_runner(directory), reference


def prompts(*lengths, vocab=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def reference_logits(reference, tokens):
    with torch.no_grad():
        return reference(tokens[None]).logits[0].double()


def close(got, expected, tolerance=TOLERANCE):
    scale = expected.abs().max()
    assert got.shape == expected.shape
    assert (got.double() - expected).abs().max() <= tolerance * scale


def test_prefill(pair):
    runner, reference = pair
    tokens = prompts(20, 1, 33)
    out = runner.logits(ForwardMode.EXTEND, [2, 0, 1], tokens, [0, 0, 0])
    close(out, torch.cat([reference_logits(reference, t) for t in tokens]))


def test_chunks_mixed_batches_and_decoding(pair):
    runner, reference = pair
    a, b, c = tokens = prompts(40, 24, 30, seed=1)
    expected = [reference_logits(reference, t) for t in tokens]
    rows = [0, 3, 1]
    out = runner.logits(ForwardMode.EXTEND, rows, [a[:17], b[:22], c[:9]], [0, 0, 0])
    close(out, torch.cat((expected[0][:17], expected[1][:22], expected[2][:9])))
    out = runner.logits(ForwardMode.MIXED, rows, [a[17:38], b[22:23], c[9:29]], [17, 22, 9])
    close(out, torch.cat((expected[0][17:38], expected[1][22:23], expected[2][9:29])))
    out = runner.logits(
        ForwardMode.DECODE, rows, [a[38:39], b[23:], c[29:]], [38, 23, 29], extra_length=7
    )
    close(out, torch.stack((expected[0][38], expected[1][23], expected[2][29])))
    out = runner.logits(ForwardMode.DECODE, [0], [a[39:]], [39])
    close(out, expected[0][39:])


def test_a_draft_tree_is_its_branches(pair):
    runner, reference = pair
    prefix, nodes = prompts(12, 5, seed=2)
    # 0 -> 1 -> 3 and 0 -> 2 -> 4
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    runner.hidden(ForwardMode.EXTEND, [1], [prefix], [0])
    mask = torch.zeros((1, 5, 17), dtype=torch.bool)
    mask[:, :, :12] = True
    for node, path in enumerate(paths):
        mask[0, node, [12 + p for p in path]] = True
    positions = torch.tensor([12 + len(path) - 1 for path in paths])
    out = runner.logits(
        ForwardMode.TARGET_VERIFY, [1], [nodes], [12], positions=positions, custom_mask=mask
    )
    for node, path in enumerate(paths):
        branch = torch.cat((prefix, nodes[path]))
        close(out[node], reference_logits(reference, branch)[-1])


def test_the_same_number_of_new_tokens_each(pair):
    runner, reference = pair
    a, b = prompts(15, 9, seed=3)
    runner.hidden(ForwardMode.EXTEND, [0, 2], [a[:12], b[:6]], [0, 0])
    out = runner.logits(ForwardMode.DRAFT_EXTEND_V2, [0, 2], [a[12:], b[6:]], [12, 6])
    expected = [reference_logits(reference, a)[12:], reference_logits(reference, b)[6:]]
    close(out, torch.cat(expected))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.06), (torch.float16, 0.008)], ids=str
)
@pytest.mark.parametrize("variant", ["tied", "biases"])
def test_half_precision(variant, dtype, tolerance, tmp_path, make_runner):
    reference = save_hugging_face(tmp_path, **VARIANTS[variant])
    # What rounding the weights does is not the model's fault.
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(dtype).double()
    runner = make_runner(tmp_path, dtype)
    (tokens,) = prompts(30, seed=4)
    expected = reference_logits(reference, tokens)
    out = runner.logits(ForwardMode.EXTEND, [0], [tokens[:20]], [0])
    assert out.dtype == dtype
    close(out, expected[:20], tolerance)
    out = runner.logits(ForwardMode.EXTEND, [0], [tokens[20:29]], [20])
    close(out, expected[20:29], tolerance)
    out = runner.logits(ForwardMode.DECODE, [0], [tokens[29:]], [29])
    close(out, expected[29:], tolerance)


def test_tied_weights_are_one_tensor(tmp_path, make_runner):
    save_hugging_face(tmp_path)
    embed, head = make_runner(tmp_path).model.get_embed_and_head()
    assert embed is head


def test_untied_weights_are_two(tmp_path, make_runner):
    reference = save_hugging_face(tmp_path, tie_word_embeddings=False)
    embed, head = make_runner(tmp_path).model.get_embed_and_head()
    assert torch.equal(embed.double(), reference.model.embed_tokens.weight)
    assert torch.equal(head.double(), reference.lm_head.weight)


@pytest.mark.model
def test_greedy_text_of_the_real_model(model_path, make_runner):
    """Prefill in two chunks, then decode two requests at once, against single requests of HF."""
    runner = make_runner(model_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    texts = ["def fibonacci(n):", "Once upon a time, in a small village,"]
    tokens = [tokenizer(t, return_tensors="pt").input_ids[0] for t in texts]
    steps = 12
    expected = []
    for t in tokens:
        mask = torch.ones_like(t)[None]
        out = reference.generate(
            t[None], attention_mask=mask, max_new_tokens=steps, do_sample=False
        )
        expected.append(out[0, len(t) :].tolist())
    assert [len(e) for e in expected] == [steps, steps]  # no text ends early
    rows = [0, 1]
    lengths = [len(t) for t in tokens]
    runner.hidden(ForwardMode.EXTEND, rows, [t[:2] for t in tokens], [0, 0])
    logits = runner.logits(ForwardMode.EXTEND, rows, [t[2:] for t in tokens], [2, 2])
    logits = logits[torch.tensor([n - 2 for n in lengths]).cumsum(0) - 1]
    got = []
    for _ in range(steps):
        new = logits.argmax(-1)
        got.append(new)
        logits = runner.logits(ForwardMode.DECODE, rows, [t[None] for t in new], lengths)
        lengths = [n + 1 for n in lengths]
    assert torch.stack(got, dim=1).tolist() == expected
