"""GGUF files against what MLX reads of them, and damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from stages.models import gguf, weights
from stages.models.text import decoder
from stages.models.text.encoder import DECODERS, TextEncoder
from stages.text_to_image.families import family
from tests import checkpoints

NUMBERS = {kind.name: number for number, kind in gguf.KINDS.items()}
Tensor = tuple[str, tuple[int, ...], int, bytes]


def file_of(tensors: list[Tensor], alignment: int = 32, architecture: str = "flux") -> bytes:
    """Entries are (name, shape, number of the kind, bytes)."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 3)
    head += text("general.alignment") + struct.pack("<II", 4, alignment)
    head += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    head += text("some.list") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    data = b""
    for name, shape, kind, raw in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


def blocks(kind: gguf.Kind, count: int) -> bytes:
    """With finite scales."""
    made = np.random.default_rng(kind.size).integers(0, 256, (count, kind.size), np.uint8)
    half = np.frombuffer(np.float16(0.0123).tobytes(), np.uint8)
    places = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for at in places:
        made[:, at : at + 2] = half
    return made.tobytes()


def of_mlx(path: Path, kind: str) -> np.ndarray:
    found = mx.load(str(path))
    if "a.scales" in found:
        bits = {"Q8_0": 8}.get(kind, 4)
        return np.array(mx.dequantize(found["a.weight"], found["a.scales"], found["a.biases"], group_size=32, bits=bits))
    return np.array(found["a.weight"].astype(mx.float32))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_every_kind_of_block_is_what_mlx_reads(kind: str, tmp_path: Path) -> None:
    found = gguf.KINDS[NUMBERS[kind]]
    raw = blocks(found, 6 * 256 // found.values)
    (tmp_path / "a.gguf").write_bytes(file_of([("a.weight", (3, 512), NUMBERS[kind], raw)]))
    mine = np.array(gguf.read_gguf(tmp_path / "a.gguf")["a.weight"])
    assert mine.shape == (3, 512) and mine.std() > 0
    theirs = by_the_specification(raw, kind) if kind in ("Q4_K", "Q5_K") else of_mlx(tmp_path / "a.gguf", kind)
    np.testing.assert_allclose(mine, theirs.reshape(3, 512), rtol=2e-3, atol=2e-3)


def by_the_specification(raw: bytes, kind: str) -> np.ndarray:
    """One number after another: MLX does not read Q5_K, and of Q4_K only every second group of 32 as the specification has it."""
    made = []
    for at in range(0, len(raw), gguf.KINDS[NUMBERS[kind]].size):
        block = raw[at : at + gguf.KINDS[NUMBERS[kind]].size]
        d, least = np.frombuffer(block[:4], np.float16).astype(np.float32)
        packed, high, low = block[4:16], block[16:48], block[48:] if kind == "Q5_K" else block[16:]
        for i in range(256):
            group = i // 32
            if group < 4:
                scale, offset = packed[group] & 63, packed[group + 4] & 63
            else:
                scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
                offset = packed[group + 4] >> 4 | packed[group] >> 6 << 4
            value = low[group // 2 * 32 + i % 32] >> 4 * (group % 2) & 15
            if kind == "Q5_K":
                value += 16 * (high[i % 32] >> group & 1)
            made.append(d * scale * value - least * offset)
    return np.array(made, np.float32)


TWO = file_of([("a", (8,), 0, bytes(32)), ("b", (8,), 0, bytes(32))])
GOOD = file_of([("a.weight", (4, 32), 8, bytes(4 * 34)), ("b.weight", (8,), 0, bytes(32))])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD[:-40], "is cut short"),
        (GOOD + bytes(9000), "is too long"),
        (GOOD[:60], "header cannot be read"),
        (b"", "header cannot be read|must be a GGUF"),
        (b"GGML" + GOOD[4:], "must be a GGUF file of version 2 or 3"),
        (GOOD[:4] + struct.pack("<IQ", 3, 2**60) + GOOD[16:], "header cannot be read"),
        (file_of([("a.weight", (4, 256), 10, bytes(84 * 4))]), r"a\.weight is Q2_K, which is not read; read are F32, .*Q4_K"),
        (file_of([("a.weight", (4, 31), 8, bytes(200))]), r"a\.weight cannot have the shape \(4, 31\)"),
        (file_of([("a.weight", (2**40, 2**40), 0, bytes(200))]), "cannot have the shape"),
        (file_of([("a", (8,), 0, bytes(32)), ("a", (8,), 0, bytes(32))]), "header cannot be read"),
        (GOOD.replace(struct.pack("<II", 4, 32), struct.pack("<II", 4, 2**31)), "general.alignment must be"),
        (TWO.replace(struct.pack("<IQ", 0, 32), struct.pack("<IQ", 0, 0)), "b overlaps the tensor before it"),
    ],
)
def test_a_damaged_file_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        weights.read_tensors(tmp_path)
    assert "\n" not in str(error.value)


