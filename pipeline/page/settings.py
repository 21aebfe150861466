"""The screen of settings: a form over project.toml, what its changes do, and what is refused. It works without a script."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stages
from pipeline.commands.settings import Entry, entries, in_toml
from pipeline.errors import one_line
from pipeline.project import config as configuration
from pipeline.project.config import Overrides, ProjectConfig, members, pipeline_name
from pipeline.project.edit import Changed, Prospect, edited, effects, prospect, save
from pipeline.project.project import Project
from pipeline.project.runs import flatten
from pipeline.store.disk import format_bytes
from pipeline.terminal import format_seconds
from stages.pipelines import load
from stages.settings import toml_string
from stages.untrusted import parse_json, parse_toml

if TYPE_CHECKING:
    from pipeline.project.outlook import Need

VIEWS = ("basic", "all")
EACH = 12  # changes whose effects are computed one by one
SWITCH = "on"  # of a section that is off unless the file has it


@dataclass
class Item:
    key: str
    name: str
    about: str
    text: str  # in the field
    choices: tuple[str, ...] = ()
    lines: bool = False  # a text of several lines
    placeholder: str = ""
    fixed: str = ""  # why it cannot be changed here
    error: str = ""
    effect: str = ""


@dataclass
class Form:
    """What the template shows."""

    view: str = "basic"
    find: str = ""
    shown: str = ""  # JSON: digest of the file, and key -> text of what it has, when the form was made
    groups: dict[str, list[Item]] = field(default_factory=dict)
    changes: list[Item] = field(default_factory=list)
    error: str = ""
    said: str = ""
    stages: list[tuple[str, str, str, str, str]] = field(default_factory=list)  # name, now, then, memory, note
    budget: str = ""
    refused: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)  # line, [(label, settings as JSON)]
    saved: int = 0
    status: int = 200


def answer_form(folder: Path, overrides: Overrides, given: Mapping[str, str] | None, saved: str = "") -> Form:
    """`given`: the fields of a form that was sent. Raises ValueError if project.toml cannot be read."""
    text = configuration.read_text(folder / configuration.FILE)
    given = given or {}
    items, act = Items(text), given.get("act", "")
    views = [view for view in (act, given.get("view"), VIEWS[0]) if view in VIEWS]
    form = Form(view=views[0], find=given.get("find", "").strip()[:200])
    digest = sha256(text.encode()).hexdigest()
    before, base = _shown(given["shown"]) if "shown" in given else (digest, items.texts)
    form.shown = json.dumps([digest, items.texts])
    typed = {key: given[key].replace("\r\n", "\n") for key in items.found if key in given}
    typed |= {key: as_text(value) for key, value in _settings(given.get("take", "{}")).items() if key in items.found}
    wanted = {key: text for key, text in typed.items() if text != base.get(key, "")}
    values, bad = items.values(wanted)
    for key, value in wanted.items():
        items.found[key].text = value
    form.changes = [items.found[key] for key in wanted]
    if before != digest:
        form.status, form.error = 409, "project.toml was changed meanwhile: nothing is saved; your changes are still here"
    elif saved.isdecimal() and len(saved) < 6:
        form.said = f"{saved} {'setting' if saved == '1' else 'settings'} saved"
    elif act == "save" and not wanted:
        form.said = "nothing is changed"
    if not bad:
        try:
            after = edited(text, values) if values else text
            if act == "save" and values and not form.error:
                save(folder, text, after, overrides)
                form.saved = len(values)
                return form
            if values or form.said:
                _tell(form, folder, overrides, text, after, values)
        except Changed:  # just now
            return answer_form(folder, overrides, given)
        except ValueError as error:
            message = one_line(error) or str(error)
            keys = sorted((key for key in wanted if message.startswith(key)), key=len)
            bad |= {keys[-1]: message} if keys else {}
            form.error = form.error or message
    for key, message in bad.items():
        items.found[key].error = message
    form.error = form.error or "; ".join(bad.values())
    form.status = 422 if form.error and form.status == 200 else form.status
    items.choose(form, set(wanted))
    return form


def _shown(given: str) -> tuple[str, dict[str, str]]:
    """The digest of the file and the texts of its fields, as they were when the form was made."""
    found = parse_json(given, "the form")
    match found:
        case [str(digest), dict(texts)]:
            return digest, texts
    raise ValueError("the form is damaged: load the page again")


def _settings(text: str) -> dict[str, Any]:
    found = parse_json(text, "the settings")
    if not isinstance(found, dict):
        raise ValueError("the settings must be a JSON object")
    return found


def _tell(form: Form, folder: Path, overrides: Overrides, text: str, after: str, values: Mapping[str, Any]) -> None:
    """What the changes do, together and one by one. Raises ValueError if the project would not open."""
    changed = Project(folder, overrides, text=after)
    known: dict[Any, Any] = {}
    now, then = prospect(Project(folder, overrides, text=text), known), prospect(changed, known)
    for item in form.changes if len(form.changes) <= EACH else ():
        try:
            alone = Project(folder, overrides, text=edited(text, {item.key: values[item.key]}))
            found = list(effects(alone, now, then if len(form.changes) == 1 else prospect(alone, known)))
            item.effect = "; ".join(found) or "nothing more is computed"
        except ValueError as error:  # it needs another change
            item.effect = f"alone: {one_line(error)}"
    form.budget, form.stages = format_bytes(then.budget), list(_rows(now, then))
    for refusal in then.refused:
        remedy = refusal.remedy
        form.refused.append((refusal.line, [(str(remedy), json.dumps(flatten(remedy.settings)))] if remedy else []))


def _rows(now: Prospect, then: Prospect) -> Iterator[tuple[str, str, str, str, str]]:
    for name, need in then.needs.items():
        found = need.forecast
        seconds = f", about {format_seconds(need.seconds)}" if need.seconds else ""
        memory = format_bytes(found.peak) if found and found.peak else ""
        yield name, _to_do(now.needs[name]), f"{_to_do(need)}{seconds}", memory, need.note


def _to_do(need: Need) -> str:
    return "nothing" if need.missing == 0 else need.to_do or ("" if need.stops else "what the stages before give it")


# Settings as fields


class Items:
    """`found`: all settings of the project's pipeline, with what `text`, the project file, says."""

    def __init__(self, text: str) -> None:
        raw = parse_toml(text, configuration.FILE)
        self.pipeline = stages.pipeline(pipeline_name(raw))
        sections: dict[str, type] = {
            "project": ProjectConfig,
            **{name: self.pipeline.stage(name).config for name in self.pipeline.stages},
        }
        self.found: dict[str, Item] = {}
        self.entries: dict[str, Entry] = {}
        self.switches = set[str]()
        written = _flat(raw)
        for entry in entries(sections):
            if _repeated(entry.section, sections):
                continue
            if entry.optional and entry.section not in self.found:
                self.switches.add(entry.section)
                on = SWITCH if entry.section in written else ""
                about = f"[{entry.section}] is off unless it is switched on, or one of its settings is given"
                self.found[entry.section] = Item(entry.section, "", about, on, (SWITCH,), placeholder="off")
            self.entries[entry.key] = entry
            self.found[entry.key] = self._item(entry, written.get(entry.key))
        self.texts = {key: item.text for key, item in self.found.items() if item.text}

    def _item(self, entry: Entry, value: Any) -> Item:
        bounds = f", {entry.bounds}" * bool(entry.bounds) + f", {entry.unit}" * bool(entry.unit)
        about = f"{entry.doc} ({entry.values}{bounds}; a change {entry.change})"
        choices = tuple(map(str, entry.choices)) if entry.choices else ("true", "false") if entry.hint is bool else ()
        if entry.key == "project.family" and self.pipeline.families:
            choices = tuple(load(self.pipeline.families))
        item = Item(
            entry.key, entry.name, about, as_text(value), choices, placeholder=as_text(entry.default) or in_toml(entry.default)
        )
        item.lines = not choices and (str in _items(entry.hint) or "\n" in item.text or len(item.text) > 80)
        if choices and item.text and item.text not in choices:
            item.choices += (item.text,)
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            item.fixed, item.text = f"several, in {configuration.FILE}", ""
        return item

    def values(self, wanted: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """The values to write, and key -> what is wrong."""
        found: dict[str, Any] = {}
        bad: dict[str, str] = {}
        # A section that is switched off comes last.
        for key in sorted(wanted, key=lambda key: key in self.switches and not wanted[key]):
            item, text = self.found[key], wanted[key].strip()
            if item.fixed:
                bad[key] = f"{key}: {item.fixed}"
            elif key in self.switches:
                found[key] = {} if text else None
            else:
                try:
                    found[key] = as_value(self.entries[key], text)
                except ValueError as error:
                    bad[key] = f"{key}: {one_line(error)}"
        return found, bad

    def choose(self, form: Form, always: set[str]) -> None:
        """The groups that the form shows."""
        words = form.find.lower().split()
        for key, item in self.found.items():
            section = key if key in self.switches else key.rpartition(".")[0]
            basic = key in self.pipeline.basic or bool(item.text)
            text = f"{key} {item.name.replace('_', ' ')} {item.about}".lower()
            hit = all(word in text for word in words) if words else form.view == "all" or basic
            if hit or key in always:
                form.groups.setdefault(section, []).append(item)


def _flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by their dotted keys, those that are mappings too."""
    found: dict[str, Any] = {}
    for key, value in raw.items():
        found[f"{prefix}{key}"] = value
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
    return found


def _repeated(section: str, sections: Mapping[str, type]) -> bool:
    parser = configuration.Parser(sections, str)
    return any(f"{section}.".startswith(f"{each}.") for each in parser.repeated)


def _items(hint: Any) -> list[Any]:
    """The types of the items of a list, if the hint allows one."""
    return [typing.get_args(each)[0] for each in members(hint) if typing.get_origin(each) is tuple]


def as_text(value: Any) -> str:
    """What stands in the field. An empty field means that the file does not have the setting."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple) and value:
        if all(isinstance(each, str) and each.strip() == each and each and "\n" not in each for each in value):
            return "\n".join(value)
        if all(isinstance(each, int | float) for each in value):
            return ", ".join(map(str, value))
    return "" if value is None else _inline(value)


def _inline(value: Any) -> str:
    """As TOML, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return toml_string(value) if isinstance(value, str) else str(value)


def as_value(entry: Entry, text: str) -> Any:
    """For `edited`; None for an empty field. Raises ValueError for a list or section that cannot be read.

    Whether the value is allowed, the reader of project.toml says.
    """
    if not text:
        return None
    if entry.choices:
        return next((each for each in entry.choices if str(each) == text), text)
    kinds, items = members(entry.hint), _items(entry.hint)
    mapping = any(isinstance(kind := typing.get_origin(each), type) and issubclass(kind, Mapping) for each in kinds)
    if text in [word for each in kinds if typing.get_origin(each) is typing.Literal for word in typing.get_args(each)]:
        return text
    if (items and text[0] == "[") or (mapping and text[0] == "{"):
        return _toml(text)
    if items and (str not in kinds or "\n" in text):
        of_texts = items[0] is str or typing.get_origin(items[0]) is typing.Literal
        return [line.strip() for line in text.splitlines() if line.strip()] if of_texts else _toml(f"[{text}]")
    if str in kinds:
        return text
    try:
        return _toml(text)
    except ValueError:
        return text  # the reader says what it must be


def _toml(text: str) -> Any:
    """A number keeps the way it is written."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    if len(parse_toml(f"value = {text}", "the value")) > 1:
        raise ValueError("the value: one value is wanted")
    try:
        return tomlkit.parse(f"value = {text}\n")["value"]
    except TOMLKitError as error:
        raise ValueError(f"the value: not valid TOML: {error}") from None
