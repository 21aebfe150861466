"""Writes data/README.md, the dictionary of the tables, from the schemas themselves."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from schemas.table import TableSchema
from stages.text_to_image import PIPELINE

FILE = Path(__file__).parents[1] / "README.md"

TOP = """\
<!-- Generated from schemas/ by `make dictionary`; a test compares. Change the schemas, not this file. -->

# The tables

Every stage writes one table, which bears the stage's name. `latentmill query` knows each by that name;
`select * from columns` shows this page's columns there.

| table | key | what a row is |
|---|---|---|
"""

LAYOUT = """
## On disk

```
data/cats/
  project.toml                          one section per stage
  images/                               yours; never written
  tables/<table>/<recipe>/
    manifest.json                       the recipe in clear text, counts, what made the table; written last
    rows.lance/                         the rows
    shards/*.arrow                       latents and embeddings: the tensors, uncompressed Arrow, memory-mapped
    artifacts/                          train: checkpoints and the adapter; samples: the previews and their grid
  exports/                              adapters for other programs, from `latentmill export`
```

A **recipe** names what a stage's function is: the stage and its version, the settings that change its rows, its columns, and
the sha256 of the weights it loads. Another recipe is another folder, so two configurations never mix, and two manifests can
be compared to see which knob differs. A row's **key** names what the function was applied to. A row is made again only
when a column that it depends on changed; rows that nothing names any more are invisible, and `latentmill clean` deletes them.

A tensor is stored as 16-bit words in row-major order; its row says in `shard`, `byte_offset` and `nbytes` where it lies, in
`shape` and `dtype` what it is. The shards are plain Arrow files, readable by themselves (`pyarrow.dataset.dataset(folder,
format="ipc")`, which DuckDB can register); in the SQL of `latentmill query`, `bf16(word)` is a word's value.

*Measured* columns are clocks and memory: the only ones in which two runs of the same recipe may differ.
"""


def render() -> str:
    """The text of data/README.md."""
    schemas = [PIPELINE.stage(name).writes for name in PIPELINE.stages]
    index = "".join(f"| [{s.name}](#{s.name}) | {', '.join(s.key)} | {s.doc} |\n" for s in schemas)
    return "\n".join([TOP + index.rstrip("\n"), *map(_section, schemas), LAYOUT.rstrip("\n")]) + "\n"


def write() -> None:
    """Write data/README.md."""
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
