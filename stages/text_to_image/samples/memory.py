"""The memory that drawing and decoding take, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.memory import DRAWN_AHEAD, READ, Forecast, Memory, Outlook, Settings, cheapest
from stages.models import attention
from stages.models.family import Family
from stages.text_to_image.memory import smaller_sides, text_rows
from stages.text_to_image.samples.config import DrawingConfig, DrawingsConfig, SamplesConfig
from stages.text_to_image.weights import Packed, weight_bits
from stages.tuner.blockwise.device import blocks_in_flight
from stages.tuner.memory import frozen_weights, trace
from stages.tuner.step import choose_targets
from stages.tuner.weights import BITS

PNG = 1.5  # bytes per pixel of a preview on disk, about


def drawing_memory(
    family: Family,
    weights: Path | None,
    packed: Packed,
    precision: str,
    size: tuple[int, int],
    passes: int,
    adapter: int = 0,
    references: Sequence[tuple[int, int]] = (),
    rows: int | None = None,
) -> Memory:
    """Of one denoising step. `weights`: None takes the sizes of `family`. `size`: (width, height) in pixels. `passes`: prompts
    per step, 1 or 2. `adapter`: bytes. `references`: (height, width) of their latents, in tokens. `rows`: of the longest text;
    None: the most that the family reads.
    """
    architecture, dtype = family.architecture, getattr(mx, precision)
    sizes: Any = architecture.transformer_config(weights, family)
    shapes = {name: (shape, weight_bits(name, architecture, packed)) for name, shape in sizes.shapes().items()}
    model = architecture.meta_transformer(sizes, dtype)
    frozen = frozen_weights(model, shapes, filter(architecture.in_block, shapes), dtype.size, packed.stream_blocks)
    grid = size[1] // architecture.pixels_per_token, size[0] // architecture.pixels_per_token
    tokens = sum(each[0] * each[1] for each in (grid, *references))
    text = architecture.text_rows(family.text_tokens) if rows is None else rows
    # With more tokens, the passes of guidance are computed one after the other.
    together = passes if tokens <= architecture.guided_together else 1
    q_BHSK = mx.zeros((together, sizes.num_attention_heads, tokens + text, sizes.attention_head_dim), dtype)
    inputs = architecture.zero_inputs(sizes, together, grid, text, references)
    blocks = trace(model, inputs, **frozen, scores=attention.forward_score_bytes(q_BHSK))
    # Streamed weights in memory at once: those of a block, and all (CPU) or most (GPU) of the next.
    share = READ if blocks_in_flight() > 1 else 1
    read = max((now + int(share * after) for now, after in pairwise([*blocks.stored, 0])), default=0)
    # A streamed block is computed before the weights of the block after the next are read.
    at_once = 1 if blocks.stored else blocks_in_flight()
    held, work = blocks.weights + read + adapter, blocks.forward_work
    ahead = work // 2 if blocks_in_flight() == 1 else int(min(DRAWN_AHEAD, at_once) * work)
    return Memory(held, at_once * work, held + ahead, sum(blocks.stored))


def passes(config: DrawingConfig, family: Family) -> int:
    """Prompts that a denoising step computes: 2 with classifier-free guidance, else 1."""
    guidance = family.guidance if config.guidance is None else config.guidance
    return 2 if family.real_cfg and guidance > 1 else 1


def stage_memory(outlook: Outlook) -> tuple[Memory, Memory]:
    """Of drawing and of decoding."""
    config: SamplesConfig = outlook.sections["samples"]
    family, weights, size = outlook.family, outlook.weights("transformer"), (config.width, config.height)
    if not config.references and not config.prompt_references:
        family = family.without_references()
    architecture = family.architecture
    linears = architecture.meta_transformer(architecture.transformer_config(weights, family), mx.float32).linears()
    # The adapter is as large as [train] makes it.
    targets = choose_targets(linears, outlook.sections["train"])
    values = sum(shape[0] * shape[-1] for target in targets for shape in target.shapes.values())
    adapter = values * getattr(mx, config.precision).size
    both, rows = passes(config, family), text_rows(outlook)
    drawing = drawing_memory(family, weights, config, config.precision, size, both, adapter, rows=rows)
    decoder = outlook.weights("autoencoder")
    return drawing, architecture.autoencoder_memory(decoder, family, config.height, config.width, 4, False)


def forecast(outlook: Outlook) -> Forecast:
    def peak(settings: Settings) -> int:
        return max(memory.footprint for memory in stage_memory(outlook.changed(settings)))

    config: SamplesConfig = outlook.sections["samples"]
    drawing, decoding = stage_memory(outlook)
    largest = max(drawing, decoding, key=lambda memory: memory.footprint)
    most, part = largest.footprint, "drawing" if largest is drawing else "decoding"
    checkpoints = 1 if config.checkpoints == "last" else None if config.checkpoints == "all" else len(config.checkpoints)
    prompts = len(outlook.sections["captions"].preview_prompts)
    return Forecast(
        most,
        row_bytes=int(PNG * config.width * config.height),
        rows=None if checkpoints is None else (checkpoints * len(config.strengths) + config.base) * prompts * len(config.seeds),
        file_bytes=drawing.on_disk,
        how=f"{config.width} x {config.height} px, {config.base_bits or 16} bits, most in {part}",
        remedy=cheapest(peak, outlook.budget, cheaper(config, outlook.family)) if most > outlook.budget else None,
        arrays=largest.peak,
        size=(config.width, config.height),
    )


def forecast_drawings(outlook: Outlook) -> Forecast | None:
    """None without a slider."""

    def found(outlook: Outlook) -> Memory:
        config: DrawingsConfig = outlook.sections["drawings"]
        family, weights, size = outlook.family.without_references(), outlook.weights("transformer"), (config.width, config.height)
        both, rows = passes(config, family), text_rows(outlook)
        return drawing_memory(family, weights, config, config.precision, size, both, rows=rows)

    config: DrawingsConfig = outlook.sections["drawings"]
    slider, memory = outlook.sections["captions"].slider, found(outlook)
    if slider is None:
        return None
    architecture = outlook.family.architecture
    channels = architecture.transformer_config(outlook.weights("transformer"), outlook.family).latent_channels
    tokens = config.width * config.height // architecture.pixels_per_token**2

    def peak(settings: Settings) -> int:
        return found(outlook.changed(settings)).footprint

    return Forecast(
        memory.footprint,
        row_bytes=2 * channels * tokens,
        rows=len(slider.neutral) * len(config.seeds),
        file_bytes=memory.on_disk,
        how=f"{config.width} x {config.height} px, {config.base_bits or 16} bits",
        remedy=cheapest(peak, outlook.budget, cheaper(config, outlook.family, "drawings"))
        if memory.footprint > outlook.budget
        else None,
        arrays=memory.peak,
        size=(config.width, config.height),
    )


def cheaper(config: DrawingConfig, family: Family, section: str = "samples") -> Iterator[Settings]:
    yield from ({section: {"base_bits": bits}} for bits in BITS if bits < (config.base_bits or 16))
    yield {section: {"stream_blocks": True}}
    for lower in smaller_sides(min(config.width, config.height), family.architecture.pixels_per_token):
        yield {section: {"width": lower, "height": lower}}
