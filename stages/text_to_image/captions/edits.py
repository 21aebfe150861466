"""Captions that the user edits on the project's page: kept in the project, or written into caption files when he asks for it.

`captions.written.jsonl` of the project has one line per caption file that was written: its old content in base64, and the edits
that it took. The lines are written before the files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from schemas.text_to_image import IMAGES
from stages.run import Run
from stages.settings import setting_path, several
from stages.text_to_image.caption_files import CAPTIONS, PICTURES, SIDECAR_BYTES, Caption, caption_file, leads_out, read_text
from stages.text_to_image.captions.stage import (
    EDITS,
    NEWER,
    CaptionsConfig,
    Edit,
    Found,
    Subject,
    caption_rows,
    edit_lines,
    fill_template,
    find_captions,
    newer_files,
    read_edits,
    without_trigger,
)
from stages.text_to_image.imaging.usable import first_names
from stages.untrusted import open_regular, parse_json

FILE = "captions.written.jsonl"
LONGEST = 20_000  # letters of a caption; every text encoder cuts much earlier


def write_edits(project: Path, edits: Mapping[str, str | None]) -> None:
    """Add edits; None takes one back. If one is blank, too long or invalid, raises ValueError and writes nothing."""
    lines, now = edit_lines(project), time.time()
    for key, text in edits.items():
        if text is not None and (not text.strip() or len(text) > LONGEST):
            raise ValueError(f"a caption must have 1 to {LONGEST} letters, got {len(text.strip())}")
        if text is not None and "\0" in text:
            raise ValueError("a caption must be text, got a character of value zero")
        lines.append(Edit(key, text if text is None else text.strip(), now))
    try:
        # `json.dumps` lets half of a surrogate pair through, `encode` does not.
        _put(project / EDITS, _jsonl(line._asdict() for line in lines))
    except UnicodeEncodeError:
        raise ValueError("a caption must be valid Unicode, got half of a surrogate pair") from None


@dataclass
class Change:
    name: str  # path below the image folder
    text: str  # new content
    edits: dict[str, str | None] = field(default_factory=dict)  # "IMAGE_ID:POSITION" -> edited text


def write_sidecars(run: Run[CaptionsConfig]) -> str:
    """Write the edited captions into the caption files of their images; returns a sentence for the user.

    No training text changes: a caption stays an edit, and its file as it was, where the template adds words that the text
    lacks, a metadata file comes first in `sources`, or two images share the file.
    """
    edits = read_edits(run.root)
    if not edits:
        raise ValueError("no caption is edited, so there is nothing to write")
    # The number of lines so far is a new number for this writing: the file only grows.
    folder, batch, found = run.needs["image_folder"], len(_read(run.root)), find_captions(run)
    texts, changes = _texts(run, found, edits), list(_changes(run, found, edits))
    before = {change.name: _content(folder / change.name) for change in changes}
    # First, so that a kill between two files can be undone.
    entries = []
    for change in changes:
        old, after = before[change.name], hashlib.sha256(change.text.encode()).hexdigest()
        kept = None if old is None else base64.b64encode(old).decode()
        entries.append({"batch": batch, "file": change.name, "before": kept, "after": after, "edits": change.edits})
    _add(run.root, entries)
    taken = {key for change in changes for key in change.edits}
    left = {key: text for key, text in edits.items() if key not in taken}
    good: list[Change] = []
    done: list[str] = []
    try:
        for change in changes:
            _put(folder / change.name, change.text.encode())
            done.append(change.name)
        # The files are read again as the stage reads them, without the edits they took: only that shows what sources,
        # template and shared files do. A file is good if neither its edits nor other texts that are read from it differ.
        reread, absent = _texts(run, find_captions(run), left), (None, "")
        differing = {key for key in texts.keys() | reread.keys() if texts.get(key, absent)[0] != reread.get(key, absent)[0]}
        files = {made.get(key, absent)[1] for made in (texts, reread) for key in differing}
        good = [change for change in changes if change.name not in files and not differing & change.edits.keys()]
    finally:
        # Also after an error: then none is good.
        for name in set(done) - {change.name for change in good}:
            _put(folder / name, before[name])
    written = {key for change in good for key in change.edits}
    # Those that stay are newer than their files, which were written twice.
    write_edits(run.root, {key: None if key in written else edits[key] for change in changes for key in change.edits})
    paths = {image_id: each.paths[0] for image_id, each in found.subjects.items()}
    stay = [paths.get(key.rpartition(":")[0], key) for key in edits if key not in written]
    rest = f"; {len(stay)} stay edits of the project, since a file would give another text: {first_names(stay)}" if stay else ""
    return f"{several(len(written), 'caption')} written into {several(len(good), 'file')}{rest}"


def undo_sidecars(run: Run[CaptionsConfig]) -> str:
    """Turn the last writing back into edits (called again: the one before); a file or edit that is newer stays as it is."""
    folder, lines, batches = run.needs["image_folder"], _read(run.root), written_batches(run.root)
    if not batches:
        raise ValueError("no captions were written into files, so there is nothing to undo")
    entries = [line for line in lines if line.get("batch") == batches[-1]]
    restored, changed, edits = dict[str, bytes | None](), [], dict[str, str | None]()
    for entry in entries:
        if not _may_be_caption(entry["file"], folder, run):
            raise ValueError(f"{run.root / FILE} names {entry['file']}, which is no caption file of this project")
        now, before = _content(folder / entry["file"]), entry["before"]
        old = None if before is None else base64.b64decode(before)
        if now == old:  # it was not written after all
            continue
        if now is None or hashlib.sha256(now).hexdigest() != entry["after"]:
            changed.append(entry["file"])
            continue
        restored[entry["file"]] = old
        edits |= entry["edits"]
    newer = read_edits(run.root)
    again = {key: text for key, text in edits.items() if key not in newer}
    write_edits(run.root, again)  # first: if killed, no text is lost
    for name, old in restored.items():
        _put(folder / name, old)
    write_edits(run.root, again)  # newer than the files
    _add(run.root, [{"undone": batches[-1]}])
    rest = f"; changed since and left as they are: {first_names(changed)}" if changed else ""
    return f"{several(len(restored), 'file')} restored to the old content; the captions are edits of the project{rest}"


def written_batches(project: Path) -> list[int]:
    """Numbers of the writings that are not undone, the last at the end. Raises ValueError if their file is damaged."""
    lines = _read(project)
    undone = {line["undone"] for line in lines if "undone" in line}
    return [line["batch"] for line in lines if "batch" in line and line["batch"] not in undone]


def present_texts(run: Run[CaptionsConfig]) -> dict[str, str]:
    return {key: text for key, (text, _) in _texts(run, find_captions(run), {}).items()}


def newer_than_edits(run: Run[CaptionsConfig]) -> dict[str, str]:
    return {key: f"{file} {NEWER}" for key, file in newer_files(run, find_captions(run)).items()}


def take_files(run: Run[CaptionsConfig]) -> str:
    """Take back the edits of captions whose files have changed since; returns a sentence for the user."""
    newer = newer_files(run, find_captions(run))
    if not newer:
        raise ValueError("no caption file has changed since its caption was edited, so there is no edit to drop")
    write_edits(run.root, dict.fromkeys(newer))
    files = list(dict.fromkeys(newer.values()))
    return f"{several(len(newer), 'edit')} dropped: what is written in {first_names(files)} counts again"


def _may_be_caption(name: str, folder: Path, run: Run[CaptionsConfig]) -> bool:
    """A project from elsewhere must not have other files overwritten."""
    path, where = PurePosixPath(name), run.config.where
    outside = [f"../{CAPTIONS}/"] if folder.name.lower() in PICTURES else []
    if where.folder:
        outside.append(f"{Path(os.path.relpath(setting_path(where.folder, run.root).resolve(), folder.resolve())).as_posix()}/")
    start = next((each for each in outside if name.startswith(each)), "")
    below = PurePosixPath(name.removeprefix(start))
    return path.suffix in where.extensions and not below.is_absolute() and ".." not in below.parts


def _texts(run: Run[CaptionsConfig], read: Found, edits: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(training text, path of its file) by "IMAGE_ID:POSITION", as the stage would make them with these edits."""
    found = {}
    for row in caption_rows(read, run.config, edits)[0]:
        if row["role"] == "caption":
            # In a file of many captions, the origin ends with the line.
            numbered = row["source"] == "sidecar" and run.config.lines == "many"
            origin = row["origin"].rpartition(":")[0] if numbered else row["origin"]
            found[f"{row['image_id']}:{row['position']}"] = row["text"], origin
    return found


