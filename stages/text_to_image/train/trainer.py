"""One training step: a batch of rows from disk in, the next adapter and optimizer state out.

B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features; words are bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.flux2 import transformer as flux2
from stages.models.flux2.adapter_formats import read_adapter
from stages.models.flux2.load import load_flux2, sizes
from stages.stage import StageContext
from stages.text_to_image.train.config import LossConfig, TrainConfig, longest_first
from stages.text_to_image.train.loader import MicroBatch
from stages.tuner import checkpoint, quantize
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import check_initial, fresh_adapter, start_from_adapter, target_weights
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.adapters.targets import Target, matches_pattern, select_targets, similar_names, target_scales
from stages.tuner.blockwise.backprop import BlockwiseBackprop, Plan, loss_and_grads
from stages.tuner.blockwise.device import dispatch, live_memory_limit
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.diffusion import loss, weighting
from stages.tuner.optimizers import ema
from stages.tuner.optimizers.step import OptimizerStep, global_norm, is_finite

OUTSIDE_BITS = 8  # the least of a Linear outside the blocks: those steer every block
GUIDANCE = 1.0  # what a family with guidance embedded is trained at; every trainer but one does

Arrays = dict[str, mx.array]
Loss = Callable[[mx.array], mx.array]
Learnt = tuple[Arrays, dict[str, float]]  # an adapter's arrays, and the scale of each Linear


def tokens(x_BCHW: mx.array) -> mx.array:
    """A latent as a sequence, row by row: (B,L,C)."""
    return x_BCHW.reshape(*x_BCHW.shape[:2], -1).swapaxes(1, 2)


def prepare(micro: MicroBatch, guided: bool, c: LossConfig) -> tuple[dict[str, Any], Loss]:
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
    return inputs, loss_of(micro, noise_BLC - x0_BLC, c)


def loss_of(micro: MicroBatch, target_BLC: mx.array, c: LossConfig) -> Loss:
    """What is asked of the answer. Arrays are keywords, so that the loss is compiled with the last blocks."""
    given = {"target_BLC": target_BLC}
    if c.weight != "none":
        sigma_B = np.array([s.sigma for s in micro.samples])
        given["weight_B"] = mx.array(weighting.weight(c.weight, sigma_B).astype(np.float32))
    if micro.mask_BL is not None:
        given["mask_BL"] = mx.array(micro.mask_BL)
    if c.kind == "pseudo_huber":
        return functools.partial(loss.pseudo_huber, c=mx.array(c.huber_c, mx.float32), **given)
    return functools.partial(loss.mse, **given)


def load(ctx: StageContext) -> Any:
    """The transformer, its blocks packed while they are read."""
    c: TrainConfig = ctx.config
    return load_flux2(ctx.need("transformer"), ctx.need("family"), getattr(mx, c.precision), packing(c))


def packing(c: TrainConfig) -> Callable[[str, mx.array], Any] | None:
    """What each tensor passes through on its way in; None where no bits are saved."""
    if c.base_bits == 16 and not c.base_bits_for:
        return None
    return lambda name, weight: quantize.pack_if_possible(weight, bits_of(name, c))


def bits_of(name: str, c: TrainConfig) -> int:
    """The bits of a tensor. Outside the blocks few are packed, and none to 4 bits."""
    if "transformer_blocks." not in name:
        return max(c.base_bits, OUTSIDE_BITS) if flux2.packs_outside(name) else 16
    linear = name.removesuffix(".weight")
    return next((own for pattern, own in longest_first(c.base_bits_for).items() if matches_pattern(linear, pattern)), c.base_bits)


def choose(linears: Mapping[str, tuple[int, int]], c: TrainConfig) -> list[Target]:
    """The Linears that are adapted. ValueError for a pattern that names none."""
    for pattern in c.base_bits_for or {}:
        if not any(matches_pattern(name, pattern) for name in linears):
            raise ValueError(f"[train] base_bits_for: {pattern!r} matches no Linear{similar_names(pattern, linears)}")
    own = {"ranks": longest_first(c.rank_for), "alphas": longest_first(c.alpha_for)}
    try:
        return select_targets(linears, c.targets, c.rank, c.alpha, **own, variant=c.variant, rslora=c.rslora, factor=c.factor)
    except ValueError as error:
        raise ValueError(f"[train] {error}") from None


def meta_model(config: flux2.Flux2Config, dtype: mx.Dtype) -> flux2.Flux2:
    """A transformer of arrays that are never computed: it has every name and every shape, and takes no memory."""
    return flux2.Flux2(config, {name: mx.zeros(shape, dtype) for name, shape in config.shapes().items()})


def learnt(ctx: StageContext) -> Learnt | None:
    """The adapter that the run starts from, if there is one. ValueError if it does not fit, which the model's sizes say."""
    c: TrainConfig = ctx.config
    if not c.initial:
        return None
    config = flux2.Flux2Config.from_dict(sizes(ctx.need("transformer"), ctx.need("family").transformer))
    targets = choose(meta_model(config, mx.float32).linears(), c)
    try:
        found, scales = read_adapter(ctx.root / c.initial)
        check_initial(found, scales, targets)
    except ValueError as error:
        raise ValueError(f"[train] initial: {error}") from None
    return found, scales


