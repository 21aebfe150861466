"""The table `tokens`: one row per distinct query and document, with its token ids."""

import pyarrow as pa

from schemas.table import TableSchema, column, tensor

TOKENS = TableSchema(
    name="tokens",
    doc="One row per distinct text and role, with its token ids; text beyond the role's length is cut off.",
    key=("text_id",),
    tensors=(tensor("ids", "int32", "token ids, the end token included, no padding"),),
    columns=(
        column("text_id", pa.string(), "sha256 of role, a line feed and the text, hex: text_id of units, or query_id of pairs"),
        column("role", pa.string(), "query or document"),
        column("count", pa.int32(), "number of token ids, the end token included"),
        column("truncated", pa.int32(), "number of tokens that were cut off because the text is longer than its role's length"),
        column("unknown", pa.int32(), "number of token ids that stand for text outside the vocabulary"),
        column("ids_shape", pa.list_(pa.int32()), "shape of ids: number of tokens"),
    ),
)
