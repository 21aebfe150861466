"""Images inside other files: tars of WebDataset, Parquet files, and the Arrow files of `save_to_disk`. Their bytes stay there.

The path of such an image is the path of the file that holds it, followed by the image's name in it: "train-0.tar/0001.jpg". The
names in the files that were used last are kept in memory.
"""

from __future__ import annotations

import functools
import json
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

SUFFIXES = frozenset({".tar", ".parquet", ".arrow"})
INDEXES = 64  # files whose names are kept in memory
TEXTS = ("text", "caption", "prompt")  # columns, and keys of a JSON file in a tar, that may hold captions
TAR_TEXTS = (".txt", ".caption", ".json")  # suffixes of files with captions in a tar
TEXT_BYTES = 1_000_000  # of a caption in a tar
READ = threading.local()  # the column of the row group that a thread read last


@dataclass(frozen=True)
class Member:
    """The place of one image or text inside another file. In a tar, `offset` is the position of its first byte, and
    `size` is its number of bytes. In a table, `offset` is the number of its row, and `size` is 0. `column` is the name
    of its column in a table. It is "" in a tar.
    """

    offset: int
    size: int
    column: str = ""


def split(path: Path) -> tuple[Path, str] | None:
    """Split the path of an image inside another file. For example, "a/b.tar/0001.jpg" gives (Path("a/b.tar"),
    "0001.jpg"). The other file is a tar, Parquet or Arrow file. Return None if no parent of `path` is such a file.
    """
    for above in path.parents:
        if above.suffix.lower() in SUFFIXES and above.is_file():
            return above, path.relative_to(above).as_posix()
    return None


def file_to_open(path: Path) -> Path:
    """Return the file that must be opened to read the image `path`. It is `path` itself, or the tar, Parquet or Arrow file that
    holds the image: "a/b.tar" for "a/b.tar/0001.jpg".
    """
    found = split(path)
    return found[0] if found else path


def members(file: Path) -> dict[str, Member]:
    """Return the content of a tar, Parquet or Arrow file. The result is a dict from a name, such as "0001.jpg", to a
    `Member`: the place in the file. A tar gives one entry per file. Absolute names and names with .. are left out. A
    table gives one entry per row, for its image. A table without a column of images gives an empty dict. Raises
    ValueError if the file is damaged.
    """
    status = file.stat()
    return _members(file, status.st_size, status.st_mtime_ns)


def read_member(path: Path) -> bytes:
    """Return the bytes of an image inside a tar, Parquet or Arrow file. `path` is the path of that file, followed by
    the image's name, such as "a/b.tar/0001.jpg". Raises ValueError if there is no such image, or if the file is
    damaged.
    """
    found = split(path)
    member = members(found[0]).get(found[1]) if found else None
    if found is None or member is None:
        raise ValueError(f"{path} does not exist")
    if not member.column:
        with found[0].open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)
    value = _cell(found[0], member)
    return bytes((value.get("bytes") if isinstance(value, dict) else value) or b"")


def texts(file: Path, column: str = "") -> dict[str, tuple[str, str]]:
    """Return the captions in a tar, Parquet or Arrow file, as a dict from an image's name to (caption, place). In a
    table, the place is a text such as "row 7". In a tar, it is the name of the caption's file. `column` is the table's
    column of captions, or the key of the caption in a JSON file of a tar. If it is "", the first of text, caption and
    prompt is used. Raises ValueError if a table with images has no column `column`.
    """
    status = file.stat()
    return _texts(file, column, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=INDEXES)
def _members(file: Path, size: int, mtime_ns: int) -> dict[str, Member]:
    import pyarrow as pa

    try:
        return dict(_tar_members(file) if file.suffix.lower() == ".tar" else _table_members(file))
    except (tarfile.TarError, pa.ArrowException, OSError, EOFError) as error:
        reason = " ".join(str(error).split())[:150] or "it is damaged"
        raise ValueError(f"{file} cannot be read: {reason}; copy it again, or move it out of the image folder") from None


def _tar_members(file: Path) -> Iterator[tuple[str, Member]]:
    with tarfile.open(file, "r:") as opened:  # without compression: a member of a compressed tar has no offset
        for each in opened:
            name = PurePosixPath(each.name)
            if each.isreg() and not each.issparse() and not name.is_absolute() and ".." not in name.parts:
                yield str(name), Member(each.offset_data, each.size)


def _table_members(file: Path) -> Iterator[tuple[str, Member]]:
    schema, names = _names(file)
    used = set()
    for row, given in enumerate(names):
        name = PurePosixPath((given or "").replace("\\", "/")).name
        if not name or name in used or not PurePosixPath(name).suffix:
            name = f"{row:09d}{PurePosixPath(name).suffix or '.png'}"
        used.add(name)
        yield name, Member(row, 0, image_column(schema))


