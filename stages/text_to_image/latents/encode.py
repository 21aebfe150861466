"""Run the autoencoder on crops, and make rows and record batches of the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from schemas.text_to_image.latents import LATENTS

if TYPE_CHECKING:
    from stages.models.family import Autoencoder
    from stages.text_to_image.latents.crop import Crop

Row = dict[str, Any]


def encode(model: Autoencoder, pixels_HWC: np.ndarray) -> np.ndarray:
    """(channels, height / 16, width / 16), bfloat16 as uint16. `pixels_HWC`: uint8."""
    image_1HWC = mx.array(pixels_HWC)[None].astype(mx.float32) / 127.5 - 1.0
    return np.array(model.encode(image_1HWC)[0].astype(mx.bfloat16).view(mx.uint16))


def encoded_row(model: Autoencoder, row: Row, crop: Crop) -> Row:
    """The complete row of a crop; rejected if a value is not finite."""
    pixels_HWC, mask = crop
    words_Chw = encode(model, pixels_HWC)
    # Of the rounded values, as they are stored.
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
    empty = {"shape": [], "dtype": "bfloat16", "mean": 0.0, "std": 0.0, "absmax": 0.0, "mask": None}
    return row | empty | {"rejected": reason, "tensor": np.zeros(0, np.uint16)}


def record_batch(rows: list[Row]) -> pa.RecordBatch:
    """The tensor of each row is a flat uint16 array. `rows` must not be empty."""
    schema = LATENTS.batch
    lengths = [len(row["tensor"]) for row in rows]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    values = pa.array(np.concatenate([row["tensor"] for row in rows]), pa.uint16())
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema if f.name != "tensor"]
    return pa.record_batch([*columns, pa.ListArray.from_arrays(offsets, values, type=schema.field("tensor").type)], schema=schema)
