"""The stage `checks`: measure every usable picture once, then compare all pictures and captions with each other.

What may be wrong becomes measured columns and warnings.

Near-duplicates are the same picture re-saved, rescaled, cropped a little, mirrored, or made lighter or darker. Perceptual
hashes (64 bits of a cosine transform) give candidates, by brute force over all pairs. Most look-alikes are excluded by the
correlation of coarse thumbnails. The others are compared at several crops, because a crop shifts the hash and the coarse
thumbnail.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from schemas.text_to_image import CAPTIONS, CHECKS, IMAGES
from stages.run import Run
from stages.settings import Section, runtime, selects, setting
from stages.stage import Stage
from stages.text_to_image.caption_files import trigger_pattern, trigger_word
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.decode import BACKGROUND, ROOM, ImageError, open_file, open_image, parse_colour, pixel_count
from stages.text_to_image.imaging.usable import REFERENCE, first_names, names_copy, usable_paths, usable_rows

Row = dict[str, Any]
Finding = tuple[str, str, str]  # image_id, name of the warning, sentence

BATCH = 64  # images per record batch
WANTED = ("image_id", "path", "short_side", "aspect")

# Of one picture
LONGEST = 512  # pixels along the longer side at which a picture is measured: what is sharp there is sharp in training
CELL = 16  # pixels along a side of the parts in which detail is looked for
DETAIL = 3.0  # standard deviation of the brightness of a part with detail, of 255
SPAN = 9  # pixels over which the picture is blurred again
EVEN = 12.0  # brightness that a border line may differ from the edge, of 255
SIDE = 32  # pixels along a side of a thumbnail
NOTHING: Row = {"blur": 0.0, "brightness": 0.5, "clipped": 0.0, "border": 0.0, "hash": "0" * 16, "thumbnail": bytes(SIDE * SIDE)}

# Of near-duplicates
LOW = 8  # cosine frequencies per side that the hash holds
CANDIDATE = 18  # bits in which two hashes may differ
COARSE = 0.5  # least correlation of the coarse thumbnails of 8 x 8 pixels
CHUNK = 1024  # hashes or pairs that are compared at a time
CROPS = (0.0, 0.025, 0.05)  # share of a side that a crop leaves out

# Of captions
PHRASE = 5  # words
LEAST = 5  # captions from which a repeated phrase is named
SHORT = 6  # words below which two captions of one other word are no mistake
# UTF-8 that was read as Windows-1252 or Latin-1, and the sign for what could not be read.
MOJIBAKE = re.compile(
    r"\ufffd|[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac|\u00ef\u00bf\u00bd|[\u00d0\u00d1][\u0080-\u00bf][\u00d0\u00d1]"
)
NO_REFERENCE = "no reference: a picture of its name in control/, as other images have"
WORDS = {  # warning -> how a line for the user names the images
    "near_duplicate": "nearly the same as a larger image",
    "blurred": "blurred",
    "dark": "underexposed",
    "bright": "overexposed",
    "border": "with a border",
    "small": "very small",
    "aspect": "very long or wide",
    "equal_caption": "with the caption of another image",
    "near_caption": "with nearly the caption of another image",
    "no_reference": "without a reference, which other images have",
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
        unit="share",
        bounds=(0.0, 1.0),
    )
    dark: float = selects(0.15, "largest `brightness` of an underexposed picture", unit="share", bounds=(0.0, 1.0))
    bright: float = selects(0.8, "least `brightness` of an overexposed picture", unit="share", bounds=(0.0, 1.0))
    clipped: float = selects(0.5, "least `clipped` of a badly exposed picture", unit="share", bounds=(0.0, 1.0))
    border: float = selects(0.04, "least `border` of a picture with a border", unit="share", bounds=(0.0, 1.0))
    short_side: int = selects(256, "`short_side` below which an image is very small, pixels", unit="pixels", bounds=(1, 65536))
    aspect: float = selects(3.0, "largest usual `aspect`; longer pictures lose much to the crop", unit="ratio", bounds=(1.0, 1e6))
    similarity: float = selects(
        0.94,
        "least `similarity` of near-duplicates; finds crops of 5 % and no two different pictures of the tests",
        unit="share",
        bounds=(0.5, 1.0),
    )
    words: int = selects(
        300, "words above which a caption is too long; at least 512 tokens are read", unit="words", bounds=(1, 100_000)
    )
    repeated: float = selects(
        0.5, "share of captions with one phrase of five words from which it is named", unit="share", bounds=(0.01, 1.0)
    )
    imbalance: float = selects(
        10.0, "images of the largest folder per image of the smallest, from which it is named", unit="ratio", bounds=(1.0, 1e9)
    )
    background: str | None = setting(
        None,
        "colour behind transparent pixels; by default that of [latents]",
        follows="latents.background",
        unrecorded=(None, BACKGROUND),
    )
    workers: int = runtime(4, "threads that read and decode", unit="threads", bounds=(1, 64))

    def check(self) -> None:
        parse_colour(self.background or BACKGROUND)


# Measures of one picture


def measure(path: Path, background: str | None = None) -> Row:
    """The measured columns of the table `checks`."""
    try:
        with open_file(path) as file, ROOM.taken(pixel_count(file)):
            return measure_picture(open_image(file, background or BACKGROUND, at_least=LONGEST).convert("L"))
    except ImageError:
        # It could be decoded when `images` read it: no warning here.
        return dict(NOTHING)


def measure_picture(image: Image.Image) -> Row:
    """The same of a picture in mode "L", which is reduced in place. Blur, brightness, clipped and border are 0 to 1."""
    image.thumbnail((LONGEST, LONGEST), Image.Resampling.BOX)
    grey = np.asarray(image, np.float32)
    thumbnail = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))
    brightness, clipped = exposure(grey)
    return {
        "blur": blur(grey),
        "brightness": brightness,
        "clipped": clipped,
        "border": border(grey),
        "hash": f"{int(perceptual_hashes(thumbnail[None])[0]):016x}",
        "thumbnail": thumbnail.tobytes(),
    }


def blur(grey: np.ndarray) -> float:
    """0 (sharp) to 1, the smaller of rows and columns; 0 for a plain picture. `grey`: float32 (height, width), 0 to 255.

    Blurring shrinks the differences of neighbours much in a sharp picture, little in a blurred one (Crete et al., 2007).
    """
    return round(float(min(_blur_along(grey), _blur_along(grey.T))), 4)


def _blur_along(grey: np.ndarray) -> float:
    if grey.shape[1] <= SPAN:
        return 0.0
    sums = np.cumsum(np.pad(grey.astype(np.float64), ((0, 0), (1, 0))), axis=1)
    smooth = (sums[:, SPAN:] - sums[:, :-SPAN]) / SPAN
    half = SPAN // 2
    before = np.abs(np.diff(grey[:, half : half + smooth.shape[1]].astype(np.float64), axis=1))
    after = np.abs(np.diff(smooth, axis=1))
    total = before.sum()
    # A plain picture is not blurred.
    return float(1 - np.maximum(before - after, 0).sum() / total) if total > before.size * 0.05 else 0.0


def exposure(grey: np.ndarray) -> tuple[float, float]:
    """(mean brightness, share of black or white pixels), 0 to 1, of the cells of 16 x 16 pixels that have detail."""
    down, across = grey.shape[0] // CELL, grey.shape[1] // CELL
    if not (down and across):
        return round(float(grey.mean() / 255), 4), 0.0
    cells = grey[: down * CELL, : across * CELL].reshape(down, CELL, across, CELL).swapaxes(1, 2).reshape(down * across, -1)
    # A plain white background is no overexposure.
    parts = cells[cells.std(axis=1) > DETAIL]
    if not len(parts):
        return round(float(grey.mean() / 255), 4), 0.0
    return round(float(parts.mean() / 255), 4), round(float(((parts <= 2) | (parts >= 253)).mean()), 4)


def border(grey: np.ndarray) -> float:
    """Share of the picture in two plain bars at opposite sides that end sharply, such as a letterbox; the larger pair."""
    return round(max(_border_along(grey), _border_along(grey.T)), 4)


def _border_along(grey: np.ndarray) -> float:
    top, bottom = (_even_lines(lines) for lines in (grey, grey[::-1]))
    return (top + bottom) / len(grey) if top and bottom and top + bottom < len(grey) else 0.0


def _even_lines(lines: np.ndarray) -> int:
    """Thickness of the border at the first line, or 0 without one. `lines`: float32 (lines, pixels), from the edge inwards."""
    colour = float(np.median(lines[0]))
    even = np.abs(lines - colour).max(axis=1) <= EVEN
    count = int(np.argmin(even)) if not even.all() else 0
    # Where a drawing on a plain background begins, most pixels still have the background's colour.
    after = lines[min(count + 2, len(lines) - 1)]
    return count if count and (np.abs(after - colour) > EVEN).mean() > 0.7 else 0


# Near-duplicates


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


# Warnings about pictures


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
    """Copies with `duplicate_of` (an image_id) and `similarity`. Of two, that with the longer short side is the original,
    then that without the name of a copy.
    """
    rows = [row | {"duplicate_of": None, "similarity": None} for row in rows]
    ranked = sorted(range(len(rows)), key=lambda n: (-rows[n]["short_side"], names_copy(rows[n]["path"]), rows[n]["path"]))
    thumbnails = np.frombuffer(b"".join(rows[n]["thumbnail"] for n in ranked), np.uint8).reshape(-1, SIDE, SIDE)
    for i, j, similarity in near_pairs(thumbnails, least):
        original, other = rows[ranked[i]], rows[ranked[j]]
        # A duplicate is never an original, so that chains end at one picture that stays.
        if other["duplicate_of"] is None and original["duplicate_of"] is None:
            other |= {"duplicate_of": original["image_id"], "similarity": round(similarity, 4)}
    return rows


def lines(rows: Iterable[Row]) -> list[str]:
    paths: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: str(row["path"])):
        for name in filter(None, row["warnings"].split(", ")):
            paths[name].append(row["path"])
    return [
        f"{len(own)} {'image' if len(own) == 1 else 'images'} {words}: {first_names(own)}"
        for name, words in WORDS.items()
        if (own := paths.get(name))
    ]


# Warnings about captions


def text_warnings(rows: Sequence[Row], trigger: str, longest: int, edited: Collection[str] = ()) -> Iterator[Finding]:
    """Warnings about rows of the role "caption", without regularisation images. `edited`: images with a reference."""
    pattern = trigger_pattern(trigger)
    for row in rows:
        text, count = row["text"], len(row["text"].split())
        if trigger and not pattern.search(text):
            yield row["image_id"], "no_trigger", f'the caption lacks the trigger "{trigger}"'
        if count > longest:
            yield row["image_id"], "long_caption", f"the caption has {count} words"
        if found := MOJIBAKE.search(text):
            yield row["image_id"], "mojibake", f"the caption has {found[0]!r}, text in another encoding"
    # The caption of an edit is an instruction, which many pairs may share.
    yield from _equal([row for row in rows if row["image_id"] not in edited])


def _equal(rows: Sequence[Row]) -> Iterator[Finding]:
    """Captions with the words of another image's caption, or, from SHORT words on, all but one of them."""
    whole: dict[tuple[str, ...], str] = {}
    nearly: dict[tuple[int, tuple[str, ...]], str] = {}
    for row in rows:
        words = tuple(re.findall(r"\w+", row["text"].lower()))
        image = row["image_id"]
        # A template without {caption}, captions.missing and the name of a folder give images the same text on purpose.
        if not words or row["source"] in ("template", "config", "folder"):
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
    rows = usable_rows(run.inputs.rows(IMAGES))
    for row in rows:
        short, long = sorted((row["width"], row["height"]))
        row |= {"short_side": short, "aspect": long / short}
    # An image is measured again only if one of these values has changed.
    return CHECKS.select(rows, WANTED)


