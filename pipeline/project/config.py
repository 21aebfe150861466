"""Reads project.toml: [project], and one section per stage, each a frozen dataclass defined beside the stage that uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import stages
from pipeline.project.parse import Parser, nearest
from pipeline.project.synonyms import name_here
from schemas.renames import PIPELINES
from stages.settings import check_bounds, follow, runtime, selects
from stages.untrusted import TOML_BYTES, parse_toml, read_utf8

FILE = "project.toml"
Overrides = Mapping[str, Any] | Iterable[str]


@dataclasses.dataclass(frozen=True)
class ProjectConfig:
    """The settings of the section [project] in project.toml. `family` is the name of the model family; "" takes the
    pipeline's first. `weights` is a folder or a hub id; "" takes the family's own. `components` maps components that
    lie elsewhere to a folder, a file or a hub id. `pipeline` is the name of the pipeline, or of a module that defines
    one. Finished rows are saved every `commit_seconds` seconds. `workers` says where rows are computed: "local", "ray"
    or "ray://HOST:PORT". Raises ValueError if a setting is out of range.

    The other settings are for workers on a Ray cluster. `worker_count` is the largest number of workers; 0 means as
    many as the cluster has room for. `worker_inputs` says how workers read their input files. "shared" means at the
    same path, "shipped" means that the files are sent to them. `unit_rows` is the number of rows that a worker computes
    at a time.
    """

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
        """Raise ValueError if the setting `components` names a component that is not in `known`, the names of the components
        of the model family.
        """
        names = list(known)
        for name in self.components or {}:
            if name not in names:
                raise ValueError(f"project.components must name any of {', '.join(names)}, got {name!r}{nearest(name, names)}")

    def place(self, component: str) -> str:
        """Return the setting that says where the weights of a model component lie. `component` is the component's name,
        such as "transformer". The result is the component's entry in the setting `components`. Without an entry, the
        result is the setting `weights`. The returned text is a folder, a file or a hub id. If the returned text is "",
        the model family's own weights are used.
        """
        return (self.components or {}).get(component, self.weights)

    def divides(self, divisible: bool, rows: int) -> bool:
        """Return True if workers on a Ray cluster compute the rows of a stage, and False if this process does. `rows`
        is the number of rows to compute. `divisible` is True if they may be divided among several processes. If the
        setting `workers` is "local", the result is False. Otherwise, it is True if `divisible` is True and `rows` is
        larger than the setting `unit_rows`.
        """
        return self.workers != "local" and divisible and rows > self.unit_rows


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a project. `project` is the section [project]. `sections` maps the name of a stage to its config
    dataclass.
    """

    project: ProjectConfig
    sections: Mapping[str, Any]


def load(file: Path, overrides: Overrides = ()) -> Config:
    """Read the project file `file`, replace settings by `overrides`, and return all settings. `overrides` is a mapping such as
    {"train.steps": 200}, or a sequence of texts such as "train.steps=200". Raises ValueError if the file cannot be read, a
    section or setting is unknown, or a value is wrong. The message is one line. It names the setting, the remedy, and where it
    was set.
    """
    raw = read(file)
    origins = _apply(raw, overrides)

    def place(key: str) -> str:
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
    return Config(dataclasses.replace(parsed.pop("project"), pipeline=chosen), follow(parsed))


def read(file: Path) -> dict[str, Any]:
    """Parse the project file `file` and return its sections: name -> settings by key. The settings are not checked. Raises
    ValueError if the file is missing, cannot be read or is not TOML.
    """
    if not file.exists():
        raise ValueError(f"{file.parent}: no {FILE} here; `latentmill init --help` explains how to make one")
    return parse_toml(read_utf8(file, TOML_BYTES), str(file))


def pipeline_name(raw: Mapping[str, Any]) -> str:
    """Return the name of a project's pipeline. `raw` is the parsed project file (see `read`). If its section [project] names no
    pipeline, the default is returned. A name from an earlier version is replaced by the present name.
    """
    head = raw.get("project")
    name = head.get("pipeline") if isinstance(head, dict) else None
    if not isinstance(name, str):
        name = ProjectConfig.pipeline  # the parser refuses a value of another type later
    return PIPELINES.get(name, name)


def _apply(raw: dict[str, Any], overrides: Overrides) -> dict[str, str]:
    """Replace settings in `raw`, the parsed project file, by `overrides`. Return a dict: replaced key -> phrase for error
    messages, such as "train.steps" -> "--set train.steps=0". Raises ValueError if an override is not of the form
    section.key=value.
    """
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
    """Return a hint for the error message about a setting whose section is missing. For "lr" it is
    "; did you mean train.lr?". If no section has such a setting, it is "". `raw` is the parsed project file. `names` is
    the setting's key, split at the dots.
    """
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
