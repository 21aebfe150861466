"""scores: how far each preview went from the base's look to that of the training images, and whether it shows what it should.

Two pretrained networks judge (stages/features.py). The plain cosine to the training images tells styles apart badly: what a
picture shows and its background weigh more than the look. So the style is a place on the way between two means: other
previews by the base lie at 0 on average, other pictures like the training images at 1. A picture is measured without the
base's previews of its own prompt, or the base's own would be at 0 by themselves.

D picture features, E sentence embedding, N texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.samples import SAMPLES
from schemas.text_to_image.scores import SCORES
from stages.hashing import file_sha256
from stages.settings import selects
from stages.stage import Stage, StageContext
from stages.text_to_image.scores import features
from stages.text_to_image.scores.features import Agreement, Group, ImageEncoder
from stages.text_to_image.scores.references import Reference, references

WANTED = ("picture_id", "kind", "adapter_id", "step", "prompt", "seed", "path")
FEATURES = "features.npz"  # of what the previews are compared with: made once

Row = dict[str, Any]


@dataclass(frozen=True)
class ScoresConfig:
    """[scores]: what previews are compared with. What these files hold is part of the recipe, where they lie is not."""

    references: str = selects("references", "folder of real pictures of the style, with captions, none of them trained on")
    map: str = selects("", "safetensors of the map from pictures to texts (data/micro/training/agreement.py fits one)")


def wanted(ctx: StageContext) -> pa.Table:
    """Every preview that there is, then every reference."""
    rows = [*previews(ctx), *(real(one) for one in found_references(ctx))]
    schema = pa.schema([SCORES.stored.field(name) for name in WANTED])
    first = {row["picture_id"]: row for row in reversed(rows)}
    return pa.Table.from_pylist(list(first.values())[::-1], schema=schema)


def previews(ctx: StageContext) -> list[Row]:
    """What is known of each preview before it is scored."""
    folder = ctx.files(SAMPLES)
    rows = []
    for row in ctx.rows(SAMPLES).to_pylist():
        kept = {name: row[name] for name in ("adapter_id", "step", "prompt", "seed", "path")}
        kind = "adapter" if row["adapter_id"] else "base"
        rows.append({"picture_id": file_sha256(folder / row["path"]), "kind": kind, **kept})
    return rows


def real(one: Reference) -> Row:
    """A reference as a row."""
    row = {"picture_id": one.picture_id, "kind": "real", "adapter_id": "", "step": 0, "prompt": one.caption, "seed": 0}
    return row | {"path": one.path}


def found_references(ctx: StageContext) -> list[Reference]:
    """The references; ValueError if one of them is a training image too."""
    if not ctx.config.references:
        return []
    found = references(ctx.root / ctx.config.references)
    trained = {row["image_id"]: row["path"] for row in usable(ctx)}
    for one in found:
        if one.picture_id in trained:
            raise ValueError(
                f"scores.references: {one.path} is the training image {trained[one.picture_id]}; take one of them out"
            )
    return found


def usable(ctx: StageContext) -> list[Row]:
    """The rows of the images that can be trained on."""
    return [row for row in ctx.rows(IMAGES).to_pylist() if row["rejected"] is None]


def snapshot(ctx: StageContext) -> pa.Table:
    """What every score depends on: the networks and the map, the images, the base's previews, the references, the texts."""
    shown = previews(ctx)
    parts = [("image", row["image_id"]) for row in usable(ctx)]
    parts += [("base", f"{row['picture_id']} {row['prompt']}") for row in shown if row["kind"] == "base"]
    parts += [("reference", one.picture_id) for one in found_references(ctx)]
    parts += [("text", text) for text in texts(ctx, shown)]
    parts += [("map", file_sha256(map_file(ctx)))] if ctx.config.map else []
    packages = [features.PICTURES, features.TEXTS] if ctx.config.map else [features.PICTURES]
    parts += [("package", package.identity()) for package in packages]
    return pa.table({"what": [what for what, _ in parts], "which": [which for _, which in parts]})


def map_file(ctx: StageContext) -> Path:
    """The map's file. ValueError if it is not there."""
    file = ctx.root / ctx.config.map
    if not file.is_file():
        raise ValueError(f"scores.map: there is no file {file}; data/micro/training/agreement.py writes one")
    return Path(file)


def texts(ctx: StageContext, shown: list[Row]) -> list[str]:
    """Every distinct text of previews and references, without the trigger: the candidates of a rank."""
    word = trigger(ctx)
    every = [*(row["prompt"] for row in shown), *(one.caption for one in found_references(ctx))]
    return sorted({said(text, word) for text in every} - {""})


