"""The table of retriever families. Code asks a family's record, never its name."""

from __future__ import annotations

from pathlib import Path

from stages.bundled import RETRIEVER
from stages.models.family import RetrieverFamily

MODERNBERT = "stages.models.modernbert.files:MODERNBERT_RETRIEVER"
STATIC = "stages.models.static_embedding:STATIC_RETRIEVER"
SETTINGS = "config_sentence_transformers.json"
COLBERT_FILES = {
    "encoder": ("config.json", "*.safetensors", "*.safetensors.index.json", "[0-9]_Dense/*", SETTINGS, "tokenizer.json"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", SETTINGS),
}
STATIC_FILES = {
    "encoder": ("config.json", "model.safetensors", "modules.json"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
}
T5 = "stages.models.t5.files:T5_RETRIEVER"
TINY = {
    "vocab_size": 384,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "dimensions": 32,
}

BASE = {
    "vocab_size": 32128,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 12,
    "num_heads": 12,
    "feed_forward_proj": "gated-gelu",
}

_ALL = (
    RetrieverFamily(
        name="retriever-micro",
        title="T5 v1.1 with a projection head, small, trained on documented Python functions",
        licence="Apache-2.0",
        code=T5,
        bundled=RETRIEVER,
        begin={"train": {"precision": "float32"}},
    ),
    RetrieverFamily(
        name="xtr-base-en",
        title="XTR base, English: T5 v1.1 base with its projection head",
        licence="Apache-2.0",
        code=T5,
        hub="google/xtr-base-en",
        sizes=BASE,
        lower_case=True,  # as XTR was trained
    ),
    RetrieverFamily(
        name="t5-v1_1-base",
        title="T5 v1.1 base with a fresh projection head, which training has to teach",
        licence="Apache-2.0",
        code=T5,
        hub="google/t5-v1_1-base",
        sizes=BASE,
        head_seed=0,
    ),
    RetrieverFamily(
        name="tiny",
        title="T5 with a projection head, seeded random weights: to test with",
        licence="Apache-2.0",
        code=T5,
        seeded=0,
        sizes=TINY,
        begin={"train": {"precision": "float32"}},
    ),
    RetrieverFamily(
        name="modernbert",
        title="ColBERT on ModernBERT in PyLate's layout, such as LateOn-Code; [project] weights names its folder",
        licence="see its model card",
        code=MODERNBERT,
        files=COLBERT_FILES,
        trained=False,
    ),
    RetrieverFamily(
        name="model2vec",
        title="a table of token vectors in model2vec's layout, one vector a text; [project] weights names its folder",
        licence="see its model card",
        code=STATIC,
        files=STATIC_FILES,
        trained=False,
    ),
)
FAMILIES = {family.name: family for family in _ALL}


def family_of(folder: Path) -> RetrieverFamily:
    """The first family whose models look like that in `folder`, by its small files. Raises ValueError if there is none."""
    for family in _ALL:
        if family.architecture.is_model(folder):
            return family
    raise ValueError(
        f"{folder} holds no encoder that is known here: its config.json must be of T5 or of ModernBERT, in the layout of "
        "transformers or PyLate, or the folder one of model2vec"
    )
