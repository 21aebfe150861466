"""Prompts as token ids, in the chat form that the text encoder was trained on.

A chat template is a program in a file that somebody else wrote: its operations, its length and its time are bounded.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stages.models.family import Family
from stages.untrusted import JSON_BYTES, open_regular, read_json

# The system message that FLUX.2 dev was trained with. The line break after the first "object" belongs to it.
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object relationships, "
    "object\nattribution and actions without speculation."
)


@dataclass(frozen=True)
class Chat:
    settings: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the chat template
    system: str = ""  # system message
    removed: str = ""  # token that is taken out of prompts; without effect if there is no system message
    pad: str = ""  # named in the error message for a tokenizer without a padding token, and not used otherwise

    def messages(self, text: str) -> list[dict[str, Any]]:
        if not self.system:
            return [{"role": "user", "content": text}]
        cleaned = text.replace(self.removed, "") if self.removed else text
        turns = {"system": self.system, "user": cleaned}
        return [{"role": role, "content": [{"type": "text", "text": said}]} for role, said in turns.items()]


CHATS: Mapping[str, Chat] = {  # by the family's text_kind
    "qwen3": Chat({"add_generation_prompt": True, "enable_thinking": False}, pad="<|endoftext|>"),
    # Z-Image: thinking is on, so that no empty thought follows.
    "qwen3_thinking": Chat({"add_generation_prompt": True, "enable_thinking": True}, pad="<|endoftext|>"),
    "qwen3_vl": Chat({"add_generation_prompt": True}, pad="<|endoftext|>"),
    "mistral3": Chat({"add_generation_prompt": False}, SYSTEM_MESSAGE, removed="[IMG]", pad="<pad>"),
}


Result = TypeVar("Result")

TEMPLATE_SECONDS = 5.0  # to fill in or tokenize one prompt, which takes about a millisecond
TEMPLATE_CHARACTERS = 100_000
# Operations that make a text as long as a number says. No chat template of a supported model has one.
GROWING = ("Mul", "Pow", "Mod")
GROWING_NAMES = frozenset({"format", "center", "ljust", "rjust", "zfill", "indent", "wordwrap"})


def check_template(template: Any, folder: Path) -> None:
    """Raise ValueError if a template cannot be parsed, is too long, or could fill the memory with one operation."""
    from jinja2 import Environment, TemplateError, nodes

    where = f"the chat template in {folder}"
    if not isinstance(template, str) or len(template) > TEMPLATE_CHARACTERS:
        raise ValueError(f"{where} must be one text of at most {TEMPLATE_CHARACTERS:,} characters")
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(template)
        kinds = tuple(getattr(nodes, name) for name in GROWING)
        # A template that assigns `loop` could make `loop.index` a text.
        named_loop = any(name.name == "loop" and name.ctx != "load" for name in tree.find_all(nodes.Name))
        growing = [type(node).__name__ for node in tree.find_all(kinds) if named_loop or not _of_a_loop(node)]
        growing += [node.name for node in tree.find_all(nodes.Filter) if node.name in GROWING_NAMES]
        growing += [node.attr for node in tree.find_all(nodes.Getattr) if node.attr in GROWING_NAMES]
    except (TemplateError, RecursionError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{where} cannot be read: {first:.200}") from None
    if growing:
        raise ValueError(f"{where} must not use {growing[0]}, which could make a text of any length")


def _of_a_loop(node: Any) -> bool:
    from jinja2 import nodes

    # `loop.index % x` is a number, which cannot fill the memory. With a text on the left, % inserts values, which can.
    left = getattr(node, "left", None)
    named = isinstance(left, nodes.Getattr) and isinstance(left.node, nodes.Name) and left.node.name == "loop"
    return isinstance(node, nodes.Mod) and named and left is not None and left.attr in ("index", "index0")


def within(seconds: float, function: Callable[[], Result], what: str) -> Result:
    """The result of `function`, run in a thread. Raises ValueError if it raises an error or takes longer."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  (a template may raise anything; native code panics)
            errors.append(error)

    thread = threading.Thread(target=call, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive() and thread.ident is not None:
        # Tells the thread to exit. Native code in it still runs to its end.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        raise ValueError(f"{what} did not end within {seconds:g} s")
    if errors:
        raise ValueError(f"{what} failed: {(str(errors[0]) or type(errors[0]).__name__).splitlines()[0]:.200}") from errors[0]
    return results[0]


@dataclass(frozen=True)
class TokenizedPrompt:
    ids: np.ndarray  # int32, padded as the family says
    real: int  # ids without padding
    dropped: int  # tokens cut off from a prompt that is too long
    first: int = 0  # index of the first id that is not padding


class PromptTokenizer:
    """Prompts as the user's turn of a chat, each with `family.text_tokens` ids, or at most so many if texts differ in rows."""

    def __init__(self, folder: Path, family: Family) -> None:
        """Raises ValueError if the family's text encoder is not supported, or the folder lacks a file or a setting."""
        family.require("text_encoder")
        self.family, self.length, self.padding = family, family.text_tokens, family.text_padding
        self.chat = CHATS[family.text_kind]
        self.tokenizer = _load(folder)
        if self.tokenizer.pad_token_id is None:
            raise ValueError(f"{folder} names no pad_token in tokenizer_config.json; it should be {self.chat.pad}")
        older = folder / "chat_template.json"  # older tokenizers keep their template in a file of its own
        found = read_json(older) if not self.tokenizer.chat_template and older.is_file() else None
        self.template = self.tokenizer.chat_template or (found.get("chat_template") if isinstance(found, dict) else None)
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
        length = self.length
        if self.padding in ("none", "repeated"):
            more = self.padding == "repeated" and self.family.architecture.text_rows(len(kept)) > len(kept)
            length = len(kept) + more
        first = length - len(kept) if self.padding == "start" else 0
        ids_T = np.full(length, self.tokenizer.pad_token_id, np.int32)
        ids_T[first : first + len(kept)] = kept
        return TokenizedPrompt(ids_T, len(kept), len(ids) - len(kept), first)


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
