"""The figures of the recipe page show what the code computes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from data.research.pages.figures import FIGURES, FOLDER, defaults, loss_weights, noise_levels
from pipeline.plots import TEXT_CHUNK, plotted
from stages.text_to_image.train.config import NoiseConfig
from stages.tuner.diffusion import BASES, WEIGHTS


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_on_disk_shows_what_the_code_computes(name):
    with Image.open(FOLDER / name) as image:
        drawn = json.loads(image.info[TEXT_CHUNK])
        assert image.width > 1400 and len(image.convert("RGB").getcolors(1 << 20)) > 8, "it is blank"
    wanted = plotted(FIGURES[name]().panels)
    assert drawn.keys() == wanted.keys(), "run: make pages"
    for panel, curves in wanted.items():
        assert drawn[panel].keys() == curves.keys(), "run: make pages"
        for curve, (x, y, _) in curves.items():
            np.testing.assert_allclose(drawn[panel][curve][:2], [x, y], rtol=1e-3, atol=1e-6, err_msg="run: make pages")


def test_every_figure_on_disk_is_drawn_by_code():
    assert {path.name for path in FOLDER.iterdir()} == set(FIGURES)


def test_every_distribution_and_every_weight_is_in_a_figure():
    assert set(BASES) < {panel.title for panel in noise_levels().panels}
    assert {panel.title for panel in loss_weights().panels} == set(WEIGHTS) - {"none"}


def test_the_curve_with_our_name_is_that_of_our_defaults_and_of_the_two_trainers_beside_it():
    """The legend puts two other trainers beside us, which is true as long as this is the default."""
    c = NoiseConfig()
    assert (c.base, c.mean, c.std, c.shift) == ("logit_normal", 0.0, 1.0, "resolution")
    assert any("latentmill" in curve.name for panel in defaults().panels for curve in panel.curves)
