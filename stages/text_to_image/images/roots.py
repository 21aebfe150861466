"""The folders that are searched for images: one image folder, or the entries [[images.folder]]."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stages.text_to_image.images.config import FolderConfig, ImagesConfig


@dataclass(frozen=True)
class Root:
    """A folder that is searched for images. `path` is relative to the image folder, with forward slashes; "" is the image
    folder itself. `settings` is the entry [[images.folder]] of the folder, or None if there are no such entries.
    """

    path: str
    settings: FolderConfig | None = None


def roots(config: ImagesConfig, folder: Path, project: Path) -> list[Root]:
    """Return the folders that are searched for images, as `Root` objects. `config` has the settings [images]. `folder`
    is the image folder, which contains all of them. A relative path in an entry [[images.folder]] starts at `project`,
    the project's folder. Without entries, the result is the image folder alone. Raises ValueError if the folder of an
    entry does not exist, or if it lies in the folder of a different entry.
    """
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
