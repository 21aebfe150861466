"""The rows of the table captions: one per text of an image, and the texts that belong to no image."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.lookup import from_file_name, lookups
from stages.text_to_image.captions.template import fill_template
from stages.text_to_image.captions.text import Caption, first_names
from stages.text_to_image.imaging.usable import usable_paths

Row = dict[str, Any]


def caption_rows(images: pa.Table, folder: Path, config: CaptionsConfig) -> tuple[list[Row], list[str]]:
    """Return all rows of the table captions, and notes for the user: one line per thing that is unusual but allowed.

    `images` is the table images, `folder` the image folder that its paths are relative to. ValueError if no image is usable,
    a caption is missing although [captions] missing = "error", the trigger is in no caption, or a file cannot be read.
    """
    paths = usable_paths(images)
    found, notes = _find_captions(paths, images["path"].to_pylist(), folder, config)
    rows = []
    for image_id, captions in found.items():
        texts = [(fill_template(config.template, each.text, config.trigger), each) for each in captions]
        rows += _image_rows(image_id, texts or _substitutes(paths[image_id][0], config))
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
    """Return {image_id: captions as found}, an empty list where there is none, and notes for the user.

    `paths` are the paths of every usable image: files with the same bytes are one image, and a caption of any of them counts.
    """
    sources, notes = lookups(folder, every_path, config)
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
    """The training text, and its caption, of an image without captions, as [captions] missing says; none for "skip"."""
    if config.missing == "filename":
        return [(fill_template(config.template, each.text, config.trigger), each) for each in from_file_name(path)]
    if config.missing in ("empty", "trigger"):
        text = config.trigger if config.missing == "trigger" else ""
        return [(text, Caption(text, "config", "captions.missing"))]
    return []


def _check_trigger(texts: list[str], config: CaptionsConfig) -> list[str]:
    """Return a note if only some texts contain the trigger. ValueError if none does: the adapter would not learn the word."""
    if not config.trigger or not texts:
        return []
    count = sum(config.trigger in text for text in texts)
    if not count:
        raise ValueError(
            f'captions.trigger "{config.trigger}" is in none of the {len(texts)} captions: '
            'add it to them, or set captions.template = "{trigger}, {caption}"'
        )
    return [f'"{config.trigger}" is in {count} of {len(texts)} captions'] if count < len(texts) else []


def _image_rows(image_id: str, texts: list[tuple[str, Caption]]) -> list[Row]:
    """One row per distinct text of an image, in order. `texts` are pairs of training text and the caption it was made of."""
    first = dict(reversed(texts))
    distinct = dict.fromkeys(text for text, _ in texts)
    return [
        _row(image_id, "caption", text, first[text].source, first[text].origin, position)
        for position, text in enumerate(distinct)
    ]


def _class_rows(rows: list[Row], config: CaptionsConfig) -> list[Row]:
    """Rows of role "class": every text that contains the trigger, with the class word in its place.

    A class row has the source, origin and position of the row that it was made of. Equal texts of an image give one row.
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
            f"{origin or 'project.toml'}: the text has half of a surrogate pair, which is not valid Unicode"
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
