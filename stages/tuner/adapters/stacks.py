"""Arrays of one shape stacked into one array: the optimizer runs a few large operations instead of hundreds of small ones.

An adapter has hundreds of arrays of a dozen shapes, and a GPU needs longer to launch a small operation than to compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

Arrays = dict[str, mx.array]
Groups = dict[str, list[str]]  # name of a stack, which is that of its first array -> names of all its arrays

LARGEST = 1 << 23  # values of a stack: 32 MiB in float32, which bounds the working memory of an optimizer step


@dataclass(frozen=True)
class Stacks:
    """Named arrays stored in stacks: all matrices (rows, columns) of one shape are one array (N, rows, columns), even for N =
    1; vectors and scalars are stored alone. `groups` maps the name of a stack, which is that of its first array, to the names
    of its arrays; `arrays` maps it to the stack.
    """

    groups: Groups
    arrays: Arrays

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array]) -> Stacks:
        """Stack named arrays; the values are copied."""
        groups = group_by_shape(arrays)
        return cls(groups, stack(arrays, groups))

    def unstack(self) -> Arrays:
        """Return the single arrays by their own names, as views of the stacks."""
        return unstack(self.arrays, self.groups)

    def cast(self, dtype: mx.Dtype) -> Stacks:
        """Return stacks whose matrices are cast to `dtype`; vectors and scalars keep theirs."""
        return replace(self, arrays={name: a.astype(dtype) if a.ndim == 3 else a for name, a in self.arrays.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(value.nbytes for value in self.arrays.values())


def group_by_shape(arrays: Mapping[str, mx.array]) -> Groups:
    """Return which arrays share a stack: name of the first array -> names of all, sorted. Matrices of one shape go together, up
    to LARGEST values in a stack; any other array goes alone. The result depends only on names and shapes.
    """
    groups: Groups = {}
    latest: dict[tuple[int, ...], str] = {}
    for name in sorted(arrays):
        shape = tuple(arrays[name].shape)
        first = latest.get(shape)
        if len(shape) != 2 or first is None or (len(groups[first]) + 1) * math.prod(shape) > LARGEST:
            latest[shape] = first = name
            groups[first] = []
        groups[first].append(name)
    return groups


def stack(arrays: Mapping[str, mx.array], groups: Groups) -> Arrays:
    """Stack named arrays as `groups` says, see `group_by_shape`: N matrices (rows, columns) become one array (N, rows,
    columns). Returns the stacks by the name of their first array.
    """
    return {
        name: mx.stack([arrays[each] for each in names]) if arrays[name].ndim == 2 else arrays[name]
        for name, names in groups.items()
    }


def unstack(stacks: Mapping[str, mx.array], groups: Groups) -> Arrays:
    """Return the single arrays of `stacks` by their own names, as views: the inverse of `stack` with the same `groups`."""
    return {
        each: one.squeeze(0) if one.ndim == 3 else one
        for name, names in groups.items()
        for each, one in zip(names, _split(stacks[name]), strict=True)
    }


def _split(stack: mx.array) -> list[mx.array]:
    """Return the (1, rows, columns) views of a stack, where an index would copy; other arrays are returned alone."""
    return list(mx.split(stack, stack.shape[0], axis=0)) if stack.ndim == 3 else [stack]
