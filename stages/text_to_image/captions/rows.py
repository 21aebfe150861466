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
    """All rows of the table `captions`, and notes for the user.

    Raises ValueError if no image is usable, a file of captions cannot be read, the trigger is in no caption, a caption has
    "[trigger]" without a trigger to put there, or an image has no caption and `missing` is "error".
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
    # Edits replace training texts, so they come after the template, and before the check that looks for the trigger.
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
    """image_id -> captions before the template is applied, and notes for the user. `every_path` also has the rejected images."""
    if "{caption}" not in config.template:  # no file is read
        return {image_id: [Caption("", "template", "captions.template")] for image_id in subjects}, []
    sources, notes = make_lookups(folder, every_path, config.where, project)
    found = {
        # The first path with a caption wins, whatever its source: duplicates are asked only where the image has none.
        # A model's caption comes after all files, the name of the folder last.
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
    if config.missing == "filename":
        return [(subject.fill(config, each), each) for each in from_file_name(subject.paths[0])]
    if config.missing in ("empty", "trigger"):
        text = subject.trigger if config.missing == "trigger" else ""
        return [(Filled(text), Caption(text, "config", "captions.missing"))]
    return []


def _check_foreign(found: Mapping[str, list[Caption]], subjects: Mapping[str, Subject]) -> None:
    # Left in, "[trigger]" would be trained as a word.
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
    """A note if only some texts have the trigger. Raises ValueError if none has it."""
    # A folder with a trigger of its own: no single word belongs in all captions.
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
    """One row per different text: the first caption that gave it, with the weights added up."""
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
    """Each caption and trigger again with the class in place of the trigger, for prior preservation."""
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
