"""The settings of the pipeline's stages and their defaults, read from the config dataclasses, and formatted for a page."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from stages.text_to_image import PIPELINE
from stages.text_to_image.train.task import GUIDANCE

CHANGES = {"setting": "a new run", "selects": "another length", "runtime": "no difference"}  # kind of setting -> effect


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting: its section, its name, and what its config dataclass says about it."""

    section: str
    name: str
    default: Any
    doc: str
    effect: str  # what a change of the setting makes: a value of CHANGES
    choices: tuple[Any, ...]  # the allowed values, where the type is a Literal
    optional: bool  # the section is off unless the project file has it

    @property
    def key(self) -> str:
        """The setting's name for `--set`, such as "train.noise.base"."""
        return f"{self.section}.{self.name}"


def entries(config: type, section: str, optional: bool = False) -> Iterator[Entry]:
    """Yield every setting of the config dataclass `config`, then the settings of its nested sections. `section` is the
    section's name, such as "train". `optional` is True if the section is off by default.
    """
    hints = typing.get_type_hints(config)
    nested = []
    for field in dataclasses.fields(config):
        inner, off = _nested_section(hints[field.name], field.default)
        if inner:
            nested.append((inner, f"{section}.{field.name}", optional or off))
            continue
        choices = typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is typing.Literal else ()
        bounds = field.metadata["bounds"]
        doc = field.metadata["doc"] + (f"; {bounds[0]:.7g} to {bounds[1]:.7g}" if bounds else "")
        effect = CHANGES[field.metadata["kind"]]
        yield Entry(section, field.name, field.default, doc, effect, choices, optional)
    for inner, name, off in nested:
        yield from entries(inner, name, off)


def _nested_section(hint: Any, default: Any) -> tuple[type | None, bool]:
    """Return (dataclass, optional) for a setting that is a section: its dataclass, and True if it is off by default. For a
    plain setting, the dataclass is None. `hint` is the setting's type.
    """
    union = typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType)
    found = next((kind for kind in (typing.get_args(hint) if union else (hint,)) if dataclasses.is_dataclass(kind)), None)
    return (found if isinstance(found, type) else None), default is None


def defaults() -> Mapping[str, str]:
    """Return the default of every setting of the pipeline's stages as text, by key, such as "train.lr" -> "0.0001". An
    optional section has the value "off". The key "guidance" has the guidance with which dev is trained.
    """
    found = {"guidance": f"{GUIDANCE:g}"}
    for stage_name in PIPELINE.stages:
        for entry in entries(PIPELINE.stage(stage_name).config, stage_name):
            found[entry.key] = in_words(entry.default)
            if entry.optional:
                found[entry.section] = "off"
    return found


def in_toml(value: Any) -> str:
    """Return a default as the project file writes it, in backquotes. None becomes "unset"."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[" + ", ".join(in_toml(item).strip("`") for item in value) + "]`"
    return f"`{value}`"


def in_words(value: Any) -> str:
    """Return a default as text for a sentence: without quotes, lists as "512, 768", floats without needless digits."""
    if isinstance(value, tuple):
        return ", ".join(in_words(item) for item in value)
    return in_toml(value).strip("`").strip('"') if not isinstance(value, float) else f"{value:g}"
