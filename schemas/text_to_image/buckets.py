"""The table `buckets`: one row per image and resolution."""

import pyarrow as pa

from schemas.table import TableSchema, column

BUCKETS = TableSchema(
    name="buckets",
    doc="One row per usable image and resolution: the size that the image is trained at, and the crop that is used.",
    key=("image_id", "resolution"),
    columns=(
        column("image_id", pa.string(), "image: sha256 of its file"),
        column("resolution", pa.int32(), "resolution R, pixels: the area of the size is at most R x R"),
        column("width", pa.int32(), "width that the image is trained at, pixels, a multiple of 16"),
        column("height", pa.int32(), "height that the image is trained at, pixels, a multiple of 16"),
        column("crop_x", pa.float64(), "left edge of the crop, pixels of the upright image"),
        column("crop_y", pa.float64(), "top edge of the crop, pixels of the upright image"),
        column("crop_w", pa.float64(), "width of the crop, pixels of the upright image"),
        column("crop_h", pa.float64(), "height of the crop, pixels of the upright image"),
        column("scale", pa.float64(), "scale factor, trained pixels per image pixel; above 1, the image is enlarged"),
        column("crop_loss", pa.float64(), "share of the image's area that is cropped away, 0 to 1"),
        column("tokens", pa.int32(), "number of image tokens: width / 16 * height / 16"),
        column(
            "rejected",
            pa.string(),
            "reason why this resolution is not trained: too_small, same_crop as a lower resolution, where; null if it is",
            null=True,
        ),
    ),
)
