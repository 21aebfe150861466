"""Adapters: what the arrays of each kind add to a frozen Linear, to its output in training and to its weight when merged.

    LoRA   y = x W^T + scale (x A^T) B^T; A (R, I), B (O, R). Hu et al. 2021, arXiv 2106.09685
    DoRA   y = x W'^T, W' = m (W + s B A) / |W + s B A| row by row; m starts as |W|. Liu et al. 2024, arXiv 2402.09353
    LoKr   y = x (W + scale w1 (x) w2)^T, (x) the Kronecker product. LyCORIS, Yeh et al. 2024, arXiv 2309.14859. w1 (a, b), and
           w2 (c, d) whole or w2_a (c, R) times w2_b (R, d), with a c = O and b d = I
    ortho  y = x W^T + scale (x q^T l p^T - x q0^T l0 p0^T), a LoRA that starts with orthogonal factors; q (R, I), p (O, R),
           l (R,) are trained, q0 and p0 l0 kept. Only in training: files hold a LoRA. Soboleva et al. 2025, arXiv 2507.05964
    whole  y = x (W + D)^T, for Linears that are small or fresh, such as a projection head; files hold D, not W + D

In names of arrays: O outputs, c a chunk of them, I inputs, R rank, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from stages import kernels
from stages.own_gradient import OwnGradient
from stages.tuner.weights import Arrays, QuantizedWeight, Weight, row_chunks, select_rows, unpack_after, unpacked

# An adapter: float32 arrays by "<linear><suffix>". The suffixes that a Linear has give its kind.
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y
Shapes = Mapping[str, tuple[int, ...]]  # of the arrays of one Linear, by suffix
Pair = tuple[mx.array, mx.array]  # A and B, in the dtype of x
Scale = float | mx.array  # of an adapter; an array (samples, R) is one factor for each sample and rank, of a LoRA alone

A, B = ".lora_A.weight", ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"  # (O,); PEFT's name
W1, W2, W2_A, W2_B = ".lokr_w1", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b"
DIFF = ".diff"  # (O, I); LyCORIS' name
Q, P, LAMBDA = ".ortho_q", ".ortho_p", ".ortho_lambda"
START = Q0, P0 = ".ortho_q0", ".ortho_p0"  # frozen; P0 is p0 times l0
SUFFIXES = (A, B, MAGNITUDE, W1, W2, W2_A, W2_B, DIFF, Q, P, LAMBDA, Q0, P0)
ZERO_AT_START = (B, W2, W2_B, DIFF)  # arrays that start at zero, so that a fresh adapter changes nothing
NORM_CHUNK = 1 << 24  # values of a weight that exist in float32 at once for DoRA's norms: 64 MB


@dataclass(frozen=True)
class AdaptedLinear:
    """Computes the Linears of one block with their adapters. Names are within the block."""

    adapters: Mapping[str, mx.array]
    scales: Mapping[str, Scale]

    # The arrays are cast to the dtype of x here, inside the gradient: float32 arrays would widen all activations.
    def __call__(self, name: str, weight: Any, x: mx.array) -> mx.array:
        own = arrays_of_linear(self.adapters, name)
        return kind_of(own).output(x, weight, own, self.scales[name]) if own else product(x, weight)

    def of_samples(self, which: Callable[[mx.array], mx.array]) -> AdaptedLinear:
        """For a part of the batch, which `which` selects from an array of all samples."""
        return replace(self, scales={n: which(s) if isinstance(s, mx.array) else s for n, s in self.scales.items()})


def merge(weight: Weight, arrays: Mapping[str, mx.array], scale: float) -> mx.array:
    """The unpacked weight with its adapter, in its own dtype; computed in float32 and rounded once."""
    # Not packed again afterwards: that would lose a change as small as an adapter's.
    dense_OI = unpacked(weight)
    return kind_of(arrays).merged(dense_OI.astype(mx.float32), arrays, scale).astype(dense_OI.dtype)


def arrays_of_linear(adapters: Mapping[str, mx.array], name: str) -> Arrays:
    # By suffix; empty if the Linear has no adapter.
    return {suffix: adapters[name + suffix] for suffix in SUFFIXES if name + suffix in adapters}


def largest_change(adapters: Mapping[str, mx.array]) -> mx.array:
    """Largest absolute value of the arrays that start at zero: 0 before the first update. Lazy."""
    changes = [value for name, value in adapters.items() if name.endswith(ZERO_AT_START)]
    stems = [name.removesuffix(P) for name in adapters if name.endswith(P)]
    changes += [adapters[stem + P] * adapters[stem + LAMBDA] - adapters[stem + P0] for stem in stems]
    return mx.max(mx.stack([mx.max(mx.abs(value)) for value in changes]))


def split_by_block(blocks: Sequence[str], values: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """One dict per block from the part of the key after the block's name, and the keys that belong to no block."""
    found: dict[str, dict[str, Any]] = {block: {} for block in blocks}
    unknown = []
    # Each key is looked at once: the device has no work while a step begins.
    for key, value in values.items():
        end = key.find(".")
        while end >= 0 and key[:end] not in found:
            end = key.find(".", end + 1)
        if end < 0:
            unknown.append(key)
        else:
            found[key[:end]][key[end + 1 :]] = value
    return list(found.values()), unknown


