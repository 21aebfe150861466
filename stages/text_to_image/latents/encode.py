"""Run the autoencoder on crops, and make rows and record batches of the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from schemas.text_to_image.latents import LATENTS

if TYPE_CHECKING:
    from stages.models.protocols import Autoencoder
    from stages.text_to_image.latents.crop import Crop

Row = dict[str, Any]


def encode(model: Autoencoder, pixels_HWC: np.ndarray) -> np.ndarray:
    """Encode the pixels of one crop with the autoencoder `model`. pixels_HWC is uint8, (height, width, 3). Return the
    latent, (channels, height / 16, width / 16). It is bfloat16, stored as uint16 words.
    """
    image_1HWC = mx.array(pixels_HWC)[None].astype(mx.float32) / 127.5 - 1.0
    return np.array(model.encode(image_1HWC)[0].astype(mx.bfloat16).view(mx.uint16))


def encoded_row(model: Autoencoder, row: Row, crop: Crop) -> Row:
    """Encode one crop with the autoencoder `model`, and return its complete row of the table `latents`. `row` holds the
    columns that are known before encoding, such as key and size. `crop` is a pair (pixels, mask). If a value of the
    latent is not finite, the returned row has no tensor, and its column `rejected` says why.

    The row has the latent's mean, standard deviation and largest magnitude, computed after rounding to bfloat16.
    """
    pixels_HWC, mask = crop
    words_Chw = encode(model, pixels_HWC)
    values = (words_Chw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if not np.isfinite(values).all():
        return rejected_row(row, 'the autoencoder gave values that are not finite; try latents.precision = "float32"')
    return row | {
        "shape": list(words_Chw.shape),
        "dtype": "bfloat16",
        "mean": float(values.mean()),
        "std": float(values.std()),
        "absmax": float(np.abs(values).max()),
        "mask": mask,
        "rejected": None,
        "tensor": words_Chw.reshape(-1),
    }


def rejected_row(row: Row, reason: str) -> Row:
    """Return the complete row of the table `latents` for a crop that could not be encoded. `row` holds the columns that
    are known before encoding, such as key and size. `reason` is a sentence for the column `rejected`. The result is a
    copy of `row` with the other columns added. Its tensor is empty.
    """
    empty = {"shape": [], "dtype": "bfloat16", "mean": 0.0, "std": 0.0, "absmax": 0.0, "mask": None}
    return row | empty | {"rejected": reason, "tensor": np.zeros(0, np.uint16)}


def record_batch(rows: list[Row]) -> pa.RecordBatch:
    """Return rows of the table `latents` as one record batch. `rows` must not be empty. Each row is a dict with all
    columns of the table. The value under "tensor" must be a flat uint16 array.
    """
    schema = LATENTS.batch
    lengths = [len(row["tensor"]) for row in rows]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    values = pa.array(np.concatenate([row["tensor"] for row in rows]), pa.uint16())
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema if f.name != "tensor"]
    return pa.record_batch([*columns, pa.ListArray.from_arrays(offsets, values, type=schema.field("tensor").type)], schema=schema)
