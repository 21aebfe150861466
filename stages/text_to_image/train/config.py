"""[train]: every setting of a training run. What is absent is off; a section that is there is on, with the field's defaults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stages.settings import runtime, selects, setting
from stages.text_to_image.train.selection import DataConfig, MaskConfig, ValidationConfig
from stages.tuner.adapters.targets import Variant
from stages.tuner.diffusion.noise import Base, Shift
from stages.tuner.diffusion.weighting import WeightName
from stages.tuner.optimizers.methods import MethodName, make_optimizer
from stages.tuner.optimizers.protocol import Method
from stages.tuner.quantize import Bits


def check(section: Any, name: str, low: float, high: float = math.inf) -> None:
    """Refuse a value outside low .. high; None is no value."""
    value = getattr(section, name)
    if value is not None and not low <= value <= high:
        raise ValueError(
            f"{name}: {value} is wrong; {low:g} " + ("or more" if high == math.inf else f"to {high:.9g}") + " is wanted"
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """[train.optimizer]. A number that is unset is the method's own; one that the method does not have is refused."""

    kind: MethodName = setting(  # noqa: RUF009
        "adamw", "adamw8bit: a quarter of its memory; adafactor: almost none; lion: one moment; prodigy: finds its own rate"
    )
    beta1: float | None = setting(None, "decay of the mean of gradients; unset: the method's own")
    beta2: float | None = setting(None, "decay of the mean of their squares; unset: the method's own")
    eps: float | None = setting(None, "added to the root, so that a zero gradient divides by something; unset: the method's own")
    d_coef: float | None = setting(None, "prodigy: factor of its rate; 0.5 slower, 2 faster; unset: the method's own")
    weight_decay: float = setting(1e-4, "share of an array taken away per step, times lr; the others' for FLUX.2")

    def __post_init__(self) -> None:
        self.made()

    def made(self) -> Method:
        """The optimizer itself. ValueError for a number that does not suit it."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "kind"}
        return make_optimizer(self.kind, **{name: value for name, value in numbers.items() if value is not None})


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

    base: Base = setting(  # noqa: RUF009
        "logit_normal", "before the shift; what most trainers of FLUX.2 use. high_noise: composition; low_noise: texture"
    )
    mean: float = setting(0.0, "of the logit of sigma, for logit_normal: above 0 leans to noise")
    std: float = setting(1.0, "of the logit of sigma, for logit_normal")
    scale: float | None = setting(None, "of mode; the paper's 1.29 if unset")
    shift: Shift = setting("resolution", "resolution: FLUX.1's line, 1.9 at 512 px, 3.2 at 1024 px")  # noqa: RUF009
    shift_factor: float = setting(3.0, "S of the static shift; 1 is none")
    strata: int = setting(1, "so many steps in a row cover the levels evenly, for short runs; 1: independent draws")

    def __post_init__(self) -> None:
        check(self, "std", 1e-6)
        check(self, "scale", -0.999, 1.75)
        if self.scale is not None and self.base != "mode":
            raise ValueError(f'scale: base = "{self.base}" has none; leave it out, or choose base = "mode"')
        check(self, "shift_factor", 1e-6)
        check(self, "strata", 1)


@dataclass(frozen=True)
class LossConfig:
    """[train.loss]: what a prediction costs."""

    kind: Literal["mse", "pseudo_huber"] = setting("mse", "pseudo_huber: large errors count less, for data with outliers")
    huber_c: float = setting(0.1, "pseudo_huber: the error from which on it grows linearly")
    weight: WeightName = setting(  # noqa: RUF009
        "none", "by the noise level: bell, half_bell and measured are ai-toolkit's linear_timesteps, ..2 and weighted"
    )

    def __post_init__(self) -> None:
        check(self, "huber_c", 1e-6)


@dataclass(frozen=True)
class PreservationConfig:
    """[train.preservation]: hold what the class word means, so that not every cat becomes this cat (DOP).

    Costs a pass of the bare base and a second gradient at the steps where it is asked for.
    """

    weight: float = setting(1.0, "of the difference to the base, beside the loss; ai-toolkit's")
    every: int = setting(1, "steps from one to the next: 2 costs half and holds half as firmly")

    def __post_init__(self) -> None:
        check(self, "weight", 1e-6)
        check(self, "every", 1)


@dataclass(frozen=True)
class EmaConfig:
    """[train.ema]: also keep an average of the adapter over the steps, where samples swing from checkpoint to checkpoint."""

    decay: float = setting(0.99, "0.99 remembers some hundred steps, right for a thousand; 0.999 wants ten thousand")

    def __post_init__(self) -> None:
        check(self, "decay", 0, 0.9999999)


@dataclass(frozen=True)
class TrainConfig:
    """Section [train]."""

    steps: int = selects(1500, "optimizer steps in all; raise it later and the run goes on from where it ended")
    seed: int = setting(0, "of every draw: order, noise, noise levels, captions, the adapter's start")
    batch_size: int = setting(1, "samples whose gradients are computed together, of one shape each")
    accumulate: int = setting(1, "batches whose gradients make one step: a larger batch in the memory of a small one")
    rank: int = setting(32, "of the adapter: how much it can hold; 16 and 32 are the common ones")
    rank_for: Mapping[str, int] | None = setting(
        None, 'other ranks by pattern, the longest that matches: {"attn.*" = 16}; 0: no adapter there'
    )
    alpha: float | None = setting(
        None, "the adapter's output is scaled by alpha / rank; unset: the rank, which every reader assumes"
    )
    alpha_for: Mapping[str, float] | None = setting(None, "other alphas by pattern, the longest that matches")
    variant: Variant = setting(  # noqa: RUF009
        "lora", "dora: a length per row too, slower, nearer to full training; lokr: a Kronecker product, small files"
    )
    rslora: bool = setting(False, "scale by alpha / sqrt(rank): for ranks of 64 and more")
    factor: int | None = setting(None, "lokr: the smaller side of the product; unset: near the root")
    initial: str = setting("", "start from this adapter: a safetensors file, ours or one that export writes; below the project")
    targets: tuple[str, ...] = setting(
        ("*",), 'which Linears of the blocks, by wildcards: "attn.to_q", "single_transformer_blocks.*"'
    )
    lr: float = setting(1e-4, "learning rate; what most trainers of FLUX.2 agree on, for AdamW; prodigy wants 1, lion 2e-5")
    clip: float = setting(1.0, "largest global norm of the gradient, to which a larger one is shrunk; 0: never")
    caption_dropout: float = setting(0.05, "share of samples trained with the empty caption, which keeps guidance working")
    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "what the model computes in; float32 on a CPU, where it is faster"
    )
    base_bits: Bits = setting(  # noqa: RUF009
        16, "bits of a weight of the base's blocks: 8 takes half the memory, 4 a quarter, with a little of the quality"
    )
    base_bits_for: Mapping[str, int] | None = setting(
        None, 'other bits by pattern, the longest that matches: {"attn.to_out*" = 8}'
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "the method and its numbers")  # noqa: RUF009
    schedule: ScheduleConfig = setting(ScheduleConfig(), "the learning rate over the steps")  # noqa: RUF009
    noise: NoiseConfig = setting(NoiseConfig(), "the noise levels")  # noqa: RUF009
    loss: LossConfig = setting(LossConfig(), "what a prediction costs")  # noqa: RUF009
    data: DataConfig = setting(DataConfig(), "how often which crops are drawn")  # noqa: RUF009
    mask: MaskConfig | None = setting(None, "train where the masks are white")  # noqa: RUF009
    preservation: PreservationConfig | None = setting(None, "hold what the class word means")  # noqa: RUF009
    validation: ValidationConfig | None = setting(None, "images held out, to measure the run by")  # noqa: RUF009
    ema: EmaConfig | None = setting(None, "an average of the adapter, kept beside it")  # noqa: RUF009
    memory: Literal["auto", "whole", "blocks"] | int = runtime(
        "auto",
        "whole: fastest; blocks: least memory, computes every block twice; a number: so many of the last blocks are not "
        "computed twice; auto: the fastest that fits. They agree to rounding, so a run keeps the one that it began with",
    )
    memory_gb: float | None = runtime(None, "what training may take, GB; unset: the device's memory less head-room")
    micro_batch: Literal["auto"] | int | None = runtime(
        None, "samples of a batch computed at once; auto: as many as fit. The gradient is the same up to rounding"
    )
    checkpoint_every: int = runtime(250, "steps between checkpoints: what a kill can cost, and which adapters can be compared")
    keep_states: int = runtime(2, "newest checkpoints whose optimizer state is kept, twice the adapter's size; adapters all stay")
    stop_after_steps: int | None = runtime(None, "end this command after so many steps; the same command goes on")
    stop_after_minutes: float | None = runtime(None, "end this command after so long: a Mac's GPU watchdog, a slot of time")

    def __post_init__(self) -> None:
        check(self, "steps", 1, 1_000_000)  # each is a row: beyond that it is a slip of the finger
        for name in ("batch_size", "accumulate", "rank", "factor", "checkpoint_every", "keep_states", "stop_after_steps"):
            check(self, name, 1)
        for name in ("lr", "memory_gb", "stop_after_minutes", "alpha"):
            check(self, name, 1e-12)
        check(self, "clip", 0)
        check(self, "caption_dropout", 0, 1)
        for name in ("memory", "micro_batch"):
            if isinstance(getattr(self, name), int):
                check(self, name, 1)
        for pattern, bits in (self.base_bits_for or {}).items():
            if bits not in (16, 8, 4):
                raise ValueError(f"base_bits_for: {bits} of {pattern!r} is wrong; 16, 8 or 4 is wanted")
        if self.optimizer.kind == "prodigy" and self.lr < 0.01:
            raise ValueError(f"lr: prodigy finds the rate itself, and lr is a factor of it; {self.lr:g} is too small, 1 is usual")
        if self.factor is not None and self.variant != "lokr":
            raise ValueError(f'factor: variant = "{self.variant}" has none; leave it out, or choose variant = "lokr"')
        if self.rslora and self.variant == "lokr":
            raise ValueError('rslora: it is of no use with variant = "lokr"; leave one of them out')

    @property
    def measured_at_once(self) -> int:
        """Samples that a measurement computes together: what the settings say, never what memory allows just then.

        Their number moves the last bits of a loss, and so what is best and when patience ends. Where the micro-batch
        follows memory it is one, the least that training may come down to.
        """
        return 1 if self.micro_batch == "auto" else min(self.batch_size, self.micro_batch or self.batch_size)


def longest_first(patterns: Mapping[str, Any] | None) -> dict[str, Any]:
    """Patterns with the most particular first, whatever their order in the file: the recipe does not know that order."""
    return dict(sorted((patterns or {}).items(), key=lambda item: (-len(item[0]), item[0])))
