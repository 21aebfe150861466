"""Embeddings with 8 bits per value: they take half the space, they are close to the original values, and every later stage
reads them.
"""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.project.project import Project
from stages.models.text.encoder import widen
from stages.text_to_image.stored_embeddings import LEVELS, pack, stored_words, unpack
from tests import projects

STATES = 3


def words(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_a_value_is_within_half_a_level_of_its_row_and_hidden_state_and_zeros_stay_zero():
    draw = np.random.default_rng(0)
    sizes = np.array([1e-3, 1.0, 400.0])[None, :, None] * draw.uniform(0.1, 10, (50, 1, 1))
    values = (draw.standard_normal((50, STATES, 64)) * sizes).reshape(50, -1)
    values[7] = 0
    stored = words(values)
    packed = pack(stored, STATES)
    assert packed.dtype == np.uint16 and packed.shape == (50, stored_words(STATES * 64, STATES, "int8")) == (50, 102)
    exact, found = (widen(each).reshape(50, STATES, 64) for each in (stored, unpack(packed, STATES)))
    level = np.abs(exact).max(2, keepdims=True) / LEVELS
    assert (np.abs(found - exact) <= 0.5001 * level + np.abs(exact) * 2**-8).all()
    assert (found[7] == 0).all()
    largest = np.abs(exact).argmax(2)[..., None]
    assert np.allclose(np.take_along_axis(found, largest, 2), np.take_along_axis(exact, largest, 2), rtol=2**-8)


def test_a_project_with_embeddings_of_8_bits_trains_and_draws_with_nearly_the_same_values(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "p", tiny_weights, images=2)
    projects.build(folder)
    exact, losses = projects.content(folder, "embeddings"), projects.content(folder, "train")["loss"].to_numpy()
    projects.edit(folder, "[embeddings]", '[embeddings]\nstored = "int8"')
    assert projects.written(projects.build(folder))["latents"] == 0
    found = projects.content(folder, "embeddings")
    assert set(found["dtype"].to_pylist()) == {"int8"} and found["absmax"] == exact["absmax"]
    sizes = [sum(map(len, each["bytes of tensor"].to_pylist())) for each in (found, exact)]
    assert 0.5 < sizes[0] / sizes[1] < 0.6
    assert projects.content(folder, "train")["loss"].to_numpy() == pytest.approx(losses, rel=0.02)
    assert Project(folder).current("samples").rows().num_rows == 4
