"""The stage `checks`: measure every usable picture once, then compare all pictures and captions with each other.

What may be wrong becomes measured columns and warnings.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.text_to_image import CAPTIONS, CHECKS, IMAGES
from stages.run import Run
from stages.settings import Section, runtime, selects
from stages.stage import Stage
from stages.text_to_image.caption_files import trigger_pattern
from stages.text_to_image.checks.measures import SIDE, measure, near_pairs
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.usable import first_names, usable_rows

Row = dict[str, Any]
Finding = tuple[str, str, str]  # image_id, name of the warning, sentence

BATCH = 64  # images per record batch
WANTED = ("image_id", "path", "short_side", "aspect")
PHRASE = 5  # words
LEAST = 5  # captions from which a repeated phrase is named
SHORT = 6  # words below which two captions of one other word are no mistake
# UTF-8 that was read as Windows-1252 or Latin-1, and the sign for what could not be read.
MOJIBAKE = re.compile(
    r"\ufffd|[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac|\u00ef\u00bf\u00bd|[\u00d0\u00d1][\u0080-\u00bf][\u00d0\u00d1]"
)
WORDS = {  # warning -> how a line for the user names the images
    "near_duplicate": "near-duplicates of a larger image",
    "blurred": "blurred",
    "dark": "underexposed",
    "bright": "overexposed",
    "border": "with a border",
    "small": "very small",
    "aspect": "very long or wide",
    "equal_caption": "with the caption of another image",
    "near_caption": "with nearly the caption of another image",
    "no_trigger": "without the trigger in the caption",
    "long_caption": "with a very long caption",
    "mojibake": "with a caption in a wrong encoding",
}


@dataclass(frozen=True)
class ChecksConfig(Section):
    """Thresholds of the warnings. None of them excludes an image."""

    blur: float = selects(
        0.5,
        "least `blur` of a blurred picture; in the tests, sharp pictures have 0.42 at most, blurred ones 0.51 or more",
        bounds=(0.0, 1.0),
    )
    dark: float = selects(0.15, "largest `brightness` of an underexposed picture", bounds=(0.0, 1.0))
    bright: float = selects(0.8, "least `brightness` of an overexposed picture", bounds=(0.0, 1.0))
    clipped: float = selects(0.5, "least `clipped` of a badly exposed picture", bounds=(0.0, 1.0))
    border: float = selects(0.04, "least `border` of a picture with a border", bounds=(0.0, 1.0))
    short_side: int = selects(256, "`short_side` below which an image is very small, pixels", bounds=(1, 65536))
    aspect: float = selects(3.0, "largest usual `aspect`; longer pictures lose much to the crop", bounds=(1.0, 1e6))
    similarity: float = selects(
        0.94,
        "least `similarity` of near-duplicates; finds crops of 5 % and no two different pictures of the tests",
        bounds=(0.5, 1.0),
    )
    words: int = selects(300, "words above which a caption is too long; 512 tokens are read", bounds=(1, 100_000))
    repeated: float = selects(0.5, "share of captions with one phrase of five words from which it is named", bounds=(0.01, 1.0))
    imbalance: float = selects(
        10.0, "images of the largest folder per image of the smallest, from which it is named", bounds=(1.0, 1e9)
    )
    workers: int = runtime(4, "threads that read and decode", bounds=(1, 64))


# Pictures


def picture_warnings(row: Row, config: ChecksConfig) -> dict[str, str]:
    """Name of the warning -> sentence."""
    found = {
        "near_duplicate": (row["duplicate_of"] is not None, "a near-duplicate of a larger image"),
        "blurred": (row["blur"] >= config.blur, f"blur {row['blur']:.2f}"),
        "dark": (row["brightness"] <= config.dark, f"brightness {row['brightness']:.2f}"),
        "bright": (row["brightness"] >= config.bright, f"brightness {row['brightness']:.2f}"),
        "border": (row["border"] >= config.border, f"a border of {row['border']:.0%} of the picture"),
        "small": (row["short_side"] < config.short_side, f"shorter side {row['short_side']} pixels"),
        "aspect": (row["aspect"] > config.aspect, f"aspect ratio {row['aspect']:.1f}"),
    }
    if row["clipped"] >= config.clipped and not (found["dark"][0] or found["bright"][0]):
        # Clipped detail counts as over- or underexposed, unless the brightness has said so already.
        name = "bright" if row["brightness"] >= 0.5 else "dark"
        found[name] = (True, f"{row['clipped']:.0%} of the detail is clipped")
    return {name: sentence for name, (warned, sentence) in found.items() if warned}


def mark_near_duplicates(rows: Iterable[Row], least: float) -> list[Row]:
    """Copies with `duplicate_of` (an image_id) and `similarity`. Of two, that with the longer short side is the original."""
    rows = [row | {"duplicate_of": None, "similarity": None} for row in rows]
    ranked = sorted(range(len(rows)), key=lambda n: (-rows[n]["short_side"], rows[n]["path"]))
    thumbnails = np.frombuffer(b"".join(rows[n]["thumbnail"] for n in ranked), np.uint8).reshape(-1, SIDE, SIDE)
    for i, j, similarity in near_pairs(thumbnails, least):
        original, other = rows[ranked[i]], rows[ranked[j]]
        # A duplicate is never an original, so that chains end at one picture that stays.
        if other["duplicate_of"] is None and original["duplicate_of"] is None:
            other |= {"duplicate_of": original["image_id"], "similarity": round(similarity, 4)}
    return rows


def lines(rows: Iterable[Row]) -> list[str]:
    """One line per kind of warning, with the number of its images and the first paths."""
    paths: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: str(row["path"])):
        for name in filter(None, row["warnings"].split(", ")):
            paths[name].append(row["path"])
    return [
        f"{len(own)} {'image' if len(own) == 1 else 'images'} {words}: {first_names(own)}"
        for name, words in WORDS.items()
        if (own := paths.get(name))
    ]


# Captions


def text_warnings(rows: Sequence[Row], trigger: str, longest: int) -> Iterator[Finding]:
    """Warnings about rows of the role "caption", without regularisation images."""
    pattern = trigger_pattern(trigger)
    for row in rows:
        text, count = row["text"], len(row["text"].split())
        if trigger and not pattern.search(text):
            yield row["image_id"], "no_trigger", f'the caption lacks the trigger "{trigger}"'
        if count > longest:
            yield row["image_id"], "long_caption", f"the caption has {count} words"
        if found := MOJIBAKE.search(text):
            yield row["image_id"], "mojibake", f"the caption has {found[0]!r}, text in another encoding"
    yield from _equal(rows)


def _equal(rows: Sequence[Row]) -> Iterator[Finding]:
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
    texts = {trigger_pattern(trigger).sub(" ", row["text"]) if trigger else row["text"] for row in rows}
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
    counts: dict[str, float] = defaultdict(float)
    for row in images:
        # A weight balances folders already.
        if row["use"] is None and row["weight"] is None:
            counts[row["folder"] or row["path"].rpartition("/")[0]] += 1.0 if row["repeats"] is None else row["repeats"]
    ranked = sorted((count, name) for name, count in counts.items() if count)
    if len(ranked) < 2 or ranked[-1][0] < most * ranked[0][0]:
        return ""
    (few, small), (many, large) = ranked[0], ranked[-1]
    return (
        f"folder {large or '.'}/ occurs {many:g} times per epoch, {small or '.'}/ {few:g} times; "
        "[train.data] repeats or [[images.folder]] weight balance them"
    )


# The stage


def wanted_checks(run: Run[ChecksConfig]) -> pa.Table:
    found = []
    for row in usable_rows(run.inputs.rows(IMAGES)):
        short, long = sorted((row["width"], row["height"]))
        # An image is measured again only if one of these values has changed.
        found.append({"image_id": row["image_id"], "path": row["path"], "short_side": short, "aspect": long / short})
    return CHECKS.select(found, WANTED)


def measure_images(run: Run[ChecksConfig]) -> Iterator[pa.RecordBatch]:
    folder = run.needs["image_folder"]
    pending = sorted(run.output.pending.to_pylist(), key=lambda row: str(row["path"]))
    with ThreadPoolExecutor(run.config.workers) as pool:
        for batch in run.report.batches(pending, BATCH, "images"):
            measured = pool.map(lambda row: measure(folder / row["path"]), batch)
            # These depend on other images: `finish_checks` fills them in.
            empty = {"duplicate_of": None, "similarity": None, "warnings": "", "detail": ""}
            rows = [row | values | empty for row, values in zip(batch, measured, strict=True)]
            yield pa.RecordBatch.from_pylist(rows, schema=CHECKS.batch)


def finish_checks(run: Run[ChecksConfig]) -> Iterator[pa.RecordBatch]:
    images = {row["image_id"]: row for row in usable_rows(run.inputs.rows(IMAGES))}
    rows = [row for row in run.output.stored.select(CHECKS.batch.names).to_pylist() if row["image_id"] in images]
    # The run was stopped before all pictures were measured.
    if len(rows) < len(images):
        return
    captions, trigger = _captions(run, images)
    of_texts: dict[str, dict[str, str]] = defaultdict(dict)
    for image_id, name, sentence in text_warnings(captions, trigger, run.config.words):
        of_texts[image_id][name] = sentence
    marked = []
    for row in mark_near_duplicates(rows, run.config.similarity):
        found = picture_warnings(row, run.config) | of_texts[row["image_id"]]
        marked.append(row | {"warnings": ", ".join(found), "detail": "; ".join(found.values())})
    changed = [new for new, old in zip(marked, rows, strict=True) if new != old]
    yield from pa.Table.from_pylist(changed, schema=CHECKS.batch).to_batches(BATCH)
    if changed or run.output.pending.num_rows:
        whole = (repeated_phrase(captions, trigger, run.config.repeated), imbalance(list(images.values()), run.config.imbalance))
        for line in (*lines(marked), *filter(None, whole)):
            run.report.say(line)


def _captions(run: Run[ChecksConfig], images: dict[str, Row]) -> tuple[list[Row], str]:
    """(rows of the captions, sorted by path and position; the trigger that all should have, or "")."""
    rows = run.inputs.rows(CAPTIONS).to_pylist()
    # No single word belongs in all captions if a folder has a trigger of its own, even an empty one.
    own = any(row["trigger"] is not None for row in images.values())
    trigger = next((str(row["text"]) for row in rows if row["role"] == "trigger"), "")
    used = [row for row in rows if row["role"] == "caption" and row["image_id"] in images]
    # Regularisation images are trained without the trigger.
    kept = [row for row in used if images[row["image_id"]]["use"] is None]
    ordered = sorted(kept, key=lambda row: (images[row["image_id"]]["path"], row["position"]))
    return ordered, "" if own else trigger


STAGE = Stage(
    reads=(IMAGES, CAPTIONS),
    writes=CHECKS,
    config=ChecksConfig,
    needs=("image_folder",),
    wants=wanted_checks,
    run=measure_images,
    finish=finish_checks,
    opens=packed.pending_files,
)