def check_fits(linears: Mapping[str, tuple[int, ...]], adapters: Mapping[str, mx.array], scales: Iterable[str]) -> None:
    """Raises ValueError unless the model has every Linear of the adapter in the same shape: name -> (outputs, inputs)."""
    for name in scales:
        shape, expected = linear_shape(arrays_of_linear(adapters, name)), linears.get(name)
        if expected is None:
            raise ValueError(f"the adapter has {name}, which the model lacks: is it an adapter of another model?")
        if expected != shape:
            raise ValueError(f"the adapter's {name} must have the shape {expected}, got {shape}: is it of another model?")


def linear_shape(arrays: Mapping[str, mx.array]) -> tuple[int, ...]:
    """(outputs, inputs)."""
    return kind_of(arrays).linear({suffix: value.shape for suffix, value in arrays.items()})


# The product of a Linear


def product(x: mx.array, weight: Weight, pair: Pair | None = None, scale: Scale = 1.0) -> mx.array:
    """x W^T + scale (x A^T) B^T as one operation, or x W^T without `pair`. No gradient for `weight`, which may be packed."""
    # A packed W is unpacked for the product and again for its gradient, and kept for neither. Over thousands of tokens this
    # is faster than a quantised product, which unpacks every tile of W once per tile of tokens.
    chunks = row_chunks(weight, x.size // x.shape[-1])

    def project_down(x: mx.array, down: mx.array) -> mx.array:
        return _scaled(kernels.linear(x, down), scale)

    # Automatic differentiation would pass over the wide outputs, and over the gradient of x, once more to add their terms.
    # Here they are added within the matrix products.
    @OwnGradient
    def forward(x: mx.array, *pair: mx.array) -> mx.array:
        low = project_down(x, pair[0]) if pair else None
        ys: list[mx.array] = []
        for rows in chunks:
            y = x @ _dense_rows(weight, rows, ys[-1] if ys else x).T
            ys.append(y if low is None else mx.addmm(y, low, pair[1][rows].T))
        return mx.concatenate(ys, axis=-1) if len(ys) > 1 else ys[0]

    @forward.vjp
    def backward(primals: Any, dy: mx.array, _: mx.array) -> Any:
        x, *pair = primals if isinstance(primals, tuple | list) else [primals]
        dx: mx.array | None = None
        for rows in chunks:
            # Each unpacking depends on the result before it: the compiler would otherwise reuse, and so keep, the forward one.
            dense_cI = _dense_rows(weight, rows, dy if dx is None else dx)
            dx = dy[..., rows] @ dense_cI if dx is None else mx.addmm(dx, dy[..., rows], dense_cI)
        assert dx is not None
        if not pair:
            return dx
        down, up = pair
        dlow = _scaled(kernels.product(dy, up), scale)
        # x A^T is computed again: as an output of the forward pass it would make a recomputed block compute x W^T as well,
        # which the last Linear of that block does not need.
        by_down = kernels.product(_flat(dlow).T, _flat(x))
        by_up = kernels.product(_flat(dy).T, _flat(project_down(x, down)))
        return kernels.product(dlow, down, dx), by_down, by_up

    return forward(x, *(pair or ()))


def _scaled(x: mx.array, scale: Scale) -> mx.array:
    if isinstance(scale, mx.array):
        samples, ranks = scale.shape
        return x * scale.reshape(samples, *[1] * (x.ndim - 2), ranks).astype(x.dtype)
    # Without an operation if the scale is 1.
    return x if scale == 1 else scale * x


def _dense_rows(weight: Weight, rows: slice, after: mx.array) -> mx.array:
    # Unpacked only after `after` is computed, the result of the chunk before: one unpacked chunk in memory at a time.
    own = select_rows(weight, rows)
    return unpack_after(own, after).dense() if isinstance(own, QuantizedWeight) else own


def _flat(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])


