"""The table `latents`: one row per crop, with its encoding."""

import pyarrow as pa

from schemas.table import TableSchema, column, tensor

LATENTS = TableSchema(
    name="latents",
    doc="One row per image, crop, size and flip: the mean of the autoencoder's posterior, in patches of 2 x 2, normalised.",
    key=("latent_id",),
    tensors=(tensor(),),
    columns=(
        column("latent_id", pa.string(), "sha256 over image_id, crop, size, flip and mask_id, hex"),
        column("image_id", pa.string(), "image that the crop is a part of: sha256 of its file"),
        column("width", pa.int32(), "width of the resized crop, pixels"),
        column("height", pa.int32(), "height of the resized crop, pixels"),
        column("crop_x", pa.float64(), "left edge of the crop, pixels of the upright image"),
        column("crop_y", pa.float64(), "top edge of the crop, pixels of the upright image"),
        column("crop_w", pa.float64(), "width of the crop, pixels of the upright image"),
        column("crop_h", pa.float64(), "height of the crop, pixels of the upright image"),
        column("flip", pa.bool_(), "true for the crop mirrored left to right"),
        column(
            "mask_id",
            pa.string(),
            "mask of the image: sha256 of the mask file, alpha for the image's own alpha channel, empty for no mask",
        ),
        column("shape", pa.list_(pa.int32()), "shape of the tensor: 128, height / 16, width / 16; empty if rejected"),
        column("dtype", pa.string(), "dtype of the tensor: bfloat16"),
        column("mean", pa.float32(), "mean of the values"),
        column("std", pa.float32(), "standard deviation of the values; near 1 for natural images"),
        column("absmax", pa.float32(), "largest absolute value"),
        column(
            "mask",
            pa.binary(),
            "weight of each token in training, 0 to 255: one byte per 16 x 16 pixels, row by row; null for no mask",
            null=True,
        ),
        column(
            "rejected", pa.string(), "reason why the crop could not be encoded, a sentence; null if it was encoded", null=True
        ),
    ),
)
