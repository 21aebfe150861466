"""Sizes of images that a stage will meet, for forecasts: from the table `buckets` if it is built, else from the settings."""

from __future__ import annotations

from schemas.text_to_image.buckets import BUCKETS
from stages.forecast import Outlook

BFLOAT16 = 2  # bytes


def image_sizes(outlook: Outlook) -> list[tuple[int, int]]:
    """(width, height) of every crop; without the table, a square per resolution."""
    rows = outlook.rows(BUCKETS)
    if rows is None or not rows.num_rows:
        return [(side, side) for side in outlook.sections["buckets"].resolutions]
    kept = [row for row in rows.to_pylist() if row["rejected"] is None]
    return [(row["width"], row["height"]) for row in kept] or [(0, 0)]


def largest_image(outlook: Outlook) -> tuple[int, int]:
    return max(image_sizes(outlook), key=lambda size: (size[0] * size[1], size))


def latent_bytes(outlook: Outlook, channels: int) -> int:
    """Mean size of a latent on disk."""
    side: int = outlook.family.architecture.pixels_per_token
    sizes = image_sizes(outlook)
    return BFLOAT16 * channels * sum(width * height for width, height in sizes) // (side * side * len(sizes))
