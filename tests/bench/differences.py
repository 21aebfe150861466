"""How much a setting that saves memory changes results: `python -m tests.bench.differences --help`.

A row is one line of JSON. `rms` is the root mean square of a difference, `of` that of the exact values, and `share`
their quotient. `most` is the largest difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import stages  # noqa: F401  (a fast BLAS, before MLX)
from tests.bench.environment import describe

PROMPTS = (
    "a red apple on a blue background",
    "an owl on a yellow background",
    "a green frog on a white background",
    "a blue fish on an orange background",
)
SEEDS, STEPS, SIDE = (0, 1), 20, 192  # of the pictures of `micro`; its steps of usual use, pixels
LEVELS = 255
COMPARED = "klein-base-4b"  # the family whose autoencoder encodes exactly and by default


def differences(found: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    away = found.astype(np.float64) - exact
    rms, of = float(np.sqrt(np.mean(away**2))), float(np.sqrt(np.mean(exact.astype(np.float64) ** 2)))
    return {"rms": rms, "of": of, "share": rms / of, "most": float(np.abs(away).max())}


def velocities(name: str, px: int) -> Iterator[dict[str, Any]]:
    """Yield a row for 8 and 4 bits: the velocity that a transformer of true shapes predicts, against bfloat16 weights.

    Weights are random, so this bounds what rounding does to one forward pass, not what a trained model draws.
    """
    import mlx.core as mx

    from stages.text_to_image.families import family
    from stages.text_to_image.train.profile import profile_settings, random_transformer
    from stages.tuner.blockwise.backprop import model_forward

    record, found = family(name), {}
    for bits in (16, 8, 4):
        model = random_transformer(record, profile_settings(base_bits=bits))
        inputs = record.architecture.zero_inputs(model.config, 1, (px // 16, px // 16), record.text_tokens)
        for number, key in enumerate(("x_BLC", "ctx_BTJ")):
            inputs[key] = mx.random.normal(inputs[key].shape, key=mx.random.key(number))
        inputs["timesteps_B"] = mx.array([0.5])
        found[bits] = np.array(model_forward(model, None)(**inputs).astype(mx.float32))
        del model
        mx.clear_cache()
        if bits < 16:
            yield {"kind": "velocity", "family": name, "px": px, "bits": bits, **differences(found[bits], found[16])}


def pictures(name: str = "micro") -> Iterator[dict[str, Any]]:
    """Yield a row for 8 and 4 bits: latents and pictures of the bundled model, against those of its full weights."""
    import mlx.core as mx

    from stages.text_to_image.families import family
    from stages.text_to_image.sampler import Adapters, load_sampler
    from stages.text_to_image.samples.config import SamplesConfig

    record = family(name)
    folder, load = Path(record.bundled), record.architecture
    encoder = load.load_text_encoder(folder / "text_encoder", folder / "tokenizer", record, "float32")
    *texts, empty_1TJ = [mx.array(each.words).view(mx.bfloat16)[None] for each in encoder.encode([*PROMPTS, ""])]
    autoencoder = load.load_autoencoder(folder / "vae", record, mx.float32)
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for bits in (16, 8, 4):
        config = SamplesConfig(base_bits=bits, precision="float32", steps=STEPS)
        sampler = load_sampler(Adapters(name), folder / "transformer", record, config, lambda: empty_1TJ)
        latents = [sampler.draw(text_1TJ, seed, SIDE, SIDE) for text_1TJ in texts for seed in SEEDS]
        seen = [np.array(mx.clip((autoencoder.decode(each) + 1) / 2, 0, 1)) * LEVELS for each in latents if each is not None]
        found[bits] = np.stack([np.array(each) for each in latents]), np.stack(seen)
        if bits < 16:
            for kind, got, exact in zip(("latent", "picture"), found[bits], found[16], strict=True):
                yield {"kind": kind, "family": name, "px": SIDE, "bits": bits, **differences(got, exact)}


def embeddings_of_8_bits(name: str = "micro") -> Iterator[dict[str, Any]]:
    """Yield rows for [embeddings] stored = "int8": embeddings of the bundled model, and latents drawn with them."""
    import mlx.core as mx

    from stages.models.text.encoder import widen
    from stages.text_to_image.families import family
    from stages.text_to_image.sampler import Adapters, load_sampler
    from stages.text_to_image.samples.config import SamplesConfig
    from stages.text_to_image.stored_embeddings import pack, unpack

    record, states = family(name), len(family(name).text_layers)
    folder, load = Path(record.bundled), record.architecture
    encoder = load.load_text_encoder(folder / "text_encoder", folder / "tokenizer", record, "float32")
    exact = [each.words for each in encoder.encode([*PROMPTS, ""])]
    stored = [unpack(pack(words_TJ, states), states) for words_TJ in exact]
    about = {"family": name, "px": SIDE, "bits": 8}
    yield {"kind": "embedding", **about, **differences(widen(np.concatenate(stored)), widen(np.concatenate(exact)))}
    latents, config = [], SamplesConfig(precision="float32", steps=STEPS)
    for words in (stored, exact):
        texts = [mx.array(words_TJ).view(mx.bfloat16)[None] for words_TJ in words]
        sampler = load_sampler(Adapters(name), folder / "transformer", record, config, texts.pop)
        found = [sampler.draw(text_1TJ, seed, SIDE, SIDE) for text_1TJ in texts for seed in SEEDS]
        latents.append(np.stack([np.array(each) for each in found]))
    yield {"kind": "latent, int8 embeddings", **about, **differences(*latents)}


def encode_smooth(file: Path, px: int, name: str) -> None:
    """Encode a smooth picture with an autoencoder of the shapes of family `name` and random weights; write the latent and print
    seconds.
    """
    import mlx.core as mx

    from stages.text_to_image.families import family
    from stages.tuner.blockwise.device import configure_convolutions
    from tests.bench.encoders import Images

    configure_convolutions()  # before the first MLX operation
    images = Images(family(name), (px, px), mx.float32)
    at = mx.arange(px) / px
    waves = [mx.sin(20 * at * (n + 1))[:, None] * mx.cos(13 * at * (n + 2))[None] for n in range(3)]
    images.pixels_BHWC = mx.stack(waves, axis=-1)[None]
    latent = images.model.encode(images.pixels_BHWC)
    mx.eval(latent)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        images.step()
        seconds.append(time.perf_counter() - began)
    np.save(file, np.array(latent))
    click.echo(json.dumps({"s": min(seconds)}))


def exactness(px: int, name: str = COMPARED) -> dict[str, Any]:
    """Return a row: the latent of an image with MLX's defaults (TF32, Winograd) against that of [latents] exact = true."""
    from stages.tuner.blockwise.device import EXACT

    latents, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        for how, variables in (("exact", EXACT), ("default", {})):
            file = f"{folder}/{how}.npy"
            command = [
                sys.executable,
                "-m",
                "tests.bench.differences",
                "--encode-to",
                file,
                "--px",
                str(px),
                "--autoencoder",
                name,
            ]
            done = subprocess.run(command, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE, text=True)
            seconds.append(json.loads(done.stdout)["s"])
            latents.append(np.load(file))
    about = {"kind": "exactness", "family": name, "px": px, "exact_s": seconds[0], "default_s": seconds[1]}
    return about | differences(latents[1], latents[0])


@click.command()
@click.option("--velocity", "family", default="", help="A family: one forward pass at 8 and 4 bits against 16, random weights.")
@click.option("--pictures", "drawn", is_flag=True, help="Pictures of the bundled model at 8 and 4 bits against its full weights.")
@click.option("--embeddings", "stored", is_flag=True, help="Embeddings of the bundled model stored with 8 bits a value.")
@click.option("--exactness", "exact", is_flag=True, help="A latent with MLX's defaults against one in full float32.")
@click.option("--px", default=512, show_default=True, help="Side of the image, for --velocity and --exactness.")
@click.option("--encode-to", type=click.Path(path_type=Path), hidden=True)
@click.option("--autoencoder", default=COMPARED, hidden=True)
def main(family: str, drawn: bool, stored: bool, exact: bool, px: int, encode_to: Path | None, autoencoder: str) -> None:
    if encode_to:
        encode_smooth(encode_to, px, autoencoder)
        return
    rows = [*(velocities(family, px) if family else ()), *(pictures() if drawn else ()), *([exactness(px)] if exact else ())]
    rows += embeddings_of_8_bits() if stored else ()
    for row in rows:
        click.echo(json.dumps(row | describe("mlx")))


if __name__ == "__main__":
    main()
