"""samples: preview images, drawn by checkpoints of the adapter and by the bare base from the same noise, and a grid of them.

B batch, L image tokens, C latent channels, h and w latent height and width, J text features, T text rows, H and W pixels.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.samples import SAMPLES
from schemas.text_to_image.train import TRAIN
from stages.models.flux2 import sampling
from stages.models.flux2.adapter_formats import read_adapter
from stages.models.flux2.load import load_autoencoder, load_flux2
from stages.models.flux2.transformer import Flux2, Linear, image_ids, text_ids
from stages.settings import runtime, selects, setting
from stages.stage import Stage, StageContext
from stages.text_to_image.samples.grid import grid
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from stages.tuner.checkpoint import ADAPTER, EMA

GRID = "grid.png"
LATENTS = "latents"  # of pictures that were drawn and are not shown yet, so that a stop costs no drawing
PIXELS = 16  # per image token, along one side
TOGETHER = 1024  # image tokens up to which guidance's two passes are one batch: faster, and their memory is small there
SHORT = 16  # hex digits of an id in a file's name
WANTED = ("adapter_id", "step", "caption_id", "prompt", "seed", "width", "height")
DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}

Row = dict[str, Any]


@dataclass(frozen=True)
class SamplesConfig:
    """[samples]: which previews are drawn, and how."""

    checkpoints: str | tuple[int, ...] = selects("last", '"last", "all", or a list of steps; a preview takes minutes on a Mac')
    average: bool = selects(False, "draw by the average of the adapter ([train.ema]) where a checkpoint has one")
    base: bool = selects(True, "also the base without an adapter, to compare with")
    seeds: tuple[int, ...] = selects((0,), "seeds of the starting noise: one preview each per prompt and checkpoint")
    width: int = selects(768, "pixels, a multiple of 16; the larger of the default training resolutions")
    height: int = selects(768, "pixels, a multiple of 16")
    steps: int | None = setting(None, "denoising steps; by default the family's own number")
    guidance: float | None = setting(None, "how strongly the prompt is followed; by default the family's own value")
    precision: Literal["bfloat16", "float32"] = setting("bfloat16", "what the transformer computes in; float32 on a CPU")
    grid: int = runtime(8, "prompts that the grid shows, the first ones; every prompt is drawn")

    def __post_init__(self) -> None:
        """Refuse what no preview can be drawn with."""
        if isinstance(self.checkpoints, str) and self.checkpoints not in ("all", "last"):
            raise ValueError(f'checkpoints: {self.checkpoints!r} is neither "all", "last" nor a list of steps like [500, 1000]')
        for name in ("width", "height"):
            value = getattr(self, name)
            if value < PIXELS or value % PIXELS:
                raise ValueError(f"{name}: {value} is no multiple of {PIXELS}; {max(1, round(value / PIXELS)) * PIXELS} is")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} should be different whole numbers, 0 or more, like [0, 1]")
        if self.grid < 1:
            raise ValueError(f"grid: {self.grid} is too few; 1 is the least")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: {self.steps} is too few; 1 is the least, 0 denoising steps leave noise")


@dataclass(frozen=True)
class SampleSource:
    """Who draws: a checkpoint's adapter, or the bare base."""

    adapter_id: str = ""
    step: int = 0
    checkpoint: checkpoint.Checkpoint | None = None
    file: str = ADAPTER  # of the checkpoint: the adapter, or its average

    @property
    def label(self) -> str:
        """Its name over a column of the grid."""
        average = ", average" if self.file == EMA else ""
        return f"step {self.step}{average}" if self.checkpoint else "base"


