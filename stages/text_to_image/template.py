"""The project.toml with which a new project of text_to_image begins."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

from stages.models.family import Family
from stages.pipelines import Option, Template
from stages.settings import toml_string
from stages.text_to_image.concepts import concept_folders
from stages.text_to_image.families import family as family_record
from stages.text_to_image.presets import PRESETS, Settings

TEXT = """\
# A latentmill project. Every setting has a default; `latentmill status` tells what each table would cost to rebuild.

[project]
family = {family}
weights = {weights}  # a folder or a hub id; empty: {source}

{images}

[captions]
trigger = {trigger}
template = {template}
preview_prompts = [{preview}]

{sections}
"""
# Section -> setting -> its first value and a remark. A family's own first values replace them.
SECTIONS = ("buckets", "latents", "embeddings", "train", "train.data", "samples")
BEGIN: Settings = {
    "buckets": {"resolutions": ((512, 768), "add 1024 for the last bit of detail, if it fits")},
    "embeddings": {},
    "train": {
        "steps": (1500, "more can be added later: the run goes on where it ended"),
        "rank": (32, ""),
        "lr": (1e-4, ""),
    },
    "samples": {"checkpoints": ("all", "")},
}


def project_toml(options: Mapping[str, str]) -> str:
    """`options`: images, family, weights, trigger, preset. Raises ValueError for an unknown family or preset."""
    record = family_record(options["family"])
    trigger = options["trigger"]
    return TEXT.format(
        family=toml_string(record.name),
        weights=toml_string(options["weights"]),
        images=_images(options["images"]),
        trigger=toml_string(trigger),
        template=toml_string("{trigger}, {caption}" if trigger else "{caption}"),
        preview=toml_string(f"a photo of {trigger}" if trigger else "a photo"),
        source=record.source,
        sections=toml_sections(record, preset_settings(options.get("preset", ""), trigger)),
    )


def _images(images: str) -> str:
    if Path(images).is_file():
        return concept_folders(Path(images))
    return f"[images]\nfolder = {toml_string(images)}  # only read, never written"


def preset_settings(name: str, trigger: str) -> Settings:
    """Section -> setting -> (value, remark). Raises ValueError for an unknown preset; "" is none."""
    if name and name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'--preset must be one of {", ".join(PRESETS)}, got "{name}"{hint}')
    preset = PRESETS.get(name, {})
    order = dict.fromkeys([*BEGIN, *preset])
    found = {section: {**BEGIN.get(section, {}), **preset.get(section, {})} for section in sorted(order, key=SECTIONS.index)}
    # Without a trigger, captions cannot be reduced to it.
    if not trigger and "dropped" in found.get("train.data", {}):
        del found["train.data"]
    return found


def toml_sections(record: Family, settings: Settings = BEGIN) -> str:
    """The sections as TOML text. The family's own first values replace those of `settings`."""
    parts = []
    for section, usual in settings.items():
        own = {name: (value, "") for name, value in record.begin.get(section, {}).items()}
        lines = [f"[{section}]"]
        for name, (value, remark) in {**usual, **own}.items():
            lines.append(f"{name} = {json.dumps(value)}{remark and '  # ' + remark}")  # JSON is TOML here
        parts += ["\n".join(lines)] if usual or own else []
    return "\n\n".join(parts)


TEMPLATE = Template(
    options=(
        Option("images", "The folder of images, or OneTrainer's concepts.json; only read.", default=None, kind="folder or file"),
        Option("family", "The model family; `latentmill families` lists them.", default="klein-base-4b"),
        Option("weights", "A folder or a hub id; empty: the family's own.", kind="folder or text"),
        Option("preset", "What is trained: subject, character, style or edit; empty: the usual settings."),
        Option("trigger", "A word that stands for your subject; it is put before every caption."),
    ),
    write=project_toml,
)
