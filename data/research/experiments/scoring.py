"""Scores of previews: style, agreement with the text, and the difference from the base's picture.

In names: D picture features, N texts, E sentence embedding, H W pixels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data import EXAMPLE
from data.research.experiments.agreement import Agreement
from stages.text_to_image.scores import FeatureGroup, ImageEncoder, axis_position

Row = dict[str, Any]


def captions(folder: Path) -> dict[str, str]:
    """Return file name -> caption of a folder with a metadata.jsonl."""
    rows = (json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines())
    return {row["file_name"]: row["text"] for row in rows}


class Scorer:
    """Computes scores of previews: style, agreement with the text, and distance from the base's picture. `base` lists
    (subject, file) for the base's previews.

    Style is 0 at the mean of the base's previews and 1 at the mean of the real pictures of the same 40 subjects. Both means
    leave out the subject that is scored.
    """

    def __init__(self, base: list[tuple[str, Path]]) -> None:
        self.encoder = ImageEncoder.load()
        self.base = self._group(base)
        real = captions(EXAMPLE / "references")
        self.real = self._group([(text, EXAMPLE / "references" / name) for name, text in real.items()])
        self.agreement = Agreement(list(real.values()), self.encoder)

    def _group(self, pictures: list[tuple[str, Path]]) -> FeatureGroup:
        subjects, files = [subject for subject, _ in pictures], [file for _, file in pictures]
        return FeatureGroup(subjects, np.array([self.encoder.encode_file(file) for file in files]))

    def score(self, picture: Path, subject: str, base_picture: Path | None) -> Row:
        """Return the scores of one preview as a dict. `picture` is its file. `subject` is the text of its subject; for an
        unknown subject, "agreement" and "rank" are left out. `base_picture` is the base's preview of the same prompt and
        seed, or None.

        "rank" is the position of the subject among all 40 texts by agreement, 1 the best. "moved" is the difference from
        `base_picture`; without one, it is left out.
        """
        feature_D = self.encoder.encode_file(picture)
        scores: Row = {"style": axis_position(feature_D, self.base.mean(without=subject), self.real.mean(without=subject))}
        if subject in self.agreement.texts:
            agreement, rank = self.agreement.score(feature_D, subject).values()
            scores |= {"agreement": agreement, "rank": rank}
        if base_picture:
            scores["moved"] = difference(picture, base_picture)
        return scores


def difference(one: Path, other: Path) -> float:
    """Return the mean absolute difference of two pictures of equal size, in levels of 255."""
    a_HW3, b_HW3 = (np.asarray(Image.open(path).convert("RGB"), np.float64) for path in (one, other))
    return float(np.abs(a_HW3 - b_HW3).mean())
