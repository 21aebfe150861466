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
from stages.text_to_image.packing import Packed, weight_bits
from stages.text_to_image.samples.config import SamplesConfig
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
    """The estimated memory of drawing previews, in bytes. `held` is the size of the weights and the adapter in memory,
    all the time. `block_work` is the most additional memory for computing one block (layer). `on_disk` is the size of
    the weights that stay on disk. `held` counts only those of them that are in memory at once. `on_disk` is 0 without
    the setting `stream_blocks`.
    """

    held: int
    block_work: int
    on_disk: int = 0

    @property
    def at_once(self) -> int:
        """How many blocks are computed at the same time: one on a CPU, and two on a GPU. If weights are on disk, it is
        one everywhere, because a block is computed before the weights of the block after the next are read.
        """
        return 1 if self.on_disk else blocks_in_flight()

    @property
    def peak(self) -> int:
        """The estimated peak memory of drawing previews, in bytes. It is `held` plus `block_work` for each block that
        is computed at the same time.
        """
        return self.held + self.at_once * self.block_work

    @property
    def live_bytes(self) -> int:
        """A limit of memory in bytes. While this much or more is in use, MLX starts no further work."""
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
    """Estimate the memory of one denoising step of a preview, from array shapes alone. `weights` is the path of the
    transformer. If it is None, the sizes of `family` are used. `packed` says how weights are stored: in how many bits,
    and whether on disk. `precision` is a dtype such as "bfloat16". `size` is (width, height) in pixels. `passes` is the
    number of prompts per step, 1 or 2. `adapter` is the size of the adapter in bytes. `references` has the latent sizes
    of reference images in tokens, as (height, width).
    """
    architecture, dtype = family.architecture, getattr(mx, precision)
    sizes: Any = architecture.transformer_config(weights, family)
    shapes = {name: (shape, weight_bits(name, architecture, packed)) for name, shape in sizes.shapes().items()}
    inside = [shapes[name] for name in shapes if architecture.in_block(name)]
    meta_model = architecture.meta_transformer(sizes, dtype)
    stored = planner.stored_bytes(meta_model.blocks, shapes, dtype.size) if packed.stream_blocks else ()
    grid = size[1] // architecture.pixels_per_token, size[0] // architecture.pixels_per_token
    tokens = sum(each[0] * each[1] for each in (grid, *references))
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
    """Return how many bytes of weights on disk are in memory at once while a model draws. `stored` holds the size of
    every block's weights, in bytes. They are the weights of a block and, on a CPU, those of the next block. On a GPU,
    most of the next block counts. The result is 0 if `stored` is empty.
    """
    share = READ if blocks_in_flight() > 1 else 1
    return max((now + int(share * after) for now, after in pairwise([*stored, 0])), default=0)


def passes(config: SamplesConfig, family: Family) -> int:
    """Return how many prompts a denoising step computes: 2 with classifier-free guidance, else 1. `config` has the
    settings [samples], such as `guidance`. `family` is the record of the model family.
    """
    guidance = family.guidance if config.guidance is None else config.guidance
    return 2 if family.real_cfg and guidance > 1 else 1


def stage_drawing(config: SamplesConfig, outlook: Outlook) -> DrawingMemory:
    """Return the estimated memory of drawing previews in the stage `samples`. `config` holds the stage's settings.
    `outlook` holds the model family and the settings of training. The size of the adapter follows from them.
    """
    family, weights, size = outlook.family, outlook.weights("transformer"), (config.width, config.height)
    architecture = family.architecture
    linears = architecture.meta_transformer(architecture.transformer_config(weights, family), mx.float32).linears()
    targets = choose_targets(linears, outlook.sections["train"])
    values = sum(shape[0] * shape[-1] for target in targets for shape in target.shapes.values())
    adapter = values * getattr(mx, config.precision).size
    return drawing_memory(family, weights, config, config.precision, size, passes(config, family), adapter)


def stage_peak(config: SamplesConfig, outlook: Outlook) -> tuple[int, str]:
    """Return (bytes, work): the estimated peak memory of the stage `samples`, and the work that needs it. The work is
    "drawing" (the transformer) or "decoding" (the autoencoder). `config` has the settings [samples]. `outlook` holds
    the model family, the paths of its weights and the settings of all stages.
    """
    weights, family = outlook.weights("autoencoder"), outlook.family
    decoding = sum(family.architecture.autoencoder_bytes(weights, family, config.height, config.width, 4, False))
    return max((stage_drawing(config, outlook).peak, "drawing"), (decoding, "decoding"))


def forecast(outlook: Outlook) -> Forecast:
    """Estimate the memory and the disk space that the stage `samples` needs to draw preview images. All sizes are in
    bytes. `outlook` holds the settings, the model family and the memory budget. If the memory exceeds the budget, the
    result also names settings that would fit.

    The estimate is computed from array shapes alone.
    """
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
    """Return settings of the section [samples] that make the stage `samples` fit into memory. The result is text such
    as "[samples] base_bits = 4". It is "" if no settings fit. `config` holds the present settings. `outlook.budget` is
    the available memory in bytes. Fewer bits per weight are tried first. Then weights stay on disk. Smaller images come
    last.
    """
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
