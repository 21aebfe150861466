"""The table `generated`: one row per picture drawn on request."""

import pyarrow as pa

from schemas.table import TableSchema, column

GENERATED = TableSchema(
    name="generated",
    doc="One row per picture that `latentmill generate` drew. The key is computed from everything that decides the picture.",
    key=("picture_id",),
    retains_dead_rows=True,
    artifact="path",
    columns=(
        column("picture_id", pa.string(), "sha256 of adapter, strength, prompt, seed, size, steps, guidance and weights, hex"),
        column(
            "adapter_id",
            pa.string(),
            "sha256 of the adapter's file, hex; empty for the base model alone; of several adapters strength*sha256, joined by +",
        ),
        column(
            "step", pa.int32(), "training step of the adapter, of the first one if there are several; 0 for the base model alone"
        ),
        column(
            "strength", pa.float64(), "factor of the adapter: 1 as trained or with several adapters, 0 for the base model alone"
        ),
        column("prompt", pa.string(), "text of the prompt"),
        column("seed", pa.int64(), "seed of the starting noise"),
        column("width", pa.int32(), "width of the picture, pixels"),
        column("height", pa.int32(), "height of the picture, pixels"),
        column("steps", pa.int32(), "denoising steps"),
        column("guidance", pa.float64(), "guidance scale"),
        column("path", pa.string(), "path of the PNG below the artifacts folder of generated"),
        column("seconds", pa.float32(), "time to draw the latent, seconds", measured=True),
        column(
            "reference_id",
            pa.string(),
            "sha256 of each reference's file, hex, joined by +; null without references",
            unrecorded=True,
        ),
    ),
)
