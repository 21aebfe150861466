"""Run the pipeline on files with the shapes of a released model: `python -m tests.bench.true_shapes klein-base-4b
FOLDER`.

The weights are random, so the pictures mean nothing; seconds and peaks are those of real files. FOLDER gets the weights
in the diffusers layout, in shards, and a project with two images. Each stage is a process of its own and prints one
line of JSON: seconds, MLX's peak memory and the largest memory of the process that the system has counted.
`--components` writes some components only, for a disk that does not hold all; `--fp8` writes matrices of the
transformer in fp8 with one scale each.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Family
from stages.text_to_image.families import family
from tests import checkpoints, projects

SHARD = 5_000_000_000  # bytes of a file
CHAIN = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples")
NEEDS = {"latents": "autoencoder", "embeddings": "text_encoder", "train": "transformer", "samples": "transformer"}
SETTINGS = """
[project]
family = "{family}"
weights = "{weights}"
[captions]
preview_prompts = ["a red thing"]
[buckets]
resolutions = [{side}]
[embeddings]
precision = "{precision}"
bits = {bits}
[train]
precision = "{precision}"
steps = {steps}
rank = 16
base_bits = {bits}
checkpoint_every = {steps}
[samples]
base = false
precision = "{precision}"
base_bits = {bits}
width = {side}
height = {side}
steps = 2
"""


def value(name: str, shape: tuple[int, ...], number: int) -> mx.array:
    """Return a random bfloat16 array: norms of ones, variances of ones, matrices with standard deviation 1 / sqrt(inputs)."""
    if len(shape) == 1:
        return (mx.zeros if "bias" in name or "mean" in name else mx.ones)(shape, mx.bfloat16)
    drawn: mx.array = mx.random.normal(shape, mx.bfloat16, key=mx.random.key(number)) * math.prod(shape[1:]) ** -0.5
    return drawn


def entries(shapes: dict[str, tuple[int, ...]], fp8: bool) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield (name, safetensors dtype, shape, bytes) of every tensor of a file."""
    for name, shape in shapes.items():
        packed = fp8 and len(shape) == 2
        yield name, "F8_E4M3" if packed else "BF16", shape, math.prod(shape) * (1 if packed else 2)
        if packed:
            yield name.replace(".weight", ".weight_scale"), "F32", (), 4


def data(name: str, dtype: str, shape: tuple[int, ...], number: int) -> np.ndarray:
    if dtype == "F32":
        return np.array(1 / 64, np.float32)
    made = value(name, shape, number)
    return np.array(mx.to_fp8(64 * made) if dtype == "F8_E4M3" else made.view(mx.uint16))


def write_component(
    folder: Path, stem: str, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], fp8: bool = False
) -> None:
    """Write config.json, shards of at most SHARD bytes and their index. `stem` begins the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    for entry in entries(shapes, fp8):
        if sum(each[3] for each in shards[-1]) + entry[3] > SHARD and not entry[0].endswith("_scale"):
            shards.append([])
        shards[-1].append(entry)
    places = {}
    for n, shard in enumerate(shards, 1):
        file, header, at = folder / f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors", {}, 0
        for name, dtype, shape, size in shard:
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            places[name], at = file.name, at + size
        head = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(len(head).to_bytes(8, "little") + head)
            for number, (name, dtype, shape, _) in enumerate(shard):
                data(name, dtype, shape, 1000 * n + number).tofile(out)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def write(record: Family, folder: Path, components: list[str], fp8: bool) -> None:
    """Write components of a family, at its sizes, into `folder`."""
    from stages.models.flux2.autoencoder_config import AutoencoderConfig
    from stages.models.text.tiny_tokenizer import write_tokenizer

    architecture = record.architecture
    stem = "diffusion_pytorch_model"
    if "transformer" in components:
        shapes = architecture.transformer_config(None, record).shapes()
        write_component(folder / "transformer", stem, shapes, dict(record.transformer), fp8)
    if "autoencoder" in components:
        write_component(folder / "vae", stem, AutoencoderConfig.from_dict(record.autoencoder).shapes(), dict(record.autoencoder))
    if "text_encoder" in components:
        sizes, prefix = architecture.text_encoder_sizes(None, record), "model."
        if record.text_kind == "mistral3":
            prefix = "language_model.model."
            checkpoints.mistral_tokenizer().save_pretrained(folder / "tokenizer")
        else:
            write_tokenizer(folder / "tokenizer", 1024)
        needed = sizes.shapes(max(record.text_layers))  # later layers are never read
        write_component(
            folder / "text_encoder", "model", {prefix + k: v for k, v in needed.items()}, dict(record.text_encoder), fp8
        )


def stage(project: Path, name: str) -> None:
    """Run one stage and print its seconds and its peaks in GB."""
    begun = time.perf_counter()
    mx.reset_peak_memory()
    console = projects.Silent()
    projects.build(project, name, console=console)
    found = {"stage": name, "seconds": round(time.perf_counter() - begun, 1), "mlx_peak_gb": round(mx.get_peak_memory() / 1e9, 2)}
    found["process_peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    sys.stdout.write(json.dumps(found | {"said": console.lines[:2]}) + "\n")


def main() -> None:
    """Write the files that are missing and run the stages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--components", nargs="*", default=["transformer", "autoencoder", "text_encoder"])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--stage", default="")
    given = parser.parse_args()
    project, weights = given.folder / "project", given.folder / "weights"
    if given.stage:
        stage(project, given.stage)
        return
    begun = time.perf_counter()
    if not weights.is_dir():
        write(family(given.family), weights, given.components, given.fp8)
    sys.stdout.write(json.dumps({"written_s": round(time.perf_counter() - begun, 1)}) + "\n")
    sys.stdout.flush()
    if not project.is_dir():
        projects.make(project, weights, images=2)
    precision = "float32" if mx.default_device() == mx.cpu else "bfloat16"  # a CPU's fast matrix library has float32 only
    settings = {
        "precision": precision,
        "family": given.family,
        "weights": weights,
        "side": given.side,
        "bits": given.bits,
        "steps": given.steps,
    }
    (project / "project.toml").write_text(SETTINGS.format(**settings))
    for name in CHAIN:
        if NEEDS.get(name, given.components[0]) in given.components:
            subprocess.run([*sys.orig_argv[: sys.orig_argv.index(given.family) + 2], "--stage", name], check=True)


if __name__ == "__main__":
    main()
