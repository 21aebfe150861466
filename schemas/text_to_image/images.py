"""images: one row per file found in the project's image folder, usable or not."""

import pyarrow as pa

from schemas.table import TableSchema, column

IMAGES = TableSchema(
    name="images",
    doc="One row per file in the image folder. A file that cannot be used is a row too, with the reason.",
    key=("path",),
    columns=(
        column("path", pa.string(), "path below the image folder, with forward slashes"),
        column("image_id", pa.string(), "sha256 of the file's bytes, hex; empty if the file cannot be read"),
        column("bytes", pa.int64(), "file size, bytes"),
        column("mtime_ns", pa.int64(), "time of last change, nanoseconds since 1970"),
        column("inode", pa.int64(), "inode number; with size and mtime it tells an unchanged file without reading it"),
        column("format", pa.string(), "JPEG, PNG, WEBP, ...; empty if unknown"),
        column("mode", pa.string(), "Pillow's mode of the file: RGB, RGBA, L, LA, P, CMYK, I;16, ...; empty if unknown"),
        column("width", pa.int32(), "width after orientation, pixels; 0 if unknown"),
        column("height", pa.int32(), "height after orientation, pixels; 0 if unknown"),
        column("frames", pa.int32(), "number of frames; the first is used"),
        column(
            "rejected",
            pa.string(),
            "why it is not used: unreadable, truncated, bomb, too_small, duplicate, unsupported",
            null=True,
        ),
        column("detail", pa.string(), "the reason in words; empty for a usable image"),
    ),
)
