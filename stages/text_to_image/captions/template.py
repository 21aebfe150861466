"""The template: the text around a caption, with placeholders for the caption and the trigger."""

from __future__ import annotations

import difflib
import re

FOREIGN = "[trigger]"  # another program's placeholder for the trigger, in lower case


def fill_template(template: str, caption: str, trigger: str) -> str:
    """Return `template` with its placeholders replaced. The text `caption` replaces `{caption}`, and the text `trigger`
    replaces `{trigger}`. Braces inside these two texts are left alone.
    """
    values = {"{caption}": caption, "{trigger}": trigger}
    return re.sub(r"\{(?:caption|trigger)\}", lambda match: values[match.group()], template)


def check_placeholders(setting: str, text: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if `text` contains a placeholder that is not in `allowed`, or another brace. A placeholder is a word
    in braces, such as `{caption}`. Also raise it if `text` contains `[trigger]`. `allowed` holds the words without braces.
    `setting` is the name of the setting that holds `text`. It is used in the message only.
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
