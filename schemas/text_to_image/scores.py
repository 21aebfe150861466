"""scores: one row per picture that was scored."""

import pyarrow as pa

from schemas.table import TableSchema, column

SCORES = TableSchema(
    name="scores",
    doc="One row per picture that was scored: previews of the base and of adapters, and real ones. Compare them: "
    "a score says little by itself.",
    key=("picture_id",),
    retains_dead_rows=True,
    columns=(
        column("picture_id", pa.string(), "sha256 of the file's bytes, hex"),
        column("kind", pa.string(), "base or adapter (a preview, by who drew it) or real (from the folder of references)"),
        column("adapter_id", pa.string(), "sha256 of the adapter's weights, hex; empty for the bare base and for real pictures"),
        column("step", pa.int32(), "training step of the checkpoint; 0 for the bare base and for real pictures"),
        column("prompt", pa.string(), "what was to be drawn; a real picture's caption, empty if it has none"),
        column("seed", pa.int64(), "seed of the starting noise; 0 for real pictures"),
        column("path", pa.string(), "the file, below the previews' artifacts folder or below the folder of references"),
        column(
            "style",
            pa.float32(),
            "place on the way from the base's previews of other prompts (0) to the project's images (1); null without either, or "
            "where they do not differ",
            null=True,
        ),
        column(
            "real",
            pa.float32(),
            "place on the way from the base's previews (0) to the references (1), of which one is measured without itself; "
            "null without either, or where they do not differ",
            null=True,
        ),
        column(
            "agreement",
            pa.float32(),
            "cosine of what the picture shows to what its text says, both less their means; null without a map or a text",
            null=True,
        ),
        column(
            "agreement_rank",
            pa.int32(),
            "place of its own text among all distinct texts by that cosine, 1 the best; null as agreement",
            null=True,
        ),
        column("texts", pa.int32(), "how many distinct texts there were, those of previews and references together"),
    ),
)
