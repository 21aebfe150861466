"""The figures of data/recipe.md, drawn from the code that trains: `make figures`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.pages import plot
from data.pages.plot import Chart, Curve, Panel
from stages.models.flux2.sampling import sigmas
from stages.text_to_image.train.config import NoiseConfig
from stages.tuner.diffusion.noise import BASES, Noise
from stages.tuner.diffusion.weighting import WEIGHTS, weight

FOLDER = Path(__file__).parents[1] / "figures"
TOKENS = {512: 32 * 32, 1024: 64 * 64}  # by the side of a square image, pixels
GRID = (np.arange(240) + 0.5) / 240
TOP = 3.5  # of the densities; three of them have no bound


def noise_levels() -> Chart:
    """Every distribution of sigma, with and without the shift by resolution; and the static shift."""
    panels = [Panel(base, _shifts(base), TOP) for base in BASES]
    return Chart(
        "Noise levels: how often each sigma is trained",
        "Density over sigma, 0 a clean image, 1 pure noise. Numbers in a curve's colour: its mean sigma.",
        "sigma",
        [*panels, Panel("logit_normal, static shift", _static(), TOP)],
        columns=4,
        size=(230, 150),
    )


def _shifts(base: str) -> list[Curve]:
    shifted = Noise(base, shift="resolution")
    return [
        _density("no shift", plot.GREY, Noise(base), 0),
        _density("shift by resolution, 512 px", plot.BLUE, shifted, TOKENS[512]),
        _density("shift by resolution, 1024 px", plot.ORANGE, shifted, TOKENS[1024]),
    ]


def _static() -> list[Curve]:
    factor = NoiseConfig().shift_factor
    return [
        _density("no shift", plot.GREY, Noise("logit_normal"), 0),
        _density(f"static shift {factor:g}", plot.GREEN, Noise("logit_normal", shift="static", factor=factor), 0),
    ]


def _density(name: str, color: plot.Color, noise: Noise, tokens: int) -> Curve:
    mean = np.mean([noise.sigma(u, tokens) for u in (np.arange(2000) + 0.5) / 2000])
    return Curve(name, color, GRID.tolist(), noise.density(GRID, tokens).tolist(), note=f"{mean:.2f}")


def loss_weights() -> Chart:
    """Every weight over sigma."""
    flat = Curve("weight 1", plot.GREY, [0.0, 1.0], [1.0, 1.0])
    names = [name for name in WEIGHTS if name != "none"]
    curves = {name: Curve("loss weight", plot.BLUE, GRID.tolist(), weight(name, GRID).tolist()) for name in names}
    return Chart(
        "Loss weights: how much a sample counts",
        "By its sigma, 0 a clean image, 1 pure noise. sigma_sqrt goes on up to a million.",
        "sigma",
        [Panel(name, [flat, curve], 2.5) for name, curve in curves.items()],
        columns=5,
        size=(180, 140),
    )


def defaults() -> Chart:
    """Where the default settings of the trainers of FLUX.2 put their effort: density times weight."""
    c = NoiseConfig()
    ours = Noise(c.base, c.mean, c.std, c.shift, c.shift_factor)
    static = Noise("logit_normal", shift="static", factor=3.0)
    measured = weight("measured", GRID)
    panels = []
    for side, tokens in TOKENS.items():
        window = sigmas(tokens, 40)[25:40]
        curves = [
            _effort("diffusers, flux-2-swift-mlx", plot.GREY, np.ones_like(GRID)),
            _effort("ai-toolkit", plot.GREEN, measured),
            _effort("SimpleTuner, diffusion-pipe", plot.PURPLE, static.density(GRID, tokens)),
            _effort("latentmill, musubi-tuner, OneTrainer", plot.ORANGE, ours.density(GRID, tokens)),
            Curve("mflux: these 15 levels", plot.BLUE, window, [0.06] * len(window), dots=True),
        ]
        panels.append(Panel(f"{side} px", curves, 3.0))
    return Chart(
        "Where the trainers' defaults for FLUX.2 put their effort",
        "Density of sigma times loss weight, computed from their settings. 0 a clean image, 1 pure noise.",
        "sigma",
        panels,
        columns=2,
        size=(470, 220),
    )


def _effort(name: str, color: plot.Color, height: np.ndarray) -> Curve:
    return Curve(name, color, GRID.tolist(), height.tolist())


FIGURES: dict[str, Callable[[], Chart]] = {
    "noise-levels.png": noise_levels,
    "loss-weights.png": loss_weights,
    "defaults.png": defaults,
}


def draw_all(folder: Path = FOLDER) -> None:
    """Draw every figure into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in FIGURES.items():
        plot.save(chart(), folder / name)
