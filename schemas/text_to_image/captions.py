"""captions: one row per text and what it is for."""

import pyarrow as pa

from schemas.table import TableSchema, column

CAPTIONS = TableSchema(
    name="captions",
    doc="One row per caption of an image, plus the texts that belong to no image. Equal texts share a caption_id.",
    key=("image_id", "role", "caption_id"),
    columns=(
        column("caption_id", pa.string(), "sha256 of the text (UTF-8), hex"),
        column("image_id", pa.string(), "the image it describes; empty for texts that belong to no image"),
        column(
            "role",
            pa.string(),
            "caption (of an image), empty (caption dropout, negative prompt), trigger (caption dropout to the trigger alone), "
            "class (a caption or the trigger with the class word in the trigger's place) or preview (to sample)",
        ),
        column("text", pa.string(), "what the text encoder reads, after the template"),
        column("source", pa.string(), "sidecar, metadata, filename, template or config"),
        column("origin", pa.string(), "file it came from, with line or row number where it has one"),
        column(
            "position",
            pa.int32(),
            "0-based order among the image's captions, or the preview prompts; class: that of its original",
        ),
    ),
)
