"""The figures of the recipe page show what the code computes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from data.pages.figures import FIGURES, FOLDER, defaults, loss_weights, noise_levels, write
from pipeline.commands.plots import BLUE, LINE_STYLES, MARKERS, ORANGE, TEXT_CHUNK, Curve, Panel, draw, plotted, save
from stages.text_to_image.train.config import NoiseConfig
from stages.tuner.diffusion.noise import BASES
from stages.tuner.diffusion.weighting import WEIGHTS


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_on_disk_shows_what_the_code_computes(name):
    with Image.open(FOLDER / name) as image:
        drawn = json.loads(image.info[TEXT_CHUNK])
    wanted = plotted(FIGURES[name]().panels)
    assert drawn.keys() == wanted.keys(), "run: make figures"
    for panel, curves in wanted.items():
        assert drawn[panel].keys() == curves.keys(), "run: make figures"
        for curve, (x, y, _) in curves.items():
            np.testing.assert_allclose(drawn[panel][curve][:2], [x, y], rtol=1e-3, atol=1e-6, err_msg="run: make figures")


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


def test_a_figure_is_not_blank_and_carries_its_numbers(tmp_path):
    write(tmp_path)
    for name in FIGURES:
        with Image.open(tmp_path / name) as image:
            assert image.width > 1400 and len(image.convert("RGB").getcolors(1 << 20)) > 8
            assert json.loads(image.info[TEXT_CHUNK]) == plotted(FIGURES[name]().panels)


def test_the_axes_hold_the_numbers_labels_and_limits_of_their_panel():
    level, bars = Curve("level", BLUE, [0, 1], [0.2, 0.8]), Curve("bars", ORANGE, [0, 1], [1.0, 2.0], [0.1, 0.3], joined=False)
    panel = Panel("title", "x, px", "y, GB", [level, bars], (0.0, 2.5), {0.0: "a", 1.0: "b"})
    (axes,) = [axes for axes in draw([panel], columns=1).axes if axes.has_data()]
    assert [line.tolist() for line in axes.lines[0].get_data()] == [[0, 1], [0.2, 0.8]]
    assert [container.get_label() for container in axes.containers] == ["level", "bars"]
    (segments,) = [c.get_segments() for c in axes.containers[1].lines[2]]
    np.testing.assert_allclose([segment[:, 1] for segment in segments], [[0.9, 1.1], [1.7, 2.3]])
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == ("title", "x, px", "y, GB")
    assert axes.get_ylim() == (0.0, 2.5) and [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]


def test_one_legend_serves_all_panels_unless_a_colour_has_two_meanings():
    same = [Panel(str(n), "x", "y", [Curve("one", BLUE, [0, 1], [0, 1])]) for n in range(2)]
    figure = draw(same)
    assert len(figure.legends) == 1 and not any(axes.get_legend() for axes in figure.axes)
    other = Panel("2", "x", "y", [Curve("two", BLUE, [0, 1], [0, 1])])
    figure = draw([same[0], other])
    assert not figure.legends and all(axes.get_legend() for axes in figure.axes)


def test_curves_of_different_colours_differ_in_line_and_marker_too():
    assert len(set(map(str, LINE_STYLES.values()))) == len(LINE_STYLES) == len(set(MARKERS.values()))


def test_without_matplotlib_the_user_is_told_which_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"^plots need matplotlib, which is not installed: pip install 'latentmill\[plots\]'$"):
        save([Panel("p", "x", "y", [Curve("c", BLUE, [0], [0])])], tmp_path / "chart.png")
