"""A byte-level BPE tokenizer in Qwen3's file format, for models of random weights. It has merges for a few words."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
THINKING = ("<think>", "</think>")  # never split, but not special tokens in Qwen3's tokenizer
# How Qwen2 and Qwen3 split a text before they merge bytes: the pattern of their tokenizer.json.
CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Tokens of the chat template; then the words of plain captions, each of which becomes one token with its leading space.
FRAME = ("user", "assistant", "\n\n")
WORDS = """a an the of in on at with and from by to for under over behind above near beside its his her is are two three
photo photograph picture drawing painting icon emoji clip art vector flat glossy vintage sepia style black white red green
blue yellow orange purple pink brown gray gold silver dark bright pale small big large tiny old young new round long open
cat dog fox bird horse fish frog bear face head eyes man woman child children people person hand tree trees flower flowers
leaf grass hill mountain mountains river sea shore sky cloud clouds sun moon star stars night day snow rain water fire house
boat ship car plane bicycle rocket chair table cup box book road street city garden wall window door roof wooden stone metal
glass paper wearing standing sitting flying sailing running seen front side top background close-up portrait view scene space
light shadow fruit apple lemon bread cake hat coat"""

# One user turn in Qwen3's form. An empty thought follows if thinking is off.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def write_json(path: Path, content: Any) -> None:
    """Indented, with sorted keys. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, size: int) -> None:
    """The tokenizer's files and the chat template in Qwen3's format. `size` includes the 256 bytes and special tokens."""
    merges = _merges(size - 256 - len(SPECIAL))
    tokens = [*_letters().values(), *("".join(pair) for pair in merges)]
    added = [_added(len(tokens) + i, name) for i, name in enumerate(SPECIAL)]
    cut = {"type": "Split", "pattern": {"Regex": CUT}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "added_tokens_decoder": {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added},
    }
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _added(number: int, token: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": token not in THINKING}


def _letters() -> dict[int, str]:
    # How byte-level tokenizers write bytes: printable Latin-1 characters as they are, the others from code point 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (b for b in range(256) if b not in shown)
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def _merges(most: int) -> list[tuple[str, str]]:
    """Learned from `FRAME` and `WORDS` (with a leading space): the most frequent pair, of equals the first."""
    letters = _letters()
    words = [*FRAME, *(" " + word for word in WORDS.split())]
    split = [[letters[b] for b in word.encode()] for word in words]
    found: list[tuple[str, str]] = []
    while len(found) < most:
        pairs = Counter(pair for word in split for pair in pairwise(word))
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        found.append(best)
        split = [_join(word, best) for word in split]
    return found


def _join(word: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for token in word:
        if joined and (joined[-1], token) == pair:
            joined[-1] += token
        else:
            joined.append(token)
    return joined
