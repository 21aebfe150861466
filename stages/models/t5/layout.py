"""Write a T5 encoder with its head as a folder that transformers and sentence-transformers load.

`T5EncoderModel.from_pretrained` reads config.json and model.safetensors. `MultiVectorEncoder` (6.2 or later) reads modules.json:
the encoder, the head, the normalisation, and the mask of padding. The tokenizer's files are copied by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.models.t5.config import HEAD, T5Config
from stages.models.text.tiny_tokenizer import write_json

PACKAGE = "sentence_transformers"
MODULES = (  # folder -> class of the module
    ("", f"{PACKAGE}.base.modules.transformer.Transformer"),
    ("1_Dense", f"{PACKAGE}.base.modules.dense.Dense"),
    ("2_Normalize", f"{PACKAGE}.base.modules.normalize.Normalize"),
    ("3_MultiVectorMask", f"{PACKAGE}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
)


def write_model(
    folder: Path, config: T5Config, weights: Mapping[str, mx.array], settings: Mapping[str, Any] | None = None
) -> None:
    """Writes all but the tokenizer's files. `settings` are added to those of the module `Transformer`, such as "query_length".

    Raises ValueError if a weight is missing or of another shape.
    """
    for name, shape in config.shapes().items():
        if name not in weights:
            raise ValueError(f"the model to write lacks {name}")
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(weights[name].shape)}")
    folder.mkdir(parents=True, exist_ok=True)
    encoder = {name: mx.contiguous(weights[name]) for name in config.encoder_shapes()}
    mx.save_safetensors(str(folder / "model.safetensors"), encoder, {"format": "pt"})
    write_json(folder / "config.json", config.to_dict())
    (folder / "1_Dense").mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "1_Dense" / "model.safetensors"), {"linear.weight": weights[HEAD]}, {"format": "pt"})
    _write_modules(folder, config, settings or {})


def _write_modules(folder: Path, config: T5Config, settings: Mapping[str, Any]) -> None:
    both = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    sizes = {"in_features": config.d_model, "out_features": config.dimensions, "bias": False}
    identity = "torch.nn.modules.linear.Identity"
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    transformer = {"transformer_task": "feature-extraction", "modality_config": text, "module_output_name": "token_embeddings"}
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(MODULES)]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {**transformer, **settings})
    write_json(folder / "1_Dense" / "config.json", {**sizes, "activation_function": identity, **both})
    write_json(folder / "2_Normalize" / "config.json", both)
    mask = {"skiplist_words": [], "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_json(folder / "3_MultiVectorMask" / "config.json", mask)
    about = {"model_type": "MultiVectorEncoder", "prompts": {"document": "", "query": ""}, "similarity_fn_name": "MaxSim"}
    write_json(folder / "config_sentence_transformers.json", about)
