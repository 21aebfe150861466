"""Write a trained model in the diffusers layout with float16 weights, and pack that folder into small tar files."""

from __future__ import annotations

import json
import tarfile
from copy import deepcopy
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from transformers import Qwen3ForCausalLM

SHARD = "12MB"  # largest size of a file of the transformer's weights
TAR_BYTES = 15_000_000  # largest size of a tar file; every file of the folder must fit into one
INDEX = {
    "_class_name": "Flux2KleinPipeline",
    "is_distilled": False,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}


def write(
    folder: Path, autoencoder: AutoencoderKLFlux2, transformer: Flux2Transformer2DModel, text_encoder: Qwen3ForCausalLM
) -> None:
    """Write all components and model_index.json into `folder`. The tokenizer must be there already."""
    _half(autoencoder).save_pretrained(folder / "vae")
    _half(transformer).save_pretrained(folder / "transformer", max_shard_size=SHARD)
    _half(text_encoder).save_pretrained(folder / "text_encoder")
    # The weights are stored as float16 to save space; the config asks for float32, in which the model was trained.
    config = folder / "text_encoder" / "config.json"
    _json(config, json.loads(config.read_text(encoding="utf-8")) | {"dtype": "float32"})
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    scheduler.save_pretrained(folder / "scheduler")
    _json(folder / "model_index.json", INDEX)


def _half(module: Any) -> Any:
    """Copy a module to the CPU with float16 weights. Buffers, such as the statistics of the latents, stay float32."""
    copy = deepcopy(module).cpu().float()
    for weight in copy.parameters():
        weight.data = weight.data.half()
    return copy


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def pack(folder: Path, to: Path, name: str) -> list[Path]:
    """Pack the files of `folder` into tar files of at most TAR_BYTES each, and return their paths. The files are
    to/name-0.tar, to/name-1.tar and so on. Unpacking all of them in one place restores the folder. Raises ValueError if a
    file is larger than TAR_BYTES.
    """
    files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: (-f.stat().st_size, f.as_posix()))
    loads: list[tuple[int, list[Path]]] = []
    for file in files:
        size = file.stat().st_size + 2048  # a tar's header and padding
        if size > TAR_BYTES:
            raise ValueError(f"{file} must have <= {TAR_BYTES:,} bytes to fit into a tar file, got {size:,}")
        place = next((i for i, (used, _) in enumerate(loads) if used + size <= TAR_BYTES), None)
        if place is None:
            loads.append((size, [file]))
        else:
            loads[place] = (loads[place][0] + size, [*loads[place][1], file])
    to.mkdir(parents=True, exist_ok=True)
    made = []
    for i, (_, load) in enumerate(loads):
        made.append(to / f"{name}-{i}.tar")
        with tarfile.open(made[-1], "w") as tar:
            for file in load:
                tar.add(file, file.relative_to(folder).as_posix())
    return made
