"""Compute where a feature vector lies between the means of two groups of images. The columns `style` and `real` hold such
positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SIGNAL = 0.1  # share of the squared distance between two means that must be more than sampling noise


@dataclass(frozen=True)
class GroupMean:
    """The mean feature vector of a group of images. `value` is the mean over the images, shape `(features,)`.
    `squared_length` is the squared length of the mean, corrected for the small number of images. The mean of few images
    is too long on average, because their random differences do not cancel out.

    For two or more images, `squared_length` is an unbiased estimate: on average, it is the squared length of the mean
    of infinitely many such images. For one image, it is the squared length of `value`, without a correction.
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
    """Return the position of an image on the axis between two groups of images, as a number. `feature_D` holds the
    features of the image, (features,). `start` is the mean of the group at position 0. `end` is the mean of the group
    at position 1. Either may be None, for a group without images. The result is then None. It is also None if the
    distance between the means is too small compared with sampling noise.
    """
    if start is None or end is None:
        return None
    axis_D = end.value - start.value
    dot = float(start.value @ end.value)
    squared_length = start.squared_length + end.squared_length - 2 * dot
    if squared_length < MIN_SIGNAL * (axis_D @ axis_D):
        return None
    return (float(feature_D @ axis_D) - dot + start.squared_length) / squared_length
