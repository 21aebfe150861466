"""Compute where a feature vector lies between the means of two groups of images. The columns `style` and `real` hold such
positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SIGNAL = 0.1  # share of the squared distance between two means that must be more than sampling noise


@dataclass(frozen=True)
class GroupMean:
    """The mean feature vector of a group of images, with an estimate of its true length. `value` is the mean over the
    images of the group, shape `(features,)`. `squared_length` estimates the squared length of the mean that infinitely
    many such images would have. The squared length of `value` would be too large on average, because of sampling noise.

    The estimate is unbiased for two or more images. For one image it is the squared length of `value`.
    """

    value: np.ndarray
    squared_length: float


@dataclass(frozen=True)
class FeatureGroup:
    """The feature vectors of a group of images. `features` is an array (images, features). `names` holds one name per
    image, such as its prompt. Several images may share a name.
    """

    names: list[str]
    features: np.ndarray

    def mean(self, *, without: str | None = None) -> GroupMean | None:
        """Return the mean feature vector of the group. Images whose name is `without` are left out. If `without` is None,
        all images count. If no image remains, None is returned.
        """
        chosen_ND = self.features[[place for place, name in enumerate(self.names) if name != without]]
        count = len(chosen_ND)
        if not count:
            return None
        sum_D = chosen_ND.sum(axis=0)
        pairs = float(sum_D @ sum_D - (chosen_ND**2).sum())  # the products of two different images
        return GroupMean(sum_D / count, pairs / (count * (count - 1)) if count > 1 else float(sum_D @ sum_D))


def axis_position(feature_D: np.ndarray, start: GroupMean | None, end: GroupMean | None) -> float | None:
    """Return the position of an image on the axis between two groups of images. The mean of `start` is at 0, the mean of
    `end` at 1. `feature_D` holds the features of the image, (features,). If a group is None, the result is None. If the
    distance between the means is hardly more than sampling noise, the result is also None.
    """
    if start is None or end is None:
        return None
    axis_D = end.value - start.value
    dot = float(start.value @ end.value)
    squared_length = start.squared_length + end.squared_length - 2 * dot
    if squared_length < MIN_SIGNAL * (axis_D @ axis_D):
        return None
    return (float(feature_D @ axis_D) - dot + start.squared_length) / squared_length
