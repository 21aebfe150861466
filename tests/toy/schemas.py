"""The tables of the toy pipeline. `train` has the name of a table of text_to_image and other columns."""

import pyarrow as pa

from schemas.table import TableSchema, column, tensor

LINES = TableSchema(
    name="lines",
    doc="One row per line of a text file.",
    key=("line_id",),
    columns=(
        column("line_id", pa.string(), "sha256 of path, line number and text, hex"),
        column("path", pa.string(), "path below the text folder"),
        column("number", pa.int32(), "1-based number of the line"),
        column("text", pa.string(), "the line without its line break"),
        column("words", pa.int32(), "number of words"),
    ),
)
TOKENS = TableSchema(
    name="tokens",
    doc="One row per line: its characters as token ids, and their frequencies as 8-bit numbers with a scale.",
    key=("line_id",),
    tensors=(
        tensor("ids", "int32", "token ids, one per character"),
        tensor("rarity", "int8", "rarity of each token; times `scale`"),
    ),
    columns=(
        column("line_id", pa.string(), "the line"),
        column("ids_shape", pa.list_(pa.int32()), "shape of ids: number of characters"),
        column("rarity_shape", pa.list_(pa.int32()), "shape of rarity: number of characters"),
        column("scale", pa.float32(), "factor of rarity"),
    ),
)
TRAIN = TableSchema(
    name="train",
    doc="One row per line that a step drew: its loss and its rank among the lines of the batch.",
    key=("step", "split", "sample"),
    columns=(
        column("step", pa.int32(), "optimizer step, from 1"),
        column("split", pa.string(), "train", default="train"),
        column("sample", pa.int32(), "0-based place in the step"),
        column("line_id", pa.string(), "the line"),
        column("loss", pa.float32(), "cross-entropy of the line among all lines of its batch"),
        column("lr", pa.float32(), "learning rate"),
        column("grad_norm", pa.float32(), "global norm of the gradient before clipping"),
        column("seconds", pa.float32(), "duration of the step, seconds", measured=True),
        column("read_seconds", pa.float32(), "time that the step waited for its data, seconds", measured=True),
        column("peak_bytes", pa.int64(), "MLX's peak memory so far, bytes", measured=True),
    ),
)
