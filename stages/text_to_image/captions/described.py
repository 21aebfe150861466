"""Captions that a model wrote, from the table `descriptions`."""

from __future__ import annotations

from schemas.text_to_image.descriptions import DESCRIPTIONS
from stages.stage import StageContext
from stages.text_to_image.caption_files.text import Caption


def described_captions(ctx: StageContext) -> dict[str, list[Caption]]:
    """Return the captions that a model wrote, as a dict from image_id to a list of one caption. They come from the
    table `descriptions`. The dict is empty if this table is not built. `ctx` is the stage's context: its input tables
    and settings.
    """
    try:
        rows = ctx.rows(DESCRIPTIONS).to_pylist()
    except ValueError as error:
        if getattr(error, "table", "") != DESCRIPTIONS.name:
            raise
        return {}
    return {row["image_id"]: [Caption(row["text"], "description", row["model"])] for row in rows}
