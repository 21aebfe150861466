"""The exported adapter, loaded by diffusers' own pipeline, is the adapter that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.commands.adapters import DTYPES
from pipeline.commands.text_to_image.export import STYLES, export_run, write_adapter
from stages.hashing import file_sha256
from stages.models.adapters import A, B
from stages.models.flux2.architecture import FLUX2
from stages.models.weights import read_file
from stages.text_to_image.families import family
from tests.pipeline.commands.text_to_image.reference import BLOCKS, OUTSIDE, forward, through_diffusers, tiny_transformer

TINY = family("tiny")


@pytest.fixture(scope="module")
def transformer() -> Any:
    return tiny_transformer()


def trained(path: Path, transformer: Any, names: list[str], rank: int = 4, **metadata: Any) -> dict[str, np.ndarray]:
    """A random adapter in our form, written as the train stage writes one."""
    from safetensors.numpy import save_file

    draw = np.random.default_rng(1)
    arrays = {}
    for name in names:
        out, inputs = transformer.get_submodule(name).weight.shape
        arrays[name + A] = draw.normal(0, 0.2, (rank, inputs)).astype(np.float32)
        arrays[name + B] = draw.normal(0, 0.2, (out, rank)).astype(np.float32)
    save_file(arrays, path, {"family": "tiny", "project": "cats", "step": "70", "rank": str(rank), **metadata})
    return arrays


def merged(transformer: Any, arrays: dict[str, np.ndarray], scale: Any) -> np.ndarray:
    """The output of the base with W + scale B A in place of W, and the base put back."""
    import torch

    kept = {k: v.clone() for k, v in transformer.state_dict().items()}
    with torch.no_grad():
        for name in {k.removesuffix(A).removesuffix(B) for k in arrays}:
            delta = arrays[name + B].astype(np.float64) @ arrays[name + A].astype(np.float64)
            transformer.get_submodule(name).weight += torch.tensor(delta * scale(name), dtype=torch.float32)
    try:
        return forward(transformer)
    finally:
        transformer.load_state_dict(kept)


SOME = ["transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_v", "transformer_blocks.0.attn.add_k_proj"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("names", "alpha"), [(BLOCKS + OUTSIDE, "10"), (SOME, "4")], ids=["every linear", "some of q, k, v"])
def test_diffusers_loads_either_export_and_gives_the_output_of_the_merged_weights(
    tmp_path: Path, transformer: Any, style: str, names: list[str], alpha: str
) -> None:
    arrays = trained(tmp_path / "adapter.safetensors", transformer, names, alpha=alpha)
    file = write_adapter(tmp_path / "adapter.safetensors", TINY, tmp_path / "out", style, dtype="float32", metadata={})
    want = merged(transformer, arrays, lambda name: float(alpha) / 4)
    assert np.abs(want - forward(transformer)).max() > 0.01
    assert np.abs(through_diffusers(transformer, file) - want).max() < 1e-5


@pytest.mark.parametrize("style", STYLES)
def test_an_adapter_exported_with_what_lies_beneath_gives_in_diffusers_the_output_of_both_merged(
    tmp_path: Path, transformer: Any, style: str
) -> None:
    names = BLOCKS + OUTSIDE
    below = trained(tmp_path / "below.safetensors", transformer, names, rank=2, alpha="2")
    own = trained(tmp_path / "adapter.safetensors", transformer, names, alpha="4")
    parts = [(*TINY.architecture.read_adapter(tmp_path / "below.safetensors"), 0.5)]
    settings: dict[str, Any] = {"dtype": "float32", "metadata": {}, "beneath": parts}
    file = write_adapter(tmp_path / "adapter.safetensors", TINY, tmp_path / "out", style, **settings)
    both = {name + A: np.concatenate([below[name + A], own[name + A]]) for name in names}
    both |= {name + B: np.concatenate([0.5 * below[name + B], own[name + B]], 1) for name in names}
    want = merged(transformer, both, lambda name: 1.0)
    assert np.abs(want - merged(transformer, own, lambda name: 1.0)).max() > 0.01
    assert np.abs(through_diffusers(transformer, file) - want).max() < 1e-5


def test_an_export_that_the_disk_has_no_room_for_is_refused_in_one_line(
    tmp_path: Path, transformer: Any, monkeypatch: Any
) -> None:
    trained(tmp_path / "a.safetensors", transformer, BLOCKS)
    monkeypatch.setattr("pipeline.store.disk.free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match=r"the export x.safetensors needs about .* kB on .*, and 1 kB are free there: free"):
        write_adapter(tmp_path / "a.safetensors", TINY, tmp_path / "x.safetensors", "comfyui", dtype="float32", metadata={})
    assert not (tmp_path / "x.safetensors").exists()


def test_the_halves_of_the_last_modulation_are_exchanged_in_the_fused_form(tmp_path: Path, transformer: Any) -> None:
    arrays = trained(tmp_path / "a.safetensors", transformer, ["norm_out.linear"])
    file = write_adapter(tmp_path / "a.safetensors", TINY, tmp_path, "comfyui", dtype="float32", metadata={})
    b = np.array(read_file(file)[0]["diffusion_model.final_layer.adaLN_modulation.1" + B])
    np.testing.assert_array_equal(b, np.roll(arrays["norm_out.linear" + B], 32, axis=0))
    np.testing.assert_array_equal(np.array(FLUX2.read_adapter(file)[0]["norm_out.linear" + B]), arrays["norm_out.linear" + B])


def test_a_kohya_file_with_alpha_is_read_as_diffusers_reads_it(tmp_path: Path, transformer: Any) -> None:
    from safetensors.numpy import save_file

    draw = np.random.default_rng(2)
    sizes = {"double_blocks_1_txt_attn_qkv": (96, 32), "double_blocks_0_img_mlp_2": (32, 96)}
    sizes |= {"single_blocks_1_linear1": (288, 32)}
    file: dict[str, np.ndarray] = {}
    for name, (out, inputs) in sizes.items():
        file[f"lora_unet_{name}.lora_down.weight"] = draw.normal(0, 0.2, (6, inputs)).astype(np.float32)
        file[f"lora_unet_{name}.lora_up.weight"] = draw.normal(0, 0.2, (out, 6)).astype(np.float32)
        file[f"lora_unet_{name}.alpha"] = np.array(3.0, np.float32)
    save_file(file, tmp_path / "kohya.safetensors")
    arrays, scales = FLUX2.read_adapter(tmp_path / "kohya.safetensors")
    assert len(scales) == 5 and set(scales.values()) == {0.5}
    want = merged(transformer, {k: np.array(v) for k, v in arrays.items()}, lambda name: scales[name])
    assert np.abs(through_diffusers(transformer, tmp_path / "kohya.safetensors") - want).max() < 1e-5


def test_the_metadata_name_the_project_the_recipe_and_the_rank(tmp_path: Path, transformer: Any) -> None:
    trained(tmp_path / "a.safetensors", transformer, BLOCKS, alpha="8", recipe="abc", recipe_latents="def", version_mlx="0.32")
    file = write_adapter(
        tmp_path / "a.safetensors", TINY, tmp_path / "new", "diffusers", dtype="bfloat16", metadata={"trigger": "sks"}
    )
    arrays, said = read_file(file)
    assert file == tmp_path / "new" / "cats-000070.safetensors" and str(next(iter(arrays.values())).dtype) == "mlx.core.bfloat16"
    expected = {"format": "pt", "rank": "4", "alpha": "8", "family": "tiny", "recipe": "abc", "recipe_latents": "def"}
    assert expected.items() <= said.items() and said["version_mlx"] == "0.32" and said["software"].startswith("latentmill")
    assert said["ss_network_dim"] == said["ss_network_alpha"] == "4" and said["modelspec.architecture"] == "tiny/lora"
    assert said["ss_steps"] == "70" and said["trigger"] == "sks"
    peft = json.loads(said["lora_adapter_metadata"])
    assert peft["transformer.r"] == peft["transformer.lora_alpha"] == 4 and sorted(peft["transformer.target_modules"]) == sorted(
        BLOCKS
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_once_to_the_chosen_type(tmp_path: Path, transformer: Any, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    arrays = trained(tmp_path / "a.safetensors", transformer, BLOCKS[:1], alpha="3")
    found = load_file(write_adapter(tmp_path / "a.safetensors", TINY, tmp_path, "diffusers", dtype=dtype, metadata={}))
    want = (torch.tensor(arrays[BLOCKS[0] + B]) * 0.75).to(getattr(torch, dtype))
    assert torch.equal(found[f"transformer.{BLOCKS[0]}{B}"], want)


def test_only_an_export_of_the_same_project_and_style_is_replaced_and_the_user_is_told(tmp_path: Path, transformer: Any) -> None:
    trained(tmp_path / "a.safetensors", transformer, BLOCKS, alpha="4")
    lines: list[str] = []
    out = tmp_path / "o.safetensors"
    write_adapter(tmp_path / "a.safetensors", TINY, out, "diffusers", dtype="float32", metadata={}, say=lines.append)
    assert not lines
    write_adapter(tmp_path / "a.safetensors", TINY, out, "diffusers", dtype="float16", metadata={}, say=lines.append)
    assert len(lines) == 1 and "step 70" in lines[0]
    before = out.read_bytes()
    for style, said in (("comfyui", {}), ("diffusers", {"project": "dogs"})):
        with pytest.raises(ValueError, match="move it away"):
            write_adapter(tmp_path / "a.safetensors", TINY, out, style, dtype="float32", metadata=said)
    (tmp_path / "notes.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="move it away"):
        write_adapter(tmp_path / "a.safetensors", TINY, tmp_path / "notes.safetensors", "diffusers", dtype="float32", metadata={})
    assert out.read_bytes() == before and (tmp_path / "notes.safetensors").read_text() == "mine"
    with pytest.raises(ValueError, match=r"lora\.txt must end in \.safetensors or be a folder"):
        write_adapter(tmp_path / "a.safetensors", TINY, tmp_path / "lora.txt", "diffusers", dtype="float32", metadata={})
    assert not (tmp_path / "lora.txt").exists()


def test_an_adapter_that_cannot_be_exported_is_reported_in_one_line(tmp_path: Path, transformer: Any) -> None:
    from safetensors.numpy import save_file

    good = tmp_path / "good.safetensors"
    arrays = trained(good, transformer, BLOCKS[:2])
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-8])
    save_file({**arrays, BLOCKS[0] + A: np.full((4, 32), np.nan, np.float32)}, tmp_path / "nan.safetensors")
    save_file({BLOCKS[0] + A: arrays[BLOCKS[0] + A]}, tmp_path / "half.safetensors")
    save_file(
        {f"lora_unet_down_blocks_0_attn.{n}.weight": np.ones((2, 2), np.float32) for n in ("lora_up", "lora_down")},
        tmp_path / "sd.safetensors",
    )
    save_file({"transformer.x.dora_scale": np.ones(2, np.float32)}, tmp_path / "dora.safetensors")
    save_file({"transformer.x.lokr_t2": np.ones((2, 2), np.float32)}, tmp_path / "tucker.safetensors")
    save_file({"made.up" + end: np.ones((2, 2), np.float32) for end in (A, B)}, tmp_path / "other.safetensors")
    save_file({**arrays, BLOCKS[1] + B: arrays[BLOCKS[1] + B] * 1e6}, tmp_path / "big.safetensors")
    cases = {
        "absent": "no adapter at",
        "cut": "cut short",
        "nan": "not finite",
        "half": "lacks .*lora_B",
        "sd": "no linear of FLUX.2",
        "dora": "lacks x.lora_A.weight, though it has other arrays",
        "tucker": "no part of a LoRA, DoRA or LoKr",
        "other": "no counterpart",
        "big": "too large for float16",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            write_adapter(tmp_path / f"{name}.safetensors", TINY, tmp_path / "out", "comfyui", dtype="float16", metadata={})
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_the_result_of_a_run_or_the_checkpoint_of_a_step_is_exported(tmp_path: Path, transformer: Any) -> None:
    lines: list[str] = []
    project: Any = SimpleNamespace(
        name="cats",
        path=tmp_path,
        family=TINY,
        stage=lambda stage_name: SimpleNamespace(result="adapter.safetensors"),
        config=SimpleNamespace(sections={}),
        fixed=True,
    )
    table = SimpleNamespace(folder=tmp_path / "tables" / "train" / "abc", exists=False)
    project.folder = project.current = lambda stage_name: table

    def run(step: int | None = None, out: Path | None = None, which: str = "last") -> Path:
        return export_run(project, out, "diffusers", dtype="float32", step=step, which=which, say=lines.append)

    artifacts = tmp_path / "tables" / "train" / "abc" / "artifacts"
    with pytest.raises(ValueError, match=r"no finished adapter; it has no checkpoint yet; run: make train"):
        run()
    for step in (20, 40):
        saved = artifacts / f"checkpoints/step-{step:06d}" / "adapter.safetensors"
        saved.parent.mkdir(parents=True)
        trained(saved, transformer, BLOCKS[:1], step=str(step))
        files = {saved.name: {"bytes": saved.stat().st_size, "sha256": file_sha256(saved)}}
        (saved.parent / "state.json").write_text(json.dumps({"step": step, "files": files}))
    for missing, remedy in ((None, "choose one by --step, or run: make train"), (30, "choose one of them")):
        with pytest.raises(ValueError, match=f"its checkpoints are 20, 40; {remedy}"):
            run(missing)
    shutil.copy(saved, artifacts)
    assert run() == tmp_path / "exports" / "cats-abc-000040.safetensors"
    assert run(20) == tmp_path / "exports" / "cats-abc-000020.safetensors"
    assert run(20, tmp_path / "mine.safetensors") == tmp_path / "mine.safetensors"
    with pytest.raises(ValueError, match=r"cats has no average adapter to export: it was trained without \[train.ema\]"):
        run(which="average")
    trained(artifacts / "adapter_ema.safetensors", transformer, BLOCKS[:1], step="40")
    shutil.copy(artifacts / "checkpoints/step-000020/adapter.safetensors", artifacts / "adapter_best.safetensors")
    assert run(which="average") == tmp_path / "exports" / "cats-abc-000040-average.safetensors"
    assert run(which="best") == tmp_path / "exports" / "cats-abc-000020-best.safetensors"
    with pytest.raises(ValueError, match="leave out step 20"):
        run(20, which="best")
    assert lines == []
    # A named run; another run that had its name before has left an export.
    (artifacts.parent / "run.json").write_text('{"name": "slow"}')
    assert run() == tmp_path / "exports" / "cats-slow-000040.safetensors"
    trained(run(), transformer, BLOCKS[:1], recipe="other", export_style="diffusers")
    with pytest.raises(ValueError, match=r"cats-slow-000040.safetensors exists and is not a diffusers export of this run"):
        run()
