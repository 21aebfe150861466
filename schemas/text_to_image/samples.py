"""The table `samples`: one row per preview image."""

import pyarrow as pa

from schemas.table import TableSchema, column

SAMPLES = TableSchema(
    name="samples",
    doc="One row per preview: an image drawn for a prompt and a seed by an adapter, or by the base model alone.",
    key=("adapter_id", "caption_id", "seed", "width", "height"),
    retains_dead_rows=True,
    artifact="path",
    columns=(
        column("adapter_id", pa.string(), "sha256 of the adapter's file, hex; empty for the base model alone"),
        column("step", pa.int32(), "training step of the checkpoint; 0 for the base model and for the file [samples] adapter"),
        column("caption_id", pa.string(), "id of the preview prompt in captions"),
        column("prompt", pa.string(), "text of the preview prompt"),
        column("seed", pa.int64(), "seed of the starting noise"),
        column("width", pa.int32(), "width of the image, pixels"),
        column("height", pa.int32(), "height of the image, pixels"),
        column("path", pa.string(), "path of the PNG below the artifacts folder of samples"),
        column("seconds", pa.float32(), "time to draw and decode the image, seconds", measured=True),
        column(
            "reference_id",
            pa.string(),
            "sha256 of each reference's file, hex, joined by +; null without references",
            unrecorded=True,
        ),
    ),
)
