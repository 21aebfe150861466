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
    """A training text and how it was made. `text` is the training text. `template` is the template that was filled in,
    such as "{trigger}, {caption}", or None if there was none. The trigger is a word that stands for what the model
    learns. `reason` names a special case in the use of the trigger, or is None. For example, "the caption has the
    trigger" means that the caption already had the trigger, so the template did not add it again.

    The other values of `reason` are `REPLACED` (the text "[trigger]" in the caption was replaced by the trigger) and
    `CLASS_ONLY` (a regularisation image has no trigger). If a part of the template was left out, `template` lacks that
    part.
    """

    text: str
    template: str | None = None
    reason: str | None = None


def fill(template: str, caption: str, trigger: str, class_only: bool = False, class_word: str = "") -> Filled:
    """Return the training text of one caption, as a `Filled`. `template` is a text such as "{trigger}, {caption}".
    `caption` replaces {caption}. `trigger`, the image's trigger word or "", replaces {trigger}. If the caption already
    has the trigger word, the part of the template with {trigger} is left out. For example, "{trigger}, {caption}" is
    then used as "{caption}". `class_only` is True for a regularisation image. Its text gets no trigger word, but may
    get `class_word`, a word for what the image shows, such as "cat".

    The parts of a template are separated by commas. For a regularisation image, the part with {trigger} is left out.
    Only if the template lacks {caption} and `class_word` is not empty, this part is kept, and `class_word` replaces
    {trigger}.

    A caption may have the text "[trigger]", which other programs write for the trigger word. In the caption of a
    regularisation image, `class_word` replaces "[trigger]". In any other caption, `trigger` replaces "[trigger]",
    before the caption is searched for the trigger word.
    """
    if class_only and "{caption}" not in template and class_word:
        return Filled(fill_template(template, "", class_word), template, CLASS_ONLY)
    if class_only:
        cut = without_trigger(template)
        return Filled(fill_template(cut, replace_foreign(caption, class_word), ""), cut, CLASS_ONLY)
    whole = replace_foreign(caption, trigger)
    if "{trigger}" not in template or not trigger_in(whole, trigger):
        return Filled(fill_template(template, whole, trigger), template, REPLACED if whole != caption else None)
    cut = without_trigger(template)
    return Filled(fill_template(cut, whole, trigger), cut, HAS_TRIGGER if whole == caption else REPLACED)


def without_trigger(template: str) -> str:
    """Return `template` without the part that has {trigger}. Parts are separated by commas. For example, "{trigger},
    {caption}, film grain" gives "{caption}, film grain". If {caption} is missing from the remaining parts, the result
    is "{caption}".
    """
    kept = ", ".join(part.strip() for part in template.split(",") if "{trigger}" not in part)
    return kept if "{caption}" in kept else "{caption}"


def trigger_in(text: str, trigger: str) -> bool:
    """Return True if `text` has the word or phrase `trigger`, not as a part of a longer word."""
    return bool(trigger and re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text))


def replace_foreign(text: str, word: str) -> str:
    """Return `text` with every "[trigger]" replaced by `word`. Other trainers write "[trigger]" for the trigger word.
    Upper and lower case do not matter.
    """
    return re.sub(re.escape(FOREIGN), lambda match: word, text, flags=re.IGNORECASE)


def fill_template(template: str, caption: str, trigger: str) -> str:
    """Return `template` with its placeholders replaced. The text `caption` replaces `{caption}`, and the text `trigger`
    replaces `{trigger}`. Braces inside these two texts are left alone.
    """
    values = {"{caption}": caption, "{trigger}": trigger}
    return re.sub(r"\{(?:caption|trigger)\}", lambda match: values[match.group()], template)


def check_placeholders(setting: str, text: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if `text` contains a placeholder that is not in `allowed`. A placeholder is a word in braces,
    such as `{caption}`. `allowed` holds the words without braces. A brace outside of a placeholder is an error too. So
    is the text `[trigger]`. `setting` is the name of the setting that holds `text`. It is used in the message only.
    """
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
