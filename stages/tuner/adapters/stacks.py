"""Arrays of one shape stacked into one array: the optimizer runs a few large operations instead of hundreds of small ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

Arrays = dict[str, mx.array]
Groups = dict[str, list[str]]  # name of a stack (its first array's name) -> names of all its arrays

LARGEST = 1 << 23  # values of a stack: 32 MiB in float32, which bounds the working memory of an optimizer step


@dataclass(frozen=True)
class Stacks:
    """Named arrays in stacks: N matrices of one shape become (N, rows, columns), even if N is 1; others are stored alone."""

    groups: Groups
    arrays: Arrays  # by the name of a stack

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array]) -> Stacks:
        groups = group_by_shape(arrays)
        return cls(groups, stack(arrays, groups))

    def unstack(self) -> Arrays:
        return unstack(self.arrays, self.groups)

    def cast(self, dtype: mx.Dtype) -> Stacks:
        # Vectors and scalars keep their dtype: only a stack of matrices has three axes.
        return replace(self, arrays={name: a.astype(dtype) if a.ndim == 3 else a for name, a in self.arrays.items()})

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.arrays.values())


def group_by_shape(arrays: Mapping[str, mx.array]) -> Groups:
    """Which arrays share a stack. Depends on names and shapes only."""
    groups: Groups = {}
    latest: dict[tuple[int, ...], str] = {}
    # An adapter has hundreds of arrays of a dozen shapes, and a GPU needs longer to launch a small operation than to compute
    # it.
    for name in sorted(arrays):
        shape = tuple(arrays[name].shape)
        first = latest.get(shape)
        if len(shape) != 2 or first is None or (len(groups[first]) + 1) * math.prod(shape) > LARGEST:
            latest[shape] = first = name
            groups[first] = []
        groups[first].append(name)
    return groups


def stack(arrays: Mapping[str, mx.array], groups: Groups) -> Arrays:
    return {
        name: mx.stack([arrays[each] for each in names]) if arrays[name].ndim == 2 else arrays[name]
        for name, names in groups.items()
    }


def unstack(stacks: Mapping[str, mx.array], groups: Groups) -> Arrays:
    return {
        each: one.squeeze(0) if one.ndim == 3 else one
        for name, names in groups.items()
        for each, one in zip(names, _split(stacks[name]), strict=True)
    }


def _split(stack: mx.array) -> list[mx.array]:
    return list(mx.split(stack, stack.shape[0], axis=0)) if stack.ndim == 3 else [stack]
