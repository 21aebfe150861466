"""The tables of the pipeline text_to_image, in the order of its stages."""

import pyarrow as pa

from schemas.table import FILE_STATE, STEP_COSTS, TableSchema, column, tensor

# Columns of two tables
CROP = (
    column("crop_x", pa.float64(), "left edge of the crop, pixels of the upright image"),
    column("crop_y", pa.float64(), "top edge of the crop, pixels of the upright image"),
    column("crop_w", pa.float64(), "width of the crop, pixels of the upright image"),
    column("crop_h", pa.float64(), "height of the crop, pixels of the upright image"),
)
REFERENCE_ID = column(
    "reference_id",
    pa.string(),
    "sha256 of each reference's file, hex, joined by +; null without references",
    unrecorded=True,
)

IMAGES = TableSchema(
    name="images",
    doc="One row per file in the image folder; a file that cannot be used has a row with the reason.",
    key=("path",),
    columns=(
        column("path", pa.string(), "path of the file, relative to the image folder, with forward slashes"),
        column("image_id", pa.string(), "sha256 of the file's bytes, hex; empty for a file that cannot be read"),
        *FILE_STATE,
        column("format", pa.string(), "file format, in Pillow's names: JPEG, PNG, WEBP, ...; empty if unknown"),
        column("mode", pa.string(), "pixel mode, in Pillow's names: RGB, RGBA, L, LA, P, CMYK, I;16, ...; empty if unknown"),
        column("width", pa.int32(), "width of the upright image, pixels; 0 if unknown"),
        column("height", pa.int32(), "height of the upright image, pixels; 0 if unknown"),
        column("frames", pa.int32(), "number of frames, of which only the first is used; 0 if unknown"),
        column(
            "rejected",
            pa.string(),
            "reason why the file is not used: unreadable, truncated, bomb, too_large, too_small, range, duplicate, "
            "unsupported; null if it is used",
            null=True,
        ),
        column("detail", pa.string(), "explanation of the reason, a sentence; empty for a usable image"),
        column(
            "folder",
            pa.string(),
            "folder whose name or [[images.folder]] entry gives the next columns, below the image folder; null for none",
            unrecorded=True,
        ),
        column(
            "use",
            pa.string(),
            "regularisation for an image of the class, trained without trigger; reference for a picture that an edit starts "
            "from; else null",
            unrecorded=True,
        ),
        column("repeats", pa.float64(), "occurrences per epoch that the folder asks for; null: 1", unrecorded=True),
        column(
            "weight",
            pa.float64(),
            "draws of the folder relative to other folders, whatever its number of images; null: by its images and repeats",
            unrecorded=True,
        ),
        column("trigger", pa.string(), "trigger of the folder's images; null: that of [captions]", unrecorded=True),
        column(
            "concept", pa.string(), "subject that the folder is named after: the caption of an image without one", unrecorded=True
        ),
        column(
            "offset",
            pa.int64(),
            "position of an image inside a tar (bytes) or a Parquet or Arrow file (row); null for a file of its own",
            unrecorded=True,
        ),
        column(
            "reference_of",
            pa.string(),
            "path of the image that a reference belongs to; null if it belongs to none",
            unrecorded=True,
        ),
        column("reference", pa.int32(), "number of a reference among those of its image, from 1; else null", unrecorded=True),
    ),
)

CAPTIONS = TableSchema(
    name="captions",
    doc="One row per caption of an image, and per text that belongs to no image; equal texts have the same caption_id.",
    key=("image_id", "role", "caption_id"),
    columns=(
        column("caption_id", pa.string(), "sha256 of the text in UTF-8, hex"),
        column("image_id", pa.string(), "image that the text describes; empty for a text that belongs to no image"),
        column(
            "role",
            pa.string(),
            "use of the text: caption (of an image), empty (for caption dropout, and as negative prompt), trigger (for caption "
            "dropout to the trigger alone), class (a text with the class word in place of the trigger), preview (a prompt), or "
            "of a slider neutral (a prompt that is drawn to train on) and pole (what a neutral prompt is moved to)",
        ),
        column("text", pa.string(), "text that the text encoder reads, with the template applied"),
        column(
            "source",
            pa.string(),
            "source of the text: sidecar, metadata, filename, description (by a model), folder (its name), template, config or "
            "edit (in this project)",
        ),
        column("origin", pa.string(), "file that the text was found in, with line number, or setting that it was made from"),
        column(
            "position",
            pa.int32(),
            "position among the image's captions, or among the preview prompts, from 0; class: position of the original text",
        ),
        column("template", pa.string(), "template that the text was made with; null if no template was applied", unrecorded=True),
        column(
            "reason",
            pa.string(),
            "why captions.template was changed, or the file that has changed since the edit; null if neither",
            unrecorded=True,
        ),
        column(
            "weight",
            pa.float64(),
            "draws of the text relative to the image's other captions ([captions] weights); null: as often as each of them",
            unrecorded=True,
        ),
    ),
)

