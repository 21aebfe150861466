"""The memory that the text encoder takes, from shapes alone, and whether its layers stay in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.memory import UNFREED, Forecast, Memory, Outlook, Remedy, Settings, changed, cheapest, refusal
from stages.models.family import Family
from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.memory import caption_rows
from stages.text_to_image.stored_embeddings import stored_words
from stages.tuner.blockwise.device import blocks_in_flight
from stages.tuner.memory import weight_bytes
from stages.tuner.weights import BITS, is_packable


def encoder_memory(config: EmbeddingsConfig, family: Family, weights: Path | None, by_layer: bool) -> Memory:
    """`weights`: None takes the sizes of `family`. `by_layer`: layers are read from disk for every batch; else all stay."""
    sizes, item = family.architecture.text_encoder_sizes(weights, family), getattr(mx, config.precision).size
    shapes = sizes.shapes(max(family.text_layers))
    layers: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for name, shape in shapes.items():
        layers.setdefault(name.split(".")[1] if name.startswith("layers.") else "", []).append((shape, config.bits))
    outside = weight_bytes(((shape, 16) for shape, _ in layers.pop("")), item)
    per_layer = [weight_bytes(layer, item) for layer in layers.values()]
    first, tokens = next(iter(layers.values())), family.text_tokens
    states = (len(family.text_layers) + 2) * tokens * sizes.hidden_size * item
    packed = (shape for shape, bits in first if bits < 16 and is_packable(shape))
    layer = layer_values(sizes, tokens) * item + sum(shape[0] * shape[1] * item for shape in packed)
    if by_layer:
        texts = config.batch_size * 2 * tokens * sizes.hidden_size * item
        reading = max(per_layer) + item * max(shape[0] * shape[-1] for shape, _ in first)
        work = max(outside, reading + states + layer)
        return Memory(texts, work, texts + work + layer // 2)
    present = blocks_in_flight() + (UNFREED if blocks_in_flight() > 1 else 0)
    held, work = outside + sum(per_layer), states + present * layer
    # Operations already started still take memory: that of 1.5 layers on a GPU, of 0.5 on a CPU.
    return Memory(held, work, held + work + (1 - 2 * blocks_in_flight()) * layer // 2)


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


def best_plan(config: EmbeddingsConfig, family: Family, weights: Path | None, budget: int) -> tuple[bool, Memory]:
    """Whether to encode layer by layer, as [embeddings] memory says (auto: unless all layers fit), and what that takes."""
    by_layer = config.memory == "layers"
    memory = encoder_memory(config, family, weights, by_layer)
    if config.memory == "auto" and memory.footprint > budget:
        by_layer, memory = True, encoder_memory(config, family, weights, True)
    return by_layer, memory


def find_remedy(config: EmbeddingsConfig, family: Family, weights: Path | None, budget: int) -> Remedy:
    def peak(settings: Settings) -> int:
        return best_plan(changed(config, settings.get("embeddings", {})), family, weights, budget)[1].footprint

    changes = {"memory": "layers"}, *({"bits": bits} for bits in BITS if bits < config.bits)
    return cheapest(peak, budget, ({"embeddings": each} for each in changes))


def choose_plan(config: EmbeddingsConfig, family: Family, weights: Path, budget: int) -> tuple[bool, Memory]:
    """`best_plan`. Raises ValueError with settings that would fit if it needs more than `budget` bytes."""
    by_layer, memory = best_plan(config, family, weights, budget)
    if memory.footprint > budget:
        advice = find_remedy(config, family, weights, budget)
        raise ValueError(refusal("embeddings: the text encoder", memory.footprint, budget, advice))
    return by_layer, memory


def forecast(outlook: Outlook) -> Forecast:
    config, family, weights = outlook.sections["embeddings"], outlook.family, outlook.weights("text_encoder")
    by_layer, memory = best_plan(config, family, weights, outlook.budget)
    sizes, states = family.architecture.text_encoder_sizes(weights, family), len(family.text_layers)
    bits, rows = f", {config.bits} bits" if config.bits < 16 else "", caption_rows(outlook)
    return Forecast(
        memory.footprint,
        row_bytes=2 * sum(rows) * stored_words(sizes.hidden_size * states, states, config.stored) // len(rows),
        how=f"text encoder {'layer by layer' if by_layer else 'whole'}{bits}",
        find_remedy=lambda: find_remedy(config, family, weights, outlook.budget),
        arrays=memory.peak,
    )
