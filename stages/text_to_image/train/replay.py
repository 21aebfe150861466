"""A step of a training run once more, alone: its losses are those in the table, to the bit on the machine that wrote them.

For questions after the fact: what did this step see, and why was its loss what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stages.stage import StageContext
from stages.text_to_image.train import memory_plan
from stages.text_to_image.train.loader import Loader, TrainingSampler
from stages.text_to_image.train.stage import sampler_of, schedule_of
from stages.text_to_image.train.trainer import Trainer
from stages.tuner import checkpoint
from stages.tuner.blockwise.device import limit_command_buffers
from stages.tuner.checkpoint import Checkpoint


@dataclass(frozen=True)
class Replayed:
    """One sample of the step: its loss now, and the loss in the table; None where the table does not have it."""

    sample: int
    image_id: str
    caption_id: str
    sigma: float
    loss: float
    logged: float | None


def replay(ctx: StageContext, step: int) -> list[Replayed]:
    """Take the steps from the newest checkpoint before `step` on, or from the start, and give the losses of `step`.

    Writes nothing. ValueError for a step that the run does not have.
    """
    if not 1 <= step <= ctx.config.steps:
        raise ValueError(f"replay: the run has the steps 1 to {ctx.config.steps}, and no step {step}")
    start, sampler = before(ctx, step), sampler_of(ctx)
    chosen = fitted(ctx, sampler, start)
    trainer, schedule = Trainer(ctx, start), schedule_of(ctx.config)
    trainer.plan, trainer.piece, trainer.bound = chosen.plan, chosen.piece, chosen.bound
    losses: list[float] = []
    samples = []
    for at, micros, _ in Loader(ctx, sampler, range(start.step + 1 if start else 1, step + 1)):
        samples = [s for micro in micros for s in micro.samples]
        losses = trainer.step(micros, schedule.at(at)).losses
        ctx.progress(at, step, "steps")
    rows = ctx.stored.select(["step", "split", "sample", "loss"]).to_pylist()
    logged = {row["sample"]: row["loss"] for row in rows if row["step"] == step and row["split"] == "train"}
    return [
        Replayed(s.number, s.crop.image_id, s.caption_id, s.sigma, loss, logged.get(s.number))
        for s, loss in zip(samples, losses, strict=True)
    ]


def before(ctx: StageContext, step: int) -> Checkpoint | None:
    """The newest whole checkpoint before a step."""
    earlier = (saved for saved in checkpoint.found(ctx.artifacts) if saved.step < step)
    return next((saved for saved in earlier if saved.whole(checkpoint.ADAPTER, checkpoint.OPTIMIZER)), None)


def fitted(ctx: StageContext, sampler: TrainingSampler, start: Checkpoint | None) -> memory_plan.MemoryPlan:
    """As the run computed the step: with the plan that its checkpoints say, whatever the settings say now, if it fits."""
    known = start or next(iter(checkpoint.found(ctx.artifacts)[-1:]), None)
    asked = replace(ctx, config=replace(ctx.config, memory="auto")) if known else ctx
    limit_command_buffers()  # before anything asks MLX for an array
    chosen = memory_plan.choose(asked, sampler, known)
    return replace(chosen, piece=start.state.get("piece")) if start else chosen
