"""captions: one row per text and what it is for."""

import pyarrow as pa

from schemas.table import TableSchema, column

CAPTIONS = TableSchema(
    name="captions",
    doc="One row per caption of an image, plus the empty caption and the preview prompts. Equal texts share a caption_id.",
    key=("image_id", "role", "caption_id"),
    columns=(
        column("caption_id", pa.string(), "sha256 of the text (UTF-8), hex"),
        column("image_id", pa.string(), "the image it describes; empty for the empty caption and preview prompts"),
        column("role", pa.string(), "caption (of an image), empty (caption dropout, negative prompt) or preview (to sample)"),
        column("text", pa.string(), "what the text encoder reads, after the template"),
        column("source", pa.string(), "sidecar, metadata, filename, template or config"),
        column("origin", pa.string(), "file it came from, with line or row number where it has one"),
        column("position", pa.int32(), "0-based order among the captions of the image, or among the preview prompts"),
    ),
)
