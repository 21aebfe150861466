"""Scaled dot-product attention whose gradient stores no (query rows x key rows) matrix of attention scores.

Three ways of computing the gradient need little memory. On CUDA, MLX has a fused gradient for half precision and a number
of query rows that is a multiple of 128; the queries are padded to such a number, and the extra rows are discarded. On
Metal, newer versions of MLX compute the gradient in blocks; a small trial gradient shows whether the installed version
does. Everywhere else, attention is computed here for one chunk of query rows at a time. The scores of a chunk are computed
again in the backward pass, so only one chunk's scores are in memory.

B batch, H heads, L query rows, S key rows, K head width, C query rows of a chunk.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import mlx.core as mx

from stages import kernels
from stages.models.elementwise import slow_exp, softmax
from stages.own_gradient import OwnGradient

FUSED_ROWS = 128  # the fused gradient needs a multiple of this many query rows
METAL_WIDTHS = (64, 72, 80, 96, 128)  # head widths of the fused forward kernel on Metal
PROBE = 8, 1536  # heads and query rows of the small gradient that shows whether MLX keeps scores
CHUNK_BYTES = 256 << 20  # of one chunk's (batch, heads, chunk rows, key rows) matrix; large enough to keep a GPU busy


def attention(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float, mask: mx.array | None = None) -> mx.array:
    """Return softmax(scale q k^T) v. The gradient is computed with little memory. Queries and the result have the shape
    (batch, heads, query rows, width). Keys and values have the shape (batch, heads, key rows, width). `mask` broadcasts to
    (batch, heads, query rows, key rows). A boolean mask hides the scores at which it is False. Any other mask is added to
    the scores.

    With a mask, MLX's own gradient is used.
    """
    L = q_BHLK.shape[2]
    if mask is None and fused_gradient(q_BHLK):
        q_BHLK = mx.pad(q_BHLK, [(0, 0), (0, 0), (0, -L % FUSED_ROWS), (0, 0)]) if L % FUSED_ROWS else q_BHLK
        y_BHLK = mx.fast.scaled_dot_product_attention(q_BHLK, k_BHSK, v_BHSK, scale=scale)
        return one_layout(y_BHLK[:, :, :L])
    if mask is None and blocked_gradient(q_BHLK):
        return divided(q_BHLK, k_BHSK, v_BHSK, scale)
    if mask is None and chunk_rows(q_BHLK, k_BHSK) < L:
        return chunked(q_BHLK, k_BHSK, v_BHSK, scale)
    if mask is None and slow_exp(q_BHLK):
        return kept(q_BHLK, k_BHSK, v_BHSK, scale)
    found: mx.array = mx.fast.scaled_dot_product_attention(q_BHLK, k_BHSK, v_BHSK, scale=scale, mask=mask)
    return found


def kept(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float) -> mx.array:
    """Return softmax(scale q k^T) v, and keep the result of softmax in memory for the gradient. `q_BHLK` has the shape
    `(batch, heads, query rows, width)`. Keys and values have the shape `(batch, heads, key rows, width)`. The result
    has the shape of `q_BHLK`.

    This is faster where softmax takes longer than the matrix products. MLX's products of many matrices copy a strided
    input each time. So each input is copied here, once.
    """
    q, k, v = (mx.contiguous(x) for x in (q_BHLK, k_BHSK, v_BHSK))
    made: Any = _kept(scale * q, k, v)
    y_BHLK: mx.array = made[0]
    return y_BHLK


@OwnGradient
def _kept(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array) -> tuple[mx.array, mx.array]:
    p_BHLS = softmax(q_BHLK @ k_BHSK.swapaxes(-1, -2))
    return p_BHLS @ v_BHSK, p_BHLS


@_kept.vjp
def _kept_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array, mx.array]:
    (q_BHLK, k_BHSK, v_BHSK), (y_BHLK, p_BHLS) = primals, outputs
    dy_BHLK = mx.contiguous(cotangents[0])
    pull_BHL1 = (dy_BHLK * y_BHLK).sum(-1, keepdims=True)
    ds_BHLS = p_BHLS * (dy_BHLK @ v_BHSK.swapaxes(-1, -2) - pull_BHL1)
    return ds_BHLS @ k_BHSK, ds_BHLS.swapaxes(-1, -2) @ q_BHLK, p_BHLS.swapaxes(-1, -2) @ dy_BHLK


def one_layout(y_BHLK: mx.array) -> mx.array:
    """Return the values of `y_BHLK`, unchanged. `y_BHLK` is the result of attention, `(batch, heads, query rows,
    width)`. The function only matters in the backward pass. There, the gradient of the result is copied to memory in
    one fixed order: by batch, then query row, then head, then width. The values and the shape of the gradient stay as
    they are.

    MLX 0.32 caches cuDNN's graph of the gradient by the shapes and strides of q, k and v alone. A later gradient in
    another layout, such as a view of a wider array, would be read in the layout of the first one, beyond its end.
    """
    found: Any = _dense_gradient(y_BHLK.swapaxes(1, 2))
    y_BLHK: mx.array = found
    return y_BLHK.swapaxes(1, 2)


@OwnGradient
def _dense_gradient(x: mx.array) -> mx.array:
    return x


@_dense_gradient.vjp
def _dense_gradient_vjp(_: mx.array, dx: mx.array, __: mx.array) -> mx.array:
    return mx.contiguous(dx)


def fused_gradient(q_BHLK: mx.array) -> bool:
    """Return True if the device computes the gradient of attention in one fused kernel for these queries. The answer
    depends on the dtype and the width of `q_BHLK`, `(batch, heads, query rows, width)`.

    cuDNN has one in half precision, for a width of at most 128.
    """
    on = mx.cuda.is_available() and mx.default_device() == mx.gpu and os.environ.get("MLX_CUDA_USE_CUDNN_SDPA", "1") != "0"
    return on and q_BHLK.dtype in (mx.bfloat16, mx.float16) and q_BHLK.shape[-1] <= 128 and q_BHLK.shape[-1] % 8 == 0


def blocked_gradient(q_BHLK: mx.array) -> bool:
    """Return True if Metal computes the gradient of attention in blocks for these queries, without keeping all attention
    scores. Only newer versions of MLX do. `q_BHLK` is `(batch, heads, query rows, width)`.

    The first call on Metal computes a small gradient. Call it before a function is traced.
    """
    metal = mx.metal.is_available() and mx.default_device() == mx.gpu and q_BHLK.shape[-1] in METAL_WIDTHS
    return metal and not keeps_scores(q_BHLK.dtype, q_BHLK.shape[-1])


@functools.cache
def keeps_scores(dtype: mx.Dtype, width: int) -> bool:
    """Return True if MLX's own gradient of attention stores the matrix of attention scores. `dtype` is that of the queries,
    and `width` is the width of a head. A small gradient is computed, and the answer follows from its peak memory. The
    result is cached.
    """
    q_BHLK = mx.random.normal((1, *PROBE, width)).astype(dtype)
    mx.eval(q_BHLK)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    gradient = mx.grad(lambda q: mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1).astype(mx.float32).sum())
    mx.eval(gradient(q_BHLK))
    heads, rows = PROBE
    return mx.get_peak_memory() - held > heads * rows * rows * dtype.size


def divided(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float) -> mx.array:
    """Return softmax(scale q k^T) v, computed for a few query rows at a time with MLX's own attention and gradient. The
    queries `q_BHLK` and the result have the shape (batch, heads, query rows, width). The keys `k_BHSK` and the values
    `v_BHSK` have the shape (batch, heads, key rows, width). `scale` is a number that multiplies the scores.

    On Metal, one kernel may take at most `kernels.LIMIT` floating-point operations. The number of query rows is chosen
    so that each kernel keeps to this limit, but is at least 1. On other devices, all query rows are computed at once.
    """
    B, H, L, K = q_BHLK.shape
    some = kernels.slices(L, kernels.most_items(2 * B * H * kernels.product_flop(1, K, k_BHSK.shape[2])))
    parts = [mx.fast.scaled_dot_product_attention(q_BHLK[:, :, rows], k_BHSK, v_BHSK, scale=scale) for rows in some]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def fused_forward(q_BHLK: mx.array) -> bool:
    """Return True if the forward pass of attention runs in one fused kernel. Such a kernel keeps no attention scores in
    memory. The answer depends on the default device and on the queries `q_BHLK`, `(batch, heads, rows, width)`.
    """
    metal = mx.metal.is_available() and mx.default_device() == mx.gpu and q_BHLK.shape[-1] in METAL_WIDTHS
    return metal or fused_gradient(q_BHLK)


def forward_score_bytes(q_BHLK: mx.array) -> int:
    """Return the peak memory, in bytes, that attention scores take in a forward pass of `attention`. No gradient is
    computed in that pass. `q_BHLK` holds the queries, `(batch, heads, rows, width)`. The keys are assumed to have the
    same shape.
    """
    B, H, L, _ = q_BHLK.shape
    return 0 if fused_forward(q_BHLK) else min(B * H * L * L * q_BHLK.dtype.size, CHUNK_BYTES)


def chunk_rows(q_BHLK: mx.array, k_BHSK: mx.array) -> int:
    """Return how many query rows `chunked` computes at once, at least 1. This is the largest number whose attention
    scores take at most `CHUNK_BYTES` bytes, over all samples and heads. A number above 128 is rounded down to a
    multiple of 128. `q_BHLK` is `(batch, heads, query rows, width)`. `k_BHSK` is `(batch, heads, key rows, width)`.
    """
    B, H, _, _ = q_BHLK.shape
    rows = CHUNK_BYTES // (B * H * k_BHSK.shape[2] * q_BHLK.dtype.size)
    return int(max(1, rows - rows % FUSED_ROWS if rows > FUSED_ROWS else rows))


def chunked(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float, rows: int | None = None) -> mx.array:
    """Compute softmax(scale q k^T) v in chunks of `rows` query rows. Only one chunk's scores are in memory, in the
    forward pass and in the gradient. Queries and the result have the shape (batch, heads, query rows, width). Keys and
    values have the shape (batch, heads, key rows, width). If `rows` is None, `chunk_rows` chooses the number.

    The result equals that of `attention` up to rounding. As softmax runs over the keys, a chunk of queries needs no
    running maximum and no saved statistics.
    """
    L = q_BHLK.shape[2]
    C = rows or chunk_rows(q_BHLK, k_BHSK)
    starts = range(0, L, C)

    @OwnGradient
    def forward(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for start in starts:
            q_BHCK = after(q_BHLK[:, :, start : start + C], parts[-1:])
            parts.append(_attended(q_BHCK, k_BHSK, v_BHSK, scale))
        return mx.concatenate(parts, axis=2)

    @forward.vjp
    def backward(primals: tuple[mx.array, ...], dy_BHLK: mx.array, y_BHLK: mx.array) -> tuple[mx.array, ...]:
        q_BHLK, k_BHSK, v_BHSK = primals
        dq_parts: list[mx.array] = []
        dk_BHSK = dv_BHSK = mx.zeros(k_BHSK.shape, mx.float32)
        for start in starts:
            q, dy, y = (x[:, :, start : start + C] for x in (q_BHLK, dy_BHLK, y_BHLK))
            q = after(scale * q, [dk_BHSK, dv_BHSK, *dq_parts[-1:]])
            p_BHCS = softmax(q @ k_BHSK.swapaxes(-1, -2))
            dv_BHSK = dv_BHSK + (p_BHCS.swapaxes(-1, -2) @ dy).astype(mx.float32)
            pull_BHC1 = (dy.astype(mx.float32) * y).sum(-1, keepdims=True)
            ds_BHCS = (p_BHCS * ((dy @ v_BHSK.swapaxes(-1, -2)) - pull_BHC1)).astype(q.dtype)
            dk_BHSK = dk_BHSK + (ds_BHCS.swapaxes(-1, -2) @ q).astype(mx.float32)
            dq_parts.append(scale * (ds_BHCS @ k_BHSK))
        return mx.concatenate(dq_parts, axis=2), dk_BHSK.astype(k_BHSK.dtype), dv_BHSK.astype(v_BHSK.dtype)

    y_BHLK: mx.array = forward(q_BHLK, k_BHSK, v_BHSK)
    return y_BHLK


def _attended(q_BHCK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float) -> mx.array:
    """Return softmax(scale q k^T) v for one chunk of the query rows. `q_BHCK` has the shape `(batch, heads, chunk rows,
    width)`. Keys and values have the shape `(batch, heads, key rows, width)`. The result has the shape of `q_BHCK`.
    """
    if slow_exp(q_BHCK):
        y_BHCK: mx.array = softmax((scale * q_BHCK) @ k_BHSK.swapaxes(-1, -2)) @ v_BHSK
    else:
        y_BHCK = mx.fast.scaled_dot_product_attention(q_BHCK, k_BHSK, v_BHSK, scale=scale)
    return y_BHCK


def after(x: mx.array, done: list[mx.array]) -> mx.array:
    """Return an array with the values of `x`. MLX computes it only after the arrays in `done` are computed. If `done`
    is empty, return `x` itself.

    Without this order, MLX would start all chunks of a computation at once and hold them all in memory.
    """
    found: mx.array = mx.depends([x], done)[0] if done else x
    return found
