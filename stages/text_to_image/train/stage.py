"""train: a LoRA by flow matching, on latents and embeddings read from disk. One row per sample drawn.

x_sigma = (1 - sigma) x0 + sigma noise, and the model is taught the velocity, noise - x0. What a step draws is a function
of (seed, step, sample) alone, and a checkpoint holds all else; so a run that is stopped, killed or made longer ends with
the same bits as one that never was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pyarrow as pa

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.latents import LATENTS
from schemas.text_to_image.train import TRAIN
from stages.hashing import file_sha256
from stages.stage import Stage, StageContext
from stages.text_to_image.train import memory_plan
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.control import Control
from stages.text_to_image.train.dataset import Data, usable
from stages.text_to_image.train.loader import Loader, MicroBatch, TrainingSampler
from stages.text_to_image.train.log import Row, batch_of, batches_of, health, introduce, looks, rows_of, warn
from stages.text_to_image.train.trainer import StepResult, Trainer
from stages.text_to_image.train.validation import Validation
from stages.tuner import checkpoint
from stages.tuner.adapters.targets import adapter_metadata
from stages.tuner.blockwise.device import limit_command_buffers
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.diffusion.noise import SigmaDistribution
from stages.tuner.order import Order
from stages.tuner.schedule import Schedule

Key = tuple[int, str, int]


def data_of(ctx: StageContext) -> Data:
    """The rows that the run trains on."""
    c: TrainConfig = ctx.config
    return usable(ctx, c.data, c.validation, classes=c.preservation is not None, masks=c.mask is not None)


def sampler_of(ctx: StageContext, data: Data | None = None) -> TrainingSampler:
    """Everything that the run will draw."""
    c: TrainConfig = ctx.config
    data = data or data_of(ctx)
    order = Order([(crop.width, crop.height) for crop in data.crops], c.batch_size, c.seed, c.accumulate, data.rates)
    n = c.noise
    scale = {} if n.scale is None else {"scale": n.scale}
    noise = SigmaDistribution(n.base, n.mean, n.std, n.shift, n.shift_factor, **scale)
    classes = c.preservation.every if c.preservation else 0
    return TrainingSampler(data, c.seed, order, noise, c.caption_dropout, n.strata, classes, c.mask.floor if c.mask else 0.0)


def validation_of(ctx: StageContext, data: Data) -> Validation | None:
    """What the run is measured by, if it is."""
    c: TrainConfig = ctx.config
    return Validation(data.held, c.validation, c.measured_at_once, c.mask.floor if c.mask else 0.0) if c.validation else None


def schedule_of(c: TrainConfig) -> Schedule:
    """The learning rate over the steps."""
    s = c.schedule
    return Schedule(c.lr, s.shape, s.warmup_steps, s.decay_steps, s.floor)


def last_of(ctx: StageContext, validation: Validation | None) -> int:
    """The last step, as far as the stored rows say."""
    steps: int = ctx.config.steps
    return validation.ends(ctx.stored, steps) if validation else steps


def snapshot(ctx: StageContext) -> pa.Table:
    """All that the result depends on: every pair of crop and caption that may be drawn, and how; the adapter to start from."""
    data = data_of(ctx)
    facts = [("", crop.latent_id, f"rate {crop.rate!r}") for crop in data.crops if crop.rate != 1]
    facts += [("", crop.latent_id, "held out") for crop in data.held]
    if ctx.config.initial:
        file = ctx.root / ctx.config.initial
        if not file.is_file():
            raise ValueError(f"[train] initial: there is no file {file}")
        facts.append(("", file_sha256(file), "initial"))
    rows = [{"latent_id": a, "image_id": b, "caption_id": c} for a, b, c in [*data.pairs(), *facts]]
    return pa.Table.from_pylist(rows)


def wanted_samples(ctx: StageContext) -> pa.Table:
    """(step, split, sample) of every sample that the run draws, and of every one that it is measured by."""
    data = data_of(ctx)
    sampler, validation = sampler_of(ctx, data), validation_of(ctx, data)
    last = last_of(ctx, validation)
    sizes = [sum(sampler.sizes(step)) for step in range(1, last + 1)]
    steps = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
    samples = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    drawn = pa.table({"step": steps, "split": ["train"] * len(steps), "sample": samples})
    return pa.concat_tables([drawn, validation.wanted(last)]) if validation else drawn


def train(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Train from the newest checkpoint on. A step's rows come after its checkpoint, so that stored rows imply the result."""
    control = Control(ctx)
    data = data_of(ctx)
    validation = validation_of(ctx, data)
    last = last_of(ctx, validation)
    best = validation.best(ctx.stored, last) if validation else None
    if not ctx.pending.num_rows and checkpoint.is_published(ctx.artifacts, last, best):
        return
    start, retold = resume(ctx, last)
    if retold:
        yield batch_of(retold)
    past = [row for row in ctx.stored.to_pylist() if start and row["step"] <= start.step] + retold
    run = Run(ctx, control, sampler_of(ctx, data), validation, start, past)
    if start and start.step >= run.last and not run.owes:
        run.publish(start)
    else:
        yield from run.go()


