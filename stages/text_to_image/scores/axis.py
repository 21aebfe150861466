"""Where a feature vector lies between the means of two groups of images: the columns `style` and `real`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SIGNAL = 0.1  # share of the squared distance between two means that must be more than sampling noise


@dataclass(frozen=True)
class GroupMean:
    value: np.ndarray  # (features,)
    # The squared length of a mean of few images is too large on average, because their random differences do not cancel out.
    # This is an unbiased estimate for two or more images; for one, it is not corrected.
    squared_length: float


@dataclass(frozen=True)
class FeatureGroup:
    names: list[str]  # one per image, such as its prompt; images may share one
    features: np.ndarray  # (images, features)

    def mean(self, *, without: str | None = None) -> GroupMean | None:
        """Without the images named `without`; None if no image is left."""
        chosen_ND = self.features[[place for place, name in enumerate(self.names) if name != without]]
        count = len(chosen_ND)
        if not count:
            return None
        sum_D = chosen_ND.sum(axis=0)
        pairs = float(sum_D @ sum_D - (chosen_ND**2).sum())  # the products of two different images
        return GroupMean(sum_D / count, pairs / (count * (count - 1)) if count > 1 else float(sum_D @ sum_D))


def axis_position(feature_D: np.ndarray, start: GroupMean | None, end: GroupMean | None) -> float | None:
    """0 at `start`, 1 at `end`. None if a group has no images, or if the distance of the means is little more than
    sampling noise.
    """
    if start is None or end is None:
        return None
    axis_D = end.value - start.value
    dot = float(start.value @ end.value)
    # Not axis_D @ axis_D, which sampling noise makes too large.
    squared_length = start.squared_length + end.squared_length - 2 * dot
    if squared_length < MIN_SIGNAL * (axis_D @ axis_D):
        return None
    return (float(feature_D @ axis_D) - dot + start.squared_length) / squared_length
