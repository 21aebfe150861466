"""How a latent is drawn, for previews and for the drawings of a slider: settings, memory, and the model with its adapters."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from stages.memory import DRAWN_AHEAD, READ, Memory, Settings
from stages.models import attention
from stages.models.adapters import linear_name
from stages.models.family import Family, Transformer
from stages.settings import SEEDS, Section, runtime, selects, setting
from stages.text_to_image.memory import smaller_sides
from stages.text_to_image.weights import Packed, load_transformer, meta_transformer, weight_bits
from stages.tuner.adapters.combine import Part, join, weighted
from stages.tuner.adapters.lora import check_fits
from stages.tuner.blockwise.backprop import BlockwiseForward, model_forward
from stages.tuner.blockwise.device import blocks_in_flight
from stages.tuner.memory import frozen_weights, trace
from stages.tuner.weights import BITS, Bits

MULTIPLE = 16  # pixels: widths and heights are multiples of this


@dataclass(frozen=True)
class DrawingConfig(Section):
    """How a model draws: for previews, and for the drawings that a slider is trained on."""

    width: int = selects(
        768,
        "width of a preview, pixels, a multiple of 16; 768 is the larger default training resolution",
        unit="pixels",
        bounds=(16, 4096),
    )
    height: int = selects(768, "height of a preview, pixels, a multiple of 16", unit="pixels", bounds=(16, 4096))
    seeds: tuple[int, ...] = selects(
        (0,), "seeds of the starting noise; each gives one preview per prompt and checkpoint", unit="numbers", bounds=SEEDS
    )
    family: str = setting(
        "",
        "the model that draws: the distilled twin of the project's family needs few steps and no guidance, such as klein-4b for "
        "klein-base-4b; empty: the project's family",
        unrecorded=("",),
    )
    weights: str = selects(
        "", "where the transformer of `family` lies: a folder, a file or a hub id; empty: the family's own", path=True
    )
    steps: int | None = setting(None, "denoising steps; by default the family's number", unit="steps", bounds=(1, 1000))
    guidance: float | None = setting(
        None,
        "guidance scale, how strongly the prompt is followed; by default the family's value",
        unit="factor",
        bounds=(0.0, 100.0),
    )
    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "dtype that the transformer computes in: bfloat16, or float32 on a CPU"
    )
    base_bits: Bits | None = setting(  # noqa: RUF009
        None,
        "bits of a weight of the base's blocks: 16, 8 or 4; by default those of [train], with which the adapter was trained",
        unit="bits",
        unrecorded=(None, 16),
        follows="train.base_bits",
    )
    base_bits_for: Mapping[str, int] | None = setting(
        None,
        "other bits, 16, 8 or 4, by pattern, the longest that matches; by default those of [train], unless base_bits is set here",
        unit="bits",
        unrecorded=(None, {}),
        follows="train.base_bits_for",
        unless="base_bits",
    )
    stream_blocks: bool = runtime(
        False, "keep the weights of the base's blocks on disk and read each block when it is needed; the same pictures"
    )

    def check(self) -> None:
        for name in ("width", "height"):
            value = getattr(self, name)
            if value < MULTIPLE or value % MULTIPLE:
                near = max(1, round(value / MULTIPLE)) * MULTIPLE
                raise ValueError(f"{name} must be a multiple of {MULTIPLE}, such as {near}, got {value}")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different whole numbers >= 0, like [0, 1], got {list(self.seeds)}")
        for pattern, bits in (self.base_bits_for or {}).items():
            if bits not in BITS:
                raise ValueError(f"base_bits_for must give 16, 8 or 4 bits, got {bits} for {pattern!r}")


# The memory that it takes, from shapes alone


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


def evaluations(config: DrawingConfig, family: Family) -> int:
    """Passes of the transformer that a drawing takes."""
    return passes(config, family) * (config.steps or family.sampling_steps)


def cheaper(config: DrawingConfig, family: Family, section: str = "samples") -> Iterator[Settings]:
    yield from ({section: {"base_bits": bits}} for bits in BITS if bits < (config.base_bits or 16))
    yield {section: {"stream_blocks": True}}
    for lower in smaller_sides(min(config.width, config.height), family.architecture.pixels_per_token):
        yield {section: {"width": lower, "height": lower}}


# The transformer


@dataclass(frozen=True)
class Adapters:
    label: str  # in error messages, such as "samples: step 500"
    adapter_id: str = ""  # sha256 of the files; "": the base alone
    # (adapter, strength), whose changes are added; several must be plain LoRAs. Called once a picture is to be drawn.
    files: Callable[[], Sequence[tuple[Path, float]]] = tuple


@dataclass(frozen=True)
class LatentSampler:
    label: str  # in error messages, such as "step 500"
    family: Family
    model: Transformer
    predict: BlockwiseForward  # of `model` with its adapters
    steps: int  # denoising steps
    guidance: float
    negative: mx.array | None  # embedding of the empty prompt, (1, T, J); None: one forward pass per step instead of two

    def draw(
        self,
        text_1TJ: mx.array,
        seed: int,
        width: int,
        height: int,
        stop_after: Callable[[], bool] = lambda: False,
        references: Sequence[mx.array] = (),
    ) -> mx.array | None:
        """A float32 latent (1, channels, height / 16, width / 16); None if `stop_after()` ended it before the last step.

        `text_1TJ`: embedding of the prompt. `references`: latents (1, channels, rows, columns). ValueError if not finite.
        """
        latents = self.family.architecture.draw(
            self.model,
            text_1TJ,
            height,
            width,
            seed=seed,
            steps=self.steps,
            guidance=self.guidance,
            negative_1TJ=self.negative,
            predict=self.predict,
            references=references,
        )
        latent_1Chw = mx.zeros(0)
        for step, latent_1Chw in enumerate(latents, 1):  # noqa: B007  (the last one is the image's)
            if stop_after() and step < self.steps:
                return None
        if not mx.all(mx.isfinite(latent_1Chw)).item():
            raise ValueError(f"{self.label} draws values that are not finite; choose another checkpoint, or lower [train] lr")
        return latent_1Chw


def load_sampler(
    adapters: Adapters,
    transformer: Path,
    family: Family,
    config: DrawingConfig,
    read_negative: Callable[[], mx.array],
    references: Sequence[mx.array] = (),
    folder: Path | None = None,
    copies: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    beneath: Sequence[Part] = (),
    strength_for: Mapping[str, float] | None = None,
) -> LatentSampler:
    """Load the transformer once, a converted copy in `copies` preferred. Raises ValueError if an adapter does not fit.
    `beneath`: adapters that are merged into its weights.
    `read_negative`: called only if a step takes two passes. `references`: the largest to be drawn with, for the memory limit.
    """
    model = meta_transformer(transformer, family)
    parts = read_adapters(adapters, family, model, strength_for)  # before the transformer is loaded
    if not references:
        family = family.without_references()
        present = meta_transformer(transformer, family).linears()
        parts = [part_of(part, present) for part in parts]
    dtype: mx.Dtype = getattr(mx, config.precision)
    held = dtype.size * sum(array.size for arrays, _, _ in parts for array in arrays.values())
    shown, both = [(each.shape[2], each.shape[3]) for each in references], passes(config, family)
    size = (config.width, config.height)
    memory = drawing_memory(family, transformer, config, config.precision, size, both, held, shown)
    model = load_transformer(transformer, family, dtype, config, folder=folder, copies=copies, say=say, beneath=beneath)
    predict = adapted_forward(model, parts)
    predict.live_bytes = memory.live  # while so many are in use, MLX starts no further operation
    steps = family.sampling_steps if config.steps is None else config.steps
    guidance = family.guidance if config.guidance is None else config.guidance
    return LatentSampler(adapters.label, family, model, predict, steps, guidance, read_negative() if both > 1 else None)


def read_adapters(
    adapters: Adapters, family: Family, model: Transformer, strength_for: Mapping[str, float] | None = None
) -> list[Part]:
    """Raises ValueError with the file and a part of it that does not fit `model`, whose weights are not read."""
    parts: list[Part] = []
    for file, strength in adapters.files():
        try:
            arrays, scales = family.architecture.read_adapter(file)
            check_fits(model.linears(), arrays, scales)
        except ValueError as error:
            raise ValueError(f"{adapters.label}: {file} does not fit {family.name}: {error}") from None
        try:
            arrays, scales = weighted(arrays, scales, strength_for)
        except ValueError as error:
            raise ValueError(f"samples.strength_for: {error}") from None
        parts.append((arrays, scales, strength))
    return parts


def part_of(part: Part, linears: Container[str]) -> Part:
    """What an adapter changes of `linears`."""
    arrays, scales, strength = part
    own = {key: value for key, value in arrays.items() if linear_name(key) in linears}
    return own, {name: scale for name, scale in scales.items() if name in linears}, strength


def adapted_forward(model: Transformer, parts: Sequence[Part]) -> BlockwiseForward:
    if len(parts) == 1:
        ((arrays, scales, strength),) = parts
        return model_forward(model, (dict(arrays), dict(scales)), strength)
    return model_forward(model, join(parts) if parts else None)
