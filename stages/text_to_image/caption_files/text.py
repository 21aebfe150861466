"""One caption of an image, the reading of text files, and the comparison and listing of paths."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

from stages.untrusted import read_bytes


@dataclass(frozen=True)
class Caption:
    """A caption as it was read, before the template."""

    text: str
    source: str  # sidecar, metadata, filename, folder, description, template or config
    origin: str  # file, file and line (metadata.jsonl:3), or the name of a setting
    weight: float | None = None  # draws relative to the image's other captions; None: 1


def read_text(path: Path, most: int) -> str:
    r"""UTF-8, or UTF-16 with a byte order mark; line breaks become "\n".

    Raises ValueError if the file cannot be read, is larger than `most` bytes, has another encoding, or links to another
    folder.
    """
    # A data set from elsewhere could otherwise have any file of the disk read into its captions.
    if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
        raise ValueError(
            f"{path} is a link to {path.resolve()}, in another folder: captions are not read from there; copy the file"
        )
    data = read_bytes(path, most)
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not {encoding.upper()}: byte {error.start} is 0x{data[error.start]:02x}; save it as UTF-8"
        ) from None
    # UTF-16 without a mark decodes as UTF-8 where it holds only ASCII.
    if "\0" in text:
        raise ValueError(f"{path} has a zero at byte {data.index(0)}, as UTF-16 without a byte order mark does; save it as UTF-8")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def normalise(path: str) -> str:
    """NFC, so that two spellings of a name compare equal: macOS may store é as e and an accent."""
    return unicodedata.normalize("NFC", path)


def first_names(names: list[str], count: int = 3) -> str:
    """Such as "a, b, c and 4 more"."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
