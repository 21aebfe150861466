"""The rows of the table `captions`: one per text of an image, and the texts that belong to no image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.edits import apply_edits
from stages.text_to_image.captions.lookup import from_file_name, make_lookups
from stages.text_to_image.captions.template import FOREIGN, fill_template
from stages.text_to_image.captions.text import Caption, first_names
from stages.text_to_image.imaging.usable import usable_paths

Row = dict[str, Any]


def caption_rows(
    images: pa.Table, folder: Path, config: CaptionsConfig, edits: Mapping[str, str] | None = None
) -> tuple[list[Row], list[str]]:
    """Return all rows of the table `captions` as dicts, and a list of notes for the user. The notes name what is
    unusual but allowed. `images` is the table `images`. `folder` is the image folder. `edits` maps "IMAGE_ID:POSITION"
    to the text of an edited caption. Raises ValueError if no image is usable or a file with captions cannot be read.

    Also raises ValueError if the trigger word is in no caption, or if the template would repeat it in a caption. A
    caption with the text "[trigger]" raises it too. If `config.missing` is "error", so does an image without a caption.
    """
    paths = usable_paths(images)
    found, notes = _find_captions(paths, images["path"].to_pylist(), folder, config)
    rows, used = [], []
    for image_id, captions in found.items():
        texts = [(fill_template(config.template, each.text, config.trigger), each) for each in captions]
        texts = texts or _substitutes(paths[image_id][0], config)
        rows += _image_rows(image_id, texts)
        used += [each for _, each in texts if each.source != "config"]
    _check_texts(used, config)
    rows = apply_edits(rows, edits or {})
    notes += _check_trigger([row["text"] for row in rows], config)
    rows.append(_row("", "empty", "", "config", "", 0))
    if config.trigger:
        rows.append(_row("", "trigger", config.trigger, "config", "captions.trigger", 0))
    if config.class_word:
        rows += _class_rows(rows, config)
    prompts = dict.fromkeys(prompt.replace("{trigger}", config.trigger) for prompt in config.preview_prompts)
    rows += [_row("", "preview", prompt, "config", "", position) for position, prompt in enumerate(prompts)]
    return rows, notes


def _find_captions(
    paths: dict[str, list[str]], every_path: list[str], folder: Path, config: CaptionsConfig
) -> tuple[dict[str, list[Caption]], list[str]]:
    """Return a dict from image_id to the captions of every usable image, and a list of notes for the user. The template
    is not applied to the captions. `paths` maps an image_id to all paths of a usable image. The first path with a
    caption gives the captions. `every_path` lists the paths of all images, also of rejected ones. `folder` is the image
    folder. An image without captions has an empty list, or raises ValueError if `config.missing` is "error".
    """
    sources, notes = make_lookups(folder, every_path, config)
    found = {
        image_id: next((captions for name in names for lookup in sources if (captions := lookup(name))), [])
        for image_id, names in paths.items()
    }
    without = [paths[image_id][0] for image_id, captions in found.items() if not captions]
    if without and config.missing == "error":
        sidecar = PurePosixPath(without[0]).with_suffix(config.extension).name
        raise ValueError(
            f"{len(without)} of {len(paths)} images have no caption ({' or '.join(config.sources)}): {first_names(without)}; "
            f"write {sidecar} and so on beside them, or set captions.missing to empty, trigger, filename or skip"
        )
    if without:
        notes.append(
            f"{len(without)} of {len(paths)} images have no caption (captions.missing = {config.missing}): {first_names(without)}"
        )
    return found, notes


def _substitutes(path: str, config: CaptionsConfig) -> list[tuple[str, Caption]]:
    """Return the training texts of an image that has no captions. `path` is the image's path relative to the image
    folder. `config.missing` decides what is returned. For "filename", it is the file name, with the template applied.
    For "trigger", it is the trigger alone. For "empty", it is an empty text. For "skip", there is no text. The result
    is a list of at most one pair (training text, `Caption`).
    """
    if config.missing == "filename":
        return [(fill_template(config.template, each.text, config.trigger), each) for each in from_file_name(path)]
    if config.missing in ("empty", "trigger"):
        text = config.trigger if config.missing == "trigger" else ""
        return [(text, Caption(text, "config", "captions.missing"))]
    return []


def _check_texts(captions: list[Caption], config: CaptionsConfig) -> None:
    """Raise ValueError if a caption conflicts with the trigger word. The first conflict is the text "[trigger]" in a
    caption, because this placeholder is not replaced. The second is the trigger word in a caption if the template adds
    it again. The message names the first caption with the conflict and counts the rest.
    """
    foreign = [each for each in captions if FOREIGN in each.text.lower()]
    if foreign:
        remedy = 'write the trigger itself there, or set captions.template = "{trigger}, {caption}"'
        raise ValueError(f"{_named(foreign)}: {FOREIGN} is not replaced; {remedy}")
    if not (config.trigger and {"{trigger}", "{caption}"} <= set(re.findall(r"\{\w+\}", config.template))):
        return
    twice = [each for each in captions if re.search(rf"(?<!\w){re.escape(config.trigger)}(?!\w)", each.text)]
    if twice:
        raise ValueError(
            f'{_named(twice)}: the caption has the trigger "{config.trigger}" already, and captions.template adds it again; '
            'remove it from the captions, or set captions.template = "{caption}"'
        )


def _named(captions: list[Caption]) -> str:
    return captions[0].origin + (f" and {len(captions) - 1} more" if len(captions) > 1 else "")


def _check_trigger(texts: list[str], config: CaptionsConfig) -> list[str]:
    """Return a list of notes for the user. It has one note if only some of the training texts in `texts` contain the
    trigger. Otherwise the list is empty. Raises ValueError if no text contains the trigger, because the adapter would not
    learn the word.
    """
    if not config.trigger or not texts:
        return []
    count = sum(config.trigger in text for text in texts)
    if not count:
        raise ValueError(
            f'captions.trigger "{config.trigger}" is in none of the {len(texts)} captions: '
            'add it to them, or set captions.template = "{trigger}, {caption}"'
        )
    return [f'the trigger "{config.trigger}" is in only {count} of {len(texts)} captions'] if count < len(texts) else []


def _image_rows(image_id: str, texts: list[tuple[str, Caption]]) -> list[Row]:
    """Return the rows of the table `captions` for one image: one dict per different training text, in order. `texts`
    are pairs (training text, original caption). If a text is there several times, its first pair is used.
    """
    first = dict(reversed(texts))
    distinct = dict.fromkeys(text for text, _ in texts)
    return [
        _row(image_id, "caption", text, first[text].source, first[text].origin, position)
        for position, text in enumerate(distinct)
    ]


def _class_rows(rows: list[Row], config: CaptionsConfig) -> list[Row]:
    """Return new rows for the table `captions`, with the role "class". They are used by [train.preservation], a loss
    that keeps the meaning of the class word. The source rows are those in `rows` with the role "caption" or "trigger"
    whose text contains the trigger. Each of them gives one row, with `config.class_word` in place of the trigger. If
    texts of one image become equal, only the first is returned.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["role"] in ("caption", "trigger") and config.trigger in row["text"]:
            text = row["text"].replace(config.trigger, config.class_word)
            made = _row(row["image_id"], "class", text, row["source"], row["origin"], row["position"])
            found.setdefault((row["image_id"], text), made)
    return list(found.values())


def _row(image_id: str, role: str, text: str, source: str, origin: str, position: int) -> Row:
    try:
        caption_id = hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError:
        raise ValueError(
            f"{origin or 'project.toml'}: the text must be valid Unicode, but contains half of a surrogate pair"
        ) from None
    return {
        "caption_id": caption_id,
        "image_id": image_id,
        "role": role,
        "text": text,
        "source": source,
        "origin": origin,
        "position": position,
    }
