"""OneTrainer's concepts.json as entries [[images.folder]] of project.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.settings import toml_string
from stages.untrusted import read_json

FORM = 'must be OneTrainer\'s list of concepts, such as [{"name": "cat", "path": "/photos/cat", "balancing": 1.0}]'


def concept_folders(file: Path) -> str:
    """TOML text. A concept's balancing x loss_weight becomes `repeats`, or `weight` with balancing_strategy "SAMPLES".

    Disabled concepts and those for validation become comments. Raises ValueError if a concept cannot be expressed in
    project.toml.
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
        # OneTrainer's relative paths are taken to start at the folder of the file.
        f"path = {toml_string(str(file.parent.resolve() / Path(concept['path']).expanduser()))}",
        f"{'weight' if by_samples else 'repeats'} = {count * weight:g}{'  # with loss_weight' if weight != 1 else ''}",
    ]
    lines += ["regularisation = true"] if str(concept.get("type", "")).upper() == "PRIOR_PREDICTION" else []
    return "\n".join(lines)
