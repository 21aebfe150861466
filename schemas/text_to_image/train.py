"""The table `train`: one row per sample of a step."""

import pyarrow as pa

from schemas.table import TableSchema, column

TRAIN = TableSchema(
    name="train",
    doc="One row per sample that was trained on or validated with: image, caption, noise level, loss, and facts about the step.",
    key=("step", "split", "sample"),
    columns=(
        column("step", pa.int32(), "optimizer step, from 1; 0 for validation before the first step"),
        column(
            "split",
            pa.string(),
            "train for a sample that was trained on, validation for a held-out sample, measured with the adapter after the step",
            default="train",
        ),
        column("sample", pa.int32(), "position of the sample in the step, from 0, micro-batch by micro-batch"),
        column(
            "epoch",
            pa.int32(),
            "epoch, a pass over the data: that of the batch, from 0; its last batches are filled from the next pass",
        ),
        column("image_id", pa.string(), "image of the sample: sha256 of its file"),
        column("latent_id", pa.string(), "crop of the image, a key of the table latents"),
        column(
            "caption_id",
            pa.string(),
            "text that the sample was trained with, a key of the table embeddings; the replacement if the caption was dropped",
        ),
        column("width", pa.int32(), "width of the crop, pixels"),
        column("height", pa.int32(), "height of the crop, pixels"),
        column("dropped", pa.bool_(), "true if the caption was replaced by the empty caption or by the trigger alone"),
        column("sigma", pa.float32(), "noise level, 0 (clean) to 1 (noise)"),
        column(
            "loss",
            pa.float32(),
            "loss of the sample: mean squared error of the velocity, weighted by [train.loss] and [train.mask] if split is train",
        ),
        column(
            "preservation",
            pa.float32(),
            "preservation loss, added to the loss: mean squared difference from the base model's velocity for the class caption, "
            "times [train.preservation] weight; null if it was not computed",
            null=True,
        ),
        column("lr", pa.float64(), "learning rate of the step"),
        column("grad_norm", pa.float32(), "global norm of the step's gradient before clipping"),
        column("tokens", pa.int32(), "number of tokens of the sample in the transformer, image, references and text"),
        column("seconds", pa.float32(), "wall time of the step, seconds", measured=True),
        column(
            "read_seconds",
            pa.float32(),
            "time of the step that was spent reading rows from disk, seconds",
            measured=True,
        ),
        column("peak_bytes", pa.int64(), "peak memory of MLX up to this step, bytes", measured=True),
        column("reference_count", pa.int32(), "number of references that the model saw beside the noisy latent", unrecorded=True),
    ),
)
