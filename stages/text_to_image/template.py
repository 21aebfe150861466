"""`latentmill init`: the project.toml with which a new project of text_to_image begins, and its presets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.models.family import Family
from stages.pipelines import Option, Template
from stages.settings import nearest, setting_path, toml_string
from stages.text_to_image.caption_files import make_lookups
from stages.text_to_image.captions.stage import CaptionsConfig
from stages.text_to_image.families import FAMILIES
from stages.text_to_image.families import family as family_record
from stages.text_to_image.images.folder import CONTROL, pair_references, scan
from stages.text_to_image.imaging.usable import without_ending
from stages.text_to_image.length import AUTO, explanation, steps_of
from stages.text_to_image.memory import OPTIMIZER, SIDES, Capacity, capacity, forecasts
from stages.text_to_image.seen import Seen, look
from stages.text_to_image.slider import SliderConfig
from stages.untrusted import read_json

Settings = Mapping[str, Mapping[str, tuple[Any, str]]]  # section -> setting -> (value, reason)

TEXT = """\
# A latentmill project. Every setting has a default; `latentmill plan` tells what the next run computes.

[project]
family = {family}
weights = {weights}  # a folder or a hub id; empty: {source}

{images}

[captions]
trigger = {trigger}
template = {template}
{missing}preview_prompts = [{preview}]

{sections}
"""
SLIDER = "slider"  # the preset that takes no pictures
# Section -> setting -> its first value and a remark. A family's own first values replace them.
SECTIONS = ("buckets", "latents", "embeddings", "drawings", "train", "train.data", "train.slider", "samples")
NO_PICTURES = "[images]\nfolder = []  # a slider is trained on the model's own drawings"
PREVIEWS = 3  # pairs of a new project for edit training that previews are drawn of
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
# The first settings for what is trained, each with its reason
PRESETS: Mapping[str, Settings] = {
    "subject": {
        "train": {
            "steps": (AUTO, "so many passes over each picture, at least 500 draws; `latentmill plan` says how many steps"),
            "passes": (50, "one thing is learned early, and later steps copy the pictures"),
            "checkpoint_every": (100, "compare the checkpoints: the best one is rarely the last"),
        },
        "train.data": {"dropped": ("trigger", "the trigger alone should be enough to call the subject")},
    },
    "character": {
        "buckets": {"resolutions": ((512, 768, 1024), "a face is a small part of the picture: it needs the pixels")},
        "train": {
            "steps": (AUTO, "so many passes over each picture, at least 500 draws; `latentmill plan` says how many steps"),
            "passes": (75, "a face, clothes and poses: more than a thing has; published recipes: 50 to 120"),
            "checkpoint_every": (150, "compare the checkpoints: the best one is rarely the last"),
        },
        "train.data": {"dropped": ("trigger", "the trigger alone should be enough to call the character")},
    },
    "style": {
        "latents": {"flip": (True, "a look has no left and right; false if the pictures have writing")},
        "train": {
            "steps": (AUTO, "so many passes over each picture, at least 500 draws; `latentmill plan` says how many steps"),
            "passes": (30, "for 30 to 200 pictures whose subjects differ; a published recipe"),
            "caption_dropout": (0.1, "the look should also come if the prompt does not describe it"),
        },
    },
    "edit": {
        "buckets": {"resolutions": ((512,), "a reference has as many tokens as its image, and a step more than twice the work")},
        "train": {
            "steps": (2000, "the model learns what to keep and what to change: more than a look"),
            "caption_dropout": (0.0, "the caption is the instruction: without it the task is unknown"),
        },
        "train.data": {"reference_dropout": (0.0, "the model always sees what it edits")},
    },
    SLIDER: {
        "drawings": {
            "width": (512, "the model draws what it trains on; the attribute decides how many pixels it needs"),
            "height": (512, ""),
        },
        "train": {
            "steps": (1000, "as the paper's code, arXiv 2311.12092; compare the checkpoints"),
            "rank": (4, "as there: a direction is little to hold"),
            "alpha": (1.0, "as there"),
            "lr": (2e-4, "as there"),
            "checkpoint_every": (200, ""),
        },
        "samples": {
            "checkpoints": ("last", ""),
            "strengths": ([-2, -1, 1, 2], "one row of previews from end to end, the base in the middle"),
        },
    },
}


def project_toml(options: Mapping[str, str]) -> str:
    """`options`: images, family, weights, trigger, preset, project; twin and twin_weights if the distilled model is on this
    machine. Raises ValueError for an unknown family or preset, for edit training without a pair, and for one trigger of several
    subjects.
    """
    record = family_record(options["family"])
    record.require_trainable()
    trigger, images, preset = options["trigger"], options["images"], options.get("preset", "")
    slides = preset == SLIDER
    if bool(images) is slides:
        raise ValueError("--images must be left out with --preset slider" if slides else "init needs --images, the image folder")
    seen = _seen(options)
    if seen and seen.itself:
        trigger = trigger or seen.itself.trigger
    called = bool(trigger or (seen and seen.own(trigger)))
    settings = preset_settings(preset, called)
    if preset == "edit" and record.references == "none":
        raise ValueError(f"--preset edit: {record.name} reads no reference images; take another preset, or another family")
    edits = first_edits(images, Path(options["project"])) if preset == "edit" and not Path(images).is_file() else {}
    if edits:
        pairs = {toml_string(prompt): (paths, "") for prompt, paths in edits.items()}
        settings = {**settings, "samples.prompt_references": pairs}
    neutral = [text.strip() for text in options.get("neutral", "").split(";") if text.strip()]
    if slides:
        poles = {name: (options.get(name, ""), "") for name in ("positive", "negative")}
        SliderConfig(poles["positive"][0], poles["negative"][0], tuple(neutral))
        settings = {name: own for name, own in settings.items() if name != "buckets"}
        settings = {**settings, "train.slider": {**poles, "neutral": (neutral, "what the model draws, and is trained on")}}
    if "twin_weights" in options:
        remark = f"draws in few steps, with the adapter of {record.name}; empty: {record.name} draws"
        drawn = {"family": (options["twin"], remark)}
        drawn |= {"weights": (options["twin_weights"], "")} if options["twin_weights"] else {}
        settings = {name: {**own, **drawn} if name in ("samples", "drawings") else own for name, own in settings.items()}
    prompts = list(edits) or neutral or ["a photo of {trigger}" if called else "a photo"]
    return TEXT.format(
        family=toml_string(record.name),
        weights=toml_string(options["weights"]),
        images=seen.toml(images, trigger) if seen else NO_PICTURES if slides else concept_folders(Path(images)),
        trigger=toml_string(trigger),
        template=toml_string("{trigger}, {caption}" if called else "{caption}"),
        missing='missing = "trigger"  # what an image without a caption gets\n' if called else "",
        preview=", ".join(map(toml_string, prompts)),
        source=record.source,
        sections=toml_sections(record, settings),
    )


def _seen(options: Mapping[str, str]) -> Seen | None:
    """None of OneTrainer's concepts, which say themselves what they are."""
    images, project = options["images"], Path(options["project"])
    return None if not images or Path(images).is_file() else look(setting_path(images, project).resolve(), project)


