"""A small model of each family in every form in which people have FLUX.2 on disk goes through the whole pipeline. Its tables
equal those of the same values in the layout of diffusers, bit for bit. tests/test_end_to_end.py holds that layout against
diffusers itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from pipeline.project.project import Project
from stages.text_to_image import families
from tests import checkpoints, projects
from tests.stages.models.test_gguf import file_of, packed

pytestmark = pytest.mark.slow
Tensors = dict[str, Any]  # torch tensors by diffusers name
FOLDERS = {"transformer": "transformer", "text_encoder": "text_encoder", "autoencoder": "vae"}
UNREAD = ("vision_tower", "multi_modal_projector")  # parts of dev's text encoder that files of the text encoder alone lack
TABLES = ("latents", "embeddings", "train")


class Source(NamedTuple):
    """torch tensors by component, and the folder in diffusers' layout that they are from."""

    family: str
    folder: Path
    transformer: Tensors
    vae: Tensors
    text_encoder: Tensors


@pytest.fixture(scope="module", params=["klein-base-4b", "klein-base-9b", "dev"])
def source(request: pytest.FixtureRequest, tiny_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("dev") if request.param == "dev" else tiny_weights
    if request.param == "dev":
        checkpoints.dev_pipeline().save_pretrained(folder)
    found = {name: load_file(next((folder / name).glob("*.safetensors"))) for name in ("transformer", "vae", "text_encoder")}
    found["text_encoder"] = {key: v for key, v in found["text_encoder"].items() if not any(part in key for part in UNREAD)}
    return Source(request.param, folder, **found)


@pytest.fixture(autouse=True)
def small(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of the family has the sizes of the small model, as single files have no config.json."""
    sizes: Any = {name: json.loads((source.folder / below / "config.json").read_text()) for name, below in FOLDERS.items()}
    if source.family != "dev":
        tiny = families.FAMILIES["tiny"]
        sizes |= {name: getattr(tiny, name) for name in ("text_layers", "text_tokens")}
    record = replace(families.FAMILIES[source.family], **sizes, sampling_steps=4)
    monkeypatch.setitem(families.FAMILIES, source.family, record)


def file_name(given: Source, component: str, form: str = "", spelling: int = 0) -> str:
    """`form`, such as "-fp8.safetensors", replaces the suffix; `spelling`: 0 Black Forest Labs' names, 1 others in use."""
    name = families.FAMILIES[given.family].single_files[component][spelling]
    return name.removesuffix(".safetensors") + form if form else name


def save(path: Path, tensors: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def shards(given: Source, folder: Path) -> dict[str, Tensors]:
    """diffusers' layout in bfloat16, with two shards and an index for each large component."""
    import torch

    values = {}
    for name, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")):
        halves = {key: value.to(torch.bfloat16) for key, value in getattr(given, name).items()}
        keys, places = list(halves), {}
        for n, part in enumerate((keys[::2], keys[1::2]), 1):
            file = f"{stem}-{n:05d}-of-00002.safetensors"
            save(folder / name / file, {key: halves[key] for key in part})
            places |= dict.fromkeys(part, file)
        (folder / name / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        shutil.copy(given.folder / name / "config.json", folder / name)
        values[name] = {key: value.float() for key, value in halves.items()}
    shutil.copytree(given.folder / "vae", folder / "vae")
    return values


def single_files(given: Source, folder: Path) -> dict[str, Tensors]:
    """Black Forest Labs' own files beside each other, in float32, and the text encoder as one file."""
    save(folder / file_name(given, "transformer"), checkpoints.as_single_file(given.transformer))
    save(folder / "ae.safetensors", checkpoints.autoencoder_as_single_file(given.vae))
    save(folder / file_name(given, "text_encoder"), given.text_encoder)
    return {}


def comfyui(given: Source, folder: Path) -> dict[str, Tensors]:
    """ComfyUI's files: a prefix before every name of the transformer, float16, and the autoencoder under its own name."""
    import torch

    halves = {name: {k: v.to(torch.float16) for k, v in getattr(given, name).items()} for name in ("transformer", "text_encoder")}
    prefixed = checkpoints.as_single_file(halves["transformer"], "model.diffusion_model.")
    save(folder / file_name(given, "transformer", spelling=1), prefixed)
    save(folder / "flux2-vae.safetensors", checkpoints.autoencoder_as_single_file(given.vae))
    save(folder / file_name(given, "text_encoder"), halves["text_encoder"])
    return {name: {key: value.float() for key, value in each.items()} for name, each in halves.items()}


def fp8(dtype: str, scales: str, ending: str) -> Callable[[Source, Path], dict[str, Tensors]]:
    """Single files in fp8. The small model's token table stays in float32, as published files keep it in 16 bits."""

    def write(given: Source, folder: Path) -> dict[str, Tensors]:
        import torch

        kind = getattr(torch, dtype)
        stored, unpacked = checkpoints.in_fp8(checkpoints.as_single_file(given.transformer), kind, scales, ending)
        save(folder / file_name(given, "transformer", "-fp8.safetensors"), stored)
        table = {key: value for key, value in given.text_encoder.items() if "embed_tokens" in key}
        layers = {key: value for key, value in given.text_encoder.items() if key not in table}
        stored, dense = checkpoints.in_fp8(layers, kind, scales, ending)
        save(folder / file_name(given, "text_encoder", "_fp8.safetensors"), stored | table)
        save(folder / "ae.safetensors", checkpoints.autoencoder_as_single_file(given.vae))
        return {"transformer": from_single_file(unpacked, given.transformer), "text_encoder": dense | table}

    return write


def from_single_file(values: Tensors, like: Tensors) -> Tensors:
    import torch

    from stages.models.flux2.load import to_diffusers

    arrays = to_diffusers({key: mx.array(value.numpy()) for key, value in values.items()})
    assert arrays.keys() == like.keys()
    return {key: torch.from_numpy(np.array(value)) for key, value in arrays.items()}


def mlx_quantised(given: Source, folder: Path) -> dict[str, Tensors]:
    """A transformer that mflux saved in 8 bits, and a text encoder that mlx-lm converted to 4 bits with its token table."""
    import torch

    values: dict[str, Tensors] = {}
    for name, bits, group in (("transformer", 8, 64), ("text_encoder", 4, 32)):
        arrays = {key: mx.array(tensor.numpy()) for key, tensor in getattr(given, name).items()}
        rename = checkpoints.mflux_name if name == "transformer" else str
        stored, dense = checkpoints.quantised(arrays, bits, group, rename)
        config = json.loads((given.folder / name / "config.json").read_text())
        (folder / name).mkdir(parents=True)
        mx.save_safetensors(str(folder / name / "model.safetensors"), stored)
        (folder / name / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": group, "bits": bits}}))
        values[name] = {key: torch.from_numpy(np.array(value)) for key, value in dense.items()}
    shutil.copytree(given.folder / "vae", folder / "vae")
    return values


def gguf(given: Source, folder: Path) -> dict[str, Tensors]:
    """A transformer in Q8_0, by the names of the single file; the other components are single files."""
    import torch

    tensors, unpacked = [], {}
    for key, value in checkpoints.as_single_file(given.transformer).items():
        array = value.numpy()
        raw, dense = packed(array) if array.ndim == 2 else (array.tobytes(), array)
        tensors.append((key, array.shape, 8 if array.ndim == 2 else 0, raw))
        unpacked[key] = torch.from_numpy(np.array(dense, np.float32))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_name(given, "transformer", "-Q8_0.gguf")).write_bytes(file_of(tensors))
    save(folder / "ae.safetensors", checkpoints.autoencoder_as_single_file(given.vae))
    save(folder / file_name(given, "text_encoder"), given.text_encoder)
    return {"transformer": from_single_file(unpacked, given.transformer)}


LAYOUTS: dict[str, Callable[[Source, Path], dict[str, Tensors]]] = {
    "Black Forest Labs' single files": single_files,
    "fp8 e5m2, a scale per row": fp8("float8_e5m2", "row", "weight_scale"),
    "quantised by MLX": mlx_quantised,
    "ComfyUI's files in float16": comfyui,
    "diffusers in bfloat16 shards": shards,
    "fp8 e4m3, a scale per tensor": fp8("float8_e4m3fn", "tensor", "weight_scale"),
    "fp8 e4m3 as ComfyUI scales it": fp8("float8_e4m3fn", "tensor", "scale_weight"),
    "GGUF in Q8_0": gguf,
}


def results(folder: Path, weights: Path, family: str) -> dict[str, Any]:
    """What weights decide: tables, the adapter and the pixels of the pictures."""
    projects.make(folder, weights, images=1)
    projects.edit(folder, 'family = "tiny"', f'family = "{family}"')
    projects.edit(folder, "resolutions = [64, 96]", "resolutions = [64]")
    projects.edit(folder, "steps = 6\n", "steps = 2\n")
    projects.edit(folder, "width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1\nbase = false")
    projects.build(folder, "images", "captions", "buckets", *TABLES, "samples")
    found: dict[str, Any] = {name: projects.content(folder, name) for name in TABLES}
    adapter = mx.load(str(Project(folder).current("train").folder / "artifacts" / "adapter.safetensors"))
    pictures = Project(folder).current("samples").folder / "artifacts"
    found |= {name: np.array(value).tobytes() for name, value in adapter.items()}
    rows = projects.content(folder, "samples").to_pylist()
    return found | {f"picture of step {row['step']}": np.asarray(Image.open(pictures / row["path"])).tobytes() for row in rows}


@pytest.mark.proof("each family in every layout in which people have it gives the tables of the same values in diffusers' layout")
def test_a_model_as_people_have_it_trains_and_draws_as_the_same_values_in_the_layout_of_diffusers(
    source: Source, tmp_path: Path, cases: Callable[[int, int], int]
) -> None:
    first = ("klein-base-4b", "klein-base-9b", "dev").index(source.family)  # in `make test`, each family another layout
    for number in range(first, first + cases(1, len(LAYOUTS))):
        name, folder = list(LAYOUTS)[number % len(LAYOUTS)], tmp_path / str(number)
        weights, plain = folder / "published", folder / "plain"
        values = LAYOUTS[name](source, weights)
        shutil.copytree(source.folder / "tokenizer", weights / "tokenizer")
        shutil.copytree(source.folder, plain)
        for component, tensors in values.items():
            (file,) = (plain / component).glob("*.safetensors")
            save(file, tensors)
        published, usual = results(folder / "one", weights, source.family), results(folder / "two", plain, source.family)
        assert any(key.startswith("picture") for key in usual) and any("lora" in key for key in usual)
        assert published.keys() == usual.keys()
        for key, value in usual.items():
            assert published[key] == value, (name, key)
