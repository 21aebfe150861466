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
    """Yield warnings about captions, each as (image_id, name of the warning, sentence). A caption gets a warning if it
    lacks the trigger, is too long, or has letters of a wrong encoding. It also gets one if it is nearly the caption of
    another image. `rows` are rows of the table `captions` with the role "caption", without those of regularisation
    images. `trigger` is the trigger word, or "". `longest` is the largest number of words without a warning.
    """
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
    """Yield a warning for every caption that is nearly the caption of another image in an earlier row. A warning is
    (image_id, name of the warning, sentence). `rows` are rows of the table `captions`. Captions that have the same
    words get a warning. So do captions that differ in one word, if they have at least `SHORT` words. Captions made by
    the template alone are left out.
    """
    whole: dict[tuple[str, ...], str] = {}
    nearly: dict[tuple[int, tuple[str, ...]], str] = {}
    for row in rows:
        words = tuple(re.findall(r"\w+", row["text"].lower()))
        image = row["image_id"]
        if not words or row["source"] == "template":
            continue
        parts = [(n, words[:n] + words[n + 1 :]) for n in range(len(words))] if len(words) >= SHORT else []
        if whole.setdefault(words, image) != image:
            yield image, "equal_caption", "another image has the same caption"
        elif any(nearly.get(part, image) != image for part in parts):
            yield image, "near_caption", "the caption of another image differs in one word"
        for part in parts:
            nearly.setdefault(part, image)


def repeated_phrase(rows: Sequence[Row], trigger: str, share: float) -> str:
    """Return a line for the user about the phrase of five words that occurs in the most captions, or "". `rows` are
    rows of the table `captions`. Equal captions count once. `share` (0 to 1) is the share of the captions that must
    have the phrase. If fewer than this share or fewer than `LEAST` captions have it, the result is "". `trigger` is the
    trigger word, or "". It is not counted as a word.
    """
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
    """Return a line for the user about folders of very different size, or "". `images` are the usable rows of the table
    `images`. The size of a folder is its number of images, each counted as often as its `repeats` say. Images with a
    `weight` and regularisation images are left out. The line is returned if the largest folder has at least `most`
    times the size of the smallest.
    """
    counts: dict[str, float] = {}
    for row in images:
        folder = row["folder"] or row["path"].rpartition("/")[0]
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