def told(options: Mapping[str, str]) -> list[str]:
    trigger, images = options["trigger"], Path(options["images"])
    if not options["images"]:
        return ["it draws the neutral prompts, and learns the difference of the two others from the drawings"]
    if seen := _seen(options):
        return [*seen.lines(trigger), *_length(options, seen.kinds.total())]
    count = concept_folders(images).count("[[images.folder]]")
    if not trigger or count < 2:
        return []
    return [f"all {count} concepts have the trigger '{trigger}'; trigger = \"...\" in [[images.folder]] gives one its own"]


def _length(options: Mapping[str, str], pictures: int) -> Iterator[str]:
    record, train = family_record(options["family"]), PRESETS.get(options.get("preset", ""), {}).get("train", {})
    own = record.begin.get("train", {})
    if pictures and "passes" in train and "steps" not in own:
        passes, batch = train["passes"][0], own.get("batch_size", 1)
        yield f"{steps_of(passes, pictures, batch)} steps: {explanation(passes, pictures, batch)} ([train] steps, passes)"


def first_edits(images: str, project: Path) -> dict[str, tuple[str, ...]]:
    """Instruction -> paths of its references, of the first pairs. `images` and the paths start at `project`."""
    folder = setting_path(images, project).resolve()  # the project does not exist yet
    paths = [str(row["path"]) for row in scan(folder).files]
    references: dict[str, dict[int, str]] = {}
    for path, (image, number) in pair_references(paths, None).items():
        if image:
            references.setdefault(image, {})[number] = path
    if not references:
        raise ValueError(
            f"--preset edit: no picture in {folder} has a reference: put the pictures that edits start from into "
            f"{folder / CONTROL[0]}, under the same names"
        )
    lookups, _ = make_lookups(folder, paths, CaptionsConfig().where, project)
    found: dict[str, tuple[str, ...]] = {}
    for image, numbered in sorted(references.items()):
        own = tuple(f"{images}/{numbered[number]}" for number in sorted(numbered))
        named = (image, *numbered.values(), *without_ending(image))
        caption = next((captions[0].text for path in named for lookup in lookups if (captions := lookup(path))), "")
        if caption and not set("{}[]") & set(caption):  # a prompt may have placeholders
            found.setdefault(caption, own)
        if len(found) == PREVIEWS:
            break
    return found


