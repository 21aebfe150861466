"""The stage `scores`: how far each preview moved from the base's style to that of the training images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from schemas.text_to_image import CAPTIONS, IMAGES, SAMPLES, SCORES
from stages.hashing import file_sha256
from stages.run import Run
from stages.settings import Section, selects
from stages.stage import Stage
from stages.text_to_image.caption_files import CaptionSources, make_lookups, trigger_pattern, trigger_word
from stages.text_to_image.imaging import packed
from stages.text_to_image.scores.measures import IMAGE_WEIGHTS, D, FeatureGroup, ImageEncoder, axis_position

FEATURES = "features.safetensors"  # artifact: the features of the compared groups, computed once per table folder
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".tif", ".tiff", ".bmp", ".gif")
WANTED = ("picture_id", "kind", "adapter_id", "step", "prompt", "seed", "path")

Row = dict[str, Any]


@dataclass(frozen=True)
class ScoresConfig(Section):
    # Recorded by content in `snapshot`: another path to the same files changes nothing, other content gives a new table
    # folder.
    references: str = selects(
        "references", "folder of real pictures of the style, with captions, none of which is a training image", path=True
    )


def wanted_scores(run: Run[ScoresConfig]) -> pa.Table:
    """One row per distinct picture: previews, then real pictures."""
    # Reversed twice: of pictures with equal content, the first row stays.
    rows = {row["picture_id"]: row for row in reversed([*run.once(previews), *run.once(real_pictures)])}
    schema = pa.schema([SCORES.stored.field(name) for name in WANTED])
    return pa.Table.from_pylist(list(rows.values())[::-1], schema=schema)


def snapshot(run: Run[ScoresConfig]) -> pa.Table:
    """What all scores depend on, one row per input. It is part of the recipe, so a changed input gives a new folder."""
    parts = [("image", row["image_id"]) for row in training_images(run)]
    parts += [("base", f"{row['picture_id']} {row['prompt']}") for row in run.once(previews) if row["kind"] == "base"]
    parts += [("reference", row["picture_id"]) for row in run.once(real_pictures)]
    parts += [("encoder", file_sha256(IMAGE_WEIGHTS))]
    return pa.table({"what": [what for what, _ in parts], "which": [which for _, which in parts]})


def previews(run: Run[ScoresConfig]) -> list[Row]:
    """One row per preview whose file is there and intact, without scores. `kind` is "base" or "adapter"."""
    folder = run.inputs.files(SAMPLES)
    rows = []
    for row in run.inputs.rows(SAMPLES).to_pylist():
        if not run.inputs.intact(SAMPLES, row["path"]):  # deleted since the rows were read, or damaged: no preview
            continue
        copied = {name: row[name] for name in ("adapter_id", "step", "prompt", "seed", "path")}
        kind = "adapter" if row["adapter_id"] else "base"
        rows.append({"picture_id": file_sha256(folder / row["path"]), "kind": kind, **copied})
    return rows


def real_pictures(run: Run[ScoresConfig]) -> list[Row]:
    """One row per distinct picture of the folder [scores] references, sorted by path, without scores.

    Raises ValueError if one is also a training image, or if a file of captions is malformed or names a missing picture.
    """
    if not run.config.references:
        return []
    folder = run.root / run.config.references
    files = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
    paths = [path.relative_to(folder).as_posix() for path in sorted(files) if path.is_file()]
    lookups, notes = make_lookups(folder, paths, CaptionSources(("metadata", "sidecar"), ".txt"), run.root)
    if notes:
        raise ValueError(f"scores.references: {folder / notes[0]}")
    trained = {row["image_id"]: row["path"] for row in training_images(run)}
    found: dict[str, Row] = {}
    for path in paths:
        picture_id = file_sha256(folder / path)
        if picture_id in trained:
            where = f"{path} is also the training image {trained[picture_id]}"
            raise ValueError(f"scores.references must hold no training image, but {where}; remove one of the two")
        caption = next((captions[0].text for lookup in lookups if (captions := lookup(path))), "")
        row = {"picture_id": picture_id, "kind": "real", "adapter_id": "", "step": 0, "prompt": caption, "seed": 0, "path": path}
        found.setdefault(picture_id, row)
    return list(found.values())


def training_images(run: Run[ScoresConfig]) -> list[Row]:
    """Accepted rows of `images`, without regularisation images and references of edit training."""
    return [row for row in run.inputs.rows(IMAGES).to_pylist() if row["rejected"] is None and row["use"] is None]


def score_pictures(run: Run[ScoresConfig]) -> Iterator[pa.RecordBatch]:
    pending = run.output.pending.to_pylist()
    if not pending:
        return
    scorer = Scorer(run, run.reuse("image encoder", ImageEncoder.load))
    if not scorer.base.names:
        run.report.say("no previews of the base, so style and real are not measured; set base = true in [samples]")
    if not scorer.real.names:
        run.report.say(f"no pictures in {scorer.folder}, so real is not measured")
    for number, row in enumerate(pending, 1):
        if run.report.stop():
            return
        yield SCORES.record_batch([scorer.score(row)])
        run.report.progress(number, len(pending), "pictures")


class Scorer:
    """Compares pictures with the base's previews, the training images and the real pictures."""

    def __init__(self, run: Run[ScoresConfig], encoder: ImageEncoder) -> None:
        self.run, self.encoder = run, encoder
        self.folder = run.root / run.config.references
        self.trigger = trigger_word(run.inputs.rows(CAPTIONS))
        base = [row for row in run.once(previews) if row["kind"] == "base"]
        files = {
            "images": {row["image_id"]: run.needs["image_folder"] / row["path"] for row in training_images(run)},
            "base": {row["picture_id"]: run.inputs.files(SAMPLES) / row["path"] for row in base},
            "references": {row["picture_id"]: self.folder / row["path"] for row in run.once(real_pictures)},
        }
        features = self._group_features(files)
        self.images, self.real = (FeatureGroup(list(files[name]), features[name]) for name in ("images", "references"))
        self.base = FeatureGroup([without_trigger(row["prompt"], self.trigger) for row in base], features["base"])

    def _group_features(self, files: dict[str, dict[str, Path]]) -> dict[str, np.ndarray]:
        """(pictures, 1280) by group. `files`: path by picture id, by group."""
        # Never stale: the recipe, which names the folder, covers the files of the groups and the encoder.
        try:
            found: dict[str, np.ndarray] = load_file(self.run.output.artifacts / FEATURES)
            return found
        except (OSError, SafetensorError):  # not written yet, or cut short
            rows = {name: [self.encoder.encode_file(path) for path in group.values()] for name, group in files.items()}
        arrays = {name: np.array(group).reshape(len(group), D) for name, group in rows.items()}
        self.run.output.write(FEATURES, lambda path: save_file(arrays, path))
        return arrays

    def score(self, row: Row) -> Row:
        """The complete row of a picture. A score that cannot be computed is None."""
        folder = self.folder if row["kind"] == "real" else self.run.inputs.files(SAMPLES)
        feature_D = self.encoder.encode_file(folder / row["path"])
        # Without the base's previews of the same prompt, since those would put the base's own previews at exactly 0.
        base = self.base.mean(without=without_trigger(row["prompt"], self.trigger))
        # The plain cosine to the training images separates styles badly, because subject and background weigh more than
        # style. So style is a position on the axis between two means: 0 for the base's previews, 1 for the training images
        # (`real`: the real pictures).
        style = axis_position(feature_D, base, self.images.mean())
        return {**row, "style": style, "real": axis_position(feature_D, base, self.real.mean(without=row["picture_id"]))}


def without_trigger(text: str, trigger: str) -> str:
    """Also without the comma beside it: "ohwx, a fox" becomes "a fox"."""
    parts = [part.strip() for part in (trigger_pattern(trigger).sub("", text) if trigger else text).split(",")]
    return re.sub(r"\s+", " ", ", ".join(part for part in parts if part))


def opened_files(run: Run[ScoresConfig]) -> Iterator[Path]:
    """The training images and the real pictures."""
    folder: Path = run.needs["image_folder"]
    yield from (packed.file_to_open(folder / row["path"]) for row in training_images(run))
    if run.config.references:
        yield from sorted(path for path in (run.root / run.config.references).rglob("*") if path.is_file())


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
