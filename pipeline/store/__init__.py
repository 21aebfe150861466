"""Tables on disk: rows in Lance, tensors in immutable Arrow shards, one writer at a time, readers that see finished runs only.

`pipeline.store` imports `schemas`; it knows no stage, no pipeline and no project. Inside it, imports go one way (pyproject.toml,
import-linter): catalog, writer > table > repair, reader > shards, index, rows > checksums > lock, disk.
"""
