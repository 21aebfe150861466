"""The table of retriever families. Code asks a family's record, never its name."""

from __future__ import annotations

from stages.bundled import RETRIEVER
from stages.models.family import RetrieverFamily

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
)
FAMILIES = {family.name: family for family in _ALL}