def _changes(run: Run[CaptionsConfig], found: Found, edits: Mapping[str, str]) -> Iterator[Change]:
    """The files to write. An edit that no file can hold is left out."""
    folder, paths = run.needs["image_folder"], run.inputs.rows(IMAGES)["path"].to_pylist()
    made: dict[str, Change] = {}
    for key, text in edits.items():
        image_id, _, position = key.rpartition(":")
        subject = found.subjects.get(image_id)
        plain = _without_template(run.config, subject, text) if subject else None
        if subject is None or plain is None or "\0" in plain:  # an earlier version took a zero, which no file can hold
            continue
        distinct: dict[str, Caption] = {}
        for caption in found.captions[image_id]:
            distinct.setdefault(subject.fill(run.config, caption).text, caption)
        # The positions of edits count distinct training texts, as `_image_rows` does.
        captions = list(distinct.values())
        # The file and line to write to; line 0 is the whole file, file "" is none.
        name, line, at = "", 0, int(position)
        if at < len(captions) and captions[at].source == "sidecar":
            name = captions[at].origin
            if run.config.lines == "many":
                name, _, number = name.rpartition(":")
                line = int(number)
        elif at == 0 and len(captions) <= 1:  # of several, a new file would replace all
            name = caption_file(subject.paths[0], paths, folder, run.config.where, run.root)
        if line and "\n" not in plain:
            # Several captions may lie in one file: their lines are edited in one change.
            change = made.setdefault(name, Change(name, read_text(folder / name, SIDECAR_BYTES)))
            lines = change.text.split("\n")
            change.text = "\n".join([*lines[: line - 1], plain, *lines[line:]])
        elif name and not line and name not in made and not leads_out(folder / name):
            change = made[name] = Change(name, plain + "\n")
        else:
            continue
        change.edits[key] = text
    yield from made.values()


