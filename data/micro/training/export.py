"""A trained model as a folder in the diffusers layout, float16; and that folder in tar files small enough to send."""

from __future__ import annotations

import json
import tarfile
from copy import deepcopy
from pathlib import Path

from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from transformers import Qwen3ForCausalLM

SHARD = "12MB"  # the transformer's files, at most
PARCEL = 15_000_000  # bytes of a tar file, at most; one file of the folder must fit
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
    """Everything but the tokenizer, which is in `folder` already."""
    _half(autoencoder).save_pretrained(folder / "vae")
    _half(transformer).save_pretrained(folder / "transformer", max_shard_size=SHARD)
    _half(text_encoder).save_pretrained(folder / "text_encoder")
    # The files are float16 to be small; whoever loads them as they say computes in float32, as it was trained.
    config = folder / "text_encoder" / "config.json"
    _json(config, json.loads(config.read_text(encoding="utf-8")) | {"dtype": "float32"})
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    scheduler.save_pretrained(folder / "scheduler")
    _json(folder / "model_index.json", INDEX)


def _half(module):  # type: ignore[no-untyped-def]
    """A copy on the CPU with its weights in float16; statistics keep their precision."""
    copy = deepcopy(module).cpu().float()
    for weight in copy.parameters():
        weight.data = weight.data.half()
    return copy


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def parcels(folder: Path, to: Path, name: str) -> list[Path]:
    """The folder's files in tar files of at most PARCEL bytes, each whole by itself: unpack them all in one place."""
    files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: (-f.stat().st_size, f.as_posix()))
    loads: list[tuple[int, list[Path]]] = []
    for file in files:
        size = file.stat().st_size + 2048  # a tar's header and padding
        if size > PARCEL:
            raise ValueError(f"{file} has {size:,} bytes and cannot be split; at most {PARCEL:,} fit in a file to send")
        place = next((i for i, (used, _) in enumerate(loads) if used + size <= PARCEL), None)
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
