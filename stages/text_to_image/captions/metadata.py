"""Captions in metadata.jsonl and metadata.csv: one row per image, with file_name and text."""

from __future__ import annotations

import csv
import io
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from stages.text_to_image.captions.text import Caption, first_names, normalise, read_text
from stages.untrusted import parse_json

Row = dict[str, Any]

TEXT_COLUMNS = ("text", "caption", "prompt")  # the first of these columns that a row has holds its caption
METADATA_BYTES = 256_000_000  # largest metadata file that is read: about a million long captions


def read_metadata(folder: Path, paths: Iterable[str]) -> tuple[dict[str, list[Caption]], list[str]]:
    """Read every metadata.jsonl and metadata.csv in the folders of the images and in the folders above them. `folder` is
    the image folder, where the search ends. `paths` are all images, relative to `folder`. Return a dict from path to
    captions, and a list of notes for the user. The paths are in Unicode form NFC. The notes name rows whose image does
    not exist. Raises ValueError, with file and line, if a file is malformed.
    """
    paths = list(paths)
    images = {normalise(path) for path in paths}
    captions: dict[str, list[Caption]] = {}
    notes = []
    for name, read in _metadata_files(folder, paths):
        unknown = []
        for line, row in read(folder / name):
            file_name, texts = _parse(folder / name, line, row)
            path = normalise(posixpath.normpath(posixpath.join(posixpath.dirname(name), file_name)))
            if path not in images:
                unknown.append(file_name)
            captions.setdefault(path, []).extend(Caption(text, "metadata", f"{name}:{line}") for text in texts)
        if unknown:
            notes.append(f"{name}: {len(unknown)} rows name images that do not exist: {first_names(unknown)}")
    return captions, notes


def _metadata_files(folder: Path, paths: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield every metadata file in the folders of the images and in the folders above them. Each item is a pair (path,
    read). The path is relative to `folder`, where the search ends. `read` is `_jsonl` or `_csv`. It takes the full path
    of the file and yields (line number, row). `paths` are the images, relative to `folder`.
    """
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    for parent in sorted(parents):
        for file_name, read in (("metadata.jsonl", _jsonl), ("metadata.csv", _csv)):
            name = posixpath.normpath(posixpath.join(parent, file_name))
            if (folder / name).is_file():
                yield name, read


def _jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number, object) for every line of a metadata.jsonl that is not blank. Raises ValueError if a line is
    not a JSON object.
    """
    for line, text in enumerate(read_text(path, METADATA_BYTES).split("\n"), 1):
        if not text.strip():
            continue
        row = parse_json(text, f"{path}, line {line}")
        if not isinstance(row, dict):
            raise ValueError(
                f'{path}, line {line}: must be a JSON object such as {{"file_name": "a.png", "text": "..."}}, got {text[:40]}'
            )
        yield line, row


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row) for every row of a metadata.csv. A row is a dict from column name to text. The first row
    names the columns. Raises ValueError if the file is not CSV. Raises it too if a column's name is there twice, the row of
    names is repeated, or a row has another number of fields than columns.
    """
    reader = csv.reader(io.StringIO(read_text(path, METADATA_BYTES), newline=""), strict=True, skipinitialspace=True)
    columns: list[str] = []
    last = 0
    try:
        for fields in reader:
            line, last = last + 1, reader.line_num
            if not fields:
                continue
            where = f"{path}, line {line}"
            if not columns:
                columns = [name.strip() for name in fields]
                _check_columns(columns, where)
                continue
            if [field.strip() for field in fields] == columns:
                raise ValueError(f"{where}: the names of the columns are there a second time; remove the line")
            if len(fields) != len(columns):
                raise ValueError(
                    f"{where}: must have {len(columns)} fields ({', '.join(columns)}), got {len(fields)}; "
                    f'a text with a comma must be in double quotes, such as {columns[0]},"a red, round thing"'
                )
            yield last, dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {last + 1}: not valid CSV: {error}") from None


def _check_columns(columns: list[str], where: str) -> None:
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise ValueError(f"{where}: the column {twice[0]} is there twice; columns: {', '.join(columns)}")


def _parse(path: Path, line: int, row: Row) -> tuple[str, list[str]]:
    """Return the image's file name and the list of captions of one metadata row. `path` and `line` say where the row is
    from, for errors. The file name has forward slashes. The list may be empty. Raises ValueError if the row has no
    `file_name` or no column of captions.
    """
    columns = f"{', '.join(map(str, row)):.300}"
    file_name = row.get("file_name")
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"{path}, line {line}: file_name must be a path; columns: {columns}")
    column = next((column for column in TEXT_COLUMNS if column in row), None)
    if column is None:
        raise ValueError(f"{path}, line {line}: must have one of {', '.join(TEXT_COLUMNS)}; columns: {columns}")
    texts = row[column] if isinstance(row[column], list) else [row[column]]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"{path}, line {line}: {column} must be a text or a list of texts, got {row[column]!r}")
    return file_name.replace("\\", "/"), [text.strip() for text in texts if text and text.strip()]
