"""Contact sheets of all crops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.commands.crops import write_crops
from pipeline.project.project import Project
from stages.text_to_image.sheets import BLANK, CELL, GAP, LABEL
from tests import projects


def test_a_sheet_shows_every_crop_the_most_cropped_first_and_fades_what_is_cut_away(tmp_path: Path, tiny_weights: Path) -> None:
    folder = projects.make(tmp_path / "project", tiny_weights, images=1)
    for number, (size, colour) in enumerate({(96, 96): "blue", (340, 100): "red"}.items()):
        Image.new("RGB", size, colour).save(folder / "images" / f"plain{number}.png")
        (folder / "images" / f"plain{number}.txt").write_text("plain")
    projects.edit(folder, "resolutions = [64, 96]", "resolutions = [64, 96]\nmax_shapes = 1")
    said = projects.latentmill(folder, "crops")
    assert f"wrote {folder / 'exports/crops/64-1.png'} and 1 more" in said
    page = np.asarray(Image.open(folder / "exports/crops/64-1.png"))
    assert page.shape == (GAP + CELL + LABEL + GAP, GAP + 8 * (CELL + GAP), 3)
    wide = page[GAP : GAP + CELL, GAP : GAP + CELL]  # 340 x 100: the middle is trained, the sides are faded
    assert (wide[-20, CELL // 2] == (255, 0, 0)).all() and (wide[-20, 5] == (255, 191, 191)).all()
    others = page[GAP : GAP + CELL, GAP + CELL + GAP :]
    assert ((others == (0, 0, 255)).all(axis=-1)).sum() == CELL * CELL, "the square image is whole"
    (folder / "images" / "plain0.png").write_bytes(b"broken")
    write_crops(Project(folder), tmp_path / "new")
    broken = np.asarray(Image.open(tmp_path / "new" / "64-1.png"))
    assert ((broken == BLANK).all(axis=-1)).sum() >= CELL * CELL
    with pytest.raises(ValueError, match="new must be a new folder, but it has files"):
        write_crops(Project(folder), tmp_path / "new")
