"""`latentmill adapter FILE`: format, models, rank and norm by block, of files in every kind of names."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pipeline.commands.text_to_image.describe import describe
from stages.text_to_image.families import family
from stages.text_to_image.weights import meta_transformer
from stages.tuner import checkpoint
from stages.tuner.adapters import combine
from stages.tuner.adapters.targets import adapter_metadata, fresh_adapter, select_targets


def adapter(name: str, patterns: tuple[str, ...] = ("*",), variant: str = "lora") -> tuple[dict[str, mx.array], dict[str, str]]:
    targets = select_targets(meta_transformer(None, family(name)).linears(), patterns, 2, 4.0, variant=variant)  # type: ignore[arg-type]
    draw = np.random.default_rng(0)
    arrays = {key: mx.array(draw.normal(size=value.shape).astype(np.float32)) for key, value in fresh_adapter(targets, 0).items()}
    return arrays, adapter_metadata(targets)


@pytest.mark.parametrize("style", ["diffusers", "comfyui"])
@pytest.mark.parametrize(("name", "also"), [("tiny", "tiny-distilled"), ("z-image-tiny", ""), ("flux3-tiny", "")])
def test_a_file_in_any_names_is_described_with_the_models_that_it_fits_and_its_norm_by_block(tmp_path, name, also, style):
    arrays, about = adapter(name)
    checkpoint.write_arrays(tmp_path / "own.safetensors", arrays, about)
    found, scales = family(name).architecture.read_adapter(tmp_path / "own.safetensors")
    converted = family(name).architecture.adapter_styles[style](found, scales)
    mx.save_safetensors(str(tmp_path / "a.safetensors"), converted, {"family": name, "step": "70"})
    lines = list(describe(tmp_path / "a.safetensors", linears=True))
    shown = "ComfyUI" if style == "comfyui" else "diffusers"
    assert lines[0].startswith(f"a.safetensors: LoRA in the names of {shown}, float32, ")
    assert lines[1] == f"fits: {', '.join(filter(None, (name, also)))}" and "step 70" in lines[2]
    blocks = {line.split()[0]: line.split() for line in lines[5].splitlines()[1:]}
    assert len(blocks) >= 4
    block = next(iter(blocks))
    own = [each for each in scales if each.startswith(f"{block}.")]
    expected = sum(combine.norm(found, each, scales[each]) ** 2 for each in own) ** 0.5
    assert int(blocks[block][1]) == len(own) and float(blocks[block][-2]) == pytest.approx(expected, rel=2e-3)
    longest = max(blocks.values(), key=lambda cells: float(cells[-2]))
    assert len(longest[-1]) == 24 == max(len(cells[-1]) for cells in blocks.values())
    assert len(lines[6].splitlines()) == len(scales) + 1
