"""Charts: the axes hold the numbers of their panels, and the PNG carries them."""

import numpy as np

from pipeline.plots import BLUE, ORANGE, Curve, Panel, draw


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
