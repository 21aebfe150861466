"""What a training run says of itself: its rows, and lines for the user where something looks wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import pyarrow as pa

from schemas.text_to_image.train import TRAIN
from stages.stage import StageContext
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.loader import Sample, TrainingSampler
from stages.text_to_image.train.trainer import StepResult, Trainer
from stages.tuner.adapters import lora

SKIPS = 3  # steps in a row without a finite loss and gradient that end the run
HEALTH = 10  # the step after which every run must have moved its adapter
LOOKS = 100  # steps between two looks at the update's size
RATIOS = (1e-7, 0.1)  # of the update's length to the adapter's: lost in float32's rounding; the adapter made anew in ten steps

Row = dict[str, Any]


def warn(ctx: StageContext) -> None:
    """Say what is legal but seldom meant."""
    if ctx.need("family").distilled:
        ctx.say(
            f"{ctx.need('family').title}: train LoRAs on the base model and use them on this one; here they may not learn well"
        )
    if ctx.config.precision == "bfloat16" and mx.default_device() == mx.cpu:
        ctx.say('bfloat16 is slow on a CPU; [train] precision = "float32" is faster')
    for line in unmatched(ctx.config):
        ctx.say(line)


def unmatched(c: TrainConfig) -> Iterator[str]:
    """Where the schedule and the number of steps do not go together: the one never follows the other, as runs grow."""
    s, end = c.schedule, c.schedule.warmup_steps + c.schedule.decay_steps
    if c.steps <= s.warmup_steps:
        yield f"all {c.steps} steps are warm-up, below the full rate: lower [train.schedule] warmup_steps ({s.warmup_steps})"
    elif s.shape != "constant" and end < c.steps and not s.floor:
        yield f"from step {end} on the rate is 0 and nothing is learnt: raise [train.schedule] decay_steps ({s.decay_steps})"
    elif s.shape != "constant" and end > c.steps:
        yield f"the rate would be down at step {end}, after the last: lower [train.schedule] decay_steps ({s.decay_steps})"


def introduce(ctx: StageContext, sampler: TrainingSampler, trainer: Trainer, steps: range) -> None:
    """Say what is trained, on what, and where the files go that steer it."""
    size = sum(value.size for value in trainer.adapter.values())
    crops, held = sampler.data.crops, sampler.data.held
    images, shapes = {crop.image_id for crop in crops}, {(crop.width, crop.height) for crop in crops}
    aside = f"; {len({crop.image_id for crop in held})} of the images held out" if held else ""
    aside += f"; {sum(crop.mask is not None for crop in crops)} of the crops have a mask" if ctx.config.mask else ""
    ranks = sorted({target.rank for target in trainer.targets})
    adapter = f"{ctx.config.variant} of rank {' to '.join(map(str, sorted({ranks[0], ranks[-1]})))}"
    stretch = f"steps {steps.start} to {steps[-1]}" if steps else "one measurement is left to do"
    ctx.say(f"files named stop, checkpoint or pause in {ctx.artifacts} steer this run")
    ctx.say(f"{adapter} on {len(trainer.targets)} Linears: {size / 1e6:.2g} M values; {stretch}")
    ctx.say(
        f"{len(crops)} crops of {len(images)} images in {len(shapes)} shapes, {sampler.order.per_epoch} batches an epoch{aside}"
    )


def looks(step: int) -> bool:
    """Whether the update's size is looked at after this step."""
    return step % LOOKS == 0 or step in (1, HEALTH)


def health(ctx: StageContext, trainer: Trainer, step: int, skipped: int, measured: StepResult) -> None:
    """End a run that cannot learn, in one line; say what looks wrong."""
    lr = ctx.config.lr
    if not measured.bounded:
        raise ValueError(
            f"train: stopped at step {step}: the update made the adapter infinite, and nothing of it is kept; "
            f"lower [train] lr ({lr:g})"
        )
    if skipped:
        ctx.say(f"step {step}: the loss or the gradient is not finite; the step is skipped")
    if skipped >= SKIPS:
        raise ValueError(
            f"train: stopped at step {step}: {skipped} steps in a row had no finite loss and gradient; lower [train] lr "
            f'({lr:g}), or try precision = "float32"'
        )
    if step == HEALTH and not ctx.config.initial and (still := unmoved(trainer)):
        if len(still) == len(trainer.targets):
            raise ValueError(f"train: stopped at step {step}: the adapter has not moved; raise [train] lr ({lr:g})")
        others = f", nor have {len(still) - 1} other Linears" if len(still) > 1 else ""
        ctx.say(f"step {step}: {still[0]} has not moved{others}; no gradient reaches it, and [train] targets could leave it out")
    if measured.ratio is not None and measured.finite and not RATIOS[0] <= measured.ratio <= RATIOS[1]:
        wrong = "raise" if measured.ratio < RATIOS[0] else "lower"
        ctx.say(f"step {step}: the update is {measured.ratio:.1g} of the adapter's length; {wrong} [train] lr ({lr:g})")


def unmoved(trainer: Trainer) -> list[str]:
    """The Linears that the adapter does not change yet: whose B, or what stands for it, is still zero.

    Where it is not all of them, a run goes on: the others learn, and zeros do no harm. But somebody may wonder.
    """
    adapter = trainer.adapter
    names = [target.name for target in trainer.targets]
    moved: Any = mx.stack([lora.largest_change(lora.arrays_of_linear(adapter, name)) for name in names]).tolist()
    return [name for name, most in zip(names, moved, strict=True) if most == 0]


def rows_of(
    samples: Iterable[Sample], losses: list[float], preservation: list[float | None], text_rows: dict[str, int], around: Row
) -> list[Row]:
    """A row per sample of a step; `around` is what they share."""
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
            "preservation": held,
            "tokens": s.crop.tokens + text_rows[s.caption_id],
            "split": "train",
            **around,
        }
        for s, loss, held in zip(samples, losses, preservation, strict=True)
    ]


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    """Rows as one record batch."""
    return TRAIN.table(rows).combine_chunks().to_batches()[0]


def batches_of(rows: list[Row]) -> list[pa.RecordBatch]:
    """The same; nothing where there are no rows."""
    return [batch_of(rows)] if rows else []
