"""Arrays of one shape stacked into one array: the optimizer runs a few large operations instead of hundreds of small ones.

An adapter has hundreds of arrays of a dozen shapes, and a GPU needs longer to launch a small operation than to compute it.
"""

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
    """Named arrays, stored in stacks so that an optimizer needs few operations. N matrices of one shape (rows, columns) become
    one array (N, rows, columns), even if N is 1. Any other array is stored alone. `arrays` maps the name of each stack to its
    array. `groups` maps the name of each stack to the names of its matrices, in order. A stack has the name of its first matrix.
    """

    groups: Groups
    arrays: Arrays

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array]) -> Stacks:
        """Return a new `Stacks` object that holds the given arrays. `arrays` maps names to arrays. Matrices of one
        shape are joined into stacks. A stack of N matrices (rows, columns) is one array (N, rows, columns). Matrices
        that share a stack are copied. Any other array is stored alone.
        """
        groups = group_by_shape(arrays)
        return cls(groups, stack(arrays, groups))

    def unstack(self) -> Arrays:
        """Return the single arrays by name, as views of the stacks."""
        return unstack(self.arrays, self.groups)

    def cast(self, dtype: mx.Dtype) -> Stacks:
        """Return stacks with all matrices cast to `dtype`. Vectors and scalars keep their dtype."""
        return replace(self, arrays={name: a.astype(dtype) if a.ndim == 3 else a for name, a in self.arrays.items()})

    @property
    def nbytes(self) -> int:
        """The total size of the arrays in all stacks, in bytes."""
        return sum(value.nbytes for value in self.arrays.values())


def group_by_shape(arrays: Mapping[str, mx.array]) -> Groups:
    """Return which arrays are stored together in one stack. `arrays` maps names to arrays. The result maps the name of
    each stack to the names of its arrays, sorted. The first of these is also the name of the stack. All matrices of a
    stack have one shape. An array that is not a matrix has a stack of its own.

    Matrices of one shape share a stack as long as it has at most 2^23 values. A larger matrix has a stack of its own.
    The result depends only on names and shapes.
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
    """Return the stacks of `arrays`, as a dict from the name of a stack to its array. `groups` is the result of
    `group_by_shape(arrays)`. It maps the name of each stack to the names of its arrays, in order. A group of N matrices
    `(rows, columns)` becomes one array `(N, rows, columns)`. An array that is not a matrix is returned unchanged.
    """
    return {
        name: mx.stack([arrays[each] for each in names]) if arrays[name].ndim == 2 else arrays[name]
        for name, names in groups.items()
    }


def unstack(stacks: Mapping[str, mx.array], groups: Groups) -> Arrays:
    """Return the single arrays of `stacks` by name, as views. `groups` maps the name of each stack to the names of its arrays, in
    order.
    """
    return {
        each: one.squeeze(0) if one.ndim == 3 else one
        for name, names in groups.items()
        for each, one in zip(names, _split(stacks[name]), strict=True)
    }


def _split(stack: mx.array) -> list[mx.array]:
    """Split a stack (N, rows, columns) along its first axis into a list of N views (1, rows, columns). An array that
    does not have 3 axes is returned alone, in a list.
    """
    return list(mx.split(stack, stack.shape[0], axis=0)) if stack.ndim == 3 else [stack]
