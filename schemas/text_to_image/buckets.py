"""buckets: one row per image and resolution: which size it is trained at, and what is cropped away."""

import pyarrow as pa

from schemas.table import TableSchema, column

BUCKETS = TableSchema(
    name="buckets",
    doc="One row per usable image and resolution: the size it is trained at and the part of it that is used.",
    key=("image_id", "resolution"),
    columns=(
        column("image_id", pa.string(), "the image"),
        column("resolution", pa.int32(), "R: the bucket's area is at most R x R pixels"),
        column("width", pa.int32(), "bucket width, pixels, a multiple of 16"),
        column("height", pa.int32(), "bucket height, pixels, a multiple of 16"),
        column("crop_x", pa.float64(), "left edge of the part used, source pixels after orientation"),
        column("crop_y", pa.float64(), "top edge of the part used, source pixels"),
        column("crop_w", pa.float64(), "width of the part used, source pixels"),
        column("crop_h", pa.float64(), "height of the part used, source pixels"),
        column("scale", pa.float64(), "bucket pixels per source pixel; above 1 the image is enlarged"),
        column("crop_loss", pa.float64(), "share of the image's area that is cropped away, 0 to 1"),
        column("tokens", pa.int32(), "image tokens: width / 16 * height / 16"),
        column("rejected", pa.string(), "why it is not trained: too_small or same_crop (as a lower resolution)", null=True),
    ),
)
