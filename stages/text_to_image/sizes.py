"""Sizes of images that a stage will meet, for forecasts: from the table `buckets` if it is built, else from the settings."""

from __future__ import annotations

from schemas.text_to_image.buckets import BUCKETS
from stages.forecast import Outlook

BFLOAT16 = 2  # bytes


def image_sizes(outlook: Outlook) -> list[tuple[int, int]]:
    """Return a list of (width, height), in pixels, of every crop (trained part of an image) of the table `buckets`. If
    the table is not built or is empty, return one square per resolution of [buckets]. `outlook` gives the tables and
    the settings of all stages.
    """
    rows = outlook.rows(BUCKETS)
    if rows is None or not rows.num_rows:
        return [(side, side) for side in outlook.sections["buckets"].resolutions]
    kept = [row for row in rows.to_pylist() if row["rejected"] is None]
    return [(row["width"], row["height"]) for row in kept] or [(0, 0)]


def largest_image(outlook: Outlook) -> tuple[int, int]:
    """Return (width, height), in pixels, of the crop (trained part of an image) with the most pixels. `outlook` gives
    the tables and the settings of all stages.
    """
    return max(image_sizes(outlook), key=lambda size: (size[0] * size[1], size))


def latent_bytes(outlook: Outlook, channels: int) -> int:
    """Return the mean size of a latent on disk, in bytes. A latent belongs to a crop: the part of an image that is
    trained. `outlook` gives the sizes of the crops and the model family. `channels` is the number of channels of a
    latent.
    """
    side: int = outlook.family.architecture.pixels_per_token
    sizes = image_sizes(outlook)
    return BFLOAT16 * channels * sum(width * height for width, height in sizes) // (side * side * len(sizes))
