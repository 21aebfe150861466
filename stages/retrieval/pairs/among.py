"""Compare the pairs of a project with each other: duplicates, and training documents that are nearly documents of the test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from stages.retrieval import texts

GRAM = 3  # words of a gram, by which documents are compared


def groups(keys: Iterable[Sequence[Hashable]]) -> list[int]:
    """Return the group number of each item, as a list. `keys` yields the keys of each item, as a sequence. Items with a
    common key are in one group. If item A shares a key with B, and B shares one with C, all three are in one group. The
    number of a group is the index of its first item.
    """
    parent: list[int] = []
    first: dict[Hashable, int] = {}

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
    """Return two arrays with one value per document: a similarity and a position. The similarity is the largest Jaccard
    similarity of the document's word trigrams with those of a text in `held_out`, from 0 to 1. The position is the
    index of that text. Both are 0 if no trigram is shared.
    """
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
