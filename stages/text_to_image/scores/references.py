"""Real pictures with captions, in a folder of their own: what previews are compared with. They are never trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from stages.hashing import file_sha256

METADATA = "metadata.jsonl"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".tif", ".tiff", ".bmp", ".gif")


@dataclass(frozen=True)
class Reference:
    """A picture: its path below the folder, the sha256 of its bytes, its caption, which may be empty."""

    path: str
    picture_id: str
    caption: str


def references(folder: Path) -> list[Reference]:
    """The folder's pictures in order of path, equal ones once; none if there is no such folder.

    Captions as beside training images: metadata.jsonl (file_name, text) in the folder, else a.txt beside a.png.
    """
    told = _metadata(folder / METADATA)
    found: dict[str, Reference] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
        name = path.relative_to(folder).as_posix()
        picture_id, sidecar = file_sha256(path), path.with_suffix(".txt")
        caption = told.get(name) or (sidecar.read_text(encoding="utf-8") if sidecar.is_file() else "")
        found.setdefault(picture_id, Reference(name, picture_id, caption.strip()))
    strangers = sorted(name for name in told if not (folder / name).is_file())
    if strangers:
        raise ValueError(f"{folder / METADATA}: {strangers[0]} is named there, but no such picture is in the folder")
    return list(found.values())


def _metadata(file: Path) -> dict[str, str]:
    """Captions by file name; none without the file."""
    if not file.is_file():
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found[str(row["file_name"])] = str(row["text"])
        except (ValueError, KeyError, TypeError):
            wanted = '{"file_name": "a.png", "text": "..."}'
            raise ValueError(f"{file}, line {number}: not an object with file_name and text, like {wanted}") from None
    return found