@functools.lru_cache(maxsize=INDEXES)
def _texts(file: Path, column: str, size: int, mtime_ns: int) -> dict[str, tuple[str, str]]:
    return dict(_tar_texts(file, column) if file.suffix.lower() == ".tar" else _table_texts(file, column))


def _tar_texts(file: Path, column: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (image name, (caption, file name)) for every image of a tar that has a caption. The file name is that of
    the caption's file in the tar. The caption of 0001.jpg is in 0001.txt, 0001.caption or 0001.json. `column` is the
    caption's key in a JSON file. If it is "", the keys text, caption and prompt are tried.
    """
    found = members(file)
    with file.open("rb") as opened:
        for name in found:
            for suffix in TAR_TEXTS:
                beside = str(PurePosixPath(name).with_suffix(suffix))
                member = found.get(beside)
                if member and beside != name and member.size <= TEXT_BYTES:
                    opened.seek(member.offset)
                    if text := _text(opened.read(member.size), suffix, column):
                        yield name, (text, beside)
                        break


def _text(data: bytes, suffix: str, column: str) -> str:
    try:
        text = data.decode("utf-8-sig")
        if suffix != ".json":
            return text.strip()
        row = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    values = [row.get(key) for key in ((column,) if column else TEXTS)] if isinstance(row, dict) else []
    return next((value.strip() for value in values if isinstance(value, str) and value.strip()), "")


def _table_texts(file: Path, column: str) -> Iterator[tuple[str, tuple[str, str]]]:
    found = members(file)
    if not found:
        return
    schema, _ = _names(file)
    name_of = column or next((name for name in TEXTS if name in schema.names), "")
    if not name_of:
        return
    if name_of not in schema.names:
        raise ValueError(f'captions.caption_column must be a column of {file}, such as {", ".join(schema.names)}, got "{column}"')
    values = _column(file, name_of).to_pylist()
    for name, member in found.items():
        text = values[member.offset]
        if isinstance(text, str) and text.strip():
            yield name, (text.strip(), f"row {member.offset}")


def image_column(schema: Any) -> str:
    """Return the name of the column that holds images, or "" if there is none. `schema` is the Arrow schema of a table.
    A column of images is binary, or a struct with a field bytes. Hugging Face's datasets write such structs. A column
    called image, img, jpg or png is preferred.
    """
    import pyarrow as pa

    def holds_images(kind: pa.DataType) -> bool:
        if pa.types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    found = sorted((f.name for f in schema if holds_images(f.type)), key=lambda name: name not in ("image", "img", "jpg", "png"))
    return found[0] if found else ""


def _names(file: Path) -> tuple[Any, list[str | None]]:
    """Return (schema, names) of a table file. The schema is an Arrow schema. The names are one per row: the path or
    file name that is stored with the row's image, or None. The list is empty if the table has no images. No image is
    read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    parquet = file.suffix.lower() == ".parquet"
    if parquet:
        with pq.ParquetFile(file) as opened:
            schema, rows = opened.schema_arrow, opened.metadata.num_rows
    else:
        table = _arrow(file)
        schema, rows = table.schema, table.num_rows
    column = image_column(schema)
    if not column:
        return schema, []
    kind = schema.field(column).type
    if not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
        return schema, [None] * rows
    if parquet:
        with pq.ParquetFile(file) as opened:
            values = opened.read(columns=[f"{column}.path"])[column]
    else:
        values = table[column]
    return schema, pc.struct_field(values, "path").to_pylist()


def _column(file: Path, name: str) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(file, columns=[name])[name] if file.suffix.lower() == ".parquet" else _arrow(file)[name]


def _cell(file: Path, member: Member) -> Any:
    """Return the value of one cell of a table. `file` is the table's file, in Parquet or Arrow format. `member` names
    the row and column of the cell.

    A Parquet file is divided into blocks of rows, the row groups. The whole column of the cell's row group is read into
    memory. Each thread keeps the column that it read last, for the next call. Return None if a Parquet file has no such
    row.
    """
    import pyarrow.parquet as pq

    if file.suffix.lower() == ".arrow":
        return _arrow(file)[member.column][member.offset].as_py()
    with pq.ParquetFile(file) as opened:
        first = 0
        for group in range(opened.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            if member.offset < first + rows:
                key = (file, file.stat().st_mtime_ns, group, member.column)
                if getattr(READ, "key", None) != key:
                    READ.key, READ.column = None, None  # the memory of the row group before is freed first
                    READ.column = opened.read_row_group(group, columns=[member.column])[member.column]
                    READ.key = key
                return READ.column[member.offset - first].as_py()
            first += rows
    return None


def _arrow(file: Path) -> Any:
    """Return the table in an Arrow file. The file is mapped into memory. It may be in Arrow's stream format, which
    `save_to_disk` of Hugging Face's datasets writes, or in Arrow's file format.
    """
    import pyarrow as pa

    mapped = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_file(mapped).read_all()
