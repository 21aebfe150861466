"""The rows of all training runs for DuckDB: a query reads the columns that it needs, when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from pipeline.store.table import TableFolder
from schemas.table import TableSchema

LABELS = ("run", "run_name")


class RowsOfRuns(ds.Dataset):  # type: ignore[misc]
    """What DuckDB asks of a dataset of Arrow, as Lance's own class does: `schema` and `scanner`.

    In memory, ten runs of 20,000 steps would be 38 MB: a column that Lance has read holds what Lance read of the whole file.
    """

    schema: pa.Schema = None  # Dataset's own cannot be set

    def __init__(self, tables: Mapping[tuple[str, str], TableFolder], schema: TableSchema) -> None:
        self.tables = tables  # by the values of LABELS
        self.key = schema.key
        self.schema = pa.schema([*((name, pa.string()) for name in LABELS), *schema.stored])

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> ds.Scanner:
        # DuckDB does not name columns that only the filter needs.
        read = [name for name in self.schema.names if columns is None or name in columns or name in str(filter)]
        whole = pa.schema([self.schema.field(name) for name in read])

        def batches() -> Iterator[pa.RecordBatch]:
            for labels, table in self.tables.items():
                rows = table.committed([name for name in read if name not in LABELS] or self.key)
                texts = dict(zip(LABELS, labels, strict=True))
                for batch in rows.to_batches():
                    own = [pa.repeat(texts[name], batch.num_rows) if name in texts else batch[name] for name in read]
                    yield pa.RecordBatch.from_arrays(own, schema=whole)

        return ds.Scanner.from_batches(
            batches(), schema=whole, columns=columns, filter=filter, use_threads=False, batch_readahead=1
        )
