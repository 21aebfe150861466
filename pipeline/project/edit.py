"""Changes settings in project.toml, with its comments and its order, and tells before what a change would do."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.project import config as configuration
from pipeline.project import outlook, runs
from pipeline.project.project import Project
from pipeline.store.disk import atomic_write
from pipeline.store.lock import texts_lock
from stages.memory import Remedy, refusal
from stages.untrusted import parse_toml

if TYPE_CHECKING:
    from pipeline.project.config import Overrides
    from pipeline.project.outlook import Need

Changes = Mapping[str, Any]  # "train.steps" -> value; None: as if it were not written. A section, such as "train.ema": {} or None


class Changed(ValueError):  # noqa: N818  (another editor's doing)
    """project.toml is another than the text that a change was made from."""


def edited(text: str, changes: Changes) -> str:
    """Raises ValueError if `text` is no TOML, or written so that the change cannot be made in it."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    wanted = parse_toml(text, configuration.FILE)
    document = tomlkit.parse(text)
    made: list[Any] = []

    def table() -> Any:
        made.append(tomlkit.table())
        return made[-1]

    try:
        for key, value in changes.items():
            _put(wanted, key, copy.deepcopy(value), dict)
            _put(document, key, _item(value), table)
        for each in made:
            each.add(tomlkit.nl())
        found = tomlkit.dumps(document)
        if parse_toml(found, configuration.FILE) == wanted:
            return found
    except (TOMLKitError, ValueError, TypeError, AttributeError, LookupError):
        pass
    raise ValueError(f"{', '.join(changes)}: {configuration.FILE} is written so that this cannot be changed here; edit the file")


def _item(value: Any) -> Any:
    """Numbers, as they are written, come as items already."""
    import tomlkit

    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(value)
        return array.multiline(len(value) > 1 and sum(len(str(each)) for each in value) > 80)
    if type(value) is dict and value:
        inline = tomlkit.inline_table()
        inline.update(value)
        return inline
    return tomlkit.table().add(tomlkit.nl()) if value == {} else value


def _put(document: MutableMapping[str, Any], key: str, value: Any, new: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if section not in document:
            if value is None:
                return
            document[section] = new()
        document = document[section]
    if value is None:
        document.pop(name, None)
    elif not (value == {} and name in document):
        document[name] = value


def save(folder: Path, before: str, after: str, overrides: Overrides = ()) -> None:
    """Replace project.toml. Raises Changed if it is not `before` any more, ValueError if `after` would not open."""
    file = folder / configuration.FILE
    Project(folder, overrides, text=after)
    with texts_lock(folder):
        if configuration.read_text(file) != before:
            raise Changed(f"{configuration.FILE} was changed meanwhile")
        with atomic_write(file.resolve()) as temporary:
            temporary.write_text(after, encoding="utf-8", newline="")
            temporary.chmod(file.stat().st_mode & 0o777)


# What a change does


@dataclass(frozen=True)
class Refusal:
    line: str
    remedy: Remedy | None  # settings with which it fits, if there are any


@dataclass(frozen=True)
class Prospect:
    """What the next run would do."""

    needs: Mapping[str, Need]  # by stage
    budget: int  # bytes of memory to use
    refused: tuple[Refusal, ...]


def prospect(project: Project, known: dict[Any, Any] | None = None) -> Prospect:
    """`known`: see `outlook.needs`."""
    seen = outlook.outlook(project)
    needs = {each.stage_name: each for each in outlook.needs(project, seen, known=known)}
    refused = []
    for name, each in needs.items():
        if (found := each.forecast) and found.peak > seen.budget:
            remedy = found.find_remedy()
            fits = remedy if remedy and remedy.settings and remedy.peak <= seen.budget else None
            refused.append(Refusal(refusal(name, found.peak, seen.budget, remedy), fits))
    return Prospect(needs, seen.budget, tuple(refused))


def effects(project: Project, before: Prospect, after: Prospect) -> Iterator[str]:
    """Phrases such as "train: a new run of 600 steps"; none if nothing that is stored is computed again."""
    for name, then in before.needs.items():
        now = after.needs[name]
        if now.stops and now.note != then.note:
            yield f"{name}: {now.note}"
        elif (now.missing, now.to_do) != (then.missing, then.to_do) or _another(name, before, after):
            trains = runs.trains(project.stage(name).writes)
            if now.missing:
                yield f"{name}: {'a new run of ' if now.note == outlook.ANEW else ''}{now.to_do}"
            elif then.missing and now.missing is not None:
                yield f"{name}: nothing to do"
            elif _another(name, before, after):
                yield f"{name}: {'an earlier run' if trains else 'rows that are there already'}"


def _another(name: str, before: Prospect, after: Prospect) -> bool:
    then, now = before.needs[name].table, after.needs[name].table
    return bool(then and now and then != now)
