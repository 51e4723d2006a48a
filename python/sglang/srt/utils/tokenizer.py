"""Text to token ids and back, from a Hugging Face directory, without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers


class Tokenizer:
    """A fast tokenizer.

    Parameters
    ----------
    path : str or Path
        Directory with a tokenizer.json and, optionally, a tokenizer_config.json.

    Raises
    ------
    ValueError
        If there is no tokenizer.json, or it cannot be read.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"tokenizer_path: no tokenizer.json in {str(path)!r}; "
                "set skip_tokenizer_init=True to work with token ids alone"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library has no kind of its own
            raise ValueError(
                f"tokenizer_path: {folder / 'tokenizer.json'} cannot be read: {error}"
            ) from error
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        self.eos_token = self._token_text(config.get("eos_token"))
        self.bos_token = self._token_text(config.get("bos_token"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_token_id = self._tokenizer.token_to_id(self.eos_token) if self.eos_token else None
        template_file = folder / "chat_template.jinja"
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        self.chat_template = template_file.read_text() if template_file.is_file() else template

    @staticmethod
    def _token_text(token: str | dict | None) -> str | None:
        return token["content"] if isinstance(token, dict) else token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids that no token has are passed over."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether a token brings no text: one that is not shown, or an id that no token has."""
        if token_id in self._special_ids:
            return skip_special_tokens
        return self._tokenizer.id_to_token(token_id) is None

    def apply_chat_template(
        self, messages: Iterable[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation, to be encoded with ``add_special_tokens=False``.

        Raises
        ------
        ValueError
            If the tokenizer has no chat template.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        return environment.from_string(self.chat_template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
        )


def _raise_exception(message: str) -> Any:
    raise ValueError(message)


class IncrementalDetokenizer:
    """Text of a growing list of token ids.

    Bytes of a character may be spread over several tokens. A step's text is the difference of two
    decodings that start at the same token; an unfinished character is held back.

    Parameters
    ----------
    tokenizer : Tokenizer
    skip_special_tokens : bool
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._text = ""
        self._start = 0
        self._read = 0

    def update(self, ids: Sequence[int]) -> str:
        """Text of `ids`, which begins with the ids of the last call.

        Returns
        -------
        str
            All text so far, without an unfinished character at its end.
        """
        known = self._decode(ids[self._start : self._read])
        full = self._decode(ids[self._start :])
        if len(full) > len(known) and not full.endswith("\ufffd"):
            self._text += full[len(known) :]
            self._start, self._read = self._read, len(ids)
        return self._text

    def finish(self, ids: Sequence[int]) -> str:
        """Text of `ids` with whatever stands at its end."""
        known = self._decode(ids[self._start : self._read])
        return self._text + self._decode(ids[self._start :])[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
