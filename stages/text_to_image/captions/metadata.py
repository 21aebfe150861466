"""Captions in metadata.jsonl and metadata.csv: one row per image, with file_name and text."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from stages.text_to_image.captions.text import Caption, first_names, normalise, read_text

Row = dict[str, Any]

TEXT_COLUMNS = ("text", "caption", "prompt")  # the first of these columns that a row has holds its caption


def read_metadata(folder: Path, paths: Iterable[str]) -> tuple[dict[str, list[Caption]], list[str]]:
    """Read metadata.jsonl and metadata.csv in every folder that holds images and in the folders above, up to `folder`.
    `paths` are all images, relative to the image folder `folder`. Returns {path in Unicode form NFC: captions} and notes for
    the user, which name rows whose image does not exist. ValueError, with file and line, if a file is malformed.
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
    """Yield (path relative to `folder`, function that reads its rows) for every metadata file beside or above an image."""
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    for parent in sorted(parents):
        for file_name, read in (("metadata.jsonl", _jsonl), ("metadata.csv", _csv)):
            name = posixpath.normpath(posixpath.join(parent, file_name))
            if (folder / name).is_file():
                yield name, read


def _jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    for line, text in enumerate(read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {line}: not JSON at column {error.colno}: {error.msg}") from None
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {line}: not an object such as {{"file_name": "a.png", "text": "..."}}')
        yield line, row


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _parse(path: Path, line: int, row: Row) -> tuple[str, list[str]]:
    """Return the value of file_name in a metadata row, with forward slashes, and the row's captions: one, several or none.
    ValueError, naming the file `path` and its `line`, if file_name or the column of captions is missing.
    """
    columns = ", ".join(map(str, row))
    file_name = row.get("file_name")
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"{path}, line {line}: no file_name; its columns are {columns}")
    column = next((column for column in TEXT_COLUMNS if column in row), None)
    if column is None:
        raise ValueError(f"{path}, line {line}: none of {', '.join(TEXT_COLUMNS)}; its columns are {columns}")
    texts = row[column] if isinstance(row[column], list) else [row[column]]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"{path}, line {line}: {column} is neither a text nor a list of texts")
    return file_name.replace("\\", "/"), [text.strip() for text in texts if text and text.strip()]
