"""The references of each crop: which latents are shown to the model beside the noisy latent in edit training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stages.text_to_image.imaging.references import USE

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A reference of a crop. `latent_id` is its key in the table `latents`. `grid` is the (height, width) of its latent."""

    latent_id: str
    grid: tuple[int, int]


class References:
    """A lookup of the references of crops, from the tables `images`, `buckets` and `latents`."""

    def __init__(self, images: Iterable[Row], buckets: Iterable[Row], latents: Iterable[Row]) -> None:
        """Index the rows of the three tables. A row is a dict."""
        rows = list(images)
        self.ids = {row["path"]: row["image_id"] for row in rows if row["rejected"] in (None, "duplicate")}
        self.paths: dict[str, list[str]] = {}
        for row in sorted(rows, key=lambda row: row["reference"] or 0):
            if row["use"] == USE and row["reference_of"] and row["path"] in self.ids:
                self.paths.setdefault(self.ids.get(row["reference_of"], ""), []).append(row["path"])
        wanted = {self.ids[path] for paths in self.paths.values() for path in paths}
        self.encoded = {(*place(row), row["flip"]): row for row in latents if row["image_id"] in wanted and not row["rejected"]}
        self.buckets: dict[str, list[Row]] = {}
        for row in sorted(buckets, key=lambda row: int(row["resolution"])):
            if row["image_id"] in wanted and row["rejected"] is None:
                self.buckets.setdefault(row["image_id"], []).append(row)

    def of(self, image_id: str, resolution: int, flip: bool) -> tuple[Reference, ...]:
        """Return the references of a crop in their order. `image_id` is its image. `resolution` is that of its bucket: a
        reference has the same resolution, or the highest one below it. `flip` is True if the crop is mirrored; its references
        then are mirrored too. Raises ValueError if a reference has no latent.
        """
        return tuple(self._reference(path, resolution, flip) for path in self.paths.get(image_id, ()))

    def _reference(self, path: str, resolution: int, flip: bool) -> Reference:
        buckets = self.buckets.get(self.ids[path], [])
        fitting = [row for row in buckets if row["resolution"] <= resolution] or buckets[:1]
        latent = self.encoded.get((*place(fitting[-1]), flip)) if fitting else None
        if latent is None:
            raise ValueError(f"train: the reference {path} has no latent; see the tables buckets and latents")
        return Reference(latent["latent_id"], (latent["shape"][1], latent["shape"][2]))


PLACE = ("image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h")  # columns that a bucket and its latents share


def place(row: Row) -> tuple[Any, ...]:
    """Return the values of the columns `PLACE` of a row of the table `buckets` or `latents`."""
    return tuple(row[name] for name in PLACE)