def measure_images(run: Run[ChecksConfig]) -> Iterator[pa.RecordBatch]:
    folder = run.needs["image_folder"]
    pending = sorted(run.output.pending.to_pylist(), key=lambda row: str(row["path"]))
    with ThreadPoolExecutor(run.config.workers) as pool:
        for batch in run.report.batches(pending, BATCH, "images"):
            measured = pool.map(lambda row: measure(folder / row["path"], run.config.background), batch)
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
    edited, unpaired = _pairs(run)
    for image_id in unpaired:
        of_texts[image_id]["no_reference"] = NO_REFERENCE
    for image_id, name, sentence in text_warnings(captions, trigger, run.config.words, edited):
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


def warnings_now(run: Run[ChecksConfig]) -> list[Row]:
    """Images with warnings about the picture alone, measured again and not stored: while no table `captions` can be made."""
    folder, images = run.needs["image_folder"], wanted_checks(run).to_pylist()
    with ThreadPoolExecutor(run.config.workers) as pool:
        measured = pool.map(lambda row: measure(folder / row["path"], run.config.background), images)
        rows = [row | values for row, values in zip(images, measured, strict=True)]
    paths, found, (_, unpaired) = {row["image_id"]: row["path"] for row in rows}, [], _pairs(run)
    for row in mark_near_duplicates(rows, run.config.similarity):
        if said := picture_warnings(row, run.config) | ({"no_reference": NO_REFERENCE} if row["image_id"] in unpaired else {}):
            of = paths.get(row["duplicate_of"])
            found.append(row | {"duplicate_of": of, "warnings": ", ".join(said), "detail": "; ".join(said.values())})
    return sorted(found, key=lambda row: (row["warnings"], row["path"]))


