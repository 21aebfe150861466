"""The template: the text around a caption, with placeholders for the caption and the trigger."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

FOREIGN = "[trigger]"  # another program's placeholder for the trigger, in lower case
HAS_TRIGGER = "the caption has the trigger"
REPLACED = f"{FOREIGN} in the caption was replaced by the trigger"
CLASS_ONLY = "a regularisation image has no trigger"


@dataclass(frozen=True)
class Filled:
    """A training text and how it was made."""

    text: str
    template: str | None = None  # that was filled in, without the parts that were left out
    reason: str | None = None  # special case of the trigger: HAS_TRIGGER, REPLACED, CLASS_ONLY, NO_TRIGGER


def fill(template: str, caption: str, trigger: str, class_only: bool = False, class_word: str = "") -> Filled:
    """Fill in the template. Its part with {trigger} is left out if the caption has the trigger, or the image is of the class.

    "[trigger]" in a caption, which other trainers write, becomes the trigger, or the class word in an image of the class.
    """
    # A template without {caption} would leave no text at all: the class word takes the trigger's place.
    if class_only and "{caption}" not in template and class_word:
        return Filled(fill_template(template, "", class_word), template, CLASS_ONLY)
    if class_only:
        cut = without_trigger(template)
        return Filled(fill_template(cut, replace_foreign(caption, class_word), ""), cut, CLASS_ONLY)
    # First, so that the trigger that comes in this way counts as one that the caption has.
    whole = replace_foreign(caption, trigger)
    if "{trigger}" not in template or not trigger_in(whole, trigger):
        return Filled(fill_template(template, whole, trigger), template, REPLACED if whole != caption else None)
    cut = without_trigger(template)
    return Filled(fill_template(cut, whole, trigger), cut, HAS_TRIGGER if whole == caption else REPLACED)


def without_trigger(template: str) -> str:
    """The template without its part, between commas, that has {trigger}; at least "{caption}"."""
    kept = ", ".join(part.strip() for part in template.split(",") if "{trigger}" not in part)
    return kept if "{caption}" in kept else "{caption}"


def trigger_in(text: str, trigger: str) -> bool:
    """As a word or phrase, not as a part of a longer word."""
    return bool(trigger and re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text))


def replace_foreign(text: str, word: str) -> str:
    """Replace "[trigger]" by `word`, whatever its case."""
    # A function, since a backslash in `word` is no escape.
    return re.sub(re.escape(FOREIGN), lambda match: word, text, flags=re.IGNORECASE)


def fill_template(template: str, caption: str, trigger: str) -> str:
    values = {"{caption}": caption, "{trigger}": trigger}
    # In one pass: braces in a caption are text.
    return re.sub(r"\{(?:caption|trigger)\}", lambda match: values[match.group()], template)


def check_placeholders(setting: str, text: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for an unknown placeholder, a lone brace, or ai-toolkit's "[trigger]"."""
    known = " and ".join(f"{{{each}}}" for each in allowed)
    for name in re.findall(r"\{(\w+)\}", text):
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            raise ValueError(f"{setting} must have no placeholder but {known}, got {{{name}}}{hint}")
    if re.search(r"[{}]", re.sub(r"\{\w+\}", "", text)):
        raise ValueError(f'{setting} must have no braces but those of {known}, got "{text}"')
    if FOREIGN in text.lower():
        raise ValueError(f'{setting} must not have ai-toolkit\'s {FOREIGN}; write {{trigger}} instead, got "{text}"')
