"""The scorer: everything that a picture is compared with, and the scores of one picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from schemas.text_to_image.samples import SAMPLES
from stages.run import Run
from stages.text_to_image.scores import encoders
from stages.text_to_image.scores.agreement import AgreementMap
from stages.text_to_image.scores.axis import FeatureGroup, axis_position
from stages.text_to_image.scores.config import ScoresConfig
from stages.text_to_image.scores.encoders import ImageEncoder, TextVectors
from stages.text_to_image.scores.pictures import (
    candidate_texts,
    find_references,
    preview_rows,
    trigger_word,
    usable_images,
    without_trigger,
)

FEATURES = "features.safetensors"  # artifact: the features of the compared groups, computed once per table folder

Row = dict[str, Any]


class Scorer:
    """Compares pictures with the base's previews, the training images, the references and their own text."""

    def __init__(self, run: Run[ScoresConfig], encoder: ImageEncoder) -> None:
        self.run = run
        self.encoder = encoder
        self.trigger = trigger_word(run)
        self.texts = candidate_texts(run)
        base = [row for row in run.once(preview_rows) if row["kind"] == "base"]
        files = {
            "images": {row["image_id"]: run.needs["image_folder"] / row["path"] for row in usable_images(run)},
            "base": {row["picture_id"]: run.inputs.files(SAMPLES) / row["path"] for row in base},
            "references": {one.picture_id: self._references / one.path for one in run.once(find_references)},
        }
        features = self._group_features(files)
        self.images, self.references = (FeatureGroup(list(files[n]), features[n]) for n in ("images", "references"))
        self.base = FeatureGroup([without_trigger(row["prompt"], self.trigger) for row in base], features["base"])
        self.agreement = self._load_agreement()

    @property
    def _references(self) -> Path:
        return self.run.root / str(self.run.config.references)

    def _group_features(self, files: dict[str, dict[str, Path]]) -> dict[str, np.ndarray]:
        """(pictures, 1280) by group. `files`: path by picture id, by group."""
        # Never stale: the recipe, which names the folder, covers the files of the groups and the encoder.
        try:
            found: dict[str, np.ndarray] = load_file(self.run.output.artifacts / FEATURES)
            return found
        except (OSError, SafetensorError):  # not written yet, or cut short
            rows = {name: [self.encoder.encode_file(path) for path in group.values()] for name, group in files.items()}
        arrays = {name: np.array(group).reshape(len(group), encoders.D) for name, group in rows.items()}
        self.run.output.write(FEATURES, lambda path: _write(path, save(arrays)))
        return arrays

    def _load_agreement(self) -> tuple[AgreementMap, np.ndarray] | None:
        """The map, and the embeddings (texts, 384) of `self.texts`; None if one of them is missing. Raises ValueError if
        the map is.
        """
        if not self.run.config.map or not self.texts:
            return None
        vectors = text_vectors()
        found = AgreementMap.load(map_file(self.run))
        # A map is valid only for the encoders that it was fitted with.
        expected = (self.encoder.source_sha256, vectors.source_sha256)
        if (found.images_sha256, found.texts_sha256) != expected:
            raise ValueError(
                f"scores.map: {map_file(self.run)} was fitted to other encoders than those in data/judges; fit it again"
            )
        return None if vectors.missing(self.texts) else (found, vectors.stack(self.texts))

    def score(self, row: Row) -> Row:
        """The complete row of a picture. A score that cannot be computed is None."""
        folder = self._references if row["kind"] == "real" else self.run.inputs.files(SAMPLES)
        feature_D = self.encoder.encode_file(folder / row["path"])
        # Without the base's previews of the same prompt, since those would put the base's own previews at exactly 0.
        base = self.base.mean(without=without_trigger(row["prompt"], self.trigger))
        # The plain cosine to the training images separates styles badly, because subject and background weigh more than
        # style. So style is a position on the axis between two means: 0 for the base's previews, 1 for the training images
        # (`real`: the references).
        style = axis_position(feature_D, base, self.images.mean())
        real = axis_position(feature_D, base, self.references.mean(without=row["picture_id"]))
        return {**row, "style": style, "real": real, **self._agreement(row, feature_D), "texts": len(self.texts)}

    def _agreement(self, row: Row, feature_D: np.ndarray) -> dict[str, float | int | None]:
        text = without_trigger(row["prompt"], self.trigger)
        if self.agreement is None or not text:
            return {"agreement": None, "agreement_rank": None}
        agreement, texts_NE = self.agreement
        cosines_N = agreement.cosines(feature_D, texts_NE)
        own = cosines_N[self.texts.index(text)]
        return {"agreement": float(own), "agreement_rank": 1 + int((cosines_N > own).sum())}

    def missing_inputs(self) -> Iterator[str]:
        """A line for each missing input: which scores are not measured without it."""
        if not self.base.names:
            yield "no previews of the base, so style and real are not measured; set base = true in [samples]"
        if not self.references.names:
            yield f"no pictures in {self._references}, so real is not measured"
        if not self.run.config.map:
            yield "scores.map is not set, so agreement is not measured"
        elif self.texts and self.agreement is None:
            absent = text_vectors().missing(self.texts)
            count = f"{len(absent)} of {len(self.texts)} texts have no sentence embedding, such as {absent[0]!r}"
            yield f"{count}, so agreement is not measured; data/judges/texts.py adds them"


def text_vectors() -> TextVectors:
    return TextVectors.load(encoders.TEXT_VECTORS)


def map_file(run: Run[ScoresConfig]) -> Path:
    file = run.root / run.config.map
    if not file.is_file():
        raise ValueError(f"scores.map: there is no file {file}; data/micro/training/agreement.py writes one")
    return Path(file)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
