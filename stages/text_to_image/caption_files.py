"""Files that hold captions: sidecars beside images, files for many images, and file names.

A file for many images is metadata.*, which has the columns of Hugging Face's imagefolder (file_name and a caption);
captions.json, a map from file name to caption, or a list of objects; or captions.jsonl, captions.csv or captions.tsv with one
row per image.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from stages.settings import nearest, setting_path
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.masks import composed
from stages.text_to_image.imaging.usable import first_names
from stages.untrusted import parse_json, read_bytes

CAPTIONS = "captions"  # a folder of sidecars
PICTURES = frozenset({"images", "image", "imgs", "img"})  # folders that a folder of captions may lie beside
SIDECAR_BYTES = 1_000_000  # largest sidecar that is read; a caption has some hundred bytes
FILE_NAME = ("file_name",)  # the column of metadata.* that names the image
FILE_COLUMNS = ("file_name", "file", "filename", "image", "image_path", "image_file", "path")  # the same of captions.*
METADATA_BYTES = 256_000_000  # largest metadata file that is read: about a million long captions
# A letter of a script with spaces between words. Thai, Lao, Japanese and Chinese have none, and Korean particles follow directly.
LETTER = r"[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"

Row = dict[str, Any]


@dataclass(frozen=True)
class Caption:
    """A caption as it was read, before the template."""

    text: str
    source: str  # sidecar, metadata, filename, folder, description, template or config
    origin: str  # file, file and line (metadata.jsonl:3), or the name of a setting
    weight: float | None = None  # draws relative to the image's other captions; None: 1


@dataclass(frozen=True)
class CaptionSources:
    sources: tuple[str, ...]  # of sidecar, metadata, filename; the preferred one first
    extension: str | tuple[str, ...]  # of sidecars
    folder: str = ""  # separate folder of sidecars
    caption_column: str = ""  # of metadata; "": text, caption or prompt
    lines: str = "one"  # many: every line of a sidecar is a caption

    @property
    def extensions(self) -> tuple[str, ...]:
        return (self.extension,) if isinstance(self.extension, str) else self.extension


Lookup = Callable[[str], list[Caption]]  # an image's path, relative to the image folder -> its captions, none if there are none


def make_lookups(folder: Path, paths: list[str], config: CaptionSources, project: Path) -> tuple[list[Lookup], list[str]]:
    """One lookup for images inside other files, then one per source; notes for the user. Raises ValueError if a file is wrong."""
    notes: list[str] = []
    made: list[Lookup] = [functools.partial(_inside, folder, config.caption_column)]
    for source in config.sources:
        if source == "metadata":
            captions, notes = read_metadata(folder, paths, config.caption_column)
            name_of = _one_name(paths)
            made.append(lambda path, captions=captions, name_of=name_of: captions.get(name_of(path), []))  # type: ignore[misc]
        else:
            made.append(from_file_name if source == "filename" else _sidecars(folder, config, project))
    return made, notes


def _inside(folder: Path, column: str, path: str) -> list[Caption]:
    found = packed.split(folder / path) if any(f"{suffix}/" in path.lower() for suffix in packed.SUFFIXES) else None
    if found is None:
        return []
    file, name = found
    text, place = packed.texts(file, column).get(name, ("", ""))
    origin = f"{path.removesuffix(name).rstrip('/')}: {place}"
    return [Caption(text, "metadata" if place.startswith("row ") else "sidecar", origin)] if text else []


def from_file_name(path: str) -> list[Caption]:
    """The words of the file name: "a/red_fox-2.png" gives "red fox 2"."""
    text = " ".join(re.split(r"[\s_-]+", PurePosixPath(path).stem)).strip()
    return [Caption(text, "filename", path)] if text else []


def trigger_word(captions: pa.Table) -> str:
    """That of [captions]; those of folders have later positions."""
    rows = captions.select(["role", "position", "text"]).to_pylist()
    return next((row["text"] for row in rows if row["role"] == "trigger" and not row["position"]), "")


def trigger_pattern(trigger: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!{LETTER}){re.escape(trigger)}(?!{LETTER})")


def check_trigger(trigger: str) -> None:
    """Raises ValueError if it is what the template replaces."""
    if re.search(r"\{(caption|trigger)\}", trigger):
        raise ValueError(f'trigger must be a word, not a placeholder of the template, got "{trigger}"')


# Sidecars


def _sidecars(folder: Path, config: CaptionSources, project: Path) -> Lookup:
    names = sidecar_names(folder, config, project)

    def lookup(path: str) -> list[Caption]:
        read = (_read_sidecar(folder, name, config.lines == "many") for name in names(path))
        return next(filter(None, read), [])

    return lookup


def sidecar_names(folder: Path, config: CaptionSources, project: Path) -> Callable[[str], Iterator[str]]:
    """Finds the sidecars of an image, relative to the image folder, the preferred one first."""
    separate = _separate(folder, config.folder, project)

    # A folder is listed once: a sidecar that is created meanwhile may not be found.
    @functools.cache
    def names(parent: str) -> dict[str, str]:
        try:
            found = [posixpath.join(parent, path.name) for path in (folder / parent).iterdir()]
        except OSError:
            return {}
        # Of names that differ only in how accents are written, each image has its own file.
        return {composed(name): name for name in found} | {name: name for name in found}

    def find(path: str) -> Iterator[str]:
        for place in [posixpath.normpath(posixpath.join(separate, path))] if separate else caption_places(path, folder.name):
            for extension in config.extensions:
                # a.png.txt before a.txt, since a.jpg may lie beside a.png.
                for candidate in (place + extension, _stem(place) + extension):
                    known = names(posixpath.dirname(candidate))
                    if name := known.get(candidate) or known.get(composed(candidate)):
                        yield name

    return find


def caption_places(path: str, folder: str) -> list[str]:
    """The paths that an image would have beside its caption file, the preferred one first.

    "a/images/cat.png" gives itself, a/images/captions/cat.png, a/captions/cat.png, a/captions/images/cat.png and
    captions/a/images/cat.png. An image folder called images (see PICTURES) adds ../captions/a/images/cat.png.
    """
    image = PurePosixPath(path)
    places = [path]
    for above in image.parents:
        below = image.relative_to(above)
        places.append(str(above / CAPTIONS / below))
        if above.name.lower() in PICTURES:
            places.append(str(above.parent / CAPTIONS / below))
    return [*places, f"../{CAPTIONS}/{path}"] if folder.lower() in PICTURES else places


def caption_file(path: str, paths: list[str], folder: Path, config: CaptionSources, project: Path) -> str:
    """The path of a new sidecar, or "" if the sources lack "sidecar" or the image lies in another file."""
    if "sidecar" not in config.sources or packed.split(folder / path):
        return ""
    stem = _stem(path)
    # a.txt would also be the caption of a.jpg.
    shared = sum(_stem(other) == stem for other in paths) > 1
    name = (path if shared else stem) + config.extensions[0]
    separate = _separate(folder, config.folder, project)
    return posixpath.normpath(posixpath.join(separate, name)) if separate else name


def _separate(folder: Path, setting: str, project: Path) -> str:
    if not setting:
        return ""
    found = setting_path(setting, project)
    if not found.is_dir():
        raise ValueError(f"captions.folder must be a folder of caption files, got {setting!r}: there is no folder {found}")
    return Path(os.path.relpath(found.resolve(), folder.resolve())).as_posix()


def _read_sidecar(folder: Path, name: str, many: bool) -> list[Caption]:
    text = read_text(folder / name, SIDECAR_BYTES)
    if many:
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
        return [Caption(line, "sidecar", f"{name}:{number}") for number, line in lines if line]
    return [Caption(text.strip(), "sidecar", name)] if text.strip() else []


def leads_out(path: Path) -> bool:
    """Is it a link to another folder? A data set from elsewhere could have any file of the disk read into its captions."""
    return path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve())


def read_text(path: Path, most: int) -> str:
    r"""UTF-8, or UTF-16 with a byte order mark; line breaks become "\n". Raises ValueError if it is neither, or too large."""
    if leads_out(path):
        raise ValueError(
            f"{path} is a link to {path.resolve()}, in another folder: captions are not read from there; copy the file"
        )
    data = read_bytes(path, most)
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        # Latin-1 reads any bytes, so nothing but the user's eyes can tell that it is the right one.
        start = error.start
        shown = " ".join(data[max(0, start - 12) : start + 12].decode("latin-1").split())
        name = shlex.quote(str(path))
        command = f"iconv -f latin1 -t utf-8 {name} > new.txt && mv new.txt {name}"
        latin = f' (as Latin-1 it reads "{shown}"; if so: {command})' if encoding == "utf-8" and shown.isprintable() else ""
        raise ValueError(
            f"{path} is not {encoding.upper()}: byte {start} is 0x{data[start]:02x}; save it as UTF-8{latin}"
        ) from None
    if "\0" in text and encoding == "utf-16":
        raise ValueError(f"{path} has a zero as character {text.index(chr(0)) + 1}; remove it")
    # UTF-16 without a mark decodes as UTF-8 where it holds only ASCII.
    if "\0" in text:
        raise ValueError(f"{path} has a zero at byte {data.index(0)}, as UTF-16 without a byte order mark does; save it as UTF-8")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


# Files for many images


def read_metadata(folder: Path, paths: Iterable[str], column: str = "") -> tuple[dict[str, list[Caption]], list[str]]:
    """Captions by `_one_name` of a path, from files beside and above the images; notes on unknown names. `column` "": any."""
    paths = list(paths)
    captions: dict[str, list[Caption]] = {}
    notes = []
    parents = sorted({str(parent) for path in paths for parent in PurePosixPath(path).parents})
    files = [(posixpath.normpath(posixpath.join(parent, name)), read) for parent in parents for name, read in READERS.items()]
    for name, read in files:
        if not (folder / name).is_file():
            continue
        find = image_finder(folder, paths, posixpath.dirname(name))
        file_columns = FILE_NAME if PurePosixPath(name).name.startswith("metadata.") else FILE_COLUMNS
        unknown = []
        for place, row in read(folder / name):
            file_name, texts = _parse(f"{folder / name}, {place}", row, file_columns, column)
            path = find(file_name)
            if path is None:
                unknown.append(file_name)
                continue
            origin = f"{name}:{place.removeprefix('line ')}"
            captions.setdefault(path, []).extend(Caption(text, "metadata", origin) for text in texts)
        if unknown:
            what = "row names an image that does" if len(unknown) == 1 else "rows name images that do"
            notes.append(f"{name}: {len(unknown)} {what} not exist: {first_names(unknown)}")
    return captions, notes


def image_finder(folder: Path, paths: Sequence[str], base: str) -> Callable[[str], str | None]:
    """Finds the image (as `_one_name`) that a caption file in the folder `base` names, suffix or not; None if none or several."""
    # The image folder may be a link, and the file may name either place.
    folders = [composed(f"{root.as_posix()}/") for root in (folder.absolute(), folder.resolve())]
    whole = set(map(_one_name(paths), paths))
    inside = [path for path in whole if not base or composed(path).startswith(f"{composed(base)}/")]
    by_stem, by_name = _single(whole, _stem), _single(inside, posixpath.basename)

    def find(name: str) -> str | None:
        given = composed(name)
        if posixpath.isabs(given) or given[1:3] == ":/":
            root = next((root for root in folders if given.startswith(root)), None)
            if root is None:
                # Another machine's path: only its file name counts, and only below the folder of the caption file.
                return by_name.get(posixpath.basename(given))
            path = given.removeprefix(root)
        else:
            exact = posixpath.normpath(posixpath.join(base, name))
            path = exact if exact in whole or exact in by_stem else composed(exact)
        return path if path in whole else by_stem.get(path)

    return find


def _one_name(paths: Iterable[str]) -> Callable[[str], str]:
    """NFC, except for images whose names differ only in how accents are written: each keeps its own."""
    twice = {name for name, count in Counter(map(composed, set(paths))).items() if count > 1}
    return lambda path: path if composed(path) in twice else composed(path)


def _single(paths: Iterable[str], part: Callable[[str], str]) -> dict[str, str]:
    counts = Counter(map(part, paths))
    return {part(path): path for path in paths if counts[part(path)] == 1}


def _stem(path: str) -> str:
    return posixpath.splitext(path)[0]


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
    if isinstance(found, dict):
        rows = [(path, value if isinstance(value, dict) else {"caption": value}) for path, value in found.items()]
        found = [{"file_name": path} | row | {"file_name": path} for path, row in rows]
    if not isinstance(found, list):
        raise ValueError(f"{path}: {wanted}, got {str(found)[:40]}")
    for number, entry in enumerate(found, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, entry {number}: {wanted}, got {str(entry)[:40]}")
        yield f"entry {number}", entry


def _csv(path: Path, delimiter: str = ",") -> Iterator[tuple[str, Row]]:
    """Raises ValueError if it is not CSV, a column is there twice, the header is repeated, or a row has more or fewer fields."""
    text = io.StringIO(read_text(path, METADATA_BYTES), newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True)
    words = {";": "semicolons", "\t": "tabs", ",": "commas"}
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
                if twice := [name for name, count in Counter(columns).items() if count > 1]:
                    raise ValueError(f"{where}: the column {twice[0]} is there twice; columns: {', '.join(columns)}")
                other = next((sign for sign in words if len(columns) == 1 and sign in columns[0] and sign != delimiter), "")
                if other:
                    got = f"got {words[other]}: {columns[0]:.60}"
                    raise ValueError(f"{where}: columns must be separated by {words[delimiter]}, {got}")
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


def _parse(where: str, row: Row, file_columns: tuple[str, ...], column: str) -> tuple[str, list[str]]:
    """(file name, captions) of a row. Blank captions are left out. Raises ValueError if one of the two is missing."""
    columns = f"{', '.join(map(str, row)):.300}"
    named = next((name for name in file_columns if name in row), file_columns[0])
    file_name = row.get(named)
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"{where}: {named} must be a path; columns: {columns}")
    found = next((name for name in ((column,) if column else packed.TEXT_COLUMNS) if name in row), None)
    if found is None:
        if column:
            hint = nearest(column, map(str, row))
            raise ValueError(f"{where}: captions.caption_column must name a column, got {column!r}; columns: {columns}{hint}")
        remedy = "set captions.caption_column to the column that holds the captions"
        raise ValueError(f"{where}: must have one of {', '.join(packed.TEXT_COLUMNS)}; columns: {columns}; {remedy}")
    texts = row[found] if isinstance(row[found], list) else [row[found]]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: {found} must be a text or a list of texts, got {row[found]!r:.80}")
    return file_name.replace("\\", "/"), [text.strip() for text in texts if text and text.strip()]


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Row]]]] = {
    "metadata.jsonl": _jsonl,
    "metadata.csv": _csv,
    "captions.jsonl": _jsonl,
    "captions.json": _json,
    "captions.csv": _csv,
    "captions.tsv": functools.partial(_csv, delimiter="\t"),
}
