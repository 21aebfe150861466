"""The pipeline retrieval: a folder of source code becomes a fine-tuned retriever with its index."""

from stages.pipelines import FamilyRecord, Pipeline, Weights
from stages.retrieval.views import PANELS, VIEWS

PIPELINE = Pipeline(
    name="retrieval",
    doc="a folder of source code becomes a fine-tuned retriever and its search",
    stages={
        name: f"stages.retrieval.{name}"
        for name in ("sources", "units", "pairs", "tokens", "negatives", "train", "vectors", "ranks", "index")
    },
    resources={"family": FamilyRecord(), "encoder": Weights(("head_seed",)), "tokenizer": Weights(("lower_case",))},
    families="stages.retrieval.families:FAMILIES",
    first={"train": "train", "ranks": "train"},  # the encoder is tuned if the project says how, and compared with the base
    results=("index", "train", "ranks"),
    views=VIEWS,
    basic=("project.family", "sources.roots", "train.steps", "train.rank", "train.lr", "train.batch_size"),
    panels=PANELS,
)
