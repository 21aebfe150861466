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

from schemas.captions import CAPTIONS
from schemas.embeddings import EMBEDDINGS
from schemas.samples import SAMPLES
from schemas.train import TRAIN
from stages.grid import grid
from stages.models import sampling
from stages.models.adapter_formats import read_adapter
from stages.models.flux2 import Flux2, Linear, image_ids, text_ids
from stages.models.load import load_autoencoder, load_flux2
from stages.stage import Stage, StageContext, runtime, selects, setting
from stages.tuner import checkpoint, lora
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
class Drawer:
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


def drawers(context: StageContext) -> list[Drawer]:
    """The base, if wanted, and the chosen checkpoints in order of step; ValueError for a step without a checkpoint."""
    chosen = context.config.checkpoints
    found = {one.step: one for one in checkpoint.found(context.weights(TRAIN.name))}
    steps = sorted(found)
    if chosen == "last":
        steps = steps[-1:]
    elif chosen != "all":
        absent = [step for step in chosen if step not in found]
        if absent:
            there = ", ".join(map(str, steps)) or "none at all"
            raise ValueError(f"samples.checkpoints: there is no checkpoint of step {absent[0]}; there are {there}")
        steps = sorted(chosen)
    made = {"": Drawer()} if context.config.base else {}
    for step in steps:
        files = found[step].state["files"]
        name = EMA if context.config.average and EMA in files else ADAPTER
        digest = files[name]["sha256"]
        made.setdefault(digest, Drawer(digest, step, found[step], name))
    return list(made.values())


def wanted(context: StageContext) -> pa.Table:
    """Every drawer, every preview prompt, every seed."""
    return rows_wanted(context, drawers(context))


def rows_wanted(context: StageContext, who: list[Drawer]) -> pa.Table:
    """The same, for drawers that are known already."""
    config = context.config
    captions = sorted(context.rows(CAPTIONS).to_pylist(), key=lambda row: row["position"])
    prompts = {row["caption_id"]: row["text"] for row in captions if row["role"] == "preview"}
    rows = [
        (drawer.adapter_id, drawer.step, caption_id, prompt, seed, config.width, config.height)
        for drawer in who
        for caption_id, prompt in prompts.items()
        for seed in config.seeds
    ]
    schema = pa.schema([SAMPLES.stored.field(name) for name in WANTED])
    return pa.Table.from_pylist([dict(zip(WANTED, row, strict=True)) for row in rows], schema=schema)


def draw_samples(context: StageContext) -> Iterator[pa.RecordBatch]:
    """Drawer by drawer: the transformer draws all of its latents and goes, then the autoencoder shows them; then the grid."""
    who, pending = drawers(context), context.pending.to_pylist()
    if not rows_wanted(context, who).num_rows:
        context.say("no previews: they need a prompt in [captions] preview_prompts, and the base or a checkpoint")
    steps = context.config.steps or context.family.sampling_steps
    undrawn = [row for row in pending if not latents_of(context, row).exists()]
    bar = Bar(context.progress, len(undrawn) * steps)
    fresh: list[Row] = []
    for drawer in who:
        rows = [row for row in pending if row["adapter_id"] == drawer.adapter_id]
        if not rows or context.stop():
            continue
        draw(context, drawer, [row for row in rows if row in undrawn], steps, bar)
        mx.clear_cache()  # the transformer is gone: give its memory back before the autoencoder comes
        for row in show(context, drawer, rows):
            fresh.append(row)
            yield from SAMPLES.table([row]).to_batches()
    keep_grid(context, who, fresh)
    if len(fresh) == len(pending):
        shutil.rmtree(context.artifacts / LATENTS, ignore_errors=True)


def name_of(row: Row) -> str:
    """What the files of a row are called, less the ending."""
    drawer, caption = row["adapter_id"][:SHORT] or "base", row["caption_id"][:SHORT]
    return f"{drawer}-{caption}-{row['seed']}-{row['width']}x{row['height']}"


def latents_of(context: StageContext, row: Row) -> Path:
    """Where a row's latents wait for the autoencoder."""
    return context.artifacts / LATENTS / f"{name_of(row)}.safetensors"


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