# LoRA and DoRA


def _lora_output(x: mx.array, weight: Weight, own: Mapping[str, mx.array], scale: Scale) -> mx.array:
    return product(x, weight, (own[A].astype(x.dtype), own[B].astype(x.dtype)), scale)


def _lora_merged(wide_OI: mx.array, own: Mapping[str, mx.array], scale: float) -> mx.array:
    return wide_OI + scale * (own[B].astype(mx.float32) @ own[A].astype(mx.float32))


def _dora_output(x: mx.array, weight: Weight, own: Mapping[str, mx.array], scale: float) -> mx.array:
    # As in the paper (section 4.3) and in PEFT, the norm takes no gradient. It costs one more reading of the block's weights
    # than LoRA, and the outputs y of LoRA are kept for the gradient of m.
    y = _lora_output(x, weight, own, scale)
    norm_O = mx.stop_gradient(row_norms(weight, own[A], own[B], scale))
    return _add_gain(y, own[MAGNITUDE] / norm_O - 1)


def _dora_merged(wide_OI: mx.array, own: Mapping[str, mx.array], scale: float) -> mx.array:
    down_RI, up_OR = own[A].astype(mx.float32), own[B].astype(mx.float32)
    return (own[MAGNITUDE] / row_norms(wide_OI, down_RI, up_OR, scale))[:, None] * _lora_merged(wide_OI, own, scale)