def packed(array: np.ndarray) -> tuple[bytes, np.ndarray]:
    groups = array.reshape(-1, 32)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
    rounded = np.round(groups / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
    raw = np.concatenate([scale.view(np.uint8), rounded.view(np.uint8)], -1).tobytes()
    return raw, (scale.astype(np.float32) * rounded).reshape(array.shape)


def llama_cpp_name(name: str) -> str:
    for table, form in ((decoder.OUTSIDE, "{}"), (decoder.INSIDE, "blk.{}.{}")):
        for new, old in table.items():
            if name == f"{old}.weight":
                return f"{new}.weight"
            if name.startswith("layers.") and name.split(".", 2)[2] == f"{old}.weight":
                return form.format(name.split(".")[1], new) + ".weight"
    raise AssertionError(name)


@pytest.mark.parametrize("kind", ["qwen3", "mistral3"])
def test_a_text_encoder_in_gguf_gives_the_embeddings_of_its_own_unpacked_values(
    kind: str, tiny_weights: Path, tmp_path: Path
) -> None:
    if kind == "qwen3":
        source, record = tiny_weights, family("tiny")
    else:
        source, record = tmp_path / "source", family("dev")
        checkpoints.mistral_encoder().save_pretrained(source / "text_encoder")
        checkpoints.mistral_tokenizer().save_pretrained(source / "tokenizer")
    config = json.loads((source / "text_encoder" / "config.json").read_text())
    sizes = DECODERS[kind].from_dict(config)
    tensors: list[Tensor] = []
    plain: dict[str, mx.array] = {}
    for key, value in mx.load(str(source / "text_encoder" / "model.safetensors")).items():
        name = sizes.weight_name(key)
        if name is None or name.startswith("lm_head"):
            continue
        array = np.array(value.astype(mx.float32))
        whole = array.ndim == 1 or array.shape[-1] % 32
        plain[f"model.{name}"] = mx.array(array if whole else packed(array)[1])
        if kind == "mistral3" and name.endswith(("q_proj.weight", "k_proj.weight")):  # as llama.cpp's converter does
            array = array.reshape(-1, 2, sizes.head_dim // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        tensors.append((llama_cpp_name(name), array.shape, 0 if whole else 8, array.tobytes() if whole else packed(array)[0]))
    for folder in ("gguf", "plain"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "gguf" / "encoder-Q8_0.gguf").write_bytes(file_of([*tensors, ("rope_freqs.weight", (8,), 0, bytes(32))]))
    mx.save_safetensors(str(tmp_path / "plain" / "model.safetensors"), plain)
    ours, theirs = (
        next(TextEncoder(tmp_path / name, source / "tokenizer", record, "float32").encode(["a cat"])).words
        for name in ("gguf", "plain")
    )
    np.testing.assert_array_equal(ours, theirs)
