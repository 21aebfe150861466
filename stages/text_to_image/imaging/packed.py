"""Images inside other files: tars of WebDataset, Parquet files, and the Arrow files of `save_to_disk`. Their bytes stay there.

The path of such an image is the path of the file that holds it, followed by the image's name in it: "train-0.tar/0001.jpg". The
names in the files that were used last are kept in memory.
"""

from __future__ import annotations

import functools
import json
import struct
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from stages.run import Run
from stages.untrusted import open_regular

CEILING_BYTES = 4_000_000_000  # of an image: a whole file is in memory while its crops are cut
SUFFIXES = frozenset({".tar", ".parquet", ".arrow"})
GROUP_BYTES, GROUP_SHARE = 100_000_000, 20  # a row group larger than both, decoded, than its file by the share, holds no pictures
INDEXES = 64  # files whose names are kept in memory
TEXT_COLUMNS = ("text", "caption", "prompt")  # columns, and keys of a JSON file in a tar, that may hold captions
TAR_TEXTS = (".txt", ".caption", ".json")  # suffixes of files with captions in a tar
TEXT_BYTES = 1_000_000  # of a caption in a tar
READ = threading.local()  # the column of the row group that a thread read last


@dataclass(frozen=True)
class Member:
    offset: int  # of the first byte in a tar; number of the row in a table
    size: int  # bytes in a tar; 0 in a table
    column: str = ""  # of a table; "" in a tar


def split(path: Path) -> tuple[Path, str] | None:
    """File and name: "a/b.tar/0001.jpg" gives (a/b.tar, "0001.jpg"); None if no parent is a tar, Parquet or Arrow file."""
    for above in path.parents:
        if above.suffix.lower() in SUFFIXES and above.is_file():
            return above, path.relative_to(above).as_posix()
    return None


def file_to_open(path: Path) -> Path:
    found = split(path)
    return found[0] if found else path


def pending_files(run: Run[Any]) -> Iterator[Path]:
    folder: Path = run.needs["image_folder"]
    yield from (file_to_open(folder / path) for path in run.output.pending["path"].to_pylist())


def members(file: Path) -> dict[str, Member]:
    """Name -> place of everything in a tar, or of every row's image in a table; of a damaged file, what is before the damage."""
    return _listed(file)[0]


def damage(file: Path) -> str:
    """Why not everything in the file can be listed, or ""."""
    return _listed(file)[1]


def _listed(file: Path) -> tuple[dict[str, Member], str]:
    status = file.stat()
    return _members(file, status.st_size, status.st_mtime_ns)


def read_member(path: Path, most: int = CEILING_BYTES) -> bytes:
    """Raises ValueError if there is no such image, it has more than `most` bytes, or the file is damaged."""
    try:
        return _read_member(path, most)
    except DAMAGE as error:
        raise ValueError(_reason(path, error)) from None


def _read_member(path: Path, most: int) -> bytes:
    found = split(path)
    member = members(found[0]).get(found[1]) if found else None
    if found is None or member is None:
        raise ValueError(f"{path} does not exist")
    if member.size > most:
        raise ValueError(f"{member.size:,} bytes, more than {most:,}")
    if not member.column:
        with open_regular(found[0]) as file:
            file.seek(member.offset)
            return file.read(member.size)
    value = _cell(found[0], member)
    return bytes((value.get("bytes") if isinstance(value, dict) else value) or b"")


def texts(file: Path, column: str = "") -> dict[str, tuple[str, str]]:
    """Image's name -> (caption, place: "row 7", or a file of the tar). Raises ValueError if a table lacks `column`."""
    status = file.stat()
    try:
        return _texts(file, column, status.st_size, status.st_mtime_ns)
    except DAMAGE as error:
        raise ValueError(_reason(file, error)) from None


@functools.lru_cache(maxsize=INDEXES)
def _members(file: Path, size: int, mtime_ns: int) -> tuple[dict[str, Member], str]:
    # Size and time are in the key of the cache, so that a file that was replaced is read again.
    found: dict[str, Member] = {}
    try:
        for name, member in _tar_members(file) if file.suffix.lower() == ".tar" else _table_members(file):
            found[name] = member
    except DAMAGE as error:
        return found, _reason(file, error)
    return found, ""


