"""One caption of an image, the reading of text files, and the comparison and listing of paths."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

from stages.untrusted import read_bytes


@dataclass(frozen=True)
class Caption:
    """One caption of an image as it was read, before the setting `captions.template` adds words to it. `text` is the
    caption. `source` is the kind of place where it was found: "sidecar" (a file beside the image), "metadata", "filename",
    "template" or "config". `origin` is the exact place: a file, a file and line such as "metadata.jsonl:3", or the name of
    a setting. `weight` says how often it is drawn, relative to the image's other captions. None means 1.
    """

    text: str
    source: str
    origin: str
    weight: float | None = None


def read_text(path: Path, most: int) -> str:
    """Return the text of a file. A file with a UTF-16 byte order mark is read as UTF-16. Any other file is read as
    UTF-8. Every line break becomes one newline character. `most` is the largest allowed size in bytes. Raises
    ValueError if the file cannot be read, is larger, or has another encoding. Also raises it if `path` is a link to a
    file outside its folder. For a wrong encoding, the message names the first wrong byte.
    """
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
    if "\0" in text:
        raise ValueError(f"{path} has a zero at byte {data.index(0)}, as UTF-16 without a byte order mark does; save it as UTF-8")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def normalise(path: str) -> str:
    """Return `path` in Unicode form NFC, so that two spellings of a name compare equal. For example, macOS may store é as
    two characters, e and an accent.
    """
    return unicodedata.normalize("NFC", path)


def first_names(names: list[str], count: int = 3) -> str:
    """Return the first `count` of the names as text, such as "a, b, c and 4 more". If there are no further names, "and 4
    more" is left out.
    """
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
