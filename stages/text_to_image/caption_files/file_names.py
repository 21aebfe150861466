"""Find the image that a row of a file of captions names."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from stages.text_to_image.caption_files.text import normalise


class FileNames:
    """Find images by the names in the caption file of the folder `base`: relative or absolute paths, with or without suffix."""

    def __init__(self, folder: Path, paths: Sequence[str], base: str) -> None:
        self._base = base
        # The image folder may be a link, and the file may name either place.
        self._folders = [normalise(f"{root.as_posix()}/") for root in (folder.absolute(), folder.resolve())]
        composed = [normalise(path) for path in paths]
        self._whole = set(composed)
        stems = Counter(posixpath.splitext(path)[0] for path in composed)
        self._stems = {posixpath.splitext(path)[0]: path for path in composed if stems[posixpath.splitext(path)[0]] == 1}
        inside = [path for path in composed if not base or path.startswith(f"{normalise(base)}/")]
        names = Counter(PurePosixPath(path).name for path in inside)
        self._names = {PurePosixPath(path).name: path for path in inside if names[PurePosixPath(path).name] == 1}

    def find(self, name: str) -> str | None:
        """The image's path in NFC, or None if no image or several fit."""
        given = normalise(name)
        if posixpath.isabs(given) or given[1:3] == ":/":
            root = next((root for root in self._folders if given.startswith(root)), None)
            if root is None:
                # An absolute path of another machine: only its file name counts, and only below the folder of the caption
                # file.
                return self._names.get(PurePosixPath(given).name)
            path = given.removeprefix(root)
        else:
            path = normalise(posixpath.normpath(posixpath.join(self._base, name)))
        return path if path in self._whole else self._stems.get(path)
