"""The stage `captions`: which texts each image is trained with, and the texts that belong to no image.

An image's captions lie in a text file (a sidecar: a.txt or a.png.txt for a.png) beside it or in a folder of captions, in a file
for many images in its folder or a folder above (metadata.jsonl, metadata.csv, captions.json, captions.jsonl, captions.csv or
captions.tsv), or are its file name or the name of its folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.descriptions import DESCRIPTIONS
from schemas.text_to_image.images import IMAGES
from stages.stage import Stage, StageContext
from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.described import described_captions
from stages.text_to_image.captions.edits import read_edits
from stages.text_to_image.captions.rows import caption_rows

BATCH = 4096  # rows per record batch


def wanted_captions(ctx: StageContext) -> pa.Table:
    """Return all rows of the table `captions`, with all columns. `ctx` is the stage's context: its input tables and
    settings. Raises ValueError if a caption is missing or a file with captions cannot be read.

    All texts are read each time. Finding out which have changed would cost more.
    """
    rows, _ = _rows(ctx)
    return pa.Table.from_pylist(rows, schema=CAPTIONS.batch)


def _rows(ctx: StageContext) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (rows, notes): all rows of the table `captions` as dicts, and lines for the user. `ctx` is the stage's
    context: its input tables and settings.
    """
    folder, described = ctx.need("image_folder"), described_captions(ctx)
    return caption_rows(ctx.rows(IMAGES), folder, ctx.config, read_edits(ctx.root), ctx.root, described)


def write_captions(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Yield the pending rows of the table `captions` as record batches. A row is pending if it is new or has changed.
    `ctx` is the stage's context, which holds the pending rows. Nothing is computed here: `wanted_captions` has already
    filled in all columns of these rows.
    """
    yield from ctx.pending.select(CAPTIONS.batch.names).to_batches(max_chunksize=BATCH)


def finish_captions(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Tell the user about unusual captions, such as an image without a caption. Say nothing if no row was pending (new
    or changed) or the user stopped the run. `ctx` is the stage's context: its tables and settings. The generator yields
    no batch.
    """
    if ctx.pending.num_rows and not ctx.stop():
        _, notes = _rows(ctx)
        for note in notes:
            ctx.say(note)
    yield from ()


STAGE = Stage(
    reads=(IMAGES,),
    optional=(DESCRIPTIONS,),
    writes=CAPTIONS,
    config=CaptionsConfig,
    needs=("image_folder",),
    wants=wanted_captions,
    run=write_captions,
    finish=finish_captions,
    opens=lambda ctx: iter(()),  # the pending rows hold all texts
)
