"""What an engine says, judged by Hugging Face's Llama in float64 and a sampler in plain Python.

A `Referee` looks at one result at a time: it runs the whole sequence through the reference model, asks
at each position which token a sequential engine would have chosen there, and works out for itself when
the request should have ended. It knows nothing of batches, so it says the same of every batch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

VOCAB = 64
HIDDEN = 32
EOS = 2
CONTEXT = 256
TOLERANCE = 2e-4


@dataclass
class Ask:
    """A request, as the referee remembers it."""

    prompt: list[int]
    params: dict[str, Any]
    rid: str = ""
    aborted: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None

    def logprob_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Engine.generate` that ask for logprobs."""
        if not self.return_logprob:
            return {}
        return {
            "return_logprob": True,
            "logprob_start_len": self.logprob_start_len,
            "top_logprobs_num": self.top_logprobs_num,
            "token_ids_logprob": self.token_ids_logprob,
        }


@dataclass
class Referee:
    """Judges results.

    Attributes
    ----------
    model : LlamaForCausalLM
        Of transformers, in float64.
    room : int
        Most tokens, prompt and output together, that the judged engine has room for.
    num_tokens, num_ties : int
        Tokens that were judged, and how many of them are not the reference's choice but would be with
        logits that differ by rounding.
    """

    model: Any
    room: int = CONTEXT
    num_tokens: int = 0
    num_ties: int = 0
    cache: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """What the reference model says at each position, shape (len(tokens), VOCAB), float64."""
        key = tuple(tokens)
        if key not in self.cache:
            with torch.no_grad():
                self.cache[key] = self.model(torch.tensor([tokens])).logits[0]
        return self.cache[key]

    def hidden_states(self, tokens: list[int]) -> torch.Tensor:
        """The last layer's output behind the final norm, shape (len(tokens), HIDDEN), float64."""
        with torch.no_grad():
            return self.model.model(torch.tensor([tokens])).last_hidden_state[0]

    def judge(self, ask: Ask, result: dict[str, Any]) -> None:
        """Fail unless `result` is what a sequential engine could have answered to `ask`."""
        ids, meta = result["output_ids"], result["meta_info"]
        assert meta["prompt_tokens"] == len(ask.prompt)
        assert meta["completion_tokens"] == len(ids)
        if ask.rid:
            assert meta["id"] == ask.rid
        self._judge_tokens(ask, ids)
        self._judge_end(ask, ids, meta["finish_reason"])
        if ask.return_logprob:
            self._judge_logprobs(ask, ids, meta)

    def rows(self, ask: Ask, ids: list[int]) -> torch.Tensor:
        """Logits that each of the tokens `ids` was chosen from, and one row more."""
        rows = self.logits(ask.prompt + ids)[len(ask.prompt) - 1 :].clone()
        for i, row in enumerate(rows):
            penalize(row, ask.params, ids[:i])
        return rows

    def _judge_tokens(self, ask: Ask, ids: list[int]) -> None:
        for i, (token, row) in enumerate(zip(ids, self.rows(ask, ids), strict=False)):
            position = len(ask.prompt) + i
            self.num_tokens += 1
            if choose(row, ask.params, position) != token:
                assert token in near_choices(row, ask.params, position), (
                    f"{ask}: token {i} of {ids} is {token}, the reference chooses "
                    f"{choose(row, ask.params, position)}"
                )
                self.num_ties += 1

    def _judge_end(self, ask: Ask, ids: list[int], reason: dict[str, Any]) -> None:
        limit = min(ask.params.get("max_new_tokens", 128), self.room - len(ask.prompt))
        stops = {EOS, *(ask.params.get("stop_token_ids") or ())}
        if ask.params.get("ignore_eos"):
            stops = set()
        ends = [i for i, token in enumerate(ids) if token in stops]
        if reason["type"] == "abort":
            assert ask.aborted, f"{ask} was aborted by nobody: {reason}"
            assert len(ids) <= limit
            assert ends in ([], [len(ids) - 1]), f"{ask} went on behind a stop token: {ids}"
        elif ends:
            assert ends == [len(ids) - 1], f"{ask} went on behind a stop token: {ids}"
            assert reason == {"type": "stop", "matched": ids[-1]}
        else:
            assert len(ids) == limit, f"{ask} should have {limit} tokens: {ids}"
            assert reason == {"type": "length", "length": limit}

    def _judge_logprobs(self, ask: Ask, ids: list[int], meta: dict[str, Any]) -> None:
        rows = self.rows(ask, ids)
        temperature = ask.params.get("temperature", 1.0)
        if temperature == 0 or ask.params.get("top_k") == 1:
            temperature = 1.0
        # JSON has no infinity: of a token that cannot come an engine tells the least number there is.
        least = torch.finfo(torch.float32).min
        behind = torch.log_softmax(rows / temperature, dim=-1).clamp(min=least)
        scoring = ask.params.get("max_new_tokens") == 0
        num_candidates = 1 if scoring and not ask.aborted else len(ids)
        self._compare_tokens(meta["output_token_logprobs"], behind, ids)
        self._compare_candidates(ask, meta, "output", behind[:num_candidates])

        start = ask.logprob_start_len
        if start < 0 or start >= len(ask.prompt):
            names = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
            assert [meta[f"input_{name}"] for name in names] == [[], [], []]
            return
        if ask.aborted and not meta["input_token_logprobs"]:
            return
        before = torch.log_softmax(self.logits(ask.prompt), dim=-1)
        first, *rest = meta["input_token_logprobs"]
        assert first == (None, ask.prompt[start], None)
        targets = ask.prompt[start + 1 :]
        if ask.aborted:
            targets = targets[: len(rest)]
        self._compare_tokens(rest, before[start:], targets)
        end = start + len(targets)
        self._compare_candidates(ask, meta, "input", before[start:end])

    @staticmethod
    def _compare_tokens(entries: list[tuple], rows: torch.Tensor, targets: list[int]) -> None:
        assert [token for _, token, _ in entries] == targets
        for (logprob, token, text), row in zip(entries, rows, strict=False):
            assert text is None
            assert logprob == pytest.approx(row[token].item(), abs=TOLERANCE)

    def _compare_candidates(
        self, ask: Ask, meta: dict[str, Any], side: str, rows: torch.Tensor
    ) -> None:
        top, named = meta[f"{side}_top_logprobs"], meta[f"{side}_token_ids_logprobs"]
        if side == "input":
            # Nothing stands before the first token.
            if ask.top_logprobs_num:
                assert top[0] is None
            if ask.token_ids_logprob is not None:
                assert named[0] is None
            top, named = top[1:], named[1:]
        assert len(top) == (len(rows) if ask.top_logprobs_num else 0)
        for entries, row in zip(top, rows, strict=False):
            best = row.sort(descending=True).values[: ask.top_logprobs_num].tolist()
            assert [logprob for logprob, _, _ in entries] == pytest.approx(best, abs=TOLERANCE)
            assert len({token for _, token, _ in entries}) == len(best)
            for logprob, token, _ in entries:
                assert logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert len(named) == (len(rows) if ask.token_ids_logprob is not None else 0)
        for entries, row in zip(named, rows, strict=False):
            self._compare_tokens(entries, row.expand(len(entries), -1), list(ask.token_ids_logprob))


