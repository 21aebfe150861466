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
    """One uint64 per grey thumbnail (n, 32, 32): which low frequencies of its cosine transform are above their median."""
    if not len(thumbnails):
        return np.zeros(0, np.uint64)
    basis = _cosines()
    low = np.einsum("ki,nij,lj->nkl", basis, thumbnails.astype(np.float32), basis).reshape(len(thumbnails), -1)
    # Without the mean, lighter and darker copies hash alike.
    low[:, 0] = 0  # the mean brightness
    bits = low > np.median(low, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def near_pairs(thumbnails: np.ndarray, least: float) -> list[tuple[int, int, float]]:
    """(i, j, similarity) with i < j. `thumbnails`: uint8 (n, 32, 32). Mirrored copies are found too."""
    hashes, mirrored = perceptual_hashes(thumbnails), perceptual_hashes(thumbnails[:, :, ::-1])
    found: dict[tuple[int, int], float] = {}
    coarse, coarse_mirrored = _coarse(thumbnails), _coarse(thumbnails[:, :, ::-1])
    # The mirror images' hashes against the plain ones: with `hashes` as the first, only unmirrored copies are found.
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
    """Largest correlation over crops of either picture by up to 5 % of a side: float32 (n,), -1 to 1. Inputs are (n, 32, 32)."""
    best = np.full(len(left), -1.0, np.float32)
    whole = [_standardised(each.astype(np.float32)) for each in (left, right)]
    for down in _windows():
        for across in _windows():
            # Either picture may be the cropped one.
            for cropped, other in ((left, whole[1]), (right, whole[0])):
                part = np.einsum("ki,nij,lj->nkl", down, cropped.astype(np.float32), across, optimize=True)
                best = np.maximum(best, np.einsum("nk,nk->n", _standardised(part), other))
    return best


def _candidates(first: np.ndarray, second: np.ndarray) -> Iterator[np.ndarray]:
    """Index pairs (pairs, 2), i < j, whose hashes first[i] and second[j] differ in at most CANDIDATE bits; CHUNK at a time."""
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
    """Pictures (n, side, side) as rows of mean 0 and length 1; a plain picture becomes zeros."""
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
    """Matrices (32, 32) that crop a line by a share of CROPS at its start, its end or both, and stretch it linearly."""
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
