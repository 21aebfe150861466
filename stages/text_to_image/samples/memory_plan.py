"""How much memory drawing and decoding take, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.forecast import Forecast, Outlook
from stages.models import attention
from stages.models.family import Family
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.weights import Packed, weight_bits
from stages.tuner.blockwise import planner
from stages.tuner.blockwise.device import blocks_in_flight
from stages.tuner.quantize import BITS
from stages.tuner.step import choose_targets

AHEAD = 1.5  # on a GPU, blocks whose working memory may be in use before MLX waits; the work that it has started comes on top
READ = 0.75  # on a GPU, share of the next block read from disk before a block is computed; fits data/bench.jsonl
LOWEST_SIDE = 256  # pixels: no smaller preview is advised
PNG = 1.5  # bytes per pixel of a preview on disk, about


@dataclass(frozen=True)
class DrawingMemory:
    held: int  # bytes in memory all the time: weights and adapter
    block_work: int  # bytes, the most in addition while a block is computed
    on_disk: int = 0  # bytes of streamed weights; `held` counts those of them that are in memory at once

    @property
    def at_once(self) -> int:
        """Blocks that are computed at the same time."""
        # A streamed block is computed before the weights of the block after the next are read.
        return 1 if self.on_disk else blocks_in_flight()

    @property
    def peak(self) -> int:
        return self.held + self.at_once * self.block_work

    @property
    def live_bytes(self) -> int:
        """While so many bytes are in use, MLX starts no further work."""
        if blocks_in_flight() == 1:
            return self.held + self.block_work // 2
        return self.held + int(min(AHEAD, self.at_once) * self.block_work)


def drawing_memory(
    family: Family,
    weights: Path | None,
    packed: Packed,
    precision: str,
    size: tuple[int, int],
    passes: int,
    adapter: int = 0,
    references: Sequence[tuple[int, int]] = (),
) -> DrawingMemory:
    """The memory of one denoising step, from shapes alone.

    `weights`: None takes the sizes of `family`. `size`: (width, height) in pixels. `passes`: prompts per step, 1 or 2.
    `adapter`:
    bytes. `references`: (height, width) of their latents, in tokens.
    """
    architecture, dtype = family.architecture, getattr(mx, precision)
    sizes: Any = architecture.transformer_config(weights, family)
    shapes = {name: (shape, weight_bits(name, architecture, packed)) for name, shape in sizes.shapes().items()}
    inside = [shapes[name] for name in shapes if architecture.in_block(name)]
    meta_model = architecture.meta_transformer(sizes, dtype)
    stored = planner.stored_bytes(meta_model.blocks, shapes, dtype.size) if packed.stream_blocks else ()
    grid = size[1] // architecture.pixels_per_token, size[0] // architecture.pixels_per_token
    tokens = sum(each[0] * each[1] for each in (grid, *references))
    # With more tokens, the passes of guidance are computed one after the other.
    together = passes if tokens <= architecture.guided_together else 1
    rows = tokens + family.text_tokens
    q_BHSK = mx.zeros((together, sizes.num_attention_heads, rows, sizes.attention_head_dim), dtype)
    found = planner.estimate(
        meta_model,
        architecture.zero_inputs(sizes, together, grid, family.text_tokens, references),
        planner.weight_bytes(shapes.values(), dtype.size) - sum(stored),
        [],
        0,
        unpacked=planner.unpacked_bytes(inside, dtype.size),
        scores=attention.forward_score_bytes(q_BHSK),
        stored=stored,
    )
    return DrawingMemory(found.weights + stored_at_once(stored) + adapter, found.forward_peak, sum(stored))


def stored_at_once(stored: Sequence[int]) -> int:
    """Bytes of streamed weights in memory at once: those of a block, and all (CPU) or most (GPU) of the next."""
    share = READ if blocks_in_flight() > 1 else 1
    return max((now + int(share * after) for now, after in pairwise([*stored, 0])), default=0)


def passes(config: SamplesConfig, family: Family) -> int:
    """Prompts that a denoising step computes: 2 with classifier-free guidance, else 1."""
    guidance = family.guidance if config.guidance is None else config.guidance
    return 2 if family.real_cfg and guidance > 1 else 1


def stage_drawing(config: SamplesConfig, outlook: Outlook) -> DrawingMemory:
    family, weights, size = outlook.family, outlook.weights("transformer"), (config.width, config.height)
    architecture = family.architecture
    linears = architecture.meta_transformer(architecture.transformer_config(weights, family), mx.float32).linears()
    # The adapter is as large as [train] makes it.
    targets = choose_targets(linears, outlook.sections["train"])
    values = sum(shape[0] * shape[-1] for target in targets for shape in target.shapes.values())
    adapter = values * getattr(mx, config.precision).size
    return drawing_memory(family, weights, config, config.precision, size, passes(config, family), adapter)


def stage_peak(config: SamplesConfig, outlook: Outlook) -> tuple[int, str]:
    """(bytes, "drawing" or "decoding"): the peak of the stage, and the part that needs it."""
    weights, family = outlook.weights("autoencoder"), outlook.family
    decoding = sum(family.architecture.autoencoder_bytes(weights, family, config.height, config.width, 4, False))
    return max((stage_drawing(config, outlook).peak, "drawing"), (decoding, "decoding"))


def forecast(outlook: Outlook) -> Forecast:
    config: SamplesConfig = outlook.sections["samples"]
    peak, part = stage_peak(config, outlook)
    size = f"{config.width} x {config.height} px, {config.base_bits or 16} bits, most in {part}"
    checkpoints = 1 if config.checkpoints == "last" else None if config.checkpoints == "all" else len(config.checkpoints)
    prompts = len(outlook.sections["captions"].preview_prompts)
    rows = None if checkpoints is None else (checkpoints + config.base) * prompts * len(config.seeds)
    advice = remedy(config, outlook) if peak > outlook.budget else ""
    files = stage_drawing(config, outlook).on_disk if config.stream_blocks else 0
    return Forecast(peak, int(PNG * config.width * config.height), rows, files, size, advice)


def remedy(config: SamplesConfig, outlook: Outlook) -> str:
    """Settings of [samples] that fit, as text: fewer bits, else weights on disk too, else smaller images too. "" if none fit."""
    fewer = [bits for bits in BITS if bits < (config.base_bits or 16)]
    for bits in fewer:
        if stage_peak(replace(config, base_bits=bits), outlook)[0] <= outlook.budget:
            return f"[samples] base_bits = {bits}"
    packed = f"base_bits = {fewer[-1]}, " if fewer else ""
    least = replace(config, base_bits=fewer[-1]) if fewer else config
    if stage_peak(replace(least, stream_blocks=True), outlook)[0] <= outlook.budget:
        return f"[samples] {packed}stream_blocks = true"
    streamed = replace(least, stream_blocks=True)
    step = outlook.family.architecture.pixels_per_token
    for side in range(min(config.width, config.height) // step * step - step, LOWEST_SIDE - 1, -step):
        if stage_peak(replace(streamed, width=side, height=side), outlook)[0] <= outlook.budget:
            return f"[samples] {packed}stream_blocks = true, width = {side}, height = {side}"
    return ""
