"""The table `descriptions`: one row per image that a model has captioned."""

import pyarrow as pa

from schemas.table import TableSchema, column

DESCRIPTIONS = TableSchema(
    name="descriptions",
    doc="One row per image without a caption of its own, with the caption that a vision-language model wrote.",
    key=("image_id",),
    retains_dead_rows=True,
    columns=(
        column("image_id", pa.string(), "image: sha256 of its file"),
        column("path", pa.string(), "path of the file when it was read, relative to the image folder"),
        column("text", pa.string(), "caption that the model wrote, without line breaks"),
        column("prompt", pa.string(), "instruction that the model was given"),
        column("model", pa.string(), "model, as the setting or the server names it"),
        column("version", pa.string(), "version of the program that ran the model; empty if a server does not say"),
        column("seconds", pa.float32(), "time to write the caption, seconds", measured=True),
    ),
)
