"""The training of micro, end to end at a tiny size: what it exports is what both diffusers and this project compute."""

import json
import tarfile
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from data.research.micro import autoencoder, base, draw, optimizer, tokenizer, train
from data.research.micro import model as parts
from stages.models import random_model
from stages.models.flux2 import sampling
from stages.models.flux2.autoencoder import load_autoencoder
from stages.models.flux2.load import load_flux2
from stages.models.flux2.transformer import image_ids, text_ids
from stages.models.text.encoder import TextEncoder, widen
from stages.text_to_image.families import family

NAMES = ("apple", "boat", "cat", "drum", "egg", "fox")
PROMPT = "a cat on a blue background"


class Clock:
    """A clock that advances by 60 ms per reading, so that a training of so many seconds has a fixed number of steps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 0.06
        return self.seconds


@pytest.fixture(scope="module", autouse=True)
def short():
    """Make trainings short: a clock that counts steps, sheets of four pictures in two steps, and latents of few pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "time", Clock())
        patch.setattr(autoencoder, "time", Clock())
        patch.setattr(train, "SHOWN", ((128, 128), (96, 160)))
        patch.setattr(train, "PER_SHAPE", 2)
        patch.setattr(draw.samples, "__defaults__", (2,))
        patch.setattr(autoencoder.finished, "__defaults__", (48, 48))
        patch.setattr(base, "LOG_EVERY", 2)
        yield


@pytest.fixture(scope="module")
def sizes():
    micro = parts.MICRO
    small = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
    text = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    return replace(
        micro,
        transformer=micro.transformer | small | {"axes_dims_rope": (4, 4, 4, 4), "joint_attention_dim": 48},
        autoencoder=micro.autoencoder
        | {"block_out_channels": (4, 4, 8, 8), "decoder_block_out_channels": (4, 8, 8, 8), "norm_num_groups": 4},
        text=micro.text | text | {"num_key_value_heads": 1, "head_dim": 8},
        text_layers=(1, 2, 3),
        text_tokens=80,
    )


def sprites(path: Path) -> None:
    """Discs and squares in both styles."""
    with zipfile.ZipFile(path, "w") as archive:
        for style, kind in (("flat", "PNG"), ("3d", "WEBP")):
            for i, name in enumerate(NAMES):
                sprite = Image.new("RGBA", (256, 256))
                shape = ImageDraw.Draw(sprite).ellipse if i % 2 else ImageDraw.Draw(sprite).rectangle
                shape((20, 20, 236, 200 + i), fill=(40 * i, 200 - 30 * i, 90, 255))
                data = BytesIO()
                sprite.save(data, kind)
                archive.writestr(f"{style}/{name}.{kind.lower()}", data.getvalue())
        archive.writestr("3d.json", json.dumps({name: "held-out" if name == "egg" else "base" for name in NAMES}))


