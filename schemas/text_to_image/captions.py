"""The table `captions`: one row per text and use."""

import pyarrow as pa

from schemas.table import TableSchema, column

CAPTIONS = TableSchema(
    name="captions",
    doc="One row per caption of an image, and per text that belongs to no image; equal texts have the same caption_id.",
    key=("image_id", "role", "caption_id"),
    columns=(
        column("caption_id", pa.string(), "sha256 of the text in UTF-8, hex"),
        column("image_id", pa.string(), "image that the text describes; empty for a text that belongs to no image"),
        column(
            "role",
            pa.string(),
            "use of the text: caption (of an image), empty (for caption dropout, and as negative prompt), trigger (for caption "
            "dropout to the trigger alone), class (a text with the class word in place of the trigger) or preview (a prompt)",
        ),
        column("text", pa.string(), "text that the text encoder reads, with the template applied"),
        column(
            "source",
            pa.string(),
            "source of the text: sidecar, metadata, filename, description (by a model), folder (its name), template, config or "
            "edit (in this project)",
        ),
        column("origin", pa.string(), "file that the text was found in, with line number, or setting that it was made from"),
        column(
            "position",
            pa.int32(),
            "position among the image's captions, or among the preview prompts, from 0; class: position of the original text",
        ),
        column("template", pa.string(), "template that the text was made with; null if no template was applied", unrecorded=True),
        column("reason", pa.string(), "why captions.template was changed; null if it was applied as it is", unrecorded=True),
        column(
            "weight",
            pa.float64(),
            "draws of the text relative to the image's other captions ([captions] weights); null: as often as each of them",
            unrecorded=True,
        ),
    ),
)
