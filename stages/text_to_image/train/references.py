"""The references of each crop: which latents are shown to the model beside the noisy latent in edit training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stages.text_to_image.imaging.references import USE

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A reference: an image that the model sees beside the noisy image, in edit training. `latent_id` is the key of its
    latent in the table `latents`. `grid` is the (height, width) of the latent in image tokens.
    """

    latent_id: str
    grid: tuple[int, int]


class References:
    """A lookup of references. A reference is an image that the model sees beside the noisy image, in edit training.
    Call `of` for the references of one crop. A crop is the part of an image that is trained.
    """

    def __init__(self, images: Iterable[Row], buckets: Iterable[Row], latents: Iterable[Row]) -> None:
        """Prepare the method `of`, which finds the references of a crop (the trained part of an image). A reference is
        an image that the model sees beside the noisy image. `images`, `buckets` and `latents` are the rows of the
        tables with these names. Each row is a dict from column to value. `images` says which image is a reference of
        which image. `buckets` gives the resolutions and crops of each reference. `latents` gives the key and shape of
        each reference's latent.
        """
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
        """Return the references of one crop, in their order. A crop is the part of an image that is trained. `image_id`
        is the image of the crop. `resolution` is the resolution at which the crop is trained. `flip` is True if the
        crop is mirrored. Its references are then mirrored too. Raises ValueError if a reference has no latent.

        A reference has the resolution of the crop. If it does not exist at this resolution, the next lower one is
        taken. If there is no lower one, its lowest is taken.
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


def size(row: Row) -> tuple[Any, ...]:
    """Return (image_id, width, height) of a row of the table `buckets` or `latents`. `row` is the row as a dict. The
    width and the height are the trained size: the size in pixels to which the crop of the row is resized. A crop is the
    part of an image that is trained.

    With the setting [latents] `jitter`, the table `latents` also has smaller crops of an image. A smaller crop is
    resized to the same width and height as the crop in the table `buckets` from which it was made.
    """
    return row["image_id"], row["width"], row["height"]


def is_inside(row: Row, bucket: Row | None) -> bool:
    """Return True if the crop of a row of the table `latents` lies inside the crop of a row of the table `buckets`, with a
    tolerance of a thousandth of a pixel. If `bucket` is None, return False.
    """
    if bucket is None or None in (row["crop_x"], row["crop_y"], row["crop_w"], row["crop_h"]):
        return False
    return all(
        row[start] >= bucket[start] - 1e-3 and row[start] + row[side] <= bucket[start] + bucket[side] + 1e-3
        for start, side in (("crop_x", "crop_w"), ("crop_y", "crop_h"))
    )


def place(row: Row) -> tuple[Any, ...]:
    """Return the values that say which part of an image a row is about. They are the image_id, the trained size, and
    the edges of the crop. `row` is a row of the table `buckets` or `latents`, as a dict.
    """
    return tuple(row[name] for name in PLACE)
