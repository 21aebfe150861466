"""Scaled dot-product attention.

B batch, H heads, L query rows, S key rows, K head width.
"""

from __future__ import annotations

import mlx.core as mx


def attention(q_BHLK: mx.array, k_BHSK: mx.array, v_BHSK: mx.array, scale: float, mask: mx.array | None = None) -> mx.array:
    """Attention of every query over every key: (B,H,L,K). `mask` is additive or boolean, broadcast to (B,H,L,S)."""
    return mx.fast.scaled_dot_product_attention(q_BHLK, k_BHSK, v_BHSK, scale=scale, mask=mask)
