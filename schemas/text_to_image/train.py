"""train: one row per sample drawn."""

import pyarrow as pa

from schemas.table import TableSchema, column

TRAIN = TableSchema(
    name="train",
    doc="One row per sample that a step drew or was measured by: what it was, how noisy, what it cost, and the step around it.",
    key=("step", "split", "sample"),
    columns=(
        column("step", pa.int32(), "optimizer step, from 1; measured before the first: 0"),
        column(
            "split",
            pa.string(),
            "train, or validation: held out, measured with the adapter as it was after the step",
            default="train",
        ),
        column("sample", pa.int32(), "0-based place in the step: micro-batch by micro-batch"),
        column("epoch", pa.int32(), "0-based pass over the data"),
        column("image_id", pa.string(), "the image"),
        column("latent_id", pa.string(), "the crop of it that was trained on"),
        column("caption_id", pa.string(), "the caption that was trained with: if dropped, the empty one or the trigger alone"),
        column("width", pa.int32(), "bucket width, pixels"),
        column("height", pa.int32(), "bucket height, pixels"),
        column("dropped", pa.bool_(), "caption replaced by the empty caption, or the trigger alone"),
        column("sigma", pa.float32(), "noise level, 0 (clean) to 1 (noise)"),
        column(
            "loss",
            pa.float32(),
            "mean squared error of the velocity, this sample alone; in train, as the sections loss and mask of [train] weigh it",
        ),
        column(
            "preservation",
            pa.float32(),
            "what its answer to the class caption costs beside the loss, for straying from the bare base's: mean squared, times "
            "[train.preservation] weight; null where it was not asked for",
            null=True,
        ),
        column("lr", pa.float64(), "learning rate of the step"),
        column("grad_norm", pa.float32(), "global norm of the gradient before clipping"),
        column("tokens", pa.int32(), "tokens of this sample through the transformer: image and text"),
        column("seconds", pa.float32(), "wall time of the step, seconds", measured=True),
        column("read_seconds", pa.float32(), "part of it spent reading rows from disk, seconds", measured=True),
        column("peak_bytes", pa.int64(), "MLX's peak memory so far, bytes", measured=True),
    ),
)