def optimizer_step_of(c: TrainConfig) -> OptimizerStep:
    """The optimizer, with the average of what it trains where one is kept."""
    made = c.optimizer.made()
    return OptimizerStep(ema.Averaged(made, c.ema.decay) if c.ema else made, c.clip)


def cast_adapter(masters: Stacks, dtype: mx.Dtype, c: TrainConfig) -> Arrays:
    """The adapter as the blocks are given it: cast once for all of a step, but not where every byte counts.

    With a packed base each Linear casts its own, at each visit: more small operations, and no copy that stays.
    """
    return (masters.cast(dtype) if c.base_bits == 16 else masters).unstack()


@dataclass
class StepResult:
    """What a step says of itself."""

    losses: list[float]
    preservation: list[float | None]  # what straying from the base costs each sample; None where it was not asked for
    norm: float
    finite: bool  # what the update is made from; without it there was none
    bounded: bool  # what there is after the update
    ratio: float | None  # of the update's length to the adapter's, where it was asked for


class Trainer:
    """The model, the adapter, the optimizer's state, and what one step does to them."""

    def __init__(self, ctx: StageContext, start: Checkpoint | None) -> None:
        c: TrainConfig = ctx.config
        self.config = c
        before = None if start else learnt(ctx)  # loading takes minutes: what does not fit is refused before
        self.model = load(ctx)
        self.targets = choose(self.model.linears(), c)
        self.scales = target_scales(self.targets)
        self.take = optimizer_step_of(c)
        self.masters = Stacks.of(start.arrays(checkpoint.ADAPTER) if start else self.fresh(before))
        self.state = start.arrays(checkpoint.OPTIMIZER) if start else self.take.init(self.masters)
        mx.eval(self.masters.arrays, self.state)
        self.plan: Plan = "whole"
        self.bound: int | None = None  # bytes that may be live before the next block is dispatched
        self.piece: int | None = None  # image and text tokens computed at once; None: all of a batch
        self.used = 0  # the largest piece of the last step
        self.most: int | None = c.micro_batch if isinstance(c.micro_batch, int) else None  # the same in samples

    @property
    def adapter(self) -> Arrays:
        """The trained arrays, float32, by name: views of the masters, good until the next step."""
        return self.masters.unstack()

    def fresh(self, before: Learnt | None) -> Arrays:
        """The adapter before the first step: one that changes nothing, or what another one has learnt."""
        bases = target_weights(self.model.blocks, self.targets) if self.config.variant == "dora" else None
        made = fresh_adapter(self.targets, self.config.seed, bases)
        return start_from_adapter(*before, self.targets, made, bases) if before else made

    def pieces(self, micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches of a step in the pieces that are computed at once."""
        for micro in micros:
            count = len(micro.samples)
            most = min(self.most or count, count, max(1, self.piece // length(micro)) if self.piece else count)
            self.used = max(self.used, most * length(micro))
            if most >= count:
                yield micro
            else:
                yield from (micro.part(start, start + most) for start in range(0, count, most))

    def gradient(self, micros: list[MicroBatch]) -> tuple[mx.array, Arrays, mx.array]:
        """Of all samples the losses, the gradient of the mean of all that they cost, and what straying costs.

        The gradient is the same whatever the sizes of the pieces. Where nothing holds a sample to the base, straying costs 0.
        """
        count = sum(len(micro.samples) for micro in micros)
        adapter = cast_adapter(self.masters, self.model.dtype, self.config)
        total: Arrays = {}
        losses, strays = [], []
        for micro in self.pieces(micros):
            costs = []
            for losses_B, grads in self.terms(micro, adapter):
                costs.append(losses_B)
                share = len(micro.samples) / count
                if share < 1 or total:
                    for name in grads:  # both are let go array by array: a third copy would be the step's peak
                        grads[name] = share * grads[name].astype(mx.float32) + total.pop(name, 0.0)
                    dispatch(grads)  # or every piece's gradient would wait for the last
                total = grads
            losses.append(costs[0])
            strays.append(costs[1] if len(costs) > 1 else mx.zeros_like(costs[0]))
        return mx.concatenate(losses), total, mx.concatenate(strays)

    def terms(self, micro: MicroBatch, adapter: Arrays) -> Iterator[tuple[mx.array, Arrays]]:
        """What a piece is trained by, each with its gradient: the losses, and where it is asked for, what straying costs."""
        inputs, asked = prepare(micro, self.model.config.guidance_embeds, self.config.loss)
        yield loss_and_grads(self.model, adapter, self.scales, inputs, asked, self.plan)
        if micro.class_BTJ is None or self.config.preservation is None:
            return
        inputs["ctx_BTJ"] = mx.array(micro.class_BTJ).view(mx.bfloat16)
        assert micro.class_B is not None
        weight_B = self.config.preservation.weight * mx.array(micro.class_B)
        strays = functools.partial(loss.preservation, base_BLC=self.base(inputs), weight_B=weight_B)
        yield loss_and_grads(self.model, adapter, self.scales, inputs, strays, self.plan)

    def base(self, inputs: dict[str, Any]) -> mx.array:
        """What the model answers without the adapter."""
        h, shared = self.model.enter(**inputs)
        for block in self.model.blocks:
            h = self.model.block(block.kind)(block.weights, h, shared, lora.adapted_linear({}, {}))
            dispatch(h)
        answer: mx.array = self.model.leave(h, shared)
        dispatch(answer)  # or its graph would stay in that of the gradient
        return answer

    def measure(self, micro: MicroBatch) -> list[float]:
        """The losses of samples as the adapter is now, from which nothing is learnt.

        They are plain mean squares, whatever [train.loss] says, so that runs with other losses can be compared by them.
        """
        with live_memory_limit(self.bound):
            inputs, asked = prepare(micro, self.model.config.guidance_embeds, LossConfig())
            walk = BlockwiseBackprop(self.model, self.adapter, self.scales)
            h, shared = self.model.enter(**inputs)
            for n in range(len(self.model.blocks)):
                h = walk.forward(n, h, shared)
                dispatch(h)
            losses: Any = asked(self.model.leave(h, shared)).tolist()
        found: list[float] = losses
        return found

    @property
    def average(self) -> Arrays | None:
        """The average of the adapter over the steps, if one is kept."""
        return self.take.average(self.masters, self.state) or None

    def step(self, micros: list[MicroBatch], lr: float, ratio: bool = False) -> StepResult:
        """One update by the mean over the step's samples; none where the losses or the gradient are not finite.

        The device is waited for once, at the end, however many pieces there are. Work handed over ahead from one piece into
        the next costs no memory: where they meet, the one has let its activations go, and the other has none yet.
        """
        with live_memory_limit(self.bound):
            return self._step(micros, lr, ratio)

    def _step(self, micros: list[MicroBatch], lr: float, ratio: bool) -> StepResult:
        self.used = 0
        losses, grads, strays = self.gradient(micros)
        before = dict(self.masters.arrays) if ratio else None  # the update takes the arrays that it is given
        sound = mx.all(mx.isfinite(losses))
        self.masters, self.state, norm, done = self.take(self.masters, grads, self.state, lr, sound)
        moved = None if before is None else update_ratio(before, self.masters.arrays)
        bounded = is_finite(self.masters.arrays, self.state)
        mx.eval(self.masters.arrays, self.state, norm, losses, strays, done, bounded, moved)
        held = [one for micro in micros for one in micro.held]
        strayed: Any = strays.tolist()
        costs = [cost if one else None for cost, one in zip(strayed, held, strict=True)]
        of_all = (norm.item(), done.item(), bounded.item(), None if moved is None else moved.item())
        numbers: Any = (losses.tolist(), costs, *of_all)
        return StepResult(*numbers)


def length(micro: MicroBatch) -> int:
    """Tokens of one sample, image and text."""
    return int(micro.x0_BCHW.shape[2] * micro.x0_BCHW.shape[3] + micro.ctx_BTJ.shape[1])


def update_ratio(before: Arrays, after: Arrays) -> mx.array:
    """How long the way from one adapter to the next is, beside the adapter's own length; a scalar."""
    way = global_norm({name: after[name] - before[name] for name in before})
    return way / mx.maximum(global_norm(before), 1e-30)
