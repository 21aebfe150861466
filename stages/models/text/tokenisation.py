"""Prompts as token ids, in the chat form that the text encoder was trained on."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.models.family import Family
from stages.models.text.chat import CHATS
from stages.models.text.template import TEMPLATE_SECONDS, check_template, within
from stages.untrusted import JSON_BYTES, open_regular, read_json


@dataclass(frozen=True)
class TokenizedPrompt:
    ids: np.ndarray  # int32, of fixed length, padded at the end or at the start
    real: int  # ids without padding
    dropped: int  # tokens cut off from a prompt that is too long
    first: int = 0  # index of the first id that is not padding


class PromptTokenizer:
    """Prompts as the user's turn of a chat, each with `family.text_tokens` ids."""

    def __init__(self, folder: Path, family: Family) -> None:
        """Raises ValueError if the family's text encoder is not supported, or the folder lacks a file or a setting."""
        family.require("text_encoder")
        self.length = family.text_tokens
        self.chat = CHATS[family.text_kind]
        self.tokenizer = _load(folder)
        if self.tokenizer.pad_token_id is None:
            raise ValueError(f"{folder} names no pad_token in tokenizer_config.json; it should be {self.chat.pad}")
        self.template = self.tokenizer.chat_template or _older_template(folder)
        if not self.template:
            raise ValueError(f"{folder} has no chat template: chat_template.jinja is missing")
        check_template(self.template, folder)
        self.highest = max(self.tokenizer.get_vocab().values(), default=0)

    def apply_template(self, text: str) -> str:
        messages, settings = self.chat.messages(text), {"chat_template": self.template, **self.chat.settings}
        form = functools.partial(self.tokenizer.apply_chat_template, tokenize=False, **settings)
        found: str = within(TEMPLATE_SECONDS, lambda: form(messages), "the chat template")
        return found

    def __call__(self, text: str) -> TokenizedPrompt:
        """A prompt that is too long is cut at its end; a shorter one is padded."""
        formed = self.apply_template(text)
        begin = self.tokenizer.bos_token
        complete = begin is not None and formed.startswith(begin)  # a tokenizer would put the first token there once more
        tokenize = functools.partial(self.tokenizer, truncation=False, add_special_tokens=not complete, verbose=False)
        ids = within(TEMPLATE_SECONDS, lambda: tokenize(formed)["input_ids"], "the tokenizer")
        kept = ids[: self.length]
        first = self.length - len(kept) if self.chat.pads_left else 0
        ids_T = np.full(self.length, self.tokenizer.pad_token_id, np.int32)
        ids_T[first : first + len(kept)] = kept
        return TokenizedPrompt(ids_T, len(kept), len(ids) - len(kept), first)


def _older_template(folder: Path) -> Any:
    # Older tokenizers keep their template in a file of its own.
    file = folder / "chat_template.json"
    found = read_json(file) if file.is_file() else None
    return found.get("chat_template") if isinstance(found, dict) else None


def _load(folder: Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install torch, which is not needed
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ValueError(f"there is no tokenizer in {folder}: looked for tokenizer.json")
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".txt"):
            open_regular(file, JSON_BYTES).close()
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # the library raises errors of any kind for a damaged file, also panics of its native part
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the tokenizer in {folder} cannot be read: {first:.300}") from None
