"""The settings of the stage `captions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stages.settings import check_bounds, selects, setting
from stages.text_to_image.caption_files.lookup import CaptionSources
from stages.text_to_image.captions.template import check_placeholders


@dataclass(frozen=True)
class CaptionsConfig:
    """The section [captions]: where captions are found, and how training texts are made from them."""

    sources: tuple[Literal["sidecar", "metadata", "filename"], ...] = setting(
        ("sidecar", "metadata"),
        "where captions are looked for, in this order: sidecar, metadata, filename; the first that has one is used",
    )
    extension: str | tuple[str, ...] = setting(
        (".txt", ".caption"), "suffix of sidecar files; of a list, the first that an image has is used"
    )
    folder: str = setting(
        "",
        "separate folder of sidecars, in the same folders below it as the images; relative to the project; empty: beside the "
        "images, or in a folder `captions` beside or above them",
        unrecorded=("",),
        path=True,
    )
    caption_column: str = setting(
        "", "column of metadata and captions files that holds the caption; empty: text, caption or prompt", unrecorded=("",)
    )
    lines: Literal["one", "many"] = setting(
        "one", "one: a sidecar is one caption, with its line breaks; many: every line of a sidecar is a caption"
    )
    template: str = setting(
        "{caption}",
        "text that is trained with, made of {caption} and {trigger}; without {caption}, all images get the same text; a caption "
        "that has the trigger is not given it twice",
    )
    replace: Mapping[str, str] | None = setting(
        None, 'words to replace in captions, in this order: {"cat" = "ohwx cat"}; "" removes them', unrecorded=(None, {})
    )
    drop: tuple[str, ...] = setting(
        (), 'parts of comma lists to leave out, such as ["watermark"]; capitals do not matter', unrecorded=((),)
    )
    shuffle: int = setting(
        0,
        "orders of the parts of a comma list that are trained, each as a caption; 0: as written",
        bounds=(0, 100),
        unrecorded=(0,),
    )
    keep: int = setting(1, "shuffle: parts at the beginning that stay where they are", bounds=(0, 1000), unrecorded=(1,))
    weights: tuple[float, ...] = setting(
        (),
        "draws of an image's first, second, ... caption, relative to each other: [3, 1]; the last number is for all further "
        "captions; empty: equally",
        bounds=(1e-3, 1000.0),
        unrecorded=((),),
    )
    trigger: str = setting("", "word that the adapter is called with; replaces {trigger} in the template and in preview prompts")
    missing: Literal["error", "empty", "trigger", "filename", "skip"] = setting(
        "error", "what an image without a caption gets: an error (it is usually a mistake), empty, trigger, filename or skip"
    )
    class_word: str = selects(
        "",
        'class that the trigger belongs to, such as "cat"; adds each caption with this word in place of the trigger, for '
        "[train.preservation]",
    )
    preview_prompts: tuple[str, ...] = selects((), "prompts that the stage samples draws images for")

    def __post_init__(self) -> None:
        check_bounds(self)
        if "" in (self.replace or {}):
            raise ValueError('replace must name the words to replace, such as {"cat" = "ohwx cat"}, got ""')
        check_placeholders("template", self.template, ("caption", "trigger"))
        for prompt in self.preview_prompts:
            check_placeholders("preview_prompts", prompt, ("trigger",))
        self._check_trigger()
        if not self.template.strip():
            raise ValueError(f'template must not be empty ("{{caption}}" is the caption alone), got "{self.template}"')
        if not self.sources:
            raise ValueError('sources must name at least one source, such as ["sidecar", "metadata"], got []')
        for extension in self.extensions or ("",):
            if not extension.startswith(".") or len(extension) < 2:
                raise ValueError(f'extension must be a dot and a name such as ".txt", got "{extension}"')

    @property
    def extensions(self) -> tuple[str, ...]:
        return (self.extension,) if isinstance(self.extension, str) else self.extension

    @property
    def where(self) -> CaptionSources:
        return CaptionSources(self.sources, self.extension, self.folder, self.caption_column, self.lines)

    def _check_trigger(self) -> None:
        uses = {
            "captions.template has {trigger}": "{trigger}" in self.template,
            "captions.preview_prompts has {trigger}": any("{trigger}" in prompt for prompt in self.preview_prompts),
            'captions.missing is "trigger"': self.missing == "trigger",
            "captions.class_word takes its place": bool(self.class_word),
        }
        for use, needed in uses.items():
            if needed and not self.trigger:
                raise ValueError(f'trigger must be set, because {use}, got ""')
        if self.class_word and self.trigger in self.class_word:
            raise ValueError(f'class_word must not contain the trigger "{self.trigger}", got "{self.class_word}"')
