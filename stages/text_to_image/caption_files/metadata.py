"""Captions in files that list many images: metadata.jsonl, captions.json, captions.csv and so on.

metadata.* has the columns of Hugging Face's imagefolder (file_name and a caption). captions.json is a map from file name to
caption, or a list of objects. The other files have one row per image.
"""

from __future__ import annotations

import csv
import difflib
import io
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from stages.text_to_image.caption_files.file_names import FileNames
from stages.text_to_image.caption_files.text import Caption, first_names, read_text
from stages.untrusted import parse_json

Row = dict[str, Any]

FILE_NAME = ("file_name",)  # the column of metadata.* that names the image
FILE_COLUMNS = ("file_name", "file", "filename", "image", "image_path", "image_file", "path")  # the same of captions.*
TEXT_COLUMNS = ("text", "caption", "prompt")  # the first of these columns that a row has holds its caption
METADATA_BYTES = 256_000_000  # largest metadata file that is read: about a million long captions


def read_metadata(folder: Path, paths: Iterable[str], column: str = "") -> tuple[dict[str, list[Caption]], list[str]]:
    """(image's path in NFC -> captions, notes about rows whose image does not exist). `column` "" is text, caption or prompt.

    The folders of the images and those above them are searched. Raises ValueError with file and line if a file is malformed.
    """
    paths = list(paths)
    captions: dict[str, list[Caption]] = {}
    notes = []
    for name, read in _metadata_files(folder, paths):
        names = FileNames(folder, paths, posixpath.dirname(name))
        file_columns = FILE_NAME if PurePosixPath(name).name.startswith("metadata.") else FILE_COLUMNS
        unknown = []
        for place, row in read(folder / name):
            file_name, texts = _parse(f"{folder / name}, {place}", row, file_columns, column)
            path = names.find(file_name)
            if path is None:
                unknown.append(file_name)
                continue
            origin = f"{name}:{place.removeprefix('line ')}"
            captions.setdefault(path, []).extend(Caption(text, "metadata", origin) for text in texts)
        if unknown:
            notes.append(f"{name}: {len(unknown)} rows name images that do not exist: {first_names(unknown)}")
    return captions, notes


def _metadata_files(folder: Path, paths: list[str]) -> Iterator[tuple[str, Any]]:
    """(path, reader) of every file of captions. A reader yields (place, row), where the place is a text such as "line 3"."""
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    for parent in sorted(parents):
        for file_name, read in READERS.items():
            name = posixpath.normpath(posixpath.join(parent, file_name))
            if (folder / name).is_file():
                yield name, read


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    for line, text in enumerate(read_text(path, METADATA_BYTES).split("\n"), 1):
        if not text.strip():
            continue
        row = parse_json(text, f"{path}, line {line}")
        if not isinstance(row, dict):
            raise ValueError(
                f'{path}, line {line}: must be a JSON object such as {{"file_name": "a.png", "text": "..."}}, got {text[:40]}'
            )
        yield f"line {line}", row


def _json(path: Path) -> Iterator[tuple[str, Row]]:
    """A list of objects, or a map from file name to a caption, a list of captions, or an object with the caption."""
    found = parse_json(read_text(path, METADATA_BYTES), str(path))
    wanted = 'must be a map such as {"a.png": "a cat"}, or a list such as [{"file_name": "a.png", "caption": "a cat"}]'
    entries = [{"file_name": name, **_as_row(value)} for name, value in found.items()] if isinstance(found, dict) else found
    if not isinstance(entries, list):
        raise ValueError(f"{path}: {wanted}, got {str(found)[:40]}")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, entry {number}: {wanted}, got {str(entry)[:40]}")
        yield f"entry {number}", entry


def _as_row(value: Any) -> Row:
    return {key: text for key, text in value.items() if key != "file_name"} if isinstance(value, dict) else {"caption": value}


def _tsv(path: Path) -> Iterator[tuple[str, Row]]:
    return _csv(path, "\t")


def _csv(path: Path, delimiter: str = ",") -> Iterator[tuple[str, Row]]:
    """Raises ValueError if it is not CSV, a column is there twice, the header is repeated, or a row has more or fewer fields."""
    text = io.StringIO(read_text(path, METADATA_BYTES), newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True)
    columns: list[str] = []
    last = 0
    try:
        for fields in reader:
            # A field may span lines: the row begins after the last line of the one before.
            line, last = last + 1, reader.line_num
            if not fields:
                continue
            where = f"{path}, line {line}"
            if not columns:
                columns = [name.strip() for name in fields]
                _check_columns(columns, where, delimiter)
                continue
            if [field.strip() for field in fields] == columns:
                raise ValueError(f"{where}: the names of the columns are there a second time; remove the line")
            if len(fields) != len(columns):
                raise ValueError(
                    f"{where}: must have {len(columns)} fields ({', '.join(columns)}), got {len(fields)}; "
                    f'a text with a comma must be in double quotes, such as {columns[0]},"a red, round thing"'
                )
            yield f"line {last}", dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {last + 1}: not valid CSV: {error}") from None


def _check_columns(columns: list[str], where: str, delimiter: str) -> None:
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise ValueError(f"{where}: the column {twice[0]} is there twice; columns: {', '.join(columns)}")
    other = next((sign for sign in (";", "\t", ",") if len(columns) == 1 and sign in columns[0] and sign != delimiter), "")
    if other:
        words = {";": "semicolons", "\t": "tabs", ",": "commas"}
        raise ValueError(f"{where}: columns must be separated by {words[delimiter]}, got {words[other]}: {columns[0]:.60}")


def _missing_column(row: Row, column: str, columns: str) -> str:
    """The error for a row without a column of captions, with the remedy."""
    if not column:
        remedy = "set captions.caption_column to the column that holds the captions"
        return f"must have one of {', '.join(TEXT_COLUMNS)}; columns: {columns}; {remedy}"
    near = difflib.get_close_matches(column, map(str, row), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"captions.caption_column must name a column, got {column!r}; columns: {columns}{hint}"


def _parse(where: str, row: Row, file_columns: tuple[str, ...], column: str) -> tuple[str, list[str]]:
    """(file name, captions) of a row. Blank captions are left out. Raises ValueError if one of the two is missing."""
    columns = f"{', '.join(map(str, row)):.300}"
    named = next((name for name in file_columns if name in row), file_columns[0])
    file_name = row.get(named)
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"{where}: {named} must be a path; columns: {columns}")
    found = next((name for name in ((column,) if column else TEXT_COLUMNS) if name in row), None)
    if found is None:
        raise ValueError(f"{where}: {_missing_column(row, column, columns)}")
    texts = row[found] if isinstance(row[found], list) else [row[found]]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: {found} must be a text or a list of texts, got {row[found]!r:.80}")
    return file_name.replace("\\", "/"), [text.strip() for text in texts if text and text.strip()]


READERS = {
    "metadata.jsonl": _jsonl,
    "metadata.csv": _csv,
    "captions.jsonl": _jsonl,
    "captions.json": _json,
    "captions.csv": _csv,
    "captions.tsv": _tsv,
}
