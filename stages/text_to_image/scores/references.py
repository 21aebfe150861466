"""References: real pictures of the style, in a folder of their own, that previews are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.hashing import file_sha256
from stages.untrusted import parse_json, read_utf8

METADATA = "metadata.jsonl"
TEXT_BYTES = 100_000_000  # largest text file that is read
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".tif", ".tiff", ".bmp", ".gif")


@dataclass(frozen=True)
class Reference:
    path: str  # relative to the folder of references
    picture_id: str  # sha256 of the file
    caption: str  # may be empty


def read_references(folder: Path) -> list[Reference]:
    """Sorted by path; of equal files, only the first. Raises ValueError if metadata.jsonl is malformed or names a
    missing picture.
    """
    captions = _read_metadata(folder / METADATA)
    found: dict[str, Reference] = {}
    pictures = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    for path in sorted(p for p in pictures if p.is_file()):
        name = path.relative_to(folder).as_posix()
        picture_id, sidecar = file_sha256(path), path.with_suffix(".txt")
        # metadata.jsonl, else the text file of the same name, such as a.txt for a.png.
        caption = captions.get(name) or (read_utf8(sidecar, TEXT_BYTES) if sidecar.is_file() else "")
        found.setdefault(picture_id, Reference(name, picture_id, caption.strip()))
    absent = sorted(name for name in captions if not (folder / name).is_file())
    if absent:
        raise ValueError(f"{folder / METADATA}: file_name must name a picture in the folder, got {absent[0]}")
    return list(found.values())


def _read_metadata(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(read_utf8(file, TEXT_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, "line")
            found[str(row["file_name"])] = str(row["text"])
        except (ValueError, KeyError, TypeError):
            expected = '{"file_name": "a.png", "text": "..."}'
            raise ValueError(f"{file}, line {number}: expected an object with file_name and text, such as {expected}") from None
    return found
