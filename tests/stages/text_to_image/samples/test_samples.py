"""The stage samples: its previews are those of diffusers' pipeline; which previews are drawn; what a stop leaves behind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.samples import SAMPLES
from schemas.text_to_image.train import TRAIN
from stages.models.flux2 import sampling
from stages.models.flux2.config import Flux2Config
from stages.models.flux2.inputs import inputs
from stages.models.flux2.load import load_flux2
from stages.models.flux2.transformer import Flux2
from stages.stage import StageContext
from stages.text_to_image.families import family
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.drawing import adapted_forward
from stages.text_to_image.samples.sources import sample_sources
from stages.text_to_image.samples.stage import STAGE
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import fresh_adapter, target_weights
from stages.tuner.adapters.targets import adapter_metadata, select_targets, target_scales
from tests import harness
from tests.stages.tuner.adapters.merging import merged_weights

TINY = family("tiny")
PROMPTS = ("a red fox", "a sleeping cat, 猫")
SIZE = 32
STEPS = 3
CONFIG = SamplesConfig(checkpoints="all", seeds=(0, 5), width=SIZE, height=SIZE, steps=STEPS, precision="float32")
TOKENS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights of the tiny family, and a training run with the checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("samples")
    TINY.architecture.write_random_weights(folder / "weights", TINY, 0)
    shapes = Flux2Config.from_dict(TINY.transformer).shapes()
    linears = {n.removesuffix(".weight"): s for n, s in shapes.items() if "transformer_blocks" in n and len(s) == 2}
    targets = select_targets(linears, ["*"], 2, 4.0)

    def write_artifact(name: str, write: Any) -> Path:
        path = folder / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        return path

    for step in (10, 20):
        arrays = {n: a if n.endswith(lora.A) else 0.2 * mx.ones_like(a) for n, a in fresh_adapter(targets, step).items()}
        checkpoint.save(write_artifact, step, arrays, {}, TRAIN.table([]), {"rank": "2", "alpha": "4.0"}, {})
    return folder


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def tables() -> dict[str, pa.Table]:
    captions, embeddings = [], []
    draw = np.random.default_rng(0)
    for role, texts in (("empty", [""]), ("preview", PROMPTS), ("caption", ["of an image"])):
        for position, text in enumerate(texts):
            row = {"caption_id": digest(text), "image_id": "", "role": role, "text": text, "position": position}
            captions.append(row | {"source": "config", "origin": ""})
            values = mx.array(draw.standard_normal((TOKENS, TINY.transformer["joint_attention_dim"]), np.float32))
            words = np.array(values.astype(mx.bfloat16).view(mx.uint16))
            row = {"caption_id": digest(text), "tokens": 3, "dropped_tokens": 0, "shape": list(words.shape), "dtype": "bfloat16"}
            embeddings.append(row | {"mean": 0.0, "std": 1.0, "absmax": 3.0, "tensor": words.ravel()})
    return {"captions": CAPTIONS.table(captions[::-1]), "embeddings": EMBEDDINGS.table(embeddings), "train": TRAIN.table([])}


def context(root: Path, folder: Path, config: SamplesConfig = CONFIG, **given: Any) -> StageContext:
    places = {
        "transformer": root / "weights" / "transformer",
        "autoencoder": root / "weights" / "vae",
        "train": root / "train",
    }
    return harness.context(STAGE, folder, tables(), **({"config": config, "family": TINY, "weights": places} | given))


def drawn_by_diffusers(
    root: Path,
    prompt: str,
    seed: int,
    guidance: float,
    adapter: dict[str, mx.array] | None,
    references: Sequence[Image.Image] = (),
) -> np.ndarray:
    """Draw a preview with diffusers' klein pipeline, from the tables' embeddings, with the adapter merged into its weights.
    `references` are its argument `image`.
    """
    import torch
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel.from_pretrained(root / "weights" / "transformer")
    for name, weight in transformer.named_parameters():
        linear = name.removesuffix(".weight")
        if adapter and linear + lora.A in adapter:
            down, up = (torch.tensor(np.array(adapter[linear + part])) for part in (lora.A, lora.B))
            weight.data += 2.0 * up @ down
    pipeline = Flux2KleinPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        AutoencoderKLFlux2.from_pretrained(root / "weights" / "vae"),
        None,
        None,
        transformer,
        is_distilled=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    values = harness.MemoryTensors(tables()["embeddings"], "caption_id").values
    embeds = {text: np.array(mx.array(values[digest(text)]).view(mx.bfloat16).astype(mx.float32)) for text in (prompt, "")}
    shape = (1, TINY.transformer["in_channels"], SIZE // 16, SIZE // 16)
    image: np.ndarray = pipeline(
        image=list(references) or None,
        prompt_embeds=torch.tensor(embeds[prompt])[None],
        negative_prompt_embeds=torch.tensor(embeds[""])[None],
        latents=torch.tensor(np.array(sampling.noise(seed, shape))),
        height=SIZE,
        width=SIZE,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        output_type="np",
    ).images[0]
    return image * 255


def pixels(ctx: StageContext, row: dict[str, Any]) -> np.ndarray:
    with Image.open(ctx.artifacts / row["path"]) as image:
        return np.asarray(image).astype(np.float32)


@pytest.mark.slow
def test_a_preview_is_the_picture_that_diffusers_draws(root: Path, tmp_path: Path) -> None:
    ctx = context(root, tmp_path, replace(CONFIG, seeds=(5,)))
    rows = {(row["step"], row["prompt"]): row for row in harness.run(STAGE, ctx).to_pylist()}
    adapter = {saved.step: saved.arrays(checkpoint.ADAPTER) for saved in checkpoint.find_checkpoints(root / "train")} | {0: None}
    pictures = {key: pixels(ctx, row) for key, row in rows.items()}
    assert len(pictures) == 6
    for step, prompt in pictures:
        expected = drawn_by_diffusers(root, prompt, 5, TINY.guidance, adapter[step])
        assert np.abs(pictures[step, prompt] - expected).max() <= 0.55, (step, prompt)  # half a level, rounding
    assert all(np.abs(pictures[0, p] - pictures[20, p]).mean() > 1 for p in PROMPTS), "the adapter changes nothing"


@pytest.mark.slow
def test_a_preview_with_references_is_the_picture_that_diffusers_draws_from_them(root: Path, tmp_path: Path) -> None:
    paths = []
    for n, size in enumerate(((80, 64), (100, 70))):  # the second is cut to 96 x 64
        paths.append(str(tmp_path / f"{n}.png"))
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(paths[-1])
    config = replace(CONFIG, checkpoints=(20,), references=tuple(paths), prompt_references={PROMPTS[1]: (paths[1],)}, seeds=(5,))
    ctx = context(root, tmp_path / "run", config)
    shown = {PROMPTS[0]: paths, PROMPTS[1]: paths[1:]}
    adapters = {saved.step: saved.arrays(checkpoint.ADAPTER) for saved in checkpoint.find_checkpoints(root / "train")} | {0: None}
    rows = harness.run(STAGE, ctx).to_pylist()
    assert len(rows) == 4
    for row in rows:
        images = [Image.open(path) for path in shown[row["prompt"]]]
        expected = drawn_by_diffusers(root, row["prompt"], 5, TINY.guidance, adapters[row["step"]], images)
        assert np.abs(pixels(ctx, row) - expected).max() <= 0.55, (row["step"], row["prompt"])
        plain = drawn_by_diffusers(root, row["prompt"], 5, TINY.guidance, adapters[row["step"]])
        assert np.abs(expected - plain).mean() > 0.1, "the references change nothing"


def test_guidance_is_two_passes_only_where_the_family_has_real_cfg(root: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, seeds=(0,), checkpoints=())
    plain = replace(TINY, real_cfg=False)
    ctx = context(root, tmp_path / "a", config, family=plain)
    alone = context(root, tmp_path / "b", replace(config, guidance=1.0))
    for one, other in zip(harness.run(STAGE, ctx).to_pylist(), harness.run(STAGE, alone).to_pylist(), strict=True):
        np.testing.assert_array_equal(pixels(ctx, one), pixels(alone, other))
        np.testing.assert_allclose(pixels(ctx, one), drawn_by_diffusers(root, one["prompt"], 0, 1.0, None), atol=0.55)


def test_every_prompt_seed_and_source_is_a_row_with_a_picture_that_says_how_it_was_drawn(root: Path, tmp_path: Path) -> None:
    ctx = context(root, tmp_path)
    ctx.provenance = {"recipe": "abc"}
    rows = harness.run(STAGE, ctx).to_pylist()
    assert [(r["step"], r["prompt"], r["seed"]) for r in rows] == [
        (s, p, n) for s in (0, 10, 20) for p in PROMPTS for n in (0, 5)
    ]
    for row in rows:
        saved = root / "train" / "checkpoints" / f"step-{row['step']:06d}" / "adapter.safetensors"
        assert row["adapter_id"] == (hashlib.sha256(saved.read_bytes()).hexdigest() if row["step"] else "")
        with Image.open(ctx.artifacts / row["path"]) as image:
            assert image.size == (SIZE, SIZE)
            assert (image.info["prompt"], image.info["step"], image.info["recipe"]) == (row["prompt"], str(row["step"]), "abc")


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ({"checkpoints": "last"}, [0, 20]),
        ({"checkpoints": "all", "base": False}, [10, 20]),
        ({"checkpoints": (10,)}, [0, 10]),
        ({"checkpoints": (20, 10, 20), "base": False}, [10, 20]),
        ({"checkpoints": ()}, [0]),
    ],
)
def test_the_chosen_checkpoints_are_wanted_in_order(root: Path, tmp_path: Path, change: dict[str, Any], steps: list[int]) -> None:
    wanted = STAGE.wants(context(root, tmp_path, replace(CONFIG, **change)))
    assert list(dict.fromkeys(wanted["step"].to_pylist())) == steps
    assert wanted.num_rows == len(steps) * 4


@pytest.mark.parametrize(("prompts", "drawn"), [(0, PROMPTS), (1, PROMPTS[:1]), (100, PROMPTS)])
def test_only_the_first_prompts_are_drawn_if_a_number_is_set(root: Path, tmp_path: Path, prompts: int, drawn: list[str]) -> None:
    wanted = STAGE.wants(context(root, tmp_path, replace(CONFIG, first_prompts=prompts)))
    assert list(dict.fromkeys(wanted["prompt"].to_pylist())) == list(drawn)


def test_a_step_without_a_checkpoint_is_refused_and_the_steps_with_one_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be steps with a checkpoint \(10, 20\), got 15"):
        context(root, tmp_path, replace(CONFIG, checkpoints=(10, 15)))


def test_a_stored_preview_is_not_drawn_again_and_loads_no_weights(root: Path, tmp_path: Path) -> None:
    first = harness.run(STAGE, context(root, tmp_path, replace(CONFIG, seeds=(0,))))
    more = context(root, tmp_path, stored=first)
    added = harness.run(STAGE, more)
    assert set(added["seed"].to_pylist()) == {5}
    again = context(root, tmp_path, stored=pa.concat_tables([first, added]), weights={"train": root / "train"})
    assert again.pending.num_rows == 0 and harness.run(STAGE, again).num_rows == 0


def test_a_run_stopped_at_any_row_ends_where_an_unbroken_one_does(root: Path, tmp_path: Path) -> None:
    whole = context(root, tmp_path / "whole")
    expected = harness.run(STAGE, whole).select(SAMPLES.compared).to_pylist()
    stored = SAMPLES.table([])
    for _ in range(20):
        calls: Iterator[int] = iter(range(1000))
        part = context(root, tmp_path / "parts", stored=stored, stop=lambda calls=calls: next(calls) > 3 * STEPS)
        if not part.pending.num_rows:
            break
        stored = pa.concat_tables([stored, harness.run(STAGE, part)])
    got = sorted(stored.select(SAMPLES.compared).to_pylist(), key=str)
    assert got == sorted(expected, key=str)
    for row in expected:
        np.testing.assert_array_equal(pixels(part, row), pixels(whole, row))
    assert (part.artifacts / "grid.png").read_bytes() == (whole.artifacts / "grid.png").read_bytes()


def files(ctx: StageContext) -> set[str]:
    return {str(path.relative_to(ctx.artifacts)) for path in ctx.artifacts.rglob("*") if path.is_file()}


def test_a_stop_takes_effect_after_the_current_denoising_step_and_nothing_is_drawn_twice(root: Path, tmp_path: Path) -> None:
    config, bar = replace(CONFIG, checkpoints=()), []
    ctx = context(root, tmp_path, config, stop=lambda: len(bar) > STEPS)
    ctx.progress = lambda done, total, unit: bar.append((done, total))
    assert harness.run(STAGE, ctx).num_rows == 0
    assert bar[-1] == (STEPS + 1, 4 * STEPS)
    assert len([name for name in files(ctx) if name.startswith("latents/")]) == 1
    again = context(root, tmp_path, config)
    again.progress = ctx.progress
    assert harness.run(STAGE, again).num_rows == 4
    assert bar[-1] == (3 * STEPS, 3 * STEPS)


def test_a_stop_between_two_pictures_leaves_the_rest_of_them_to_the_next_run(root: Path, tmp_path: Path) -> None:
    config, seen = replace(CONFIG, checkpoints=()), tmp_path / "parts" / "artifacts" / "images"
    whole = context(root, tmp_path / "whole", config)
    expected = harness.run(STAGE, whole).to_pylist()
    first = context(root, tmp_path / "parts", config, stop=lambda: any(seen.glob("*.png")))
    stored = harness.run(STAGE, first)
    assert stored["path"].to_pylist() == [expected[0]["path"]]
    autoencoder = {"autoencoder": root / "weights" / "vae", "train": root / "train"}  # and no transformer
    second = context(root, tmp_path / "parts", config, stored=stored, weights=autoencoder)
    rest = harness.run(STAGE, second).to_pylist()
    assert [row["path"] for row in rest] == [row["path"] for row in expected[1:]]
    assert all(row["seconds"] > 0 for row in rest)
    assert files(second) == files(whole) == {"grid.png", *(row["path"] for row in expected)}
    assert all((whole.artifacts / name).read_bytes() == (second.artifacts / name).read_bytes() for name in files(whole))


def test_the_grid_has_a_row_per_prompt_and_seed_and_a_column_per_source(root: Path, tmp_path: Path) -> None:
    ctx = context(root, tmp_path)
    rows = harness.run(STAGE, ctx).to_pylist()
    with Image.open(ctx.artifacts / "grid.png") as image:
        page = np.asarray(image.convert("RGB")).astype(np.float32)
    at = iter([(220 + c * 40, 36 + r * 40) for c in range(3) for r in range(4)])
    for row in rows:  # source by source, so column by column
        left, top = next(at)
        np.testing.assert_array_equal(page[top : top + SIZE, left : left + SIZE], pixels(ctx, row))
    assert page.shape == (36 + 4 * 40, 220 + 3 * 40, 3)


def test_the_grid_shows_the_first_prompts_and_every_prompt_is_drawn(root: Path, tmp_path: Path) -> None:
    ctx = context(root, tmp_path, replace(CONFIG, grid=1, checkpoints="last", seeds=(0,)))
    rows = harness.run(STAGE, ctx)
    assert set(rows["prompt"].to_pylist()) == set(PROMPTS)
    assert Image.open(ctx.artifacts / "grid.png").height < 2 * (SIZE + 8) + 36


def test_both_passes_of_guidance_at_once_draw_what_they_draw_in_turn(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, checkpoints="last", seeds=(0,), guidance=3.0)
    drawn = []
    for most in (sampling.TOGETHER, 0):
        monkeypatch.setattr(sampling, "TOGETHER", most)
        ctx = context(root, tmp_path / str(most), config)
        drawn.append([np.asarray(Image.open(ctx.artifacts / path), int) for path in harness.run(STAGE, ctx)["path"].to_pylist()])
    assert np.abs(np.array(drawn[0]) - np.array(drawn[1])).max() <= 1


def test_the_grid_comes_back_when_it_is_lost_and_follows_the_choice(root: Path, tmp_path: Path) -> None:
    first = context(root, tmp_path)
    stored = harness.run(STAGE, first)
    file = first.artifacts / "grid.png"
    whole = file.read_bytes()
    before = file.stat().st_mtime_ns
    harness.run(STAGE, context(root, tmp_path, stored=stored))
    assert file.stat().st_mtime_ns == before, "it shows what is wanted: leave it"
    file.unlink()
    harness.run(STAGE, context(root, tmp_path, stored=stored))
    assert file.read_bytes() == whole
    harness.run(STAGE, context(root, tmp_path, replace(CONFIG, base=False), stored=stored))
    with Image.open(file) as image:
        assert image.width == 220 + 2 * 40


def test_an_adapter_that_was_damaged_is_refused(root: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(root / "train", tmp_path / "train")
    file = tmp_path / "train" / "checkpoints" / "step-000020" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    weights = {
        "transformer": root / "weights" / "transformer",
        "autoencoder": root / "weights" / "vae",
        "train": tmp_path / "train",
    }
    ctx = context(root, tmp_path, replace(CONFIG, checkpoints="last", base=False), weights=weights)
    with pytest.raises(ValueError, match=r"adapter\.safetensors is damaged; choose another checkpoint"):
        harness.run(STAGE, ctx)


def test_an_adapter_that_draws_no_finite_values_leaves_no_picture(root: Path, tmp_path: Path) -> None:
    (saved,) = [saved for saved in checkpoint.find_checkpoints(root / "train") if saved.step == 10]
    ruined = {name: 1e30 * value for name, value in saved.arrays(checkpoint.ADAPTER).items()}
    checkpoint.save(writer_into(tmp_path / "train"), 30, ruined, {}, TRAIN.table([]), {"rank": "2", "alpha": "4.0"}, {})
    weights = {"transformer": root / "weights" / "transformer", "train": tmp_path / "train"}
    ctx = context(root, tmp_path, replace(CONFIG, base=False), weights=weights)
    with pytest.raises(
        ValueError, match=r"^samples: step 30 draws values that are not finite; choose .*, or lower \[train\] lr$"
    ):
        harness.run(STAGE, ctx)
    assert not files(ctx)


def test_memory_is_released_when_the_stage_ends(root: Path, tmp_path: Path) -> None:
    ctx = context(root, tmp_path, replace(CONFIG, seeds=(0,)))
    mx.clear_cache()
    before = mx.get_active_memory()
    harness.run(STAGE, ctx)
    assert mx.get_active_memory() == before


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"checkpoints": "latest"}, 'checkpoints must be "last", "all" or a list of steps .*, got "latest"'),
        ({"width": 1000}, "width must be a multiple of 16, such as 992, got 1000"),
        ({"height": 0}, "height must be >= 16 and <= 4096, got 0"),
        ({"seeds": (1, 1)}, r"seeds must be different .*, got \[1, 1\]"),
        ({"seeds": ()}, r"seeds must be .*, got \[\]"),
        ({"steps": 0}, "steps must be >= 1 and <= 1000, got 0"),
        ({"grid": 0}, "grid must be >= 1 and <= 1000, got 0"),
    ],
)
def test_settings_that_allow_no_preview_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        SamplesConfig(**values)


def test_a_project_without_preview_prompts_says_why_there_are_no_previews(root: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    ctx = harness.context(
        STAGE,
        tmp_path,
        {**tables(), "captions": CAPTIONS.table([])},
        config=CONFIG,
        family=TINY,
        weights={"train": root / "train"},
    )
    ctx.say = lines.append
    assert harness.run(STAGE, ctx).num_rows == 0
    assert len(lines) == 1 and "preview_prompts" in lines[0]
    assert not (ctx.artifacts / "grid.png").exists()


def writer_into(folder: Path) -> Any:
    def write_artifact(name: str, write: Any) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        return path

    return write_artifact


def test_the_average_draws_where_the_setting_asks_for_it_and_the_checkpoint_has_one(root: Path, tmp_path: Path) -> None:
    (plain,) = [saved for saved in checkpoint.find_checkpoints(root / "train") if saved.step == 10]
    arrays = plain.arrays(checkpoint.ADAPTER)
    averaged = {name: value / 2 for name, value in arrays.items()}
    about = {"rank": "2", "alpha": "4.0"}
    checkpoint.save(writer_into(tmp_path / "train"), 10, arrays, {}, TRAIN.table([]), about, {}, averaged)
    checkpoint.save(writer_into(tmp_path / "train"), 20, averaged, {}, TRAIN.table([]), about, {})
    ctx = context(root, tmp_path)
    ctx.files = lambda schema: tmp_path / "train"
    labels = {}
    for average in (False, True):
        ctx.config = replace(CONFIG, average=average)
        labels[average] = [source.label for source in sample_sources(ctx)]
    assert labels == {False: ["base", "step 10", "step 20"], True: ["base", "step 10, average", "step 20"]}


@pytest.mark.parametrize("variant", ["dora", "lokr"])
def test_every_variant_of_an_adapter_draws_as_the_weights_that_it_merges_into(variant: Any, root: Path, tmp_path: Path) -> None:
    model = load_flux2(root / "weights" / "transformer", TINY, mx.float32)
    targets = select_targets(model.linears(), ["*"], 2, 3.0, variant=variant)
    draw = np.random.default_rng(3)
    arrays = {
        name: value + mx.array(draw.normal(0, 0.05, value.shape).astype(np.float32))
        for name, value in fresh_adapter(targets, 0, target_weights(model.blocks, targets)).items()
    }
    about = {"family": "tiny", **adapter_metadata(targets)}
    saved = checkpoint.save(writer_into(tmp_path), 10, arrays, {}, TRAIN.table([]), about, {})
    every = model.top | {f"{block.name}.{name}": weight for block in model.blocks for name, weight in block.weights.items()}
    merged = Flux2(model.config, merged_weights(every, arrays, target_scales(targets)))
    given = inputs(mx.array(draw.normal(size=(1, 4, 128)), mx.float32), (2, 2), mx.ones((1, 5, 192)), mx.array([0.5]))
    expected = merged(**given)
    assert mx.abs(model(**given) - expected).max() > 1e-2
    assert mx.abs(adapted_forward(model, TINY, [(saved.folder / checkpoint.ADAPTER, 1.0)])(**given) - expected).max() < 1e-4


def test_a_base_of_fewer_bits_draws_a_preview_that_is_farther_from_that_of_the_full_base(root: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoints=(10,), base=False, seeds=(0,))
    rows = {bits: harness.run(STAGE, context(root, tmp_path / str(bits), replace(config, base_bits=bits))) for bits in (16, 8, 4)}
    drawn = {bits: pixels(context(root, tmp_path / str(bits), config), found.to_pylist()[0]) for bits, found in rows.items()}
    far = {bits: np.abs(drawn[bits] - drawn[16]).mean() for bits in (8, 4)}
    assert 0 < far[8] < far[4]
