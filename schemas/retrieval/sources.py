"""The table `sources`: one row per file below the roots."""

import pyarrow as pa

from schemas.table import TableSchema, column

SOURCES = TableSchema(
    name="sources",
    doc="One row per file below the roots; a file that is not read has a row with the reason.",
    key=("path",),
    columns=(
        column("path", pa.string(), "the name of the root, a slash, and the file's path below the root, with forward slashes"),
        column("root", pa.string(), "name of the root: the last part of a folder's path, or the name of an installed package"),
        column("file", pa.string(), "where the file lies: relative to the project's folder, or absolute"),
        column("module", pa.string(), "dotted name of the file's module; for a language without modules, its path with dots"),
        column("source_id", pa.string(), "sha256 of the file's bytes, hex; empty for a file that was not read"),
        column("bytes", pa.int64(), "file size, bytes"),
        column("mtime_ns", pa.int64(), "modification time of the file, nanoseconds since 1970"),
        column(
            "inode",
            pa.int64(),
            "inode number of the file; a file with the same path, size, modification time and inode is not read again",
        ),
        column("language", pa.string(), "programming language, by the suffix: python, rust, ...; empty if unknown"),
        column("lines", pa.int32(), "number of lines; 0 for a file that was not read"),
        column(
            "skipped",
            pa.string(),
            "reason why the file has no units: language, too_large, empty, vendored, generated, binary, encoding, unreadable, "
            "duplicate; null if it is used",
            null=True,
        ),
        column("detail", pa.string(), "explanation of the reason, a sentence; empty for a file that is used"),
    ),
)
