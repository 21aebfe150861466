"""The settings of the stage `embeddings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.settings import Section, runtime, setting
from stages.tuner.weights import Bits

MAX_BATCH = 64  # texts per batch: 64 embeddings of the largest family are 1 GB


@dataclass(frozen=True)
class EmbeddingsConfig(Section):
    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16",
        "dtype that the text encoder computes in: bfloat16 as it was released, or float32, which is far faster on a CPU",
    )
    bits: Bits = setting(  # noqa: RUF009
        16,
        "bits of a weight of the text encoder's layers: 8 takes half the memory, 4 a quarter, less exact",
        unit="bits",
        unrecorded=(16,),
    )
    stored: Literal["bfloat16", "int8"] = setting(
        "bfloat16",
        "values on disk: bfloat16 as the text encoder gives them; int8 with a scale for each row and hidden state takes half the "
        "space and is less exact",
        unrecorded=("bfloat16",),
    )
    memory: Literal["auto", "whole", "layers"] = runtime(
        "auto",
        "whole: all layers stay in memory; layers: each is read again for every record batch, which takes least memory; auto: "
        "whole if it fits. The embeddings are the same",
    )
    batch_size: int = runtime(
        8, "texts per record batch, which a kill can lose; texts are encoded one by one", unit="texts", bounds=(1, MAX_BATCH)
    )
