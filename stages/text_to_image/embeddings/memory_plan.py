"""How much memory the text encoder takes, from shapes alone, and whether its layers stay in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.forecast import Forecast, Outlook
from stages.models.family import Family
from stages.models.protocols import TextEncoder
from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.stored_embeddings import stored_words
from stages.tuner import quantize
from stages.tuner.blockwise import planner
from stages.tuner.blockwise.device import blocks_in_flight
from stages.tuner.quantize import BITS

ITEMSIZES = {"bfloat16": 2, "float32": 4}
UNFREED = 1  # on a GPU, layers that are done but whose memory is not free yet, beside those in flight (data/bench.jsonl)


@dataclass(frozen=True)
class EncoderPlan:
    """A way of encoding texts, with the memory that it takes. `by_layer` is True if the layers are read from disk for every
    batch of texts. Otherwise all layers stay in memory. `held` is the memory in use all the time, in bytes. `work` is the
    largest additional memory at any time, in bytes. `layer_work` is how much of `work` one layer takes.
    """

    by_layer: bool
    held: int
    work: int
    layer_work: int

    @property
    def peak(self) -> int:
        """The estimated peak memory of encoding texts, in bytes."""
        return self.held + self.work

    @property
    def live_bytes(self) -> int:
        """The memory limit of MLX while texts are encoded, in bytes. If more memory is in use, MLX waits for the
        running operations to end before it starts further operations.

        If all layers are in memory, the limit is `peak` minus `layer_work` times 1.5 on a GPU, and times 0.5 on a CPU. If
        layers are read one at a time, it is `peak` plus half of `layer_work`.
        """
        halves = 1 if self.by_layer else 1 - 2 * blocks_in_flight()
        return self.peak + halves * self.layer_work // 2

    @property
    def words(self) -> str:
        """How the layers of the text encoder are kept, as text. "layer by layer" means that they are read when needed.
        "whole" means that all layers stay in memory.
        """
        return "layer by layer" if self.by_layer else "whole"


def estimate(config: EmbeddingsConfig, family: Family, weights: Path | None, by_layer: bool) -> EncoderPlan:
    """Return an estimate of the memory that encoding texts takes, as an `EncoderPlan` in bytes. It is computed from
    shapes alone. `config` has the settings [embeddings]. `family` is the record of the model family. `weights` is the
    path of the text encoder. If it is None, the sizes come from `family`. `by_layer` is True if the layers are read
    from disk one at a time, and False if all stay in memory.
    """
    sizes, item = family.architecture.text_encoder_sizes(weights, family), ITEMSIZES[config.precision]
    shapes = sizes.shapes(max(family.text_layers))
    layers: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for name, shape in shapes.items():
        layers.setdefault(name.split(".")[1] if name.startswith("layers.") else "", []).append((shape, config.bits))
    outside = planner.weight_bytes(((shape, 16) for shape, _ in layers.pop("")), item)
    per_layer = [planner.weight_bytes(layer, item) for layer in layers.values()]
    first, tokens = next(iter(layers.values())), family.text_tokens
    states = (len(family.text_layers) + 2) * tokens * sizes.hidden_size * item
    layer = layer_values(sizes, tokens) * item + (sum(unpacked_layer(first, item)) if config.bits < 16 else 0)
    if not by_layer:
        present = blocks_in_flight() + (UNFREED if blocks_in_flight() > 1 else 0)
        return EncoderPlan(False, outside + sum(per_layer), states + present * layer, layer)
    texts = config.batch_size * 2 * tokens * sizes.hidden_size * item
    reading = max(per_layer) + item * max(shape[0] * shape[-1] for shape, _ in first)
    return EncoderPlan(True, texts, max(outside, reading + states + layer), layer)


def layer_values(sizes: Any, tokens: int) -> int:
    """Return how many values the arrays of one decoder layer hold at the same time, for one text of `tokens` tokens.
    `sizes` holds the sizes of the decoder, such as `hidden_size`. The result depends on the device: it is larger on a
    GPU than on a CPU.

    On a GPU, all arrays of the layer exist until the layer is done. On a CPU, each array is freed after its last use.
    The attention scores count twice: the scores and their softmax are separate arrays.
    """
    scores = 2 * sizes.num_attention_heads * tokens * tokens
    if mx.default_device() == mx.cpu:
        return int(max(scores, 4 * tokens * sizes.intermediate_size))
    hidden = 6 * sizes.hidden_size  # two norms, two outputs, two sums
    queries = 6 * sizes.num_attention_heads * sizes.head_dim  # projected, normalised, rotated; the result, masked, copied
    keys = 4 * sizes.num_key_value_heads * sizes.head_dim  # three of the keys, one of the values
    feed_forward = 4 * sizes.intermediate_size  # gate, its activation, the other factor, the product
    return int(tokens * (hidden + queries + keys + feed_forward) + scores)


def unpacked_layer(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> list[int]:
    """Return how many bytes each packed (quantised) weight of a layer takes once it is unpacked, as a list with one
    number per packed weight. `shapes` holds a pair `(shape, bits)` for every weight of the layer. `shape` is the shape
    of the unpacked weight. `bits` is the number of bits to which a value is packed; 16 means no packing. `itemsize` is
    the number of bytes of an unpacked value. For example, `shapes` = [((128, 64), 4), ((128, 64), 16)] and
    `itemsize` = 2 give [16384].

    Weights that are not packed are left out. With `bits` below 16, only matrices (outputs, inputs) with `inputs` a
    multiple of 64 are packed.
    """
    return [shape[0] * shape[1] * itemsize for shape, bits in shapes if bits < 16 and quantize.is_packable(shape)]


def choose_plan(config: EmbeddingsConfig, family: Family, weights: Path | None, budget: int) -> EncoderPlan:
    """Decide whether all layers of the text encoder stay in memory, and return the `EncoderPlan`. `config` has the
    settings [embeddings]. Its `memory` is "whole" (all layers), "layers" (one at a time) or "auto" (whole if that
    fits). `family` is the record of the model family. `weights` is the path of the encoder, or None for the sizes of
    `family`. Raises ValueError if the plan needs more than `budget` bytes. The message names settings that would fit.
    """
    plan = estimate(config, family, weights, config.memory == "layers")
    if config.memory == "auto" and plan.peak > budget:
        plan = estimate(config, family, weights, True)
    if plan.peak > budget:
        advice = remedy(config, family, weights, budget)
        would = f"with {advice} it fits" if advice else "no setting makes it fit; choose a smaller family"
        raise ValueError(
            f"embeddings: the text encoder needs about {plan.peak / 1e9:.3g} GB, more than the {budget / 1e9:.3g} GB that it may "
            f"take: {would}"
        )
    return plan


def remedy(config: EmbeddingsConfig, family: Family, weights: Path | None, budget: int) -> str:
    """Return settings of [embeddings] with which the text encoder fits into `budget` bytes. The result is text in the
    form of the settings file. It is empty if no settings fit. `config` has the present settings. `family` is the record
    of the model family. `weights` is the path of the text encoder. If it is None, the sizes of `family` are used.
    """
    if estimate(config, family, weights, True).peak <= budget:
        return '[embeddings] memory = "layers"'
    for bits in BITS:
        if bits < config.bits and estimate(replace(config, bits=bits), family, weights, True).peak <= budget:
            return f'[embeddings] memory = "layers", bits = {bits}'
    return ""


def load_encoder(family: Family, weights: Path, tokenizer: Path, config: EmbeddingsConfig, by_layer: bool = False) -> TextEncoder:
    """Load the text encoder of `family` and return it. `weights` and `tokenizer` are paths. `config` gives the
    precision and the number of bits per weight. If `by_layer` is true, layers are read from disk one at a time.
    Otherwise all layers stay in memory.
    """
    arrange = None if config.bits == 16 else lambda name, weight: quantize.pack_if_possible(weight, config.bits)
    found: TextEncoder = family.architecture.load_text_encoder(weights, tokenizer, family, config.precision, arrange, by_layer)
    return found


def forecast(outlook: Outlook) -> Forecast:
    """Return an estimate of what the stage `embeddings` needs, as a `Forecast` in bytes: its peak memory, and the disk
    space of one text. It is computed from array shapes alone. `outlook` holds the settings, the model family and the
    memory budget. If the memory exceeds the budget, the result also names settings that would fit.
    """
    config, family, weights = outlook.sections["embeddings"], outlook.family, outlook.weights("text_encoder")
    plan = estimate(config, family, weights, config.memory == "layers")
    if config.memory == "auto" and plan.peak > outlook.budget:
        plan = estimate(config, family, weights, True)
    sizes = family.architecture.text_encoder_sizes(weights, family)
    states = len(family.text_layers)
    row_bytes = 2 * family.text_tokens * stored_words(sizes.hidden_size * states, states, config.stored)
    advice = remedy(config, family, weights, outlook.budget) if plan.peak > outlook.budget else ""
    bits = f", {config.bits} bits" if config.bits < 16 else ""
    return Forecast(plan.peak, row_bytes, plan=f"text encoder {plan.words}{bits}", remedy=advice)
