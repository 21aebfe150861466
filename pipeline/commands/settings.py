"""`latentmill settings`: every setting of project.toml with its default, unit, bounds and reason, read from the sections."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import click

import stages
from pipeline.project.config import Parser, ProjectConfig, describe, hints_of, name_here, nested_sections, remark
from pipeline.terminal import tell
from stages.settings import nearest

WIDTH = 100  # columns of the reasons
# What a change of a setting does, by its kind.
CHANGES = {"setting": "starts a new table", "selects": "adds or removes rows", "runtime": "changes no row"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting of a section."""

    section: str
    name: str
    default: Any
    doc: str
    values: str  # what is allowed: "a whole number"
    bounds: str  # "1 to 1024"
    unit: str
    kind: str  # a key of CHANGES
    choices: tuple[Any, ...]  # the values of a Literal
    optional: bool  # the section is off unless the project file has it
    hint: Any  # its type

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def change(self) -> str:
        return CHANGES[self.kind].replace("table", "run" if self.section.partition(".")[0] == "train" else "table")


@click.command("settings")
@click.argument("section", default="")
@click.option("--pipeline", default=next(iter(stages.PIPELINES)), show_default=True, help="The pipeline of the settings.")
def command(section: str, pipeline: str) -> None:
    """List the settings of project.toml: default, unit, bounds and reason. SECTION is a section, such as train or
    train.optimizer, or the name of a setting, also as another trainer calls it. Without it, all sections are listed.
    """
    tell(text(chosen(pipeline, section)))


def chosen(pipeline: str, word: str) -> list[Entry]:
    """The settings of the section `word` and those in it, or all of that name; "": all. Raises ValueError if there is none."""
    record = stages.pipeline(pipeline)
    sections: dict[str, type] = {"project": ProjectConfig, **{name: record.stage(name).config for name in record.stages}}
    found = list(entries(sections))
    word = word.strip("[]")
    names = (word, name_here(word))
    picked = [each for each in found if not word or f"{each.section}.".startswith(f"{word}.") or each.key == word]
    picked = picked or [each for each in found if each.name in names]
    if not picked:
        if told := remark(word):
            raise ValueError(f"there is no setting {word!r}: {told}")
        known = {each.section for each in found} | {each.name for each in found}
        raise ValueError(f"there is no section or setting {word!r}{nearest(word, known)}; the sections are {', '.join(sections)}")
    return picked


def entries(sections: Mapping[str, type]) -> Iterator[Entry]:
    """The settings of the sections, then those of the sections inside them."""
    parser = Parser(sections, str)
    off = {name for name, *_ in nested_sections(sections) if _is_off(name, parser.sections)}
    for name, kind, many in nested_sections(sections):
        hints = hints_of(kind)
        for field in dataclasses.fields(kind):
            key = f"{name}.{field.name}"
            if key in parser.sections and key not in parser.repeated:
                continue
            hint, meta = hints[field.name], field.metadata
            yield Entry(
                name,
                field.name,
                field.default,
                meta["doc"],
                describe(hint),
                "{:.12g} to {:.12g}".format(*meta["bounds"]) if meta["bounds"] else "",
                meta.get("unit", ""),
                meta["kind"],
                get_args(hint) if get_origin(hint) is Literal else (),
                many or any(f"{name}.".startswith(f"{each}.") for each in off),
                hint,
            )


def _is_off(name: str, sections: Mapping[str, type]) -> bool:
    outer, _, inner = name.rpartition(".")
    return bool(outer) and next(f.default for f in dataclasses.fields(sections[outer]) if f.name == inner) is None


def text(found: Iterable[Entry]) -> str:
    """What the command prints: a block per section."""
    blocks: dict[str, list[str]] = {}
    for each in found:
        title = f"[{each.section}]" + ("  # off unless the project file has it" if each.optional else "")
        allowed = "".join((each.values, f", {each.bounds}" * bool(each.bounds), f"; unit: {each.unit}" * bool(each.unit)))
        lines = [f"{each.name} = {in_toml(each.default)}", f"    {allowed}; a change {each.change}"]
        reason = textwrap.wrap(each.doc, WIDTH - 4, break_on_hyphens=False, break_long_words=False)
        blocks.setdefault(title, []).append("\n".join([*lines, *(f"    {line}" for line in reason)]))
    return "\n\n".join("\n".join([title, *lines]) for title, lines in blocks.items())


def in_toml(value: Any) -> str:
    """A default as the project file writes it; None is "unset"."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    return str(value)
