"""The table `embeddings`: one row per distinct text, with its encoding."""

import pyarrow as pa

from schemas.table import TableSchema, column, tensor

EMBEDDINGS = TableSchema(
    name="embeddings",
    doc="One row per distinct text: three hidden states of the text encoder, concatenated, padded to the family's length.",
    key=("caption_id",),
    tensors=(tensor(),),
    columns=(
        column("caption_id", pa.string(), "text, a value of caption_id in the table captions: sha256 of the text, hex"),
        column("tokens", pa.int32(), "number of tokens of the text and its chat template, without padding"),
        column(
            "dropped_tokens",
            pa.int32(),
            "number of tokens that were cut off because the text is longer than the family's length; usually 0",
        ),
        column(
            "shape",
            pa.list_(pa.int32()),
            "shape of the tensor: tokens (512 in released families), 3 x hidden size; for int8, words of 16 bits",
        ),
        column("dtype", pa.string(), "form of the tensor: bfloat16, or int8: for each row 3 float32 scales, then the values"),
        column("mean", pa.float32(), "mean of the values, padding excluded"),
        column("std", pa.float32(), "standard deviation of the values, padding excluded"),
        column("absmax", pa.float32(), "largest absolute value, padding excluded"),
    ),
)