def _without_template(config: Any, subject: Subject, text: str) -> str | None:
    """The caption that the template turns into `text`, or None if there is none."""
    inner = [text]
    # "\0" stands for the caption: what is before and after it are the template's words.
    for template in (config.template, without_trigger(config.template)):
        before, _, after = fill_template(template, "\0", subject.trigger).partition("\0")
        if text.startswith(before) and text.endswith(after) and len(before) + len(after) < len(text):
            inner.append(text[len(before) : len(text) - len(after)])
    return next((each for each in inner if subject.fill(config, Caption(each, "sidecar", "")).text == text), None)


def _read(project: Path) -> list[dict[str, Any]]:
    path = project / FILE
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = [parse_json(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    for number, line in enumerate(found, 1):
        if not _is_sound(line):
            raise ValueError(f"{path}:{number}: not as this program writes it: delete the line, and its file stays as it is")
    return found


def _is_sound(line: Any) -> bool:
    if not isinstance(line, dict) or "undone" in line:
        return isinstance(line, dict) and isinstance(line["undone"], int)
    texts, edits = (line.get("file"), line.get("after")), line.get("edits")
    if not (isinstance(line.get("batch"), int) and isinstance(edits, dict) and all(isinstance(text, str) for text in texts)):
        return False
    return all(isinstance(text, str | None) for text in (line.get("before", 0), *edits.values()))


def _add(project: Path, lines: list[dict[str, Any]]) -> None:
    _put(project / FILE, (_content(project / FILE) or b"") + _jsonl(lines))


def _jsonl(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _put(path: Path, content: bytes | None) -> None:
    """Write or remove (None) a file in one step. A link stays a link, and the file keeps its permissions. Raises ValueError
    for a link to another folder.
    """
    if leads_out(path):
        raise ValueError(f"{path} is a link to {path.resolve()}, in another folder: nothing is written there")
    path = path.resolve()
    if content is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or a power cut may lose the new name
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)
