"""The rows of the table `captions`: one per text of an image, and the texts that belong to no image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from stages.text_to_image.caption_files.lookup import from_file_name, make_lookups
from stages.text_to_image.caption_files.text import Caption, first_names
from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.edits import apply_edits
from stages.text_to_image.captions.notes import describe_sources, describe_triggers, other_captions
from stages.text_to_image.captions.operations import operate
from stages.text_to_image.captions.subjects import Subject, subjects_of
from stages.text_to_image.captions.template import FOREIGN, Filled

Row = dict[str, Any]


def caption_rows(
    images: pa.Table,
    folder: Path,
    config: CaptionsConfig,
    edits: Mapping[str, str] | None = None,
    project: Path = Path(),
    described: Mapping[str, list[Caption]] | None = None,
) -> tuple[list[Row], list[str]]:
    """Return (rows, notes). The rows are all rows of the table `captions`, as dicts. The notes are lines for the user.
    `images` is the table `images`. `folder` is the folder with the image files. `config` has the settings [captions].
    `edits` maps a key such as "IMAGE_ID:0" to an edited text, where 0 is the caption's position; None means no edits.
    `project` is the project's folder. `described` maps an image_id to a list with the caption that a model wrote, or is
    None.

    The notes say where the captions are from, and what is unusual. The position of a caption is its place among those
    of the image. Raises ValueError if no image is usable, or if a file with captions cannot be read. Also raises
    ValueError if the trigger word is in no caption, or if a caption has "[trigger]" and no trigger is set. If
    `config.missing` is "error", an image without a caption raises ValueError too.
    """
    subjects = subjects_of(images, config)
    found, notes = find_captions(subjects, images["path"].to_pylist(), folder, config, project, described)
    rows, filled = [], []
    for image_id, captions in found.items():
        subject = subjects[image_id]
        changed = operate(captions, config, image_id)
        texts = [(subject.fill(config, each), each) for each in changed] or _substitutes(subject, config)
        rows += _image_rows(image_id, texts)
        filled += texts
    _check_foreign(found, subjects)
    notes += describe_sources([caption for _, caption in filled], config) + describe_triggers(filled)
    rows = apply_edits(rows, edits or {})
    notes += _check_trigger([row["text"] for row in rows if not subjects[row["image_id"]].class_only], subjects, config)
    rows.append(_row("", "empty", "", "config", "", 0))
    if config.trigger:
        rows.append(_row("", "trigger", config.trigger, "config", "captions.trigger", 0))
    if config.class_word:
        rows += _class_rows(rows, subjects, config)
    prompts = dict.fromkeys(prompt.replace("{trigger}", config.trigger) for prompt in config.preview_prompts)
    rows += [_row("", "preview", prompt, "config", "", position) for position, prompt in enumerate(prompts)]
    return rows, notes


def find_captions(
    subjects: Mapping[str, Subject],
    every_path: list[str],
    folder: Path,
    config: CaptionsConfig,
    project: Path,
    described: Mapping[str, list[Caption]] | None = None,
) -> tuple[dict[str, list[Caption]], list[str]]:
    """Return (captions, notes): a dict from image_id to the list of the image's captions, and lines for the user.
    `subjects` has the facts about each usable image, by image_id. `every_path` lists the paths of all images, also of
    rejected ones. `folder` is the folder with the image files. `config` has the settings [captions]. A relative path in
    `config.folder` starts at `project`. `described` maps an image_id to a list with a model's caption; None means none.
    Raises ValueError if an image has no caption and `config.missing` is "error".

    The template is not applied yet. An image may have several paths, its duplicates. The first path with a caption
    gives the captions. If no path has one, the caption is that of a model in `described`. If there is none, the caption
    is the subject in the folder's name, if there is any. Otherwise the list is empty. If the template has no
    "{caption}", no file is read, and every image has one empty caption.
    """
    if "{caption}" not in config.template:  # no file is read
        return {image_id: [Caption("", "template", "captions.template")] for image_id in subjects}, []
    sources, notes = make_lookups(folder, every_path, config.where, project)
    found = {
        image_id: next((captions for name in each.paths for lookup in sources if (captions := lookup(name))), [])
        or (described or {}).get(image_id)
        or each.named
        for image_id, each in subjects.items()
    }
    without = [subjects[image_id].paths[0] for image_id, captions in found.items() if not captions]
    if without and config.missing == "error":
        sidecar = PurePosixPath(without[0]).with_suffix(config.extensions[0]).name
        raise ValueError(
            f"{len(without)} of {len(found)} images have no caption ({' or '.join(config.sources)}): {first_names(without)}; "
            f"write {sidecar} and so on beside them, let a model write them ([descriptions]), or set captions.missing to "
            f"empty, trigger, filename or skip{other_captions(folder, every_path, config, notes)}"
        )
    if without:
        notes.append(
            f"{len(without)} of {len(found)} images have no caption (captions.missing = {config.missing}): {first_names(without)}"
        )
    return found, notes


def _substitutes(subject: Subject, config: CaptionsConfig) -> list[tuple[Filled, Caption]]:
    """Return the training texts of an image that has no captions. `subject` holds the facts about the image. `config.missing`
    decides what is returned. For "filename", it is the file name, with the template applied. For "trigger", it is the
    trigger alone. For "empty", it is an empty text. For "skip", there is no text. The result is a list of at most one
    pair (training text, `Caption`).
    """
    if config.missing == "filename":
        return [(subject.fill(config, each), each) for each in from_file_name(subject.paths[0])]
    if config.missing in ("empty", "trigger"):
        text = subject.trigger if config.missing == "trigger" else ""
        return [(Filled(text), Caption(text, "config", "captions.missing"))]
    return []


def _check_foreign(found: Mapping[str, list[Caption]], subjects: Mapping[str, Subject]) -> None:
    """Raise ValueError if a caption has the text "[trigger]" and its image has no trigger. `found` maps an image_id to
    the list of the image's captions. `subjects` maps an image_id to the facts about the image, such as its trigger. The
    message names the first such caption and counts the rest.
    """
    foreign = [
        each
        for image_id, captions in found.items()
        for each in captions
        if FOREIGN in each.text.lower() and not (subjects[image_id].trigger or subjects[image_id].class_only)
    ]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ValueError(f"{foreign[0].origin}{more}: {FOREIGN} stands for the trigger; set captions.trigger, or write the word")


def _check_trigger(texts: list[str], subjects: Mapping[str, Subject], config: CaptionsConfig) -> list[str]:
    """Check that training texts contain the trigger word of the settings, `config.trigger`, such as "ohwx". Return a
    list of notes for the user: one note if only some texts contain the word, else none. `texts` are the training texts.
    `subjects` maps an image_id to the facts about the image. `config` has the settings [captions]. Raises ValueError if
    no text contains the word.

    The trigger word of an image, `subjects[image_id].trigger`, can differ from `config.trigger`. If it differs for at
    least one image, nothing is checked. Regularisation images do not count here, because their texts get no trigger.
    Nothing is checked either if `texts` or `config.trigger` is empty.
    """
    own = any(each.trigger != config.trigger for each in subjects.values() if not each.class_only)
    if not config.trigger or not texts or own:
        return []
    count = sum(config.trigger in text for text in texts)
    if not count:
        raise ValueError(
            f'captions.trigger "{config.trigger}" is in none of the {len(texts)} captions: '
            'add it to them, or set captions.template = "{trigger}, {caption}"'
        )
    return [f'the trigger "{config.trigger}" is in only {count} of {len(texts)} captions'] if count < len(texts) else []


def _image_rows(image_id: str, texts: list[tuple[Filled, Caption]]) -> list[Row]:
    """Return the rows of the table `captions` for one image: one dict per different training text, in order. `image_id`
    is the image's key. `texts` are pairs (training text, original caption). If a text occurs several times, its first
    pair is used, and the weights of its captions are added up.
    """
    weights: dict[str, float | None] = {}
    for filled, caption in texts:
        weights[filled.text] = None if caption.weight is None else (weights.get(filled.text) or 0.0) + caption.weight
    first = {filled.text: (filled, caption) for filled, caption in reversed(texts)}
    distinct = dict.fromkeys(filled.text for filled, _ in texts)
    return [
        _row(image_id, "caption", text, first[text][1].source, first[text][1].origin, position, first[text][0], weights[text])
        for position, text in enumerate(distinct)
    ]


def _class_rows(rows: list[Row], subjects: Mapping[str, Subject], config: CaptionsConfig) -> list[Row]:
    """Return new rows for the table `captions`, with the role "class". Each new row is made from a row of `rows` with
    the role "caption" or "trigger", if the text of the row contains its trigger word. In the new text, the class
    replaces the trigger word: "photo of ohwx" becomes "photo of a cat". `subjects` maps an image_id to the facts about
    the image. The trigger word of a row is `subjects[image_id].trigger`, for the image_id of the row. `config` has the
    settings [captions]. Its `class_word`, such as "a cat", is the class.

    If the image_id of a row is empty, the trigger word of the row is `config.trigger`. Equal texts of one image are
    returned once.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        trigger = subjects[row["image_id"]].trigger if row["image_id"] else config.trigger
        if row["role"] in ("caption", "trigger") and trigger and trigger in row["text"]:
            text = row["text"].replace(trigger, config.class_word)
            made = _row(row["image_id"], "class", text, row["source"], row["origin"], row["position"])
            found.setdefault((row["image_id"], text), made)
    return list(found.values())


def _row(
    image_id: str,
    role: str,
    text: str,
    source: str,
    origin: str,
    position: int,
    filled: Filled | None = None,
    weight: float | None = None,
) -> Row:
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
        "template": filled.template if filled else None,
        "reason": filled.reason if filled else None,
        "weight": weight,
    }
