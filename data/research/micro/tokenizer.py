"""Train a byte-level tokenizer of about a thousand tokens on captions; it is saved as Qwen2's with Qwen3's chat template.

Equal captions give equal files. In names: N captions, T tokens, padding included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

# The prompt form. stages/models/random_model.py has it too; a test compares the two.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
THINKING = ("<think>", "</think>")  # never split, but not special in Qwen3's tokenizer
CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
FRAME = ("user", "assistant", "\n", "\n\n")  # texts around a caption, repeated until they become whole tokens
REPEATS = 1000


def train(captions: Iterable[str], size: int, folder: Path) -> None:
    """Train a tokenizer of `size` tokens on `captions`, and write it into `folder`. The number includes special tokens."""
    learner = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(CUT), "isolated")
    learner.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    learner.train_from_iterator([*captions, *(FRAME * REPEATS)], trainer)
    found = json.loads(learner.to_str())
    added = [_added(len(found["model"]["vocab"]) + i, token) for i, token in enumerate(SPECIAL)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": found["pre_tokenizer"],
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": found["model"]["vocab"], "merges": found["model"]["merges"]},
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "added_tokens_decoder": {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _added(number: int, token: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": token not in THINKING}


class Prompts:
    """Turns captions into tokens in FLUX.2 klein's prompt form: one user turn, thinking off, padded on the right to `length`."""

    def __init__(self, folder: Path, length: int) -> None:
        from transformers import AutoTokenizer

        self.length = length
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        # The template is slow and only adds text around the caption, so it is applied once.
        self.before, self.after = self.form("CAPTION").split("CAPTION")

    def form(self, caption: str) -> str:
        """Apply the chat template to a caption."""
        turn = [{"role": "user", "content": caption}]
        made: str = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        return made

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Return token ids (N,T), int64, and a mask (N,T) that is False for padding. Longer captions are cut off at the end."""
        found = self.tokenizer([f"{self.before}{caption}{self.after}" for caption in captions])["input_ids"]
        tokens_NT = torch.full((len(found), self.length), self.tokenizer.pad_token_id)
        real_NT = torch.zeros(len(found), self.length, dtype=torch.bool)
        for n, ids in enumerate(found):
            kept = ids[: self.length]
            tokens_NT[n, : len(kept)] = torch.tensor(kept)
            real_NT[n, : len(kept)] = True
        return tokens_NT, real_NT
