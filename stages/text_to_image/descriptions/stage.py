"""The stage `descriptions`: a vision-language model writes the captions of images that have none.

A caption that exists is never written again: the stage reads caption files only to find out which images have none. Each
caption
is a record batch of its own, so a kill loses at most one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa
from PIL import Image

from schemas.text_to_image.descriptions import DESCRIPTIONS
from schemas.text_to_image.images import IMAGES
from stages.run import Run
from stages.stage import Stage
from stages.text_to_image.caption_files import CaptionSources, make_lookups
from stages.text_to_image.descriptions.config import DescriptionsConfig
from stages.text_to_image.imaging.decode import ImageError, open_image
from stages.text_to_image.imaging.usable import USE, usable_paths

WANTED = ("image_id", "path", "prompt")


class Model(Protocol):
    """`name` and `version` are stored with each caption."""

    name: str
    version: str

    def describe(self, image: Image.Image) -> str:
        """The caption of a picture in mode RGB."""


def wanted_descriptions(run: Run[DescriptionsConfig]) -> pa.Table:
    """One row per usable image for which no file has a caption; none if no model is set."""
    schema = pa.schema([DESCRIPTIONS.batch.field(name) for name in WANTED])
    if not run.config.model:
        return schema.empty_table()
    images, config = run.inputs.rows(IMAGES), run.config
    sources = CaptionSources(config.sources or (), config.extension or (), config.folder or "", config.caption_column or "")
    lookups, _ = make_lookups(run.needs["image_folder"], _paths(images), sources, run.root)
    rows = [
        {"image_id": image_id, "path": paths[0], "prompt": config.prompt}
        for image_id, paths in usable_paths(images).items()
        if not any(lookup(path) for path in paths for lookup in lookups)
    ]
    kept = {
        row["image_id"]: row["path"] for row in run.output.stored.to_pylist()
    }  # a file that was renamed is not captioned again
    return pa.Table.from_pylist([row | {"path": kept.get(row["image_id"], row["path"])} for row in rows], schema=schema)


def _paths(images: pa.Table) -> list[str]:
    return [row["path"] for row in images.to_pylist() if row["use"] != USE]


def describe_images(run: Run[DescriptionsConfig]) -> Iterator[pa.RecordBatch]:
    pending = run.output.pending.to_pylist()
    if not pending:
        if not run.config.model:
            run.report.say("no model is set: set [descriptions] model, and server for a model behind a server")
        return
    # `kept` in `wanted_descriptions` may be the path of a file that was renamed since.
    model, paths = run.reuse("describer", lambda: load_model(run)), usable_paths(run.inputs.rows(IMAGES))
    for done, row in enumerate(pending):
        if run.report.stop():
            return
        run.report.progress(done, len(pending), "images")
        path = paths[row["image_id"]][0]
        began = time.perf_counter()
        try:
            text = " ".join(model.describe(_picture(run, path)).split())
        except (ValueError, ImageError) as error:
            raise ValueError(f"descriptions: {path}: {error} ({done} of {len(pending)} captions are written)") from None
        if not text:
            run.report.say(f"{path}: the model wrote nothing")
            continue
        facts = {"text": text, "model": model.name, "version": model.version, "seconds": time.perf_counter() - began}
        yield pa.RecordBatch.from_pylist([row | facts], schema=DESCRIPTIONS.batch)
    run.report.progress(len(pending), len(pending), "images")


def load_model(run: Run[DescriptionsConfig]) -> Model:
    """A server if [descriptions] `server` is set, else transformers in this process. Raises ValueError if it cannot be loaded."""
    if run.config.server:
        from stages.text_to_image.descriptions.server import ServerModel

        return ServerModel(run.config)
    from stages.text_to_image.descriptions.local import LocalModel

    return LocalModel(run.config, run.root)


def _picture(run: Run[DescriptionsConfig], path: str) -> Image.Image:
    image = open_image(run.needs["image_folder"] / path)
    image.thumbnail((run.config.side, run.config.side), Image.Resampling.LANCZOS)
    return image


def finish_descriptions(run: Run[DescriptionsConfig]) -> Iterator[pa.RecordBatch]:
    if run.output.pending.num_rows:
        pending = set(run.output.pending["image_id"].to_pylist())
        count = sum(image_id in pending for image_id in run.output.stored["image_id"].to_pylist())
        run.report.say(f"{count} captions written; read and change them with: latentmill captions --edit captions.csv")
    yield from ()


STAGE = Stage(
    reads=(IMAGES,),
    writes=DESCRIPTIONS,
    config=DescriptionsConfig,
    needs=("image_folder",),
    wants=wanted_descriptions,
    run=describe_images,
    finish=finish_descriptions,
    divisible=False,
)