def preset_settings(name: str, trigger: bool) -> Settings:
    """Section -> setting -> (value, remark). Raises ValueError for an unknown preset; "" is none."""
    if name and name not in PRESETS:
        hint = nearest(name, PRESETS, '"{}"')
        raise ValueError(f'--preset must be one of {", ".join(PRESETS)}, got "{name}"{hint}')
    preset = PRESETS.get(name, {})
    sections = sorted({*BEGIN, *preset}, key=SECTIONS.index)
    found = {section: {**BEGIN.get(section, {}), **preset.get(section, {})} for section in sections}
    # Without a trigger, captions cannot be reduced to it.
    if not trigger and "dropped" in found.get("train.data", {}):
        del found["train.data"]
    return found


def toml_sections(record: Family, settings: Settings = BEGIN) -> str:
    """The sections as TOML text. The family's own first values replace those of `settings`."""
    parts = []
    for section in dict.fromkeys([*settings, *record.begin]):
        usual = settings.get(section, {})
        own = {name: (value, "") for name, value in record.begin.get(section, {}).items()}
        lines = [f"[{section}]"]
        both = {**usual, **own}
        if both.get("steps", (AUTO,))[0] != AUTO:
            both.pop("passes", None)
        for name, (value, remark) in both.items():
            lines.append(f"{name} = {json.dumps(value)}{remark and '  # ' + remark}")  # JSON is TOML here
        parts += ["\n".join(lines)] if usual or own else []
    return "\n\n".join(parts)


# Which family to begin with


def models(budget: int) -> list[dict[str, Any]]:
    """Of each family that can be trained: name, title, licence, terms, hub, bytes, and "fits": side -> text."""
    found = []
    for family in FAMILIES.values():
        if (family.hub or family.bundled) and not family.base:
            size = 0 if family.bundled else sum(family.component_bytes().values())
            facts = {
                "name": family.name,
                "title": family.name if family.bundled else family.title,
                "licence": family.licence,
                "terms": family.terms,
            }
            fits = {side: _fits(capacity(family, side, budget), family, budget) for side in SIDES}
            found.append(facts | {"hub": family.hub, "bytes": size, "fits": fits})
    return found


def _fits(found: Capacity, family: Family, budget: int) -> str:
    import mlx.core as mx

    if found.bits is None:
        least = max(each.peak for each in forecasts(family, found.side, 4, budget, True).values())
        return f"does not fit: needs {least / 1e9:.3g} GB, {budget / 1e9:.3g} GB are there"
    bits = "fits" if found.bits == 16 else f"fits at {found.bits} bits"
    slow = ", days or weeks on a CPU" if not family.bundled and mx.default_device() == mx.cpu else ""
    return f"{bits}, streamed from the disk{slow}" if found.streamed else f"{bits}{slow}"


def fitting(options: Mapping[str, str], budget: int) -> dict[str, Any]:
    """The settings beside those of `init` with which the family fits: {} if it fits as it is, or does not fit at all."""
    record = family_record(options["family"])
    resolutions = preset_settings(options.get("preset", ""), False)["buckets"]["resolutions"][0]
    side = max(record.begin.get("buckets", {}).get("resolutions", resolutions))
    found = capacity(record, side, budget)
    if found.bits in (None, 16):
        return {}
    streamed = {"train.stream_blocks": True, "samples.stream_blocks": True} if found.streamed else {}
    return {"train.base_bits": found.bits, "train.optimizer.kind": OPTIMIZER, "samples.base_bits": found.bits} | streamed


