"""Tables as the versions before wrote them: the folder of the shards is parts/, the column `shard` is called part, and nothing
has a checksum.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa

from pipeline.store.shards import read_shard_index
from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import VECTORS, names, vectors, written


def write_old_table(folder: Path, *numbers: int) -> TableFolder:
    """A finished table of VECTORS with these rows, five to a shard, in the form of the version before."""
    table = written(folder, *numbers)
    make_old(table)
    return table


def make_old(table: TableFolder) -> None:
    """Rewrite a finished table in the form of the versions before."""
    import lance

    rows = table.index.read_newest()
    if table.schema.tensors:
        rows = without_checksums(table, rows)
        table.shards.rename(table.folder / "parts")
    shutil.rmtree(table.index.path)
    dataset = lance.write_dataset(rows, table.index.path, data_storage_version="2.2")
    manifest = json.loads(table.manifest_file.read_text())
    del manifest["checksum"]
    table.manifest_file.write_text(json.dumps(manifest | {"lance_version": dataset.version}))
    table.checksums.file.unlink()


def without_checksums(table: TableFolder, rows: pa.Table) -> pa.Table:
    """Rewrite the shards of a table without checksums. Returns its rows as the index then holds them."""
    places: dict[tuple[str, str], dict[str, int]] = {}
    names = [tensor.checksum for tensor in table.schema.tensors]
    for path in table.shards.glob("*.arrow"):
        batches = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all().drop_columns(names).to_batches()
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema.batch) as out:
            for batch in batches:
                out.write_batch(batch)
        for row in read_shard_index(path, table.schema).to_pylist():
            places[path.name, row[table.schema.key[0]]] = row
    located = [row | places[row["shard"], row[table.schema.key[0]]] for row in rows.to_pylist()]
    old = pa.Table.from_pylist(located, schema=rows.schema).drop_columns(names)
    return old.rename_columns(["part" if name == "shard" else name for name in old.column_names])


def old_columns(table: TableFolder) -> set[str]:
    """The column names of the newest version of a table's Lance dataset."""
    import lance

    return set(lance.dataset(table.index.path).schema.names)


def main(arguments: list[str]) -> None:
    """FOLDER: what a run does to a table of VECTORS that lacks the rows 20 and 21."""
    with Writer(TableFolder(Path(arguments[0]), VECTORS), {"stage": "vectors"}) as writer:
        writer.append(vectors(20, 21))
        writer.finish(pa.concat_tables([names(*range(12)), names(20, 21)]), {})
