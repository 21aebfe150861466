"""Parts of models of random weights: numbers from a seed, and small tokenizers in the formats of Qwen3 and of T5."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stages.models.family import TOKENIZER, Family
from stages.models.text.decoder import Qwen3Config

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


def uniform(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float64, from -1 to 1; equal for one name and seed on every machine."""
    # Raw 24-bit words and exact arithmetic: the rounding of a library's random function could change.
    stream = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
    raw = np.random.PCG64(stream).random_raw(int(np.prod(shape)))
    unit: np.ndarray = (raw >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return unit.reshape(shape)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE tokenizer and the chat template of Qwen3. `size` includes the 256 bytes and special tokens."""
    merges = _merges(size - 256 - len(SPECIAL))
    tokens = [*_letters().values(), *("".join(pair) for pair in merges)]
    added = [_added(len(tokens) + i, name, name not in THINKING) for i, name in enumerate(SPECIAL)]
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


def write_word_tokenizer(folder: Path, size: int) -> None:
    """T5's ids and special tokens; lower-cased words and numbers split into characters and frequent pairs (up to `size` - 97)."""
    special = ("<pad>", "</s>", "<unk>")  # T5's ids 0, 1 and 2
    pairs = [a + b for a in "etaoinshrdlu" for b in "etaoinshrdlucmfpgwybvk"]
    pieces = [*special, *map(chr, range(33, 127)), *pairs][:size]
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    double = [*single, {"Sequence": {"id": "B", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    end = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}+"}, "behavior": "Removed", "invert": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(n, token, True) for n, token in enumerate(special)],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split]},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": double, "special_tokens": end},
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {piece: n for n, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in pairs if pair in pieces],
        },
    }
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    write_json(folder / "tokenizer.json", content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": 512}
    write_json(folder / "tokenizer_config.json", settings)


def _added(number: int, token: str, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": special}


def _letters() -> dict[int, str]:
    # How byte-level tokenizers write bytes: printable Latin-1 characters as they are, the others from code point 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (b for b in range(256) if b not in shown)
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def _merges(most: int) -> list[tuple[str, str]]:
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


Gains = Sequence[tuple[str, float]]  # (pattern, gain); that of the first pattern that a weight's name matches counts

BIAS = 0.05  # standard deviation of biases about 0, of norm weights about 1, of latent statistics about their mean
LATENT_VARIANCE = 0.75  # of the patchified latent before its normalisation, measured on photographs

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "dtype": "float32",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}


Component = tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]  # config.json, shapes by name


def write_model(
    folder: Path, family: Family, components: Mapping[str, Component], seed: int, gains: Gains, others: Mapping[str, Any]
) -> None:
    """Components with weights, a tokenizer, and `others`, the content of further JSON files."""
    for component, (config, shapes) in components.items():
        stem = "model" if component == "text_encoder" else "diffusion_pytorch_model"
        write_component(folder / family.folders[component], stem, config, shapes, seed, gains)
    write_tokenizer(folder / family.folders[TOKENIZER], family.text_encoder["vocab_size"])
    for name, content in others.items():
        write_json(folder / name, content)  # the index is last: a folder with it is complete


def scheduler(shift: float, **others: Any) -> dict[str, Any]:
    """The file of diffusers' scheduler; without `others` of one shift for all sizes."""
    kind = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
    return {**kind, "shift": shift, "use_dynamic_shifting": bool(others), **others}


def qwen3(family: Family) -> Component:
    sizes = Qwen3Config.from_dict(family.text_encoder)
    shapes = {f"model.{name}": shape for name, shape in sizes.shapes(sizes.num_hidden_layers).items()}
    return {**family.text_encoder, **QWEN3}, shapes


def write_component(
    folder: Path, stem: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], seed: int, gains: Gains
) -> None:
    """config.json and `stem`.safetensors in the diffusers layout."""
    from safetensors.numpy import save_file

    write_json(folder / "config.json", config)
    arrays = {name: weight(f"{folder.name}.{name}", shape, seed, gains) for name, shape in shapes.items()}
    if "bn.running_mean" in arrays:
        arrays["bn.num_batches_tracked"] = np.array(1, np.int64)
    save_file(arrays, folder / f"{stem}.safetensors", {"format": "pt"})


def weight(name: str, shape: tuple[int, ...], seed: int, gains: Gains) -> np.ndarray:
    """float32 values of "<component>.<name of the weight>", of standard deviation gain / sqrt(inputs). A gain of 1 keeps unit
    variance.
    """

    def drawn(std: float) -> np.ndarray:
        return (uniform(name, shape, seed) * (std * float(np.sqrt(3.0)))).astype(np.float32)

    if name.endswith("running_var"):
        return LATENT_VARIANCE + drawn(BIAS)
    if len(shape) == 1 and name.endswith("weight"):  # a norm
        return 1 + drawn(BIAS)
    if name.endswith(("running_mean", "bias")):
        return drawn(BIAS)
    gain = next(value for pattern, value in gains if re.search(pattern, name))
    return drawn(gain / float(np.sqrt(np.prod(shape[1:]))))
