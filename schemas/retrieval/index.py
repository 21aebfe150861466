"""The table `index`: one row per encoder and unit that a search can find."""

import pyarrow as pa

from schemas.table import TableSchema, column

INDEX = TableSchema(
    name="index",
    doc="One row per unit that a search can find; the artifacts hold the vectors of all units and their words.",
    key=("unit_id",),
    columns=(
        column("unit_id", pa.string(), "the unit, a key of the table units"),
        column("encoder", pa.string(), "the encoder of the vectors: base, or the sha256 of the adapter file"),
        column("vector_id", pa.string(), "the vectors of the unit's text, a key of the table vectors"),
        column("path", pa.string(), "the file, a value of path in the table sources"),
        column("qualified_name", pa.string(), "name with the names of the classes and functions around it, joined by dots"),
        column("first_line", pa.int32(), "first line of the unit in its file, from 1"),
        column("last_line", pa.int32(), "last line of the unit in its file"),
        column("signature", pa.string(), "the lines from the first word to the colon that opens the body, on one line"),
        column("file", pa.string(), "where the file lies: relative to the project's folder, or absolute"),
        column("text_id", pa.string(), "the document of the unit, a key of the table tokens"),
        column("words", pa.string(), "words for lexical search"),
        column("count", pa.int32(), "number of vectors, one per token"),
    ),
)
