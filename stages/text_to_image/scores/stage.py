"""The stage `scores`: how far each preview moved from the base's style to the style of the training images, and to its
text.

The plain cosine to the training images separates styles badly, because the subject and the background of a picture weigh more
than its style. So style is a position on the axis between two means: 0 for the base's previews, 1 for the training images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.samples import SAMPLES
from schemas.text_to_image.scores import SCORES
from stages.hashing import file_sha256
from stages.settings import selects
from stages.stage import Stage, StageContext
from stages.text_to_image.imaging import packed
from stages.text_to_image.scores import encoders
from stages.text_to_image.scores.encoders import ImageEncoder
from stages.text_to_image.scores.pictures import candidate_texts, find_references, preview_rows, reference_rows, usable_images
from stages.text_to_image.scores.scorer import Scorer, map_file, text_vectors

WANTED = ("picture_id", "kind", "adapter_id", "step", "prompt", "seed", "path")


@dataclass(frozen=True)
class ScoresConfig:
    """The settings [scores] of project.toml: the files that previews are compared with. `references` is a folder of
    real pictures of the style. If it is empty, the score `real` is None. `map` is a safetensors file with the agreement
    map, a linear map from image features to sentence embeddings. If it is empty, the scores of agreement are None.

    If the content of these files changes, the scores are computed anew in another table folder. Another path to the
    same content changes nothing.
    """

    references: str = selects(
        "references", "folder of real pictures of the style, with captions, none of which is a training image", path=True
    )
    map: str = selects(
        "",
        "safetensors file with the map from pictures to texts, which data/micro/training/agreement.py fits; empty: no agreement",
        path=True,
    )


def wanted_scores(ctx: StageContext) -> pa.Table:
    """Return a table of the pictures to score, one row per distinct picture. Previews (pictures drawn by an adapter or
    the base model) come first, then references (real pictures of the style). The columns are those in `WANTED`; the
    scores are not computed yet. `ctx` is the stage's context: its input tables and settings.
    """
    rows = {row["picture_id"]: row for row in reversed([*preview_rows(ctx), *reference_rows(ctx)])}
    schema = pa.schema([SCORES.stored.field(name) for name in WANTED])
    return pa.Table.from_pylist(list(rows.values())[::-1], schema=schema)


def snapshot(ctx: StageContext) -> pa.Table:
    """Return a table of the inputs on which the scores of all pictures depend, one row per input. The column `what` is
    the kind of the input, such as "image" (a training image) or "base" (a preview of the base model). The column
    `which` identifies the input by an id, a hash or a text. `ctx` is the stage's context: its input tables and
    settings. Raises ValueError if an input is invalid, such as a map file that is missing.

    If an input changes, every picture is scored again. The result is part of the stage's recipe. The recipe names the
    folder of the table `scores`, so a changed input gives a new folder.
    """
    parts = [("image", row["image_id"]) for row in usable_images(ctx)]
    parts += [("base", f"{row['picture_id']} {row['prompt']}") for row in preview_rows(ctx) if row["kind"] == "base"]
    parts += [("reference", one.picture_id) for one in find_references(ctx)]
    parts += [("encoder", file_sha256(encoders.IMAGE_WEIGHTS))]
    parts += [("text", text) for text in candidate_texts(ctx)]
    if ctx.config.map:
        vectors = text_vectors()
        parts += [("map", file_sha256(map_file(ctx)))]
        parts += [("vector", f"{text} {vectors.sha256(text)}") for text in candidate_texts(ctx)]
    return pa.table({"what": [what for what, _ in parts], "which": [which for _, which in parts]})


def score_pictures(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Score the pending pictures (those without stored scores) and yield one record batch per picture. If no picture is
    pending, the image encoder is not loaded. `ctx` is the stage's context: its tables and settings.
    """
    pending = ctx.pending.to_pylist()
    if not pending:
        return
    scorer = Scorer(ctx, ctx.reuse("image encoder", ImageEncoder.load))
    for line in scorer.missing_inputs():
        ctx.say(line)
    for number, row in enumerate(pending, 1):
        if ctx.stop():
            return
        yield from SCORES.table([scorer.score(row)]).to_batches()
        ctx.progress(number, len(pending), "pictures")


def opened_files(ctx: StageContext) -> Iterator[Path]:
    """Yield the paths of the files that the stage opens to compare pictures with. These are the training images, the
    user's reference images and the agreement map (a file that relates images to texts). Reference images and map are
    left out if they are not set. `ctx` is the stage's context: its input tables and settings.
    """
    folder: Path = ctx.need("image_folder")
    yield from (packed.file_to_open(folder / row["path"]) for row in usable_images(ctx))
    if ctx.config.references:
        yield from sorted(path for path in (ctx.root / ctx.config.references).rglob("*") if path.is_file())
    if ctx.config.map:
        yield map_file(ctx)


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
