"""The table `pairs`: one row per unit with a docstring: a query and the document that answers it."""

import pyarrow as pa

from schemas.table import TableSchema, column

PAIRS = TableSchema(
    name="pairs",
    doc="One row per unit with a docstring: the query, the document that answers it, and its split, or why it is not used.",
    key=("pair_id",),
    columns=(
        column("pair_id", pa.string(), "sha256 of unit_id and query, hex"),
        column("unit_id", pa.string(), "the unit that answers the query, a key of the table units"),
        column("package", pa.string(), "the root and the file's top-level module"),
        column("query", pa.string(), "the query: first sentence of the docstring"),
        column("query_id", pa.string(), "sha256 of the word query, a line feed and the query, hex; a key of the table tokens"),
        column("text_id", pa.string(), "the document of the unit, a key of the table tokens"),
        column("split", pa.string(), "train, valid or test"),
        column(
            "duplicate_group",
            pa.string(),
            "pair_id of the first pair (by path and line) with the same query or body; they are never each other's negatives",
        ),
        column("overlap", pa.float32(), "share of the distinct words of the query that occur in the document, 0 to 1"),
        column(
            "leak",
            pa.float32(),
            "for a train pair, the largest Jaccard similarity of token trigrams with a document of valid or test, 0 to 1; else 0",
        ),
        column(
            "rejected",
            pa.string(),
            "reason why the pair is not used: short_query, long_query, short_body, boilerplate, no_overlap, verbatim, duplicate, "
            "leak; null if it is used",
            null=True,
        ),
        column("detail", pa.string(), "explanation of the reason, a sentence; empty for a pair that is used"),
    ),
)