# ArrowException is a KeyError, a MemoryError or another, by its kind; tarfile lets errors of numbers and codecs through.
DAMAGE = (tarfile.TarError, pa.ArrowException, OSError, EOFError, ValueError, OverflowError, struct.error)


def _reason(file: Path, error: Exception) -> str:
    if isinstance(error, ValueError) and not isinstance(error, pa.ArrowException | UnicodeError):
        return str(error)
    reason = " ".join(str(error).split())[:150] or "it is damaged"
    return f"{file.name} cannot be read: {reason}; copy it again, or move it out of the image folder"


def _tar_members(file: Path) -> Iterator[tuple[str, Member]]:
    with open_regular(file) as content, tarfile.open(fileobj=content, mode="r:") as opened:  # a compressed tar has no offsets
        for each in opened:
            name = PurePosixPath(each.name)
            if each.isreg() and not each.issparse() and not name.is_absolute() and ".." not in name.parts:
                yield str(name), Member(each.offset_data, each.size)
        # tarfile ends without a word at a damaged member, except the first.
        content.seek(opened.offset)
        if content.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it is cut or damaged at byte {opened.offset}")


def _table_members(file: Path) -> Iterator[tuple[str, Member]]:
    schema, names = _names(file)
    used = set()
    for row, given in enumerate(names):
        name = PurePosixPath((given or "").replace("\\", "/")).name
        # Rows without a usable name are named by their number, so that paths are unique.
        if not name or name in used or not PurePosixPath(name).suffix:
            name = f"{row:09d}{PurePosixPath(name).suffix or '.png'}"
        used.add(name)
        yield name, Member(row, 0, image_column(schema))


@functools.lru_cache(maxsize=INDEXES)
def _texts(file: Path, column: str, size: int, mtime_ns: int) -> dict[str, tuple[str, str]]:
    return dict(_tar_texts(file, column) if file.suffix.lower() == ".tar" else _table_texts(file, column))