def resume(ctx: StageContext, last: int) -> tuple[Checkpoint | None, list[Row]]:
    """The newest whole checkpoint whose past is stored or held by checkpoints, and the rows of that past that are not stored.

    Its own measurement may be missing, if it was broken off: it is done again. That of the last step needs no optimizer
    state: there is no step after it.
    """
    pending = {key_of(row) for row in ctx.pending.to_pylist()}
    every = [saved for saved in checkpoint.found(ctx.artifacts) if saved.step <= last]
    held: dict[Key, Row] = {}
    if every and any(step <= every[0].step for step, _, _ in pending):
        rows = [row for saved in every if saved.whole(checkpoint.ROWS) for row in saved.rows().to_pylist()]
        held = {key_of(row): row for row in rows}
    for saved in every:
        past = sorted(key for key in pending if key[0] <= saved.step)
        lost = [key for key in past if key not in held]
        names = set(saved.state["files"]) - ({checkpoint.OPTIMIZER} if saved.step == last and not lost else set())
        if saved.whole(*names) and all((step, split) == (saved.step, "validation") for step, split, _ in lost):
            if saved is not every[0]:
                ctx.say(f"the checkpoint of step {every[0].step} is not whole; the run goes on from that of step {saved.step}")
            return saved, [held[key] for key in past if key in held]
    if ctx.stored.num_rows:
        ctx.say("no checkpoint is left from which the run could go on; it begins again, and will end the same")
    return None, []


def key_of(row: Row) -> Key:
    """A row's key."""
    return row["step"], row["split"], row["sample"]


