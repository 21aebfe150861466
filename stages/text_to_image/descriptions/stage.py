"""The stage `descriptions`: a vision-language model writes the captions of images that have none.

A caption that exists is never written again: the stage reads caption files only to find out which images have none. Each caption
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
from stages.stage import Stage, StageContext
from stages.text_to_image.caption_files.lookup import CaptionSources, make_lookups
from stages.text_to_image.descriptions.config import DescriptionsConfig
from stages.text_to_image.imaging.decode import ImageError, open_image
from stages.text_to_image.imaging.references import USE
from stages.text_to_image.imaging.usable import usable_paths

WANTED = ("image_id", "path", "prompt")


class Model(Protocol):
    """A vision-language model that writes captions. `name` and `version` identify the model. They are stored with each
    caption.
    """

    name: str
    version: str

    def describe(self, image: Image.Image) -> str:
        """Return the caption of `image`, a PIL image in mode RGB."""


def wanted_descriptions(ctx: StageContext) -> pa.Table:
    """Return the images that need a caption by a model, one row per image. These are the usable images for which no
    caption is found in a file. The columns are `image_id`, `path` and `prompt`. `ctx` is the stage's context: its input
    tables and settings. If no model is set, the table is empty. Raises ValueError if no image is usable, or if a file
    with captions cannot be read.
    """
    schema = pa.schema([DESCRIPTIONS.batch.field(name) for name in WANTED])
    if not ctx.config.model:
        return schema.empty_table()
    images, config = ctx.rows(IMAGES), ctx.config
    sources = CaptionSources(config.sources or (), config.extension or (), config.folder or "", config.caption_column or "")
    lookups, _ = make_lookups(ctx.need("image_folder"), _paths(images), sources, ctx.root)
    rows = [
        {"image_id": image_id, "path": paths[0], "prompt": config.prompt}
        for image_id, paths in usable_paths(images).items()
        if not any(lookup(path) for path in paths for lookup in lookups)
    ]
    kept = {row["image_id"]: row["path"] for row in ctx.stored.to_pylist()}  # a file that was renamed is not captioned again
    return pa.Table.from_pylist([row | {"path": kept.get(row["image_id"], row["path"])} for row in rows], schema=schema)


def _paths(images: pa.Table) -> list[str]:
    return [row["path"] for row in images.to_pylist() if row["use"] != USE]


def describe_images(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Let a model caption the pending images (those without a stored caption). Yield one record batch per image, with
    one row. `ctx` is the stage's context: its tables and settings. Captions that were yielded before an error are kept.
    Raises ValueError if the model cannot be loaded, if an image cannot be read, or if the server fails.
    """
    pending = ctx.pending.to_pylist()
    if not pending:
        if not ctx.config.model:
            ctx.say("no model is set: set [descriptions] model, and server for a model behind a server")
        return
    model, paths = ctx.reuse("describer", lambda: load_model(ctx)), usable_paths(ctx.rows(IMAGES))
    for done, row in enumerate(pending):
        if ctx.stop():
            return
        ctx.progress(done, len(pending), "images")
        path = paths[row["image_id"]][0]
        began = time.perf_counter()
        try:
            text = " ".join(model.describe(_picture(ctx, path)).split())
        except (ValueError, ImageError) as error:
            raise ValueError(f"descriptions: {path}: {error} ({done} of {len(pending)} captions are written)") from None
        if not text:
            ctx.say(f"{path}: the model wrote nothing")
            continue
        facts = {"text": text, "model": model.name, "version": model.version, "seconds": time.perf_counter() - began}
        yield pa.RecordBatch.from_pylist([row | facts], schema=DESCRIPTIONS.batch)
    ctx.progress(len(pending), len(pending), "images")


def load_model(ctx: StageContext) -> Model:
    """Return the model that captions images, as the settings choose it. It is a model behind a server if the setting
    `server` is not empty. Otherwise it runs in this process. `ctx` is the stage's context, which holds the settings.
    Raises ValueError if the model cannot be loaded.
    """
    if ctx.config.server:
        from stages.text_to_image.descriptions.server import ServerModel

        return ServerModel(ctx.config)
    from stages.text_to_image.descriptions.local import LocalModel

    return LocalModel(ctx.config, ctx.root)


def _picture(ctx: StageContext, path: str) -> Image.Image:
    image = open_image(ctx.need("image_folder") / path)
    image.thumbnail((ctx.config.side, ctx.config.side), Image.Resampling.LANCZOS)
    return image


def finish_descriptions(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Tell the user how many captions were written. Name the command that shows and changes them. `ctx` is the stage's
    context, which holds the stored rows. The generator yields no batch.
    """
    if ctx.pending.num_rows:
        pending = set(ctx.pending["image_id"].to_pylist())
        count = sum(image_id in pending for image_id in ctx.stored["image_id"].to_pylist())
        ctx.say(f"{count} captions written; read and change them with: latentmill captions --edit captions.csv")
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