@pytest.fixture(scope="module")
def trained(sizes, tmp_path_factory):
    """A work folder after two calls, and the lines of the training log."""
    folder = tmp_path_factory.mktemp("micro")
    sprites(folder / "sprites.zip")
    lines = [{"name": n, "phrase": f"a {n}", "split": "held-out" if n == "egg" else "base"} for n in NAMES]
    (folder / "concepts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    call = ["--sprites", folder / "sprites.zip", "--concepts", folder / "concepts.jsonl", "--work", folder / "work"]
    call += ["--batch", 2, "--batch-autoencoder", 4, "--pictures", 10, "--pictures-autoencoder", 8, "--device", "cpu"]
    first = [*call, "--minutes-autoencoder", 0.004, "--minutes-base", 0.02]
    train.main(list(map(str, first)), sizes)
    train.main(list(map(str, [*call, "--minutes-base", 0.04, "--resume"])), sizes)
    journal = [json.loads(line) for line in (folder / "work" / "out" / "log.jsonl").read_text().splitlines()]
    return folder / "work", journal


@pytest.fixture(scope="module")
def pipe(trained):
    from diffusers import Flux2KleinPipeline

    return Flux2KleinPipeline.from_pretrained(trained[0] / "micro")


@pytest.fixture
def record(sizes):
    return replace(family("tiny"), text_layers=sizes.text_layers, text_tokens=sizes.text_tokens)


def test_a_second_call_continues_where_the_first_ended_and_the_log_says_what_was_shown(trained):
    about = {kind: [line for line in trained[1] if line["about"] == kind] for kind in ("base", "sprites", "corpus")}
    begun = [line for line in about["base"] if "Qwen3ForCausalLM" in line]
    ended = [line for line in about["base"] if "done" in line]
    assert begun[0]["step"] == 0 and 0 < begun[1]["step"] == ended[0]["step"] < ended[1]["step"]
    assert ended[1]["seconds"] >= 0.04 * 60 and ended[1]["done"]
    shown = about["sprites"][0]
    assert (shown["flat"], shown["solid"], shown["concepts"]) == (6, 5, 6), "a held-out concept is shown in its own style"
    assert 0.8 < about["corpus"][0]["std"] < 1.2


def test_a_training_can_start_from_an_exported_folder_and_keeps_its_autoencoder_and_tokenizer(trained, sizes, tmp_path):
    work = trained[0]
    call = ["--sprites", work.parent / "sprites.zip", "--concepts", work.parent / "concepts.jsonl", "--work", tmp_path]
    call += ["--batch", 2, "--pictures", 10, "--minutes-base", 0.005, "--device", "cpu", "--start", work / "micro"]
    train.main(list(map(str, call)), sizes)
    for name in ("vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json"):
        assert (tmp_path / "micro" / name).read_bytes() == (work / "micro" / name).read_bytes()
    name = "transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "micro" / name).read_bytes() != (work / "micro" / name).read_bytes()


def test_the_tar_files_hold_the_whole_folder(trained, tmp_path):
    work = trained[0]
    for packed in (work / "out").glob("micro-*.tar"):
        with tarfile.open(packed) as tar:
            tar.extractall(tmp_path, filter="data")
    for file in (f for f in (work / "micro").rglob("*") if f.is_file()):
        assert (tmp_path / file.relative_to(work / "micro")).read_bytes() == file.read_bytes()
    assert list((work / "out").glob("samples-*.png")) and (work / "out" / "autoencoder.png").is_file()


def test_the_prompt_form_and_the_noise_levels_of_the_sample_sheet_are_the_projects_own():
    for name in ("TEMPLATE", "SPECIAL", "CUT"):
        assert getattr(tokenizer, name) == getattr(random_model, name)
    assert np.allclose(draw.levels(64, 24), sampling.sigmas(64, 24))


def test_one_text_has_one_encoding_in_training_in_diffusers_and_here(trained, sizes, pipe, record):
    folder = trained[0] / "micro"
    tokens, real = tokenizer.Prompts(folder / "tokenizer", sizes.text_tokens)([PROMPT])
    settings = {"max_sequence_length": sizes.text_tokens, "text_encoder_out_layers": sizes.text_layers}
    with torch.no_grad():
        theirs = pipe.encode_prompt(PROMPT, **settings)[0]
        trains = parts.encode_text(pipe.text_encoder, tokens, real, sizes.text_layers)
    ours = next(TextEncoder(folder / "text_encoder", folder / "tokenizer", record, "float32").encode([PROMPT]))
    assert torch.allclose(theirs, trains, atol=1e-5)
    assert np.allclose(widen(ours.words), theirs[0].numpy(), atol=1e-2, rtol=1e-2)  # stored as bfloat16


def test_one_latent_has_one_velocity_in_training_in_diffusers_and_here(trained, sizes, pipe, record):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 60, 128), np.float32)
    context = rng.standard_normal((1, sizes.text_tokens, 48), np.float32)
    ids = torch.tensor(image_ids(6, 10)), torch.tensor(text_ids(sizes.text_tokens))
    inputs = torch.tensor(x), torch.tensor(context), torch.tensor([0.7])
    with torch.no_grad():
        tables = parts.rotary(pipe.transformer, sizes.text_tokens, 96, 160)
        trains = parts.velocity(pipe.transformer, *inputs, tables)
        theirs = pipe.transformer(*inputs, *ids, return_dict=False)[0]
    model = load_flux2(trained[0] / "micro" / "transformer", record, mx.float32)
    ours = model(mx.array(x), ids[0].numpy(), mx.array(context), ids[1].numpy(), mx.array([0.7]))
    assert theirs.abs().max() > 0.01  # it no longer predicts zero
    assert torch.allclose(theirs, trains, atol=1e-5)
    assert np.allclose(np.array(ours), theirs.numpy(), atol=1e-4)


def test_one_picture_has_one_latent_in_training_and_here_and_comes_back_alike(trained, pipe, record):
    image = np.random.default_rng(1).uniform(-1, 1, (1, 96, 160, 3)).astype(np.float32)
    with torch.no_grad():
        theirs = parts.normalised(pipe.vae, parts.encode_images(pipe.vae, torch.tensor(image).permute(0, 3, 1, 2)))
        back = parts.decode_packed(pipe.vae, parts.restored(pipe.vae, theirs))
    model = load_autoencoder(trained[0] / "micro" / "vae", record, mx.float32)
    ours = model.encode(mx.array(image))
    assert np.allclose(np.array(ours), theirs.numpy(), atol=1e-3)
    assert np.allclose(np.array(model.decode(ours)), back.permute(0, 2, 3, 1).numpy(), atol=1e-3)


def test_diffusers_draws_a_picture_from_the_folder_with_guidance(pipe, sizes):
    settings = {"max_sequence_length": sizes.text_tokens, "text_encoder_out_layers": sizes.text_layers}
    picture = pipe(prompt=PROMPT, height=96, width=160, num_inference_steps=2, guidance_scale=3.0, **settings).images[0]
    assert picture.size == (160, 96)


def test_muons_updates_are_orthogonal_of_the_size_of_adamws_and_at_a_rate_by_the_clock():
    torch.manual_seed(0)
    tall, wide = optimizer.orthogonal([torch.randn(96, 32), 1e-3 * torch.randn(32, 64)])
    for update in (tall, wide):
        size = 0.2 * max(update.shape) ** 0.5
        assert torch.all((torch.linalg.svdvals(update) / size - 1).abs() < 0.4)
        assert 0.1 < update.square().mean().sqrt() < 0.3
    rate = optimizer.rate  # rises, holds and falls with the clock
    assert rate(0.0, 0) < 0.01 and rate(0.3, 1000) == 1 and 0.4 < rate(0.72, 1000) < 0.6 and rate(1.0, 1000) < 0.02


def test_every_weight_that_is_read_is_trained_and_nothing_twice():
    sizes = parts.MICRO
    made = base.Base(sizes, parts.make_transformer(sizes), parts.make_text_encoder(sizes))
    groups = made.optimizer.adam.param_groups
    trained = [m.weight for m in made.optimizer.muon.matrices] + [w for g in groups for w in g["params"]]
    wanted = [w for m in (made.transformer, made.text_encoder) for w in m.parameters() if w.requires_grad]
    assert len(trained) == len(wanted) == len({id(w) for w in trained}) and {id(w) for w in trained} == {id(w) for w in wanted}
    assert all(sum(m.rows) == len(m.weight) for m in made.optimizer.muon.matrices)
