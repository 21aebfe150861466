"""A new project: a folder with a project.toml that names the images; the images stay where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.project import config
from pipeline.project.project import spelled
from pipeline.store.disk import from_home
from stages.models.family import Family
from stages.text_to_image.families import family as family_record

TEMPLATE = """\
# A latentmill project. Every setting has a default; `latentmill status` says what each table would cost to rebuild.

[project]
family = {family}
weights = {weights}  # a folder or a hub id; empty: {source}

[images]
folder = {images}  # only read, never written

[captions]
trigger = {trigger}
template = {template}
preview_prompts = [{preview}]

{sections}
"""
# Section -> setting -> its first value and a remark; those of the family's record go before them, without a remark.
BEGIN: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "buckets": {"resolutions": ((512, 768), "add 1024 for the last bit of detail, if it fits")},
    "embeddings": {},
    "train": {
        "steps": (1500, "more can be added later: the run goes on where it ended"),
        "rank": (32, ""),
        "lr": (1e-4, ""),
    },
    "samples": {"checkpoints": ("all", "")},
}


def new_project(folder: Path, images: Path, family: str, weights: str, trigger: str) -> list[str]:
    """Write FOLDER/project.toml. Returns lines for the user. ValueError if something is in the way or missing."""
    record = family_record(family)
    folder, images = from_home(folder), from_home(images)
    file = folder / config.FILE
    if file.exists():
        raise ValueError(f"{file}: exists already; edit it, or choose another folder")
    if not images.is_dir():
        raise ValueError(f"{images}: no such folder of images")
    local = from_home(weights)
    values = {
        "family": record.name,
        "weights": relative(local, folder) if weights and local.is_dir() else weights,
        "images": relative(images, folder),
        "trigger": trigger,
        "template": "{trigger}, {caption}" if trigger else "{caption}",
    }
    preview = quoted(f"a photo of {trigger}" if trigger else "a photo")
    quotes = {name: quoted(value) for name, value in values.items()}
    text = TEMPLATE.format(**quotes, source=record.source, preview=preview, sections=sections(record))
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    try:
        config.load(file)
    except ValueError:
        file.unlink()  # or the next try would find it in the way
        raise
    return [f"wrote {file}; look it over, then:", f"  make train PROJECT={spelled(folder)}"]


def sections(record: Family) -> str:
    """The sections of a new project of that family."""
    parts = []
    for section, usual in BEGIN.items():
        own = {name: (value, "") for name, value in record.begin.get(section, {}).items()}
        lines = [f"[{section}]"]
        for name, (value, remark) in {**usual, **own}.items():
            lines.append(f"{name} = {json.dumps(value)}{remark and '  # ' + remark}")  # TOML too, for text, numbers and lists
        parts += ["\n".join(lines)] if usual or own else []
    return "\n\n".join(parts)


def relative(path: Path, folder: Path) -> str:
    """A path as the project names it: relative within the project or beside it, so that they can move together."""
    found = Path(os.path.relpath(path.resolve(), folder.resolve()))
    return str(path.resolve()) if found.parts[:2] == ("..", "..") else found.as_posix()


def quoted(text: str) -> str:
    """A TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'
