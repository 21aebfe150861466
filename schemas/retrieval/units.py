"""The table `units`: one row per function, method, class or window of lines."""

import pyarrow as pa

from schemas.table import TableSchema, column

UNITS = TableSchema(
    name="units",
    doc="One row per function, method, class or window of lines: what a search finds.",
    key=("unit_id",),
    columns=(
        column("unit_id", pa.string(), "sha256 of path, qualified name, first and last line and text_id, hex"),
        column("path", pa.string(), "the file, a value of path in the table sources"),
        column("source_id", pa.string(), "sha256 of the file's bytes, hex"),
        column("language", pa.string(), "programming language of the file"),
        column("package", pa.string(), "the root and the file's top-level module, joined by a slash"),
        column("module", pa.string(), "dotted name of the file's module"),
        column("name", pa.string(), "name of the function or class; empty for a window of lines"),
        column("qualified_name", pa.string(), "name with the names of the classes and functions around it, joined by dots"),
        column("kind", pa.string(), "function, method, class, or lines (a window of lines)"),
        column("first_line", pa.int32(), "first line of the unit in its file, decorators included, from 1"),
        column("last_line", pa.int32(), "last line of the unit in its file"),
        column("code_lines", pa.int32(), "lines of the body that hold code: without signature, docstring, comments, empty lines"),
        column("signature", pa.string(), "the lines from the first word to the colon that opens the body, on one line"),
        column("docstring", pa.string(), "the docstring, cleaned of its indentation; empty if there is none"),
        column(
            "body", pa.string(), "the body without the docstring, indentation removed; of a class the signatures of its methods"
        ),
        column("query", pa.string(), "first sentence of the docstring, on one line; null without a docstring", null=True),
        column(
            "text",
            pa.string(),
            "the document: module, qualified name, signature and body; comments are kept, docstring and decorators are not",
        ),
        column("text_id", pa.string(), "sha256 of the word document, a line feed and the text, hex; a key of the table tokens"),
        column("words", pa.string(), "words for lexical search: identifiers split and lower-cased, with name and path, spaced"),
    ),
)
