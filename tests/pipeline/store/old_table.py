"""Tables as the version before wrote them: the folder of the shards is parts/, and the column `shard` is called part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa

from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import VECTORS, names, vectors, written


def write_old_table(folder: Path, *numbers: int) -> TableFolder:
    """A finished table of VECTORS with these rows, five to a shard, in the form of the version before."""
    table = written(folder, *numbers)
    make_old(table)
    return table


def make_old(table: TableFolder) -> None:
    """Rewrite a finished table in the form of the version before; a table without tensors is left as it is."""
    import lance

    if not table.schema.tensors:
        return
    rows = table.index.read_newest()
    rows = rows.rename_columns(["part" if name == "shard" else name for name in rows.column_names])
    shutil.rmtree(table.index.path)
    dataset = lance.write_dataset(rows, table.index.path, data_storage_version="2.2")
    table.shards.rename(table.folder / "parts")
    manifest = json.loads(table.manifest_file.read_text())
    table.manifest_file.write_text(json.dumps(manifest | {"lance_version": dataset.version}))


def old_columns(table: TableFolder) -> set[str]:
    """The column names of the newest version of a table's Lance dataset."""
    import lance

    return set(lance.dataset(table.index.path).schema.names)


def main(arguments: list[str]) -> None:
    """FOLDER: what a run does to a table of VECTORS that lacks the rows 20 and 21."""
    with Writer(TableFolder(Path(arguments[0]), VECTORS), {"stage": "vectors"}) as writer:
        writer.append(vectors(20, 21))
        writer.finish(pa.concat_tables([names(*range(12)), names(20, 21)]), {})
