"""Compare the pairs of a project with each other: duplicates, and training documents that are nearly documents of the test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from stages.retrieval import texts

GRAM = 3  # words of a gram, by which documents are compared


def groups(keys: Iterable[Sequence[Hashable]]) -> list[int]:
    """Group of each item, as the index of the group's first. Items with a common key are in one group, also through others."""
    parent: list[int] = []
    first: dict[Hashable, int] = {}

    # Union-find with path halving. The root is always the smallest index.
    def top(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for item, own in enumerate(keys):
        parent.append(item)
        for key in own:
            one, other = sorted((top(item), top(first.setdefault(key, item))))
            parent[other] = one
    return [top(item) for item in range(len(parent))]


def leaks(documents: Sequence[str], held_out: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(largest Jaccard similarity of word trigrams with a held-out text, its index) per document; 0 and 0 if none is shared."""
    likeness, position = np.zeros(len(documents), np.float32), np.zeros(len(documents), np.int32)
    postings: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes = np.zeros(max(1, len(held_out)))
    for number, text in enumerate(held_out):
        for gram in (own := _grams(text)):
            postings[gram].append(number)
        sizes[number] = len(own)
    for number, text in enumerate(documents):
        own = _grams(text)
        shared = [np.array(postings[gram]) for gram in own if gram in postings]
        if shared:
            common = np.bincount(np.concatenate(shared), minlength=len(sizes))
            found = common / (sizes + len(own) - common)
            position[number] = int(found.argmax())
            likeness[number] = found[position[number]]
    return likeness, position


def _grams(text: str) -> set[tuple[str, ...]]:
    words = texts.words(text)
    return {tuple(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)}
