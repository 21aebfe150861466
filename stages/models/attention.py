"""What the architectures share: attention whose gradient stores no (query rows x key rows) matrix of scores, and small layers.

On CUDA, MLX has a fused gradient of attention for half precision; on Metal, newer versions of MLX compute it in blocks.
Elsewhere attention runs in chunks of query rows, whose scores the backward pass computes again.
B batch, H heads, L query rows, S key rows, K head width, C query rows of a chunk, b items of a part of the batch.
"""

from __future__ import annotations

import functools
import io
import math
import os
import sys
from typing import Any

import mlx.core as mx

from stages import kernels
from stages.own_gradient import OwnGradient

FUSED_ROWS = 128  # the fused gradient needs a multiple of this many query rows
METAL_WIDTHS = (64, 72, 80, 96, 128)  # head widths of the fused forward kernel on Metal
CHUNK_BYTES = 256 << 20  # of one chunk's (batch, heads, chunk rows, key rows) matrix; large enough to keep a GPU busy


def attention(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float, mask: mx.array | None = None) -> mx.array:
    """softmax(scale q k^T) v. `mask` broadcasts to BHLS and is boolean or added; with it, the gradient is MLX's own."""
    L = q_BHLK.shape[2]
    if mask is None and fused_gradient(q_BHLK):
        # Rows of queries do not depend on each other: the extra ones are cut off again.
        if kernels.differentiated() and L % FUSED_ROWS:
            q_BHLK = mx.pad(q_BHLK, [(0, 0), (0, 0), (0, -L % FUSED_ROWS), (0, 0)])
        y_BHLK = mx.fast.scaled_dot_product_attention(q_BHLK, k_BHSK, v_BHSK, scale=scale)
        return one_layout(y_BHLK[:, :, :L])
    if mask is None and blocked_gradient(q_BHLK):
        return divided(q_BHLK, k_BHSK, v_BHSK, scale)
    if mask is None and chunk_rows(q_BHLK, k_BHSK) < L:
        return chunked(q_BHLK, k_BHSK, v_BHSK, scale)
    if mask is None and slow_exp(q_BHLK):
        return kept(scale * q_BHLK, k_BHSK, v_BHSK)
    found: mx.array = mx.fast.scaled_dot_product_attention(q_BHLK, k_BHSK, v_BHSK, scale=scale, mask=mask)
    return found


def one_layout(y_BHLK: mx.array) -> mx.array:
    """Identity whose gradient is copied to memory in the order B, L, H, K."""
    return _dense_gradient(y_BHLK.swapaxes(1, 2)).swapaxes(1, 2)


@OwnGradient
def _dense_gradient(x: mx.array) -> mx.array:
    return x


@_dense_gradient.vjp
def _dense_gradient_vjp(_: mx.array, dx: mx.array, __: mx.array) -> mx.array:
    # MLX 0.32 caches cuDNN's graph of the gradient by the shapes and strides of q, k and v alone. A gradient in another
    # layout, such as a view of a wider array, would be read in the layout of the first one, beyond its end.
    return mx.contiguous(dx)


def fused_gradient(q_BHLK: mx.array) -> bool:
    """Whether cuDNN computes the gradient in one kernel: half precision, head width at most 128."""
    on = mx.cuda.is_available() and mx.default_device() == mx.gpu and os.environ.get("MLX_CUDA_USE_CUDNN_SDPA", "1") != "0"
    return on and q_BHLK.dtype in (mx.bfloat16, mx.float16) and q_BHLK.shape[-1] <= 128 and q_BHLK.shape[-1] % 8 == 0


def blocked_gradient(q_BHLK: mx.array) -> bool:
    metal = mx.metal.is_available() and mx.default_device() == mx.gpu and q_BHLK.shape[-1] in METAL_WIDTHS
    return metal and not keeps_scores(q_BHLK.dtype, q_BHLK.shape[-1])


