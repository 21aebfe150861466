"""The settings of the stages `samples` and `drawings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stages.settings import SEEDS, Section, runtime, selects, setting
from stages.text_to_image.beneath import BeneathConfig
from stages.text_to_image.imaging.decode import BACKGROUND, parse_colour
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


@dataclass(frozen=True)
class DrawingsConfig(DrawingConfig):
    seeds: tuple[int, ...] = selects(
        (0, 1, 2, 3), "seeds of the starting noise; each gives one drawing per neutral prompt", unit="numbers", bounds=SEEDS
    )


@dataclass(frozen=True)
class SamplesConfig(DrawingConfig):
    checkpoints: str | tuple[int, ...] = selects(
        "last",
        'checkpoints that draw: "last", "all", or a list of steps; a preview takes minutes on a Mac',
        unit="steps",
        bounds=(0, 1_000_000),
    )
    adapter: str = selects(
        "",
        "an adapter file that draws too, beside the checkpoints; also of ai-toolkit, kohya, diffusers, musubi or mflux; "
        "relative to the project",
        path=True,
    )
    strengths: tuple[float, ...] = selects(
        (1.0,),
        "strengths of the adapter, each a preview of its own beside the base, which is strength 0; of a slider: [-2, -1, 1, 2]",
        unit="factors",
        bounds=(-10.0, 10.0),
    )
    average: bool = selects(False, "draw with the moving average of the adapter ([train.ema]) if the checkpoint has one")
    base: bool = selects(True, "also draw with the base model without an adapter, to compare with")
    first_prompts: int = selects(0, "preview prompts to draw, from the first; 0: all", unit="prompts", bounds=(0, 100_000))
    references: tuple[str, ...] = selects(
        (), "pictures that every preview starts from, for an adapter of edit training; relative to the project", path=True
    )
    prompt_references: Mapping[str, tuple[str, ...]] | None = selects(
        None, 'other references for some preview prompts: {"{trigger}, at night" = ["images/control/b.png"]}; []: none'
    )
    background: str | None = selects(
        None, "colour behind transparent pixels of references; by default that of [latents]", follows="latents.background"
    )
    beneath: tuple[BeneathConfig, ...] | None = setting(
        None,
        "adapters that lie beneath what draws, the base included; by default those of [train] that are drawn",
        unrecorded=(None, ()),
        follows="train.beneath",
    )
    strength_for: Mapping[str, float] | None = setting(
        None,
        'other strengths of the adapter by pattern, the longest that matches: {"single_transformer_blocks.*" = 0.5}; 0: left out',
        unit="factor",
        bounds=(-10.0, 10.0),
        unrecorded=(None, {}),
    )
    grid: int = runtime(8, "number of prompts that the grid shows, from the first", unit="prompts", bounds=(1, 1000))

    def check(self) -> None:
        super().check()
        parse_colour(self.background or BACKGROUND)
        if not self.strengths or 0 in self.strengths or len(set(self.strengths)) < len(self.strengths):
            raise ValueError(f"strengths must be different numbers other than 0, like [1.0], got {list(self.strengths)}")
        if isinstance(self.checkpoints, str) and self.checkpoints not in ("all", "last"):
            raise ValueError(f'checkpoints must be "last", "all" or a list of steps like [500, 1000], got "{self.checkpoints}"')
