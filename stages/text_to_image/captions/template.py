"""The template: the text around a caption, with placeholders for the caption and the trigger."""

from __future__ import annotations

import difflib
import re


def fill_template(template: str, caption: str, trigger: str) -> str:
    """Return `template` with its placeholders replaced. The text `caption` replaces `{caption}`, and the text `trigger`
    replaces `{trigger}`. Braces inside these two texts are left alone.
    """
    values = {"{caption}": caption, "{trigger}": trigger}
    return re.sub(r"\{(?:caption|trigger)\}", lambda match: values[match.group()], template)


def check_placeholders(setting: str, text: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if `text` contains a placeholder that is not in `allowed`. A placeholder is a word in braces,
    such as `{caption}`. `allowed` holds the words without braces. `setting` is the name of the setting that holds
    `text`. It is used in the message only.
    """
    for name in re.findall(r"\{(\w+)\}", text):
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            known = " and ".join(f"{{{each}}}" for each in allowed)
            raise ValueError(f"{setting} must have no placeholder but {known}, got {{{name}}}{hint}")
