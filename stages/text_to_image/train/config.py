"""The section [train] of an image project: the settings of any training run, and those that images add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stages.settings import SEEDS, Section, runtime, selects, setting
from stages.text_to_image.beneath import BeneathConfig
from stages.text_to_image.length import AUTO, steps_of
from stages.text_to_image.slider import SliderConfig
from stages.tuner import config as tuner
from stages.tuner.adapters.masks import RankMasks
from stages.tuner.diffusion import Base, Shift, WeightName

LEAST, MOST = 1e-3, 1e3  # of a rate in a setting: an epoch is a list in memory, and has at least one crop


@dataclass(frozen=True)
class NoiseConfig(Section):
    """How noise levels are drawn: sigma, 0 (clean) to 1 (noise), is drawn from `base`, then moved by `shift`."""

    base: Base = setting(  # noqa: RUF009
        "logit_normal", "before the shift; what most trainers of FLUX.2 use. high_noise: composition; low_noise: texture"
    )
    mean: float = setting(
        0.0, "logit_normal: mean of the logit of sigma; above 0 prefers noise", unit="logit of sigma", bounds=(-10.0, 10.0)
    )
    std: float = setting(
        1.0, "logit_normal: standard deviation of the logit of sigma", unit="logit of sigma", bounds=(1e-6, 10.0)
    )
    scale: float | None = setting(None, "mode: its scale; the paper's 1.29 if unset", unit="factor", bounds=(-0.999, 1.75))
    shift: Shift = setting("resolution", "resolution: FLUX.1's line, 1.9 at 512 px, 3.2 at 1024 px")  # noqa: RUF009
    shift_factor: float = setting(3.0, "S of the static shift; 1 is none", unit="factor", bounds=(1e-3, 1000.0))
    # With 4, the first samples of steps 1 to 4 get levels from the four quarters of `base`, in random order, as do those of
    # steps 5 to 8; so do the second samples, and all later ones.
    strata: int = setting(
        1,
        "so many steps in a row cover the levels evenly, for short runs; 1: independent draws",
        unit="steps",
        bounds=(1, 10_000),
    )

    def check(self) -> None:
        if self.scale is not None and self.base != "mode":
            raise ValueError(f'scale needs base = "mode", got "{self.base}"; leave it out, or choose base = "mode"')


@dataclass(frozen=True)
class LossConfig(Section):
    kind: Literal["mse", "pseudo_huber"] = setting("mse", "pseudo_huber: large errors count less, for data with outliers")
    huber_c: float = setting(0.1, "pseudo_huber: the error above which it grows linearly", unit="error", bounds=(1e-6, 1000.0))
    weight: WeightName = setting(  # noqa: RUF009
        "none", "by the noise level: bell, half_bell and measured are ai-toolkit's linear_timesteps, ..2 and weighted"
    )


@dataclass(frozen=True)
class PreservationConfig(Section):
    """A loss that keeps the base's predictions for class captions: ai-toolkit's differential output preservation (DOP)."""

    weight: float = setting(
        1.0, "factor of the preservation loss beside the loss; ai-toolkit's", unit="factor", bounds=(1e-6, 1000.0)
    )
    # Such a step needs one more forward pass of the base model and a second gradient.
    every: int = setting(
        1, "apply it in every so many steps: 2 costs half and preserves half as firmly", unit="steps", bounds=(1, 1_000_000)
    )


@dataclass(frozen=True)
class DataConfig(Section):
    resolutions: Mapping[str, float] | None = setting(
        None,
        "how often a crop of each resolution is drawn, relative to the others: {512 = 2, 768 = 1}; 0: never; unset: equally",
        unit="draws, relative",
        bounds=(0.0, MOST),
    )
    repeats: Mapping[str, float] | None = setting(
        None,
        'how often per epoch the images of a folder occur: {"rare" = 3, "blurred" = 0}; the longest path that matches; others 1',
        unit="times per epoch",
        bounds=(0.0, MOST),
    )
    # With 0.5, one regularisation image is drawn for every two images of the subject.
    regularisation: float = setting(
        1.0,
        "draws of regularisation images (folder reg) per draw of another image; kohya: 1; 0: never",
        unit="draws, relative",
        bounds=(0.0, MOST),
        unrecorded=(1.0,),
    )
    backwards: tuple[str, ...] = setting(
        (),
        'images trained at strength -1, the other end of a slider of pictures, by wildcards on their paths: "young/*"',
        unrecorded=((),),
    )
    reference_dropout: float = setting(
        0.0,
        "share of batches trained without their references; 0: the model always sees what it edits",
        unit="share",
        bounds=(0.0, 1.0),
        unrecorded=(0.0,),
    )
    dropped: Literal["empty", "trigger"] = setting(
        "empty", "what a dropped caption becomes; trigger: the trigger word alone, for a subject that should need no other"
    )

    def check(self) -> None:
        for name in ("resolutions", "repeats"):
            for key, value in (getattr(self, name) or {}).items():
                if value and not LEAST <= value <= MOST:
                    raise ValueError(f"{name} must be 0, or {LEAST:g} to {MOST:g}, got {value:g} for {key!r}")
        for key in self.resolutions or {}:
            if not key.isdecimal():
                raise ValueError(f"resolutions must name values of [buckets] resolutions, such as 512, got {key!r}")
        if self.resolutions is not None and not any(self.resolutions.values()):
            raise ValueError("resolutions must have a value above 0; with none, nothing is left to train on")


@dataclass(frozen=True)
class TLoraConfig(Section):
    """T-LoRA: the noisier a sample, the fewer ranks it trains. Soboleva et al. 2025, arXiv 2507.05964."""

    # Pictures are drawn with all ranks, as other programs do it: the file of a LoRA knows no noise level.

    min_rank: int | None = setting(
        None, "ranks that pure noise trains; unset: half of them, as in the paper", unit="columns", bounds=(1, 4096)
    )
    start: Literal["orthogonal", "zero"] = setting(
        "orthogonal", "how the adapter starts; orthogonal: the paper's, whose ranks are independent, files have twice the rank"
    )


@dataclass(frozen=True)
class MaskConfig(Section):
    """Image tokens count less in the loss where the mask, from [latents] mask, is dark."""

    floor: float = setting(
        0.1,
        "the least weight of a token, where the mask is black: a little preserves the surroundings",
        unit="share",
        bounds=(0.0, 1.0),
    )


@dataclass(frozen=True)
class ValidationConfig(tuner.ValidationConfig):
    share: float = setting(
        0.1,
        "share of the images that is held out, at least one image; the choice depends on content alone",
        unit="share",
        bounds=(0.001, 1.0),
    )
    most: int = setting(
        16, "most images that are held out: each costs a forward pass per level and crop", unit="images", bounds=(1, 10_000)
    )
    paths: tuple[str, ...] = setting((), 'hold out these images instead, by wildcards on their paths: "held/*", "*_val.png"')
    sigmas: tuple[float, ...] = setting(
        (0.1, 0.3, 0.5, 0.7, 0.9),
        "the noise levels: fixed, so that losses can be compared",
        unit="noise levels",
        bounds=(0.0, 1.0),
    )
    seed: int = setting(0, "seed of the choice of images and of their noise", unit="number", bounds=SEEDS)

    def check(self) -> None:
        super().check()
        if not self.sigmas or not all(0 < sigma <= 1 for sigma in self.sigmas) or len(set(self.sigmas)) < len(self.sigmas):
            raise ValueError(
                f"sigmas must be different levels above 0, up to 1, such as [0.1, 0.5, 0.9], got {list(self.sigmas)}"
            )


@dataclass(frozen=True)
class TrainConfig(tuner.TrainingConfig):
    steps: int | Literal["auto"] = selects(  # type: ignore[assignment]
        1500,
        "optimizer steps in all; raise it later and the run goes on from where it ended; auto: `passes` over each picture",
        unit="steps",
        bounds=(1, 1_000_000),
    )
    passes: float = selects(
        50.0,
        'with steps = "auto": how often each picture is drawn, on average; published recipes: 30 for a style, 50 to 120 for a '
        "character",
        unit="draws",
        bounds=(0.1, 100_000.0),
    )
    stream_blocks: bool = runtime(
        False,
        "keep the weights of the base's blocks on disk and read each block when it is needed, for a base larger than memory; "
        "every step reads them twice. The same bits",
    )
    caption_dropout: float = setting(
        0.05, "share of samples trained with the empty caption, which keeps guidance working", unit="share", bounds=(0.0, 1.0)
    )
    noise: NoiseConfig = setting(NoiseConfig(), "the noise levels")  # noqa: RUF009
    loss: LossConfig = setting(LossConfig(), "the loss of a predicted velocity")  # noqa: RUF009
    data: DataConfig = setting(DataConfig(), "how often which crops are drawn")  # noqa: RUF009
    mask: MaskConfig | None = setting(None, "train where the masks are white")  # noqa: RUF009
    preservation: PreservationConfig | None = setting(None, "keep the meaning of the class word")  # noqa: RUF009
    validation: ValidationConfig | None = setting(None, "images held out, to measure the run by")  # noqa: RUF009
    tlora: TLoraConfig | None = setting(  # noqa: RUF009
        None, "noisy samples train only the first ranks: against overfitting on few pictures", unrecorded=(None,)
    )
    rank_dropout: float = setting(
        0.0,
        "share of the ranks that a sample leaves out, at random in each Linear: kohya's rank_dropout; LoRA only",
        unit="share",
        bounds=(0.0, 0.9),
        unrecorded=(0.0,),
    )
    slider: SliderConfig | None = setting(  # noqa: RUF009
        None, "move along the difference of two prompts; trained without pictures", unrecorded=(None,)
    )
    beneath: tuple[BeneathConfig, ...] = setting(
        (), "adapters that lie frozen beneath the trained one; by content part of the run", unrecorded=((),)
    )
    allow_distilled: bool = runtime(
        False,
        "train on a distilled family without an assistant beneath: the model then loses the few steps that it was distilled for",
    )
    keep_converted: bool = runtime(
        False,
        "keep the weights as they are computed with, cast and packed, in weights/converted of the project: later loads read "
        "that file alone. It takes the packed size of the model on the disk",
    )

    def check(self) -> None:
        super().check()
        named = [name for name in ("mask", "preservation", "validation") if getattr(self, name)]
        named += [f"[train.data] {name}" for name in ("resolutions", "repeats", "backwards") if getattr(self.data, name)]
        if self.slider and named:
            raise ValueError(f"{named[0]} must be unset with [train.slider]: it is about pictures, of which a slider has none")

        for name, chosen in (("tlora", self.tlora), ("rank_dropout", self.rank_dropout)):
            if chosen and self.variant != "lora":
                raise ValueError(f'{name} needs variant = "lora", got "{self.variant}"; leave one of them out')
        if self.tlora and (self.tlora.min_rank or 0) > self.rank:
            raise ValueError(f"tlora: min_rank must be at most the rank, {self.rank}, got {self.tlora.min_rank}")

        for name, given in (("initial", self.initial), ("optimizer.lr_ratio", self.optimizer.lr_ratio != 1)):
            if self.orthogonal and given:
                raise ValueError(f'{name} must be unset with tlora\'s start = "orthogonal"; set [train.tlora] start = "zero"')

    @property
    def orthogonal(self) -> bool:
        return self.tlora is not None and self.tlora.start == "orthogonal"

    @property
    def masks(self) -> RankMasks | None:
        if not self.tlora and not self.rank_dropout:
            return None
        return RankMasks(self.seed, bool(self.tlora), self.tlora.min_rank if self.tlora else None, self.rank_dropout)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.batch_size * self.accumulate

    def settled(self, pictures: int, share: float = 1.0) -> TrainConfig:
        """With a number of steps; the arguments are those of `steps_of`."""
        return replace(self, steps=steps_of(self.passes, pictures, self.batch, share)) if self.steps == AUTO else self
