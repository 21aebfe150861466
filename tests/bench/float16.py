"""Training in float16 without loss scaling, beside float32: `python -m tests.bench.float16 --help`.

The bundled model `micro` learns the example's images; both runs of a seed see the same images, captions, noise and noise levels.
`zero_share` is the share of the adapter's gradient that is zero in float16 and not in float32; `cosine` compares the two
gradients. Float16 is no setting of [train]: this measures whether it could be one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import stages  # noqa: F401  (a fast BLAS, before MLX)
from stages.text_to_image.train.batches import MicroBatch
from tests.bench.environment import describe

SIDE, IMAGES, RATE, RANK = 192, 12, 1e-3, 16  # pixels; images of the example; settings of the adapter
LEVELS = (0.02, 0.98)  # noise levels are uniform between these
LAST = 20  # steps at the end of a run whose losses are averaged
PRECISIONS = ("float32", "float16")


def training(precision: str, seed: int) -> Any:
    import mlx.core as mx

    from stages.text_to_image.families import family
    from stages.text_to_image.train.profile import profile_settings
    from stages.text_to_image.train.task import FlowMatching
    from stages.text_to_image.weights import load_transformer
    from stages.tuner.step import TrainingStep, choose_targets, starting_adapter

    record = family("micro")
    config = profile_settings(precision="float32", lr=RATE, rank=RANK, seed=seed)
    object.__setattr__(config, "precision", precision)  # no project can set it
    model = load_transformer(Path(record.bundled, "transformer"), record, getattr(mx, precision), config)
    targets = choose_targets(model.linears(), config)
    objective = FlowMatching(record.architecture, config.loss, config.preservation)
    return TrainingStep(model, objective, targets, config, starting_adapter(model, targets, config))


def example() -> tuple[np.ndarray, np.ndarray]:
    """Latents (images, channels, height, width) in float32 and embeddings (images, rows, features) in bfloat16 words."""
    import mlx.core as mx
    from PIL import Image

    from stages.text_to_image.families import family

    record = family("micro")
    folder = Path(record.bundled)
    files = sorted(Path("data/projects/example/images").glob("*.webp"))[:IMAGES]
    autoencoder = record.architecture.load_autoencoder(folder / "vae", record, mx.float32)
    pictures = [np.asarray(Image.open(file).convert("RGB").resize((SIDE, SIDE)), np.float32) / 127.5 - 1 for file in files]
    latents = [np.array(autoencoder.encode(mx.array(each[None])))[0] for each in pictures]
    texts = record.architecture.load_text_encoder(folder / "text_encoder", folder / "tokenizer", record, "float32")
    captions = [f"ohwx, {file.stem.replace('-', ' ')}" for file in files]
    return np.stack(latents), np.stack([each.words for each in texts.encode(captions)])


def batches(seed: int, steps: int, size: int, latents: np.ndarray, ctx: np.ndarray) -> Iterator[MicroBatch]:
    from stages.text_to_image.train.batches import Sample
    from stages.text_to_image.train.data import Crop

    draw = np.random.default_rng(seed)
    crop = Crop("", "", SIDE, SIDE, (latents.shape[2], latents.shape[3]), ("",))
    for _ in range(steps):
        chosen = draw.choice(len(latents), size, replace=False)
        samples = [Sample(int(n), 0, crop, "", False, float(draw.uniform(*LEVELS))) for n in chosen]
        words = (np.ascontiguousarray(latents[chosen]).view(np.uint32) >> 16).astype(np.uint16)
        noise = draw.standard_normal((size, *latents.shape[1:]), dtype=np.float32)
        yield MicroBatch(samples, words, noise, ctx[chosen])


def gradient(step: Any, batch: MicroBatch) -> np.ndarray:
    grads = step.gradient([batch]).grads
    return np.concatenate([np.array(value).astype(np.float32).ravel() for value in getattr(grads, "arrays", grads).values()])


def compare(seed: int, steps: int, size: int, given: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    runs = {precision: training(precision, seed) for precision in PRECISIONS}
    losses: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    seconds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    zero, cosine, skipped = [], [], 0
    for number, batch in enumerate(batches(seed, steps, size, *given)):
        if number in (0, steps // 2, steps - 1):
            full, half = (gradient(run, batch) for run in runs.values())
            zero.append(float((half[full != 0] == 0).mean()))
            cosine.append(float(full @ half / np.linalg.norm(full) / np.linalg.norm(half)))
        for precision, run in runs.items():
            began = time.process_time()
            result = run.step([batch], RATE)
            seconds[precision].append(time.process_time() - began)
            losses[precision].append(float(np.mean(result.losses)))
            skipped += precision == "float16" and not result.finite
    last = {f"{precision}_loss": float(np.mean(values[-LAST:])) for precision, values in losses.items()}
    took = {f"{precision}_cpu_s": float(np.median(values)) for precision, values in seconds.items()}
    apart = float(np.abs(np.subtract(losses["float32"], losses["float16"])).max())
    about = {"kind": "float16", "family": "micro", "px": SIDE, "batch": size, "steps": steps, "seed": seed}
    return about | last | {"most_apart": apart, "skipped": skipped, "zero_share": zero, "cosine": cosine} | took


@click.command()
@click.option("--seeds", default=3, show_default=True, help="Number of runs, each with a seed of its own.")
@click.option("--steps", default=25, show_default=True, help="Steps of a run.")
@click.option("--batch", default=1, show_default=True, help="Images of a step.")
def main(seeds: int, steps: int, batch: int) -> None:
    """Print a row for every seed: losses, gradients and CPU seconds of a step in float16 beside float32."""
    given = example()
    for seed in range(seeds):
        click.echo(json.dumps(compare(seed, steps, batch, given) | describe("mlx")))


if __name__ == "__main__":
    main()
