"""The pipeline text_to_image: a folder of images becomes a LoRA of an image model. No stage imports another one."""

from stages.pipelines import FamilyRecord, Folder, Pipeline, Weights
from stages.text_to_image.pages import DETAIL, LACKS, PAGES, PANELS, RANKING, VIEWS

STAGES = (
    "images", "captions", "checks", "descriptions", "buckets", "latents", "embeddings", "drawings", "train", "samples", "scores",
)  # fmt: skip

PIPELINE = Pipeline(
    name="text_to_image",
    doc="a folder of images becomes a LoRA of FLUX.2, FLUX 3 or Z-Image",
    stages={name: f"stages.text_to_image.{name}" for name in STAGES},
    resources={
        "image_folder": Folder("images", "paths"),
        "family": FamilyRecord(),
        "transformer": Weights(("guidance_embedded",)),
        "autoencoder": Weights(),
        "text_encoder": Weights(("text_kind", "text_layers", "text_tokens")),
        "tokenizer": Weights(),
    },
    families="stages.text_to_image.families:FAMILIES",
    first={"checks": "always", "drawings": "train.slider"},  # of checks, its warnings, and its columns for buckets.where
    results=("train", "samples"),
    tables={"generated": "schemas.text_to_image:GENERATED"},
    views=VIEWS,
    null_if_empty=("image_id",),
    lacks=LACKS,
    follow="stages.text_to_image.follow:CHAIN",
    panels=PANELS,
    capacity="stages.text_to_image.memory:lines",
    models="stages.text_to_image.template:models",
    fitting="stages.text_to_image.template:fitting",
    basic=(
        "project.family",
        "images.folder",
        "captions.trigger",
        "captions.template",
        "captions.missing",
        "captions.preview_prompts",
        "buckets.resolutions",
        "train.steps",
        "train.rank",
        "train.lr",
        "train.batch_size",
        "train.base_bits",
        "train.checkpoint_every",
    ),
    pages=PAGES,
    detail=DETAIL,
    thumbnail="stages.text_to_image.pages:thumbnail",
    background="latents.background",
    side_by_side="stages.text_to_image.samples.grid:draw_side_by_side",
    ranking=RANKING,
)
