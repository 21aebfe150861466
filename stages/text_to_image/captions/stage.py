"""captions: which texts an image is trained with, and the kinds of text that belong to no image.

An image's captions are in files beside it (sidecars: a.txt for a.png, or a.png.txt), in metadata.jsonl or metadata.csv in
its folder or above (the imagefolder form of Hugging Face datasets: file_name and text), or are its file name.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.images import IMAGES
from stages.settings import selects, setting
from stages.stage import Stage, StageContext

SOURCES = ("sidecar", "metadata", "filename")
MISSING = ("error", "empty", "trigger", "filename", "skip")
TEXT_COLUMNS = ("text", "caption", "prompt")  # of a metadata file; the first that it has
BATCH = 4096  # rows


@dataclass(frozen=True)
class CaptionsConfig:
    """Section [captions]."""

    sources: tuple[str, ...] = setting(SOURCES[:2], "where to look, in this order; the first that has a caption is used")
    extension: str = setting(".txt", "of sidecar files")
    lines: str = setting("one", "one: a sidecar is one caption, its line breaks kept; many: every line is a caption")
    template: str = setting("{caption}", "made of {caption} and {trigger}; without {caption}, one text for all images")
    trigger: str = setting("", "the word that calls up what is learnt; put where the template or a preview prompt has {trigger}")
    missing: str = setting("error", "image without a caption: error, empty, trigger, filename or skip; untold, it is a mistake")
    class_word: str = selects(
        "",
        'what the trigger is one of ("cat"): captions with it in the trigger\'s place, to preserve what the base draws for them',
    )
    preview_prompts: tuple[str, ...] = selects((), "prompts that the stage samples draws")

    def __post_init__(self) -> None:
        for source in self.sources:
            _one_of("captions.sources", source, SOURCES)
        _one_of("captions.missing", self.missing, MISSING)
        _one_of("captions.lines", self.lines, ("one", "many"))
        for where, text in [("template", self.template), *(("preview_prompts", prompt) for prompt in self.preview_prompts)]:
            known = ("caption", "trigger") if where == "template" else ("trigger",)
            for name in re.findall(r"\{(\w+)\}", text):
                _one_of(f"captions.{where}: the placeholder", name, known)
            if "{trigger}" in text and not self.trigger:
                raise ValueError(f'captions.{where} has {{trigger}}, but no word is set: captions.trigger = "..."')
        if self.missing == "trigger" and not self.trigger:
            raise ValueError('captions.missing = "trigger", but no word is set: captions.trigger = "..."')
        if self.class_word and not self.trigger:
            raise ValueError('captions.class_word stands in for the trigger, but no word is set: captions.trigger = "..."')
        if self.class_word and self.trigger in self.class_word:
            raise ValueError(f'captions.class_word "{self.class_word}" holds the trigger "{self.trigger}" that it replaces')
        if not self.template.strip():
            raise ValueError('captions.template is empty: "{caption}" is the caption as it stands')
        if not self.sources:
            raise ValueError(f"captions.sources is empty: name at least one of {', '.join(SOURCES)}")
        if not self.extension.startswith(".") or len(self.extension) < 2:
            raise ValueError(f'captions.extension = "{self.extension}" must be a dot and a name, as ".txt"')


@dataclass(frozen=True)
class Caption:
    """A text before the template, where it was found: sidecar, metadata or filename, and the file with its line."""

    text: str
    source: str
    origin: str


def wanted_captions(ctx: StageContext) -> pa.Table:
    """All rows, in full: reading the texts is cheaper than asking what has changed."""
    rows, _ = gather(ctx)
    return pa.Table.from_pylist(rows, schema=CAPTIONS.batch)


def write_captions(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """The pending rows as they are, and what is worth knowing about all of them."""
    if ctx.pending.num_rows:
        for note in gather(ctx)[1]:
            ctx.say(note)
    yield from ctx.pending.select(CAPTIONS.batch.names).to_batches(max_chunksize=BATCH)


STAGE = Stage(
    reads=(IMAGES,), writes=CAPTIONS, config=CaptionsConfig, needs=("image_folder",), wants=wanted_captions, run=write_captions
)


def gather(ctx: StageContext) -> tuple[list[dict[str, Any]], list[str]]:
    """Every row of the table, and notes for the user. `ValueError` for a caption that is missing or cannot be read."""
    config: CaptionsConfig = ctx.config
    images = ctx.rows(IMAGES).select(["path", "image_id", "rejected"]).to_pylist()
    notes: list[str] = []
    paths = [row["path"] for row in images]
    sources = config.sources if "{caption}" in config.template else ("template",)
    lookups = [_lookup(source, ctx.need("image_folder"), config, paths, notes) for source in sources]
    rows: list[dict[str, Any]] = []
    without: list[str] = []
    usable = _paths(images)
    for image_id, names in usable.items():
        # Equal files under several names are one image: a caption beside any of them will do, the first name's first.
        found = next((captions for name in names for lookup in lookups if (captions := lookup(name))), [])
        if not found:
            without.append(names[0])
        rows += _image_rows(image_id, [(_fill(config, c.text), c) for c in found] or _for_missing(config, names[0]))
    if without and config.missing == "error":
        raise ValueError(_missing(without, len(usable), config))
    if without:
        notes.append(f"captions.missing = {config.missing}, for {len(without)} of {len(usable)} images: {_few(without)}")
    notes += _check_trigger(config, [row["text"] for row in rows])
    rows.append(_row("", "empty", "", "config", "", 0))
    if config.trigger:
        rows.append(_row("", "trigger", config.trigger, "config", "captions.trigger", 0))
    if config.class_word:
        rows += _class_rows(config, rows)
    prompts = dict.fromkeys(prompt.replace("{trigger}", config.trigger) for prompt in config.preview_prompts)
    rows += [_row("", "preview", prompt, "config", "", position) for position, prompt in enumerate(prompts)]
    return rows, notes


# Rows.


def _paths(images: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The paths of each usable image: the one that is used, then its duplicates."""
    usable = {row["image_id"]: [row["path"]] for row in sorted(images, key=lambda row: row["path"]) if row["rejected"] is None}
    if not usable:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(row["rejected"] for row in images).items()))
        raise ValueError(f"none of the {len(images)} images can be used: {reasons}")
    for row in images:
        if row["rejected"] == "duplicate" and row["image_id"] in usable:
            usable[row["image_id"]].append(row["path"])
    return usable


