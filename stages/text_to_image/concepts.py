"""OneTrainer's concepts.json as entries [[images.folder]] of project.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.settings import toml_string
from stages.untrusted import read_json

FORM = 'must be OneTrainer\'s list of concepts, such as [{"name": "cat", "path": "/photos/cat", "balancing": 1.0}]'


def concept_folders(file: Path) -> str:
    """Convert OneTrainer's list of concepts to entries [[images.folder]] of project.toml, and return the TOML text.
    `file` is the JSON file with the concepts. A concept is a folder of images. Its number `balancing` becomes the
    setting `repeats`. If the concepts have the balancing_strategy "SAMPLES", it becomes the setting `weight` instead.

    Raises ValueError if `file` is no list of concepts, if no concept is enabled, or if a concept cannot be expressed in
    project.toml. `repeats` or `weight` is multiplied by `loss_weight`. Disabled concepts and those for validation
    become comments. Relative paths start at the folder of `file`.
    """
    concepts = read_json(file)
    if not isinstance(concepts, list) or not all(
        isinstance(each, dict) and isinstance(each.get("path"), str) for each in concepts
    ):
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
        f"path = {toml_string(str(file.parent.resolve() / Path(concept['path']).expanduser()))}",
        f"{'weight' if by_samples else 'repeats'} = {count * weight:g}{'  # with loss_weight' if weight != 1 else ''}",
    ]
    lines += ["regularisation = true"] if str(concept.get("type", "")).upper() == "PRIOR_PREDICTION" else []
    return "\n".join(lines)
