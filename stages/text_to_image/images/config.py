"""The settings of the stage `images`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.settings import check_bounds, runtime, selects, setting
from stages.text_to_image.imaging.decode import CEILING, CEILING_BYTES, MAX_BYTES, MAX_PIXELS


@dataclass(frozen=True)
class FolderConfig:
    """One entry [[images.folder]]: a folder of images, and how often and with which trigger its images are trained."""

    path: str = selects("", "the folder, searched with all folders below it; relative to the project", path=True)
    repeats: float | None = selects(
        None, "occurrences of each image per epoch; 0: never; unset: 1, or as the name says (10_name)", bounds=(0.0, 1000.0)
    )
    weight: float | None = selects(
        None,
        "draws of the folder relative to the others, whatever its number of images; all folders have one, or none",
        bounds=(1e-3, 1000.0),
    )
    trigger: str | None = selects(None, 'trigger of these images; "": none; unset: that of [captions]')
    regularisation: bool = selects(False, "images of the class: trained without the trigger, as often as all other images")

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.path.strip():
            raise ValueError(f'path must name a folder of images, such as "portraits", got "{self.path}"')
        if self.repeats is not None and self.weight is not None:
            raise ValueError(f"weight must be unset if repeats is set: it replaces repeats, got {self.weight:g}")


@dataclass(frozen=True)
class ImagesConfig:
    """The section [images]: the image folder, and the limits on the size of an image."""

    folder: str | tuple[FolderConfig, ...] = selects(
        "images",
        "image folder, searched with all folders below it; relative to the project; or several [[images.folder]] with path",
        path=True,
    )
    layout: Literal["auto", "plain"] = selects(
        "auto", "auto: kohya's folder names are read (10_ohwx cat: 10 repeats; reg: regularisation); plain: they mean nothing"
    )
    references: tuple[str, ...] | None = selects(
        None,
        'folders of references for edit training, such as ["before"]: before/cat.png is a reference of cat.png; unset: control, '
        "control_1 and so on, and cat_in.png for cat_out.png; []: none",
    )
    min_side: int = setting(
        64, "shortest side that is used, pixels; a smaller image has fewer than 4 tokens across", bounds=(1, 65536)
    )
    max_pixels: int = setting(
        MAX_PIXELS,
        f"width x height above which a file is refused as a decompression bomb, pixels; at most {CEILING}",
        bounds=(1, CEILING),
    )
    max_bytes: int = setting(
        MAX_BYTES,
        f"size of a file above which it is refused unread, bytes; at most {CEILING_BYTES}: it is read whole",
        bounds=(1, CEILING_BYTES),
    )
    workers: int = runtime(4, "threads that read and decode; a disk is rarely faster with more", bounds=(1, 64))

    def __post_init__(self) -> None:
        check_bounds(self)
        if isinstance(self.folder, str) and not self.folder.strip():
            raise ValueError(f'folder must name the image folder, such as "images", got "{self.folder}"')
        for name in self.references or ():
            if not name.strip("/. ") or name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f'references must name folders below the image folder, such as "before", got "{name}"')
        for use in (False, True):
            weighted = {each.weight is not None for each in self.folders if each.regularisation is use}
            if len(weighted) > 1:
                raise ValueError("folder must have a weight in every [[images.folder]] or in none, got both")

    @property
    def folders(self) -> tuple[FolderConfig, ...]:
        """The entries [[images.folder]]; empty if `folder` is a single path."""
        return self.folder if isinstance(self.folder, tuple) else ()

    @property
    def paths(self) -> tuple[str, ...]:
        """As the user wrote them."""
        return tuple(each.path for each in self.folders) if isinstance(self.folder, tuple) else (self.folder,)
