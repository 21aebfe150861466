"""Write a trained encoder as a folder with 8-bit weights, and read such weights again.

A matrix `X` of integers from -127 to 127 has a companion `X_scale` with one float16 per row; the weight is their product. The
layout is that of sentence-transformers: config.json and model.safetensors are the T5 encoder, `1_Dense` is the projection to the
output width.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.research.retriever.model import Encoder

DENSE = {
    "in_features": 256,
    "out_features": 128,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
    "module_input_name": "token_embeddings",
    "module_output_name": "token_embeddings",
}
MODULES = (
    ("", "sentence_transformers.models.Transformer"),
    ("1_Dense", "sentence_transformers.models.Dense"),
)


def narrow(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with every matrix stored as 8-bit integers and one scale per row. The table of positions and the
    norms are not changed.
    """
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim < 2 or "relative_attention_bias" in name:
            found[name] = weight.float().contiguous()
            continue
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-7).half()
        found[name] = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        found[f"{name}_scale"] = scale
    return found


def widen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that `narrow` stored, in float32."""
    scales = {name for name in weights if name.endswith("_scale")}
    return {
        name: weight.float() * weights[f"{name}_scale"].float() if f"{name}_scale" in scales else weight.float()
        for name, weight in weights.items()
        if name not in scales
    }


def rounded(encoder: Encoder) -> dict[str, Tensor]:
    """Return the weights of `encoder` as they are after they were written and read again."""
    body, head = _parts(encoder)
    return widen(narrow(body)) | {"linear.weight": head.half().float()}


def _parts(encoder: Encoder) -> tuple[dict[str, Tensor], Tensor]:
    weights = {name: weight.detach().cpu() for name, weight in encoder.state_dict().items()}
    return weights, weights.pop("linear.weight")


def write(encoder: Encoder, tokenizer: Path, folder: Path) -> int:
    """Write the model into `folder`, and return the size of all its files in bytes. `tokenizer` is the folder of the
    tokenizer, which is copied.
    """
    body, head = _parts(encoder)
    (folder / "1_Dense").mkdir(parents=True, exist_ok=True)
    save_file(narrow(body), folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"linear.weight": head.half().contiguous()}, folder / "1_Dense" / "model.safetensors", metadata={"format": "pt"})
    sizes = encoder.sizes
    _json(folder / "config.json", sizes.config() | {"quantization": {"bits": 8, "scale": "per row"}})
    _json(folder / "1_Dense" / "config.json", DENSE | {"in_features": sizes.width, "out_features": sizes.output})
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(MODULES)]
    _json(folder / "modules.json", modules)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
