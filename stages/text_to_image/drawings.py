"""The stage `drawings`: latents that the model draws for the neutral prompts of a slider, which is trained on them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from schemas.text_to_image import CAPTIONS, DRAWINGS, EMBEDDINGS
from stages.memory import Forecast, Memory, Outlook, Settings, cheapest
from stages.models.weights import reading
from stages.run import Run
from stages.settings import SEEDS, selects
from stages.stage import Stage
from stages.text_to_image.memory import text_rows
from stages.text_to_image.sampler import (
    Adapters,
    DrawingConfig,
    LatentSampler,
    cheaper,
    drawing_memory,
    evaluations,
    load_sampler,
    passes,
)
from stages.text_to_image.slider import NEUTRAL
from stages.text_to_image.stored_embeddings import read_embedding
from stages.text_to_image.weights import CONVERTED, STREAMED
from stages.tuner.blockwise.device import configure_scheduler

WANTED = ("latent_id", "caption_id", "seed", "width", "height")


@dataclass(frozen=True)
class DrawingsConfig(DrawingConfig):
    seeds: tuple[int, ...] = selects(
        (0, 1, 2, 3), "seeds of the starting noise; each gives one drawing per neutral prompt", unit="numbers", bounds=SEEDS
    )


def forecast(outlook: Outlook) -> Forecast | None:
    """None without a slider."""

    def found(outlook: Outlook) -> Memory:
        config: DrawingsConfig = outlook.sections["drawings"]
        family, weights, size = outlook.family.without_references(), outlook.weights("transformer"), (config.width, config.height)
        both, rows = passes(config, family), text_rows(outlook)
        return drawing_memory(family, weights, config, config.precision, size, both, rows=rows)

    config: DrawingsConfig = outlook.sections["drawings"]
    slider, memory = outlook.sections["captions"].slider, found(outlook)
    if slider is None:
        return None
    architecture = outlook.family.architecture
    channels = architecture.transformer_config(outlook.weights("transformer"), outlook.family).latent_channels
    tokens = config.width * config.height // architecture.pixels_per_token**2

    def peak(settings: Settings) -> int:
        return found(outlook.changed(settings)).footprint

    return Forecast(
        memory.footprint,
        row_bytes=2 * channels * tokens,
        rows=len(slider.neutral) * len(config.seeds),
        file_bytes=memory.on_disk,
        how=f"{config.width} x {config.height} px, {config.base_bits or 16} bits",
        find_remedy=lambda: cheapest(peak, outlook.budget, cheaper(config, outlook.family, "drawings")),
        arrays=memory.peak,
        size=(config.width, config.height, evaluations(config, outlook.family)),
    )


def wanted_drawings(run: Run[DrawingsConfig]) -> pa.Table:
    config = run.config
    captions = sorted(run.inputs.rows(CAPTIONS).to_pylist(), key=lambda row: row["position"])
    rows = []
    for caption_id in (row["caption_id"] for row in captions if row["role"] == NEUTRAL):
        for seed in config.seeds:
            name = f"{caption_id}|{seed}|{config.width}|{config.height}"
            row = (hashlib.sha256(name.encode()).hexdigest(), caption_id, seed, config.width, config.height)
            rows.append(dict(zip(WANTED, row, strict=True)))
    return DRAWINGS.select(rows, WANTED)


def draw_latents(run: Run[DrawingsConfig]) -> Iterator[pa.RecordBatch]:
    """One row per batch: a picture takes minutes on a Mac."""
    pending = run.output.pending.to_pylist()
    if not pending:
        return
    configure_scheduler()  # must come before the first MLX array
    family, config = run.needs["family"].without_references(), run.config
    empty = next(row["caption_id"] for row in run.inputs.rows(CAPTIONS).to_pylist() if row["role"] == "empty")

    def load() -> LatentSampler:
        places = run.output.artifacts.parent / STREAMED, run.root / CONVERTED
        path, adapters = run.needs["transformer"], Adapters(DRAWINGS.name)
        return load_sampler(adapters, path, family, config, lambda: read_embedding(run, empty), (), *places, run.report.say)

    with reading("the transformer", run.report.note):
        sampler = run.reuse("sampler of drawings", load)
    done, total = 0, len(pending) * sampler.steps

    def stop_after() -> bool:
        nonlocal done
        done += 1
        run.report.progress(done, total, "steps")
        return run.report.stop()

    for row in pending:
        began = time.perf_counter()
        latent_1Chw = sampler.draw(read_embedding(run, row["caption_id"]), row["seed"], config.width, config.height, stop_after)
        if latent_1Chw is None:
            return
        words_Chw = np.array(latent_1Chw[0].astype(mx.bfloat16).view(mx.uint16))
        facts: dict[str, Any] = {"image_id": hashlib.sha256(words_Chw.tobytes()).hexdigest(), "shape": list(words_Chw.shape)}
        facts |= {"dtype": "bfloat16", "seconds": time.perf_counter() - began, "tensor": words_Chw.ravel()}
        yield DRAWINGS.record_batch([row | facts])
        if run.report.stop():
            return


STAGE = Stage(
    reads=(CAPTIONS, EMBEDDINGS),
    writes=DRAWINGS,
    unit="drawing",
    config=DrawingsConfig,
    needs=("family", "transformer"),
    drawn_by=("family", "transformer"),
    wants=wanted_drawings,
    run=draw_latents,
    forecast=forecast,
    opens=lambda run: iter(()),
)
