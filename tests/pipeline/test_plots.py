"""Charts: the axes hold the numbers of their panels, and the PNG carries them."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from pipeline.plots import BLUE, ORANGE, TEXT_CHUNK, Curve, Panel, draw, plotted, save


def test_a_saved_chart_is_not_blank_and_carries_its_numbers(tmp_path):
    panels = [Panel("p", "x", "y", [Curve("c", BLUE, [0, 1], [2.0, 3.00004], [0.1, 0.2])])]
    save(panels, tmp_path / "chart.png", columns=1)
    with Image.open(tmp_path / "chart.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 20)) > 8
        assert json.loads(image.info[TEXT_CHUNK]) == plotted(panels) == {"p": {"c": [[0, 1], [2, 3], [0.1, 0.2]]}}


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


def test_without_matplotlib_the_user_is_told_which_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"^plots need matplotlib, which is not installed: pip install 'latentmill\[plots\]'$"):
        save([Panel("p", "x", "y", [Curve("c", BLUE, [0], [0])])], tmp_path / "chart.png")