def draw(context: StageContext, drawer: Drawer, rows: list[Row], steps: int, bar: Bar) -> None:
    """Keep the latents of these rows; fewer, if the user asks to stop. The transformer lives only in here."""
    if not rows:
        return
    model = load_flux2(context.weights("transformer"), context.family, DTYPES[context.config.precision])
    linear_for = adapted(model, drawer.checkpoint, drawer.file) if drawer.checkpoint else None
    guidance = context.family.guidance if context.config.guidance is None else context.config.guidance
    read = partial(embedding, context)
    negative_BTJ = read(empty_caption(context)) if context.family.real_cfg and guidance > 1 else None
    for row in rows:
        started, (h, w) = time.perf_counter(), (row["height"] // PIXELS, row["width"] // PIXELS)
        velocity = velocity_of(model, linear_for, (h, w), read(row["caption_id"]), negative_BTJ, guidance)
        x_BChw = sampling.noise(row["seed"], (1, model.config.in_channels, h, w))
        for done, x_BChw in enumerate(sampling.euler(velocity, x_BChw, sampling.sigmas(h * w, steps)), 1):  # noqa: B007, B020
            bar.step()
            if done < steps and context.stop():
                return
        if not mx.all(mx.isfinite(x_BChw)).item():
            raise ValueError(f"samples: {drawer.label} draws no finite values; choose other checkpoints, or lower [train] lr")
        arrays, about = {"latents": x_BChw}, {"seconds": repr(time.perf_counter() - started)}
        context.keep(f"{LATENTS}/{name_of(row)}.safetensors", partial(checkpoint.write_arrays, arrays=arrays, about=about))
        if context.stop():
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
        shape = lora.shape_of(lora.of_linear(arrays, linear))
        if known.get(linear) != shape:
            raise ValueError(f"{file} adapts {linear} of shape {shape}; the transformer's is {known.get(linear, 'not there')}")
    made: dict[str, Linear] = {}
    for block in model.blocks:
        prefix = block.name + "."
        own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        made[block.name] = lora.linear(own, {n.removeprefix(prefix): s for n, s in scales.items() if n.startswith(prefix)})
    return made.__getitem__


def embedding(context: StageContext, caption_id: str) -> mx.array:
    """A caption's embedding, (1,T,J) bfloat16."""
    reader = context.tensors(EMBEDDINGS)
    reader.ahead([caption_id])
    return mx.array(reader.read(caption_id)).view(mx.bfloat16)[None]


def empty_caption(context: StageContext) -> str:
    """The id of the empty caption: the negative prompt."""
    found: list[str] = [row["caption_id"] for row in context.rows(CAPTIONS).to_pylist() if row["role"] == "empty"]
    assert found, "captions always holds the empty caption"
    return found[0]


def show(context: StageContext, drawer: Drawer, rows: list[Row]) -> Iterator[Row]:
    """Decode what was drawn of these rows, keep each picture, and give its row. The autoencoder lives only in here."""
    drawn = [row for row in rows if latents_of(context, row).exists()]
    if not drawn or context.stop():
        return
    autoencoder = load_autoencoder(context.weights("autoencoder"), context.family, mx.float32)
    for row in drawn:
        if context.stop():
            return
        started = time.perf_counter()
        kept: Any = mx.load(str(latents_of(context, row)), return_metadata=True)
        arrays, about = kept
        image_BHWC = mx.clip(mx.round((autoencoder.decode(arrays["latents"]) + 1) * 127.5), 0, 255)
        pixels_HWC = np.array(image_BHWC[0].astype(mx.uint8))
        name = f"images/{name_of(row)}.png"
        said = {"prompt": row["prompt"], "seed": row["seed"], "step": drawer.step, "adapter_id": drawer.adapter_id}
        keep_png(context, name, Image.fromarray(pixels_HWC), said | context.provenance)
        yield {**row, "path": name, "seconds": float(about["seconds"]) + time.perf_counter() - started}


def keep_png(context: StageContext, name: str, image: Image.Image, said: dict[str, Any]) -> None:
    """A PNG that says how it was made."""
    info = PngInfo()
    for key, value in said.items():
        info.add_itxt(key, str(value))
    context.keep(name, lambda path: image.save(path, format="PNG", pnginfo=info))


def keep_grid(context: StageContext, who: list[Drawer], fresh: list[Row]) -> None:
    """Write the grid of the first prompts, unless it shows them already: a row per prompt and seed, a column per drawer."""
    rows = rows_wanted(context, who).to_pylist()
    first = list(dict.fromkeys(row["caption_id"] for row in rows))[: context.config.grid]
    rows = [row for row in rows if row["caption_id"] in first]
    content = hashlib.sha256(json.dumps([list(row.values()) for row in rows]).encode()).hexdigest()
    if not rows or (not fresh and shown(context.artifacts / GRID) == content):
        return
    unfinished = {cell(row) for row in context.pending.to_pylist()} - {cell(row) for row in fresh}
    paths = {cell(row): context.artifacts / row["path"] for row in [*context.stored.to_pylist(), *fresh]}
    there = {key: path for key, path in paths.items() if key not in unfinished and path.exists()}
    labels = {(row["caption_id"], row["seed"]): f"{row['prompt']}\nseed {row['seed']}" for row in rows}
    size = (context.config.width, context.config.height)
    cells = [[there.get((drawer.adapter_id, *key, *size)) for drawer in who] for key in labels]
    page = grid(cells, [drawer.label for drawer in who], list(labels.values()), size)
    keep_png(context, GRID, page, {"content": content} | context.provenance)


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
    loads=("transformer", "autoencoder"),
    config=SamplesConfig,
    wants=wanted,
    run=draw_samples,
    result="grid.png",
)
