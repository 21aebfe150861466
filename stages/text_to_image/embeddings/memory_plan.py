"""How much memory the text encoder takes, from shapes alone, and whether its layers stay in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.forecast import Forecast, Outlook
from stages.models.family import Family, TextEncoder
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
    """A way of encoding texts, with the memory that it takes."""

    by_layer: bool  # layers are read from disk for every batch of texts; else all stay in memory
    held: int  # bytes, all the time
    work: int  # bytes, the most in addition
    layer_work: int  # bytes of `work` that one layer takes

    @property
    def peak(self) -> int:
        return self.held + self.work

    @property
    def live_bytes(self) -> int:
        """While more is in use, MLX waits for running operations before it starts others."""
        # Whole: the peak less 1.5 layers on a GPU, less 0.5 on a CPU. By layer: half a layer more than the peak.
        halves = 1 if self.by_layer else 1 - 2 * blocks_in_flight()
        return self.peak + halves * self.layer_work // 2

    @property
    def words(self) -> str:
        return "layer by layer" if self.by_layer else "whole"


def estimate(config: EmbeddingsConfig, family: Family, weights: Path | None, by_layer: bool) -> EncoderPlan:
    """From shapes alone. `weights`: None takes the sizes of `family`."""
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
    """Values that the arrays of one decoder layer hold at once, for one text of `tokens` tokens."""
    # The scores and their softmax are separate arrays.
    scores = 2 * sizes.num_attention_heads * tokens * tokens
    # A CPU frees each array after its last use. On a GPU, all arrays of a layer exist until the layer is done.
    if mx.default_device() == mx.cpu:
        return int(max(scores, 4 * tokens * sizes.intermediate_size))
    hidden = 6 * sizes.hidden_size  # two norms, two outputs, two sums
    queries = 6 * sizes.num_attention_heads * sizes.head_dim  # projected, normalised, rotated; the result, masked, copied
    keys = 4 * sizes.num_key_value_heads * sizes.head_dim  # three of the keys, one of the values
    feed_forward = 4 * sizes.intermediate_size  # gate, its activation, the other factor, the product
    return int(tokens * (hidden + queries + keys + feed_forward) + scores)


def unpacked_layer(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> list[int]:
    """Bytes of each packed weight of a layer once it is unpacked. `shapes`: (shape, bits); 16 bits: not packed."""
    return [shape[0] * shape[1] * itemsize for shape, bits in shapes if bits < 16 and quantize.is_packable(shape)]


def choose_plan(config: EmbeddingsConfig, family: Family, weights: Path | None, budget: int) -> EncoderPlan:
    """As [embeddings] memory says; auto: whole if that fits. Raises ValueError with settings that would fit."""
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
    """Settings of [embeddings] that fit into `budget` bytes, as text; "" if none do."""
    if estimate(config, family, weights, True).peak <= budget:
        return '[embeddings] memory = "layers"'
    for bits in BITS:
        if bits < config.bits and estimate(replace(config, bits=bits), family, weights, True).peak <= budget:
            return f'[embeddings] memory = "layers", bits = {bits}'
    return ""


def load_encoder(family: Family, weights: Path, tokenizer: Path, config: EmbeddingsConfig, by_layer: bool = False) -> TextEncoder:
    arrange = None if config.bits == 16 else lambda name, weight: quantize.pack_if_possible(weight, config.bits)
    found: TextEncoder = family.architecture.load_text_encoder(weights, tokenizer, family, config.precision, arrange, by_layer)
    return found


def forecast(outlook: Outlook) -> Forecast:
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
