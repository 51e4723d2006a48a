"""Text in and out, also when a character comes in pieces."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from sglang.srt.utils.tokenizer import IncrementalDetokenizer, Tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<x>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer: four special tokens, 256 bytes, and five words."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, "th", "the", "Ġthe", "in", "ing"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Ids of a text, one for each of its bytes."""
    # The letter that stands for each byte, from characters that have all bytes there are in UTF-8.
    letter_of: dict[int, str] = {}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    points = (range(0xD800), range(0xE000, 0x110000, 64))
    for point in itertools.chain(*points):
        letters = split(chr(point))[0][0]
        letter_of.update(zip(chr(point).encode(), letters, strict=True))
    vocab = json.loads(tokenizer._tokenizer.to_str())["model"]["vocab"]
    return lambda text: [vocab[letter_of[byte]] for byte in text.encode()]


# --- Tokenizer ----------------------------------------------------------------------------------


def test_tokens_without_text_are_known(tokenizer: Tokenizer) -> None:
    for token_id in range(280):
        for skip in (True, False):
            text = tokenizer.decode([token_id], skip_special_tokens=skip)
            assert tokenizer.is_silent(token_id, skip) == (text == "")


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer_path: .*tokenizer.json cannot be read"):
        Tokenizer(tmp_path)


@given(text=st.text(max_size=40))
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == _without_special(text)


def _without_special(text: str) -> str:
    for word in SPECIAL:
        text = text.replace(word, "")
    return text


def test_special_tokens_are_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("the thing"), 2]
    assert tokenizer.decode(ids) == "the thing"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the thing</s>"


def test_ids_that_no_token_has_are_passed_over(tokenizer: Tokenizer) -> None:
    (the,) = tokenizer.encode("the")
    assert tokenizer.decode([the, 5000, the]) == "thethe"


def test_without_a_config_there_is_no_end_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id is None
    assert tokenizer.bos_token is None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.fixture
def configured(folder: Path, tmp_path: Path) -> Callable[..., Tokenizer]:
    def make(template: str | None = None, **config: object) -> Tokenizer:
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return Tokenizer(tmp_path)

    return make


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_the_end_of_text_is_a_string_or_an_object(configured: Callable, eos: object) -> None:
    assert configured(eos_token=eos).eos_token_id == 2


def test_an_end_of_text_that_is_no_token_is_none(configured: Callable) -> None:
    assert configured(eos_token="</end>").eos_token_id is None


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_a_template_may_be_one_of_several(configured: Callable) -> None:
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "[hi]"}]
    assert configured(chat_template=templates).apply_chat_template(TALK) == "[hi]"
    with pytest.raises(ValueError, match="no chat template"):
        configured(chat_template=templates[:1]).apply_chat_template(TALK)


def test_a_special_token_that_is_not_there_is_no_text(configured: Callable) -> None:
    template = "{{ bos_token }}hi{{ eos_token }}"
    assert configured(chat_template=template, bos_token=None).apply_chat_template(TALK) == "hi"


@pytest.mark.parametrize("place", ["file", "config"])
def test_a_chat_template_is_rendered(configured: Callable, place: str) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    if place == "file":
        tokenizer = configured(TEMPLATE, chat_template="not this one", **names)
    else:
        tokenizer = configured(chat_template=TEMPLATE, **names)
    shown = "<s>[user]hi</s>[assistant]ho</s>"
    assert tokenizer.apply_chat_template(iter(TALK)) == shown + "[assistant]"
    assert tokenizer.apply_chat_template(TALK, add_generation_prompt=False) == shown


def test_a_template_can_refuse(configured: Callable) -> None:
    tokenizer = configured("{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="no such role"):
        tokenizer.apply_chat_template(TALK)


def test_a_template_cannot_reach_out(configured: Callable) -> None:
    tokenizer = configured("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Exception, match=r"unsafe|not safe"):
        tokenizer.apply_chat_template(TALK)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="skip_tokenizer_init=True"):
        Tokenizer(tmp_path)


# --- Incremental text ---------------------------------------------------------------------------


def stream(
    tokenizer: Tokenizer, ids: list[int], steps: Iterable[int], skip: bool = True
) -> list[str]:
    """Texts after each step, the last one from `finish`."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    texts, end = [], 0
    for step in steps:
        end = min(end + step, len(ids))
        texts.append(detokenizer.update(ids[:end]))
    texts.append(detokenizer.finish(ids))
    return texts


def check_stream(tokenizer: Tokenizer, ids: list[int], texts: list[str], skip: bool = True) -> None:
    for earlier, later in itertools.pairwise(texts):
        assert later.startswith(earlier), "what was sent was taken back"
    assert texts[-1] == tokenizer.decode(ids, skip)


@given(
    text=st.text(max_size=30),
    steps=st.lists(st.integers(0, 5), max_size=40),
    skip=st.booleans(),
)
@settings(max_examples=200)
def test_text_that_comes_byte_by_byte(
    tokenizer: Tokenizer, byte_ids: Callable, text: str, steps: list[int], skip: bool
) -> None:
    ids = byte_ids(text)
    texts = stream(tokenizer, ids, steps, skip)
    check_stream(tokenizer, ids, texts, skip)
    assert texts[-1] == text
    if "\ufffd" not in text:
        # Whatever was sent is a beginning of the text, and never half a character.
        assert all(text.startswith(part) for part in texts)


@given(
    ids=st.lists(
        st.one_of(st.integers(0, 3), st.integers(4, 270), st.integers(130, 260)), max_size=40
    ),
    steps=st.lists(st.integers(0, 4), max_size=45),
    skip=st.booleans(),
)
@settings(max_examples=250)
def test_ids_that_need_not_be_text(
    tokenizer: Tokenizer, ids: list[int], steps: list[int], skip: bool
) -> None:
    """Models write broken characters, special tokens, and ids that no token has."""
    check_stream(tokenizer, ids, stream(tokenizer, ids, steps, skip), skip)


def test_a_character_is_sent_when_it_is_whole(tokenizer: Tokenizer, byte_ids: Callable) -> None:
    ids = byte_ids("a€b")
    assert stream(tokenizer, ids, [1] * 5) == ["a", "a", "a", "a€", "a€b", "a€b"]


def test_an_unfinished_character_is_shown_at_the_end(
    tokenizer: Tokenizer, byte_ids: Callable
) -> None:
    ids = byte_ids("a€")[:-1]
    assert stream(tokenizer, ids, [1, 1, 1]) == ["a", "a", "a", "a\ufffd"]


def test_the_real_tokenizer_streams_what_it_decodes(model_path: str) -> None:
    tokenizer = Tokenizer(model_path)
    rng = random.Random(0)
    vocab = tokenizer._tokenizer.get_vocab_size()
    for _ in range(60):
        ids = [rng.randrange(vocab) for _ in range(30)]
        steps = [rng.randint(0, 3) for _ in range(30)]
        for skip in (True, False):
            check_stream(tokenizer, ids, stream(tokenizer, ids, steps, skip), skip)
    text = "Grüße, 世界 👩‍👩‍👧 ﷽ — naïve façade\n\t𝔘𝔫𝔦𝔠𝔬𝔡𝔢"
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = stream(tokenizer, ids, [1] * len(ids))
    check_stream(tokenizer, ids, texts)
    assert texts[-1] == text
    assert all("\ufffd" not in part for part in texts)
