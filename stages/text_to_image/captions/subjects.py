"""What the table `images` says about the texts of an image: its trigger, its folder's name, and whether it is of the class."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pyarrow as pa

from stages.text_to_image.caption_files.text import Caption
from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.template import Filled, fill, without_trigger
from stages.text_to_image.imaging.usable import USE, usable_paths, without_ending

NO_TRIGGER = "its folder has no trigger"


@dataclass(frozen=True)
class Subject:
    """What decides the training texts of a usable image."""

    paths: tuple[str, ...]  # of the image, its duplicates and its references: the first with a caption gives it
    trigger: str = ""  # word that the texts get
    concept: str = ""  # subject in the folder's name, such as cat of 10_cat; of the class, else the class word
    class_only: bool = False  # a regularisation image: its texts get no trigger
    own_trigger: bool = False  # the trigger is a setting of the folder, not of [captions]
    folder: str = ""  # whose name or settings give these facts

    @property
    def named(self) -> list[Caption]:
        """The name of the folder as the caption of last resort: "cat" of 10_cat."""
        return [Caption(self.concept, "folder", self.folder)] if self.concept else []

    def fill(self, config: CaptionsConfig, caption: Caption) -> Filled:
        """The training text of one caption. A folder's own trigger is used even where the template has no {trigger}."""
        template = config.template
        if self.own_trigger and not self.trigger:
            return dataclasses.replace(fill(without_trigger(template), caption.text, ""), reason=NO_TRIGGER)
        if self.own_trigger and "{trigger}" not in template:
            template = f"{{trigger}}, {template}"
        return fill(template, caption.text, self.trigger, self.class_only, config.class_word or self.concept)


def subjects_of(images: pa.Table, config: CaptionsConfig) -> dict[str, Subject]:
    every = images.to_pylist()
    rows = {row["image_id"]: row for row in every if row["rejected"] is None and row["use"] != USE}
    beside: dict[str, list[str]] = {}
    for row in every:
        if row["reference_of"]:
            beside.setdefault(row["reference_of"], []).append(row["path"])
    found = {}
    for image_id, paths in usable_paths(images).items():
        row = rows[image_id]
        own, class_only = row["trigger"] is not None, row["use"] is not None
        trigger = "" if class_only else row["trigger"] if own else config.trigger
        concept = row["concept"] or (config.class_word if class_only else "")
        # The caption of an edit's picture may be named after the pair: cat.txt for cat_in.png and cat_out.png.
        named = [other for path in paths if path in beside for other in (*beside[path], *without_ending(path))]
        found[image_id] = Subject((*paths, *named), trigger, concept, class_only, own and not class_only, row["folder"] or "")
    return found
