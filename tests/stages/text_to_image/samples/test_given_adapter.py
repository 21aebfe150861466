"""The setting [samples] adapter: LoRA files of other programs, which test_adapter_names.py has more of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from stages.text_to_image import sampler
from stages.text_to_image.samples.stage import STAGE, sample_sources
from tests import harness
from tests.stages.text_to_image.samples.previews import CONFIG, context, pixels

Arrays = dict[str, mx.array]
WIDTH, RANK, ALPHA = 64, 2, 6.0
Q, K, V, OUT = (f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
SINGLE = "single_transformer_blocks.1.attn.to_out"
FUSED = {"double_blocks.0.img_attn.qkv": (Q, K, V), "double_blocks.0.img_attn.proj": (OUT,), "single_blocks.1.linear2": (SINGLE,)}


def made(outputs: int, inputs: int) -> tuple[mx.array, mx.array]:
    draw = np.random.default_rng(outputs + inputs)
    return tuple(mx.array(draw.normal(0, 0.3, shape).astype(np.float32)) for shape in ((RANK, inputs), (outputs, RANK)))  # type: ignore[return-value]


def inputs_of(name: str) -> int:
    return 4 * WIDTH if name == SINGLE else WIDTH


def pairs() -> dict[str, tuple[mx.array, mx.array]]:
    return {name: made(len(parts) * WIDTH, inputs_of(parts[0])) for name, parts in FUSED.items()}


def kohya() -> tuple[Arrays, dict[str, str]]:
    """The form of sd-scripts and of musubi, in float16 as they save it."""
    arrays: Arrays = {}
    for name, (a, b) in pairs().items():
        stem = "lora_unet_" + name.replace(".", "_")
        arrays |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b, f"{stem}.alpha": mx.array(ALPHA)}
    return {name: value.astype(mx.float16) for name, value in arrays.items()}, {"ss_network_dim": "2"}


def diffusers() -> tuple[Arrays, dict[str, str]]:
    """q, k and v have adapters of their own."""
    arrays: Arrays = {}
    for name, (a, b) in pairs().items():
        for part, rows in zip(FUSED[name], mx.split(b, len(FUSED[name])), strict=True):
            arrays |= {f"transformer.{part}.lora_A.weight": a, f"transformer.{part}.lora_B.weight": rows}
    return arrays, {"lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})}


PROGRAMS = {"kohya and musubi": kohya, "diffusers": diffusers}


def write(root: Path, program: str, rename: Callable[[str], str] = str) -> Path:
    arrays, about = PROGRAMS[program]()
    file = root / f"{program}.safetensors"
    mx.save_safetensors(str(file), {rename(name): value for name, value in arrays.items()}, about)
    return file


def test_a_given_adapter_draws_beside_base_and_checkpoints_and_is_named_in_the_grid(root: Path, tmp_path: Path) -> None:
    drawn: dict[str, list[np.ndarray]] = {}
    for program in ("kohya and musubi", "diffusers"):
        file = write(tmp_path, program)
        run = context(
            root, tmp_path / program, replace(CONFIG, checkpoints=(20,), seeds=(0,), first_prompts=1, adapter=str(file))
        )
        rows = harness.run(STAGE, run).to_pylist()
        given = [row for row in rows if row["adapter_id"] == hashlib.sha256(file.read_bytes()).hexdigest()]
        assert [source.label for source in sample_sources(run)] == ["base", "step 20", program] and len(rows) == 3 * len(given)
        assert {row["step"] for row in given} == {0} and {row["step"] for row in rows} == {0, 20}
        drawn[program] = [pixels(run, row).astype(int) for row in given]
        base = [pixels(run, row).astype(int) for row in rows if not row["adapter_id"]]
        assert all(np.abs(one - two).max() > 3 for one, two in zip(drawn[program], base, strict=True))
    assert all(np.abs(one - two).max() <= 1 for one, two in zip(*drawn.values(), strict=True))


WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "another model": (
        lambda name: name.replace("double_blocks_0_img_attn_qkv", "down_blocks_0_attn1"),
        "names no linear of FLUX.2",
    ),
    "a text encoder": (lambda name: name.replace("lora_unet_single_blocks_1", "lora_te1_layers_1"), "lora_te1_layers_1_linear2"),
    "a larger model": (lambda name: name.replace("blocks_1", "blocks_30"), "single_transformer_blocks.30.attn.to_out"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_given_adapter_that_does_not_fit_is_one_line_before_the_transformer_is_loaded(
    kind: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, named = WRONG[kind]
    file = write(tmp_path, "kohya and musubi", rename)
    monkeypatch.setattr(sampler, "load_transformer", None)
    config = replace(CONFIG, base=False, checkpoints=(), adapter=str(file))
    with pytest.raises(ValueError, match=r"samples\.adapter: .* does not fit tiny: ") as caught:
        harness.run(STAGE, context(root, tmp_path / "run", config))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_given_adapter_that_is_not_there_is_one_line(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"samples\.adapter must be an adapter's file, got 'a\.safetensors': .* does not exist"):
        harness.run(STAGE, context(root, tmp_path, replace(CONFIG, adapter="a.safetensors")))
