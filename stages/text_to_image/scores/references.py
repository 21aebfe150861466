"""References: real pictures of the style, in a folder of their own, that previews are compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from stages.hashing import file_sha256

METADATA = "metadata.jsonl"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".tif", ".tiff", ".bmp", ".gif")


@dataclass(frozen=True)
class Reference:
    """One reference: its path below the folder, the sha256 of the file as hex digits, and its caption, which may be empty."""

    path: str
    picture_id: str
    caption: str


def read_references(folder: Path) -> list[Reference]:
    """Return the pictures below `folder`, sorted by path, the first of several equal files only; none without the folder.

    Captions come from metadata.jsonl in the folder (file_name, text), else from a.txt beside a.png. ValueError, with the line,
    if metadata.jsonl is malformed or names a picture that is not there.
    """
    captions = _read_metadata(folder / METADATA)
    found: dict[str, Reference] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
        name = path.relative_to(folder).as_posix()
        picture_id, sidecar = file_sha256(path), path.with_suffix(".txt")
        caption = captions.get(name) or (sidecar.read_text(encoding="utf-8") if sidecar.is_file() else "")
        found.setdefault(picture_id, Reference(name, picture_id, caption.strip()))
    absent = sorted(name for name in captions if not (folder / name).is_file())
    if absent:
        raise ValueError(f"{folder / METADATA}: file_name must name a picture in the folder, got {absent[0]}")
    return list(found.values())


def _read_metadata(file: Path) -> dict[str, str]:
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
            expected = '{"file_name": "a.png", "text": "..."}'
            raise ValueError(f"{file}, line {number}: expected an object with file_name and text, such as {expected}") from None
    return found
