"""embeddings: one row per distinct text, encoded."""

import pyarrow as pa

from schemas.table import TableSchema, column, tensor

EMBEDDINGS = TableSchema(
    name="embeddings",
    doc="One row per distinct caption: three hidden states of the text encoder, concatenated, padded to the family's length.",
    key=("caption_id",),
    tensors=(tensor(),),
    columns=(
        column("caption_id", pa.string(), "sha256 of the text, hex"),
        column("tokens", pa.int32(), "real tokens, chat template included, before padding"),
        column("dropped_tokens", pa.int32(), "tokens of the caption beyond the family's length, which were cut; 0 as a rule"),
        column("shape", pa.list_(pa.int32()), "tensor shape: rows (512), 3 x hidden size"),
        column("dtype", pa.string(), "bfloat16"),
        column("mean", pa.float32(), "mean over the real rows"),
        column("std", pa.float32(), "standard deviation over the real rows"),
        column("absmax", pa.float32(), "largest magnitude over the real rows"),
    ),
)
