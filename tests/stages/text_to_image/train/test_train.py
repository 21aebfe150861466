"""The train stage on tiny random weights: which rows it trains on, and what its rows and its adapter say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest

from schemas.text_to_image import CAPTIONS, LATENTS
from stages.text_to_image.train.config import DataConfig
from stages.text_to_image.train.stage import STAGE
from tests.harness import rows_of
from tests.stages.text_to_image.train.runs import BASE, SHAPES, TEXT_ROWS, Run, tables


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("whole"), transformer, replace(BASE, accumulate=2)).go()


def test_the_order_of_the_tables_rows_does_not_matter(whole, transformer, tmp_path):
    flipped = {name: table.take(list(range(table.num_rows))[::-1]) for name, table in tables().items()}
    run = Run(tmp_path, transformer, whole.config, flipped).go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)
    assert STAGE.snapshot(run.context()).equals(STAGE.snapshot(whole.context()))


def test_there_is_a_row_for_every_wanted_sample_with_everything_that_was_drawn(whole):
    wanted = STAGE.wants(whole.context()).to_pylist()
    assert [(row["step"], row["sample"]) for row in wanted] == [(row["step"], row["sample"]) for row in whole.rows]
    assert {row["epoch"] for row in whole.rows} == {0, 1, 2, 3}
    assert [row["image_id"] for row in whole.rows if row["epoch"] == 0] != [
        row["image_id"] for row in whole.rows if row["epoch"] == 1
    ]
    assert Counter(row["image_id"] for row in whole.rows) == {f"image{n}": 4 for n in range(len(SHAPES))}
    assert set(Counter(row["step"] for row in whole.rows).values()) == {4}
    for row in whole.rows:
        number = row["image_id"].removeprefix("image")
        assert row["latent_id"] == f"latent{number}"
        assert row["caption_id"] in (("nothing",) if row["dropped"] else (f"text{number}", f"other{number}"))
        assert (row["width"], row["height"]) == SHAPES[int(number)]
        assert row["tokens"] == row["width"] * row["height"] // 256 + TEXT_ROWS
        assert 0 < row["sigma"] < 1
        assert 0 < row["loss"] < 20
    assert {row["dropped"] for row in whole.rows} == {True, False}
    assert {row["caption_id"][:4] for row in whole.rows} == {"text", "othe", "noth"}
    for _, row in sorted(whole.stored.items()):
        assert row["seconds"] > row["read_seconds"] >= 0
        assert row["peak_bytes"] > 0


def test_the_samples_of_a_step_draw_different_noise_levels_and_dropouts(transformer, tmp_path):
    config = replace(BASE, batch_size=7, steps=40, caption_dropout=0.5)
    sampler = Run(tmp_path, transformer, config, tables(((64, 64),) * 7)).task().sampler
    steps = [batch for step in range(1, 41) for batch in sampler.step(step)]
    assert all(len({sample.sigma for sample in samples}) == 7 for samples in steps)
    assert len({tuple(sample.dropped for sample in samples) for samples in steps}) > 20
    assert 0.4 < np.mean([sample.dropped for samples in steps for sample in samples]) < 0.6


def test_rows_that_cannot_be_used_are_left_out(tmp_path, transformer):
    made = tables()
    made["buckets"] = replace_row(made["buckets"], 0, rejected="too_small")
    made["latents"] = replace_row(made["latents"], 1, rejected="truncated", shape=[], tensor=[])
    made["images"] = replace_row(made["images"], 2, rejected="duplicate")
    made["captions"] = made["captions"].filter(pa.compute.not_equal(made["captions"]["image_id"], "image3"))
    place = {"width": 96, "height": 64, "crop_x": 10.0, "crop_w": 96.0, "crop_h": 64.0}  # not that of its bucket
    other = rows_of(LATENTS, place | {"image_id": "image4", "latent_id": "old crop", "shape": [1]})
    made["latents"] = pa.concat_tables([made["latents"], other])
    data = Run(tmp_path, transformer, tables=made).task().data
    assert [crop.latent_id for crop in data.crops] == ["latent4", "latent5", "latent6"]


def replace_row(table: pa.Table, at: int, **values: Any) -> pa.Table:
    rows = table.to_pylist()
    rows[at] |= values
    return pa.Table.from_pylist(rows, schema=table.schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"buckets": t["buckets"].slice(0, 0)}, "nothing to train on: of 0 crops"),
        (lambda t: t | {"captions": t["captions"].slice(0, 9)}, "caption_dropout needs the empty caption"),
        (lambda t: t | {"latents": t["latents"].slice(2)}, "2 of 7 crops have no latent; run the stage latents"),
        (lambda t: t | {"embeddings": t["embeddings"].slice(2)}, "2 of 11 captions have no embedding; run the stage embeddings"),
    ],
)
def test_missing_rows_are_an_error_of_one_line(change, message, tmp_path, transformer):
    with pytest.raises(ValueError, match=message) as caught:
        Run(tmp_path, transformer, tables=change(tables())).context()
    assert "\n" not in str(caught.value)


def test_the_header_of_the_adapter_names_the_trigger_and_the_largest_resolution_that_is_trained_at(whole, transformer, tmp_path):
    metadata = mx.load(str(whole.folder / "artifacts" / "adapter.safetensors"), return_metadata=True)[1]
    facts = {"family": "tiny", "resolution": "64x64"}
    assert metadata == facts | {"variant": "lora", "rank": "2", "alpha": "2", "step": "7"}
    made = tables()
    for n, (width, height) in enumerate(SHAPES):
        if (width, height) != (64, 64):
            made["buckets"] = replace_row(made["buckets"], n, resolution=96)
    word = rows_of(CAPTIONS, {"role": "trigger", "caption_id": "word", "text": "ohwx"})
    made["captions"] = pa.concat_tables([made["captions"], word])
    config = replace(BASE, data=DataConfig(resolutions={"64": 1, "96": 1}))
    header = {"family": "tiny", "resolution": "96x96", "trigger": "ohwx"}
    assert Run(tmp_path, transformer, config, made).task().metadata == header
    config = replace(BASE, data=DataConfig(resolutions={"64": 1, "96": 0}))
    assert Run(tmp_path, transformer, config, made).task().metadata == header | {"resolution": "64x64"}
