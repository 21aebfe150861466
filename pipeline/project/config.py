"""Reads project.toml: [project], and one section per stage, each a frozen dataclass defined beside the stage that uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import stages
from pipeline.project.parse import Parser, nearest
from pipeline.project.synonyms import name_here
from stages.settings import check_bounds, follow, runtime, selects
from stages.untrusted import TOML_BYTES, parse_toml, read_utf8

FILE = "project.toml"
Overrides = Mapping[str, Any] | Iterable[str]


@dataclasses.dataclass(frozen=True)
class ProjectConfig:
    family: str = selects("", "the model family; `latentmill families` lists them; empty: the pipeline's first")
    weights: str = selects("", "a folder or a hub id; empty: the family's own")
    components: Mapping[str, str] | None = selects(
        None, "components that lie elsewhere than `weights`: name -> a folder, a file or a hub id"
    )
    pipeline: str = selects("text_to_image", "the pipeline: its name, or the dotted name of a module with a PIPELINE")
    commit_seconds: float = runtime(
        30.0, "rows are committed this often, seconds: a kill loses no more than that", bounds=(0.0, 86400.0)
    )

    workers: str = runtime(
        "local",
        "where pending rows are computed: local; ray: a Ray cluster of this machine, started if there is none; "
        "ray://HOST:10001: another one",
    )
    worker_count: int = runtime(
        0, "most processes on the Ray cluster; 0: as many as it has room for, one for each GPU or CPU", bounds=(0, 4096)
    )
    worker_inputs: Literal["shared", "shipped"] = runtime(
        "shared",
        "how the workers on the Ray cluster read images, tables and weights; shared: at the same path on every machine; "
        "shipped: sent to them, into a temporary folder of each worker",
    )
    unit_rows: int = runtime(
        32, "rows that a worker on the Ray cluster computes at a time: what its death can cost", bounds=(1, 100_000)
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.workers not in ("local", "ray") and not self.workers.startswith("ray://"):
            raise ValueError(f'workers must be "local", "ray" or "ray://HOST:PORT", got "{self.workers}"')

    def check_components(self, known: Iterable[str]) -> None:
        """Raises ValueError if the setting `components` names one that is not in `known`."""
        names = list(known)
        for name in self.components or {}:
            if name not in names:
                raise ValueError(f"project.components must name any of {', '.join(names)}, got {name!r}{nearest(name, names)}")

    def place(self, component: str) -> str:
        """Where the component's weights lie: a folder, a file, a hub id, or "" for the family's own."""
        return (self.components or {}).get(component, self.weights)

    def divides(self, divisible: bool, rows: int) -> bool:
        """Whether workers on a Ray cluster compute these rows, not this process."""
        return self.workers != "local" and divisible and rows > self.unit_rows


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a project."""

    project: ProjectConfig  # the section [project]
    sections: Mapping[str, Any]  # stage -> its config dataclass
    given: frozenset[str] = frozenset()  # sections that the file or an override has


def load(file: Path, overrides: Overrides = ()) -> Config:
    """Read and check a project file. A mistake is a ValueError of one line: the setting, what would be right, where it was set.

    `overrides`: {"train.steps": 200} or texts such as "train.steps=200".
    """
    raw = read(file)
    origins = _apply(raw, overrides)

    def place(key: str) -> str:
        # The last override of the key, of a section around it or of a key inside it.
        given = [origin for other, origin in origins.items() if f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.")]
        return given[-1] if given else f"{file.name} [{key.rpartition('.')[0] or key}]"

    chosen = pipeline_name(raw)
    try:
        pipeline = stages.pipeline(chosen)
    except ValueError as error:
        near = nearest(chosen, stages.PIPELINES)
        raise ValueError(f"project.pipeline: {error}{near} ({place('project.pipeline')})") from None
    sections = {"project": ProjectConfig, **{name: pipeline.stage(name).config for name in pipeline.stages}}
    for name in raw:
        if name not in sections:
            near = nearest(name, sections) or f"; there are {', '.join(sections)}"
            raise ValueError(f"[{name}] is not a section{near} ({place(name)})")
    parser = Parser(sections, place)
    parsed = {name: parser.section(name, raw.get(name, {})) for name in sections}
    return Config(dataclasses.replace(parsed.pop("project"), pipeline=chosen), follow(parsed), frozenset(raw))


def read(file: Path) -> dict[str, Any]:
    """The sections of a project file, unchecked. Raises ValueError."""
    if not file.exists():
        raise ValueError(f"{file.parent}: no {FILE} here; `latentmill init --help` explains how to make one")
    return parse_toml(read_utf8(file, TOML_BYTES), str(file))


def pipeline_name(raw: Mapping[str, Any]) -> str:
    head = raw.get("project")
    name = head.get("pipeline") if isinstance(head, dict) else None
    return name if isinstance(name, str) else ProjectConfig.pipeline  # the parser refuses a value of another type later


def _apply(raw: dict[str, Any], overrides: Overrides) -> dict[str, str]:
    """Put `overrides` into `raw`. Returns key -> where it was set, for messages."""
    origins = {}
    for override in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if isinstance(override, str):
            key, equals, text = (part.strip() for part in override.partition("="))
            value, origin = _toml_value(text), f"--set {override}"
            syntax = "section.key=value, such as --set train.steps=500"
        else:
            key, value = override
            equals, origin, syntax = "=", f"override {key!r}: {value!r}", "'section.key', such as 'train.steps'"
        names = [name.strip() for name in key.split(".")]
        if not equals or len(names) < 2 or not all(names):
            raise ValueError(f"{origin}: an override must be {syntax}{_whole_name(raw, names)}")
        _set(raw, names, value, origin)
        origins[".".join(names)] = origin
    return origins


def _whole_name(raw: Mapping[str, Any], names: list[str]) -> str:
    """The hint for a setting without its section, such as "; did you mean train.lr?", or empty."""
    try:
        pipeline = stages.pipeline(pipeline_name(raw))
    except ValueError:
        return ""
    parser = Parser({name: pipeline.stage(name).config for name in pipeline.stages}, str)
    for key in (names[0], name_here(names[0])) if len(names) == 1 else ():
        if holders := [holder for holder in parser.holders(key) if not key.startswith(holder)]:
            return f"; did you mean {f'train.{key}' if 'train' in holders else f'{holders[0]}.{key}'}?"
    return ""


def _set(raw: dict[str, Any], names: list[str], value: Any, origin: str) -> None:
    for name in names[:-1]:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{origin}: {name} is a setting, not a section")
    raw[names[-1]] = value


def _toml_value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}", "--set")["value"]
    except ValueError:
        return text  # a bare word is a string: --set project.family=tiny
