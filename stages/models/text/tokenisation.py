"""Prompts as token ids, in the chat form that the text encoder was trained on.

A chat template is a program in a file that somebody else wrote: its operations, its length and its time are bounded.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from stages.models.family import Family
from stages.models.folders import open_tokenizer, read_object
from stages.untrusted import read_utf8

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from tokenizers import Tokenizer

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


def read_template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The chat template of a tokenizer, where transformers would find it first; None without one."""
    if (file := folder / "chat_template.jinja").exists():
        return read_utf8(file, 4 * TEMPLATE_CHARACTERS)
    # Older tokenizers keep their template in a file of its own, and processors only there.
    found = settings.get("chat_template") or read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        return {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    return found


def compile_template(template: Any, folder: Path) -> Template:
    """Raises ValueError if a template cannot be parsed, is too long, or could fill the memory with one operation."""
    from jinja2 import TemplateError, nodes

    where = f"the chat template in {folder}"
    if not isinstance(template, str) or len(template) > TEMPLATE_CHARACTERS:
        raise ValueError(f"{where} must be one text of at most {TEMPLATE_CHARACTERS:,} characters")
    environment = _environment()
    try:
        tree = environment.parse(template)
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
    return within(TEMPLATE_SECONDS, lambda: environment.from_string(tree), "the chat template")  # constants are computed


def _environment() -> Environment:
    """What transformers gives a chat template."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Names(Namespace):
        def __getattribute__(self, name: str) -> Any:
            # Not from its content: Jinja calls a value's __html__ without the sandbox.
            return object.__getattribute__(self, name) if name.startswith("__") else super().__getattribute__(name)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if isinstance(indent, int) and indent > 16:
            refuse(f"tojson must not indent by {indent}")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = to_json  # Jinja's own writes < as \u003c
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    made.globals |= {"namespace": Names, "dict": lambda *pairs, **named: dict(*pairs, **named)}
    return made


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
        settings = read_object(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in settings:
            settings |= read_object(folder / "special_tokens_map.json")  # of older tokenizers
        tokens = {name: each.get("content") if isinstance(each, dict) else each for name, each in settings.items()}
        self.special = {name: each for name, each in tokens.items() if name.endswith("_token") and isinstance(each, str)}
        self.tokenizer = open_tokenizer(folder / "tokenizer.json")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        _add_tokens(self.tokenizer, settings, self.special.values(), folder)
        self.pad = self.tokenizer.token_to_id(self.special.get("pad_token", ""))
        if self.pad is None:
            raise ValueError(f"{folder} names no pad_token in tokenizer_config.json; it should be {self.chat.pad}")
        template = read_template(folder, settings)
        if not template:
            raise ValueError(f"{folder} has no chat template: chat_template.jinja is missing")
        self.template = compile_template(template, folder)
        self.highest = max(self.tokenizer.get_vocab().values(), default=0)

    def apply_template(self, text: str) -> str:
        given = {"messages": self.chat.messages(text), "tools": None, "documents": None, **self.special, **self.chat.settings}
        return within(TEMPLATE_SECONDS, lambda: self.template.render(given), "the chat template")

    def __call__(self, text: str) -> TokenizedPrompt:
        """A prompt that is too long is cut at its end; a shorter one is padded."""
        formed = self.apply_template(text)
        begin = self.special.get("bos_token")
        complete = begin is not None and formed.startswith(begin)  # a tokenizer would put the first token there once more
        # Of a batch, as `encode` would keep Python's lock, and the time could not be bounded.
        encode = self.tokenizer.encode_batch_fast
        ids = within(TEMPLATE_SECONDS, lambda: encode([formed], add_special_tokens=not complete)[0].ids, "the tokenizer")
        kept = ids[: self.length]
        length = self.length
        if self.padding in ("none", "repeated"):
            more = self.padding == "repeated" and self.family.architecture.text_rows(len(kept)) > len(kept)
            length = len(kept) + more
        first = length - len(kept) if self.padding == "start" else 0
        ids_T = np.full(length, self.pad, np.int32)
        ids_T[first : first + len(kept)] = kept
        return TokenizedPrompt(ids_T, len(kept), len(ids) - len(kept), first)


def _add_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], special: Iterable[str], folder: Path) -> None:
    """What tokenizer_config.json says of tokens takes precedence over tokenizer.json, as in transformers."""
    from tokenizers import AddedToken

    try:
        added = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
        tokenizer.add_tokens([AddedToken(**token) for _, token in added])
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_special_tokens([token for token in special if token not in known])
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"added_tokens_decoder in {folder / 'tokenizer_config.json'} cannot be read: {error}") from None
