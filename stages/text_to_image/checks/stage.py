"""The stage `checks`: measure every usable picture once, then compare all pictures and captions with each other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.checks import CHECKS
from schemas.text_to_image.images import IMAGES
from stages.run import Run
from stages.stage import Stage
from stages.text_to_image.checks.config import ChecksConfig
from stages.text_to_image.checks.findings import lines, mark_near_duplicates, picture_warnings
from stages.text_to_image.checks.measures import measure
from stages.text_to_image.checks.texts import imbalance, repeated_phrase, text_warnings
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.usable import usable_rows

Row = dict[str, Any]

BATCH = 64  # images per record batch
WANTED = ("image_id", "path", "short_side", "aspect")


def wanted_checks(run: Run[ChecksConfig]) -> pa.Table:
    found = []
    for row in usable_rows(run.inputs.rows(IMAGES)):
        short, long = sorted((row["width"], row["height"]))
        # An image is measured again only if one of these values has changed.
        found.append({"image_id": row["image_id"], "path": row["path"], "short_side": short, "aspect": long / short})
    return pa.Table.from_pylist(found, schema=pa.schema([CHECKS.batch.field(name) for name in WANTED]))


def measure_images(run: Run[ChecksConfig]) -> Iterator[pa.RecordBatch]:
    folder = run.needs["image_folder"]
    pending = sorted(run.output.pending.to_pylist(), key=lambda row: str(row["path"]))
    with ThreadPoolExecutor(run.config.workers) as pool:
        for start in range(0, len(pending), BATCH):
            batch = pending[start : start + BATCH]
            measured = pool.map(lambda row: measure(folder / row["path"]), batch)
            # These depend on other images: `finish_checks` fills them in.
            empty = {"duplicate_of": None, "similarity": None, "warnings": "", "detail": ""}
            rows = [row | values | empty for row, values in zip(batch, measured, strict=True)]
            yield pa.RecordBatch.from_pylist(rows, schema=CHECKS.batch)
            run.report.progress(start + len(batch), len(pending), "images")
            if run.report.stop():
                return


def opened_files(run: Run[ChecksConfig]) -> Iterator[Path]:
    folder: Path = run.needs["image_folder"]
    yield from (packed.file_to_open(folder / path) for path in run.output.pending["path"].to_pylist())


def finish_checks(run: Run[ChecksConfig]) -> Iterator[pa.RecordBatch]:
    wanted = {row["image_id"]: row for row in wanted_checks(run).to_pylist()}
    rows = [row for row in run.output.stored.select(CHECKS.batch.names).to_pylist() if row["image_id"] in wanted]
    # The run was stopped before all pictures were measured.
    if len(rows) < len(wanted):
        return
    images = {row["image_id"]: row for row in usable_rows(run.inputs.rows(IMAGES))}
    captions, trigger = _captions(run, images)
    of_texts: dict[str, dict[str, str]] = {}
    for image_id, name, sentence in text_warnings(captions, trigger, run.config.words):
        of_texts.setdefault(image_id, {})[name] = sentence
    marked = []
    for row in mark_near_duplicates(rows, run.config.similarity):
        found = picture_warnings(row, run.config) | of_texts.get(row["image_id"], {})
        marked.append(row | {"warnings": ", ".join(found), "detail": "; ".join(found.values())})
    changed = [new for new, old in zip(marked, rows, strict=True) if new != old]
    for start in range(0, len(changed), BATCH):
        yield pa.RecordBatch.from_pylist(changed[start : start + BATCH], schema=CHECKS.batch)
    if changed or run.output.pending.num_rows:
        whole = (repeated_phrase(captions, trigger, run.config.repeated), imbalance(list(images.values()), run.config.imbalance))
        for line in (*lines(marked), *filter(None, whole)):
            run.report.say(line)


def _captions(run: Run[ChecksConfig], images: dict[str, Row]) -> tuple[list[Row], str]:
    """(rows of the captions, sorted by path and position; the trigger that all should have, or "")."""
    rows = run.inputs.rows(CAPTIONS).to_pylist()
    # No single word belongs in all captions if a folder has a trigger of its own, even an empty one.
    own = any(row["trigger"] is not None for row in images.values())
    trigger = next((str(row["text"]) for row in rows if row["role"] == "trigger"), "")
    used = [row for row in rows if row["role"] == "caption" and row["image_id"] in images]
    # Regularisation images are trained without the trigger.
    kept = [row for row in used if images[row["image_id"]]["use"] is None]
    ordered = sorted(kept, key=lambda row: (images[row["image_id"]]["path"], row["position"]))
    return ordered, "" if own else trigger


STAGE = Stage(
    reads=(IMAGES, CAPTIONS),
    writes=CHECKS,
    config=ChecksConfig,
    needs=("image_folder",),
    wants=wanted_checks,
    run=measure_images,
    finish=finish_checks,
    opens=opened_files,
)
