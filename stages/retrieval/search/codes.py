"""Vectors of length 1 in 6 bits a value. Over 722 queries and 3,188 functions, of the exact top 10 of float16: 8 bits keep .997,
4 bits .965; halving the vectors by merging neighbours .851.
"""

from __future__ import annotations

import numpy as np

VALUES, BYTES = 4, 3  # four values in three bytes
LEVELS = 32  # on each side of zero


def pack(vectors_TD: np.ndarray) -> np.ndarray:
    """Uint8 (T, 3/4 D): the upper 4 bits of two values a byte, then the lower 2 bits of four a byte. D is a multiple of 4."""
    assert vectors_TD.shape[1] % VALUES == 0, f"the width of a vector must be a multiple of {VALUES}, got {vectors_TD.shape[1]}"
    largest_T = np.maximum(np.abs(vectors_TD).max(axis=1, keepdims=True), 1e-9)
    levels_TD = np.minimum(np.floor(vectors_TD / largest_T * LEVELS), LEVELS - 1) + LEVELS
    upper, lower = np.divmod(levels_TD.astype(np.uint8), 4)
    one, two = np.split(upper, 2, axis=1)
    a, b, c, d = np.split(lower, 4, axis=1)
    return np.concatenate([one | two << 4, a | b << 2 | c << 4 | d << 6], axis=1)


def unpack(packed: np.ndarray) -> np.ndarray:
    """Float32 (T, D), each vector of length 1."""
    width = packed.shape[1] // BYTES * VALUES
    # numpy shifts bytes one by one, and words of eight with SIMD: a quarter of the time.
    word = np.dtype(np.uint64 if width % 32 == 0 else np.uint8)
    each = int.from_bytes(b"\1" * word.itemsize)  # 1 in every byte of a word
    half, quarter = width // 2 // word.itemsize, width // 4 // word.itemsize
    words = np.ascontiguousarray(packed).view(word)
    upper, lower = words[:, :half], words[:, half:]
    levels = np.empty((len(words), 2 * half), word)
    np.left_shift(upper & word.type(15 * each), word.type(2), out=levels[:, :half])
    np.bitwise_and(upper >> word.type(2), word.type(60 * each), out=levels[:, half:])
    for number in range(VALUES):
        levels[:, number * quarter : (number + 1) * quarter] |= lower >> word.type(2 * number) & word.type(3 * each)
    vectors_TD: np.ndarray = np.subtract(levels.view(np.uint8), np.float32(LEVELS - 0.5), dtype=np.float32)
    vectors_TD /= np.sqrt(np.einsum("td,td->t", vectors_TD, vectors_TD))[:, None]
    return vectors_TD
