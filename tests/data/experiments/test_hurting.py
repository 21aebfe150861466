"""The experiment `hurting`: its formula in memory is the view's, and what it plants is what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from data.research.experiments import hurting
from data.research.experiments.hurting import BAD, IMAGES, excess, plant
from pipeline.commands.catalog import open_catalog
from tests.pipeline.commands.test_views import drawn


def test_the_excess_in_memory_is_that_of_the_view(tmp_path):
    project = drawn(tmp_path, 3, steps=200)
    catalog = open_catalog(project)
    found = excess(catalog.execute("select image_id, step, split, sigma, loss from train").to_arrow_table())
    rows = catalog.execute("select image_id, excess, raw_loss from hurting").fetchall()
    assert len(rows) == len(found) == IMAGES
    for image, value, raw in rows:
        assert found[image] == pytest.approx((value, raw), rel=1e-6, abs=1e-9)


def test_three_of_forty_pictures_are_bad_and_the_seed_chooses_them(tmp_path, monkeypatch):
    monkeypatch.setattr(hurting, "SIDE", 32)
    chosen = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(chosen))
        folder.mkdir()
        bad = plant(folder, seed)
        captions = {row["file_name"]: row["text"] for row in map(json.loads, (folder / "metadata.jsonl").open())}
        assert len(captions) == IMAGES and sorted(bad.values()) == sorted(BAD) and bad.keys() < captions.keys()
        (noise,) = (name for name, wrong in bad.items() if wrong == "noise")
        with Image.open(folder / noise) as image:
            assert np.asarray(image).std() > 70
        chosen.append((bad, captions))
    assert chosen[0] == chosen[1] != chosen[2]
