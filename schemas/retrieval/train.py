"""The table `train`: one row per training step and pair, with what the step saw."""

import pyarrow as pa

from schemas.table import TableSchema, column

TRAIN = TableSchema(
    name="train",
    doc="One row per training step and pair: its loss and its rank among the documents of the batch.",
    key=("step", "split", "sample"),
    columns=(
        column("step", pa.int32(), "optimizer step, from 1"),
        column(
            "split",
            pa.string(),
            "train: before the step; validation: a held-out pair, ranked with the adapter after the step",
            default="train",
        ),
        column("sample", pa.int32(), "position of the pair in the step, from 0"),
        column("epoch", pa.int32(), "epoch: number of complete passes over the data before this one, from 0"),
        column("pair_id", pa.string(), "the pair, a key of the table pairs"),
        column("query_id", pa.string(), "the query, a key of the table tokens"),
        column("text_id", pa.string(), "the document, a key of the table tokens"),
        column("loss", pa.float32(), "loss of the pair; for a validation row, minus the reciprocal rank"),
        column("rank", pa.int32(), "rank of the own document among the candidates, from 1; ties count against it"),
        column("candidates", pa.int32(), "number of documents that the query was compared with"),
        column("hardest_id", pa.string(), "the best-scored other document, a key of the table tokens; null if none", null=True),
        column("score", pa.float32(), "score of the own document, mean over query tokens, -1 to 1"),
        column("hardest_score", pa.float32(), "score of the hardest other document; null if none", null=True),
        column("lr", pa.float64(), "learning rate of the step"),
        column("grad_norm", pa.float32(), "global norm of the step's gradient before clipping"),
        column("seconds", pa.float32(), "wall time of the step, seconds", measured=True),
        column("read_seconds", pa.float32(), "time of the step that was spent reading rows from disk, seconds", measured=True),
        column("peak_bytes", pa.int64(), "peak memory of MLX up to this step, bytes", measured=True),
    ),
)
