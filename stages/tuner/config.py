"""The settings of [train] that any training run has. A pipeline's own [train] inherits them and adds what its data need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stages.settings import SEEDS, Section, runtime, selects, setting
from stages.tuner.adapters.targets import Variant
from stages.tuner.optimizers import MethodName, make_optimizer
from stages.tuner.optimizers.optimizer import Method
from stages.tuner.weights import BITS, Bits

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step alone, so that a run can be made longer without changing its past."""

    base: float
    shape: Shape = "constant"
    warmup: int = 0  # steps
    decay: int = 0  # steps after the warm-up in which linear and cosine fall
    floor: float = 0.0  # share of base

    def at(self, step: int) -> float:
        """Steps count from 1; the last step of the warm-up has the full rate."""
        if step <= self.warmup:
            return self.base * step / self.warmup
        if self.shape == "constant":
            return self.base
        done = min((step - self.warmup) / max(self.decay, 1), 1.0)
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.base * (self.floor + (1 - self.floor) * left)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    kind: MethodName = setting(  # noqa: RUF009
        "adamw", "adamw8bit: a quarter of its memory; adafactor: almost none; lion: one moment; prodigy: finds its own rate"
    )
    beta1: float | None = setting(
        None, "decay of the mean of gradients; unset: the method's own", unit="share kept per step", bounds=(0.0, 0.9999999)
    )
    beta2: float | None = setting(
        None, "decay of the mean of their squares; unset: the method's own", unit="share kept per step", bounds=(0.0, 0.9999999)
    )
    eps: float | None = setting(
        None,
        "added to the root (adafactor: to squared gradients), so a zero gradient is not divided by zero; unset: the method's own",
        unit="of a gradient",
        bounds=(1e-30, 1.0),
    )
    d_coef: float | None = setting(
        None, "prodigy: factor of its rate; 0.5 slower, 2 faster; unset: the method's own", unit="factor", bounds=(1e-6, 1e6)
    )
    weight_decay: float = setting(
        1e-4,
        "share of an array taken away per step, times lr; what most LoRA trainers use",
        unit="share per step, times lr",
        bounds=(0.0, 100.0),
    )

    lr_ratio: float = setting(
        1.0,
        "LoRA+: the rate of B, the matrix that starts at zero, relative to lr, that of A; 16 in the paper, with a smaller lr; 1: "
        "both learn at lr",
        unit="factor",
        bounds=(1e-3, 1e3),
        unrecorded=(1.0,),
    )

    def check(self) -> None:
        # Raises for numbers that the method does not have.
        self.method()
        if self.lr_ratio != 1 and self.kind == "prodigy":
            raise ValueError('lr_ratio must be 1 with kind = "prodigy", which finds one rate for all arrays')

    def method(self) -> Method:
        of_step = ("kind", "lr_ratio")
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in of_step}
        return make_optimizer(self.kind, **{name: value for name, value in numbers.items() if value is not None})


@dataclass(frozen=True)
class ScheduleConfig(Section):
    # Nothing here depends on [train] steps, so that a run can be made longer later.
    shape: Shape = setting("constant", "after the warm-up: constant, or down to the floor")  # noqa: RUF009
    warmup_steps: int = setting(
        100, "steps in which the rate rises to lr; AdamW's second moments need about so many", unit="steps", bounds=(0, 1_000_000)
    )
    decay_steps: int = setting(
        1000, "steps from lr down to the floor, for linear and cosine; constant afterwards", unit="steps", bounds=(1, 1_000_000)
    )
    floor: float = setting(0.0, "the rate at which linear and cosine end, as a share of lr", unit="share", bounds=(0.0, 1.0))


@dataclass(frozen=True)
class EmaConfig(Section):
    """The section [train.ema]: a running average of the adapter, useful if the checkpoints of a run differ a lot."""

    decay: float = setting(
        0.99,
        "0.99 averages over about 100 steps, right for a run of 1000; 0.999 suits 10,000",
        unit="share kept per step",
        bounds=(0.0, 0.9999999),
    )


