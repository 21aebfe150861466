"""project.toml: one section per stage, each a frozen dataclass that stands beside the code that reads it.

Unknown keys, wrong types and values that a section refuses are one line: where, what, and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import stages
from schemas.renames import PIPELINES
from stages.settings import runtime, selects

FILE = "project.toml"


@dataclasses.dataclass(frozen=True)
class ProjectConfig:
    """[project]: what the run is about."""

    family: str = selects("klein-base-4b", "the model family; `latentmill families` lists them")
    weights: str = selects("", "a folder or a hub id; empty: the family's own")
    pipeline: str = selects("text_to_image", "which chain of stages")
    commit_seconds: float = runtime(30.0, "rows are committed this often, seconds: what a kill can cost")

    def __post_init__(self) -> None:
        if not self.commit_seconds >= 0:
            raise ValueError(f"commit_seconds: {self.commit_seconds} is wrong; 0 (after every batch) or more is wanted")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole project.toml: [project], and one section per stage by its stage_name."""

    project: ProjectConfig
    sections: Mapping[str, Any]


def load(file: Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Config:
    """Read a project file, then apply `section.key=value` overrides. ValueError in one line for a user's mistake."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # some editors put a mark before the text
    except FileNotFoundError:
        raise ValueError(f"{file.parent}: no {FILE} here; `latentmill init FOLDER --images IMAGES` makes one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid TOML: {error}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    for text in (
        overrides if not isinstance(overrides, Mapping) else [f"{key}={_toml(value)}" for key, value in overrides.items()]
    ):
        _override(raw, text)
    head = raw.get("project")
    name = head.get("pipeline") if isinstance(head, dict) else None
    if not isinstance(name, str):
        name = ProjectConfig.pipeline  # another type is refused below, with all others
    try:
        pipeline = stages.pipeline(PIPELINES.get(name, name))
    except ValueError as error:
        raise ValueError(f"{file.name} [project] pipeline: {error}{near(name, stages.PIPELINES)}") from None
    kinds = {"project": ProjectConfig, **{stage: pipeline.stage(stage).config for stage in pipeline.stages}}
    for key in raw:
        if key not in kinds:
            raise ValueError(f"{file.name} [{key}]: no such section{near(key, kinds)}; there are {', '.join(kinds)}")
    parsed = {key: section(kind, raw.get(key, {}), f"{file.name} [{key}]") for key, kind in kinds.items()}
    return Config(project=dataclasses.replace(parsed.pop("project"), pipeline=PIPELINES.get(name, name)), sections=parsed)


def section(kind: type, raw: Any, where: str) -> Any:
    """One section's values as its dataclass."""
    name = where.rpartition("[")[2].rstrip("]")
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: {raw!r} is a value; this is a section of its own, with lines of its own below [{name}]")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    for key in raw:
        if key not in names:
            raise ValueError(
                f"{where} {key}: no such key{_elsewhere(key, name, hints) or near(key, names)}; there are {', '.join(names)}"
            )
    values = {key: value_of(hints[key], value, f"{where} {key}") for key, value in raw.items()}
    try:
        return kind(**values)
    except ValueError as error:
        own = f"{name}.", f"{name.rpartition('.')[2]}: "
        raise ValueError(f"{where} {str(error).removeprefix(own[0]).removeprefix(own[1])}") from None


def _elsewhere(key: str, name: str, hints: Mapping[str, Any]) -> str:
    """`; it belongs into [train.schedule]` where a section within this one has the key, else ''."""
    for inner, hint in hints.items():
        for kind in typing.get_args(hint) or (hint,):
            if dataclasses.is_dataclass(kind) and key in [f.name for f in dataclasses.fields(kind)]:
                return f"; it belongs into [{name}.{inner}]"
    return ""


def value_of(kind: Any, value: Any, where: str) -> Any:
    """A TOML value as the annotated type: scalars, tuples, optional values, nested sections."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        return _first_that_fits(kinds, value, where)
    if dataclasses.is_dataclass(kind):
        head, _, name = where.rpartition("] ")
        return section(typing.cast(type, kind), value, f"{head}.{name}]")
    if typing.get_origin(kind) is tuple:
        return _tuple(typing.get_args(kind), value, where)
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise ValueError(f"{where}: {value!r} is none of {', '.join(map(repr, typing.get_args(kind)))}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is no number to go by; a finite one is wanted")
    if kind is Path and isinstance(value, str):
        return Path(value)
    if typing.get_origin(kind) in (dict, Mapping) or kind is dict:
        return _mapping(typing.get_args(kind), value, where)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where}: {value!r} is {_kind_name(type(value))}; {_kind_name(kind)} is wanted")
    return value


def _first_that_fits(kinds: list[Any], value: Any, where: str) -> Any:
    reasons = []
    for kind in kinds:
        try:
            return value_of(kind, value, where)
        except ValueError as error:
            reasons.append(error)
    raise (
        reasons[-1]
        if len(reasons) == 1
        else ValueError(f"{where}: {value!r} is {_kind_name(type(value))}; wanted is {' or '.join(_kind_name(k) for k in kinds)}")
    )


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: {value!r} is {_kind_name(type(value))}; a list is wanted, like [{value!r}]")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(value_of(kinds[0], item, where) for item in value)
    if len(value) != len(kinds):
        raise ValueError(f"{where}: {len(value)} values; {len(kinds)} are wanted")
    return tuple(value_of(kind, item, where) for kind, item in zip(kinds, value, strict=True))


def _mapping(kinds: tuple[Any, ...], value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} is {_kind_name(type(value))}; a table of names and values is wanted")
    return {k: value_of(kinds[1], v, f"{where}.{k}") if len(kinds) == 2 else v for k, v in value.items()}


def _kind_name(kind: Any) -> str:
    words: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        list: "a list",
        dict: "a section",
    }
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return words.get(kind) or str(getattr(kind, "__name__", kind))


def near(word: str, words: Iterable[str]) -> str:
    """`; did you mean x?` where something like it exists, else ''."""
    found = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _override(raw: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    keys = [part.strip() for part in name.split(".")]
    if not equals or len(keys) < 2 or not all(keys):
        raise ValueError(f"--set {text}: wanted is section.key=value, like train.steps=500")
    for key in keys[:-1]:
        raw = raw.setdefault(key, {})
        if not isinstance(raw, dict):
            raise ValueError(f"--set {text}: {key} is a value, not a section")
    raw[keys[-1]] = _toml_value(value.strip())


def _toml(value: Any) -> str:
    """A Python value as `section.key=value` has it: JSON is TOML for numbers, texts, booleans and lists of them."""
    return value if isinstance(value, str) else json.dumps(value)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string: --set project.family=tiny
