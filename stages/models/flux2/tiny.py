"""A tiny FLUX.2 klein, made here: the true architecture and file layout, seeded random weights.

Its folder is what diffusers would have saved, so diffusers loads it too. It knows nothing and draws noise; it is there so
that every stage can run anywhere, in seconds. Numbers come from a bit generator's raw stream and exact arithmetic:
one seed gives the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stages.models.family import Family
from stages.models.flux2.autoencoder import AutoencoderConfig
from stages.models.flux2.sizes import TINY_AUTOENCODER, TINY_QWEN3, TINY_TRANSFORMER
from stages.models.flux2.transformer import Flux2Config
from stages.models.text.qwen3 import Qwen3Config

Shapes = Mapping[str, tuple[int, ...]]

# Standard deviation of a weight times the square root of its inputs, by the first pattern that its name matches.
# 1 keeps a unit variance; the gains hold every stream near it through depth and the outputs in their natural range.
GAINS: tuple[tuple[str, float], ...] = (
    (r"embed_tokens", 8.0),  # a table, not a product: 8 / sqrt(64) is a unit row
    (r"_embedder\.linear", 2.0),  # a time embedding of unit variance, past a sinusoid of half that and two SiLUs
    (r"modulation", 0.6),  # shifts, scales and gates
    (r"norm_out", 0.2),
    (r"proj_out", 0.7),  # a velocity of about the size of noise
    (r"encoder\.conv_out", 1.5),  # latents of about unit variance after the statistics below
    (r"decoder\.conv_out", 0.7),  # pixels mostly within -1 to 1
    (r"", 1.0),
)
BIAS = 0.05  # standard deviation of biases, of the weights of norms about 1, of statistics about theirs
LATENT_VARIANCE = 0.75  # of the packed latent before its normalisation, as measured on photographs

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
THINKING = ("<think>", "</think>")  # not special to Qwen3's tokenizer, only never split
# How Qwen2 and Qwen3 cut a text before merging bytes; a fact of their tokenizer.json.
CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What the prompt form needs, whole; then the words of plain captions, with their leading space.
FRAME = ("user", "assistant", "\n\n")
WORDS = """a an the of in on at with and from by to for under over behind above near beside its his her is are two three
photo photograph picture drawing painting icon emoji clip art vector flat glossy vintage sepia style black white red green
blue yellow orange purple pink brown gray gold silver dark bright pale small big large tiny old young new round long open
cat dog fox bird horse fish frog bear face head eyes man woman child children people person hand tree trees flower flowers
leaf grass hill mountain mountains river sea shore sky cloud clouds sun moon star stars night day snow rain water fire house
boat ship car plane bicycle rocket chair table cup box book road street city garden wall window door roof wooden stone metal
glass paper wearing standing sitting flying sailing running seen front side top background close-up portrait view scene space
light shadow fruit apple lemon bread cake hat coat"""

# One user turn as Qwen3 writes it; thinking is left open only where it is asked for.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)

SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "time_shift_type": "exponential",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "dtype": "float32",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
INDEX = {
    "_class_name": "Flux2KleinPipeline",
    "is_distilled": False,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}


def write_random_weights(folder: Path, family: Family) -> None:
    """Write a complete model of random weights into `folder`, in the diffusers layout. `family.seeded` is the seed."""
    assert family.seeded is not None, f"{family.name} has weights of its own"
    make(folder, family.seeded)


def make(folder: Path, seed: int) -> None:
    """Write the whole model below `folder`; model_index.json comes last, so where it is, the rest is."""
    flux2 = Flux2Config.from_dict(TINY_TRANSFORMER)
    _component(
        folder / "transformer",
        "diffusion_pytorch_model",
        _class("Flux2Transformer2DModel", TINY_TRANSFORMER),
        flux2.shapes(),
        seed,
    )
    autoencoder = AutoencoderConfig.from_dict(TINY_AUTOENCODER)
    _component(
        folder / "vae", "diffusion_pytorch_model", _class("AutoencoderKLFlux2", TINY_AUTOENCODER), autoencoder.shapes(), seed
    )
    qwen3 = Qwen3Config.from_dict(TINY_QWEN3)
    shapes = {f"model.{name}": shape for name, shape in qwen3.shapes(qwen3.num_hidden_layers).items()}
    _component(folder / "text_encoder", "model", {**TINY_QWEN3, **QWEN3}, shapes, seed)
    _tokenizer(folder / "tokenizer", qwen3.vocab_size)
    _json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _json(folder / "model_index.json", INDEX)


def _class(name: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"_class_name": name, **sizes}


def _json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


# Weights


def _component(folder: Path, stem: str, config: Mapping[str, Any], shapes: Shapes, seed: int) -> None:
    from safetensors.numpy import save_file

    _json(folder / "config.json", config)
    arrays = {name: weight(f"{folder.name}.{name}", shape, seed) for name, shape in shapes.items()}
    if "bn.running_mean" in arrays:
        arrays["bn.num_batches_tracked"] = np.array(1, np.int64)
    save_file(arrays, folder / f"{stem}.safetensors", {"format": "pt"})


def weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One tensor, float32, a function of its name, its shape and the seed."""
    if name.endswith("running_var"):
        return LATENT_VARIANCE + _uniform(name, shape, seed, BIAS)
    if name.endswith("running_mean"):
        return _uniform(name, shape, seed, BIAS)
    if len(shape) == 1 and name.endswith("weight"):  # of a norm
        return 1 + _uniform(name, shape, seed, BIAS)
    if name.endswith("bias"):
        return _uniform(name, shape, seed, BIAS)
    gain = next(value for pattern, value in GAINS if re.search(pattern, name))
    return _uniform(name, shape, seed, gain / float(np.sqrt(np.prod(shape[1:]))))


def _uniform(name: str, shape: tuple[int, ...], seed: int, std: float) -> np.ndarray:
    """Evenly spread about 0 with that standard deviation: raw 24-bit words, so that no library's rounding enters."""
    stream = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
    raw = np.random.PCG64(stream).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return (unit * (std * float(np.sqrt(3.0)))).astype(np.float32).reshape(shape)


# Tokenizer: bytes and merges learnt from the words above


def _tokenizer(folder: Path, size: int) -> None:
    merges = _merges(size - 256 - len(SPECIAL))
    pieces = [*_letters().values(), *("".join(pair) for pair in merges)]
    added = [_added(len(pieces) + i, token) for i, token in enumerate(SPECIAL)]
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
            "vocab": {piece: i for i, piece in enumerate(pieces)},
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
    _json(folder / "tokenizer.json", content)
    _json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _added(number: int, token: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": token not in THINKING}


def _letters() -> dict[int, str]:
    """A visible letter for every byte, as byte-level tokenizers have it: itself where it shows, else one from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (b for b in range(256) if b not in shown)
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def _merges(most: int) -> list[tuple[str, str]]:
    """Byte-pair merges: again and again the commonest pair, of equals the first in order, until every word is one piece."""
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
    """The word with every occurrence of the pair made one piece."""
    joined: list[str] = []
    for piece in word:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined
