"""Error messages about an image folder without images: they name the kind of file that lies there instead."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

MOST = 10_000  # files that are looked at
KINDS = {  # suffix -> what the user should do
    **dict.fromkeys((".zip", ".7z", ".rar", ".gz", ".tgz"), "unpack {it} first"),
    **dict.fromkeys((".mp4", ".mov", ".mkv", ".avi", ".webm"), "videos are not read: save frames as PNG or JPEG"),
    **dict.fromkeys((".safetensors", ".npz", ".pt"), "{it} may be another trainer's cache: name the folder of the pictures"),
    **dict.fromkeys((".parquet", ".arrow"), "{it} must have a column of images (binary, or bytes and path)"),
    ".tar": "{it} must hold images, without compression",
    **dict.fromkeys((".txt", ".caption"), "{it} may be captions: name the folder of the pictures, and set captions.folder"),
    **dict.fromkeys((".toml", ".yaml", ".yml"), "{it} may be another trainer's settings: name the folder that it names"),
    **dict.fromkeys((".json", ".jsonl", ".csv", ".tsv"), "{it} may list pictures: name the folder that holds the pictures"),
}


def no_images(folder: Path) -> str:
    """The first of KINDS that lies in the folder, and what to do with it."""
    files = [path for path in islice(folder.rglob("*"), MOST) if path.is_file()]
    counts = Counter(path.suffix.lower() for path in files if not path.name.startswith("."))
    plain = f"image folder {folder} holds no images"
    for suffix in sorted((each for each in counts if each in KINDS), key=list(KINDS).index):
        example = min(path.relative_to(folder).as_posix() for path in files if path.suffix.lower() == suffix)
        count = f"{counts[suffix]} {suffix} file{'' if counts[suffix] == 1 else 's'}"
        return f"{plain}, but {count}, such as {example}: {KINDS[suffix].format(it='it' if counts[suffix] == 1 else 'they')}"
    return f"{plain}: put some there, or set images.folder"
