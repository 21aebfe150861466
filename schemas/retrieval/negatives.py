"""The table `negatives`: one row per training pair and hard negative."""

import pyarrow as pa

from schemas.table import TableSchema, column

NEGATIVES = TableSchema(
    name="negatives",
    doc="One row per training pair and hard negative: a document that search ranks high and that does not answer the query.",
    key=("pair_id", "position"),
    columns=(
        column("pair_id", pa.string(), "the training pair, a key of the table pairs"),
        column("position", pa.int32(), "place among the negatives of the pair, from 0; the hardest first"),
        column("unit_id", pa.string(), "the negative, a key of the table units"),
        column("text_id", pa.string(), "the document of the negative, a key of the table tokens"),
        column("score", pa.float32(), "score of the negative for the query: BM25, or MaxSim of an encoder"),
        column("positive_score", pa.float32(), "score of the pair's own document for the query; 0 if search does not find it"),
        column("source", pa.string(), "the search that found the negative: lexical, or the setting negatives.encoder"),
    ),
)
