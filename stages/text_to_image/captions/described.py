"""Captions that a model wrote, from the table `descriptions`."""

from __future__ import annotations

from schemas.text_to_image.descriptions import DESCRIPTIONS
from stages.run import Run
from stages.text_to_image.caption_files.text import Caption
from stages.text_to_image.captions.config import CaptionsConfig


def described_captions(run: Run[CaptionsConfig]) -> dict[str, list[Caption]]:
    """image_id -> its one caption by a model. Empty if the table `descriptions` is not built."""
    try:
        rows = run.inputs.rows(DESCRIPTIONS).to_pylist()
    except ValueError as error:
        # `NotBuilt` of pipeline, which stages may not import, names its table.
        if getattr(error, "table", "") != DESCRIPTIONS.name:
            raise
        return {}
    return {row["image_id"]: [Caption(row["text"], "description", row["model"])] for row in rows}