def _image_rows(image_id: str, texts: list[tuple[str, Caption]]) -> list[dict[str, Any]]:
    """Distinct texts only, in their order."""
    first = dict(reversed(texts))
    distinct = dict.fromkeys(text for text, _ in texts)
    return [
        _row(image_id, "caption", text, first[text].source, first[text].origin, position)
        for position, text in enumerate(distinct)
    ]


def _class_rows(config: CaptionsConfig, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every text that has the trigger, with the class word in its place; its position is that of the text it was made of."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["role"] in ("caption", "trigger") and config.trigger in row["text"]:
            text = row["text"].replace(config.trigger, config.class_word)
            found.setdefault((row["image_id"], text), _row(row["image_id"], "class", text, *_origin(row)))
    return list(found.values())


def _origin(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["source"], row["origin"], row["position"]


def _row(image_id: str, role: str, text: str, source: str, origin: str, position: int) -> dict[str, Any]:
    try:
        caption_id = hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError:
        raise ValueError(f"{origin or 'project.toml'}: the text holds half of a surrogate pair, which no encoding has") from None
    return {
        "caption_id": caption_id,
        "image_id": image_id,
        "role": role,
        "text": text,
        "source": source,
        "origin": origin,
        "position": position,
    }


def _fill(config: CaptionsConfig, caption: str) -> str:
    """The template, filled in one go: braces inside a caption are the caption's."""
    values = {"{caption}": caption, "{trigger}": config.trigger}
    return re.sub(r"\{(?:caption|trigger)\}", lambda found: values[found.group()], config.template)


def _for_missing(config: CaptionsConfig, path: str) -> list[tuple[str, Caption]]:
    if config.missing == "filename":
        return [(_fill(config, caption.text), caption) for caption in _from_name(path)]
    if config.missing in ("empty", "trigger"):
        text = config.trigger if config.missing == "trigger" else ""
        return [(text, Caption(text, "config", "captions.missing"))]
    return []


def _missing(without: list[str], total: int, config: CaptionsConfig) -> str:
    sidecar = PurePosixPath(without[0]).with_suffix(config.extension).name
    looked = " or ".join(config.sources)
    return (
        f"{len(without)} of {total} images have no caption ({looked}): {_few(without)}; write {sidecar} and so on beside them, "
        "or set captions.missing to empty, trigger, filename or skip"
    )


def _check_trigger(config: CaptionsConfig, texts: list[str]) -> list[str]:
    """A trigger that no caption has would be learnt by nobody: an error. One that only some have is said."""
    if not config.trigger or not texts:
        return []
    count = sum(config.trigger in text for text in texts)
    if not count:
        raise ValueError(
            f'captions.trigger "{config.trigger}" is in none of the {len(texts)} captions: '
            'put it into them, or set captions.template = "{trigger}, {caption}"'
        )
    return [f'"{config.trigger}" is in {count} of {len(texts)} captions'] if count < len(texts) else []


# Where captions are found. A lookup takes an image's path and returns its captions.


def _lookup(
    source: str, folder: Path, config: CaptionsConfig, paths: list[str], notes: list[str]
) -> Callable[[str], list[Caption]]:
    if source == "template":
        return lambda path: [Caption("", "template", "captions.template")]
    if source == "filename":
        return _from_name
    if source == "sidecar":
        return _sidecars(folder, config, paths)
    found = _metadata(folder, paths, notes)
    return lambda path: found.get(_same(path), [])


def _from_name(path: str) -> list[Caption]:
    text = " ".join(re.split(r"[\s_-]+", PurePosixPath(path).stem)).strip()
    return [Caption(text, "filename", path)] if text else []


def _sidecars(folder: Path, config: CaptionsConfig, paths: list[str]) -> Callable[[str], list[Caption]]:
    there = {_same(name): name for parent in {posixpath.dirname(path) for path in paths} for name in _names(folder, parent)}

    def lookup(path: str) -> list[Caption]:
        for wanted in (path + config.extension, str(PurePosixPath(path).with_suffix(config.extension))):
            name = there.get(_same(wanted))
            if name is None:
                continue
            text = read_text(folder / name)
            if text.strip() and config.lines == "one":
                return [Caption(text.strip(), "sidecar", name)]
            if text.strip():
                lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
                return [Caption(line, "sidecar", f"{name}:{number}") for number, line in lines if line]
        return []

    return lookup


def _names(folder: Path, parent: str) -> list[str]:
    try:
        return [posixpath.join(parent, path.name) for path in (folder / parent).iterdir()]
    except OSError:
        return []


def _metadata(folder: Path, paths: list[str], notes: list[str]) -> dict[str, list[Caption]]:
    """Captions by path from every metadata file in a folder that holds images, at any depth. Rows without an image are said."""
    images = {_same(path) for path in paths}
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    found: dict[str, list[Caption]] = {}
    for parent in sorted(parents):
        strangers = []
        for kind, read in (("metadata.jsonl", _jsonl), ("metadata.csv", _csv)):
            name = posixpath.normpath(posixpath.join(parent, kind))
            if not (folder / name).is_file():
                continue
            for line, row in read(folder / name):
                file_name, texts = _entry(folder / name, line, row)
                path = _same(posixpath.normpath(posixpath.join(parent, file_name)))
                if path not in images:
                    strangers.append(file_name)
                found.setdefault(path, []).extend(Caption(text, "metadata", f"{name}:{line}") for text in texts)
            if strangers:
                notes.append(f"{name}: {len(strangers)} rows name no image that is there: {_few(strangers)}")
                strangers = []
    return found


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {line}: not JSON at column {error.colno}: {error.msg}") from None
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {line}: not an object, as {{"file_name": "a.png", "text": "..."}} is')
        yield line, row


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _entry(path: Path, line: int, row: dict[str, Any]) -> tuple[str, list[str]]:
    """The image that a metadata row names, and its texts: one, a list of them, or none where the field is empty."""
    file_name = row.get("file_name")
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"{path}, line {line}: no file_name; its columns are {', '.join(map(str, row))}")
    column = next((column for column in TEXT_COLUMNS if column in row), None)
    if column is None:
        raise ValueError(f"{path}, line {line}: none of {', '.join(TEXT_COLUMNS)}; its columns are {', '.join(map(str, row))}")
    value = row[column]
    texts = value if isinstance(value, list) else [value]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"{path}, line {line}: {column} is neither a text nor a list of texts")
    return file_name.replace("\\", "/"), [text.strip() for text in texts if text and text.strip()]


def read_text(path: Path) -> str:
    """A text file, one kind of line break: UTF-8, or UTF-16 that says so by its mark. `ValueError` names file and byte."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not {encoding.upper()}: byte {error.start} is 0x{data[error.start]:02x}; save it as UTF-8"
        ) from None
    if "\0" in text:
        raise ValueError(f"{path} holds a zero at byte {data.index(0)}, as UTF-16 without its mark does; save it as UTF-8")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _same(path: str) -> str:
    """One spelling of a path: macOS may store é as e and an accent, where a metadata file has one letter."""
    return unicodedata.normalize("NFC", path)


def _few(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _one_of(where: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, 1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'{where} "{value}" is none of {", ".join(choices)}{hint}')
