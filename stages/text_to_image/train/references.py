"""The references of each crop: which latents are shown to the model beside the noisy latent in edit training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stages.text_to_image.imaging.usable import USE

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    latent_id: str
    grid: tuple[int, int]  # (height, width) of the latent, in tokens


class References:
    def __init__(self, images: Iterable[Row], buckets: Iterable[Row], latents: Iterable[Row]) -> None:
        rows = list(images)
        # The file of a reference may be a duplicate; its latent is that of the image with the same content.
        self.ids = {row["path"]: row["image_id"] for row in rows if row["rejected"] in (None, "duplicate")}
        self.paths: dict[str, list[str]] = {}
        for row in sorted(rows, key=lambda row: row["reference"] or 0):
            if row["use"] == USE and row["reference_of"] and row["path"] in self.ids:
                self.paths.setdefault(self.ids.get(row["reference_of"], ""), []).append(row["path"])
        wanted = {self.ids[path] for paths in self.paths.values() for path in paths}
        self.encoded = {(*place(row), row["flip"]): row for row in latents if row["image_id"] in wanted and not row["rejected"]}
        self.buckets: dict[str, list[Row]] = {}
        # By resolution, so that `_reference` finds the highest that fits at the end.
        for row in sorted(buckets, key=lambda row: int(row["resolution"])):
            if row["image_id"] in wanted and row["rejected"] is None:
                self.buckets.setdefault(row["image_id"], []).append(row)

    def of(self, image_id: str, resolution: int, flip: bool) -> tuple[Reference, ...]:
        """The references of a crop, in order, mirrored if the crop is. Raises ValueError if one has no latent."""
        return tuple(self._reference(path, resolution, flip) for path in self.paths.get(image_id, ()))

    def _reference(self, path: str, resolution: int, flip: bool) -> Reference:
        buckets = self.buckets.get(self.ids[path], [])
        # The crop's resolution, else the next lower one, else the reference's lowest.
        fitting = [row for row in buckets if row["resolution"] <= resolution] or buckets[:1]
        latent = self.encoded.get((*place(fitting[-1]), flip)) if fitting else None
        if latent is None:
            raise ValueError(f"train: the reference {path} has no latent; see the tables buckets and latents")
        return Reference(latent["latent_id"], (latent["shape"][1], latent["shape"][2]))


PLACE = ("image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h")  # columns that a bucket and its latents share


def size(row: Row) -> tuple[Any, ...]:
    """Image and trained size: equal for a bucket and the jittered crops made from it."""
    return row["image_id"], row["width"], row["height"]


def is_inside(row: Row, bucket: Row | None) -> bool:
    """Whether the crop of a latent lies inside that of its bucket, to a thousandth of a pixel."""
    if bucket is None or None in (row["crop_x"], row["crop_y"], row["crop_w"], row["crop_h"]):
        return False
    return all(
        row[start] >= bucket[start] - 1e-3 and row[start] + row[side] <= bucket[start] + bucket[side] + 1e-3
        for start, side in (("crop_x", "crop_w"), ("crop_y", "crop_h"))
    )


def place(row: Row) -> tuple[Any, ...]:
    """Image, trained size and crop: equal for a bucket and its own latents."""
    return tuple(row[name] for name in PLACE)