@dataclass
class Run:
    """The steps after `start`, or all of them."""

    ctx: StageContext
    control: Control
    sampler: TrainingSampler
    validation: Validation | None
    start: Checkpoint | None
    past: list[Row]  # all up to `start`
    measured: list[Row] = field(default_factory=list)  # every row of a whole measurement so far
    owes: bool = False  # the measurement of the last step taken was broken off
    since: list[Row] = field(default_factory=list)  # rows that no checkpoint holds yet
    skipped: int = 0  # steps in a row that were not finite
    peak: int = 0  # bytes, before MLX's own peak was last set back
    last: int = 0  # the last step, as far as is known
    best: int | None = None  # the step that measured best
    limit: int = 0  # bytes that training may take

    def __post_init__(self) -> None:
        self.measured = [row for row in self.past if row["split"] == "validation"]
        if self.start and self.validation and self.validation.due(self.start.step):
            earlier = [row for row in self.measured if row["step"] < self.start.step]
            if len(self.measured) - len(earlier) < self.validation.count:
                self.measured, self.owes = earlier, True
        self.judge()

    def judge(self) -> None:
        """What the measurements so far decide."""
        self.last = self.ctx.config.steps
        if self.validation and self.measured:
            rows = TRAIN.table(self.measured)
            self.last, self.best = self.validation.ends(rows, self.last), self.validation.best(rows, self.last)

    def go(self) -> Iterator[pa.RecordBatch]:
        """Train, step by step."""
        ctx, c, control, schedule = self.ctx, self.ctx.config, self.control, schedule_of(self.ctx.config)
        steps = range(self.start.step + 1 if self.start else 1, c.steps + 1)
        self.trainer = trainer = self.ready(steps)
        if control.stopped():
            return
        yield from batches_of(self.begin())
        if control.ending:
            return
        if self.start and self.start.step >= self.last:
            self.publish(self.start)
            return
        began = time.perf_counter()
        for step, micros, waited in Loader(ctx, self.sampler, steps):
            lr = schedule.at(step)
            measured = self.step(micros, lr, look=looks(step) and lr > 0)
            now = time.perf_counter()
            around: Row = {"step": step, "lr": lr, "grad_norm": measured.norm, "seconds": now - began, "read_seconds": waited}
            around["peak_bytes"] = max(self.peak, mx.get_peak_memory())
            samples = [s for micro in micros for s in micro.samples]
            rows = rows_of(samples, measured.losses, measured.preservation, self.text_rows, around)
            self.since += rows
            self.skipped = 0 if measured.finite else self.skipped + 1
            health(ctx, trainer, step, self.skipped, measured)
            rows += self.measure(around)
            began = time.perf_counter()
            control.step()
            if control.saves() or step % c.checkpoint_every == 0 or step >= self.last or step == self.best:
                self.keep(step)
            yield from batches_of(rows)
            ctx.progress(step, self.last, "step")
            control.wait()
            if control.ending or step >= self.last:
                return

    def ready(self, steps: range) -> Trainer:
        """The model and all that is trained, loaded; what is said before the first step."""
        ctx = self.ctx
        warn(ctx)
        limit_command_buffers()  # before anything asks MLX for an array
        chosen = memory_plan.choose(ctx, self.sampler, self.start)
        trainer = Trainer(ctx, self.start)
        trainer.plan, trainer.piece, trainer.bound = chosen.plan, chosen.piece, chosen.bound
        self.limit = chosen.limit
        self.skipped = self.start.state["skipped"] if self.start else 0
        introduce(ctx, self.sampler, trainer, steps)
        return trainer

    def step(self, micros: list[MicroBatch], lr: float, look: bool) -> StepResult:
        """One step of the trainer. Where the micro-batch follows memory, the next one's is found from the peak of this one."""
        trainer = self.trainer
        if trainer.piece is None:
            return trainer.step(micros, lr, look)
        self.peak = max(self.peak, mx.get_peak_memory())
        mx.reset_peak_memory()
        measured = trainer.step(micros, lr, look)
        piece = memory_plan.follow(trainer.piece, trainer.used, mx.get_active_memory(), mx.get_peak_memory(), self.limit)
        if piece != trainer.piece:
            self.ctx.say(f"the micro-batch is now {piece} tokens, {'fewer' if piece < trainer.piece else 'more'} than before")
        trainer.piece = piece
        return measured

    @property
    def text_rows(self) -> dict[str, int]:
        """Rows of each caption's embedding."""
        return self.sampler.data.text_rows

    def begin(self) -> list[Row]:
        """The measurement before the first step; where that of the step that the run goes on from was broken off, that one."""
        if not self.start:
            return self.measure({"step": 0, "lr": 0.0, "grad_norm": 0.0, "peak_bytes": mx.get_peak_memory()})
        if not self.owes:
            return []
        trained = next(row for row in self.past if (row["step"], row["split"]) == (self.start.step, "train"))
        return self.measure({name: trained[name] for name in ("step", "lr", "grad_norm", "peak_bytes")})

    def measure(self, around: Row) -> list[Row]:
        """The rows of a measurement, where one is due after this step; none where the run is to end before it is done."""
        if not self.validation or not self.validation.due(around["step"]):
            return []
        rows: list[Row] = []
        began = time.perf_counter()
        for micro in self.validation.load(self.ctx):
            self.owes = self.control.stopped()
            if self.owes:
                return []
            losses = self.trainer.measure(micro)
            seconds = {"seconds": time.perf_counter() - began, "read_seconds": 0.0, "split": "validation"}
            rows += rows_of(micro.samples, losses, [None] * len(losses), self.text_rows, around | seconds)
            began = time.perf_counter()
        self.measured += rows
        self.since += rows
        self.judge()
        step, mean = around["step"], self.validation.means(TRAIN.table(rows))[around["step"]]
        self.ctx.say(f"step {step}: validation loss {mean:.4f}{', the best so far' if step == self.best else ''}")
        return rows

    def keep(self, step: int) -> None:
        """Keep a checkpoint, and after the last step the result."""
        ctx, trainer = self.ctx, self.trainer
        about = {**ctx.provenance, "family": ctx.need("family").name, **adapter_metadata(trainer.targets)}
        facts = {"skipped": self.skipped, "plan": trainer.plan, "piece": trainer.piece}
        rows = TRAIN.table(self.since)
        saved = checkpoint.save(ctx.write_artifact, step, trainer.adapter, trainer.state, rows, about, facts, trainer.average)
        self.since = []
        checkpoint.prune(ctx.artifacts, step, ctx.config.keep_states)
        if step >= self.last and not self.owes:
            self.publish(saved)

    def publish(self, saved: Checkpoint) -> None:
        """Put the result on top, with the best adapter beside it; say so where patience ended the run."""
        ctx = self.ctx
        if saved.step < ctx.config.steps:
            patience = ctx.config.validation.patience
            ctx.say(
                f"ended after step {saved.step}: {patience} measurements in a row were no better ([train.validation] patience)"
            )
        kept = next((found for found in checkpoint.found(ctx.artifacts) if found.step == self.best), None)
        checkpoint.publish(ctx.write_artifact, saved, kept)


STAGE = Stage(
    reads=(LATENTS, EMBEDDINGS, BUCKETS, CAPTIONS, IMAGES),
    writes=TRAIN,
    config=TrainConfig,
    needs=("family", "transformer"),
    wants=wanted_samples,
    run=train,
    snapshot=snapshot,
    divisible=False,
    result="adapter.safetensors",
)
