"""The settings of the stage `samples`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stages.settings import runtime, selects, setting
from stages.text_to_image.beneath import BeneathConfig
from stages.text_to_image.imaging.decode import BACKGROUND, parse_colour
from stages.text_to_image.sampler import DrawingConfig


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
