"""The section [train] of an image project: the settings of any training run, and those that images add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.settings import check_bounds, runtime, setting
from stages.text_to_image.train.selection import DataConfig, MaskConfig, ValidationConfig
from stages.tuner.config import TrainingConfig
from stages.tuner.diffusion.noise import Base, Shift
from stages.tuner.diffusion.weighting import WeightName


@dataclass(frozen=True)
class NoiseConfig:
    """How noise levels are drawn: sigma, 0 (clean) to 1 (noise), is drawn from `base`, then moved by `shift`."""

    base: Base = setting(  # noqa: RUF009
        "logit_normal", "before the shift; what most trainers of FLUX.2 use. high_noise: composition; low_noise: texture"
    )
    mean: float = setting(0.0, "logit_normal: mean of the logit of sigma; above 0 prefers noise", bounds=(-10.0, 10.0))
    std: float = setting(1.0, "logit_normal: standard deviation of the logit of sigma", bounds=(1e-6, 10.0))
    scale: float | None = setting(None, "mode: its scale; the paper's 1.29 if unset", bounds=(-0.999, 1.75))
    shift: Shift = setting("resolution", "resolution: FLUX.1's line, 1.9 at 512 px, 3.2 at 1024 px")  # noqa: RUF009
    shift_factor: float = setting(3.0, "S of the static shift; 1 is none", bounds=(1e-3, 1000.0))
    # With 4, the first samples of steps 1 to 4 get levels from the four quarters of `base`, in random order, as do those of
    # steps 5 to 8; so do the second samples, and all later ones.
    strata: int = setting(
        1, "so many steps in a row cover the levels evenly, for short runs; 1: independent draws", bounds=(1, 10_000)
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.scale is not None and self.base != "mode":
            raise ValueError(f'scale needs base = "mode", got "{self.base}"; leave it out, or choose base = "mode"')


@dataclass(frozen=True)
class LossConfig:
    kind: Literal["mse", "pseudo_huber"] = setting("mse", "pseudo_huber: large errors count less, for data with outliers")
    huber_c: float = setting(0.1, "pseudo_huber: the error above which it grows linearly", bounds=(1e-6, 1000.0))
    weight: WeightName = setting(  # noqa: RUF009
        "none", "by the noise level: bell, half_bell and measured are ai-toolkit's linear_timesteps, ..2 and weighted"
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class PreservationConfig:
    """A loss that keeps the base's predictions for class captions: ai-toolkit's differential output preservation (DOP)."""

    weight: float = setting(1.0, "factor of the preservation loss beside the loss; ai-toolkit's", bounds=(1e-6, 1000.0))
    # Such a step needs one more forward pass of the base model and a second gradient.
    every: int = setting(1, "apply it in every so many steps: 2 costs half and preserves half as firmly", bounds=(1, 1_000_000))

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class TrainConfig(TrainingConfig):
    stream_blocks: bool = runtime(
        False,
        "keep the weights of the base's blocks on disk and read each block when it is needed, for a base larger than memory; "
        "every step reads them twice. The same bits",
    )
    caption_dropout: float = setting(
        0.05, "share of samples trained with the empty caption, which keeps guidance working", bounds=(0.0, 1.0)
    )
    noise: NoiseConfig = setting(NoiseConfig(), "the noise levels")  # noqa: RUF009
    loss: LossConfig = setting(LossConfig(), "the loss of a predicted velocity")  # noqa: RUF009
    data: DataConfig = setting(DataConfig(), "how often which crops are drawn")  # noqa: RUF009
    mask: MaskConfig | None = setting(None, "train where the masks are white")  # noqa: RUF009
    preservation: PreservationConfig | None = setting(None, "keep the meaning of the class word")  # noqa: RUF009
    validation: ValidationConfig | None = setting(None, "images held out, to measure the run by")  # noqa: RUF009
    keep_converted: bool = runtime(
        False,
        "keep the weights as they are computed with, cast and packed, in weights/converted of the project: later loads read "
        "that file alone. It takes the packed size of the model on the disk",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
