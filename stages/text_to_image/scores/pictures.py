"""The pictures that are scored, as rows, and the texts that they are compared with."""

from __future__ import annotations

import re
from typing import Any

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.samples import SAMPLES
from stages.hashing import file_sha256
from stages.run import Run
from stages.text_to_image.scores.config import ScoresConfig
from stages.text_to_image.scores.references import Reference, read_references

Row = dict[str, Any]


def preview_rows(run: Run[ScoresConfig]) -> list[Row]:
    """One row per preview whose file is there and intact, without scores. `kind` is "base" or "adapter"."""
    folder = run.inputs.files(SAMPLES)
    rows = []
    for row in run.inputs.rows(SAMPLES).to_pylist():
        if not run.inputs.intact(SAMPLES, row["path"]):  # deleted since the rows were read, or damaged: no preview
            continue
        copied = {name: row[name] for name in ("adapter_id", "step", "prompt", "seed", "path")}
        kind = "adapter" if row["adapter_id"] else "base"
        rows.append({"picture_id": file_sha256(folder / row["path"]), "kind": kind, **copied})
    return rows


def reference_rows(run: Run[ScoresConfig]) -> list[Row]:
    """One row per reference, without scores."""
    same: Row = {"kind": "real", "adapter_id": "", "step": 0, "seed": 0}
    return [same | {"picture_id": one.picture_id, "prompt": one.caption, "path": one.path} for one in run.once(find_references)]


def find_references(run: Run[ScoresConfig]) -> list[Reference]:
    """Sorted by path; empty without the setting. Raises ValueError if a reference is also a training image."""
    if not run.config.references:
        return []
    found = read_references(run.root / run.config.references)
    trained = {row["image_id"]: row["path"] for row in usable_images(run)}
    for one in found:
        if one.picture_id in trained:
            where = f"{one.path} is also the training image {trained[one.picture_id]}"
            raise ValueError(f"scores.references must hold no training image, but {where}; remove one of the two")
    return found


def usable_images(run: Run[ScoresConfig]) -> list[Row]:
    """Accepted rows of `images`, without regularisation images and references of edit training."""
    return [row for row in run.inputs.rows(IMAGES).to_pylist() if row["rejected"] is None and row["use"] is None]


def trigger_word(run: Run[ScoresConfig]) -> str:
    found = [row["text"] for row in run.inputs.rows(CAPTIONS).to_pylist() if row["role"] == "trigger"]
    return str(found[0]) if found else ""


def candidate_texts(run: Run[ScoresConfig]) -> list[str]:
    """The distinct texts among which `agreement_rank` ranks: those of all previews and references."""
    trigger = trigger_word(run)
    texts = [row["prompt"] for row in [*run.once(preview_rows), *reference_rows(run)]]
    return sorted({without_trigger(text, trigger) for text in texts} - {""})


def without_trigger(text: str, trigger: str) -> str:
    """Also without the comma beside it: "ohwx, a fox" becomes "a fox"."""
    parts = [part.strip() for part in (text.replace(trigger, "") if trigger else text).split(",")]
    return re.sub(r"\s+", " ", ", ".join(part for part in parts if part))
