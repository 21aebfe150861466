"""The table `vectors`: one row per encoder and text, with one vector per token."""

import pyarrow as pa

from schemas.table import TableSchema, column, tensor

VECTORS = TableSchema(
    name="vectors",
    doc="One row per encoder and text: a vector of length 1 for every token, from the base or from a tuned encoder.",
    key=("vector_id",),
    tensors=(tensor("vectors", "float16", "one vector per token, each of length 1"),),
    columns=(
        column("vector_id", pa.string(), "sha256 of encoder, a line feed and text_id, hex"),
        column("encoder", pa.string(), "base, or the sha256 of the adapter file that the encoder was tuned with"),
        column("text_id", pa.string(), "the text, a key of the table tokens"),
        column("role", pa.string(), "query or document"),
        column("count", pa.int32(), "number of tokens"),
        column("vectors_shape", pa.list_(pa.int32()), "shape of vectors: tokens, width of a vector"),
    ),
)
