"""Prompts to tokens and tokens to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, prompt: str) -> list[int]:
        """The tokens of a user's message, made ready for an answer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without what only marks its end."""


class ByteTokenizer:
    """One token a byte, after a token that starts every prompt; tokens beyond 255 are not text."""

    START = 256

    def encode(self, prompt: str) -> list[int]:
        return [self.START, *prompt.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        text = bytes(token for token in tokens if token < 256).decode("latin-1")
        return "".join(character if character.isprintable() else "·" for character in text)


class ChatTokenizer:
    """The tokenizer and chat template that `weights.cached` stored in a folder."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._before, self._after = json.loads((folder / "template.json").read_text())

    def encode(self, prompt: str) -> list[int]:
        text = f"{self._before}{prompt}{self._after}"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text.strip()