def trigger(ctx: StageContext) -> str:
    """The trigger word; empty without one."""
    found = [row["text"] for row in ctx.rows(CAPTIONS).to_pylist() if row["role"] == "trigger"]
    return str(found[0]) if found else ""


def said(text: str, word: str) -> str:
    """A text without the trigger and the comma that set it off."""
    parts = [part.strip() for part in (text.replace(word, "") if word else text).split(",")]
    return re.sub(r"\s+", " ", ", ".join(part for part in parts if part))


class Scorer:
    """All that pictures are compared with, made once for all of them."""

    def __init__(self, ctx: StageContext) -> None:
        self.ctx = ctx
        self.eye = ImageEncoder()
        self.trigger = trigger(ctx)
        shown = previews(ctx)
        self.texts = texts(ctx, shown)
        base = [row for row in shown if row["kind"] == "base"]
        drawn, apart = ctx.files(SAMPLES), ctx.root / ctx.config.references
        files = {
            "images": {row["image_id"]: ctx.need("image_folder") / row["path"] for row in usable(ctx)},
            "base": {row["picture_id"]: drawn / row["path"] for row in base},
            "references": {one.picture_id: apart / one.path for one in found_references(ctx)},
        }
        found = self._features(files)
        self.images, self.references = (Group(list(files[name]), found[name]) for name in ("images", "references"))
        self.base = Group([said(row["prompt"], self.trigger) for row in base], found["base"])

    def _features(self, files: dict[str, dict[str, Path]]) -> dict[str, np.ndarray]:
        """The features (count,D) of each group's files; the table's folder is the recipe's, so they are kept in it."""
        kept = self.ctx.artifacts / FEATURES
        if not kept.exists():
            made = {name: [self.eye.read(path) for path in group.values()] for name, group in files.items()}
            arrays = {name: np.array(rows).reshape(len(rows), features.D) for name, rows in made.items()}
            self.ctx.write_artifact(FEATURES, lambda path: savez(path, arrays))
        with np.load(kept) as opened:
            return {name: opened[name] for name in files}

    @cached_property
    def agreement(self) -> tuple[Agreement, np.ndarray] | None:
        """The map and the texts' embeddings (N,E); None without a map."""
        if not self.ctx.config.map or not self.texts:
            return None
        return Agreement.load(map_file(self.ctx)), features.sentences(self.texts)

    def score(self, row: Row) -> Row:
        """A picture's scores."""
        kind = row["kind"]
        folder = self.ctx.root / self.ctx.config.references if kind == "real" else self.ctx.files(SAMPLES)
        feature_D = self.eye.read(folder / row["path"])
        base = self.base.mean(without=said(row["prompt"], self.trigger))
        references = self.references.mean(without=row["picture_id"])
        style = features.place(feature_D, base, self.images.mean())
        real = features.place(feature_D, base, references)
        return {**row, "style": style, "real": real, **self._agreement(row, feature_D), "texts": len(self.texts)}

    def _agreement(self, row: Row, feature_D: np.ndarray) -> dict[str, float | int | None]:
        own = said(row["prompt"], self.trigger)
        if self.agreement is None or not own:
            return {"agreement": None, "agreement_rank": None}
        agreement, texts_NE = self.agreement
        cosines_N = agreement.cosines(feature_D, texts_NE)
        place = self.texts.index(own)
        return {"agreement": float(cosines_N[place]), "agreement_rank": 1 + int((cosines_N > cosines_N[place]).sum())}


def savez(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Arrays by name in one file, whatever the file is called."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def score_pictures(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """A row at a time; the networks are loaded only if a picture has no score yet."""
    pending = ctx.pending.to_pylist()
    if not pending:
        return
    judge = Scorer(ctx)
    for line in lacking(ctx, judge):
        ctx.say(line)
    for number, row in enumerate(pending, 1):
        if ctx.stop():
            return
        yield from SCORES.table([judge.score(row)]).to_batches()
        ctx.progress(number, len(pending), "pictures")


def lacking(ctx: StageContext, judge: Scorer) -> Iterator[str]:
    """What is not there to compare with, and which scores are therefore null."""
    if not judge.base.names:
        yield "no previews of the base, so there is no axis for style and real: set base = true in [samples]"
    if not judge.references.names:
        yield f"no pictures in {ctx.root / ctx.config.references}, so nothing is compared with real ones"
    if not ctx.config.map:
        yield "no map in [scores], so no agreement is measured"


STAGE = Stage(
    reads=(SAMPLES, IMAGES, CAPTIONS),
    writes=SCORES,
    config=ScoresConfig,
    needs=("image_folder",),
    wants=wanted,
    run=score_pictures,
    snapshot=snapshot,
)
