"""samples: one row per preview image."""

import pyarrow as pa

from schemas.table import TableSchema, column

SAMPLES = TableSchema(
    name="samples",
    doc="One row per preview: a prompt, a seed, and the adapter that drew it; the bare base too.",
    key=("adapter_id", "caption_id", "seed", "width", "height"),
    retains_dead_rows=True,
    columns=(
        column("adapter_id", pa.string(), "sha256 of the adapter's weights, hex; empty for the bare base"),
        column("step", pa.int32(), "training step of the checkpoint; 0 for the bare base"),
        column("caption_id", pa.string(), "the preview prompt"),
        column("prompt", pa.string(), "its text"),
        column("seed", pa.int64(), "seed of the starting noise"),
        column("width", pa.int32(), "pixels"),
        column("height", pa.int32(), "pixels"),
        column("path", pa.string(), "PNG below the table's artifacts folder"),
        column("seconds", pa.float32(), "wall time, seconds", measured=True),
    ),
)
