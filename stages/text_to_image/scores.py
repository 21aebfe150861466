"""The stage `scores`: how far each preview moved from the base's style to that of the training images.

Pictures are compared by the features of EfficientNet-Lite0, in data/assets/judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from schemas.text_to_image import CAPTIONS, IMAGES, SAMPLES, SCORES
from stages.bundled import CHECKOUT, JUDGES
from stages.hashing import file_sha256
from stages.models.efficientnet import FEATURES, SIDE, EfficientNet
from stages.run import Run
from stages.settings import Section, selects, setting
from stages.stage import Stage
from stages.text_to_image.caption_files import CaptionSources, make_lookups, trigger_pattern, trigger_word
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.decode import BACKGROUND, open_image, parse_colour

IMAGE_WEIGHTS = CHECKOUT / JUDGES / "efficientnet-lite0.safetensors"
GROUPS = "features.safetensors"  # artifact: the features of the compared groups, computed once per table folder
MIN_SIGNAL = 0.1  # share of the squared distance between two means that must be more than sampling noise
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
    background: str | None = setting(
        None,
        "colour behind transparent pixels; by default that of [latents]",
        follows="latents.background",
        unrecorded=(None, BACKGROUND),
    )

    def check(self) -> None:
        parse_colour(self.background or BACKGROUND)


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
    return [
        {"picture_id": file_sha256(run.inputs.files(SAMPLES) / row["path"]), "kind": "adapter" if row["adapter_id"] else "base"}
        | {name: row[name] for name in ("adapter_id", "step", "prompt", "seed", "path")}
        for row in run.inputs.rows(SAMPLES).to_pylist()
        if run.inputs.intact(SAMPLES, row["path"])  # else deleted since the rows were read, or damaged: no preview
    ]


def real_pictures(run: Run[ScoresConfig]) -> list[Row]:
    """One row per distinct picture of [scores] references, by path, without scores. Raises ValueError for a training image."""
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
    for (row,) in run.report.batches(pending, 1, "pictures"):
        yield SCORES.record_batch([scorer.score(row)])


class ImageEncoder:
    """Images are encoded one at a time, so that the features of one do not depend on others."""

    def __init__(self, network: EfficientNet, source_sha256: str) -> None:
        self.network, self.source_sha256 = network, source_sha256  # sha256 of the released file that the weights are from

    @classmethod
    def load(cls, file: Path = IMAGE_WEIGHTS) -> ImageEncoder:
        """Raises ValueError if `file`, which data/research/judges/convert.py writes, is damaged or holds another network."""
        network = EfficientNet.load(file)
        with safe_open(file, framework="numpy") as opened:
            return cls(network, (opened.metadata() or {}).get("source_sha256", ""))

    def encode(self, image: Image.Image) -> np.ndarray:
        """(1280,), float64, of length 1. The image is resized to a square, whatever its aspect ratio."""
        square = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        features_BD = self.network(mx.array(np.asarray(square, np.float32)[None]))
        feature_D = np.array(features_BD[0], np.float64)
        unit_D: np.ndarray = feature_D / np.linalg.norm(feature_D)
        return unit_D

    def encode_file(self, path: Path, background: str | None = None) -> np.ndarray:
        """`encode`. Raises ImageError if the file cannot be decoded."""
        return self.encode(open_image(path, background or BACKGROUND))


# The axis between two groups: the columns `style` and `real`

# A mean of few images (features,), and its squared length, which is too large on average, because the images' random differences
# do not cancel out. So it is an unbiased estimate for two or more images; for one, it is not corrected.
Mean = tuple[np.ndarray, float]


@dataclass(frozen=True)
class FeatureGroup:
    names: list[str]  # one per image, such as its prompt; images may share one
    features: np.ndarray  # (images, features)

    def mean(self, *, without: str | None = None) -> Mean | None:
        chosen_ND = self.features[[place for place, name in enumerate(self.names) if name != without]]
        count = len(chosen_ND)
        if not count:
            return None
        sum_D = chosen_ND.sum(axis=0)
        pairs = float(sum_D @ sum_D - (chosen_ND**2).sum())  # the products of two different images
        return sum_D / count, pairs / (count * (count - 1)) if count > 1 else float(sum_D @ sum_D)


def axis_position(feature_D: np.ndarray, start: Mean | None, end: Mean | None) -> float | None:
    """0 at `start`, 1 at `end`. None if a group has no images, or if the means are little further apart than sampling noise."""
    if start is None or end is None:
        return None
    (start_D, from_squared), (end_D, to_squared) = start, end
    axis_D, dot = end_D - start_D, float(start_D @ end_D)
    # Not axis_D @ axis_D, which sampling noise makes too large.
    squared_length = from_squared + to_squared - 2 * dot
    if squared_length < MIN_SIGNAL * (axis_D @ axis_D):
        return None
    return (float(feature_D @ axis_D) - dot + from_squared) / squared_length


class Scorer:
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
        self.known: dict[str, np.ndarray] = {}  # features by picture id
        for name in ("base", "references"):
            self.known |= zip(files[name], features[name], strict=True)
        self.images, self.real = (FeatureGroup(list(files[name]), features[name]) for name in ("images", "references"))
        self.base = FeatureGroup([without_trigger(row["prompt"], self.trigger) for row in base], features["base"])

    def _group_features(self, files: dict[str, dict[str, Path]]) -> dict[str, np.ndarray]:
        """(pictures, 1280) by group. `files`: path by picture id, by group."""
        # Never stale: the recipe, which names the folder, covers the files of the groups and the encoder.
        try:
            found: dict[str, np.ndarray] = load_file(self.run.output.artifacts / GROUPS)
            return found
        except (OSError, SafetensorError):  # not written yet, or cut short
            rows = {
                name: [self.encoder.encode_file(path, self.run.config.background) for path in group.values()]
                for name, group in files.items()
            }
        arrays = {name: np.array(group).reshape(len(group), FEATURES) for name, group in rows.items()}
        self.run.output.write(GROUPS, lambda path: save_file(arrays, path))
        return arrays

    def score(self, row: Row) -> Row:
        """The complete row of a picture. A score that cannot be computed is None."""
        feature_D = self.known.get(row["picture_id"])
        if feature_D is None:
            feature_D = self.encoder.encode_file(self.run.inputs.files(SAMPLES) / row["path"], self.run.config.background)
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
    folder: Path = run.needs["image_folder"]
    yield from (packed.file_to_open(folder / row["path"]) for row in training_images(run))
    if run.config.references:
        yield from sorted(path for path in (run.root / run.config.references).rglob("*") if path.is_file())


STAGE = Stage(
    reads=(SAMPLES, IMAGES, CAPTIONS),
    writes=SCORES,
    unit="picture",
    config=ScoresConfig,
    needs=("image_folder",),
    wants=wanted_scores,
    run=score_pictures,
    snapshot=snapshot,
    opens=opened_files,
    model=lambda config: True,  # an image encoder of our own, which is no resource of the project
)
