"""Write data/docs/tables.md, the dictionary of the tables, from the schemas: `make pages`."""

from __future__ import annotations

import pyarrow as pa

from data import DOCS
from schemas.table import TableSchema
from stages.text_to_image import PIPELINE

FILE = DOCS / "tables.md"

INTRODUCTION = """\
<!-- Generated from schemas/ by `make pages`; a test compares. Change the schemas, not this file. -->

# The tables

Every stage writes one table, which has the stage's name. In the SQL of `latentmill query` the tables have these names, and
`select * from columns` lists the columns that this page describes.

| table | key | what a row is |
|---|---|---|
"""

STORAGE = """
## On disk

```
data/cats/
  project.toml                          one section per stage
  images/                               your images; the program never writes here
  tables/<table>.lance                  a link to the rows of the last run, for LanceDB
  tables/<table>/<recipe>/
    manifest.json                       the recipe in clear text, counts, versions; written last
    rows.lance/                         the rows
    shards/*.arrow                      latents and embeddings: the tensors, uncompressed Arrow, memory-mapped
    artifacts/                          train: checkpoints and the adapter; samples: the previews and their grid
  exports/                              adapters for other programs, written by `latentmill export`
```

A **recipe** identifies what a stage computes: the stage and its version, the settings that change its rows, its columns, and
the sha256 of the weights that it loads. Each recipe has a folder of its own, so the rows of two configurations never mix.
Compare two manifests to see which setting differs. A row's **key** identifies what the stage was applied to. A row is computed
again only if a column that it depends on has changed. Rows that are no longer wanted are hidden, and `latentmill clean` deletes
them.

The row of a tensor says in `shard`, `byte_offset` and `nbytes` where its values are stored, in row-major order, and in `shape`
and `dtype` what they are. bfloat16 is stored as 16-bit words; in the SQL of `latentmill query`, `bf16(word)` is the value of a
word. Shards are plain Arrow files that can be read without this program: `pyarrow.dataset.dataset(folder, format="ipc")`, which
DuckDB can register too.

The rows are Lance datasets, so LanceDB reads them too: `lancedb.connect("data/cats/tables").open_table("images")`, or
`Project("data/cats").lancedb()` in Python. There each row has one more column, `live`: true for the rows that this program
shows, false for rows that are no longer wanted, null for rows of a run that has not finished.

Columns marked *measured* hold clock times and memory. Only they may differ between two runs of one recipe.
"""


def render() -> str:
    """Return the text of data/docs/tables.md."""
    schemas = [PIPELINE.stage(name).writes for name in PIPELINE.stages]
    index = "\n".join(f"| [{s.name}](#{s.name}) | {', '.join(s.key)} | {s.doc} |" for s in schemas)
    return "\n".join([INTRODUCTION + index, *map(_section, schemas), STORAGE])


def write() -> None:
    """Write data/docs/tables.md."""
    FILE.write_text(render(), encoding="utf-8")


def _section(schema: TableSchema) -> str:
    head = f"\n## {schema.name}\n\n{schema.doc}\n\n| column | type | what it holds |\n|---|---|---|\n"
    tensors = "".join(
        f"\n\nTensor `{t.name}`, {t.dtype}: {t.doc}. It is stored in a file under `shards/`." for t in schema.tensors
    )
    return head + "\n".join(_line(schema, field) for field in schema.stored) + tensors


def _line(schema: TableSchema, field: pa.Field) -> str:
    metadata = field.metadata or {}
    marks = [
        "**key**" if field.name in schema.key else "",
        "may be null" if field.nullable else "",
        "*measured*" if metadata.get(b"measured") else "",
    ]
    doc = metadata.get(b"doc", b"").decode().replace("|", "\\|")
    kind = str(field.type).replace("list<item: ", "list of ").removesuffix(">")
    return f"| {field.name} | {kind} | {'; '.join([doc, *filter(None, marks)])} |"


if __name__ == "__main__":
    write()