def _pairs(run: Run[ChecksConfig]) -> tuple[set[str], set[str]]:
    """image_ids with a reference, and those without one where others have one; regularisation images in neither."""
    table = run.inputs.rows(IMAGES)
    rows = table.to_pylist()
    paired = {row["reference_of"] for row in rows if row["use"] == REFERENCE and row["rejected"] in (None, "duplicate")}
    subject = {row["image_id"] for row in rows if row["use"] is None}
    paths = {image_id: own for image_id, own in usable_paths(table).items() if image_id in subject}
    edited = {image_id for image_id, own in paths.items() if paired & set(own)}
    return edited, paths.keys() - edited if edited else set()


def _captions(run: Run[ChecksConfig], images: dict[str, Row]) -> tuple[list[Row], str]:
    """(rows of the captions, sorted by path and position; the trigger that all should have, or "")."""
    rows = run.inputs.rows(CAPTIONS).to_pylist()
    # No single word belongs in all captions if a folder has a trigger of its own, even an empty one.
    own = any(row["trigger"] is not None for row in images.values())
    trigger = trigger_word(run.inputs.rows(CAPTIONS))
    used = [row for row in rows if row["role"] == "caption" and row["image_id"] in images]
    # Regularisation images are trained without the trigger.
    kept = [row for row in used if images[row["image_id"]]["use"] is None]
    ordered = sorted(kept, key=lambda row: (images[row["image_id"]]["path"], row["position"]))
    return ordered, "" if own else trigger


STAGE = Stage(
    reads=(IMAGES, CAPTIONS),
    writes=CHECKS,
    unit="picture",
    config=ChecksConfig,
    needs=("image_folder",),
    wants=wanted_checks,
    run=measure_images,
    finish=finish_checks,
    opens=packed.pending_files,
)
