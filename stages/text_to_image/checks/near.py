"""Find near-duplicates: the same picture re-saved, rescaled, cropped a little, mirrored, or made lighter or darker.

Three steps. Perceptual hashes (64 bits of a cosine transform) give candidates, by brute force over all pairs. Most look-alikes
are excluded by the correlation of coarse thumbnails. The others are compared at several crops, because a crop shifts the hash
and the coarse thumbnail.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

SIDE = 32  # pixels along a side of a thumbnail
LOW = 8  # cosine frequencies per side that the hash holds
CANDIDATE = 18  # bits in which two hashes may differ
COARSE = 0.5  # least correlation of the coarse thumbnails of 8 x 8 pixels
CHUNK = 1024  # hashes or pairs that are compared at a time
CROPS = (0.0, 0.025, 0.05)  # share of a side that a crop leaves out


def perceptual_hashes(thumbnails: np.ndarray) -> np.ndarray:
    """Return one 64-bit hash per thumbnail, uint64. `thumbnails` are grey pictures (n, 32, 32). Each bit says if a low
    frequency of the picture's cosine transform is above the median.
    """
    if not len(thumbnails):
        return np.zeros(0, np.uint64)
    basis = _cosines()
    low = np.einsum("ki,nij,lj->nkl", basis, thumbnails.astype(np.float32), basis).reshape(len(thumbnails), -1)
    low[:, 0] = 0  # the mean brightness
    bits = low > np.median(low, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def near_pairs(thumbnails: np.ndarray, least: float) -> list[tuple[int, int, float]]:
    """Return the near-duplicates among pictures, as a list of (i, j, similarity) with i < j. `thumbnails` are grey
    pictures, uint8 (n, 32, 32). i and j are the indices of two pictures in `thumbnails`. Their similarity is a
    correlation of their pixels, at most 1 (see `similarities`). `least` is the smallest similarity of a near-duplicate.

    Picture j is compared with picture i and with the mirror image of picture i. The larger of the two similarities is
    returned.
    """
    hashes, mirrored = perceptual_hashes(thumbnails), perceptual_hashes(thumbnails[:, :, ::-1])
    found: dict[tuple[int, int], float] = {}
    coarse, coarse_mirrored = _coarse(thumbnails), _coarse(thumbnails[:, :, ::-1])
    for flip, first in ((False, hashes), (True, mirrored)):
        for pairs in _candidates(first, hashes):
            rough = (coarse_mirrored if flip else coarse)[pairs[:, 0]]
            pairs = pairs[np.einsum("nk,nk->n", rough, coarse[pairs[:, 1]]) >= COARSE]
            left = thumbnails[pairs[:, 0]]
            scores = similarities(left[:, :, ::-1] if flip else left, thumbnails[pairs[:, 1]])
            for (i, j), score in zip(pairs.tolist(), scores.tolist(), strict=True):
                if score >= least:
                    found[i, j] = max(score, found.get((i, j), 0.0))
    return [(i, j, score) for (i, j), score in sorted(found.items())]


def similarities(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the similarity of each pair of pictures, float32 (n,), -1 to 1. `left` and `right` hold grey pictures (n,
    32, 32). Picture i of `left` is compared with picture i of `right`. A picture and a slightly cropped copy of it are
    similar.

    Each picture of a pair is cropped in several ways by at most 5 % of a side and stretched again. The similarity is
    the largest correlation of such a crop with the other picture.
    """
    best = np.full(len(left), -1.0, np.float32)
    whole = [_standardised(each.astype(np.float32)) for each in (left, right)]
    for down in _windows():
        for across in _windows():
            for cropped, other in ((left, whole[1]), (right, whole[0])):
                part = np.einsum("ki,nij,lj->nkl", down, cropped.astype(np.float32), across, optimize=True)
                best = np.maximum(best, np.einsum("nk,nk->n", _standardised(part), other))
    return best


def _candidates(first: np.ndarray, second: np.ndarray) -> Iterator[np.ndarray]:
    """Yield index pairs (i, j) of pictures that may be near-duplicates, with i < j, as int64 arrays `(pairs, 2)`.
    `first` and `second` are arrays with one 64-bit hash per picture. The hash `first[i]` is compared with the hash
    `second[j]`. A pair is yielded if the two hashes differ in at most `CANDIDATE` (18) bits.

    The caller passes the hashes of the pictures as `second`. To find copies that are not mirrored, the caller passes
    these hashes as `first` too. To find mirrored copies, the caller passes the hashes of the mirror images as `first`.
    A yielded array has at most `CHUNK` pairs.
    """
    for start in range(0, len(first), CHUNK):
        differ = np.bitwise_count(first[start : start + CHUNK, None] ^ second[None, :])
        i, j = np.nonzero(differ <= CANDIDATE)
        pairs = np.stack([i + start, j], axis=1)[i + start < j]
        for part in range(0, len(pairs), CHUNK):
            yield pairs[part : part + CHUNK]


def _coarse(pictures: np.ndarray) -> np.ndarray:
    parts = SIDE // LOW
    blocks = pictures.reshape(len(pictures), LOW, parts, LOW, parts)
    return _standardised(blocks.mean(axis=(2, 4), dtype=np.float32))


def _standardised(pictures: np.ndarray) -> np.ndarray:
    """Return pictures (n, side, side) as rows (n, side * side) of mean 0 and length 1. A picture of one colour becomes zeros."""
    flat = pictures.reshape(len(pictures), pictures.shape[1] * pictures.shape[2])
    flat = flat - flat.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(np.where(norm > 1e-3, flat / np.maximum(norm, 1e-3), 0.0), np.float32)


@cache
def _cosines() -> np.ndarray:
    places = (np.arange(SIDE) + 0.5) / SIDE
    return np.cos(np.pi * np.arange(LOW)[:, None] * places[None, :]).astype(np.float32)


@cache
def _windows() -> tuple[np.ndarray, ...]:
    """Return 7 matrices that crop a line of 32 pixels in different ways. Each matrix is float32 (32, 32). A matrix
    multiplied by a line cuts off a part of the line and stretches the rest to 32 pixels. The first matrix cuts off
    nothing. Three matrices cut off 2.5 % of the line: at the start, at the end, or one half at each end. Three more cut
    off 5 % in these three ways.

    `CROPS` holds the shares of the line that are cut off: 0, 0.025 and 0.05.
    """
    found = {}
    for share in CROPS:
        for start in {0.0, share / 2, share}:
            places = np.clip((start + (1 - share) * (np.arange(SIDE) + 0.5) / SIDE) * SIDE - 0.5, 0, SIDE - 1)
            low = np.floor(places).astype(int)
            matrix = np.zeros((SIDE, SIDE), np.float32)
            matrix[np.arange(SIDE), low] += 1 - (places - low)
            matrix[np.arange(SIDE), np.minimum(low + 1, SIDE - 1)] += places - low
            found[share, start] = matrix
    return tuple(found.values())
