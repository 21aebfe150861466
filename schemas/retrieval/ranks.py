"""The table `ranks`: one row per encoder, held-out pair and mode of the test, with the rank that each search gives the answer."""

import pyarrow as pa

from schemas.table import TableSchema, column

RANKS = TableSchema(
    name="ranks",
    doc="One row per held-out query, encoder and mode: the rank of its own unit in semantic, lexical and hybrid search.",
    key=("pair_id", "encoder", "mode"),
    columns=(
        column("pair_id", pa.string(), "the pair, a key of the table pairs"),
        column("encoder", pa.string(), "base, or the sha256 of the adapter file"),
        column("mode", pa.string(), "plain, or hard: the unit's own name is removed from its words and its text"),
        column("split", pa.string(), "valid or test"),
        column("query", pa.string(), "the query"),
        column("unit_id", pa.string(), "the unit that answers the query, a key of the table units"),
        column("overlap", pa.float32(), "share of the distinct words of the query that occur in the document, 0 to 1"),
        column("candidates", pa.int32(), "number of units that were ranked"),
        column(
            "semantic",
            pa.int32(),
            "rank of the unit in semantic search, from 1; ties count against it; null in the hard mode if the documents without "
            "names have no vectors",
            null=True,
        ),
        column("lexical", pa.int32(), "rank of the unit in lexical search, from 1; ties count against it"),
        column("hybrid", pa.int32(), "rank of the unit in hybrid search, from 1; null where semantic is null", null=True),
        column(
            "weight",
            pa.float32(),
            "weight of the semantic scores in hybrid search, 0 to 1, chosen on the valid queries; null where semantic is null",
            null=True,
        ),
        column("top_id", pa.string(), "the unit that semantic search ranks first, or lexical search where semantic is null"),
    ),
)
