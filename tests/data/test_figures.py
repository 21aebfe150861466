"""The figures on disk are what the code draws."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from data.pages import plot
from data.pages.figures import FIGURES, FOLDER, defaults, draw_all, loss_weights, noise_levels
from data.pages.plot import Chart, Curve, Panel
from stages.text_to_image.train.config import NoiseConfig
from stages.tuner.diffusion.noise import BASES
from stages.tuner.diffusion.weighting import WEIGHTS


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_on_disk_shows_what_the_code_computes(name):
    drawn, wanted = plot.read(FOLDER / name), plot.points(FIGURES[name]())
    assert drawn.keys() == wanted.keys(), "run: make figures"
    for panel, curves in wanted.items():
        assert drawn[panel].keys() == curves.keys(), "run: make figures"
        for curve, points in curves.items():
            np.testing.assert_allclose(drawn[panel][curve], points, rtol=1e-3, atol=1e-6, err_msg="run: make figures")


def test_no_figure_lies_on_disk_that_no_code_draws():
    assert {path.name for path in FOLDER.iterdir()} == set(FIGURES)


def test_every_distribution_and_every_weight_is_in_a_figure():
    assert set(BASES) < {panel.title for panel in noise_levels().panels}
    assert {panel.title for panel in loss_weights().panels} == set(WEIGHTS) - {"none"}


def test_the_curve_that_bears_our_name_is_that_of_our_defaults_and_of_the_two_it_names():
    """The legend puts two peers beside us: true as long as this is the default."""
    c = NoiseConfig()
    assert (c.base, c.mean, c.std, c.shift) == ("logit_normal", 0.0, 1.0, "resolution")
    assert any("latentmill" in curve.name for panel in defaults().panels for curve in panel.curves)


def test_a_drawn_figure_can_be_drawn_again_and_holds_its_points(tmp_path):
    draw_all(tmp_path)
    for name in FIGURES:
        with Image.open(tmp_path / name) as image:
            assert image.width > 1500 and len(image.convert("RGB").getcolors(1 << 20)) > 8
        assert plot.read(tmp_path / name) == plot.points(FIGURES[name]())


def test_a_curve_goes_where_its_points_are_and_stays_in_its_field(tmp_path):
    """A line at half the height, and one that leaves the field."""
    line, steep = Curve("flat", plot.BLUE, [0.0, 1.0], [1.0, 1.0]), Curve("steep", plot.ORANGE, [0.5, 0.5], [0.0, 50.0])
    chart = Chart("t", "s", "x", [Panel("p", [line, steep], 2.0)], columns=1, size=(200, 100))
    plot.save(chart, tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as image:
        pixels = np.array(image.convert("RGB")).astype(int)
    left, top = plot.EDGE + plot.LEFT, plot.EDGE + plot.HEAD + plot.LEGEND + plot.ABOVE
    field = pixels[:, plot.SCALE * left :]
    blue, orange = (np.argwhere(np.abs(field - color).sum(axis=2) < 60) / plot.SCALE for color in (plot.BLUE, plot.ORANGE))
    below = blue[:, 0] > plot.EDGE + plot.HEAD + plot.LEGEND  # past the legend
    assert blue[below, 0].mean() == pytest.approx(top + 50, abs=1)
    assert np.ptp(blue[below, 1]) == pytest.approx(200, abs=3)
    below = orange[:, 0] > plot.EDGE + plot.HEAD + plot.LEGEND
    assert orange[below, 1].mean() == pytest.approx(100, abs=2)
    assert orange[below, 0].min() >= top - 3
