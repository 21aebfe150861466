"""The table `scores`: one row per scored picture."""

import pyarrow as pa

from schemas.table import TableSchema, column

SCORES = TableSchema(
    name="scores",
    doc="One row per scored picture: previews by the base and by adapters, and real pictures. Compare groups of pictures: "
    "the score of a single picture means little.",
    key=("picture_id",),
    retains_dead_rows=True,
    columns=(
        column("picture_id", pa.string(), "sha256 of the file's bytes, hex"),
        column("kind", pa.string(), "base or adapter (a preview, by what drew it) or real (from the folder of references)"),
        column("adapter_id", pa.string(), "sha256 of the adapter's file, hex; empty for the base and for real pictures"),
        column("step", pa.int32(), "training step of the checkpoint; 0 for the base and for real pictures"),
        column("prompt", pa.string(), "prompt of the preview, or caption of the real picture; empty if it has no caption"),
        column("seed", pa.int64(), "seed of the starting noise; 0 for real pictures"),
        column("path", pa.string(), "path of the file, below the artifacts folder of samples or the folder of references"),
        column(
            "style",
            pa.float32(),
            "position on the axis from the base's previews of other prompts (0) to the training images (1); null if one of the "
            "two groups is empty, or if their means do not differ",
            null=True,
        ),
        column(
            "real",
            pa.float32(),
            "position on the axis from the base's previews of other prompts (0) to the other references (1); null if one of the "
            "two groups is empty, or if their means do not differ",
            null=True,
        ),
    ),
)
