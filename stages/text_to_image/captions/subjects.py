"""What the table `images` says about the texts of an image: its trigger, its folder's name, and whether it is of the class."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pyarrow as pa

from stages.text_to_image.caption_files.text import Caption
from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.template import Filled, fill, without_trigger
from stages.text_to_image.imaging.references import USE, without_ending
from stages.text_to_image.imaging.usable import usable_paths

NO_TRIGGER = "its folder has no trigger"


@dataclass(frozen=True)
class Subject:
    """The facts about a usable image that decide its training texts. `paths` are the paths of the image. The first path
    with a caption, such as a/cat.png with a/cat.txt, gives the caption. `trigger` is the word that the texts get, or
    "". `concept` is the subject in the name of the image's folder, such as "cat", or "". `class_only` is True for a
    regularisation image: it shows the class in general, and its texts get no trigger. `own_trigger` is True if
    `trigger` is a setting of the folder, not of [captions]. `folder` is the path of the folder whose name or settings
    give these facts, or "".

    `paths` also has the paths of the image's duplicates and references. If the image a/cat_out.png has a reference,
    a/cat.png is added, because a caption file may be named after both. If the folder of a regularisation image names no
    subject, its `concept` is `config.class_word`. For a regularisation image, `own_trigger` is False.
    """

    paths: tuple[str, ...]
    trigger: str = ""
    concept: str = ""
    class_only: bool = False
    own_trigger: bool = False
    folder: str = ""

    @property
    def named(self) -> list[Caption]:
        """The substitute for a missing caption of this image: a list with one `Caption`. The text of this `Caption` is
        `concept`, the subject that the image's folder is named after, such as "cat" for the folder "10_cat". If
        `concept` is "", the list is empty.

        If the folder of a regularisation image names no subject, `concept` is the setting `class_word`.
        """
        return [Caption(self.concept, "folder", self.folder)] if self.concept else []

    def fill(self, config: CaptionsConfig, caption: Caption) -> Filled:
        """Return the training text of one caption of this image, as a `Filled`. `caption` is the caption. `config` has
        the settings [captions]. Its `template` is the text into which the caption and the trigger word are put, such as
        "{trigger}, {caption}".

        A folder of images can have a trigger setting of its own. If this setting is "", the template is used without
        {trigger}. If it is a word and the template lacks {trigger}, "{trigger}, " is put before the template.
        """
        template = config.template
        if self.own_trigger and not self.trigger:
            return dataclasses.replace(fill(without_trigger(template), caption.text, ""), reason=NO_TRIGGER)
        if self.own_trigger and "{trigger}" not in template:
            template = f"{{trigger}}, {template}"
        return fill(template, caption.text, self.trigger, self.class_only, config.class_word or self.concept)


def subjects_of(images: pa.Table, config: CaptionsConfig) -> dict[str, Subject]:
    """Return a dict from image_id to the `Subject` of every usable image: the facts that decide its training texts.
    `images` is the table `images`. `config` has the settings [captions], such as the trigger word. Raises ValueError if
    no image is usable.
    """
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
        named = [other for path in paths if path in beside for other in (*beside[path], *without_ending(path))]
        found[image_id] = Subject((*paths, *named), trigger, concept, class_only, own and not class_only, row["folder"] or "")
    return found
