"""The settings of the stage `latents`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.settings import Section, runtime, selects, setting
from stages.text_to_image.imaging.decode import parse_colour


@dataclass(frozen=True)
class LatentsConfig(Section):
    flip: bool = selects(False, "encode a mirrored copy of every crop too; off, because text and faces are not symmetric")
    jitter: int = selects(
        0, "further crops of each image, a little smaller and moved at random; none for images with references", bounds=(0, 100)
    )
    jitter_share: float = selects(
        0.1, "jitter: largest share of a side by which a further crop is smaller, which enlarges its pixels", bounds=(0.001, 0.5)
    )
    mask: Literal["none", "alpha", "file"] = selects(
        "none",
        "which part of an image is trained on: none: all of it; alpha: its opaque part; file: the white part of a mask file, "
        "cat.mask.png or masks/cat.png for cat.jpg",
    )
    background: str = setting("#ffffff", "colour behind transparent pixels")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype that the autoencoder computes in; bfloat16 needs half the memory and is less exact"
    )
    exact: bool = setting(
        True,
        "compute in full float32: no TF32 products and no Winograd convolutions, which some GPUs use by default",
        unrecorded=(True,),
    )
    batch_size: int = runtime(8, "rows per record batch, which a kill can lose; images are encoded one by one", bounds=(1, 1024))
    workers: int = runtime(4, "threads that decode and resize images ahead of the autoencoder", bounds=(1, 64))

    def check(self) -> None:
        parse_colour(self.background)