def _tar_texts(file: Path, column: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """The caption of 0001.jpg is in 0001.txt, 0001.caption or 0001.json."""
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
    values = [row.get(key) for key in ((column,) if column else TEXT_COLUMNS)] if isinstance(row, dict) else []
    return next((value.strip() for value in values if isinstance(value, str) and value.strip()), "")


def _table_texts(file: Path, column: str) -> Iterator[tuple[str, tuple[str, str]]]:
    import pyarrow.parquet as pq

    found = members(file)
    if not found:
        return
    schema, _ = _names(file)
    name_of = column or next((name for name in TEXT_COLUMNS if name in schema.names), "")
    if not name_of:
        return
    if name_of not in schema.names:
        raise ValueError(f'captions.caption_column must be a column of {file}, such as {", ".join(schema.names)}, got "{column}"')
    parquet = file.suffix.lower() == ".parquet"
    values = (pq.read_table(file, columns=[name_of]) if parquet else _arrow(file))[name_of].to_pylist()
    for name, member in found.items():
        text = values[member.offset]
        if isinstance(text, str) and text.strip():
            yield name, (text.strip(), f"row {member.offset}")


def image_column(schema: Any) -> str:
    """The column that holds images: binary, or a struct with bytes as Hugging Face's datasets write it; "" if there is none."""

    def holds_images(kind: pa.DataType) -> bool:
        if pa.types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    found = sorted((f.name for f in schema if holds_images(f.type)), key=lambda name: name not in ("image", "img", "jpg", "png"))
    return found[0] if found else ""


def _names(file: Path) -> tuple[Any, list[str | None]]:
    """(schema, stored file name per row or None), without reading an image. No names if the table has no images."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = None if file.suffix.lower() == ".parquet" else _arrow(file)
    schema = pq.read_schema(file) if table is None else table.schema
    column = image_column(schema)
    if not column:
        return schema, []
    kind = schema.field(column).type
    if not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
        return schema, [None] * (pq.read_metadata(file).num_rows if table is None else table.num_rows)
    if table is None:
        with pq.ParquetFile(file) as opened:
            table = opened.read(columns=[f"{column}.path"])
    return schema, pc.struct_field(table[column], "path").to_pylist()


def _cell(file: Path, member: Member) -> Any:
    """The value of one cell. A Parquet file is read by row group; each thread keeps the last one."""
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
                    _check_size(opened.metadata.row_group(group), member.column)
                    # As a dictionary: one picture in many rows is then in memory once.
                    known = [each for each in opened.metadata.schema.names if each in ("bytes", member.column)]
                    paths = [f"{member.column}.bytes" if each == "bytes" else each for each in known]
                    with pq.ParquetFile(file, read_dictionary=paths) as read:
                        READ.column = read.read_row_group(group, columns=[member.column])[member.column]
                    READ.key = key
                return READ.column[member.offset - first].as_py()
            first += rows
    return None


def _check_size(group: Any, column: str) -> None:
    """4 kB of compressed zeros can be 6 GB of them."""
    chunks = [each for n in range(group.num_columns) if (each := group.column(n)).path_in_schema.split(".")[0] == column]
    stored, decoded = (sum(getattr(each, f"total_{kind}_size") for each in chunks) for kind in ("compressed", "uncompressed"))
    if decoded > max(GROUP_BYTES, GROUP_SHARE * stored):
        raise ValueError(f"a row group of {stored:,} bytes has {decoded:,} when it is decoded: it holds no pictures")


def _decoded_bytes(file: Any) -> int:
    """What the compressed buffers of Arrow's messages say that they hold: each begins with its size. 0 if none is compressed."""
    if file.read(8).rstrip(b"\0") != ARROW:
        file.seek(0)
    total = 0
    with suppress(pa.ArrowException, struct.error, EOFError):  # reading it says what is wrong
        for message in pa.ipc.MessageReader.open_stream(file):
            if message.type not in ("record batch", "dictionary"):
                continue
            table = _Flat(message.metadata.to_pybytes()).root().table(HEADER)
            batch = table.table(DATA) if message.type == "dictionary" else table
            if batch.at(COMPRESSION):
                for start, length in batch.pairs(BUFFERS):
                    size = struct.unpack_from("<q", message.body, start)[0] if length >= 8 else 0
                    total += size if size >= 0 else length
    return total


ARROW = b"ARROW1"  # begins the file format
HEADER, DATA, BUFFERS, COMPRESSION = 2, 1, 2, 3  # fields of Message, DictionaryBatch and RecordBatch in Arrow's Message.fbs


@dataclass(frozen=True)
class _Flat:
    """A table of FlatBuffers: its fields are found by a list of offsets."""

    data: bytes
    start: int = 0

    def root(self) -> _Flat:
        return _Flat(self.data, struct.unpack_from("<I", self.data)[0])

    def at(self, field: int) -> int:
        """The place of a field, or 0."""
        fields = self.start - struct.unpack_from("<i", self.data, self.start)[0]
        if 4 + 2 * field >= struct.unpack_from("<H", self.data, fields)[0]:
            return 0
        offset = struct.unpack_from("<H", self.data, fields + 4 + 2 * field)[0]
        return self.start + offset if offset else 0

    def table(self, field: int) -> _Flat:
        place = self.at(field)
        return _Flat(self.data, place + struct.unpack_from("<I", self.data, place)[0])

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        place = self.table(field).start
        for number in range(struct.unpack_from("<I", self.data, place)[0]):
            yield struct.unpack_from("<qq", self.data, place + 4 + 16 * number)


def _arrow(file: Path) -> Any:
    """Memory-mapped, in the stream format that `save_to_disk` writes, or the file format."""
    status = file.stat()
    _check_arrow(file, status.st_size, status.st_mtime_ns)
    return _open_arrow(pa.memory_map(str(file)))


@functools.lru_cache(maxsize=INDEXES)
def _check_arrow(file: Path, size: int, mtime_ns: int) -> None:
    mapped = pa.memory_map(str(file))
    decoded = _decoded_bytes(mapped)
    if decoded > max(GROUP_BYTES, GROUP_SHARE * size):
        raise ValueError(f"{size:,} bytes, {decoded:,} when it is decoded: it holds no pictures")
    mapped.seek(0)
    _open_arrow(mapped).validate(full=True)  # with wrong offsets, reading a value ends the process


def _open_arrow(mapped: Any) -> Any:
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_file(mapped).read_all()
