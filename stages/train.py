"""train: a LoRA by flow matching, on latents and embeddings read from disk. One row per sample drawn.

x_sigma = (1 - sigma) x0 + sigma noise, and the model is taught the velocity, noise - x0. What a step draws is a function
of (seed, step, sample) alone, and a checkpoint holds all else; so a run that is stopped, killed or made longer ends with
the same bits as one that never was.

B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features; words are bfloat16.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pyarrow as pa

from schemas.buckets import BUCKETS
from schemas.captions import CAPTIONS
from schemas.embeddings import EMBEDDINGS
from schemas.images import IMAGES
from schemas.latents import LATENTS
from schemas.train import TRAIN
from stages.models import flux2
from stages.models.load import load_flux2
from stages.stage import Stage, StageContext, runtime, selects, setting
from stages.trainset import Course, Feed, Micro, usable
from stages.tuner import checkpoint, lora, optimizer
from stages.tuner.backprop import loss_and_grads
from stages.tuner.batches import Order
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.noise import Noise
from stages.tuner.schedule import Schedule

GUIDANCE = 1.0  # what a family with guidance embedded is trained at; every trainer but one does
SKIPS = 3  # steps in a row without a finite loss and gradient that end the run
HEALTH = 10  # the step after which every run must have moved its adapter


def check(section: Any, name: str, low: float, high: float = math.inf) -> None:
    """Refuse a value outside low .. high."""
    value = getattr(section, name)
    if not low <= value <= high:
        raise ValueError(
            f"{name}: {value} is wrong; {low:g} " + ("or more" if high == math.inf else f"to {high:g}") + " is wanted"
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW's numbers."""

    beta1: float = setting(0.9, "decay of the mean of gradients; the paper's")
    beta2: float = setting(0.999, "decay of the mean of their squares; the paper's")
    eps: float = setting(1e-8, "added to the root, so that a zero gradient divides by something; the paper's")
    weight_decay: float = setting(1e-4, "share of an array taken away per step, times lr; the others' for FLUX.2")

    def __post_init__(self) -> None:
        check(self, "beta1", 0, 0.99999999)
        check(self, "beta2", 0, 0.99999999)
        check(self, "weight_decay", 0)


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves. Nothing depends on `steps`, so that a run can be made longer without changing its past."""

    shape: Literal["constant", "linear", "cosine"] = setting("constant", "after the warm-up: constant, or down to the floor")
    warmup_steps: int = setting(100, "steps in which the rate rises to lr; AdamW's second moments need about so many")
    decay_steps: int = setting(1000, "steps from lr down to the floor, for linear and cosine; then it stays there")
    floor: float = setting(0.0, "where linear and cosine end, as a share of lr")

    def __post_init__(self) -> None:
        check(self, "warmup_steps", 0)
        check(self, "decay_steps", 1)
        check(self, "floor", 0, 1)


@dataclass(frozen=True)
class NoiseConfig:
    """Which noise levels are trained. Middle levels teach most; the shift moves them up, as more pixels bear more noise."""

    base: Literal["logit_normal", "uniform"] = setting("logit_normal", "before the shift; what most trainers of FLUX.2 use")
    mean: float = setting(0.0, "of the logit of sigma, for logit_normal: above 0 leans to noise")
    std: float = setting(1.0, "of the logit of sigma, for logit_normal")
    shift: Literal["resolution", "static", "none"] = setting(
        "resolution", "resolution: FLUX.1's line, 1.9 at 512 px, 3.2 at 1024 px"
    )
    shift_factor: float = setting(3.0, "S of the static shift; 1 is none")

    def __post_init__(self) -> None:
        check(self, "std", 1e-6)
        check(self, "shift_factor", 1e-6)


@dataclass(frozen=True)
class TrainConfig:
    """Section [train]."""

    steps: int = selects(1500, "optimizer steps in all; raise it later and the run goes on from where it ended")
    seed: int = setting(0, "of every draw: order, noise, noise levels, captions, the adapter's start")
    batch_size: int = setting(1, "samples computed at once, of one shape each")
    accumulate: int = setting(1, "batches whose gradients make one step: a larger batch in the memory of a small one")
    rank: int = setting(32, "of the adapter: how much it can hold; 16 and 32 are the common ones")
    alpha: float | None = setting(
        None, "the adapter's output is scaled by alpha / rank; unset: the rank, which every reader assumes"
    )
    targets: tuple[str, ...] = setting(
        ("*",), 'which Linears of the blocks, by wildcards: "attn.to_q", "single_transformer_blocks.*"'
    )
    lr: float = setting(1e-4, "learning rate; what most trainers of FLUX.2 agree on")
    clip: float = setting(1.0, "largest global norm of the gradient, to which a larger one is shrunk; 0: never")
    caption_dropout: float = setting(0.05, "share of samples trained with the empty caption, which keeps guidance working")
    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "what the model computes in; float32 on a CPU, where it is faster"
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "AdamW")  # noqa: RUF009
    schedule: ScheduleConfig = setting(ScheduleConfig(), "the learning rate over the steps")  # noqa: RUF009
    noise: NoiseConfig = setting(NoiseConfig(), "the noise levels")  # noqa: RUF009
    checkpoint_every: int = runtime(250, "steps between checkpoints: what a kill can cost, and which adapters can be compared")
    keep_states: int = runtime(2, "newest checkpoints whose optimizer state is kept, twice the adapter's size; adapters all stay")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "rank", "checkpoint_every", "keep_states"):
            check(self, name, 1)
        check(self, "lr", 1e-12)
        check(self, "clip", 0)
        check(self, "caption_dropout", 0, 1)
        if self.alpha is not None:
            check(self, "alpha", 1e-6)


def course_of(ctx: StageContext) -> Course:
    """Everything that the run will draw."""
    c: TrainConfig = ctx.config
    data = usable(ctx)
    order = Order([(crop.width, crop.height) for crop in data.crops], c.batch_size, c.seed, c.accumulate)
    noise = Noise(c.noise.base, c.noise.mean, c.noise.std, c.noise.shift, c.noise.shift_factor)
    return Course(data, c.seed, order, noise, c.caption_dropout)


def snapshot(ctx: StageContext) -> pa.Table:
    """Every pair of crop and caption that may be drawn, and the empty caption: the result depends on all of them."""
    data = usable(ctx)
    pairs = [(crop.latent_id, crop.image_id, caption) for crop in data.crops for caption in crop.captions]
    return pa.Table.from_pylist([{"latent_id": a, "image_id": b, "caption_id": c} for a, b, c in [*pairs, ("", "", data.empty)]])


def wanted_samples(ctx: StageContext) -> pa.Table:
    """(step, sample) of every sample that the run draws."""
    course = course_of(ctx)
    sizes = [sum(course.sizes(step)) for step in range(1, ctx.config.steps + 1)]
    steps = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
    return pa.table({"step": steps, "sample": np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])})


def tokens(x_BCHW: mx.array) -> mx.array:
    """A latent as a sequence, row by row: (B,L,C)."""
    return x_BCHW.reshape(*x_BCHW.shape[:2], -1).swapaxes(1, 2)


def squared_error(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
    """The loss of each sample: (B,), float32."""
    return mx.mean(mx.square(v_BLC.astype(mx.float32) - target_BLC), axis=(1, 2))


def prepare(micro: Micro, guided: bool) -> tuple[dict[str, Any], Callable[[mx.array], mx.array]]:
    """What the model is given, and the loss of its answer. Mixed in float32; the model casts."""
    x0_BLC = tokens(mx.array(micro.x0_BCHW).view(mx.bfloat16)).astype(mx.float32)
    noise_BLC = tokens(mx.array(micro.noise_BCHW))
    sigma_B = mx.array([s.sigma for s in micro.samples], mx.float32)
    sigma_B11 = sigma_B[:, None, None]
    inputs = {
        "x_BLC": (1 - sigma_B11) * x0_BLC + sigma_B11 * noise_BLC,
        "x_ids_L4": flux2.image_ids(*micro.x0_BCHW.shape[2:]),
        "ctx_BTJ": mx.array(micro.ctx_BTJ).view(mx.bfloat16),
        "ctx_ids_T4": flux2.text_ids(micro.ctx_BTJ.shape[1]),
        "timesteps_B": sigma_B,
        "guidance_B": mx.full(sigma_B.shape, GUIDANCE) if guided else None,
    }
    return inputs, functools.partial(squared_error, target_BLC=noise_BLC - x0_BLC)


@dataclass
class Measured:
    """What a step says of itself."""

    losses: list[float]
    norm: float
    finite: bool


class Trainer:
    """The model, the adapter, the optimizer's state, and what one step does to them."""

    def __init__(self, ctx: StageContext, start: Checkpoint | None) -> None:
        c: TrainConfig = ctx.config
        self.model: Any = load_flux2(ctx.weights("transformer"), ctx.family, getattr(mx, c.precision))
        self.targets = lora.choose(self.model.linears(), c.targets, c.rank, c.alpha)
        self.scales = lora.scales(self.targets)
        o = c.optimizer
        self.optimizer = optimizer.AdamW(o.beta1, o.beta2, o.eps, o.weight_decay)
        self.adapter = start.arrays(checkpoint.ADAPTER) if start else lora.init(self.targets, c.seed)
        self.state = start.arrays(checkpoint.OPTIMIZER) if start else self.optimizer.init(self.adapter)
        self.clip = c.clip

    def gradient(self, micros: list[Micro]) -> tuple[mx.array, dict[str, mx.array]]:
        """The losses of all samples, and the gradient of their mean whatever the sizes of the micro-batches."""
        count = sum(len(micro.samples) for micro in micros)
        total: dict[str, mx.array] = {}
        losses = []
        for micro in micros:
            inputs, loss = prepare(micro, self.model.config.guidance_embeds)
            losses_B, grads = loss_and_grads(self.model, self.adapter, self.scales, inputs, loss)
            losses.append(losses_B)
            if len(micros) == 1:
                return losses_B, grads
            share = len(micro.samples) / count
            total = {name: share * grad + total.get(name, 0.0) for name, grad in grads.items()}
            mx.eval(total)  # or every micro-batch's gradient would wait for the last
        return mx.concatenate(losses), total

    def step(self, micros: list[Micro], lr: float) -> Measured:
        """One update by the mean over the step's samples; none where anything is not finite."""
        losses, grads = self.gradient(micros)
        norm = optimizer.global_norm(grads)
        finite = mx.isfinite(norm) & mx.all(mx.isfinite(losses))
        adapter, state = self.optimizer.update(self.adapter, optimizer.clip(grads, norm, self.clip), self.state, lr)
        self.adapter = {name: mx.where(finite, value, self.adapter[name]) for name, value in adapter.items()}
        self.state = {name: mx.where(finite, value, self.state[name]) for name, value in state.items()}
        mx.eval(self.adapter, self.state, norm, losses, finite)
        numbers: Any = (losses.tolist(), norm.item(), finite.item())
        return Measured(*numbers)