def penalize(row: torch.Tensor, params: dict[str, Any], output: list[int]) -> None:
    """Penalize, bias and mask one row of logits, float64, behind `output`; in plain Python."""
    for token in set(output):
        x = row[token].item()
        x -= params.get("frequency_penalty", 0.0) * output.count(token)
        x -= params.get("presence_penalty", 0.0)
        factor = params.get("repetition_penalty", 1.0)
        row[token] = x * factor if x < 0 else x / factor
    for token, bias in (params.get("logit_bias") or {}).items():
        row[int(token)] += bias
    if len(output) < params.get("min_new_tokens", 0):
        for token in {EOS, *(params.get("stop_token_ids") or ())}:
            row[token] = -math.inf


# --- The sampler, in plain Python ---------------------------------------------------------------

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """Number `position` of the SplitMix64 sequence that a hash of `seed` starts."""
    state = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((state + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def choose(logits: torch.Tensor, params: dict[str, Any], position: int, shift: float = 0.0) -> int:
    """The token that one row of logits, float64, gives. `shift` is added to the random number."""
    if params.get("temperature", 1.0) == 0 or params.get("top_k") == 1:
        return max(range(len(logits)), key=lambda t: (logits[t].item(), -t))
    scaled = (logits / params.get("temperature", 1.0)).tolist()
    highest = max(scaled)
    weights = [math.exp(x - highest) for x in scaled]
    total = sum(weights)
    probs = [w / total for w in weights]
    kept, mass = set(), 0.0
    top_k = params.get("top_k", -1)
    for rank, token in enumerate(sorted(range(len(probs)), key=lambda t: (-probs[t], t))):
        likely = probs[token] >= params.get("min_p", 0.0) * max(probs)
        if (top_k == -1 or rank < top_k) and mass <= params.get("top_p", 1.0) and likely:
            kept.add(token)
        mass += probs[token]
    target = min(max(uniform(params["sampling_seed"], position) + shift, 0.0), 1.0)
    target *= sum(probs[t] for t in kept)
    mass = 0.0
    for token in sorted(kept):
        mass += probs[token]
        if mass > target:
            return token
    return max(kept)


def near_choices(logits: torch.Tensor, params: dict[str, Any], position: int) -> set[int]:
    """Tokens that rounding of the logits may make of the choice."""
    noise = random.Random(0)
    found = set()
    for _ in range(40):
        wiggle = torch.tensor([noise.uniform(-1e-4, 1e-4) for _ in logits], dtype=logits.dtype)
        found.add(choose(logits + wiggle, params, position, noise.uniform(-1e-4, 1e-4)))
    return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[Callable[[], contextlib.AbstractContextManager]]:
    """Run torch on one thread: for models as tiny as these a second is only one more to wait for.

    Gives the context that engines' threads enter to do the same.
    """
    with _one_thread():
        yield _one_thread


# --- Models and tokenizers on disk --------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """Directories of the tiny target, with weights and a tokenizer, and of its draft model."""

    target: str
    draft: str


def _make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.8, 1.2, generator=generator)
                continue
            scale = 1.0 if "embed" in name else weight.shape[1] ** -0.5
            if "lm_head" in name:
                scale *= 3.0
            if "o_proj" in name or "down_proj" in name:
                # The last token says a good deal about the next one, so that a draft has a chance.
                scale *= 0.6
            weight.normal_(0.0, scale, generator=generator)
    return model


def _draft_weights(model: Any) -> dict[str, torch.Tensor]:
    """A draft model that knows what the target makes of the last token, and adds a layer of noise."""
    generator = torch.Generator().manual_seed(8)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, scale / shape[-1] ** 0.5, generator=generator)

    kv_width = HIDDEN // 2
    return {
        "fc.weight": torch.cat(
            [torch.diag(model.model.norm.weight), torch.zeros(HIDDEN, HIDDEN)], 1
        ),
        "fc.bias": torch.zeros(HIDDEN),
        "layers.0.input_layernorm.weight": torch.ones(HIDDEN),
        "layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "layers.0.self_attn.q_proj.weight": normal(HIDDEN, HIDDEN, scale=1.0),
        "layers.0.self_attn.k_proj.weight": normal(kv_width, HIDDEN, scale=1.0),
        "layers.0.self_attn.v_proj.weight": normal(kv_width, HIDDEN, scale=1.0),
        "layers.0.self_attn.o_proj.weight": normal(HIDDEN, HIDDEN, scale=0.1),
        "layers.0.mlp.gate_proj.weight": normal(48, HIDDEN, scale=1.0),
        "layers.0.mlp.up_proj.weight": normal(48, HIDDEN, scale=1.0),
        "layers.0.mlp.down_proj.weight": normal(HIDDEN, 48, scale=0.1),
    }


