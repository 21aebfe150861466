"""The tokenizer of a retriever, from its tokenizer.json: texts to token ids, and token ids to pieces of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextTokenizer:
    """Raises ValueError if tokenizer.json is missing or cannot be read."""

    def __init__(self, folder: Path, *, lower_case: bool) -> None:
        self.lower_case = lower_case
        self.tokenizer = _load(folder / "tokenizer.json" if folder.is_dir() else folder)
        config = folder / "tokenizer_config.json"
        named = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        self.end = self.tokenizer.token_to_id(_content(named.get("eos_token")) or "</s>")
        self.unknown = self.tokenizer.token_to_id(_content(named.get("unk_token")) or "<unk>")

    def encode(self, many: list[str]) -> list[list[int]]:
        """Each list ends with the end token, if there is one. Nothing is cut."""
        found = self.tokenizer.encode_batch([text.lower() for text in many] if self.lower_case else many)
        ids = [each.ids for each in found]
        return [each if self.end is None or (each and each[-1] == self.end) else [*each, self.end] for each in ids]

    def cut(self, ids: list[int], longest: int) -> list[int]:
        """Keeps the last id, the end token."""
        return ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]

    def pieces(self, ids: list[int]) -> list[str]:
        """For display; "<7>" for an id without a text."""
        return [self.tokenizer.id_to_token(each) or f"<{each}>" for each in ids]


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


def _load(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not file.is_file():
        raise ValueError(f"{file} is missing: a retriever needs a tokenizer.json")
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  (the library raises Exception itself)
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from None
    found.no_padding()
    found.no_truncation()
    return found