def sample_sources(ctx: StageContext) -> list[SampleSource]:
    """The base, if wanted, and the chosen checkpoints in order of step; ValueError for a step without a checkpoint."""
    chosen = ctx.config.checkpoints
    found = {one.step: one for one in checkpoint.found(ctx.files(TRAIN))}
    steps = sorted(found)
    if chosen == "last":
        steps = steps[-1:]
    elif chosen != "all":
        absent = [step for step in chosen if step not in found]
        if absent:
            there = ", ".join(map(str, steps)) or "none at all"
            raise ValueError(f"samples.checkpoints: there is no checkpoint of step {absent[0]}; there are {there}")
        steps = sorted(chosen)
    made = {"": SampleSource()} if ctx.config.base else {}
    for step in steps:
        files = found[step].state["files"]
        name = EMA if ctx.config.average and EMA in files else ADAPTER
        digest = files[name]["sha256"]
        made.setdefault(digest, SampleSource(digest, step, found[step], name))
    return list(made.values())


def wanted(ctx: StageContext) -> pa.Table:
    """Every source, every preview prompt, every seed."""
    return rows_wanted(ctx, sample_sources(ctx))


def rows_wanted(ctx: StageContext, who: list[SampleSource]) -> pa.Table:
    """The same, for sample_sources that are known already."""
    config = ctx.config
    captions = sorted(ctx.rows(CAPTIONS).to_pylist(), key=lambda row: row["position"])
    prompts = {row["caption_id"]: row["text"] for row in captions if row["role"] == "preview"}
    rows = [
        (source.adapter_id, source.step, caption_id, prompt, seed, config.width, config.height)
        for source in who
        for caption_id, prompt in prompts.items()
        for seed in config.seeds
    ]
    schema = pa.schema([SAMPLES.stored.field(name) for name in WANTED])
    return pa.Table.from_pylist([dict(zip(WANTED, row, strict=True)) for row in rows], schema=schema)