def train(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Train from the newest checkpoint on. A step's rows come after its checkpoint, so that stored rows imply the result."""
    last = ctx.config.steps
    if not ctx.pending.num_rows and checkpoint.published(ctx.artifacts) == last:
        return
    start, retold = resume(ctx, last)
    if retold:
        yield batch_of(retold)
    if start is None or start.step < last:
        yield from go_on(ctx, start)
        return
    checkpoint.publish(ctx.keep, start)


def resume(ctx: StageContext, last: int) -> tuple[Checkpoint | None, list[dict[str, Any]]]:
    """The newest whole checkpoint whose past is stored or held by checkpoints, and the rows of that past that are not stored."""
    pending = set(zip(ctx.pending["step"].to_pylist(), ctx.pending["sample"].to_pylist(), strict=True))
    every = [saved for saved in checkpoint.found(ctx.artifacts) if saved.step <= last]
    held: dict[tuple[int, int], dict[str, Any]] = {}
    if every and any(step <= every[0].step for step, _ in pending):
        rows = [row for saved in every if saved.whole(checkpoint.ROWS) for row in saved.rows().to_pylist()]
        held = {(row["step"], row["sample"]): row for row in rows}
    for saved in every:
        past = sorted(key for key in pending if key[0] <= saved.step)
        if saved.whole(checkpoint.ADAPTER, checkpoint.OPTIMIZER, checkpoint.ROWS) and all(key in held for key in past):
            return saved, [held[key] for key in past]
    return None, []


def go_on(ctx: StageContext, start: Checkpoint | None) -> Iterator[pa.RecordBatch]:
    """Train the steps after `start`, or all of them."""
    config: TrainConfig = ctx.config
    s = config.schedule
    schedule = Schedule(config.lr, s.shape, s.warmup_steps, s.decay_steps, s.floor)
    course = course_of(ctx)
    steps = range(start.step + 1 if start else 1, config.steps + 1)
    warn(ctx)
    trainer = Trainer(ctx, start)
    introduce(ctx, course, trainer, steps)
    skipped = start.state["skipped"] if start else 0
    since: list[dict[str, Any]] = []
    began = time.perf_counter()
    for step, micros, waited in Feed(ctx, course, steps):
        lr = schedule.at(step)
        measured = trainer.step(micros, lr)
        now = time.perf_counter()
        around = {"step": step, "lr": lr, "grad_norm": measured.norm, "seconds": now - began, "read_seconds": waited}
        began = now
        rows = rows_of(micros, course.data.text_rows, measured, around)
        since += rows
        skipped = 0 if measured.finite else skipped + 1
        health(ctx, trainer, step, skipped)
        stop = ctx.stop()
        if stop or step % config.checkpoint_every == 0 or step == config.steps:
            keep(ctx, trainer, step, since, {"skipped": skipped})
            since = []
        yield batch_of(rows)
        ctx.progress(step, config.steps, "step")
        if stop:
            return


def warn(ctx: StageContext) -> None:
    """Say what is legal but seldom meant."""
    if ctx.family.distilled:
        ctx.say(f"{ctx.family.title}: LoRAs are trained on the base model and used on this one; here they may not learn well")
    if ctx.config.precision == "bfloat16" and mx.default_device() == mx.cpu:
        ctx.say('bfloat16 is slow on a CPU; [train] precision = "float32" is faster')


def introduce(ctx: StageContext, course: Course, trainer: Trainer, steps: range) -> None:
    """Say what is trained, on what."""
    size = sum(value.size for value in trainer.adapter.values())
    crops = course.data.crops
    images, shapes = {crop.image_id for crop in crops}, {(crop.width, crop.height) for crop in crops}
    ctx.say(
        f"rank {ctx.config.rank} on {len(trainer.targets)} Linears: {size / 1e6:.2f} M values; steps {steps.start} to {steps[-1]}"
    )
    ctx.say(f"{len(crops)} crops of {len(images)} images in {len(shapes)} shapes, {course.order.per_epoch} batches an epoch")


def health(ctx: StageContext, trainer: Trainer, step: int, skipped: int) -> None:
    """End a run that cannot learn, in one line."""
    if skipped:
        ctx.say(f"step {step}: the loss or the gradient is not finite; the step is skipped")
    if skipped >= SKIPS:
        raise ValueError(
            f"train: stopped at step {step}: {skipped} steps in a row had no finite loss and gradient; lower [train] lr "
            f'({ctx.config.lr:g}), or try precision = "float32"'
        )
    if step == HEALTH and not lora.moved(trainer.adapter).item():
        raise ValueError(f"train: stopped at step {step}: the adapter has not moved; raise [train] lr ({ctx.config.lr:g})")


def keep(ctx: StageContext, trainer: Trainer, step: int, since: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Keep a checkpoint, and after the last step the result."""
    alpha = trainer.targets[0].alpha
    about = {**ctx.provenance, "family": ctx.family.name, "rank": str(ctx.config.rank), "alpha": f"{alpha:g}"}
    saved = checkpoint.save(ctx.keep, step, trainer.adapter, trainer.state, TRAIN.table(since), about, facts)
    checkpoint.prune(ctx.artifacts, ctx.config.keep_states)
    if step == ctx.config.steps:
        checkpoint.publish(ctx.keep, saved)


def rows_of(micros: list[Micro], text_rows: dict[str, int], measured: Measured, around: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per sample of a step; `around` is what they share."""
    around = {**around, "peak_bytes": mx.get_peak_memory()}
    samples = [sample for micro in micros for sample in micro.samples]
    return [
        {
            "sample": s.number,
            "epoch": s.epoch,
            "image_id": s.crop.image_id,
            "latent_id": s.crop.latent_id,
            "caption_id": s.caption_id,
            "width": s.crop.width,
            "height": s.crop.height,
            "dropped": s.dropped,
            "sigma": s.sigma,
            "loss": loss,
            "tokens": s.crop.tokens + text_rows[s.caption_id],
            **around,
        }
        for s, loss in zip(samples, measured.losses, strict=True)
    ]


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows as one record batch."""
    return TRAIN.table(rows).combine_chunks().to_batches()[0]


STAGE = Stage(
    reads=(LATENTS, EMBEDDINGS, BUCKETS, CAPTIONS, IMAGES),
    writes=TRAIN,
    loads=("transformer",),
    config=TrainConfig,
    wants=wanted_samples,
    run=train,
    snapshot=snapshot,
    result="adapter.safetensors",
)
