"""What of a training run fits into memory: the plan, and how much of a batch is computed at once, before a weight is loaded.

The plan changes no row but for the last bits of a gradient, so it is no part of the recipe. For a run to end the same
however often it is stopped, it keeps the plan that it began with: every checkpoint says it, and only a setting or another
device with less memory changes it, which is said.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from stages.models import attention
from stages.models.flux2 import transformer as flux2
from stages.models.flux2.load import sizes
from stages.stage import StageContext
from stages.text_to_image.train import trainer
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.loader import TrainingSampler
from stages.tuner import quantize
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.blockwise import planner
from stages.tuner.blockwise.backprop import Plan
from stages.tuner.blockwise.device import memory_budget
from stages.tuner.blockwise.planner import Estimate
from stages.tuner.checkpoint import Checkpoint

GB = 1e9
BITS = (16, *quantize.PACKED_BITS)  # what base_bits may be, the best first
HEADROOM = 0.9  # of the limit, which a piece twice as large must not pass
STEP = 16  # pixels of a token's side, and so between two resolutions
LEAST = 256  # pixels: no lower resolution is advised
AHEAD = 0.5  # of a block's visit: so much beyond what is expected may be live before the next block waits for the device


@dataclass(frozen=True)
class MemoryPlan:
    """How a run computes its steps. `piece`: tokens at once, where the micro-batch follows memory.

    `limit`: bytes that training may take; `bound`: bytes that may be live before the next block waits for the device.
    """

    plan: Plan
    piece: int | None
    limit: int
    bound: int


@dataclass(frozen=True)
class Batch:
    """The largest of a run: samples, pixels, text rows. `held`: the largest of held-out images, which are only measured."""

    samples: int
    width: int
    height: int
    text: int
    held: Batch | None = None

    @property
    def image(self) -> int:
        """Image tokens of one sample."""
        return self.width // STEP * (self.height // STEP)

    @property
    def length(self) -> int:
        """All tokens of one sample."""
        return self.image + self.text

    @property
    def side(self) -> int:
        """Pixels: the resolution of the largest image, held out or not."""
        return max(STEP * (math.isqrt(self.image - 1) + 1), self.held.side if self.held else 0)

    def within(self, side: int) -> Batch:
        """The same where no image has more tokens than a square of that side."""
        small = self if self.image <= (side // STEP) ** 2 else replace(self, width=side, height=side)
        return replace(small, held=self.held and self.held.within(side))


def largest(sampler: TrainingSampler) -> Batch:
    """The batch that has the most tokens of all that any epoch may have, and that of held-out images with the most.

    A held-out image comes at several levels, so that few fill a batch.
    """
    text = max(sampler.data.text_rows.values())
    most: Counter[tuple[int, int]] = Counter()  # crops of each shape in an epoch
    for crop in sampler.data.crops:
        most[crop.width, crop.height] += math.ceil(crop.rate)
    size = sampler.order.batch_size
    trained = [Batch(min(size, count), *shape, text) for shape, count in most.items()]
    held = [Batch(size, crop.width, crop.height, text) for crop in sampler.data.held]

    def tokens(batch: Batch) -> tuple[int, int]:
        return batch.samples * batch.length, batch.width

    return replace(max(trained, key=tokens), held=max(held, key=tokens, default=None))


class MemoryEstimator:
    """What a run with these settings would need, asked of a transformer's shapes alone."""

    def __init__(self, c: TrainConfig, config: flux2.Flux2Config) -> None:
        self.c = c
        self.dtype: Any = getattr(mx, c.precision)
        packed = {name: (shape, trainer.bits_of(name, c)) for name, shape in config.shapes().items()}
        self.weights = planner.weight_bytes(packed.values(), self.dtype.size)
        inside = [packed[name] for name in packed if "transformer_blocks." in name]
        self.unpacked = planner.unpacked_bytes(inside, self.dtype.size)
        self.meta_model = trainer.meta_model(config, self.dtype)
        self.targets = trainer.choose(self.meta_model.linears(), c)
        adapter = {t.name + end: mx.zeros(shape) for t in self.targets for end, shape in t.shapes.items()}
        self.adapter = sum(value.nbytes for value in adapter.values())
        optimizer_step = trainer.optimizer_step_of(c)
        stacked = Stacks.of(adapter)
        self.update = optimizer_step.working_bytes(stacked)
        self.state = sum(value.nbytes for value in optimizer_step.init(stacked).values())

    def estimate(self, batch: Batch, samples: int) -> Estimate:
        """What so many samples at once need."""
        config, B = self.meta_model.config, samples
        inputs = {
            "x_BLC": mx.zeros((B, batch.image, config.in_channels)),
            "x_ids_L4": flux2.image_ids(batch.height // STEP, batch.width // STEP),
            "ctx_BTJ": mx.zeros((B, batch.text, config.joint_attention_dim)),
            "ctx_ids_T4": flux2.text_ids(batch.text),
            "timesteps_B": mx.zeros((B,)),
            "guidance_B": mx.zeros((B,)),
        }
        more = {"unpacked": self.unpacked, **self.scores(B, batch.length)}
        if batch.held:
            more["validation"] = self.estimate(batch.held, min(batch.held.samples, self.c.measured_at_once)).forward_peak
        # What the pieces before it add up to lies there beside a piece's own gradient, until the optimizer takes it as its own.
        summed = self.adapter if self.several(batch, samples) else 0
        kept, update = self.state + summed, self.update - summed
        return planner.estimate(self.meta_model, inputs, self.weights, self.targets, kept, optimizer_work=update, **more)

    def several(self, batch: Batch, samples: int) -> bool:
        """Whether a step adds up gradients: of several batches, of pieces of one, or of the loss and of what straying costs."""
        return self.c.accumulate > 1 or samples < batch.samples or self.c.preservation is not None

    def scores(self, B: int, S: int) -> dict[str, int]:
        """Bytes of attention's scores: none where it is fused, a chunk's where it goes by chunks."""
        config = self.meta_model.config
        q_BHSK = mx.zeros((B, config.num_attention_heads, S, config.attention_head_dim), self.dtype)
        if attention.fused_gradient(q_BHSK):
            return {}
        whole = B * config.num_attention_heads * S * S * self.dtype.size
        chunked = attention.chunk_rows(q_BHSK, q_BHSK) < S
        return {"scores": min(whole, attention.CHUNK_BYTES), "saved_scores": 0 if chunked else whole}


def choose(ctx: StageContext, sampler: TrainingSampler, start: Checkpoint | None) -> MemoryPlan:
    """The plan and the piece of this run. ValueError in one line, with what would fit, if nothing does."""
    c: TrainConfig = ctx.config
    config = flux2.Flux2Config.from_dict(sizes(ctx.need("transformer"), ctx.need("family").transformer))
    ask, batch, limit = MemoryEstimator(c, config), largest(sampler), memory_budget(c.memory_gb)
    begun = start.state.get("plan") if start else None
    samples, plan, needs = settle(ask, batch, limit, begun)
    if begun not in (None, plan):
        ctx.say(f"the run began with the plan {begun} and goes on with {plan}: the same gradients up to rounding, not to the bit")
    piece = (start.state.get("piece") if start else None) or samples * batch.length if c.micro_batch == "auto" else None
    blocks = len(ask.meta_model.blocks)
    ctx.say(f"plan {named(plan, blocks)}: about {needs / GB:.2g} GB of {limit / GB:.3g} GB are expected at the peak")
    return MemoryPlan(plan, piece, limit, limit if piece else bound(ask.estimate(batch, samples), plan, limit))


def settle(ask: MemoryEstimator, batch: Batch, limit: int, begun: Plan | None = None) -> tuple[int, Plan, int]:
    """(samples at once, plan, bytes at the peak): what the settings say; else what a run began with, or the fastest that fits.

    ValueError in one line, with what would fit, if nothing does.
    """
    samples, plan, needs = nearest(ask, batch, limit, begun)
    if needs > limit:
        raise ValueError(refusal(ask, batch, plan, needs, limit))
    return samples, plan, needs


def nearest(ask: MemoryEstimator, batch: Batch, limit: int, begun: Plan | None = None) -> tuple[int, Plan, int]:
    """The same, whether it fits or not."""
    c = ask.c
    samples = min(c.micro_batch, batch.samples) if isinstance(c.micro_batch, int) else batch.samples
    if c.micro_batch == "auto":
        while samples > 1 and ask.estimate(batch, samples).peak("blocks") > limit:
            samples = (samples + 1) // 2
    found = ask.estimate(batch, samples)
    asked = min(c.memory, found.blocks) if isinstance(c.memory, int) else c.memory  # there are no more blocks to keep
    plan = asked if asked != "auto" else begun if begun and found.peak(begun) <= limit else fastest(found, limit)
    return samples, plan, found.peak(plan)


def bound(found: planner.Estimate, plan: Plan, limit: int) -> int:
    """Bytes that may be live before the next block waits for the device: work is handed to it ahead so far, and no further.

    Unpacked weights give no room to work ahead in: they come and go within a visit.
    """
    ahead = round(AHEAD * found.block_work) - found.unpacked_work
    return limit if plan == "whole" else min(limit, found.peak(plan) + ahead)


def fastest(found: Estimate, limit: int) -> Plan:
    """The plan with the most blocks kept that needs at most `limit` bytes; blocks where none does."""
    blocks = found.blocks
    fits = [n for n in range(1, blocks + 1) if found.peak(n) <= limit]
    return "blocks" if not fits or fits[-1] == 1 else "whole" if fits[-1] == blocks else fits[-1]


def follow(piece: int, used: int, held: int, peak: int, limit: int) -> int:
    """The next step's piece, in tokens: smaller after a peak above the limit, twice as large where that is sure to fit.

    `used` is the largest piece of the step, `held` the bytes that lie there between steps, `peak` the step's own.
    """
    if peak > limit:
        return max(1, used // 2)
    room = held + 2 * (peak - held) <= HEADROOM * limit
    return 2 * used if room and piece < 2 * used else piece


def named(plan: Plan, blocks: int) -> str:
    """A plan in words."""
    return plan if isinstance(plan, str) else f"{plan} (of {blocks} blocks the last {plan} are not computed twice)"


@dataclass(frozen=True)
class Remedy:
    """Other settings of [train], with the plan that they allow and the bytes that they need at the peak."""

    settings: dict[str, Any]
    plan: Plan
    needs: int

    def __str__(self) -> str:
        """The settings as they stand in project.toml, those of a section behind its name."""
        own = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items() if name != "optimizer"]
        parts = ["[train] " + ", ".join(own)] if own else []
        if method := self.settings.get("optimizer"):
            parts.append(f'[train.optimizer] kind = "{method.kind}"')
        return "; ".join(parts)


def cheaper(c: TrainConfig, batch: Batch) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, each beside those before it, in the order of what they cost: time, then quality."""
    if c.memory not in ("auto", "blocks"):
        yield {"memory": "blocks"}
    most = max(batch.samples, batch.held.samples if batch.held else 0)
    if c.micro_batch != "auto" and min(c.micro_batch or most, most) > 1:
        yield {"micro_batch": 1}
    yield from ({"base_bits": bits} for bits in BITS if bits < c.base_bits)
    if c.optimizer.kind == "adamw":  # another's learning rate would not suit it
        yield {"optimizer": replace(c.optimizer, kind="adamw8bit")}


def mended(ask: MemoryEstimator, batch: Batch, limit: int) -> Remedy:
    """The cheapest settings with which the batch fits, none of them without need; if none do, all that there are."""

    def tried(settings: dict[str, Any]) -> Remedy:
        return Remedy(settings, *nearest(MemoryEstimator(replace(ask.c, **settings), ask.meta_model.config), batch, limit)[1:])

    found = tried({})
    for more in cheaper(ask.c, batch):
        if found.needs > limit:
            found = tried(found.settings | more)
    if found.needs > limit:
        return found
    for name in reversed(found.settings):
        without = tried({other: value for other, value in found.settings.items() if other != name})
        found = without if without.needs <= limit else found
    return found


def refusal(ask: MemoryEstimator, batch: Batch, plan: Plan, needs: int, limit: int) -> str:
    """What does not fit, and the settings that would: a lower resolution only where no other do. Else what comes nearest."""
    found = mended(ask, batch, limit)
    said, least = str(found), found.needs
    sides = range(batch.side - STEP, LEAST - 1, -STEP)
    if least > limit and sides:
        all_else = MemoryEstimator(replace(ask.c, **found.settings), ask.meta_model.config)
        at = bisect_left(sides, True, key=lambda side: nearest(all_else, batch.within(side), limit)[2] <= limit)
        side = sides[min(at, len(sides) - 1)]
        least = nearest(all_else, batch.within(side), limit)[2]
        said = "; ".join(filter(None, (said, f"[buckets] resolutions = [{side}]")))
    would = f"{said} would need {least / GB:.3g} GB" if said else "no setting would need less"
    more = "" if least <= limit else f"{', too much as well' if said else ''}; a smaller family or more memory is wanted"
    return (
        f"train: the plan {plan} needs about {needs / GB:.3g} GB at {batch.width} x {batch.height} px, and may take "
        f"{limit / GB:.3g} GB: {would}{more}"
    )
