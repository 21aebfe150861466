"""The SQL views of text_to_image: which images hurt, and tables joined as people join them by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.commands.catalog import open_catalog
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject, digest

BAD = ("bad0.png", "bad1.png", "bad2.png")
IMAGES = 40


def drawn(path, seed: int, steps: int = 300, batch: int = 4) -> FakeProject:
    """A project whose losses depend on noise level, step and image, with three images whose loss is 30 % above the others."""
    random = np.random.default_rng(seed)
    names = [*BAD, *(f"good{n:02}.png" for n in range(IMAGES - len(BAD)))]
    project = FakeProject(path)
    tables.write(project, "images", [{"path": name, "image_id": digest(name)} for name in names])
    rows = []
    for step in range(1, steps + 1):
        for sample in range(batch):
            name = names[((step - 1) * batch + sample) % IMAGES] if step % 2 else names[random.integers(IMAGES)]
            sigma = float(random.uniform(0.02, 0.98))
            expected = (0.2 + 3 * sigma**3) * (0.5 + np.exp(-step / 60)) * (1.3 if name in BAD else 1.0)
            loss = expected * float(np.exp(random.normal(0, 0.25)))
            common = {"step": step, "split": "train", "sample": sample, "image_id": digest(name), "latent_id": digest(name)}
            rows.append(common | {"sigma": sigma, "loss": loss})
    tables.write(project, "train", rows)
    return project


def precision(project: FakeProject, order: str) -> float:
    """The share of bad images among the first three by `order`."""
    first = open_catalog(project).execute(f"select path from hurting order by {order} desc limit 3").fetchall()
    return sum(path in BAD for (path,) in first) / len(BAD)


def test_hurting_finds_bad_images_that_the_raw_mean_hides_behind_the_noise_levels(tmp_path):
    pairs = []
    for seed in range(2):
        project = drawn(tmp_path / str(seed), seed)
        pairs.append((precision(project, "excess"), precision(project, "raw_loss")))
    corrected, raw = (sum(values) / len(values) for values in zip(*pairs, strict=True))
    assert corrected >= 0.9 and corrected > raw, pairs
    assert all(one >= other for one, other in pairs), pairs


def test_hurting_states_how_many_times_the_expected_loss_an_image_has(tmp_path):
    project = drawn(tmp_path, 7, steps=1200)
    rows = open_catalog(project).execute(f"select avg(times_expected) from hurting where path in {BAD}").fetchall()
    assert rows[0][0] == pytest.approx(1.3, abs=0.06)
    others = (
        open_catalog(project).execute(f"select avg(times_expected), sum(draws) from hurting where path not in {BAD}").fetchall()
    )
    assert others[0][0] == pytest.approx(0.98, abs=0.02) and others[0][1] > 4000


def test_losses_that_are_not_finite_or_zero_do_not_count(tmp_path):
    project = FakeProject(tmp_path)
    tables.write(project, "images", [{"path": "a", "image_id": "a"}, {"path": "b", "image_id": "b"}])
    losses = [float("nan"), 0.0, float("inf"), 1.0, 2.0, 1.5]
    rows = [{"step": n, "split": "train", "image_id": "ab"[n % 2], "sigma": 0.5, "loss": loss} for n, loss in enumerate(losses)]
    tables.write(project, "train", rows)
    found = open_catalog(project).execute("select sum(draws), bool_and(isfinite(excess)) from hurting").fetchall()
    assert found == [(3, True)]


def test_train_is_joined_with_path_and_text_a_step_is_one_row_and_previews_have_the_path_of_their_picture(tmp_path):
    catalog = open_catalog(tables.make(tmp_path))
    rows = catalog.execute("select path, text, count(*) from trained where split = 'train' group by all order by all").fetchall()
    assert ("a.jpg", "a red cat", 19) in rows and ("sub/b.png", "a blue dog", 20) in rows
    assert catalog.execute("select count(*) from trained").fetchall() == catalog.execute("select count(*) from train").fetchall()
    assert catalog.execute("select count(*), sum(samples) from steps where split = 'train'").fetchall() == [(40, 40)]
    assert catalog.execute("select samples, loss from steps where split = 'validation' and step = 0").fetchall() == [(2, 4.0)]
    ((file,),) = catalog.execute("select file from previews where step = 40").fetchall()
    assert file == str(tmp_path / "tables" / "samples" / tables.RECIPE / "artifacts" / "previews" / "40.png")
