"""The figures of data/docs/recipe.md, computed from the code that trains and drawn with matplotlib: `make pages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data import DOCS
from pipeline.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, Curve, Panel, save
from stages.text_to_image.families import family
from stages.text_to_image.train.config import NoiseConfig
from stages.tuner.diffusion import BASES, WEIGHTS, Base, SigmaDistribution, weight

FOLDER = DOCS / "figures"
TOKENS = {512: 32 * 32, 1024: 64 * 64}  # image tokens by the side of a square image, pixels
GRID = (np.arange(240) + 0.5) / 240  # the sigmas at which curves are computed
SIGMA = "sigma (0: clean, 1: noise)"
DENSITY_RANGE = (0.0, 3.5)  # three of the densities grow without bound and are cut off


@dataclass(frozen=True)
class Page:
    """The panels of one figure, and the options of `plots.draw`."""

    panels: list[Panel]
    options: Mapping[str, Any] = field(default_factory=dict)


def noise_levels() -> Page:
    """Return the figure of noise levels: the density of every distribution of sigma, without a shift, shifted by
    resolution, and with the static shift.
    """
    panels = [Panel(base, SIGMA, "density", _shifted_by_resolution(base), DENSITY_RANGE) for base in BASES]
    panels.append(Panel("logit_normal, static shift", SIGMA, "density", _static_shift(), DENSITY_RANGE))
    return Page(
        panels,
        {
            "columns": 4,
            "panel_inches": (2.7, 2.3),
            "title": "Noise levels: how often each sigma is trained (above each panel: mean sigma)",
        },
    )


def _shifted_by_resolution(base: Base) -> list[Curve]:
    shifted = SigmaDistribution(base, shift="resolution")
    return [
        _density("no shift", GREY, SigmaDistribution(base), 0),
        _density("shift by resolution, 512 px", BLUE, shifted, TOKENS[512]),
        _density("shift by resolution, 1024 px", ORANGE, shifted, TOKENS[1024]),
    ]


def _static_shift() -> list[Curve]:
    factor = NoiseConfig().shift_factor
    return [
        _density("no shift", GREY, SigmaDistribution("logit_normal"), 0),
        _density(f"static shift {factor:g}", GREEN, SigmaDistribution("logit_normal", shift="static", factor=factor), 0),
    ]


def _density(name: str, color: str, noise: SigmaDistribution, tokens: int) -> Curve:
    mean = np.mean([noise.sigma(u, tokens) for u in (np.arange(2000) + 0.5) / 2000])
    return Curve(name, color, GRID.tolist(), noise.density(GRID, tokens).tolist(), note=f"{mean:.2f}")


def loss_weights() -> Page:
    """Return the figure of loss weights: every loss weight over sigma, beside the constant weight 1."""
    constant = Curve("weight 1", GREY, [0.0, 1.0], [1.0, 1.0])
    names = [name for name in WEIGHTS if name != "none"]
    panels = [
        Panel(name, SIGMA, "loss weight", [constant, Curve("weight", BLUE, GRID.tolist(), weight(name, GRID).tolist())], (0, 2.5))
        for name in names
    ]
    return Page(
        panels,
        {
            "columns": 5,
            "panel_inches": (2.2, 2.1),
            "title": "Loss weights: how much a sample counts, by its sigma (sigma_sqrt rises to a million)",
        },
    )


def defaults() -> Page:
    """Return the figure of defaults: density of sigma times loss weight, with the default settings of each trainer of
    FLUX.2.
    """
    c = NoiseConfig()
    ours = SigmaDistribution(c.base, c.mean, c.std, c.shift, c.shift_factor)
    static = SigmaDistribution("logit_normal", shift="static", factor=3.0)
    architecture = family("klein-base-4b").architecture
    panels = []
    for side, tokens in TOKENS.items():
        levels = architecture.sigmas(tokens, 40)[25:40]  # mflux draws one of these levels of its sampling schedule
        curves = [
            Curve("diffusers, flux-2-swift-mlx", GREY, GRID.tolist(), np.ones_like(GRID).tolist()),
            Curve("ai-toolkit", GREEN, GRID.tolist(), weight("measured", GRID).tolist()),
            Curve("SimpleTuner, diffusion-pipe", PURPLE, GRID.tolist(), static.density(GRID, tokens).tolist()),
            Curve("latentmill, musubi-tuner, OneTrainer", ORANGE, GRID.tolist(), ours.density(GRID, tokens).tolist()),
            Curve("mflux: these 15 levels", BLUE, levels, [0.06] * len(levels), joined=False, marked=True),
        ]
        panels.append(Panel(f"{side} x {side} px", SIGMA, "density x loss weight", curves, (0, 3)))
    return Page(
        panels,
        {"columns": 2, "panel_inches": (5.2, 3.2), "title": "Where the default settings of FLUX.2 trainers put their effort"},
    )


FIGURES: dict[str, Callable[[], Page]] = {
    "noise-levels.png": noise_levels,
    "loss-weights.png": loss_weights,
    "defaults.png": defaults,
}


def write(folder: Path = FOLDER) -> None:
    """Draw every figure into `folder`. Raises ValueError if matplotlib is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in FIGURES.items():
        figure = page()
        save(figure.panels, folder / name, **figure.options)


if __name__ == "__main__":
    write()