@pytest.fixture(scope="session")
def llama() -> Any:
    """A tiny Llama of transformers, in float32, with weights that make it talk."""
    return _make_llama()


@pytest.fixture(scope="session")
def paths(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """The tiny Llama, and a draft model for it, as the engine loads them."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    llama.save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (draft / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.detach().half() for k, v in _draft_weights(llama).items()},
        draft / "model.safetensors",
    )
    return Paths(str(target), str(draft))


@pytest.fixture(scope="session")
def referee_model(llama: Any) -> Any:
    """The tiny Llama in float64."""
    return copy.deepcopy(llama).double()


@pytest.fixture
def make_referee(referee_model: Any) -> Callable[..., Referee]:
    """Factory of judges: ``make_referee(room=CONTEXT)``."""
    return lambda room=CONTEXT: Referee(referee_model, room)


@pytest.fixture(scope="session")
def asks() -> type[Ask]:
    """The class of requests that a referee judges."""
    return Ask


@pytest.fixture(scope="session")
def text_model(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a dummy model with a byte-level tokenizer: ids 4 .. 259 are the bytes."""
    directory = Path(tiny_model(vocab_size=300, hidden_size=32, intermediate_size=48))
    save_byte_tokenizer(directory)
    return str(directory)


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer.json with four special tokens, the 256 bytes and a few merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", "<x>", *alphabet, "th", "the", "Ġthe", "in", "ing", "oo"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("o", "o")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in words[:4]])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