def row_norms(weight: Weight, down_RI: mx.array, up_OR: mx.array, scale: float) -> mx.array:
    """Euclidean norm of each row of W + scale B A, (O,) float32, computed in chunks of rows."""
    wide_RI = down_RI.astype(mx.float32)
    rows = max(1, NORM_CHUNK // down_RI.shape[1])
    norms: list[mx.array] = []
    for start in range(0, up_OR.shape[0], rows):
        which = slice(start, start + rows)
        up_cR = mx.depends([up_OR[which]], norms[-1:])[0] if norms else up_OR[which]  # one chunk exists at a time
        weight_cI = unpacked(select_rows(weight, which)).astype(mx.float32)
        adapted_cI = weight_cI + scale * (up_cR.astype(mx.float32) @ wide_RI)
        norms.append(mx.sqrt(mx.sum(mx.square(adapted_cI), axis=1)))
    return mx.concatenate(norms)


@OwnGradient
def _add_gain(y: mx.array, gain_O: mx.array) -> mx.array:
    # 1 + gain is never formed: half precision would lose most bits of the gain.
    return y + gain_O.astype(y.dtype) * y


@_add_gain.vjp
def _add_gain_vjp(primals: Any, dz: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    y, gain_O = primals
    flat_NO = (dz * y).reshape(-1, y.shape[-1])
    # The sum over tokens as a matrix product, which adds in float32 on every backend; a half-precision sum does not.
    by_gain_O = (mx.ones((1, flat_NO.shape[0]), flat_NO.dtype) @ flat_NO)[0]
    return dz + gain_O.astype(y.dtype) * dz, by_gain_O.astype(gain_O.dtype)


def _ortho_output(x: mx.array, weight: Weight, own: Mapping[str, mx.array], scale: Scale) -> mx.array:
    twice = mx.concatenate([scale, scale], axis=-1) if isinstance(scale, mx.array) else scale
    return _lora_output(x, weight, _ortho_pair(own), twice)


def _ortho_merged(wide_OI: mx.array, own: Mapping[str, mx.array], scale: float) -> mx.array:
    return _lora_merged(wide_OI, _ortho_pair(own), scale)


def _ortho_pair(own: Mapping[str, mx.array]) -> Arrays:
    """A LoRA of twice the rank; both its halves have the ranks in order."""
    # q l p - q0 l0 p0 = q0 (l p - l0 p0) + (q - q0) l p. In half precision the difference of two products would be rounding.
    up_OR = own[P] * own[LAMBDA]
    return {A: mx.concatenate([own[Q0], own[Q] - own[Q0]]), B: mx.concatenate([up_OR - own[P0], up_OR], axis=1)}


def as_stored(adapters: Mapping[str, mx.array]) -> Arrays:
    """As files hold an adapter: orthogonal starts as LoRAs of twice the rank."""
    names = [key.removesuffix(Q) for key in adapters if key.endswith(Q)]
    pairs = {name + end: value for name in names for end, value in _ortho_pair(arrays_of_linear(adapters, name)).items()}
    return {key: value for key, value in adapters.items() if not key.endswith((Q, P, LAMBDA, *START))} | pairs


def split_start(adapters: Mapping[str, mx.array]) -> tuple[Arrays, Arrays]:
    """(trained arrays, frozen ones)."""
    frozen = {key: value for key, value in adapters.items() if key.endswith(START)}
    return {key: value for key, value in adapters.items() if key not in frozen}, frozen


# LoKr


def factorize(dimension: int, factor: int | None) -> tuple[int, int]:
    """(m, n) with m n = dimension, m the largest divisor up to sqrt(dimension) and `factor`."""
    # PEFT and LyCORIS give the same result for any factor up to sqrt(dimension).
    most = math.isqrt(dimension) if factor is None else min(factor, math.isqrt(dimension))
    m = next(n for n in range(most, 0, -1) if dimension % n == 0)
    return m, dimension // m


def lokr_shapes(outputs: int, inputs: int, rank: int, factor: int | None) -> dict[str, tuple[int, ...]]:
    (a, c), (b, d) = factorize(outputs, factor), factorize(inputs, factor)
    # LyCORIS' rule. A whole w2 has no rank to divide alpha by, so its scale is 1.
    if rank < max(c, d) / 2:
        return {W1: (a, b), W2_A: (c, rank), W2_B: (rank, d)}
    return {W1: (a, b), W2: (c, d)}


def lokr_output(x: mx.array, arrays: Mapping[str, mx.array]) -> mx.array:
    """x (w1 (x) w2)^T, not yet scaled, in the dtype of `x`."""
    # The Kronecker product is never built in training.
    w1_ab = arrays[W1].astype(x.dtype)
    a, b = w1_ab.shape
    x_bd = x.reshape(*x.shape[:-1], b, -1)
    if W2 in arrays:
        w2_cd = arrays[W2].astype(x.dtype)
        c, d = w2_cd.shape
        # Multiply in the order that has the smaller intermediate array.
        first = b * c <= a * d
        y_ac = _each(w1_ab, kernels.linear(x_bd, w2_cd)) if first else kernels.linear(_each(w1_ab, x_bd), w2_cd)
    else:
        w2_cR, w2_Rd = arrays[W2_A].astype(x.dtype), arrays[W2_B].astype(x.dtype)
        y_ac = kernels.linear(_each(w1_ab, kernels.linear(x_bd, w2_Rd)), w2_cR)
    return y_ac.reshape(*x.shape[:-1], -1)


def _each(left: mx.array, right: mx.array) -> mx.array:
    # `left` times each matrix of `right`; on Metal, a large stack in several kernels.
    flat = right.reshape(-1, *right.shape[-2:])
    rows, inner = left.shape
    found = kernels.slices(flat.shape[0], kernels.most_items(kernels.product_flop(rows, inner, flat.shape[-1])))
    if len(found) == 1:
        return left @ right
    whole = mx.concatenate([left @ flat[some] for some in found])
    return whole.reshape(*right.shape[:-2], *whole.shape[-2:])


def kronecker(arrays: Mapping[str, mx.array]) -> mx.array:
    """w1 (x) w2, (O, I) float32, not yet scaled."""
    w2_cd = arrays[W2] if W2 in arrays else arrays[W2_A].astype(mx.float32) @ arrays[W2_B].astype(mx.float32)
    return mx.kron(arrays[W1].astype(mx.float32), w2_cd.astype(mx.float32))


def _lokr_output(x: mx.array, weight: Weight, own: Mapping[str, mx.array], scale: float) -> mx.array:
    return product(x, weight) + _scaled(lokr_output(x, own), scale)


def _lokr_merged(wide_OI: mx.array, own: Mapping[str, mx.array], scale: float) -> mx.array:
    return wide_OI + scale * kronecker(own)


# A whole difference


def _whole_output(x: mx.array, weight: Weight, own: Mapping[str, mx.array], scale: float) -> mx.array:
    return product(x, weight) + _scaled(kernels.linear(x, own[DIFF].astype(x.dtype)), scale)


def _whole_merged(wide_OI: mx.array, own: Mapping[str, mx.array], scale: float) -> mx.array:
    return wide_OI + scale * own[DIFF]


@dataclass(frozen=True)
class Kind:
    name: str  # in messages
    suffixes: tuple[str, ...]
    linear: Callable[[Shapes], tuple[int, ...]]  # (outputs, inputs) of the Linear, from the shapes of the arrays
    output: Callable[[mx.array, Weight, Mapping[str, mx.array], Any], mx.array]  # (x, weight, arrays, scale) -> y
    merged: Callable[[mx.array, Mapping[str, mx.array], float], mx.array]  # (float32 weight, arrays, scale) -> its successor
    saved: Callable[[Shapes], int]  # values per token kept for the gradient, besides the Linear's input and output
    scaled: bool = True  # False: the scale is always 1


def _pair_linear(shapes: Shapes) -> tuple[int, int]:
    return shapes[B][0], shapes[A][1]


KINDS = (
    Kind("a LoRA", (A, B), _pair_linear, _lora_output, _lora_merged, lambda s: s[A][0]),
    Kind("a DoRA", (A, B, MAGNITUDE), _pair_linear, _dora_output, _dora_merged, lambda s: s[A][0] + s[B][0]),
    Kind(
        "a LoKr with a low-rank w2",
        (W1, W2_A, W2_B),
        lambda s: (s[W1][0] * s[W2_A][0], s[W1][1] * s[W2_B][1]),
        _lokr_output,
        _lokr_merged,
        lambda s: sum(s[W1]) * s[W2_A][1],
    ),
    Kind(
        "a LoKr with a whole w2",
        (W1, W2),
        lambda s: (s[W1][0] * s[W2][0], s[W1][1] * s[W2][1]),
        _lokr_output,
        _lokr_merged,
        lambda s: min(s[W1][1] * s[W2][0], s[W1][0] * s[W2][1]),
        scaled=False,
    ),
    Kind(
        "a LoRA with an orthogonal start",
        (Q, P, LAMBDA, Q0, P0),
        lambda s: (s[P][0], s[Q][1]),
        _ortho_output,
        _ortho_merged,
        lambda s: 2 * s[Q][0],
    ),
    Kind("a whole difference", (DIFF,), lambda s: s[DIFF], _whole_output, _whole_merged, lambda s: 0, scaled=False),
)
_BY_SUFFIXES = {frozenset(kind.suffixes): kind for kind in KINDS}


def kind_of(suffixes: Iterable[str]) -> Kind:
    """Raises ValueError for arrays that are no complete adapter of a Linear."""
    found = frozenset(suffixes)
    if found not in _BY_SUFFIXES:
        raise ValueError(f"the arrays {', '.join(sorted(found))} are not those of a LoRA, a DoRA, a LoKr or a whole difference")
    return _BY_SUFFIXES[found]
