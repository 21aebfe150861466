"""Write edited captions into caption files beside the images, when the user asks for it, and take that back.

`captions.written.jsonl` of the project has one line per file that was written: its old content in base64, and the edits that it
took. The lines are written before the files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.text_to_image.images import IMAGES
from stages.stage import StageContext
from stages.text_to_image.caption_files.lookup import SIDECAR_BYTES, caption_file
from stages.text_to_image.caption_files.text import Caption, first_names, read_text
from stages.text_to_image.captions.described import described_captions
from stages.text_to_image.captions.edits import read_edits, write_edits
from stages.text_to_image.captions.rows import caption_rows, find_captions
from stages.text_to_image.captions.subjects import Subject, subjects_of
from stages.text_to_image.captions.template import fill_template, without_trigger

FILE = "captions.written.jsonl"


@dataclass
class Change:
    """A caption file to write. `name` is its path relative to the image folder, `text` its new content. `edits` maps
    "IMAGE_ID:POSITION" to the edited captions that it takes.
    """

    name: str
    text: str
    edits: dict[str, str | None] = field(default_factory=dict)


def write_sidecars(ctx: StageContext) -> str:
    """Write the edited captions into the caption files of their images, and return a sentence for the user. It says how many
    were written, and which were not. `ctx` is the context of the stage `captions`. A written caption is no longer an edit of
    the project: the stage reads it from its file. Raises ValueError if no caption is edited.

    A caption is left as an edit if the stage would read another text afterwards. This happens if the template adds words that
    the text lacks, or if a metadata file comes first in `captions.sources`.
    """
    edits = read_edits(ctx.root)
    if not edits:
        raise ValueError("no caption is edited, so there is nothing to write")
    folder, batch = ctx.need("image_folder"), len(_read(ctx.root))
    changes = list(_changes(ctx, folder, edits))
    before = {change.name: _content(folder / change.name) for change in changes}
    for change in changes:
        old, new = before[change.name], change.text.encode()
        kept = None if old is None else base64.b64encode(old).decode()
        _add(ctx.root, {"batch": batch, "file": change.name, "before": kept, "after": _digest(new), "edits": change.edits})
    for change in changes:
        _put(folder / change.name, change.text.encode())
    rows, _ = caption_rows(ctx.rows(IMAGES), folder, ctx.config, {}, ctx.root, described_captions(ctx))
    texts = {f"{row['image_id']}:{row['position']}": row["text"] for row in rows if row["role"] == "caption"}
    good = [change for change in changes if all(texts.get(key) == text for key, text in change.edits.items())]
    for change in changes:
        if change not in good:
            _put(folder / change.name, before[change.name])
    written = {key for change in good for key in change.edits}
    write_edits(ctx.root, dict.fromkeys(written))
    paths = {image_id: each.paths[0] for image_id, each in subjects_of(ctx.rows(IMAGES), ctx.config).items()}
    left = [paths.get(key.rpartition(":")[0], key) for key in edits if key not in written]
    rest = f"; {len(left)} stay edits of the project, since a file would give another text: {first_names(left)}" if left else ""
    return f"{len(written)} captions written into {len(good)} files{rest}"


def undo_sidecars(ctx: StageContext) -> str:
    """Give the caption files of the last `write_sidecars` their old content, and make their captions edits of the project
    again. Return a sentence for the user. A file that was changed since then stays as it is and is named. `ctx` is the context
    of the stage `captions`. Raises ValueError if there is nothing to undo.
    """
    folder, lines = ctx.need("image_folder"), _read(ctx.root)
    undone = {line["undone"] for line in lines if "undone" in line}
    batches = [line["batch"] for line in lines if "batch" in line and line["batch"] not in undone]
    if not batches:
        raise ValueError("no captions were written into files, so there is nothing to undo")
    entries = [line for line in lines if line.get("batch") == batches[-1]]
    restored, changed, edits = 0, [], dict[str, str | None]()
    for entry in entries:
        now, before = _content(folder / entry["file"]), entry["before"]
        old = None if before is None else base64.b64decode(before)
        if now == old:  # it was not written after all
            continue
        if now is None or _digest(now) != entry["after"]:
            changed.append(entry["file"])
            continue
        _put(folder / entry["file"], old)
        restored += 1
        edits |= entry["edits"]
    write_edits(ctx.root, edits)
    _add(ctx.root, {"undone": batches[-1]})
    rest = f"; {len(changed)} were changed since and stay: {first_names(changed)}" if changed else ""
    return f"{restored} files have their old content again; their captions are edits of the project{rest}"


def _changes(ctx: StageContext, folder: Path, edits: Mapping[str, str]) -> Iterator[Change]:
    """Yield the files to write for `edits`: "IMAGE_ID:POSITION" -> edited text. An edit that no file can hold is left out."""
    images = ctx.rows(IMAGES)
    subjects, paths = subjects_of(images, ctx.config), images["path"].to_pylist()
    found, _ = find_captions(subjects, paths, folder, ctx.config, ctx.root, described_captions(ctx))
    made: dict[str, Change] = {}
    for key, text in edits.items():
        image_id, _, position = key.rpartition(":")
        subject = subjects.get(image_id)
        plain = _without_template(ctx.config, subject, text) if subject else None
        if subject is None or plain is None:
            continue
        distinct: dict[str, Caption] = {}
        for caption in found[image_id]:
            distinct.setdefault(subject.fill(ctx.config, caption).text, caption)
        captions = list(distinct.values())
        name, line = _place(captions, int(position), ctx, subject.paths[0], paths)
        if line and "\n" not in plain:
            change = made.setdefault(name, Change(name, read_text(folder / name, SIDECAR_BYTES)))
            lines = change.text.split("\n")
            change.text = "\n".join([*lines[: line - 1], plain, *lines[line:]])
        elif name and not line and name not in made:
            change = made[name] = Change(name, plain + "\n")
        else:
            continue
        change.edits[key] = text
    yield from made.values()


def _place(captions: list[Caption], position: int, ctx: StageContext, path: str, paths: list[str]) -> tuple[str, int]:
    """Return (name, line) of the caption at `position` of an image: the file that holds it, relative to the image folder, and
    its line, counted from 1. `line` is 0 if the caption is the whole file. `name` is "" if no file can hold it. `captions` are
    those of the image at `path`; `paths` are all images.
    """
    if position < len(captions) and captions[position].source == "sidecar":
        name, _, line = captions[position].origin.rpartition(":")
        return (name, int(line)) if ctx.config.lines == "many" else (captions[position].origin, 0)
    alone = position == 0 and len(captions) <= 1  # of several, a new file would replace all
    return (caption_file(path, paths, ctx.need("image_folder"), ctx.config.where, ctx.root), 0) if alone else ("", 0)


def _without_template(config: Any, subject: Subject, text: str) -> str | None:
    """Return the caption that gives the training text `text` with the template of `config`, or None if there is none."""
    inner = [text]
    for template in (config.template, without_trigger(config.template)):
        before, _, after = fill_template(template, "\0", subject.trigger).partition("\0")
        if text.startswith(before) and text.endswith(after) and len(before) + len(after) < len(text):
            inner.append(text[len(before) : len(text) - len(after)])
    return next((each for each in inner if subject.fill(config, Caption(each, "sidecar", "")).text == text), None)


def _read(project: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (project / FILE).read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{project / FILE} is damaged: {error}") from None


def _add(project: Path, line: dict[str, Any]) -> None:
    with (project / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _put(path: Path, content: bytes | None) -> None:
    """Give a file this content in one step; None removes it. A link stays a link."""
    path = path.resolve()
    if content is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
