"""The report of `latentmill evaluate` on the table ranks, of rows that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from pipeline.commands.retrieval.evaluate import evaluate


def rows(encoder: str, weight: float | None) -> list[dict[str, Any]]:
    same = {"encoder": encoder, "mode": "hard", "split": "test", "candidates": 9, "weight": weight}
    return [
        same | {"pair_id": str(n), "overlap": n / 8, "lexical": 3, "semantic": weight and 1, "hybrid": weight and 2}
        for n in range(8)
    ]


def test_an_encoder_without_vectors_of_nameless_documents_is_in_no_part_of_the_report():
    table = pa.Table.from_pylist([*rows("ab" * 32, 0.5), *rows("cd" * 32, None)])
    project: Any = SimpleNamespace(rows=lambda schema, reader: table)
    said = "\n".join(evaluate(project))
    assert "semantic - lexical, tuned abababab: +0.667" in said
    assert "tuned abababab:\n" in said and "cdcdcdcd" not in said and "nan" not in said