@functools.cache
def keeps_scores(dtype: mx.Dtype, width: int) -> bool:
    """Whether MLX's own gradient stores the matrix of scores: whether its graph, which is not computed, has their softmax."""
    q_BHLK, graph = mx.zeros((1, 8, 1536, width), dtype), io.StringIO()
    gradient = mx.grad(lambda q: mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1).astype(mx.float32).sum())
    mx.export_to_dot(graph, gradient(q_BHLK))
    return "Softmax" in graph.getvalue()


def divided(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float) -> mx.array:
    """MLX's own attention in slices of query rows, so that on Metal no kernel takes more than `kernels.LIMIT` operations."""
    B, H, L, K = q_BHLK.shape
    some = kernels.slices(L, kernels.most_items(2 * B * H * kernels.product_flop(1, K, k_BHSK.shape[2])))
    parts = [mx.fast.scaled_dot_product_attention(q_BHLK[:, :, rows], k_BHSK, v_BHSK, scale=scale) for rows in some]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def fused_forward(q_BHLK: mx.array) -> bool:
    """Whether the forward pass is one kernel that keeps no scores in memory."""
    metal = mx.metal.is_available() and mx.default_device() == mx.gpu and q_BHLK.shape[-1] in METAL_WIDTHS
    return metal or fused_gradient(q_BHLK)


def forward_score_bytes(q_BHLK: mx.array) -> int:
    """Peak bytes of scores in a forward pass of `attention` without gradient, with as many keys as queries."""
    B, H, L, _ = q_BHLK.shape
    return 0 if fused_forward(q_BHLK) else min(B * H * L * L * q_BHLK.dtype.size, CHUNK_BYTES)


def chunk_rows(q_BHLK: mx.array, k_BHSK: mx.array) -> int:
    B, H, _, _ = q_BHLK.shape
    rows = CHUNK_BYTES // (B * H * k_BHSK.shape[2] * q_BHLK.dtype.size)
    return int(max(1, rows - rows % FUSED_ROWS if rows > FUSED_ROWS else rows))


def chunked(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float, rows: int | None = None) -> mx.array:
    """softmax(scale q k^T) v with the scores of one chunk in memory, also in the gradient. `rows` None: `chunk_rows`."""
    C = rows or chunk_rows(q_BHLK, k_BHSK)
    starts = range(0, q_BHLK.shape[2], C)

    @OwnGradient
    def forward(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array) -> mx.array:
        # Softmax runs over the keys: a chunk of queries needs no running maximum and no saved statistics.
        parts: list[mx.array] = []
        for start in starts:
            q_BHCK = after(q_BHLK[:, :, start : start + C], parts[-1:])
            if slow_exp(q_BHCK):
                parts.append(softmax((scale * q_BHCK) @ k_BHSK.swapaxes(-1, -2)) @ v_BHSK)
            else:
                parts.append(mx.fast.scaled_dot_product_attention(q_BHCK, k_BHSK, v_BHSK, scale=scale))
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
            dq, dk, dv = pull_back(q, k_BHSK, v_BHSK, p_BHCS, y, dy)
            dk_BHSK, dv_BHSK = dk_BHSK + dk.astype(mx.float32), dv_BHSK + dv.astype(mx.float32)
            dq_parts.append(scale * dq)
        return mx.concatenate(dq_parts, axis=2), dk_BHSK.astype(k_BHSK.dtype), dv_BHSK.astype(v_BHSK.dtype)

    return forward(q_BHLK, k_BHSK, v_BHSK)