# OneTrainer's concepts.json

FORM = 'must be OneTrainer\'s list of concepts, such as [{"name": "cat", "path": "/photos/cat", "balancing": 1.0}]'


def concept_folders(file: Path) -> str:
    """TOML text. A concept's balancing x loss_weight becomes `repeats`, or `weight` with balancing_strategy "SAMPLES"."""
    if file.suffix.lower() != ".json":
        raise ValueError(f"{file}: must be a folder of images, such as {file.parent}, or OneTrainer's concepts.json")
    concepts = read_json(file)
    named = isinstance(concepts, list) and all(isinstance(e, dict) and isinstance(e.get("path"), str) for e in concepts)
    if not named:
        raise ValueError(f"{file}: {FORM}, got {str(concepts)[:60]}")
    used = [each for each in concepts if not _left_out(each)]
    if not used:
        raise ValueError(f"{file}: none of its {len(concepts)} concepts is enabled and trained on; enable one in OneTrainer")
    strategies = {str(each.get("balancing_strategy", "REPEATS")).upper() for each in used}
    if len(strategies) > 1:
        raise ValueError(f"{file}: balancing_strategy must be the same in all concepts, got {' and '.join(sorted(strategies))}")
    entries = [_entry(each, file, "SAMPLES" in strategies) for each in used]
    unused = [f"# {each.get('name') or each['path']}: {_left_out(each)}" for each in concepts if _left_out(each)]
    return "\n\n".join([*entries, *(["\n".join(unused)] if unused else [])])


def _left_out(concept: dict[str, Any]) -> str:
    if not concept.get("enabled", True):
        return "not enabled in OneTrainer"
    validation = concept.get("validation_concept") or str(concept.get("type", "")).upper() == "VALIDATION"
    return "for validation in OneTrainer; see [train.validation]" if validation else ""


def _entry(concept: dict[str, Any], file: Path, by_samples: bool) -> str:
    name = concept.get("name") or concept["path"]
    text = concept.get("text") if isinstance(concept.get("text"), dict) else {}
    source = text.get("prompt_source", "sample") if text else "sample"
    if source != "sample":
        raise ValueError(
            f"{file}: concept {name!r} has prompt_source {source!r}: only 'sample' (a text file beside each image) is read; "
            'write such files, or name the folder and set captions.sources = ["filename"]'
        )
    count, weight = (
        concept.get(key, concept.get("repeats", 1.0) if key == "balancing" else 1.0) for key in ("balancing", "loss_weight")
    )
    if not isinstance(count, int | float) or not isinstance(weight, int | float) or isinstance(count, bool) or count < 0:
        raise ValueError(f"{file}: concept {name!r}: balancing and loss_weight must be numbers, got {count!r} and {weight!r}")
    lines = [
        "[[images.folder]]",
        # OneTrainer's relative paths are taken to start at the folder of the file.
        f"path = {toml_string(str(file.parent.resolve() / Path(concept['path']).expanduser()))}",
        f"{'weight' if by_samples else 'repeats'} = {count * weight:g}{'  # with loss_weight' if weight != 1 else ''}",
    ]
    lines += ["regularisation = true"] if str(concept.get("type", "")).upper() == "PRIOR_PREDICTION" else []
    return "\n".join(lines)


TEMPLATE = Template(
    options=(
        Option(
            "images", "The folder of images, or OneTrainer's concepts.json; only read. Not for a slider.", kind="folder or file"
        ),
        Option(
            "family",
            "The model family; `latentmill families` lists them. Previews are drawn by its distilled twin, in few steps, if that "
            "is on this machine.",
            default="klein-base-4b",
        ),
        Option("weights", "A folder or a hub id; empty: the family's own.", kind="folder or text"),
        Option(
            "preset",
            "What is trained: subject, character or style, whose steps follow from the pictures, edit, or slider, which takes no "
            "pictures; empty: usual settings.",
        ),
        Option("trigger", "A word that stands for your subject; it is put before every caption."),
        Option("positive", 'Of a slider: what strengths above 0 lead to, such as "{caption}, very old".'),
        Option("negative", 'Of a slider: what strengths below 0 lead to, such as "{caption}, very young".'),
        Option("neutral", 'Of a slider: what it works on, "a man; a woman; a portrait", which is {caption}.'),
    ),
    write=project_toml,
    told=told,
)
