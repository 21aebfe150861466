"""The table `images`: one row per file in the image folder."""

import pyarrow as pa

from schemas.table import TableSchema, column

IMAGES = TableSchema(
    name="images",
    doc="One row per file in the image folder; a file that cannot be used has a row with the reason.",
    key=("path",),
    columns=(
        column("path", pa.string(), "path of the file, relative to the image folder, with forward slashes"),
        column("image_id", pa.string(), "sha256 of the file's bytes, hex; empty for a file that cannot be read"),
        column("bytes", pa.int64(), "file size, bytes"),
        column("mtime_ns", pa.int64(), "modification time of the file, nanoseconds since 1970"),
        column(
            "inode",
            pa.int64(),
            "inode number of the file; a file with the same path, size, modification time and inode is not read again",
        ),
        column("format", pa.string(), "file format, in Pillow's names: JPEG, PNG, WEBP, ...; empty if unknown"),
        column("mode", pa.string(), "pixel mode, in Pillow's names: RGB, RGBA, L, LA, P, CMYK, I;16, ...; empty if unknown"),
        column("width", pa.int32(), "width of the upright image, pixels; 0 if unknown"),
        column("height", pa.int32(), "height of the upright image, pixels; 0 if unknown"),
        column("frames", pa.int32(), "number of frames, of which only the first is used; 0 if unknown"),
        column(
            "rejected",
            pa.string(),
            "reason why the file is not used: unreadable, truncated, bomb, too_large, too_small, range, duplicate, "
            "unsupported; null if it is used",
            null=True,
        ),
        column("detail", pa.string(), "explanation of the reason, a sentence; empty for a usable image"),
        column(
            "folder",
            pa.string(),
            "folder whose name or [[images.folder]] entry gives the next columns, below the image folder; null for none",
            unrecorded=True,
        ),
        column(
            "use",
            pa.string(),
            "regularisation for an image of the class, trained without trigger; reference for a picture that an edit starts "
            "from; else null",
            unrecorded=True,
        ),
        column("repeats", pa.float64(), "occurrences per epoch that the folder asks for; null: 1", unrecorded=True),
        column(
            "weight",
            pa.float64(),
            "draws of the folder relative to other folders, whatever its number of images; null: by its images and repeats",
            unrecorded=True,
        ),
        column("trigger", pa.string(), "trigger of the folder's images; null: that of [captions]", unrecorded=True),
        column(
            "concept",
            pa.string(),
            "subject that the folder is named after: the caption of an image without one",
            unrecorded=True,
        ),
        column(
            "offset",
            pa.int64(),
            "position of an image inside a tar (bytes) or a Parquet or Arrow file (row); null for a file of its own",
            unrecorded=True,
        ),
        column(
            "reference_of",
            pa.string(),
            "path of the image that a reference belongs to; null if it belongs to none",
            unrecorded=True,
        ),
        column("reference", pa.int32(), "number of a reference among those of its image, from 1; else null", unrecorded=True),
    ),
)
