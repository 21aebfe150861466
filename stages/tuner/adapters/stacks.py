"""Arrays of one shape as one array: a few large operations in place of hundreds of small ones.

An adapter has hundreds of arrays of a dozen shapes, and a GPU needs longer to be told of a small operation than to do
it. N arrays of a stack, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

Arrays = dict[str, mx.array]
Plan = dict[str, list[str]]  # the stack's name, which is that of its first array, and the names of all

LARGEST = 1 << 23  # values of a stack: 32 MiB, which bounds what a step holds beside the arrays


@dataclass(frozen=True)
class Stacks:
    """Named arrays, stacked: `arrays` maps a stack's name to (N,R,C) where its arrays are matrices, even to one of them."""

    plan: Plan
    arrays: Arrays

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array]) -> Stacks:
        """These arrays, copied into stacks."""
        made = plan(arrays)
        return cls(made, stack(arrays, made))

    def unstack(self) -> Arrays:
        """The arrays by their own names: views."""
        return unstack(self.arrays, self.plan)

    def cast(self, dtype: mx.Dtype) -> Stacks:
        """The matrices in another dtype; any other array as it is."""
        return replace(self, arrays={name: a.astype(dtype) if a.ndim == 3 else a for name, a in self.arrays.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(value.nbytes for value in self.arrays.values())


def plan(arrays: Mapping[str, mx.array]) -> Plan:
    """Matrices of one shape together, in the order of names; any other array by itself. A function of names and shapes."""
    stacks: Plan = {}
    latest: dict[tuple[int, ...], str] = {}
    for name in sorted(arrays):
        shape = tuple(arrays[name].shape)
        at = latest.get(shape)
        if len(shape) != 2 or at is None or (len(stacks[at]) + 1) * math.prod(shape) > LARGEST:
            latest[shape] = at = name
            stacks[at] = []
        stacks[at].append(name)
    return stacks


def stack(arrays: Mapping[str, mx.array], plan: Plan) -> Arrays:
    """The stacks of these arrays: (N,R,C) where they are matrices, even of one."""
    return {
        name: mx.stack([arrays[each] for each in names]) if arrays[name].ndim == 2 else arrays[name]
        for name, names in plan.items()
    }


def unstack(stacks: Mapping[str, mx.array], plan: Plan) -> Arrays:
    """The arrays of these stacks, by their own names: views."""
    return {
        each: part.squeeze(0) if part.ndim == 3 else part
        for name, names in plan.items()
        for each, part in zip(names, _parts(stacks[name]), strict=True)
    }


def _parts(stack: mx.array) -> list[mx.array]:
    """The (1,R,C) pieces of a stack, views; anything else as the one piece that it is. An index would copy."""
    return list(mx.split(stack, stack.shape[0], axis=0)) if stack.ndim == 3 else [stack]
