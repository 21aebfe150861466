"""What may be wrong with captions: equal and near-equal ones, repeated phrases, a missing trigger, length, broken encoding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Warning = tuple[str, str, str]  # image_id, name of the warning, sentence

PHRASE = 5  # words
LEAST = 5  # captions from which a repeated phrase is named
SHORT = 6  # words below which two captions of one other word are no mistake
# UTF-8 that was read as Windows-1252 or Latin-1, and the sign for what could not be read.
MOJIBAKE = re.compile(
    r"\ufffd|[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac|\u00ef\u00bf\u00bd|[\u00d0\u00d1][\u0080-\u00bf]{1}[\u00d0\u00d1]"
)


def text_warnings(rows: Sequence[Row], trigger: str, longest: int) -> Iterator[Warning]:
    """Warnings about rows of the role "caption", without regularisation images."""
    for row in rows:
        text, count = row["text"], len(row["text"].split())
        if trigger and trigger not in text:
            yield row["image_id"], "no_trigger", f'the caption lacks the trigger "{trigger}"'
        if count > longest:
            yield row["image_id"], "long_caption", f"the caption has {count} words"
        if found := MOJIBAKE.search(text):
            yield row["image_id"], "mojibake", f"the caption has {found[0]!r}, text in another encoding"
    yield from _equal(rows)


def _equal(rows: Sequence[Row]) -> Iterator[Warning]:
    """Captions with the words of another image's caption, or, from SHORT words on, all but one of them."""
    whole: dict[tuple[str, ...], str] = {}
    nearly: dict[tuple[int, tuple[str, ...]], str] = {}
    for row in rows:
        words = tuple(re.findall(r"\w+", row["text"].lower()))
        image = row["image_id"]
        # A template without {caption} gives all images the same text on purpose.
        if not words or row["source"] == "template":
            continue
        # The caption without one of its words, for each word: captions that differ in word n share part n.
        parts = [(n, words[:n] + words[n + 1 :]) for n in range(len(words))] if len(words) >= SHORT else []
        if whole.setdefault(words, image) != image:
            yield image, "equal_caption", "another image has the same caption"
        elif any(nearly.get(part, image) != image for part in parts):
            yield image, "near_caption", "the caption of another image differs in one word"
        for part in parts:
            nearly.setdefault(part, image)


def repeated_phrase(rows: Sequence[Row], trigger: str, share: float) -> str:
    """A line about the commonest phrase of five words, if at least LEAST and `share` of the distinct captions have it."""
    texts = {row["text"].replace(trigger, " ") if trigger else row["text"] for row in rows}
    counts: Counter[str] = Counter()
    for text in texts:
        words = text.lower().split()
        counts.update({" ".join(words[n : n + PHRASE]) for n in range(len(words) - PHRASE + 1)})
    if not counts:
        return ""
    phrase, count = max(counts.items(), key=lambda item: (item[1], item[0]))
    if count < max(LEAST, share * len(texts)):
        return ""
    return f"{count} of {len(texts)} different captions have the phrase {phrase!r}, which may become part of the style"


def imbalance(images: Sequence[Row], most: float) -> str:
    """A line if the largest folder has at least `most` times the images of the smallest, repeats counted; else ""."""
    counts: dict[str, float] = {}
    for row in images:
        folder = row["folder"] or row["path"].rpartition("/")[0]
        # A weight balances folders already.
        if row["use"] is None and row["weight"] is None:
            counts[folder] = counts.get(folder, 0.0) + (1.0 if row["repeats"] is None else row["repeats"])
    counts = {name: count for name, count in counts.items() if count}
    if len(counts) < 2:
        return ""
    small, large = min(counts, key=lambda name: (counts[name], name)), max(counts, key=lambda name: (counts[name], name))
    if counts[large] < most * counts[small]:
        return ""
    return (
        f"folder {large or '.'}/ occurs {counts[large]:g} times per epoch, {small or '.'}/ {counts[small]:g} times; "
        "[train.data] repeats or [[images.folder]] weight balance them"
    )
