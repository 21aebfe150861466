"""The section [train] of an image project: the settings of any training run (`stages.tuner.config`), and the settings that
training on images needs.
"""

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
    """The settings [train.noise]: how noise levels are drawn. A noise level (sigma) is a number from 0 (clean) to 1
    (pure noise). A level is first drawn from the distribution `base`. The base "logit_normal" has the parameters `mean`
    and `std`, and the base "mode" has the parameter `scale`. The formula `shift` then changes the level. `shift_factor`
    is the strength of the shift "static". `strata` is the number of successive steps whose levels are spread evenly; 1
    draws each level independently. Raises ValueError if a setting is out of range.

    For example, `strata` = 4 divides the distribution `base` into four parts, each with a probability of 1/4. The first
    samples of steps 1 to 4 then get levels from four different parts, in random order. The first samples of steps 5 to
    8 do too, and so on. This also holds for the second samples and all later ones. So even a short run covers all
    levels evenly. If `scale` is set with another base than "mode", ValueError is raised. With the shift "resolution",
    larger images get levels nearer to 1.
    """

    base: Base = setting(  # noqa: RUF009
        "logit_normal", "before the shift; what most trainers of FLUX.2 use. high_noise: composition; low_noise: texture"
    )
    mean: float = setting(0.0, "logit_normal: mean of the logit of sigma; above 0 prefers noise", bounds=(-10.0, 10.0))
    std: float = setting(1.0, "logit_normal: standard deviation of the logit of sigma", bounds=(1e-6, 10.0))
    scale: float | None = setting(None, "mode: its scale; the paper's 1.29 if unset", bounds=(-0.999, 1.75))
    shift: Shift = setting("resolution", "resolution: FLUX.1's line, 1.9 at 512 px, 3.2 at 1024 px")  # noqa: RUF009
    shift_factor: float = setting(3.0, "S of the static shift; 1 is none", bounds=(1e-3, 1000.0))
    strata: int = setting(
        1, "so many steps in a row cover the levels evenly, for short runs; 1: independent draws", bounds=(1, 10_000)
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.scale is not None and self.base != "mode":
            raise ValueError(f'scale needs base = "mode", got "{self.base}"; leave it out, or choose base = "mode"')


@dataclass(frozen=True)
class LossConfig:
    """The settings [train.loss]: how the loss of the predicted velocity is computed, and its weight at each noise level."""

    kind: Literal["mse", "pseudo_huber"] = setting("mse", "pseudo_huber: large errors count less, for data with outliers")
    huber_c: float = setting(0.1, "pseudo_huber: the error above which it grows linearly", bounds=(1e-6, 1000.0))
    weight: WeightName = setting(  # noqa: RUF009
        "none", "by the noise level: bell, half_bell and measured are ai-toolkit's linear_timesteps, ..2 and weighted"
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class PreservationConfig:
    """The settings [train.preservation]. They add a loss that keeps the base model's predictions for class captions. A
    class caption has the class word (such as "cat") in place of the trigger word. `weight` is the factor of this loss.
    `every` = n applies it in every n-th step. Such a step needs one more forward pass of the base model and a second
    gradient. ai-toolkit calls the method differential output preservation (DOP).
    """

    weight: float = setting(1.0, "factor of the preservation loss beside the loss; ai-toolkit's", bounds=(1e-6, 1000.0))
    every: int = setting(1, "apply it in every so many steps: 2 costs half and preserves half as firmly", bounds=(1, 1_000_000))

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class TrainConfig(TrainingConfig):
    """The section [train] of project.toml for training on images. It extends `TrainingConfig`, which holds the settings
    of every kind of training. `noise`, `loss` and `data` hold the settings for noise levels, loss and choice of crops.
    `caption_dropout` is the probability, from 0 to 1, that a sample gets the empty caption. `mask`, `preservation` and
    `validation` are off if they are None. Raises ValueError if a setting is out of range.
    """

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
