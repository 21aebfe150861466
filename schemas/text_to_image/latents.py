"""latents: one row per crop, encoded."""

import pyarrow as pa

from schemas.table import TableSchema, column, tensor

LATENTS = TableSchema(
    name="latents",
    doc="One row per image, crop, size and flip: the autoencoder's posterior mean, patchified and normalised.",
    key=("latent_id",),
    tensors=(tensor(),),
    columns=(
        column("latent_id", pa.string(), "sha256 over image_id, crop, size, flip and mask_id, hex"),
        column("image_id", pa.string(), "the image"),
        column("width", pa.int32(), "width in pixels"),
        column("height", pa.int32(), "height in pixels"),
        column("crop_x", pa.float64(), "left edge of the part used, source pixels after orientation"),
        column("crop_y", pa.float64(), "top edge of the part used, source pixels"),
        column("crop_w", pa.float64(), "width of the part used, source pixels"),
        column("crop_h", pa.float64(), "height of the part used, source pixels"),
        column("flip", pa.bool_(), "mirrored left to right"),
        column("mask_id", pa.string(), "where the mask comes from: sha256 of its file, alpha (of the image), or empty for none"),
        column("shape", pa.list_(pa.int32()), "tensor shape: 128, height / 16, width / 16; empty if rejected"),
        column("dtype", pa.string(), "bfloat16"),
        column("mean", pa.float32(), "mean of the values"),
        column("std", pa.float32(), "standard deviation of the values; near 1 for natural images"),
        column("absmax", pa.float32(), "largest magnitude"),
        column(
            "mask",
            pa.binary(),
            "how much each token is trained, 0 to 255: a byte per 16 x 16 pixels, row by row; null: no mask, all in full",
            null=True,
        ),
        column("rejected", pa.string(), "why the image could not be encoded, in words", null=True),
    ),
)
