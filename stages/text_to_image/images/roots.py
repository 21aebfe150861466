"""The folders that are searched for images: one image folder, or the entries [[images.folder]]."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stages.text_to_image.images.config import FolderConfig, ImagesConfig


@dataclass(frozen=True)
class Root:
    """A folder that is searched for images."""

    path: str  # relative to the image folder, with forward slashes; "": the image folder itself
    settings: FolderConfig | None = None  # the entry [[images.folder]]


def roots(config: ImagesConfig, folder: Path, project: Path) -> list[Root]:
    """Raises ValueError if the folder of an entry does not exist, or lies in that of another."""
    if not config.folders:
        return [Root("")]
    found = [Root(_below(folder, project, each.path), each) for each in config.folders]
    for each in found:
        assert each.settings
        if not (folder / each.path).is_dir():
            what = "is a file, not a folder" if (folder / each.path).exists() else "does not exist"
            raise ValueError(f"images.folder path must be a folder of images, got {each.settings.path!r}: it {what}")
        for other in found:
            if other is not each and PurePosixPath(each.path).is_relative_to(other.path):
                assert other.settings
                raise ValueError(
                    f"images.folder: {each.settings.path!r} lies in {other.settings.path!r}; name folders that do not "
                    "contain each other"
                )
    return found


def _below(folder: Path, project: Path, path: str) -> str:
    home = Path(path)
    with suppress(RuntimeError):
        home = home.expanduser()
    found = Path(os.path.relpath((project / home).resolve(), folder.resolve())).as_posix()
    return "" if found == "." else found