DESCRIPTIONS = TableSchema(
    name="descriptions",
    doc="One row per image without a caption of its own, with the caption that a vision-language model wrote.",
    key=("image_id",),
    retains_dead_rows=True,
    columns=(
        column("image_id", pa.string(), "image: sha256 of its file"),
        column("path", pa.string(), "path of the file when it was read, relative to the image folder"),
        column("text", pa.string(), "caption that the model wrote, without line breaks"),
        column("prompt", pa.string(), "instruction that the model was given"),
        column("model", pa.string(), "model, as the setting or the server names it"),
        column("version", pa.string(), "version of the program that ran the model; empty if a server does not say"),
        column("seconds", pa.float32(), "time to write the caption, seconds", measured=True),
    ),
)

CHECKS = TableSchema(
    name="checks",
    doc="One row per usable image: what was measured in its picture and captions, and warnings. A warning excludes no image; "
    "[buckets] where does.",
    key=("image_id",),
    columns=(
        column("image_id", pa.string(), "image: sha256 of its file"),
        column("path", pa.string(), "path of the file, relative to the image folder"),
        column("blur", pa.float64(), "blur, 0 (sharp) to 1 (without detail): how little a further blur takes from the picture"),
        column("brightness", pa.float64(), "mean brightness of the parts with detail, 0 (black) to 1 (white)"),
        column("clipped", pa.float64(), "share of pixels in the parts with detail that are black or white"),
        column("border", pa.float64(), "share of the picture that is a border of one colour across its whole width or height"),
        column("short_side", pa.int32(), "shorter side of the upright image, pixels"),
        column("aspect", pa.float64(), "aspect ratio, longer side over shorter side"),
        column("hash", pa.string(), "perceptual hash of the picture, 16 hex digits"),
        column("thumbnail", pa.binary(), "grey picture of 32 x 32 pixels, row by row, by which near-duplicates are compared"),
        column("duplicate_of", pa.string(), "larger image of which this one is a near-duplicate; null for none", null=True),
        column("similarity", pa.float64(), "correlation with that image, at most 1; null for none", null=True),
        column("warnings", pa.string(), "names of the warnings, separated by commas; empty for none"),
        column("detail", pa.string(), "explanation of the warnings, one sentence each; empty for none"),
    ),
)

BUCKETS = TableSchema(
    name="buckets",
    doc="One row per usable image and resolution: the size that the image is trained at, and the crop that is used.",
    key=("image_id", "resolution"),
    columns=(
        column("image_id", pa.string(), "image: sha256 of its file"),
        column("resolution", pa.int32(), "resolution R, pixels: the area of the size is at most R x R"),
        column("width", pa.int32(), "width that the image is trained at, pixels, a multiple of 16"),
        column("height", pa.int32(), "height that the image is trained at, pixels, a multiple of 16"),
        *CROP,
        column("scale", pa.float64(), "scale factor, trained pixels per image pixel; above 1, the image is enlarged"),
        column("crop_loss", pa.float64(), "share of the image's area that is cropped away, 0 to 1"),
        column("tokens", pa.int32(), "number of image tokens: width / 16 * height / 16"),
        column(
            "rejected",
            pa.string(),
            "reason why this resolution is not trained: too_small, same_crop as a lower resolution, where; null if it is",
            null=True,
        ),
    ),
)

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
        *CROP,
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

EMBEDDINGS = TableSchema(
    name="embeddings",
    doc="One row per distinct text: hidden states of the text encoder, concatenated, and padding if the model reads it.",
    key=("caption_id",),
    tensors=(tensor(),),
    columns=(
        column("caption_id", pa.string(), "text, a value of caption_id in the table captions: sha256 of the text, hex"),
        column("tokens", pa.int32(), "number of tokens of the text and its chat template, without padding"),
        column(
            "dropped_tokens",
            pa.int32(),
            "number of tokens that were cut off because the text is longer than the family's length; usually 0",
        ),
        column(
            "shape",
            pa.list_(pa.int32()),
            "shape of the tensor: rows, hidden states x hidden size (for int8, words of 16 bits); FLUX.2 has 512 rows, Z-Image "
            "one per token, FLUX 3 one per token and one for all padding",
        ),
        column(
            "dtype",
            pa.string(),
            "bfloat16, or int8: for each row a float32 scale per hidden state, then the values",
        ),
        column("mean", pa.float32(), "mean of the values, padding excluded"),
        column("std", pa.float32(), "standard deviation of the values, padding excluded"),
        column("absmax", pa.float32(), "largest absolute value, padding excluded"),
    ),
)