def draw_samples(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Draw source by source: transformer for all latents, then autoencoder, then the grid."""
    who, pending = sample_sources(ctx), ctx.pending.to_pylist()
    if not rows_wanted(ctx, who).num_rows:
        ctx.say("no previews: they need a prompt in [captions] preview_prompts, and the base or a checkpoint")
    steps = ctx.config.steps or ctx.need("family").sampling_steps
    undrawn = [row for row in pending if not latents_of(ctx, row).exists()]
    bar = Bar(ctx.progress, len(undrawn) * steps)
    fresh: list[Row] = []
    for source in who:
        rows = [row for row in pending if row["adapter_id"] == source.adapter_id]
        if not rows or ctx.stop():
            continue
        draw(ctx, source, [row for row in rows if row in undrawn], steps, bar)
        mx.clear_cache()  # the transformer is gone: give its memory back before the autoencoder comes
        for row in show(ctx, source, rows):
            fresh.append(row)
            yield from SAMPLES.table([row]).to_batches()
    keep_grid(ctx, who, fresh)
    if len(fresh) == len(pending):
        shutil.rmtree(ctx.artifacts / LATENTS, ignore_errors=True)


def name_of(row: Row) -> str:
    """What the files of a row are called, less the ending."""
    source, caption = row["adapter_id"][:SHORT] or "base", row["caption_id"][:SHORT]
    return f"{source}-{caption}-{row['seed']}-{row['width']}x{row['height']}"


def latents_of(ctx: StageContext, row: Row) -> Path:
    """Where a row's latents wait for the autoencoder."""
    return ctx.artifacts / LATENTS / f"{name_of(row)}.safetensors"


@dataclass
class Bar:
    """How many denoising steps of all are done."""

    progress: Callable[[int, int, str], None]
    total: int
    done: int = 0

    def step(self) -> None:
        """One more."""
        self.done += 1
        self.progress(self.done, self.total, "steps")


def draw(ctx: StageContext, source: SampleSource, rows: list[Row], steps: int, bar: Bar) -> None:
    """Keep the latents of these rows; fewer, if the user asks to stop. The transformer lives only in here."""
    if not rows:
        return
    model = load_flux2(ctx.need("transformer"), ctx.need("family"), DTYPES[ctx.config.precision])
    linear_for = adapted(model, source.checkpoint, source.file) if source.checkpoint else None
    guidance = ctx.need("family").guidance if ctx.config.guidance is None else ctx.config.guidance
    read = partial(embedding, ctx)
    negative_BTJ = read(empty_caption(ctx)) if ctx.need("family").real_cfg and guidance > 1 else None
    for row in rows:
        started, (h, w) = time.perf_counter(), (row["height"] // PIXELS, row["width"] // PIXELS)
        velocity = velocity_of(model, linear_for, (h, w), read(row["caption_id"]), negative_BTJ, guidance)
        x_BChw = sampling.noise(row["seed"], (1, model.config.in_channels, h, w))
        for done, x_BChw in enumerate(sampling.euler(velocity, x_BChw, sampling.sigmas(h * w, steps)), 1):  # noqa: B007, B020
            bar.step()
            if done < steps and ctx.stop():
                return
        if not mx.all(mx.isfinite(x_BChw)).item():
            raise ValueError(f"samples: {source.label} draws no finite values; choose other checkpoints, or lower [train] lr")
        arrays, about = {"latents": x_BChw}, {"seconds": repr(time.perf_counter() - started)}
        ctx.write_artifact(f"{LATENTS}/{name_of(row)}.safetensors", partial(checkpoint.write_arrays, arrays=arrays, about=about))
        if ctx.stop():
            return


def velocity_of(
    model: Flux2,
    linear_for: Callable[[str], Linear] | None,
    size: tuple[int, int],
    prompt_BTJ: mx.array,
    negative_BTJ: mx.array | None,
    guidance: float,
) -> sampling.Velocity:
    """The transformer as a velocity over (1,C,h,w); with a negative prompt, two passes and guidance between them."""
    ids_L4 = image_ids(*size)

    def towards(text_BTJ: mx.array, x_1Chw: mx.array, sigma: float) -> mx.array:
        B = text_BTJ.shape[0]
        x_BLC = mx.repeat(x_1Chw.flatten(2).swapaxes(1, 2), B, axis=0)
        ctx_ids_T4 = text_ids(text_BTJ.shape[1])
        v_BLC = model(x_BLC, ids_L4, text_BTJ, ctx_ids_T4, mx.array([sigma] * B), mx.array([guidance] * B), linear_for)
        v_BChw = v_BLC.swapaxes(1, 2).reshape(B, *x_1Chw.shape[1:]).astype(mx.float32)
        mx.eval(v_BChw)  # no more in memory at a time
        return v_BChw

    def velocity(x_1Chw: mx.array, sigma: float) -> mx.array:
        if negative_BTJ is None:
            return towards(prompt_BTJ, x_1Chw, sigma)
        if ids_L4.shape[0] <= TOGETHER:
            v_BChw = towards(mx.concatenate([prompt_BTJ, negative_BTJ]), x_1Chw, sigma)
            return sampling.guided(v_BChw[:1], v_BChw[1:], guidance)
        return sampling.guided(towards(prompt_BTJ, x_1Chw, sigma), towards(negative_BTJ, x_1Chw, sigma), guidance)

    return velocity


def adapted(model: Flux2, source: checkpoint.Checkpoint, name: str = ADAPTER) -> Callable[[str], Linear]:
    """The Linears of each block with the adapter's share added; ValueError if the adapter is of another transformer."""
    file = source.folder / name
    if not source.whole(name):
        raise ValueError(f"{file} is not what was saved there: choose another checkpoint, or train again from one before it")
    arrays, scales = read_adapter(file)
    known = model.linears()
    for linear in scales:
        shape = lora.linear_shape(lora.arrays_of_linear(arrays, linear))
        if known.get(linear) != shape:
            raise ValueError(f"{file} adapts {linear} of shape {shape}; the transformer's is {known.get(linear, 'not there')}")
    made: dict[str, Linear] = {}
    for block in model.blocks:
        prefix = block.name + "."
        own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        made[block.name] = lora.adapted_linear(
            own, {n.removeprefix(prefix): s for n, s in scales.items() if n.startswith(prefix)}
        )
    return made.__getitem__


def embedding(ctx: StageContext, caption_id: str) -> mx.array:
    """A caption's embedding, (1,T,J) bfloat16."""
    reader = ctx.tensors(EMBEDDINGS)
    reader.ahead([caption_id])
    return mx.array(reader.read(caption_id)).view(mx.bfloat16)[None]


def empty_caption(ctx: StageContext) -> str:
    """The id of the empty caption: the negative prompt."""
    found: list[str] = [row["caption_id"] for row in ctx.rows(CAPTIONS).to_pylist() if row["role"] == "empty"]
    assert found, "captions always holds the empty caption"
    return found[0]


def show(ctx: StageContext, source: SampleSource, rows: list[Row]) -> Iterator[Row]:
    """Decode what was drawn of these rows, keep each picture, and give its row. The autoencoder lives only in here."""
    drawn = [row for row in rows if latents_of(ctx, row).exists()]
    if not drawn or ctx.stop():
        return
    autoencoder = load_autoencoder(ctx.need("autoencoder"), ctx.need("family"), mx.float32)
    for row in drawn:
        if ctx.stop():
            return
        started = time.perf_counter()
        kept: Any = mx.load(str(latents_of(ctx, row)), return_metadata=True)
        arrays, about = kept
        image_BHWC = mx.clip(mx.round((autoencoder.decode(arrays["latents"]) + 1) * 127.5), 0, 255)
        pixels_HWC = np.array(image_BHWC[0].astype(mx.uint8))
        name = f"images/{name_of(row)}.png"
        said = {"prompt": row["prompt"], "seed": row["seed"], "step": source.step, "adapter_id": source.adapter_id}
        keep_png(ctx, name, Image.fromarray(pixels_HWC), said | ctx.provenance)
        yield {**row, "path": name, "seconds": float(about["seconds"]) + time.perf_counter() - started}


def keep_png(ctx: StageContext, name: str, image: Image.Image, said: dict[str, Any]) -> None:
    """A PNG that says how it was made."""
    info = PngInfo()
    for key, value in said.items():
        info.add_itxt(key, str(value))
    ctx.write_artifact(name, lambda path: image.save(path, format="PNG", pnginfo=info))


def keep_grid(ctx: StageContext, who: list[SampleSource], fresh: list[Row]) -> None:
    """Write the grid of the first prompts, unless it shows them already: a row per prompt and seed, a column per source."""
    rows = rows_wanted(ctx, who).to_pylist()
    first = list(dict.fromkeys(row["caption_id"] for row in rows))[: ctx.config.grid]
    rows = [row for row in rows if row["caption_id"] in first]
    content = hashlib.sha256(json.dumps([list(row.values()) for row in rows]).encode()).hexdigest()
    if not rows or (not fresh and shown(ctx.artifacts / GRID) == content):
        return
    unfinished = {cell(row) for row in ctx.pending.to_pylist()} - {cell(row) for row in fresh}
    paths = {cell(row): ctx.artifacts / row["path"] for row in [*ctx.stored.to_pylist(), *fresh]}
    there = {key: path for key, path in paths.items() if key not in unfinished and path.exists()}
    labels = {(row["caption_id"], row["seed"]): f"{row['prompt']}\nseed {row['seed']}" for row in rows}
    size = (ctx.config.width, ctx.config.height)
    cells = [[there.get((source.adapter_id, *key, *size)) for source in who] for key in labels]
    page = grid(cells, [source.label for source in who], list(labels.values()), size)
    keep_png(ctx, GRID, page, {"content": content} | ctx.provenance)


def cell(row: Row) -> tuple[Any, ...]:
    """A row's key."""
    return tuple(row[name] for name in SAMPLES.key)


def shown(path: Path) -> str:
    """What the grid at `path` says that it shows; empty if there is no grid, or none that can be read."""
    try:
        with Image.open(path) as image:
            return str(image.info.get("content", ""))
    except OSError:
        return ""


STAGE = Stage(
    reads=(TRAIN, CAPTIONS, EMBEDDINGS),
    writes=SAMPLES,
    config=SamplesConfig,
    needs=("family", "transformer", "autoencoder"),
    wants=wanted,
    run=draw_samples,
    result="grid.png",
)