@dataclass(frozen=True)
class ValidationConfig(Section):
    every: int = setting(
        100, "steps between two measurements; the first is before the first step", unit="steps", bounds=(1, 1_000_000)
    )
    patience: int | None = selects(
        None,
        "end the run after so many measurements in a row without a better one; unset: never",
        unit="measurements",
        bounds=(1, 1_000_000),
    )
    min_delta: float = selects(
        0.0, "the mean loss must fall by more than this to count as better", unit="loss", bounds=(0.0, 1000.0)
    )


@dataclass(frozen=True)
class TrainingConfig(Section):
    steps: int = selects(
        1500,
        "optimizer steps in all; raise it later and the run goes on from where it ended",
        unit="steps",
        bounds=(1, 1_000_000),
    )
    seed: int = setting(0, "seed of every draw: order of rows, noise, the adapter's start", unit="number", bounds=SEEDS)
    batch_size: int = setting(
        1, "samples of a batch; every batch is full: shapes with fewer samples share batches", unit="samples", bounds=(1, 1024)
    )
    accumulate: int = setting(
        1, "batches whose gradients make one step: a larger batch in the memory of a small one", unit="batches", bounds=(1, 4096)
    )
    rank: int = setting(
        32, "rank of the adapter: how much it can hold; 16 and 32 are the common ones", unit="columns", bounds=(1, 4096)
    )
    rank_for: Mapping[str, int] | None = setting(
        None,
        'other ranks by pattern, the longest that matches: {"attn.*" = 16}; 0: no adapter there',
        unit="columns",
        bounds=(0, 4096),
    )
    alpha: float | None = setting(
        None,
        "the adapter's output is scaled by alpha / rank; unset: the rank, which every reader assumes",
        unit="rank",
        bounds=(1e-12, 1e6),
    )
    alpha_for: Mapping[str, float] | None = setting(
        None, "other alphas by pattern, the longest that matches", unit="rank", bounds=(1e-12, 1e6)
    )
    variant: Variant = setting(  # noqa: RUF009
        "lora", "dora: a length per row too, slower, nearer to full training; lokr: a Kronecker product, small files"
    )
    rslora: bool = setting(False, "scale by alpha / sqrt(rank): for ranks of 64 and more")
    factor: int | None = setting(
        None, "lokr: the smaller side of the product; unset: near the root", unit="columns", bounds=(1, 65536)
    )
    initial: str = setting(
        "", "start from this adapter: a safetensors file, written by training or by export; relative to the project", path=True
    )
    targets: tuple[str, ...] = setting(
        ("*",), 'which Linears of the blocks get an adapter, by wildcards: "attn.to_q", "*.0.attn.*"; "*": all'
    )
    lr: float = setting(
        1e-4,
        "learning rate; what most LoRA trainers use with AdamW; prodigy wants 1, lion 2e-5",
        unit="rate",
        bounds=(1e-12, 100.0),
    )
    clip: float = setting(
        1.0,
        "largest global norm of the gradient; a larger gradient is scaled down to it; 0: never",
        unit="norm",
        bounds=(0.0, 1e6),
    )
    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "what the model computes in; float32 on a CPU, where it is faster"
    )
    base_bits: Bits = setting(  # noqa: RUF009
        16,
        "bits of a weight of the base's blocks: 8 takes half the memory, 4 a quarter, with a little of the quality",
        unit="bits",
    )
    base_bits_for: Mapping[str, int] | None = setting(
        None, 'other bits, 16, 8 or 4, by pattern, the longest that matches: {"attn.to_out*" = 8}', unit="bits"
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "the method and its numbers")  # noqa: RUF009
    schedule: ScheduleConfig = setting(ScheduleConfig(), "the learning rate over the steps")  # noqa: RUF009
    # An absent section that may be None is off; a present one is on, with the defaults of its fields.
    validation: ValidationConfig | None = setting(None, "samples held out, to measure the run by")  # noqa: RUF009
    ema: EmaConfig | None = setting(None, "an average of the adapter, kept beside it")  # noqa: RUF009
    memory: Literal["auto", "whole", "blocks"] | int = runtime(
        "auto",
        "whole: fastest; blocks: least memory, computes every block twice; a number: so many of the last blocks are not "
        "computed twice; auto: the fastest that fits. They agree to rounding, so a run keeps the one that it began with",
        unit="blocks",
        bounds=(1, 10_000),
    )
    memory_gb: float | None = runtime(
        None, "memory that training may take, GB; unset: the device's memory less headroom", unit="GB", bounds=(1e-12, 1e6)
    )
    micro_batch: Literal["auto"] | int | None = runtime(
        None,
        "samples of a batch computed at once; auto: as many as fit; unset: all, but on a Mac's GPU one from 768 px. The "
        "gradient is the same up to rounding",
        unit="samples",
        bounds=(1, 1024),
    )
    data_parallel: int | None = runtime(
        None,
        "ranks (processes, one for each Mac or GPU) that a run must have; unset: as many as `latentmill launch` starts. The "
        "samples are the same, and the gradient up to rounding",
        unit="processes",
        bounds=(1, 1024),
    )
    checkpoint_every: int = runtime(
        250,
        "steps between checkpoints: what a kill can cost, and which adapters can be compared",
        unit="steps",
        bounds=(1, 1_000_000),
    )
    checkpoint_minutes: float = runtime(
        10.0,
        "also write a checkpoint when the last one is so many minutes old; such a one is deleted when the next of its kind is "
        "written",
        unit="minutes",
        bounds=(1e-12, 1e6),
    )
    keep_states: int = runtime(
        2,
        "newest checkpoints whose optimizer state is kept, twice the adapter's size; adapters all stay",
        unit="checkpoints",
        bounds=(1, 1_000_000),
    )
    track: Literal["", "tensorboard", "trackio", "wandb", "mlflow"] = runtime(
        "", "copy losses, learning rate and gradient norm to this experiment tracker; each is an extra to install"
    )
    stop_after_steps: int | None = runtime(
        None, "end this command after so many steps; the same command goes on", unit="steps", bounds=(1, 1_000_000)
    )
    stop_after_minutes: float | None = runtime(
        None, "end this command after so long: a Mac's GPU watchdog, a slot of time", unit="minutes", bounds=(1e-12, 1e6)
    )

    def check(self) -> None:
        for pattern, bits in (self.base_bits_for or {}).items():
            if bits not in BITS:
                raise ValueError(f"base_bits_for must give 16, 8 or 4 bits, got {bits} for {pattern!r}")
        if self.optimizer.kind == "prodigy" and self.lr < 0.01:
            raise ValueError(f"lr must be >= 0.01 with prodigy, which multiplies its own rate by lr, got {self.lr:g}; 1 is usual")
        if self.factor is not None and self.variant != "lokr":
            raise ValueError(f'factor needs variant = "lokr", got "{self.variant}"; leave it out, or choose variant = "lokr"')
        if self.optimizer.lr_ratio != 1 and self.variant == "lokr":
            raise ValueError('optimizer.lr_ratio must be 1 with variant = "lokr", which has no B; leave one of them out')
        if self.rslora and self.variant == "lokr":
            raise ValueError('rslora has no effect with variant = "lokr"; leave one of them out')

    def check_ranks(self, count: int) -> None:
        """Raises ValueError if so many ranks cannot divide the batch."""
        if self.data_parallel not in (None, count):
            raise ValueError(
                f"train.data_parallel must be unset or the number of ranks ({count}), got {self.data_parallel}; "
                f"`latentmill launch --ranks {self.data_parallel}` starts so many"
            )
        if self.batch_size % count:
            raise ValueError(f"train.batch_size must be a multiple of the number of ranks ({count}), got {self.batch_size}")

    @property
    def trained_whole(self) -> tuple[str, ...]:
        """Patterns of Linears that are trained in full instead of with an adapter. Subclasses override it."""
        return ()

    @property
    def orthogonal(self) -> bool:
        """Whether LoRAs start with orthogonal factors. Subclasses override it."""
        return False

    def learning_rate(self) -> Schedule:
        s = self.schedule
        return Schedule(self.lr, s.shape, s.warmup_steps, s.decay_steps, s.floor)

    @property
    def measured_at_once(self) -> int:
        # From the settings alone, never from free memory: it changes the last bits of a loss, and so which checkpoint is
        # best.
        return 1 if self.micro_batch == "auto" else min(self.batch_size, self.micro_batch or self.batch_size)
