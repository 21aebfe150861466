"""[train] steps = "auto": passes over each picture, whatever batch, repeats and images of the class are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schemas.text_to_image import IMAGES
from stages.text_to_image import length
from stages.text_to_image.length import steps_of, warnings
from tests.harness import rows_of
from tests.stages.text_to_image.train.runs import BASE, SHAPES, Run, tables, weights


@pytest.mark.parametrize(
    ("given", "steps"),
    [((50, 24, 1), 1200), ((50, 24, 4), 300), ((30, 5, 1), 500), ((30, 5, 2), 250), ((50, 24, 1, 0.5), 2400), ((75, 7, 2), 263)],
)
def test_steps_are_the_passes_over_all_pictures_at_least_500_draws_divided_by_the_batch(given, steps):
    assert steps_of(*given) == steps


def test_a_run_of_automatic_length_is_to_the_bit_that_of_the_number_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(length, "LEAST", 1)
    transformer = weights(tmp_path / "transformer")
    auto = Run(tmp_path / "auto", transformer, replace(BASE, steps="auto", passes=2.0)).go()
    fixed = Run(tmp_path / "fixed", transformer, replace(BASE, steps=len(SHAPES))).go()
    assert auto.rows == fixed.rows and auto.adapter == fixed.adapter


def test_images_of_the_class_come_on_top_and_repeats_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(length, "LEAST", 1)
    made = tables()
    rows = made["images"].to_pylist()
    of_class = [row | ({"use": "regularisation"} if n < 3 else {"repeats": 10.0}) for n, row in enumerate(rows)]
    config, transformer = replace(BASE, steps="auto", passes=3.0), weights(tmp_path / "transformer")

    def steps(images: list[dict[str, object]]) -> int:
        return int(Run(tmp_path / "run", transformer, config, made | {"images": rows_of(IMAGES, *images)}).task().config.steps)

    assert steps(rows) == -(-3 * 7 // 2)
    assert steps([row | {"repeats": 10.0} for row in rows]) == steps(rows)
    assert steps(of_class) == 3 * 4 * 2 // 2, "four pictures of the subject, and as many draws of the class"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1000, 24, 1, 32), []),
        ((500, 4, 1, 32), []),
        ((3000, 20, 1, 32), ["150 times"]),
        ((1000, 9, 1, 128), ["rank 128"]),
        ((2000, 9, 1, 128), ["222 times", "rank 128"]),
    ],
)
def test_many_passes_and_a_high_rank_with_few_pictures_are_named(given, said):
    found = list(warnings(*given))
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True))
