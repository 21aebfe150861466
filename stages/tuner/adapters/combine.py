"""LoRAs joined into one, cut to a lower rank, and extracted from a tuned weight. Singular values decide what a lower
rank keeps.

Matrices are decomposed in float64 by NumPy. In names of arrays: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import Arrays

Scales = dict[str, float]  # the factor of a Linear's change, by the name of the Linear
Part = tuple[Mapping[str, mx.array], Mapping[str, float], float]  # arrays, scales, strength

NEGLIGIBLE = 1e-6  # singular values below this share of a Linear's largest are rounding


@dataclass(frozen=True)
class Cut:
    """A LoRA of limited rank that approximates a given change of weights. `arrays` maps "<linear><suffix>", such as
    "proj_out.lora_A.weight", to a float32 array. `errors` maps the name of each Linear to (lost, whole). `whole` is the
    squared Frobenius norm of the given change. `lost` is the squared norm of the part that the LoRA leaves out. The
    scale of each Linear, which multiplies the LoRA's change, is 1.
    """

    arrays: Arrays
    errors: Mapping[str, tuple[float, float]]

    @property
    def scales(self) -> Scales:
        """The scale of each Linear's LoRA, as a dict from the Linear's name to 1.0."""
        return dict.fromkeys(self.errors, 1.0)

    @property
    def error(self) -> float:
        """The relative error of the LoRA, from 0 to 1. The LoRA approximates the given change of the weights. The error
        is the norm of the difference between the given change and the LoRA's change, divided by the norm of the given
        change. The norm is the Frobenius norm over the weights of all Linears (linear layers) together. If the given
        change is 0, the error is 0.
        """
        lost, whole = (sum(pair[side] for pair in self.errors.values()) for side in (0, 1))
        return math.sqrt(lost / whole) if whole else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        """The Linear with the largest relative error, and that error."""
        relative = {name: math.sqrt(lost / whole) if whole else 0.0 for name, (lost, whole) in self.errors.items()}
        return max(relative.items(), key=lambda item: item[1])

    def __or__(self, other: Cut) -> Cut:
        """Return a LoRA with the Linears of this LoRA and of the LoRA `other`. For a Linear that is in both, the arrays
        and the approximation error of `other` are used.
        """
        return Cut(self.arrays | other.arrays, {**self.errors, **other.errors})


def join(parts: Sequence[Part]) -> tuple[Arrays, Scales]:
    """Join several LoRAs into one LoRA, and return its (arrays, scales). `parts` lists (arrays, scales, strength), one
    for each LoRA. The change of each LoRA is multiplied by its strength. The joined LoRA makes the sum of these
    changes, with scales of 1.

    The rank of a Linear is the sum of its ranks in `parts`. Raises ValueError if a part is not a plain LoRA, or if the
    shapes of a Linear differ.
    """
    arrays: Arrays = {}
    for name in dict.fromkeys(name for _, scales, _ in parts for name in scales):
        downs, ups = [], []
        for source, scales, strength in parts:
            if name in scales:
                down_RI, up_OR = plain_pair(source, name)
                downs.append(down_RI)
                ups.append(up_OR * (scales[name] * strength))
        shapes = {(up.shape[0], down.shape[1]) for up, down in zip(ups, downs, strict=True)}
        if len(shapes) > 1:
            raise ValueError(f"{name} has the shapes {sorted(shapes)} in these adapters: are they of one model?")
        arrays |= {name + lora.A: mx.concatenate(downs), name + lora.B: mx.concatenate(ups, axis=1)}
    return arrays, dict.fromkeys((key.removesuffix(lora.A) for key in arrays if key.endswith(lora.A)), 1.0)


def plain_pair(arrays: Mapping[str, mx.array], name: str) -> tuple[mx.array, mx.array]:
    """Return the matrices (A, B) of the Linear `name` in float32. `arrays` maps names such as "<linear>.lora_A.weight"
    to the arrays of an adapter. Raises ValueError if the adapter of this Linear is not a plain LoRA.
    """
    own = lora.arrays_of_linear(arrays, name)
    if own.keys() != {lora.A, lora.B}:
        raise ValueError(f"{name} has a DoRA, a LoKr or a whole difference; only plain LoRAs can be combined and resized")
    return own[lora.A].astype(mx.float32), own[lora.B].astype(mx.float32)


def resize(arrays: Mapping[str, mx.array], scales: Mapping[str, float], rank: int) -> Cut:
    """Approximate a LoRA by a LoRA of lower rank, as closely as possible, and return it as a `Cut`. `arrays` maps names
    such as "<linear>.lora_A.weight" to the arrays of the given LoRA. `scales` maps each of its Linears to the factor of
    its change. `rank` is the largest rank of the result. Raises ValueError if the given adapter is not a plain LoRA.

    Each Linear of the new LoRA is made from the largest singular values of the given change.
    """
    found: Arrays = {}
    errors = {}
    for name, scale in scales.items():
        down_RI, up_OR = (np.asarray(each, dtype=np.float64) for each in plain_pair(arrays, name))
        # B A = Q_b (R_b R_a^T) Q_a^T: the singular values of the large product are those of the small one in brackets.
        basis_OR, upper_b = np.linalg.qr(up_OR * scale)
        basis_IR, upper_a = np.linalg.qr(down_RI.T)
        left, values, right = np.linalg.svd(upper_b @ upper_a.T)
        found |= _pair(name, (basis_OR @ left)[:, :rank], values[:rank], (right @ basis_IR.T)[:rank])
        errors[name] = float((values[rank:] ** 2).sum()), float((values**2).sum())
    return Cut(found, errors)


def extract(name: str, difference_OI: mx.array, rank: int) -> Cut:
    """Return a LoRA that approximates the change of one weight matrix. `name` is the name of the Linear.
    `difference_OI` is the changed matrix minus the original one, `(outputs, inputs)`. The LoRA has at most the rank
    `rank`. If all differences are 0, the result has no arrays.
    """
    change_OI = np.asarray(difference_OI.astype(mx.float32), dtype=np.float64)
    whole = float((change_OI**2).sum())
    if not whole:
        return Cut({}, {})
    left, values, right = _largest(change_OI, rank)
    lost = max(whole - float((values**2).sum()), 0.0)
    return Cut(_pair(name, left, values, right), {name: (lost, whole)})


def _largest(matrix_OI: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the largest singular values of a matrix with their vectors, as (left, values, right). At most `rank`
    values are returned, the largest first. Values so small that they are only rounding errors are left out. For R
    values, `left` has the shape `(outputs, R)` and `right` has the shape `(R, inputs)`.

    The eigenvectors of the smaller Gram matrix take a fraction of the time of a whole decomposition.
    """
    if matrix_OI.shape[0] < matrix_OI.shape[1]:
        left, values, right = _largest(matrix_OI.T, rank)
        return right.T, values, left.T
    squares, vectors = np.linalg.eigh(matrix_OI.T @ matrix_OI)
    values = np.sqrt(np.maximum(squares[::-1][:rank], 0))
    kept = values > NEGLIGIBLE * values[0]
    right_IR, values = vectors[:, ::-1][:, :rank][:, kept], values[kept]
    return matrix_OI @ right_IR / values, values, right_IR.T


def _pair(name: str, left_OR: np.ndarray, values_R: np.ndarray, right_RI: np.ndarray) -> Arrays:
    """Return the LoRA of the Linear `name` as a dict with its two arrays, A and B in float32. The product B A is
    `left_OR diag(values_R) right_RI`, a singular value decomposition. Both A and B are multiplied by the square roots
    of the singular values. A and B then have values of similar size.
    """
    roots = np.sqrt(values_R)
    down, up = roots[:, None] * right_RI, left_OR * roots
    return {name + lora.A: mx.array(down.astype(np.float32)), name + lora.B: mx.array(up.astype(np.float32))}
