"""The stage `scores`: how far each preview moved from the base's style to that of the training images, and to its text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.samples import SAMPLES
from schemas.text_to_image.scores import SCORES
from stages.hashing import file_sha256
from stages.run import Run
from stages.stage import Stage
from stages.text_to_image.imaging import packed
from stages.text_to_image.scores import encoders
from stages.text_to_image.scores.config import ScoresConfig
from stages.text_to_image.scores.encoders import ImageEncoder
from stages.text_to_image.scores.pictures import candidate_texts, find_references, preview_rows, reference_rows, usable_images
from stages.text_to_image.scores.scorer import Scorer, map_file, text_vectors

WANTED = ("picture_id", "kind", "adapter_id", "step", "prompt", "seed", "path")


def wanted_scores(run: Run[ScoresConfig]) -> pa.Table:
    """One row per distinct picture: previews, then references."""
    # Reversed twice: of pictures with equal content, the first row stays.
    rows = {row["picture_id"]: row for row in reversed([*run.once(preview_rows), *reference_rows(run)])}
    schema = pa.schema([SCORES.stored.field(name) for name in WANTED])
    return pa.Table.from_pylist(list(rows.values())[::-1], schema=schema)


def snapshot(run: Run[ScoresConfig]) -> pa.Table:
    """What all scores depend on, one row per input. It is part of the recipe, so a changed input gives a new folder."""
    parts = [("image", row["image_id"]) for row in usable_images(run)]
    parts += [("base", f"{row['picture_id']} {row['prompt']}") for row in run.once(preview_rows) if row["kind"] == "base"]
    parts += [("reference", one.picture_id) for one in run.once(find_references)]
    parts += [("encoder", file_sha256(encoders.IMAGE_WEIGHTS))]
    parts += [("text", text) for text in candidate_texts(run)]
    if run.config.map:
        vectors = text_vectors()
        parts += [("map", file_sha256(map_file(run)))]
        parts += [("vector", f"{text} {vectors.sha256(text)}") for text in candidate_texts(run)]
    return pa.table({"what": [what for what, _ in parts], "which": [which for _, which in parts]})


def score_pictures(run: Run[ScoresConfig]) -> Iterator[pa.RecordBatch]:
    pending = run.output.pending.to_pylist()
    if not pending:
        return
    scorer = Scorer(run, run.reuse("image encoder", ImageEncoder.load))
    for line in scorer.missing_inputs():
        run.report.say(line)
    for number, row in enumerate(pending, 1):
        if run.report.stop():
            return
        yield from SCORES.table([scorer.score(row)]).to_batches()
        run.report.progress(number, len(pending), "pictures")


def opened_files(run: Run[ScoresConfig]) -> Iterator[Path]:
    """The training images, references and map that pictures are compared with."""
    folder: Path = run.needs["image_folder"]
    yield from (packed.file_to_open(folder / row["path"]) for row in usable_images(run))
    if run.config.references:
        yield from sorted(path for path in (run.root / run.config.references).rglob("*") if path.is_file())
    if run.config.map:
        yield map_file(run)


STAGE = Stage(
    reads=(SAMPLES, IMAGES, CAPTIONS),
    writes=SCORES,
    config=ScoresConfig,
    needs=("image_folder",),
    wants=wanted_scores,
    run=score_pictures,
    snapshot=snapshot,
    opens=opened_files,
    model=lambda config: True,  # an image encoder of our own, which is no resource of the project
)