def kept(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, mask: mx.array | None = None, most: int | None = None) -> mx.array:
    """softmax(q k^T + mask) v with the probabilities kept for the gradient; the mask gets none. `most`: of the batch at a time.

    Faster where softmax takes longer than the matrix products.
    """
    parts = kernels.slices(q_BHLK.shape[0], most)

    @OwnGradient
    def forward(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array) -> list[mx.array]:
        done: list[mx.array] = []
        kept: list[mx.array] = []
        for part in parts:
            scores = after(q_BHLK[part], done[-1:]) @ k_BHSK[part].swapaxes(-1, -2)
            kept.append(softmax(scores if mask is None else scores + mask[part]))
            done.append(kept[-1] @ v_BHSK[part])
        return [mx.concatenate(done), *kept]

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        y_BHLK, *kept = outputs
        dy_BHLK = mx.contiguous(cotangents[0])
        done: list[tuple[mx.array, ...]] = []
        for part, p_bHLS in zip(parts, kept, strict=True):
            before = list(done[-1]) if done else [dy_BHLK]
            q, k, v, y, dy = mx.depends([x[part] for x in (*primals, y_BHLK, dy_BHLK)], before)
            done.append(pull_back(q, k, v, p_bHLS, y, dy))
        return [mx.concatenate(list(each)) for each in zip(*done, strict=True)]

    # MLX's products of many matrices copy a strided input each time; here each is copied once.
    return forward(*(mx.contiguous(x) for x in (q_BHLK, k_BHSK, v_BHSK)))[0]


def pull_back(q: mx.array, k: mx.array, v: mx.array, p: mx.array, y: mx.array, dy: mx.array) -> tuple[mx.array, ...]:
    """Gradients of q, k and v for y = p v, p = softmax(q k^T)."""
    # Softmax pulls back p * (dp - sum(dp * p)). The sum over keys equals sum(dy * y), of the width of a head.
    pull = (dy.astype(mx.float32) * y).sum(-1, keepdims=True)
    ds = (p * (dy @ v.swapaxes(-1, -2) - pull)).astype(q.dtype)
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy


def after(x: mx.array, done: list[mx.array]) -> mx.array:
    """`x`, computed only once `done` is."""
    # Without this order MLX would start all chunks at once and hold them all in memory.
    found: mx.array = mx.depends([x], done)[0] if done else x
    return found


def slow_exp(x: mx.array) -> bool:
    """Whether `mx.exp` is slower than a power of e: float32 on a CPU under Linux."""
    # MLX 0.32 computes exp there with calls of fma: 10 ns an element, and 16 ns for sigmoid. Its power calls the C library's
    # powf, which takes 4 ns.
    return sys.platform.startswith("linux") and x.dtype == mx.float32 and mx.default_device() == mx.cpu


def exp(x: mx.array) -> mx.array:
    # The rounding of e to float32 adds a relative error of 3e-8 |x|.
    y: mx.array = mx.power(mx.array(math.e, mx.float32), x) if slow_exp(x) else mx.exp(x)
    return y


def sigmoid(x: mx.array) -> mx.array:
    y: mx.array = mx.reciprocal(1 + mx.power(mx.array(1 / math.e, mx.float32), x)) if slow_exp(x) else mx.sigmoid(x)
    return y


def silu(x: mx.array) -> mx.array:
    return x * sigmoid(x)


def softmax(x: mx.array) -> mx.array:
    """Over the last axis, with sums in float32."""
    if not slow_exp(x):
        found: mx.array = mx.softmax(x, axis=-1, precise=True)
        return found
    y = exp(x - mx.max(x, axis=-1, keepdims=True))
    return y * mx.reciprocal(mx.sum(y, axis=-1, keepdims=True))


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Over the last axis. The weight is frozen: its gradient is zero."""

    @OwnGradient
    def forward(x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, eps)

    @forward.vjp
    def backward(primals: Any, dy: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        # MLX's own gradient of the weight would be a sum over all rows.
        x, weight = primals
        return mx.vjp(lambda x: mx.fast.rms_norm(x, None, eps), [x], [dy * weight])[1][0], mx.zeros_like(weight)

    return forward(x, weight)


def plain_linear(name: str, weight: Any, x: mx.array) -> mx.array:
    return kernels.linear(x, weight)