DRAWINGS = TableSchema(
    name="drawings",
    doc="One row per latent that the base drew for a neutral prompt of a slider, to train on.",
    key=("latent_id",),
    tensors=(tensor(),),
    columns=(
        column("latent_id", pa.string(), "sha256 over caption_id, seed and size, hex"),
        column("caption_id", pa.string(), "neutral prompt, a value of caption_id in the table captions"),
        column("seed", pa.int64(), "seed of the starting noise"),
        column("width", pa.int32(), "width of the picture, pixels"),
        column("height", pa.int32(), "height of the picture, pixels"),
        column("image_id", pa.string(), "sha256 of the tensor's bytes, hex: the picture, for training"),
        column("shape", pa.list_(pa.int32()), "shape of the tensor: 128, height / 16, width / 16"),
        column("dtype", pa.string(), "dtype of the tensor: bfloat16"),
        column("seconds", pa.float32(), "time to draw the latent, seconds", measured=True),
    ),
)

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
        column("latent_id", pa.string(), "crop of the image, a key of the table latents; of a slider, of the table drawings"),
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
        *STEP_COSTS,
        column("reference_count", pa.int32(), "number of references that the model saw beside the noisy latent", unrecorded=True),
    ),
)

SAMPLES = TableSchema(
    name="samples",
    doc="One row per preview: an image drawn for a prompt and a seed by an adapter, or by the base model alone.",
    key=("adapter_id", "caption_id", "seed", "width", "height"),
    retains_dead_rows=True,
    artifact="path",
    columns=(
        column(
            "adapter_id",
            pa.string(),
            "sha256 of the adapter's file, hex; strength*sha256 for another strength than 1; empty for the base model alone",
        ),
        column("step", pa.int32(), "training step of the checkpoint; 0 for the base model and for the file [samples] adapter"),
        column("caption_id", pa.string(), "id of the preview prompt in captions"),
        column("prompt", pa.string(), "text of the preview prompt"),
        column("seed", pa.int64(), "seed of the starting noise"),
        column("width", pa.int32(), "width of the image, pixels"),
        column("height", pa.int32(), "height of the image, pixels"),
        column("path", pa.string(), "path of the PNG below the artifacts folder of samples"),
        column("seconds", pa.float32(), "time to draw and decode the image, seconds", measured=True),
        REFERENCE_ID,
    ),
)

GENERATED = TableSchema(
    name="generated",
    doc="One row per picture that `latentmill generate` drew. The key is computed from everything that decides the picture.",
    key=("picture_id",),
    retains_dead_rows=True,
    artifact="path",
    columns=(
        column("picture_id", pa.string(), "sha256 of adapter, strength, prompt, seed, size, steps, guidance and weights, hex"),
        column(
            "adapter_id",
            pa.string(),
            "sha256 of the adapter's file, hex; empty for the base model alone; of several adapters strength*sha256, joined by +",
        ),
        column(
            "step", pa.int32(), "training step of the adapter, of the first one if there are several; 0 for the base model alone"
        ),
        column(
            "strength", pa.float64(), "factor of the adapter: 1 as trained or with several adapters, 0 for the base model alone"
        ),
        column("prompt", pa.string(), "text of the prompt"),
        column("seed", pa.int64(), "seed of the starting noise"),
        column("width", pa.int32(), "width of the picture, pixels"),
        column("height", pa.int32(), "height of the picture, pixels"),
        column("steps", pa.int32(), "denoising steps"),
        column("guidance", pa.float64(), "guidance scale"),
        column("path", pa.string(), "path of the PNG below the artifacts folder of generated"),
        column("seconds", pa.float32(), "time to draw the latent, seconds", measured=True),
        REFERENCE_ID,
    ),
)

SCORES = TableSchema(
    name="scores",
    doc="One row per scored picture: previews by the base and by adapters, and real pictures. Compare groups of pictures: "
    "the score of a single picture means little.",
    key=("picture_id",),
    retains_dead_rows=True,
    columns=(
        column("picture_id", pa.string(), "sha256 of the file's bytes, hex"),
        column("kind", pa.string(), "base or adapter (a preview, by what drew it) or real (from the folder of references)"),
        column("adapter_id", pa.string(), "sha256 of the adapter's file, hex; empty for the base and for real pictures"),
        column("step", pa.int32(), "training step of the checkpoint; 0 for the base and for real pictures"),
        column("prompt", pa.string(), "prompt of the preview, or caption of the real picture; empty if it has no caption"),
        column("seed", pa.int64(), "seed of the starting noise; 0 for real pictures"),
        column("path", pa.string(), "path of the file, below the artifacts folder of samples or the folder of references"),
        column(
            "style",
            pa.float32(),
            "position on the axis from the base's previews of other prompts (0) to the training images (1); null if one of the "
            "two groups is empty, or if their means do not differ",
            null=True,
        ),
        column(
            "real",
            pa.float32(),
            "position on the axis from the base's previews of other prompts (0) to the other references (1); null if one of the "
            "two groups is empty, or if their means do not differ",
            null=True,
        ),
    ),
)
