"""Find the image that a row of a file of captions names."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from stages.text_to_image.caption_files.text import normalise


class FileNames:
    """A search for images by the names in a caption file. Such a name may be a relative path, an absolute path or a
    path without a suffix. `find(name)` returns the image's path. `folder` is the image folder. `paths` are the paths of
    all images, relative to it. `base` is the folder of the caption file, relative to `folder`.
    """

    def __init__(self, folder: Path, paths: Sequence[str], base: str) -> None:
        self._base = base
        self._folders = [normalise(f"{root.as_posix()}/") for root in (folder.absolute(), folder.resolve())]
        composed = [normalise(path) for path in paths]
        self._whole = set(composed)
        stems = Counter(posixpath.splitext(path)[0] for path in composed)
        self._stems = {posixpath.splitext(path)[0]: path for path in composed if stems[posixpath.splitext(path)[0]] == 1}
        inside = [path for path in composed if not base or path.startswith(f"{normalise(base)}/")]
        names = Counter(PurePosixPath(path).name for path in inside)
        self._names = {PurePosixPath(path).name: path for path in inside if names[PurePosixPath(path).name] == 1}

    def find(self, name: str) -> str | None:
        """Return the path of the image that `name` names, relative to the image folder and in Unicode form NFC. Return
        None if no image fits, or if several do. `name` is a path with forward slashes. A relative path starts at the
        folder of the file of captions. `name` may lack the suffix of the image.

        An absolute path may come from another machine. If it lies outside the image folder, only its file name with
        suffix counts. The image must then lie in or below the folder of the file of captions.
        """
        given = normalise(name)
        if posixpath.isabs(given) or given[1:3] == ":/":
            root = next((root for root in self._folders if given.startswith(root)), None)
            if root is None:
                return self._names.get(PurePosixPath(given).name)
            path = given.removeprefix(root)
        else:
            path = normalise(posixpath.normpath(posixpath.join(self._base, name)))
        return path if path in self._whole else self._stems.get(path)
