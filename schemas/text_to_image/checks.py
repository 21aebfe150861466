"""The table `checks`: one row per usable image."""

import pyarrow as pa

from schemas.table import TableSchema, column

CHECKS = TableSchema(
    name="checks",
    doc="One row per usable image: what was measured in its picture and captions, and warnings. A warning excludes no image; "
    "[buckets] where does.",
    key=("image_id",),
    columns=(
        column("image_id", pa.string(), "image: sha256 of its file"),
        column("path", pa.string(), "path of the file, relative to the image folder"),
        column("blur", pa.float64(), "blur, 0 (sharp) to 1 (without detail): how little a further blur takes from the picture"),
        column("brightness", pa.float64(), "mean brightness of the parts with detail, 0 (black) to 1 (white)"),
        column("clipped", pa.float64(), "share of pixels in the parts with detail that are black or white"),
        column("border", pa.float64(), "share of the picture that is a border of one colour across its whole width or height"),
        column("short_side", pa.int32(), "shorter side of the upright image, pixels"),
        column("aspect", pa.float64(), "aspect ratio, longer side over shorter side"),
        column("hash", pa.string(), "perceptual hash of the picture, 16 hex digits"),
        column("thumbnail", pa.binary(), "grey picture of 32 x 32 pixels, row by row, by which near-duplicates are compared"),
        column("duplicate_of", pa.string(), "larger image of which this one is a near-duplicate; null for none", null=True),
        column("similarity", pa.float64(), "correlation with that image, at most 1; null for none", null=True),
        column("warnings", pa.string(), "names of the warnings, separated by commas; empty for none"),
        column("detail", pa.string(), "explanation of the warnings, one sentence each; empty for none"),
    ),
)
