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
from stages.run import Run
from stages.stage import Stage
from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.described import described_captions
from stages.text_to_image.captions.edits import read_edits
from stages.text_to_image.captions.rows import caption_rows

BATCH = 4096  # rows per record batch


def wanted_captions(run: Run[CaptionsConfig]) -> pa.Table:
    # All texts are read each time: finding out which have changed would cost more.
    rows, _ = run.once(_rows)
    return pa.Table.from_pylist(rows, schema=CAPTIONS.batch)


def _rows(run: Run[CaptionsConfig]) -> tuple[list[dict[str, Any]], list[str]]:
    folder, described = run.needs["image_folder"], described_captions(run)
    return caption_rows(run.inputs.rows(IMAGES), folder, run.config, read_edits(run.root), run.root, described)


def write_captions(run: Run[CaptionsConfig]) -> Iterator[pa.RecordBatch]:
    # `wanted_captions` has filled in all columns.
    yield from run.output.pending.select(CAPTIONS.batch.names).to_batches(max_chunksize=BATCH)


def finish_captions(run: Run[CaptionsConfig]) -> Iterator[pa.RecordBatch]:
    if run.output.pending.num_rows and not run.report.stop():
        for note in run.once(_rows)[1]:
            run.report.say(note)
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
    opens=lambda run: iter(()),  # the pending rows hold all texts
)
